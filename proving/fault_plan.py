"""What disturbs a campaign's seed: a plan of strikes, at set times or in ambush, and their mending.

Made by the profile for one run. Every strike has a number and a random stream of its own, so that
leaving some out changes nothing about what the others draw. It strikes through the simulator's
verbs only, counts what it did and what that struck, and mends everything before the calm begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from domicile.core.ids import ShardKey
from domicile.errors import DomicileError, StoreError
from domicile.testing.checkers.reading import GRACE_S
from domicile.testing.history import Event
from domicile.testing.sim.calls import Faults
from domicile.testing.sim.node import SimNode
from proving.seed_result import (
    FAULTY_S,
    LEAST_FAULTS,
    MID_MOVE,
    NODES,
    STEPS,
    Struck,
    leading,
    situation,
    waiting,
)

if TYPE_CHECKING:
    from proving.profile import Profile

PATIENCE_S = 2.0
"""How long an ambush waits for its step before it strikes anyway."""

LAST_S = 4.0
"""Nothing new is done to a cluster this shortly before the calm."""

FILLER = 1_000
"""Numbers from here on are of cuts that make up for strikes which found nobody to hit."""

Fault = Callable[["Mischief", Random], object]
"""Does something to a cluster now, or begins to."""

FaultOf = Callable[["Mischief", Random, SimNode | None], object]
"""The same to a certain node; None, or one that can't be hit, leaves the choice open."""


@dataclass(frozen=True)
class Strike:
    """One entry of the plan. `step` and `shard` are what an ambush waits for; "" for none."""

    number: int
    after_s: float
    fault: Fault
    step: str
    shard: ShardKey


