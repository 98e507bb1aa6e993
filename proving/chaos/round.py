"""One round of a chaos run: a cluster, its load, its faults, a calm, and the verdict.

`play` is called by `proving.chaos.__main__`. A round is a window of the run: its cluster
lives for a minute or two, is judged as a whole by the checkers, and is forgotten.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from domicile.errors import StoreError
from domicile.membership.clock import SystemClock
from domicile.settings import Settings
from domicile.testing.checkers import CHECKERS, Violation
from domicile.testing.checkers.liveness import STUCK_S
from domicile.testing.checkers.reading import GRACE_S, STARVED, read
from domicile.testing.history import History
from domicile.testing.processes.cluster import Processes
from domicile.testing.processes.environment import Network
from domicile.testing.processes.history import RealHistory, before
from domicile.testing.processes.node_process import HarnessError
from proving.chaos.faults import Chaos, Fault
from proving.chaos.load import MIXED, PATIENCE_S, Load
from proving.chaos.server import EMBEDDED, ServedStore, StoreServer, answering, server_faults
from proving.chaos.starving import felt
from proving.chaos.tally import SERVED, Tally
from proving.chaos.targeted import FAULTS

log = logging.getLogger("domicile")

CALM_S = GRACE_S + STUCK_S + 3.0
"""Long enough that liveness can be judged (L)."""

CALMS = 3
"""A calm in which the machine starves goes on, up to so many times as long in all."""

SHORT_CALM_S = 4.0
LONG_S = 60.0
"""Shorter rounds have the short calm, and liveness is not judged."""

PACE_S = 2.2
"""The average time between two strikes."""

SETTLE_S = 40.0
MENDING_S = 60.0
TEND_S = 0.1
COLLECT_S = 20.0
DISK_BYTES = 64 * 1024 * 1024
SETTINGS = Settings(
    shards=32, ttl_s=3.0, link_timeout_s=4.0, hold_timeout_s=1.0, poison_deaths=1_000_000
)
"""Short times, so that even those of a sender's patience (H6) end within a pause in a lease."""

EAGER_S = 12.0
"""How often an eager round is judged while it goes on."""


