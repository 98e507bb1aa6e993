"""Projections: other views of journaled events, such as a table of all accounts.

The runner reads the events of shards in the order of their offsets and gives them to a projection.
The projection stores, in one transaction of its own, what the events change and how far it is. So
no event is left out and none counts twice, whenever a process dies. Offsets follow commits (J2): an
event that becomes visible late never has a smaller offset than one that was read.

`domicile.projector` opens the journal for it. Nothing here may write to a journal, or skip an event
that a projection could not take.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from domicile.core.ids import EntityKey, ShardKey
from domicile.errors import ConfigError
from domicile.observe.exposition import MetricFamily, Sample
from domicile.persist.eventsourced import EventCodec
from domicile.persist.forgettable import Forgotten, Vault, owner_of, vault_key
from domicile.ports.journal import EventPage, Journal, JournalUnknown, TellsOffsets, Wanted
from domicile.ports.meter import Meter

log = logging.getLogger("domicile")

E = TypeVar("E")

PARALLEL = 4
"""How many shards are read at the same time."""

VAULT_BYTES = 1 << 20
"""About how many bytes of forgettable values one answer of the journal holds."""

RETRY_S = (0.1, 30.0)
"""Seconds of the first and of the longest pause after a failure; each is twice the last one."""


class Deleted(msgspec.Struct, frozen=True):
    """Stands for the deletion of an entity in a projection: all its events are gone."""


@dataclass(frozen=True, slots=True)
class JournalEvent(Generic[E]):
    """An event with its place: `seq` among those of its entity, `offset` among those of its shard.

    `event` is an object of an event class, after upcasts, or `Deleted()`. Numbers rise, but some
    may be missing: a deletion takes earlier events away. Only if event classes have `Forgettable`
    fields it may be `Forgotten()`, too, with number 0: then name it, as in
    `JournalEvent[Registered | Forgotten]`.
    """

    type: str
    id: str
    seq: int
    offset: int
    event: E | Deleted


class Projection(Protocol):
    """What a program writes. Each shard counts its own offsets.

    Several shards are read at once, so calls for different shards may overlap.
    """

    async def offset(self, shard: int, /) -> int:
        """The `upto` of the last `apply` that was stored for a shard; 0 if there was none."""
        ...

    async def apply(self, shard: int, events: Sequence[JournalEvent[Any]], upto: int, /) -> None:
        """Store what events change, and `upto` as the shard's offset, in one transaction.

        If it raises, `offset` is asked again, and events that are not stored come again. There may
        be no event: those up to `upto` are of other types.
        """
        ...


class ProjectionFigures(NamedTuple):
    """How far a projection is."""

    lag: int
    """How many events it is behind. Shards that are not looked at yet don't count."""
    unread: int
    """Shards whose offset is not known yet."""
    failing: int
    """Shards that failed last time, and wait for another try."""
    shards: int


class _Page(NamedTuple):
    """Decoded events after an offset."""

    after: int
    events: tuple[JournalEvent[Any], ...]
    upto: int


class _Reading:
    """How far one shard is."""

    __slots__ = ("due", "failures", "head", "is_busy", "is_sure", "number", "page", "upto")

    def __init__(self, number: int) -> None:
        self.number = number
        self.upto = self.head = 0
        self.is_sure = False
        """Whether `upto` is what the projection has stored."""
        self.is_busy = False
        self.page: _Page | None = None
        """Events that the projection may not have stored."""
        self.failures = 0
        self.due = 0.0


