"""Remembered entities start again at a new home without a message (RG-19).

One object per runtime. When a shard opens, it reads from the journal which entities of the shard
are remembered, those written last first, and has its host start them. All shards of a node share
one budget: a few entities start at a time, and messages go on being served between them. If the
journal does not answer for a shard, or an entity does not start, others go on; it is tried again
for as long as the shard is at home here. Nothing here decides who is remembered: that flag commits
with an entity's events.

What the journal listed may be over before its turn comes: a message starts the entity, and it ends
for good (RG-20). So a reading notes each entity of its shard that leaves memory from its begin on,
and starts none of them. It also begins with those that have left while what they stored last is on
its way to the journal: the list may be older than that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from domicile.concurrency.task_set import TaskSet
from domicile.core.handoff.tables import Phase
from domicile.core.ids import EntityKey
from domicile.errors import DomicileError, Fenced
from domicile.ports.journal import Remembered
from domicile.taglog import TaggedLog

if TYPE_CHECKING:
    from domicile.entity.hosting.cell import Cell
    from domicile.entity.hosting.shard_host import ShardHost
    from domicile.entity.runtime import Runtime

log = TaggedLog()

AT_ONCE = 32
"""Remembered entities of a node that start at the same time."""

READERS = 4
"""Shards that are read at the same time: one whose journal does not answer holds up no other."""

PAGE = 512
"""Remembered entities that are read at once."""

MOST_ENDED = 65_536
"""I6: entities that leave memory while a shard is read. With more of them the journal is asked
anew: it knows which of them are remembered."""

FIRST_PAUSE_S = 0.25
MOST_PAUSE_S = 10.0
"""Seconds before what failed is tried again; they double from time to time."""


class _Reading:
    """How far the list of one shard was read, and what has ended meanwhile."""

    __slots__ = ("ended", "epoch", "host", "is_over", "last", "pause_s", "starts")

    def __init__(self, host: ShardHost, ended: Iterable[EntityKey]) -> None:
        self.host = host
        self.epoch = host.owner.epoch
        self.last: Remembered | None = None
        self.pause_s = FIRST_PAUSE_S
        self.ended = dict.fromkeys(ended)
        """Entities that have left memory since: not started by this reading."""
        self.starts = 0
        """Entities of it that wait for their start, or for another try."""
        self.is_over = False
        """Whether it asks the journal for nothing more."""

    @property
    def is_home(self) -> bool:
        """Whether the shard is still at home here, under the same epoch."""
        return self.host.owner.phase is Phase.OPEN and self.host.owner.epoch == self.epoch


class Remembering:
    """Starts what is remembered at one node."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._roles = dict.fromkeys(
            kind.role for kind in runtime.catalogue.values() if kind.remember
        )
        self._waiting: dict[ShardHost, _Reading] = {}
        """Shards that wait, the oldest first."""
        self._readings: dict[ShardHost, dict[_Reading, None]] = {}
        """Those that may still start something."""
        self._leaving: dict[ShardHost, dict[EntityKey, int]] = {}
        """Entities that have left memory before the journal has answered their last writes."""
        self._tasks: TaskSet[None] = TaskSet("domicile-remember")
        self._readers = 0
        self._places = asyncio.Semaphore(AT_ONCE)

    def opened(self, host: ShardHost) -> None:
        """A shard has come to this node, or some of its remembered entities may have stopped."""
        if host.shard.role in self._roles and self._runtime.durability is not None:
            reading = _Reading(host, self._leaving.get(host, ()))
            self._readings.setdefault(host, {})[reading] = None
            self._add(reading)

    def left(self, cell: Cell) -> None:
        """An entity that may be remembered has left memory, though its shard stays."""
        host, key = cell.host, cell.key
        if cell.gate is not None and cell.gate.is_open:
            leaving = self._leaving.setdefault(host, {})
            leaving[key] = leaving.get(key, 0) + 1
            cell.gate.hold(lambda _: self._answered(host, key))
        for reading in list(self._readings.get(host, ())):
            if len(reading.ended) < MOST_ENDED:
                reading.ended[key] = None
            else:
                self._give_up(reading)
                self.opened(host)

    def stop(self) -> None:
        """Start nothing more."""
        self._waiting.clear()
        self._readings.clear()
        self._tasks.cancel()

    async def close(self) -> None:
        """End what is under way."""
        self._waiting.clear()
        await self._tasks.close()

    def _answered(self, host: ShardHost, key: EntityKey) -> None:
        leaving = self._leaving[host]
        leaving[key] -= 1
        if not leaving[key]:
            del leaving[key]
        if not leaving:
            del self._leaving[host]

    def _add(self, reading: _Reading) -> None:
        replaced = self._waiting.pop(reading.host, None)
        if replaced is not None:
            self._end(replaced)
        self._waiting[reading.host] = reading
        if self._readers < READERS:
            self._readers += 1
            self._tasks.spawn(self._serve())

    async def _serve(self) -> None:
        """Shard by shard, in the order in which they came."""
        try:
            while self._waiting:
                reading = self._waiting.pop(next(iter(self._waiting)))
                try:
                    await self._restore(reading)
                except Fenced:
                    self._end(reading)
                except DomicileError as error:
                    log.warning(
                        "the journal does not tell which entities are remembered (%s); trying "
                        "again in %g s", error, reading.pause_s,
                        extra=reading.host.tags(reading.epoch),
                    )  # fmt: skip
                    self._tasks.spawn(self._later(reading))
        finally:
            self._readers -= 1

    async def _later(self, reading: _Reading) -> None:
        """Go on with a shard after a while, behind the others that wait by then."""
        await self._pause(reading.pause_s)
        reading.pause_s = min(2 * reading.pause_s, MOST_PAUSE_S)
        if reading.host in self._waiting or reading.is_over:
            self._end(reading)
        else:
            self._add(reading)

    def _end(self, reading: _Reading) -> None:
        """It reads nothing more. What it has begun to start, it goes on with."""
        reading.is_over = True
        if not reading.starts:
            self._give_up(reading)

    def _give_up(self, reading: _Reading) -> None:
        """It starts nothing more: all is done, its shard has left, or another one begins anew."""
        reading.is_over, reading.starts = True, 0
        readings = self._readings.get(reading.host, {})
        readings.pop(reading, None)
        if not readings:
            self._readings.pop(reading.host, None)

    def _may_start(self, reading: _Reading, entity: EntityKey) -> bool:
        is_known = reading in self._readings.get(reading.host, ())
        return is_known and reading.is_home and entity not in reading.ended

    async def _restore(self, reading: _Reading) -> None:
        durability = self._runtime.durability
        assert durability is not None
        while reading.is_home and not reading.is_over:
            page = await durability.remembered(reading.host, reading.epoch, reading.last, PAGE)
            if not page:
                break
            reading.last = page[-1]
            await self._start_all(reading, page)
        self._end(reading)

    async def _start_all(self, reading: _Reading, page: list[Remembered]) -> None:
        catalogue = self._runtime.catalogue
        for one in page:
            kind = catalogue.get(one.entity.type)
            if kind is None or not kind.remember:
                continue
            await self._places.acquire()
            if not reading.is_home or reading.is_over:
                self._places.release()
                return
            reading.starts += 1
            self._start(reading, one.entity, FIRST_PAUSE_S)

    def _start(self, reading: _Reading, entity: EntityKey, pause_s: float) -> None:
        """Start an entity, unless it has ended since it was listed. It has a place for that."""

        def over(started: bool) -> None:
            self._places.release()
            if started:
                self._runtime.meter.count("remember.started")
            elif self._may_start(reading, entity):
                self._tasks.spawn(self._again(reading, entity, pause_s))
                return
            self._started(reading)

        if self._may_start(reading, entity):
            reading.host.wake_up(entity, over)
        else:
            self._places.release()
            self._started(reading)

    def _started(self, reading: _Reading) -> None:
        """One entity of a reading waits no more."""
        reading.starts -= 1
        if reading.is_over and reading.starts <= 0:
            self._give_up(reading)

    async def _again(self, reading: _Reading, entity: EntityKey, pause_s: float) -> None:
        await self._pause(pause_s)
        await self._places.acquire()
        self._start(reading, entity, min(2 * pause_s, MOST_PAUSE_S))

    async def _pause(self, seconds: float) -> None:
        clock = self._runtime.clock
        due: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = clock.call_at(
            clock.now() + seconds, lambda: None if due.done() else due.set_result(None)
        )
        try:
            await due
        finally:
            timer.cancel()