UNWRITTEN_S = 1.0
"""How long a busy process may take to write down what it has stamped."""


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What a round is made from: the same plan draws the same strikes."""

    seed: int
    number: int
    nodes: int
    length_s: float
    rate: float
    network: Network
    directory: Path
    eager: bool = False
    """End at the first violation: it is judged while it goes on."""
    only: tuple[str, ...] = ()
    """The kinds of faults that strike; empty for all, `NONE` for none."""
    managers: int = 0
    """Coordinators of their own; without any, nodes coordinate."""
    fencing: str = "lease"
    server: StoreServer | None = None
    """The server of the store; None: the store is an embedded one."""

    @property
    def calm_s(self) -> float:
        """How long nothing is broken in the end."""
        return CALM_S if self.long else min(SHORT_CALM_S, self.length_s / 4)

    @property
    def long(self) -> bool:
        """Whether its calm is one in which liveness can be judged."""
        return self.length_s >= LONG_S

    @property
    def kinds(self) -> list[str]:
        """The kinds of faults that strike, by name."""
        there = [kind for kind in FAULTS if self.server is None or kind not in EMBEDDED]
        there += () if self.server is None else SERVED
        return [kind for kind in there if not self.only or kind in self.only]

    @property
    def faulty_s(self) -> float:
        """How long faults strike."""
        return max(self.length_s - self.calm_s - 4.0, self.length_s / 2)

    def stream(self, name: str) -> Random:
        """Chance of its own for everything."""
        return Random(f"{self.seed} {self.number} {name}")


@dataclass(slots=True)
class Result:
    """What came of a round."""

    tally: Tally
    history: History
    violations: list[Violation] = field(default_factory=list[Violation])


def strikes(plan: RoundPlan) -> list[tuple[float, str]]:
    """When which kind of fault strikes: all kinds in turn, shuffled anew each time."""
    random, kinds = plan.stream("plan"), plan.kinds
    if not kinds:
        return []
    gap_s = min(PACE_S, 0.7 * plan.faulty_s / len(kinds))
    found: list[tuple[float, str]] = []
    at = gap_s / 2
    while at < 0.92 * plan.faulty_s:
        deck = random.sample(kinds, len(kinds))
        if not found:
            # What takes long comes first, or a short round would end before it.
            deck.sort(key=lambda kind: kind not in ("roll", "long freeze"))
        for kind in deck:
            found.append((at, kind))
            at += random.uniform(0.4, 1.6) * gap_s
    return [strike for strike in found if strike[0] < 0.92 * plan.faulty_s]


def calm_left_s(plan: RoundPlan, began: float, quiet_at: float, now: float) -> float:
    """How much longer a calm has to be: as planned, and so long after the machine last starved."""
    until = began + plan.calm_s
    if plan.long:
        until = min(max(until, quiet_at + plan.calm_s), began + CALMS * plan.calm_s)
    return until - now


class _Round:
    def __init__(self, plan: RoundPlan, tally: Tally, stop: asyncio.Event) -> None:
        self.plan, self.tally, self.stop = plan, tally, stop
        self.found: list[Violation] = []
        self.early: list[Violation] = []
        """What was wrong while it went on; what comes later may excuse it, as the end does."""
        server = plan.server
        self.store = None if server is None else ServedStore(server, plan.nodes + plan.managers)
        self.faults = FAULTS if self.store is None else {**FAULTS, **server_faults(self.store)}
        self.cluster = Processes(
            MIXED, nodes=plan.nodes, managers=plan.managers, directory=plan.directory,
            settings=replace(SETTINGS, fencing=plan.fencing), network=plan.network,
            disk_bytes=DISK_BYTES if self.store is None else 0, journal="memory://",
            seed=plan.stream("gates").getrandbits(32),
            store=None if self.store is None else self.store.url,
            store_at=None if self.store is None else self.store.at,
            commits=None if self.store is None else self.store.commits(SystemClock().now),
            feels_starving=False,  # it feels that by itself, also by the work of its own checkers
        )  # fmt: skip
        scale = min(1.0, plan.faulty_s / LONG_S)
        self.load = Load(self.cluster, tally, plan.stream("load"), plan.rate)
        self.chaos = Chaos(self.cluster, tally, self.load, scale=max(scale, 0.25))
        self._read = 0
        self._quiet_at: float | None = None
        self._joined: dict[tuple[str, int], None] = {}

    async def play(self) -> None:
        loop = asyncio.get_running_loop()

        def late(since: float, until: float) -> None:
            loop.call_soon_threadsafe(self.starved, since, until)

        if self.store is not None:
            await asyncio.to_thread(self.store.start)
        try:
            async with self.cluster:
                away = self.chaos.disk.locked
                asks = answering(self.store, self.cluster.now, away, late)
                with felt(self.cluster.now, late), asks:
                    await self._play()
        finally:
            if self.store is not None:
                await self.store.close()

    async def _play(self) -> None:
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            tending = group.create_task(self._tend())
            calling = group.create_task(self.load.run())
            moving = group.create_task(self.load.move())
            looking = group.create_task(self._look_on())
            await self._harm(began, group)
            await self._settle()
            await self.calm()
            self.load.end()
            await self._ended("calls", calling, PATIENCE_S + 20.0)
            await self._ended("wishes", moving, 40.0)
            tending.cancel()
            looking.cancel()
        self.count()

    # faults

    async def _harm(self, began: float, group: asyncio.TaskGroup) -> None:
        loop, chaos = asyncio.get_running_loop(), self.chaos
        running: list[asyncio.Task[None]] = []
        planned = strikes(self.plan)
        if not planned:
            self._be_quiet()
        for number, (at, kind) in enumerate(planned):
            await self._rest(began + at - loop.time())
            if self.stop.is_set():
                break
            random = self.plan.stream(f"strike {number}")
            running.append(group.create_task(self._strike(kind, self.faults[kind], random)))
        await self._rest(began + self.plan.faulty_s - loop.time())
        chaos.calm.set()
        if running:
            _, late = await asyncio.wait(running, timeout=MENDING_S)
            for task in late:
                task.cancel()
                self.wrong("mend", f"{task.get_name()} did not end within {MENDING_S:g} s")
        if planned:
            self._be_quiet()

    def _be_quiet(self) -> None:
        """From here on nothing breaks anything, and from a while later on all must go well."""
        self._quiet_at = self.cluster.now()
        self.cluster.note_quiet()

    async def calm(self) -> None:
        """Rest until liveness can be judged, or it is clear that this machine won't let it."""
        began = self.cluster.now()
        while not self.stop.is_set():
            quiet_at = began if self._quiet_at is None else self._quiet_at
            left_s = calm_left_s(self.plan, began, quiet_at, self.cluster.now())
            if left_s <= 0:
                return
            await self._rest(left_s)

    async def _strike(self, kind: str, fault: Fault, random: Random) -> None:
        try:
            await fault(self.chaos, random)
        except (HarnessError, AssertionError) as error:
            self.wrong("stop" if kind in ("restart", "roll") else "harness", f"{kind}: {error}")

    async def _settle(self) -> None:
        def served() -> bool:
            return self.cluster.settled() and all(node.up for node in self.cluster.nodes)

        if self.plan.eager and self.stop.is_set():
            return  # it is bad already
        try:
            await self.cluster.wait_until(served, timeout_s=SETTLE_S)
        except AssertionError as error:
            self.wrong("settle", f"shards without a home long after the last fault: {error}")

    # looking after it

    async def _tend(self) -> None:
        """Start again what could not start, and notice what ended though nobody meant it to."""
        collected = asyncio.get_running_loop().time()
        while True:
            for node in self.cluster.nodes:
                if self.chaos.joined(node):
                    self._joined[node.name, node.runs] = None
                if node.up or node.process is None or self.chaos.taken(node.index):
                    continue
                # One that could not join gives up, as it must: its first error is final.
                if (node.name, node.runs) in self._joined:
                    self.wrong(
                        "exit",
                        f"{node.name} ended by itself with code {node.process.returncode}; its log "
                        f"ends:\n{node.log_tail()}",
                    )
                self.chaos.start_again(node.index)
            self.count()
            # Not from a server that stands still: this would wait for it, and nothing thaw it.
            away = self.store is not None and self.chaos.disk.locked()
            if asyncio.get_running_loop().time() - collected > COLLECT_S and not away:
                collected = asyncio.get_running_loop().time()
                # A server that is away is asked again the next time.
                with suppress(StoreError):
                    self.cluster.collect()
                # To go through all that was recorded again and again would stop this process.
                gc.freeze()
            await asyncio.sleep(TEND_S)

    def starved(self, since: float, until: float) -> None:
        """The machine let nobody run meanwhile: a lease that is lost by that is no violation."""
        self.tally.starved += 1
        self.cluster.note_fault(STARVED, at=since, until=until)
        if self._quiet_at is not None:
            # Only from here on it is calm.
            self._be_quiet()

    async def _look_on(self) -> None:
        """Judge what there is, again and again, and stop at the first violation."""
        while self.plan.eager and not self.stop.is_set():
            await asyncio.sleep(EAGER_S)
            if self.store is not None and self.chaos.disk.locked():
                continue  # a server that stands still has nothing to say
            so_far = before(self.cluster.history(), UNWRITTEN_S)
            self.early = await asyncio.to_thread(judged, so_far)
            if self.early:
                self.stop.set()

    def count(self) -> None:
        """Count what was recorded since the last look."""
        events = self.cluster.recorded
        for event in events[self._read :]:
            if event.kind == "start":
                self.tally.messages += 1
            elif event.kind == "released":
                self.tally.moves += 1
            elif event.kind == "fenced":
                self.tally.fences += 1
        self._read = len(events)

    async def _ended(self, what: str, task: asyncio.Task[None], limit_s: float) -> None:
        await asyncio.wait([task], timeout=limit_s)
        if not task.done():
            waiting = self.load.waiting
            self.wrong("hang", f"{what} had not ended after {limit_s:g} s ({waiting} calls)")
            task.cancel()

    async def _rest(self, seconds: float) -> None:
        # Not `wait_for`: on Python 3.11 it forgets a cancellation that comes with its event.
        with suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0.0)):
                await self.stop.wait()

    def wrong(self, rule: str, message: str) -> None:
        """Something that no checker can see."""
        self.found.append(Violation(rule, self.cluster.now(), message))


