"""Which entities are resident at this node, and which of them have been idle for too long.

Called by the runtime and its shard hosts. Idle entities are kept in buckets of time, so that a
sweep looks only at those that may be due. A policy of `entity.hosting.policies` keeps a limit on
residents. This module never decides whether an entity can be stopped now: its host does, and only
if the entity runs nothing and has no messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

import xxhash

from domicile.core.ids import EntityKey
from domicile.entity.hosting.policies import Policy, policy
from domicile.ports.meter import Meter

PERIOD_S = 1.0
"""Seconds that one bucket covers: an idle entity is found at most this much late, plus one
sweep."""

SLICE = 500
"""I6: how many entities one sweep looks at before the event loop gets a turn."""

TRIES = 64
"""I6: how many busy entities are passed over before the limit is exceeded instead."""

REST = 16
"""Number of arrivals after a search in vain before the next search."""


class StopReason(Enum):
    """Why an entity stops, which says what becomes of its timers and carried fields."""

    ASKED = "it called passivate()"
    IDLE = "it was not used"
    EVICTED = "there are too many in memory"
    MOVES = "its shard moves"


class Resident(Hashable, Protocol):
    """What this module needs of a resident entity. Hashed by identity."""

    used_at: float
    bucket: dict[Any, None] | None
    """The bucket of the wheel that holds it; None while it is on none."""

    @property
    def key(self) -> EntityKey:
        """Its address."""
        ...

    @property
    def idle_s(self) -> float:
        """Seconds without a message after which it is stopped."""
        ...

    @property
    def awaits_timer(self) -> bool:
        """Whether a timer will run in it, so that it is not idle."""
        ...


C = TypeVar("C", bound=Resident)


class IdleWheel(Generic[C]):
    """Residents in buckets by the time at which they may be due.

    A use costs nothing here: it only sets `used_at`. A resident that was used since is put into a
    later bucket when its own comes up. So each one is looked at about once per idle time.
    """

    __slots__ = ("_at", "_buckets", "_period_s")

    def __init__(self, now: float, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._at = int(now // period_s)
        """The first period that is not emptied yet."""
        self._buckets: dict[int, dict[Any, None]] = {}

    def add(self, item: C, due_at: float) -> None:
        """Return it from `due` once that time has come; never, if the time is infinite."""
        self.remove(item)
        if due_at == math.inf:
            return
        # The period after the one that contains `due_at`: then it is certainly due.
        number = max(int(due_at // self._period_s) + 1, self._at)
        bucket = self._buckets.get(number)
        if bucket is None:
            bucket = self._buckets[number] = {}
        bucket[item] = None
        item.bucket = bucket

    def remove(self, item: C) -> None:
        """Take it off the wheel."""
        if item.bucket is not None:
            item.bucket.pop(item, None)
            item.bucket = None

    def due(self, now: float, most: int) -> list[C]:
        """At most `most` residents whose time has come; they are taken off the wheel."""
        found: list[C] = []
        current = int(now // self._period_s)
        while self._at <= current:
            bucket = self._buckets.get(self._at)
            while bucket:
                if len(found) >= most:
                    return found
                item: C = bucket.popitem()[0]
                item.bucket = None
                found.append(item)
            self._buckets.pop(self._at, None)
            self._at += 1
        return found

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))


class Residents(Generic[C]):
    """All residents of one incarnation.

    `stop` begins to stop one for the given reason, and returns False if it is busy. `call` has
    `trim` called in a turn of the event loop soon. It is never called within a handler, whose
    entity does not look busy while it runs.
    """

    __slots__ = (
        "_call", "_called", "_limit", "_meter", "_policy", "_rest", "_stop", "_wheel", "count",
    )  # fmt: skip

    def __init__(
        self,
        stop: Callable[[C, StopReason], bool],
        call: Callable[[], None],
        meter: Meter,
        now: float,
        *,
        limit: int = 0,
        by: str = "lru",
    ) -> None:
        self._stop = stop
        self._call = call
        self._called = False
        self._meter = meter
        self._limit = limit
        self._wheel: IdleWheel[C] = IdleWheel(now)
        self._policy: Policy[C] | None = policy(by, limit, _digest) if limit else None
        self._rest = 0
        self.count = 0
        """How many are resident, those that are being stopped included."""

    @property
    def limited(self) -> bool:
        """Whether `touch` must be called for every use."""
        return self._policy is not None

    def arrived(self, item: C, now: float) -> None:
        """An entity became resident; others may have to stop for it soon."""
        item.used_at = now
        self.count += 1
        self._wheel.add(item, now + item.idle_s)
        if self._policy is not None:
            self._policy.touch(item)
            if self._rest:
                self._rest -= 1
            elif len(self._policy) > self._limit:
                self._call_soon()

    def left(self, item: C) -> None:
        """An entity is no longer resident."""
        self.count -= 1
        self._wheel.remove(item)
        if self._policy is not None:
            self._policy.forget(item)

    def touch(self, item: C) -> None:
        """An entity was used. Only needed while there is a limit."""
        if self._policy is not None:
            self._policy.touch(item)

    def sweep(self, now: float) -> bool:
        """Stop some entities that were idle for long enough; True if more are to be looked at."""
        found = self._wheel.due(now, SLICE)
        for item in found:
            due_at = item.used_at + item.idle_s
            if due_at > now:
                self._wheel.add(item, due_at)
            elif not item.awaits_timer and self._stop(item, StopReason.IDLE):
                self._meter.count("residents.idle")
                if self._policy is not None:
                    self._policy.forget(item)
            else:
                # It is busy, or a timer will use it: its idle time begins only after that.
                self._wheel.add(item, now + item.idle_s)
        self.trim()
        return len(found) == SLICE

    def trim(self) -> None:
        """Stop as many as exceed the limit, if that many are idle."""
        by, self._called = self._policy, False
        if by is None or len(by) <= self._limit:
            return
        stopped = self._stop_some(by, 0) or self._stop_some(by, TRIES)
        if len(by) <= self._limit:
            self._rest = 0
        elif stopped:
            self._call_soon()
        else:
            self._meter.count("residents.over")
            self._rest = REST

    def _call_soon(self) -> None:
        if not self._called:
            self._called = True
            self._call()

    def _stop_some(self, by: Policy[C], spare: int) -> bool:
        over = min(len(by) - self._limit, TRIES)
        stopped = 0
        for item in by.victims(over + spare):
            if stopped == over:
                break
            if self._stop(item, StopReason.EVICTED):
                stopped += 1
                self._wheel.remove(item)
                by.forget(item)
                self._meter.count("residents.evicted")
            else:
                by.touch(item)
        return stopped > 0


def _digest(item: Resident) -> int:
    return int(
        xxhash.xxh3_64_intdigest(b"%b\x00%b" % (item.key.type.encode(), item.key.id.encode()))
    )
