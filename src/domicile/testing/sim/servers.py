"""The servers of a simulated cluster: a store and a journal in processes of their own.

Built by the simulator. What happens to the store as a whole is done here: outages, backups that it
is put back to, compaction, a wall clock that is stepped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from domicile.core.ids import Incarnation, ShardKey
from domicile.journals.memory import MemoryJournal
from domicile.ports.journal import Claim
from domicile.ports.meter import Meter
from domicile.stores.memory.data import Snapshot
from domicile.stores.memory.store import MemoryStore
from domicile.testing.sim.calls import Faults
from domicile.testing.sim.clock import SimClock
from domicile.testing.sim.loop import SimLoop, World
from domicile.testing.sim.remote import RemoteJournal, RemoteStore
from domicile.testing.sim.sandbox import SimulationError

JOURNAL_HISTORY = "simulated".ljust(32, "0")
"""The id of the journal: a simulation has one, and no randomness from outside."""

OUTSIDER = Incarnation("outsider".ljust(32, "0"))

LONG_GAP = 0.05
"""The share of commits to a store without transactions that take long to be written."""

BACKUP_S = 0.5
BACKUPS = 240
"""The store can be put back to a state up to two minutes old."""


class Servers:
    """A store and a journal in processes of their own, reporting to one meter.

    The store's leases run on store time, made from a wall clock that can be stepped (S4). With
    `one_key` the store has no transactions over several keys (S8).
    """

    def __init__(self, world: World, meter: Meter, *, one_key: bool = False) -> None:
        self._world = world
        self._pauses = world.stream("journal pauses")
        self._gaps = world.stream("gaps of the store")
        self._one_key = one_key
        self._stall: tuple[float, Callable[[], None]] | None = None
        self._ways: list[Faults] = []
        self._away = False
        self._backups: deque[tuple[float, Snapshot]] = deque(maxlen=BACKUPS)
        self.store_loop = world.process("store")
        self.journal_loop = world.process("journal")
        self.wall_s = 0.0
        """How far the store's wall clock is ahead of the world's time."""
        self.store = MemoryStore(
            SimClock(world, self.store_loop), meter, wall=self._wall, one_key=one_key,
            between=self._gap if one_key else None,
        )  # fmt: skip
        self.journal = MemoryJournal(meter, self._pause, history=JOURNAL_HISTORY)

    def faults(self, name: str) -> Faults:
        """The faults of one process on its way to one server, seeded by that name."""
        return Faults(self._world.stream(f"faults {name}"))

    def store_faults(self, name: str) -> Faults:
        """The same on a way to the store, which its outages concern."""
        faults = self.faults(name)
        faults.away = self._away
        self._ways.append(faults)
        return faults

    def remote_store(self, loop: SimLoop, by: str, faults: Faults) -> RemoteStore:
        """The store as a process sees it; `by` names it in `commit` events."""
        face = partial(self.store.client, by)
        return RemoteStore(
            self._world, loop, self.store_loop, face(), faults,
            may_wait=self._one_key, renew_face=face,
        )  # fmt: skip

    def remote_journal(self, loop: SimLoop, faults: Faults) -> RemoteJournal:
        """The journal as a process sees it."""
        return RemoteJournal(self._world, loop, self.journal_loop, self.journal, faults)

    def stall(self, seconds: float, began: Callable[[], None]) -> None:
        """The next write to the journal stands still in the middle of its transaction."""
        self._stall = (seconds, began)

    def raise_fence(self, shard: ShardKey) -> None:
        """Claim a shard under the next epoch for an owner that the cluster has never had."""
        claim = Claim(shard, 0, self.journal.newest(shard) + 1, OUTSIDER)
        loop = self.journal_loop
        loop.post(lambda: loop.create_task(self.journal.claim([claim])))

    def repeat_claim(self, shard: ShardKey) -> None:
        """The claim that holds a shard arrives once more."""
        claim = self.journal.claimed(shard)
        if claim is not None:
            loop = self.journal_loop
            loop.post(lambda: loop.create_task(self.journal.claim([claim])))

    def hold_row(self, shard: ShardKey, seconds: float) -> None:
        """Another transaction holds the row of a shard for a while (J10)."""
        loop = self.journal_loop
        loop.post(lambda: loop.create_task(self._hold(shard, seconds)))

    async def _hold(self, shard: ShardKey, seconds: float) -> None:
        async with self.journal.held(shard):
            await asyncio.sleep(seconds)

    # the store as a whole

    def outage(self, *, running: bool) -> None:
        """Nobody reaches the store; one that is still `running` lets leases run out meanwhile."""
        self._away = True
        for faults in self._ways:
            faults.away = True
        if not running:
            self.store.halt()

    def back(self) -> None:
        """The store answers again."""
        self._away = False
        for faults in self._ways:
            faults.away = False
        self.store.go_on()

    def keep_backups(self) -> None:
        """Make a backup of the store now, and again and again: what a `rewind` goes back to."""
        self._backups.append((self._world.now, self.store.snapshot()))
        self._world.call_at(self._world.now + BACKUP_S, self.keep_backups)

    def rewind(self, seconds: float) -> float:
        """The store goes back to its newest backup that is at least so old; how far that was."""
        wanted = self._world.now - seconds
        old = [kept for kept in self._backups if kept[0] <= wanted]
        if not old:
            raise SimulationError(
                f"no backup of the store is {seconds:g} s old; the cluster is too young, or "
                f"more than {BACKUPS * BACKUP_S:g} s are wanted"
            )
        at, snapshot = old[-1]
        while self._backups and self._backups[-1][0] > at:
            self._backups.pop()  # of a history that is no more
        self.store.rewind(snapshot)
        return self._world.now - at

    def _wall(self) -> float:
        return self._world.now + self.wall_s

    async def _gap(self) -> None:
        """Between what a commit looks up and its write others write too, sometimes for long."""
        if self._gaps.random() < LONG_GAP:
            await asyncio.sleep(self._gaps.uniform(0.01, 2.0))
        else:
            await asyncio.sleep(self._gaps.uniform(0.0, 0.002))

    async def _pause(self) -> None:
        stall, self._stall = self._stall, None
        if stall is None:
            await asyncio.sleep(self._pauses.uniform(0.0001, 0.002))
        else:
            seconds, began = stall
            began()
            await asyncio.sleep(seconds)