class ProjectionRunner:
    """Reads shards of a role and gives their events to a projection.

    `codecs` has the entity types that the projection wants. `poll_s` is the shortest and the
    longest pause between two looks at the journal; it grows while nothing happens.
    """

    def __init__(
        self,
        journal: Journal,
        projection: Projection,
        *,
        name: str,
        role: str,
        shards: Sequence[int],
        codecs: Mapping[str, EventCodec],
        page_events: int,
        poll_s: tuple[float, float],
        meter: Meter,
    ) -> None:
        self._journal, self._projection, self._name, self._role = journal, projection, name, role
        self._codecs, self._page_events, self._poll_s = codecs, page_events, poll_s
        self._meter = meter
        self._readings = {number: _Reading(number) for number in shards}
        self._slots = asyncio.Semaphore(PARALLEL)
        self._woken = asyncio.Event()
        self._is_stopping = False
        self._waiting: list[tuple[Mapping[int, int], asyncio.Future[None]]] = []
        self._failures = 0

    async def run(self) -> None:
        """Read until `stop` is called. Then an `apply` that runs may end, and no other begins."""
        shortest_s, longest_s = self._poll_s
        pause_s = shortest_s
        try:
            async with asyncio.TaskGroup() as tasks:
                while not self._is_stopping:
                    self._woken.clear()
                    began = await self._look(tasks)
                    pause_s = shortest_s if began else min(2 * pause_s, longest_s)
                    await self._rest(pause_s)
        finally:
            for _, waiter in self._waiting:
                waiter.cancel()

    def stop(self) -> None:
        """Let `run` end."""
        self._is_stopping = True
        self._woken.set()

    async def caught_up(self) -> None:
        """Wait until the projection has stored all that is committed now, while `run` runs."""
        while True:
            target = await self._heads()
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append((target, waiter))
            self._woken.set()
            self._tell_waiting()
            await waiter
            # Without `offsets` a look shows no more than one page of each shard.
            if isinstance(self._journal, TellsOffsets) or await self._heads() == target:
                return

    def figures(self) -> ProjectionFigures:
        """How far the projection is, as of the last look."""
        readings = list(self._readings.values())
        return ProjectionFigures(
            lag=sum(max(0, one.head - one.upto) for one in readings if one.is_sure or one.upto),
            unread=sum(not (one.is_sure or one.upto) for one in readings),
            failing=sum(one.failures > 0 for one in readings),
            shards=len(readings),
        )

    def gauges(self) -> list[MetricFamily]:
        """The figures as metrics."""
        found, labels = self.figures(), (("projection", self._name), ("role", self._role))
        return [
            MetricFamily(f"domicile_projection_{name}", "gauge", help, (Sample(value, labels),))
            for name, help, value in (
                ("lag_events", "Events that a projection has not stored yet.", found.lag),
                ("unread_shards", "Shards whose offset is not known yet.", found.unread),
                ("failing_shards", "Shards that wait for another try.", found.failing),
            )
        ]

    async def _look(self, tasks: asyncio.TaskGroup) -> bool:
        """Begin to read the shards that have something new; whether there was one."""
        now = asyncio.get_running_loop().time()
        try:
            heads = await self._heads()
        except (JournalUnknown, ConfigError) as error:
            self._failures += 1
            self._meter.count("projection.failed")
            log.warning(
                "projection %s: the journal can't be read, it is tried again: %s",
                self._name, error,
            )  # fmt: skip
            return False
        self._failures = 0
        began = False
        for number, reading in self._readings.items():
            reading.head = heads.get(number, 0)
            is_new = not reading.is_sure or reading.head != reading.upto
            if is_new and not reading.is_busy and now >= reading.due:
                began = reading.is_busy = True
                tasks.create_task(self._read_on(reading), name=f"projection-{number}")
        self._tell_waiting()
        return began

    async def _rest(self, pause_s: float) -> None:
        """Wait for the next look, or for another try of a shard that failed, or for `stop`."""
        now = asyncio.get_running_loop().time()
        if self._failures:
            pause_s = _backoff_s(self._failures)
        tries = [one.due - now for one in self._readings.values() if one.failures]
        try:
            async with asyncio.timeout(max(0.0, min([pause_s, *tries]))):
                await self._woken.wait()
        except TimeoutError:
            pass

    async def _heads(self) -> Mapping[int, int]:
        """The last offsets of all shards, as far as the journal tells them."""
        if isinstance(self._journal, TellsOffsets):
            known = await self._journal.offsets(self._role)
            return {number: known.get(number, 0) for number in self._readings}
        return {
            number: (await self._scan(reading)).upto for number, reading in self._readings.items()
        }

    async def _read_on(self, reading: _Reading) -> None:
        """Give page after page of a shard to the projection, until it has all."""
        try:
            async with self._slots:
                while not self._is_stopping and await self._step(reading):
                    pass
        except Exception as error:
            self._failed(reading, error)
        finally:
            reading.is_busy = False
            self._tell_waiting()

    async def _step(self, reading: _Reading) -> bool:
        """One page; whether there is more."""
        if not reading.is_sure:
            reading.upto = await self._projection.offset(reading.number)
            reading.is_sure = True
            if reading.page is not None and reading.page.after != reading.upto:
                # It was stored after all.
                reading.page = None
        if reading.page is None:
            found = await self._scan(reading)
            if found.upto < reading.upto:
                raise ConfigError(
                    f"the journal ends at offset {found.upto}, but the projection has stored "
                    f"offset {reading.upto}: the journal is another one, or an older copy; name "
                    "the right journal, or empty the projection and let it begin at offset 0"
                )
            if found.upto == reading.upto:
                reading.head, reading.failures = found.upto, 0
                return False
            vaults = await self._vaults(found)
            reading.page = _Page(reading.upto, self._decoded(found, vaults), found.upto)
        page = reading.page
        # Until it returns, nobody knows whether it is stored.
        reading.is_sure = False
        await self._projection.apply(reading.number, page.events, page.upto)
        reading.upto, reading.page, reading.is_sure, reading.failures = page.upto, None, True, 0
        reading.head = max(reading.head, page.upto)
        self._meter.count("projection.events", len(page.events))
        return reading.upto < reading.head

    async def _scan(self, reading: _Reading) -> EventPage:
        shard = ShardKey(self._role, reading.number)
        return await self._journal.scan(shard, reading.upto, self._page_events)

    async def _vaults(self, page: EventPage) -> Mapping[EntityKey, Vault]:
        """The forgettable values that events of a page refer to, without those erased since."""
        vaults: dict[EntityKey, Vault] = {}
        for stored in page.events:
            codec = self._codecs.get(stored.entity.type)
            if codec is None or not codec.is_forgetful or stored.entity in vaults:
                continue
            key, values, seq, more = vault_key(stored.entity), list[bytes](), 0, True
            while more:
                [found] = await self._journal.recover([Wanted(key, seq)], VAULT_BYTES)
                values += found.events
                seq, more = found.seq, found.more
            vault = vaults[stored.entity] = Vault(Random(0))
            vault.refill(values)
        return vaults

    def _decoded(
        self, page: EventPage, vaults: Mapping[EntityKey, Vault]
    ) -> tuple[JournalEvent[Any], ...]:
        events: list[JournalEvent[Any]] = []
        for stored in page.events:
            (type, id), codec = stored.entity, self._codecs.get(stored.entity.type)
            owner = owner_of(stored.entity)
            if codec is not None:
                vault = vaults.get(stored.entity)
                with nullcontext() if vault is None else vault.open():
                    event = Deleted() if stored.data is None else codec.decode(stored.data)
                events.append(JournalEvent(type, id, stored.seq, stored.offset, event))
            elif owner is not None and stored.data is None and owner.type in self._codecs:
                events.append(JournalEvent(*owner, 0, stored.offset, Forgotten()))
        return tuple(events)

    def _failed(self, reading: _Reading, error: Exception) -> None:
        reading.failures += 1
        pause_s = _backoff_s(reading.failures)
        reading.due = asyncio.get_running_loop().time() + pause_s
        self._meter.count("projection.failed")
        is_ours = isinstance(error, ConfigError | JournalUnknown)
        log.warning(
            "projection %s: shard %s/%d stays at offset %d, because of %s: %s; the same events are "
            "tried again in %.1f s, and none is skipped: correct the cause",
            self._name, self._role, reading.number, reading.upto, type(error).__name__, error,
            pause_s, exc_info=None if is_ours else error,
        )  # fmt: skip
        self._woken.set()

    def _tell_waiting(self) -> None:
        for waiting in list(self._waiting):
            target, waiter = waiting
            if waiter.done():
                self._waiting.remove(waiting)
            elif all(self._has_stored(number, offset) for number, offset in target.items()):
                waiter.set_result(None)
                self._waiting.remove(waiting)

    def _has_stored(self, number: int, offset: int) -> bool:
        reading = self._readings[number]
        return reading.is_sure and reading.upto >= offset


def _backoff_s(failures: int) -> float:
    first_s, longest_s = RETRY_S
    return float(min(longest_s, first_s * 2 ** min(failures - 1, 16)))
