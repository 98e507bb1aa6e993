"""One seed of a campaign: a cluster under load, moves and faults, then a calm while, then judged.

Moves are wishes for hot shards, half of them withdrawn at once, with bursts of mail around them;
faults strike at random times and, in ambush, at chosen steps of a hand-off. After `quiet` no
fault is active, so from then on everything must succeed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from domicile.config import Settings
from domicile.core.handoff import Phase
from domicile.core.ids import ShardKey
from domicile.entity.client import Client
from domicile.errors import DomicileError
from domicile.life import Life
from domicile.testing.checkers.reading import GRACE_S
from domicile.testing.history import Event
from domicile.testing.sim import Sim, SimNode
from domicile.testing.workload import ENTITIES, Ledger, Room, rooms_by_shard

NODES = 5
LEAST_FAULTS = 5
LEAST_MESSAGES = 1_000
SHARDS = 64
ROOMS = 4
FAULTY_S = 27.0
CALM_S = 33.0
SETTINGS = Settings(shards=SHARDS, window=64, buffer=200, mailbox=16, chain=3, hold_timeout_s=1.0)
"""Tight limits, and a hold timeout below the link timeout, so that both are met."""

STEPS = ("moving", "draining", "released", "serving", "open", "leading", "told")
"""Steps of a hand-off that an ambush can wait for, by the event that shows them."""


@dataclass
class Tally:
    """What one seed went through."""

    messages: int = 0
    faults: Counter[str] = field(default_factory=lambda: Counter[str]())
    struck: Counter[str] = field(default_factory=lambda: Counter[str]())
    moves: int = 0
    mid_move: bool = False
    digest: str = ""


class Profile:
    """Drives one simulated cluster."""

    def __init__(self, seed: int) -> None:
        self.sim = Sim(seed, entities=ENTITIES, nodes=NODES, settings=SETTINGS)
        self.random = self.sim.world.stream("profile")
        self.tally = Tally()
        self.hot = rooms_by_shard(self.sim.world.stream("rooms"), SHARDS, hot=6, each=ROOMS)
        # Rooms ask upwards in this order only: else two of them could wait for each other.
        self.rooms = [ids[rank] for rank in range(ROOMS) for ids in self.hot.values()]
        self._ambush: tuple[str, ShardKey, Callable[[], None]] | None = None
        self._faulty = True
        self._values = 0
        self._sleepers: dict[int, None] = {}
        self.sim.history.subscribe(self._on_event)
        weather = self.sim.world.stream("weather")
        self.sim.network.jitter_s = weather.choice((0.0, 0.0, 0.005, 0.02))
        self.sim.network.skew_s = weather.choice((0.0, 0.03, 0.08))
        self._watch_delay_s = weather.choice((0.0, 0.0, 0.01, 0.05))

    async def run(self) -> None:
        """The whole minute."""
        sim = self.sim
        start = sim.world.now
        for process in sim.nodes:
            assert process.store is not None
            process.store.watch_delay_s = (0.0, self._watch_delay_s * process.index / NODES)
        async with asyncio.TaskGroup() as group:
            for sender in range(-1, NODES):
                group.create_task(self._talk(sender, start + FAULTY_S + CALM_S - 3))
            group.create_task(self._move(start + FAULTY_S + CALM_S - 4))
            group.create_task(self._harm(start + FAULTY_S))
        await asyncio.sleep(max(0.0, start + FAULTY_S + CALM_S - sim.world.now))
        for id in self.rooms:
            values = [event.what for event in sim.events(Ledger, id)]
            sim.history.event("kept", type="ledger", id=id, values=values)

    def finish(self) -> Tally:
        """Count what the history shows."""
        history = self.sim.history
        self.tally.digest = history.digest()
        released = {
            (event.fields["role"], event.fields["shard"], event.fields["epoch"])
            for event in history.of("released")
        }
        self.tally.moves = sum(
            (event.fields["role"], event.fields["shard"], event.fields["epoch"] - 1) in released
            for event in history.of("open")
        )
        return self.tally

    # mail

    async def _talk(self, sender: int, until: float) -> None:
        """Bursts from one process: -1 is the test's client, the others are nodes."""
        random = self.sim.world.stream(f"talk {sender}")
        while True:
            await asyncio.sleep(random.uniform(1, 30))
            if self.sim.world.now >= until:
                return
            self._burst(sender, random, random.sample(random.choice(list(self.hot.values())), 2))

    def _burst(self, sender: int, random: Random, ids: list[str]) -> None:
        """Several messages in a row, from one process to one or two rooms."""
        count = random.randint(5, 8)
        self._in(sender, lambda client: self._send(client, random, ids, count))

    async def _send(self, client: Client, random: Random, ids: list[str], count: int) -> None:
        """One burst, written one after the other without waiting in between."""
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self._one(client, random, random.choice(ids)))
                if random.random() < 0.3:
                    await asyncio.sleep(random.uniform(0, 0.004))

    async def _one(self, client: Client, random: Random, id: str) -> None:
        room = client.ref(Room, id)
        dice = random.random()
        try:
            if dice < 0.35:
                await room.tell(Room.note, 1)
            elif dice < 0.6:
                await room.ask(Room.note, 2)
            elif dice < 0.7:
                await room.ask(Room.think, random.uniform(0.001, 0.03))
            elif dice < 0.76:
                await room.ask(Room.peek, random.uniform(0.001, 0.01))
            elif dice < 0.92:
                path = self._path(random, id)
                await room.ask(Room.relay, random.uniform(0.001, 0.02), path)
            else:
                key = f"k{random.randrange(6)}" if random.random() < 0.4 else ""
                await self._note_down(client, id, key, refused=random.random() < 0.05)
        except DomicileError:
            pass

    async def _note_down(self, client: Client, id: str, key: str, *, refused: bool) -> None:
        """A value that no other ask has, so that its place in the journal can be told."""
        self._values += 1
        value = -1 if refused else self._values
        ledger = client.ref(Ledger, id)
        seq = await (ledger.options(key=key) if key else ledger).ask(Ledger.note, value)
        self.sim.history.event("acked", type="ledger", id=id, seq=seq, value=None if key else value)

    def _path(self, random: Random, start: str) -> list[str]:
        above = range(self.rooms.index(start) + 1, len(self.rooms))
        chosen = sorted(random.sample(above, min(len(above), random.randint(1, 4))))
        path = [self.rooms[index] for index in chosen]
        # N2: a path that leads back is refused at its last step instead of waiting for itself.
        return [*path, start] if random.random() < 0.1 else path

    # moves

    async def _move(self, until: float) -> None:
        """Wishes, half of them withdrawn while the move is under way, with mail around them."""
        random = self.sim.world.stream("moves")
        began = self.sim.world.now
        while self.sim.world.now < until:
            done = (self.sim.world.now - began) / (until - began)
            hurry = self.tally.messages < done * LEAST_MESSAGES * 1.03
            await asyncio.sleep(random.uniform(0.6, 1.2) if hurry else random.uniform(1.8, 3.2))
            if random.random() < 0.5:
                await self._trap(random)
                continue
            shards = random.sample(list(self.hot), random.randint(1, 2))
            sender = random.randrange(-1, NODES)
            # Often the same process to the same rooms throughout: there the order matters.
            senders = [sender] * 3 if random.random() < 0.7 else [sender, -1, 0]
            pairs = {shard: random.sample(self.hot[shard], 2) for shard in shards}
            for shard in shards:
                if random.random() < 0.5:
                    self._entangle(shard, random)
                self._burst(senders[0], random, pairs[shard])
            await asyncio.sleep(random.uniform(0, 0.02))
            for shard in shards:
                await self.sim.wish(shard, random.randrange(NODES))
                self._burst(senders[1], random, pairs[shard])
                if random.random() < 0.3:
                    # On at once: who takes it may hear only that it moves again (H9).
                    await asyncio.sleep(random.uniform(0.003, 0.03))
                    await self.sim.wish(shard, random.randrange(NODES))
            for shard in shards:
                if random.random() < 0.4:
                    await asyncio.sleep(random.uniform(0, 0.012))
                    await self.sim.wish(shard, None)
                else:
                    await asyncio.sleep(random.uniform(0.002, 0.03))
                self._burst(senders[2], random, pairs[shard])
        while self.tally.messages < LEAST_MESSAGES:
            self._burst(-1, random, random.sample(random.choice(list(self.hot.values())), 2))
            await asyncio.sleep(0.05)

    async def _trap(self, random: Random) -> None:
        """Mail waits behind a running handler when its shard is wished away, and more follows."""
        shard = random.choice(list(self.hot))
        room = random.choice(self.hot[shard])
        sender = random.randrange(-1, NODES)
        pause = random.uniform(0.003, 0.02)
        self._in(sender, lambda client: self._row(client, room, pause, 4))
        await asyncio.sleep(random.uniform(0, 0.01))
        await self.sim.wish(shard, random.randrange(NODES))
        for _ in range(3):
            await asyncio.sleep(random.uniform(0.001, 0.012))
            self._in(sender, lambda client: self._row(client, room, 0.0, 2))

    async def _row(self, client: Client, id: str, pause: float, count: int) -> None:
        """A thought, if any, and tells behind it."""
        room = client.ref(Room, id)
        with suppress(DomicileError):
            if pause:
                await room.tell(Room.think, pause)
            for _ in range(count):
                await room.tell(Room.note, 1)

    def _in(self, sender: int, work: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
        """Run something in a process: -1 is the test's client, the others are nodes."""

        def start(client: Client) -> None:
            task = asyncio.get_running_loop().create_task(work(client))
            task.add_done_callback(_seen)

        if sender < 0:
            self.sim.loop.post(partial(start, self.sim))
            return
        process = self.sim.nodes[sender]
        if process.up and process.incarnation and process.loop and process.node:
            process.loop.post(partial(start, process.node))

    def _entangle(self, shard: ShardKey, random: Random) -> None:
        """Chains that wait across mailboxes: x0 → y1, while y1's running handler → x2."""
        other = random.choice([key for key in self.hot if key != shard])
        here, there = self.hot[shard], self.hot[other]
        pause = random.uniform(0.01, 0.04)
        for start, path in (
            (there[1], [here[2]]),
            (here[0], [there[1]]),
            (here[1], [there[2]]),
            (there[2], [here[3]]),
            (here[0], [here[1]]),
        ):
            if random.random() < 0.7:
                task = asyncio.get_running_loop().create_task(
                    self._relay(self.sim, start, pause, path)
                )
                task.add_done_callback(_seen)

    async def _relay(self, client: Client, start: str, pause: float, path: list[str]) -> None:
        with suppress(DomicileError):
            await client.ref(Room, start).ask(Room.relay, pause, path)

    # faults

    async def _harm(self, until: float) -> None:
        """Faults until the calm begins; then everything is mended."""
        sim, random = self.sim, self.sim.world.stream("faults")
        kinds = list(self._kinds())
        while sim.world.now < until - 4:
            await asyncio.sleep(random.uniform(0.5, 3.0))
            strike = random.choice(kinds)
            late = sim.world.now > until - 12 and sum(self.tally.faults.values()) < LEAST_FAULTS
            if random.random() < 0.6 and not late:
                self._lie_in_wait(random, strike)
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
                process.store.slow = 1.0
            sim.network.slow(process.name, 0.0)
        sim.heal()
        sim.history.event("quiet")
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

    def _lie_in_wait(self, random: Random, strike: Callable[[Random], None]) -> None:
        """Strike when a hot shard next reaches a chosen step of a hand-off."""
        self._ambush = (
            random.choice(STEPS), random.choice(list(self.hot)), lambda: strike(random)
        )  # fmt: skip

    def _on_event(self, event: Event) -> None:
        if event.kind == "submit":
            self.tally.messages += 1
        if self._ambush is None:
            return
        step, shard, strike = self._ambush
        if event.kind == "commit":
            entry = self.sim.entry(shard) if step in ("moving", "serving") else None
            hit = entry is not None and entry.state == step and entry.epoch > 1
        else:
            hit = event.kind == step and event.fields.get("shard", shard.shard) == shard.shard
        if hit:
            self._ambush = None
            delay_s = self.random.choice((0.0, self.random.uniform(0, 0.003)))
            self.sim.world.call_at(self.sim.world.now + delay_s, lambda: self._spring(strike))

    def _spring(self, strike: Callable[[], None]) -> None:
        if not any(self.sim.history.of("quiet")):
            strike()

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
        self._in(-1, lambda _: self._hold_back(random, owner, sender, shard))

    async def _hold_back(self, random: Random, owner: int, sender: int, shard: ShardKey) -> None:
        room = random.choice(self.hot[shard])
        elsewhere = random.choice([node for node in range(NODES) if node != owner])
        row = partial(self._row, id=room, pause=0.0, count=3)
        self._in(sender, row)
        await asyncio.sleep(random.uniform(0.005, 0.02))
        self.sim.block(*random.choice(((owner, sender), (sender, owner))))
        await self.sim.wish(shard, elsewhere)
        await asyncio.sleep(random.uniform(0.02, 0.2))
        await self.sim.wish(shard, None)
        await asyncio.sleep(SETTINGS.hold_timeout_s + random.uniform(0.0, 0.3))
        self._in(sender, row)
        await asyncio.sleep(random.uniform(0.0, 0.05))
        await self.sim.wish(shard, elsewhere)
        await asyncio.sleep(random.uniform(0.05, 0.3))
        self._in(sender, row)
        await asyncio.sleep(random.uniform(0.0, 0.2))
        self.sim.heal()

    def _pair(self, random: Random) -> tuple[int, int, ShardKey]:
        """An owner, a sender (-1: the client) and their shard; often one that moves with mail."""
        pairs: list[tuple[int, int, ShardKey]] = []
        for shard in self.hot:
            entry = self.sim.entry(shard)
            owner = next((n.index for n in self.sim.nodes if n.incarnation == entry.owner), None)
            if entry.state == "moving" and owner is not None:
                waiting = [index for index in _waiting(self.sim, shard) if index != owner]
                pairs += [(owner, index, shard) for index in waiting]
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

    def _freeze(self, random: Random) -> None:
        victim = self._victim(random)
        if victim is not None:
            long = random.random() < 0.6
            self._note("freeze past the lease" if long else "freeze")
            self.sim.freeze(victim.index)
            self._sleepers[victim.index] = None
            pause_s = random.uniform(5.0, 9.0) if long else random.uniform(0.05, 4.5)
            self._later(pause_s, lambda: self._wake(victim.index))

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
        task.add_done_callback(_seen)

    async def _write_twice(self, id: str) -> None:
        for _ in range(2):
            with suppress(DomicileError):
                await self._note_down(self.sim, id, "", refused=False)

    def _leader(self, random: Random) -> None:
        """The same for whoever coordinates now."""
        for process in self.sim.nodes:
            if _leading(process):
                if process.index in self._sleepers:
                    return
                self._note("leader frozen")
                self.sim.freeze(process.index)
                self._sleepers[process.index] = None
                # Mostly about as long as its leader lease, while its node lease may just hold.
                pause_s = random.uniform(*random.choice(((4.2, 5.2), (4.2, 5.2), (0.1, 9.0))))
                self._later(pause_s, partial(self._wake, process.index))
                return

    def _later(self, delay_s: float, what: Callable[[], None]) -> None:
        self.sim.world.call_at(self.sim.world.now + delay_s, what)

    def _wake(self, index: int) -> None:
        if index in self._sleepers:
            del self._sleepers[index]
            if self.sim.nodes[index].up:
                self.sim.thaw(index)

    def _restart(self, index: int) -> None:
        if not self.sim.nodes[index].up:
            self.sim.start(index)


def situation(sim: Sim, shards: dict[ShardKey, list[str]]) -> list[str]:
    """Which steps of the protocols are under way at this moment."""
    steps: dict[str, None] = {}
    for shard in shards:
        entry = sim.entry(shard)
        owner = next((node for node in sim.nodes if node.incarnation == entry.owner), None)
        life = None if owner is None or owner.node is None else owner.node.life
        host = None if life is None else life.runtime.hosts.get(shard)
        phase = None if host is None else host.owner.phase
        if entry.state == "moving":
            steps[f"moving, owner {'gone' if phase is None else phase.value}"] = None
            if _waiting(sim, shard):
                steps["a hand-off with mail in flight"] = None
        elif owner is None or not owner.up:
            steps["home lost"] = None
        elif phase is not Phase.OPEN:
            steps["serving, not yet open"] = None
    steps[f"coordinator {_coordinator_step(sim)}"] = None
    return list(steps)


def _waiting(sim: Sim, shard: ShardKey) -> list[int]:
    """The processes with open mail for a shard; -1 is the client."""
    lives: dict[int, Life | None] = {-1: sim.client_life}
    for process in sim.nodes:
        if process.up and process.node is not None:
            lives[process.index] = process.node.life
    found: list[int] = []
    for index, life in lives.items():
        sender = None if life is None else life.runtime.sending.senders.get(shard)
        if sender is not None and sender.waiting():
            found.append(index)
    return found


def _coordinator_step(sim: Sim) -> str:
    for process in sim.nodes:
        step = _leading(process)
        if step:
            return step
    return "absent"


def _leading(process: SimNode) -> str:
    """What a process does as a leader, if it is one; looks without touching."""
    life = None if process.node is None else process.node.life
    step = "" if life is None or not process.up else life.elected.step
    return "" if step in ("following", "over") else step


def _seen(task: asyncio.Task[None]) -> None:
    """Errors of a burst surface unless its process was ended."""
    if not task.cancelled():
        error = task.exception()
        if error is not None:
            raise error
