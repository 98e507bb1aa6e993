"""Pending timers of entities that are not in memory, and the count of those that were lost.

`TimerBook` holds the timers of one shard within a limit; it reads no clock. Hosts keep one for each
shard that is at home here, the shelf one for each shard that may come. `TimerLosses` counts timers
that will never fire and writes one log line for each shard (DX-25).
"""

from __future__ import annotations

import logging
from heapq import heapify, heappop, heappush

import msgspec

from domicile.core.ids import EntityKey, ShardKey
from domicile.entity.carry.budget import Budget
from domicile.ports.meter import Meter

log = logging.getLogger("domicile")

OVERHEAD_BYTES = 128
"""Bytes counted for a timer besides its names and arguments."""

_STALE = 64
"""Dropped timers that may stay in the heap, besides one for each that is kept."""


class KeptTimer(msgspec.Struct, eq=False):
    """A pending timer whose entity is not in memory, or was not when the timer came here."""

    key: EntityKey
    method: str
    due_at: float
    body: bytes
    dropped: bool = False

    @property
    def size_bytes(self) -> int:
        """What it counts in a book."""
        key = self.key
        return len(key.type) + len(key.id) + len(self.method) + len(self.body) + OVERHEAD_BYTES


class TimerBook:
    """The kept timers of one shard: by entity, and in the order in which they become due."""

    __slots__ = ("_budget", "_count", "_heap", "_most_bytes", "_next", "_timers", "used_bytes")

    def __init__(self, budget: Budget, most_bytes: int) -> None:
        self._budget = budget
        self._most_bytes = most_bytes
        self._timers: dict[EntityKey, dict[str, KeptTimer]] = {}
        self._heap: list[tuple[float, int, KeptTimer]] = []
        """A dropped timer stays in it until it comes up, or until too many are dropped."""
        self._next = 0
        self._count = 0
        self.used_bytes = 0

    def keep(self, key: EntityKey, method: str, due_at: float, body: bytes) -> bool:
        """Keep a timer in place of an earlier one for that method; False if there is no room."""
        self.drop(key, method)
        timer = KeptTimer(key, method, due_at, body)
        size, budget = timer.size_bytes, self._budget
        if self.used_bytes + size > self._most_bytes:
            return False
        if budget.used_bytes + size > budget.most_bytes:
            return False
        self.used_bytes += size
        budget.used_bytes += size
        self._timers.setdefault(key, {})[method] = timer
        self._count += 1
        self._next += 1
        heappush(self._heap, (due_at, self._next, timer))
        return True

    def has(self, key: EntityKey) -> bool:
        """Whether a timer of that entity is kept."""
        return key in self._timers

    def drop(self, key: EntityKey, method: str) -> None:
        """Drop the timer for that method of an entity."""
        timers = self._timers.get(key)
        timer = None if timers is None else timers.get(method)
        if timer is not None:
            self._remove(timer)
            timer.dropped = True
            if len(self._heap) > 2 * self._count + _STALE:
                self._heap = [one for one in self._heap if not one[2].dropped]
                heapify(self._heap)

    def forget(self, key: EntityKey) -> None:
        """Drop all timers of an entity."""
        for method in list(self._timers.get(key, ())):
            self.drop(key, method)

    @property
    def next_at(self) -> float:
        """When the next timer is due, or a dropped one would have been; infinite if there is
        none."""
        return self._heap[0][0] if self._timers else float("inf")

    def due(self, now: float, most: int) -> list[KeptTimer]:
        """Take out at most `most` timers that are due, the earliest first."""
        found: list[KeptTimer] = []
        while self._heap and self._heap[0][0] <= now and len(found) < most:
            timer = heappop(self._heap)[2]
            if not timer.dropped:
                self._remove(timer)
                found.append(timer)
        return found

    def adopt(self, other: TimerBook) -> None:
        """Take over all timers of another book with the same budget. This one must be empty."""
        assert not self._timers, "timers of an earlier epoch were left"
        self._timers, other._timers = other._timers, {}
        self._heap, other._heap = other._heap, []
        self.used_bytes, other.used_bytes = other.used_bytes, 0
        self._count, other._count = other._count, 0
        self._next = other._next

    def empty(self) -> list[KeptTimer]:
        """Take out all timers."""
        found = [timer for timers in self._timers.values() for timer in timers.values()]
        self._budget.used_bytes -= self.used_bytes
        self.used_bytes = self._count = 0
        self._timers, self._heap = {}, []
        return found

    def __len__(self) -> int:
        return self._count

    def _remove(self, timer: KeptTimer) -> None:
        timers = self._timers[timer.key]
        del timers[timer.method]
        if not timers:
            del self._timers[timer.key]
        size = timer.size_bytes
        self._count -= 1
        self.used_bytes -= size
        self._budget.used_bytes -= size


class TimerLosses:
    """Counts timers that will never fire. The log gets one line for each call of `tell`."""

    __slots__ = ("_meter", "_untold")

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._untold: dict[ShardKey, tuple[int, str]] = {}
        """How many timers of each shard, and one of them with the reason."""

    def add(self, shard: ShardKey, key: EntityKey, method: str, why: str) -> None:
        """A timer is lost."""
        self._meter.count("timer.lost")
        count, example = self._untold.get(shard, (0, ""))
        example = example or f"{method!r} of {key.type} {key.id!r}: {why}"
        self._untold[shard] = (count + 1, example)

    def clear(self, shard: ShardKey, book: TimerBook, why: str) -> None:
        """All timers of a book are lost."""
        for timer in book.empty():
            self.add(shard, timer.key, timer.method, why)

    def shards(self) -> list[ShardKey]:
        """The shards whose losses are not logged yet."""
        return list(self._untold)

    def tell(self, *shards: ShardKey) -> None:
        """Log what these shards have lost, in one line."""
        untold = [self._untold.pop(shard) for shard in shards if shard in self._untold]
        if untold:
            role, number = shards[0]
            where = f"shard {role}/{number}" if len(shards) == 1 else f"{len(untold)} shards"
            log.warning(
                "%d timers of %s are lost and will not fire, for example %s",
                sum(count for count, _ in untold), where, untold[0][1],
            )  # fmt: skip