class Mischief:
    """Disturbs one run of a profile."""

    def __init__(
        self,
        load: Profile,
        faults: Sequence[Fault],
        *,
        pace_s: tuple[float, float],
        ambush: float,
        skip: Collection[int],
        filler: Fault,
        in_turn: Mapping[Fault, FaultOf],
    ) -> None:
        self.load = load
        self.sim = load.sim
        self.hot = load.hot
        self.tally = load.tally
        self.faulty = True
        self.sleepers: dict[int, None] = {}
        self.retired: dict[int, None] = {}
        """Nodes that were taken out of service for good."""
        self.drained: dict[int, None] = {}
        self.lagging: dict[Faults, None] = {}
        """Ways to the store that a script has slowed down: the next one must not take that for how
        they were before."""
        self.updating = False
        """Whether a rolling update is under way."""
        self._skip = skip
        self._filler = filler
        self._in_turn = in_turn
        self._ambushes: dict[int, tuple[Strike, Callable[[Event], None]]] = {}
        self._number = 0
        self._early = False
        self._group: asyncio.TaskGroup | None = None
        self._start = 0.0
        self.plan = self._make_plan(faults, pace_s, ambush)
        self.sim.history.subscribe(self._on_event, "commit", *STEPS)

    def _make_plan(
        self, faults: Sequence[Fault], pace_s: tuple[float, float], ambush: float
    ) -> list[Strike]:
        random = self.sim.world.stream("plan")
        plan: list[Strike] = []
        at = 0.0
        while True:
            at += random.uniform(*pace_s)
            if at > FAULTY_S - LAST_S:
                return plan
            step = random.choice(STEPS) if random.random() < ambush else ""
            shard = random.choice(list(self.hot))
            plan.append(Strike(len(plan) + 1, at, random.choice(faults), step, shard))

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the strikes that are planned and not left out."""
        early = (0,) if self._early else ()
        planned = (*early, *(strike.number for strike in self.plan))
        return tuple(number for number in planned if number not in self._skip)

    # the run

    def begin_early(self, random: Random, fault: Fault) -> None:
        """Strike 0, while the cluster starts and before its shards have homes (C8)."""
        self._early = True
        self.later(random.uniform(0.05, 0.55), lambda: self._run(0, fault, random))

    async def harm(self, start: float, group: asyncio.TaskGroup) -> None:
        """Strike by strike until the calm begins; then everything is mended."""
        sim, self._start, self._group = self.sim, start, group
        for strike in self.plan:
            await asyncio.sleep(max(0.0, start + strike.after_s - sim.world.now))
            if strike.number in self._skip:
                continue
            random = sim.world.stream(f"strike {strike.number}")
            if strike.step:
                self._lie_in_wait(strike, random)
            else:
                self._run(strike.number, strike.fault, random)
        await asyncio.sleep(max(0.0, start + FAULTY_S - LAST_S + PATIENCE_S - sim.world.now))
        self._fill_up()
        self._ambushes.clear()
        self.faulty = False
        await asyncio.sleep(max(0.0, start + FAULTY_S - sim.world.now))
        await self._mend()
        sim.history.event("quiet")
        await self._stop_one_in_calm()

    def _run(self, number: int, fault: Fault, random: Random) -> None:
        if number in self._skip:
            return
        before, self._number = self._number, number
        try:
            fault(self, random)
        finally:
            self._number = before

    def _fill_up(self) -> None:
        for number in range(FILLER, FILLER + LEAST_FAULTS):
            if sum(self.tally.faults.values()) < LEAST_FAULTS and not self._skip:
                self._run(number, self._filler, self.sim.world.stream(f"strike {number}"))

    async def _mend(self) -> None:
        sim = self.sim
        sim.store_back()
        sim.heal()
        for index in list(self.sleepers):
            self.wake(index)
        for process in sim.nodes:
            for other in sim.nodes:
                sim.network.slow_way(process.name, other.name, 0.0)
            sim.network.slow(process.name, 0.0)
            if process.up and process.store is not None and process.journal is not None:
                for faults in (process.store, process.journal):
                    faults.lost_reply = faults.lost_request = faults.late_request = 0.0
                process.store.slow = 1.0
            self.restart(process.index)
        for index in list(self.drained):
            await self.undrain(index)

    async def _stop_one_in_calm(self) -> None:
        random = self.sim.world.stream("calm")
        if random.random() < 0.7:
            return
        # H14: a planned stop is no fault, so nobody may notice it.
        await asyncio.sleep(GRACE_S + random.uniform(0.5, 3.0))
        leaver = random.choice([node for node in self.sim.nodes if node.up])
        if leaver.stopping is not None and leaver.loop is not None:
            leaver.loop.post(leaver.stopping.set)
            self.later(random.uniform(4.0, 8.0), partial(self.restart, leaver.index))

    # ambushes

    def _lie_in_wait(self, strike: Strike, random: Random) -> None:
        """Move a hot shard, and strike when it reaches a chosen step of its hand-off."""
        in_turn = self._in_turn.get(strike.fault)

        def spring(event: Event) -> None:
            struck = event.fields.get("inc")
            if in_turn is not None and struck is not None and random.random() < 0.7:
                # In the middle of its own turn, with work at hand: the guards must see it (L3).
                victim = next((n for n in self.sim.nodes if n.incarnation == struck), None)
                self._run(strike.number, partial(_at, in_turn, victim), random)
            else:
                delay_s = random.choice((0.0, random.uniform(0, 0.003)))
                self.later(delay_s, lambda: self._strike_late(strike, random))

        def give_up() -> None:
            if self._ambushes.pop(strike.number, None) is not None:
                self._strike_late(strike, random)

        self._ambushes[strike.number] = (strike, spring)
        self.later(PATIENCE_S, give_up)
        trap = self.sim.world.stream(f"trap {strike.number}")
        self.spawn(self.load.trap(trap, strike.shard))

    def _strike_late(self, strike: Strike, random: Random) -> None:
        if self.faulty:
            self._run(strike.number, strike.fault, random)

    def _on_event(self, event: Event) -> None:
        for number, (strike, spring) in list(self._ambushes.items()):
            shard, step = strike.shard, strike.step
            if event.kind == "commit":
                entry = self.sim.entry(shard) if step in ("moving", "serving") else None
                hit = entry is not None and entry.state == step and entry.epoch > 1
            else:
                hit = event.kind == step and event.fields.get("shard", shard.shard) == shard.shard
            if hit:
                del self._ambushes[number]
                spring(event)

    # for faults

    def note(self, kind: str, detail: str = "") -> None:
        """Count a fault, and what it struck."""
        what = f"{kind}: {detail}" if detail else kind
        self.tally.strikes.append(Struck(self._number, self.sim.world.now - self._start, what))
        self.tally.faults[kind] += 1
        for step in situation(self.sim, self.hot):
            self.tally.struck[step] += 1
            self.tally.hits[kind, step] += 1
            if step == MID_MOVE:
                self.tally.mid_move = True

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Run something beside the strikes, in the test's own process."""
        assert self._group is not None, "only while the cluster is being harmed"
        self._group.create_task(self._guarded(work))

    async def _guarded(self, work: Coroutine[Any, Any, object]) -> None:
        with suppress(DomicileError, StoreError):
            await work

    def go_on(self, work: Callable[[], None]) -> Callable[[], None]:
        """A later part of the strike that is under way, counted as such."""
        number = self._number

        def run() -> None:
            if self.faulty:
                self._run(number, lambda _, __: work(), Random(0))

        return run

    def later(self, delay_s: float, what: Callable[[], object]) -> None:
        """Outside of all processes, after a while."""
        self.sim.world.call_at(self.sim.world.now + delay_s, what)

    async def until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Whether a condition came to hold within a while, and before the calm."""
        deadline = self.sim.world.now + limit_s
        # A look at other processes in virtual time: nobody could set an event there.
        while not condition() and self.faulty and self.sim.world.now < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return condition()

    def wake(self, index: int) -> None:
        """End a node's freeze."""
        if index in self.sleepers:
            del self.sleepers[index]
            if self.sim.nodes[index].up:
                self.sim.thaw(index)

    def restart(self, index: int) -> None:
        """Start a node again, unless it runs or was taken out of service."""
        if not self.sim.nodes[index].up and index not in self.retired:
            self.sim.start(index)

    async def undrain(self, index: int) -> None:
        """Take back the wish to empty a node."""
        await self.sim.undrain(index)
        self.drained.pop(index, None)

    def up(self) -> list[SimNode]:
        """The nodes that run and are not frozen."""
        return [node for node in self.sim.nodes if node.up and node.index not in self.sleepers]

    def leader(self) -> SimNode | None:
        """Whoever coordinates now."""
        return next((process for process in self.sim.nodes if leading(process)), None)

    def victim(self, random: Random) -> SimNode | None:
        """A running node; often one that takes part in a move. None if few are left."""
        up = self.up()
        if len(up) <= 2:
            return None
        involved: list[SimNode] = []
        for shard in self.hot:
            entry = self.sim.entry(shard)
            if entry.state == "moving":
                involved += [node for node in up if node.incarnation in (entry.owner, entry.to)]
        return random.choice(involved if involved and random.random() < 0.7 else up)

    def pair(self, random: Random) -> tuple[int, int, ShardKey]:
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

    def two_nodes(self, random: Random) -> tuple[int, int]:
        """Two nodes, often an owner and a sender of its mail; in either order."""
        owner, sender, _ = self.pair(random)
        if sender < 0:
            sender = random.choice([n for n in range(NODES) if n != owner])
        return random.choice(((owner, sender), (sender, owner)))


def _at(fault: FaultOf, victim: SimNode | None, m: Mischief, random: Random) -> None:
    fault(m, random, victim)