def judged(history: History) -> list[Violation]:
    """What the checkers say. One that fails proves nothing, but the others are heard."""
    found: list[Violation] = []
    for rule, checker in CHECKERS.items():
        try:
            found += checker(history)
        except Exception:
            found.append(_broken(history, f"the checker of {rule}: {traceback.format_exc()}"))
    return found


def judged_for_liveness(history: History) -> bool:
    """Whether the calm was so long that an ask or a drain that is stuck would show (L)."""
    reading = read(history)
    settled_at = reading.settled_at()
    return settled_at is not None and settled_at + STUCK_S <= reading.calm_until


def _broken(history: History, message: str) -> Violation:
    """What went wrong with the harness itself, after all that is known."""
    return Violation("harness", history.events[-1].at if history.events else 0.0, message)


async def play(plan: RoundPlan, tally: Tally, stop: asyncio.Event) -> Result:
    """Play one round; `tally` is filled while it goes on, `stop` ends it early.

    What fails of the harness is a violation like others: the rounds before it keep their report.
    """
    result = Result(tally, RealHistory([], Counter()))
    try:
        await _played(plan, tally, stop, result)
    except Exception:
        result.violations.append(_broken(result.history, traceback.format_exc()))
    tally.rounds += 1
    tally.long += plan.long
    tally.faultless += not plan.kinds
    tally.events += len(result.history.events)
    for violation in result.violations:
        tally.rules[violation.rule] += 1
    return result


async def _played(plan: RoundPlan, tally: Tally, stop: asyncio.Event, result: Result) -> None:
    one = _Round(plan, tally, stop)
    result.violations = one.found
    plan.directory.mkdir(parents=True, exist_ok=True)
    # What this process's own client has to say belongs beside what the nodes say.
    told = logging.FileHandler(plan.directory / "harness.log", encoding="utf-8")
    log.addHandler(told)
    try:
        await one.play()
    except* Exception as errors:
        # Whatever went wrong with the harness, what the processes did can still be judged.
        one.wrong("harness", "".join(traceback.format_exception(errors)))
    finally:
        gc.unfreeze()
        log.removeHandler(told)
        told.close()
    try:
        result.history = one.cluster.history()
    except Exception:
        # Without commits nothing can be judged, but there is something to look at.
        one.wrong("harness", f"there is no whole history: {traceback.format_exc()}")
        events = sorted(one.cluster.recorded, key=lambda event: event.at)
        result.history = RealHistory(events, Counter())
        one.found += one.early
        return
    one.found += await asyncio.to_thread(judged, result.history) or one.early
    tally.calm += judged_for_liveness(result.history)
