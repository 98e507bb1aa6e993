"""Remembered entities start again at a new home without a message (RG-19).

One object per runtime. When a shard opens, it reads from the journal which entities of the shard
are remembered, those written last first, and has its host start them. All shards of a node share
one budget: a few entities start at a time, and messages go on being served between them. If the
journal does not answer for a shard, or an entity does not start, others go on; it is tried again
for as long as the shard is at home here. Nothing here decides who is remembered: that flag commits
with an entity's events.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from domicile.concurrency.task_set import TaskSet
from domicile.core.handoff.tables import Phase
from domicile.core.ids import EntityKey
from domicile.errors import DomicileError, Fenced
from domicile.ports.journal import Remembered
from domicile.taglog import TaggedLog

if TYPE_CHECKING:
    from domicile.entity.hosting.shard_host import ShardHost
    from domicile.entity.runtime import Runtime

log = TaggedLog()

AT_ONCE = 32
"""Remembered entities of a node that start at the same time."""

READERS = 4
"""Shards that are read at the same time: one whose journal does not answer holds up no other."""

PAGE = 512
"""Remembered entities that are read at once."""

FIRST_PAUSE_S = 0.25
MOST_PAUSE_S = 10.0
"""Seconds before what failed is tried again; they double from time to time."""


class _Reading:
    """How far the list of one shard was read."""

    __slots__ = ("epoch", "host", "last", "pause_s")

    def __init__(self, host: ShardHost) -> None:
        self.host = host
        self.epoch = host.owner.epoch
        self.last: Remembered | None = None
        self.pause_s = FIRST_PAUSE_S


class Remembering:
    """Starts what is remembered at one node."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._roles = dict.fromkeys(
            kind.role for kind in runtime.catalogue.values() if kind.remember
        )
        self._waiting: dict[ShardHost, _Reading] = {}
        """Shards that wait, the oldest first."""
        self._tasks: TaskSet[None] = TaskSet("domicile-remember")
        self._readers = 0
        self._places = asyncio.Semaphore(AT_ONCE)

    def opened(self, host: ShardHost) -> None:
        """A shard has come to this node, or some of its remembered entities may have stopped."""
        if host.shard.role in self._roles and self._runtime.durability is not None:
            self._add(_Reading(host))

    def stop(self) -> None:
        """Start nothing more."""
        self._waiting.clear()
        self._tasks.cancel()

    async def close(self) -> None:
        """End what is under way."""
        self._waiting.clear()
        await self._tasks.close()

    def _add(self, reading: _Reading) -> None:
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
                    continue
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
        if reading.host not in self._waiting:
            self._add(reading)

    async def _restore(self, reading: _Reading) -> None:
        host, epoch = reading.host, reading.epoch
        durability = self._runtime.durability
        assert durability is not None
        while _is_home(host, epoch):
            page = await durability.remembered(host, epoch, reading.last, PAGE)
            if not page:
                return
            reading.last = page[-1]
            await self._start_all(host, epoch, page)

    async def _start_all(self, host: ShardHost, epoch: int, page: list[Remembered]) -> None:
        catalogue = self._runtime.catalogue
        for one in page:
            kind = catalogue.get(one.entity.type)
            if kind is None or not kind.remember:
                continue
            await self._places.acquire()
            if not _is_home(host, epoch):
                self._places.release()
                return
            self._start(host, epoch, one.entity, FIRST_PAUSE_S)

    def _start(self, host: ShardHost, epoch: int, entity: EntityKey, pause_s: float) -> None:
        def over(started: bool) -> None:
            self._places.release()
            if started:
                self._runtime.meter.count("remember.started")
            elif _is_home(host, epoch):
                self._tasks.spawn(self._again(host, epoch, entity, pause_s))

        host.wake_up(entity, over)

    async def _again(self, host: ShardHost, epoch: int, entity: EntityKey, pause_s: float) -> None:
        await self._pause(pause_s)
        await self._places.acquire()
        if not _is_home(host, epoch):
            self._places.release()
            return
        self._start(host, epoch, entity, min(2 * pause_s, MOST_PAUSE_S))

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


def _is_home(host: ShardHost, epoch: int) -> bool:
    return host.owner.phase is Phase.OPEN and host.owner.epoch == epoch
