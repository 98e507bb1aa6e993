"""The faults of a campaign's seed: at random times, and in ambush at chosen steps of a hand-off.

Made by the profile for one run. It strikes through the simulator's verbs only, counts what it
did and what that struck, and mends everything before the calm begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from domicile.core.ids import ShardKey
from domicile.errors import DomicileError
from domicile.testing.checkers.reading import GRACE_S
from domicile.testing.history import Event
from domicile.testing.sim import SimNode
from domicile.testing.standard import (
    LEAST_FAULTS,
    NODES,
    SETTINGS,
    STEPS,
    leading,
    seen,
    situation,
    waiting,
)
from domicile.testing.workload import Ledger

if TYPE_CHECKING:
    from domicile.testing.profile import Profile


class Mischief:
    """Disturbs one run of a profile."""

    def __init__(self, load: Profile) -> None:
        self._load = load
        self.sim = load.sim
        self.hot = load.hot
        self.tally = load.tally
        self._ambush: tuple[str, ShardKey, Callable[[Event], None]] | None = None
        self._faulty = True
        self._sleepers: dict[int, None] = {}
        self.sim.history.subscribe(self._on_event, "commit", *STEPS)

    def begin_early(self, random: Random) -> None:
        """A node crashes while the cluster starts, before its shards have homes (C8)."""
        self._later(random.uniform(0.05, 0.55), lambda: self._crash(random))

    async def harm(self, until: float) -> None:
        """Faults until the calm begins; then everything is mended."""
        sim, random = self.sim, self.sim.world.stream("faults")
        kinds = list(self._kinds())
        while sim.world.now < until - 4:
            await asyncio.sleep(random.uniform(0.8, 3.6))
            strike = random.choice(kinds)
            late = sim.world.now > until - 12 and sum(self.tally.faults.values()) < LEAST_FAULTS
            if random.random() < 0.6 and not late:
                await self._lie_in_wait(random, strike)
            else:
                strike(random)
        while sum(self.tally.faults.values()) < LEAST_FAULTS:
            self._cut(random)
        self._ambush = None
        self._faulty = False
        await asyncio.sleep(max(0.0, until - sim.world.now))
        for index in list(self._sleepers):
            self._wake(index)
        for process in sim.nodes:
            if not process.up:
                sim.start(process.index)
            elif process.store is not None and process.journal is not None:
                process.store.lost_reply = process.journal.lost_reply = 0.0
                process.journal.lost_request = 0.0
                process.store.late_request = process.journal.late_request = 0.0
                process.store.slow = 1.0
            sim.network.slow(process.name, 0.0)
        sim.heal()
        sim.history.event("quiet")
        if random.random() < 0.7:
            return
        # H14: a planned stop is no fault, so nobody may notice it.
        await asyncio.sleep(GRACE_S + random.uniform(0.5, 3.0))
        leaver = random.choice(sim.nodes)
        if leaver.stopping is not None and leaver.loop is not None:
            leaver.loop.post(leaver.stopping.set)
            self._later(random.uniform(4.0, 8.0), partial(self._restart, leaver.index))

    def _kinds(self) -> tuple[Callable[[Random], None], ...]:
        return (
            self._crash, self._crash, self._freeze, self._freeze, self._cut, self._cut, self._cut,
            self._partition, self._block, self._outage, self._watch, self._slow, self._lose_replies,
            self._stop, self._leader, self._stall, self._stall, self._late,
            self._late,
        )  # fmt: skip

    async def _lie_in_wait(self, random: Random, strike: Callable[[Random], None]) -> None:
        """Move a hot shard, and strike when it reaches a chosen step of its hand-off."""

        def spring(event: Event) -> None:
            struck = event.fields.get("inc")
            if strike == self._freeze and struck is not None and random.random() < 0.7:
                # In the middle of its own turn, with work at hand: the guards must see it (L3).
                victim = next((n for n in self.sim.nodes if n.incarnation == struck), None)
                self._freeze(random, victim)
            else:
                delay_s = random.choice((0.0, random.uniform(0, 0.003)))
                self._later(delay_s, lambda: strike(random) if self._faulty else None)

        shard = random.choice(list(self.hot))
        self._ambush = (random.choice(STEPS), shard, spring)
        await self._load.trap(random, shard)

    def _on_event(self, event: Event) -> None:
        if self._ambush is None:
            return
        step, shard, spring = self._ambush
        if event.kind == "commit":
            entry = self.sim.entry(shard) if step in ("moving", "serving") else None
            hit = entry is not None and entry.state == step and entry.epoch > 1
        else:
            hit = event.kind == step and event.fields.get("shard", shard.shard) == shard.shard
        if hit:
            self._ambush = None
            spring(event)

    def _note(self, kind: str) -> None:
        """Count a fault, and what it struck."""
        self.tally.faults[kind] += 1
        for step in situation(self.sim, self.hot):
            self.tally.struck[step] += 1
            if step == "a hand-off with mail in flight":
                self.tally.mid_move = True

    def _victim(self, random: Random) -> SimNode | None:
        """A running node; often one that takes part in a move."""
        up = [node for node in self.sim.nodes if node.up and node.index not in self._sleepers]
        if len(up) <= 2:
            return None
        involved: list[SimNode] = []
        for shard in self.hot:
            entry = self.sim.entry(shard)
            if entry.state == "moving":
                involved += [node for node in up if node.incarnation in (entry.owner, entry.to)]
        return random.choice(involved if involved and random.random() < 0.7 else up)

    def _late(self, random: Random) -> None:
        """Answers to a flush that come after the sender gave up on it, and flushed again (H5)."""
        owner, sender, shard = self._pair(random)
        if owner == sender or not self._faulty:
            return
        self._note("late answers")
        self._load.inside(-1, lambda _: self._hold_back(random, owner, sender, shard))

    async def _hold_back(self, random: Random, owner: int, sender: int, shard: ShardKey) -> None:
        room = random.choice(self.hot[shard])
        elsewhere = random.choice([node for node in range(NODES) if node != owner])
        row = partial(self._load.row, id=room, pause=0.0, count=3)
        self._load.inside(sender, row)
        await asyncio.sleep(random.uniform(0.005, 0.02))
        self.sim.block(*random.choice(((owner, sender), (sender, owner))))
        await self.sim.wish(shard, elsewhere)
        await asyncio.sleep(random.uniform(0.02, 0.2))
        await self.sim.wish(shard, None)
        await asyncio.sleep(SETTINGS.hold_timeout_s + random.uniform(0.0, 0.3))
        self._load.inside(sender, row)
        await asyncio.sleep(random.uniform(0.0, 0.05))
        await self.sim.wish(shard, elsewhere)
        await asyncio.sleep(random.uniform(0.05, 0.3))
        self._load.inside(sender, row)
        await asyncio.sleep(random.uniform(0.0, 0.2))
        self.sim.heal()

    def _pair(self, random: Random) -> tuple[int, int, ShardKey]:
        """An owner, a sender (-1: the client) and their shard; often one that moves with mail."""
        pairs: list[tuple[int, int, ShardKey]] = []
        for shard in self.hot:
            entry = self.sim.entry(shard)
            owner = next((n.index for n in self.sim.nodes if n.incarnation == entry.owner), None)
            if entry.state == "moving" and owner is not None:
                senders = [index for index in waiting(self.sim, shard) if index != owner]
                pairs += [(owner, index, shard) for index in senders]
        if pairs and random.random() < 0.8:
            return random.choice(pairs)
        shard = random.choice(list(self.hot))
        entry = self.sim.entry(shard)
        one, other = random.sample(range(NODES), 2)
        for process in self.sim.nodes:
            if process.incarnation == entry.owner and process.index != other:
                one = process.index
        return one, random.choice((-1, other)), shard

    def _crash(self, random: Random) -> None:
        victim = self._victim(random)
        if victim is not None:
            self._note("crash")
            self.sim.crash(victim.index)
            self._later(random.uniform(0.5, 9.0), lambda: self._restart(victim.index))

    def _freeze(self, random: Random, victim: SimNode | None = None) -> None:
        if victim is None or not victim.up or victim.index in self._sleepers:
            victim = self._victim(random)
        if victim is not None:
            long = random.random() < 0.6
            self._note("freeze past the lease" if long else "freeze")
            self.sim.freeze(victim.index)
            self._sleepers[victim.index] = None
            pause_s = random.uniform(5.0, 9.0) if long else random.uniform(0.05, 4.5)
            self._later(pause_s, partial(self._wake, victim.index))

    def _cut(self, random: Random) -> None:
        self._note("cut")
        one, other, _ = self._pair(random)
        if other < 0:
            self.sim.cut_client(one)
        else:
            self.sim.cut(one, other)

    def _partition(self, random: Random) -> None:
        self._note("partition")
        everyone = list(range(NODES))
        random.shuffle(everyone)
        size = random.randint(1, 2)
        self.sim.partition(everyone[:size], everyone[size:])
        self._later(random.uniform(0.5, 8.0), self.sim.heal)

    def _block(self, random: Random) -> None:
        self._note("block")
        owner, sender, _ = self._pair(random)
        sender = random.choice([n for n in range(NODES) if n != owner]) if sender < 0 else sender
        one, other = random.choice(((owner, sender), (sender, owner)))
        self.sim.block(one, other)
        self._later(random.uniform(*random.choice(((1.2, 4.5), (0.5, 8.0)))), self.sim.heal)

    def _outage(self, random: Random) -> None:
        victim = self._victim(random)
        if victim is not None:
            self._note("outage")
            self.sim.cut_store(victim.index)
            self._later(random.uniform(0.5, 9.0), self.sim.heal)

    def _watch(self, random: Random) -> None:
        self._note("watch")
        for process in self.sim.nodes:
            if process.store is not None and random.random() < 0.6:
                process.store.watch_delay_s = (0.0, random.uniform(0.0, 0.3))
                if random.random() < 0.5:
                    process.store.break_watch()

    def _slow(self, random: Random) -> None:
        self._note("slow")
        process = random.choice(self.sim.nodes)
        self.sim.network.slow(process.name, random.uniform(0.005, 0.1))
        if process.store is not None:
            process.store.slow = random.uniform(1, 50)

    def _lose_replies(self, random: Random) -> None:
        self._note("lost replies")
        self.sim.note_fault("lost replies")
        for process in self.sim.nodes:
            if process.store is not None and process.journal is not None:
                process.store.lost_reply = random.choice((0.0, 0.1, 0.3))
                process.journal.lost_reply = random.choice((0.0, 0.1, 0.3))
                process.store.late_request = random.choice((0.0, 0.1, 0.3))
                process.journal.late_request = random.choice((0.0, 0.1, 0.3))
                process.journal.lost_request = random.choice((0.0, 0.1, 0.3))

    def _stop(self, random: Random) -> None:
        victim = self._victim(random)
        if victim is not None and victim.stopping is not None and victim.loop is not None:
            self._note("stop")
            self.sim.note_fault("stop", victim)
            victim.loop.post(victim.stopping.set)
            self._later(random.uniform(4.0, 12.0), lambda: self._restart(victim.index))

    def _stall(self, random: Random) -> None:
        """A journal write that outlives its writer: it commits, or not, as its home is lost."""
        shard = random.choice(list(self.hot))
        id = random.choice(self.hot[shard])
        ledger = self.sim.shard(Ledger, id)

        def began() -> None:
            entry = self.sim.entry(ledger)
            for process in self.sim.nodes:
                alive = process.up and process.index not in self._sleepers
                if alive and process.incarnation == entry.owner and self._faulty:
                    self._note("stalled write")
                    self.sim.crash(process.index)
                    self._later(random.uniform(8.0, 12.0), partial(self._restart, process.index))

        self.sim.servers.stall(random.uniform(4.5, 8.0), began)
        for _ in range(2):
            self.sim.loop.post(partial(self._write, id))

    def _write(self, id: str) -> None:
        task = asyncio.get_running_loop().create_task(self._write_twice(id))
        task.add_done_callback(seen)

    async def _write_twice(self, id: str) -> None:
        for _ in range(2):
            with suppress(DomicileError):
                await self._load.note_down(self.sim, id, "", refused=False)

    def _leader(self, random: Random) -> None:
        """The same for whoever coordinates now."""
        for process in self.sim.nodes:
            if leading(process):
                if process.index in self._sleepers:
                    return
                self._note("leader frozen")
                self.sim.freeze(process.index)
                self._sleepers[process.index] = None
                # Mostly about as long as its leader lease, while its node lease may just hold.
                pause_s = random.uniform(*random.choice(((4.2, 5.2), (4.2, 5.2), (0.1, 9.0))))
                self._later(pause_s, partial(self._wake, process.index))
                return

    def _later(self, delay_s: float, what: Callable[[], object]) -> None:
        self.sim.world.call_at(self.sim.world.now + delay_s, what)

    def _wake(self, index: int) -> None:
        if index in self._sleepers:
            del self._sleepers[index]
            if self.sim.nodes[index].up:
                self.sim.thaw(index)

    def _restart(self, index: int) -> None:
        if not self.sim.nodes[index].up:
            self.sim.start(index)
