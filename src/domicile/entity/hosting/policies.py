"""Which resident entities to stop first when there are too many of them.

Each policy is a plain object over keys: `touch` says that a key is in use, `forget` that it is
gone, `victims` lists the keys to stop first. Called by the node's bookkeeping of residents. Nothing
here stops anything, reads a clock or uses `hash()`: the same calls give the same victims
everywhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from itertools import chain, islice
from typing import Generic, Protocol, TypeVar

from domicile.errors import ConfigError

K = TypeVar("K", bound=Hashable)

MOST_COUNT = 255
"""LFU: how far a key's rank can exceed the least used one's; this bounds how long a past peak
counts."""

PROTECTED = 0.8
"""The part of a segmented policy that is kept for keys that were used again."""

WINDOW = 0.01
"""The part of TinyLFU's limit through which new keys pass before they compete."""

ROWS = 4
MOST_WIDTH = 1 << 20
"""I6: counters in one row of a sketch, whatever the limit on residents is."""

SAMPLE = 10
"""A sketch halves its counts after this many uses for each of its counters in a row."""

TOP = 15
_HALVES = bytes(number >> 1 for number in range(256))
_WORD = 0xFFFF_FFFF


class Policy(Protocol[K]):
    """Decides in which order the resident keys are stopped."""

    def touch(self, key: K) -> None:
        """The key is in use; it is resident from now on if it was not."""
        ...

    def forget(self, key: K) -> None:
        """The key is no longer resident."""
        ...

    def victims(self, over: int) -> list[K]:
        """At most `over` keys, the first to stop first. They stay resident until `forget`."""
        ...

    def __len__(self) -> int:
        """How many are resident."""
        ...


class LRU(Generic[K]):
    """The key unused for the longest time goes first."""

    __slots__ = ("_keys",)

    def __init__(self) -> None:
        # Not a dict: to find its first key, a dict scans all removed keys before it.
        self._keys: OrderedDict[K, None] = OrderedDict()

    def touch(self, key: K) -> None:
        """As `Policy.touch`."""
        _to_end(self._keys, key)

    def forget(self, key: K) -> None:
        """As `Policy.forget`."""
        self._keys.pop(key, None)

    def victims(self, over: int) -> list[K]:
        """As `Policy.victims`."""
        return list(islice(self._keys, max(over, 0)))

    def __len__(self) -> int:
        return len(self._keys)


class MRU(LRU[K]):
    """The key used last goes first: for scans that repeat."""

    __slots__ = ()

    def victims(self, over: int) -> list[K]:
        """As `Policy.victims`."""
        return list(islice(reversed(self._keys), max(over, 0)))


class SLRU(Generic[K]):
    """Segmented: keys used only once go before keys used again."""

    __slots__ = ("_most_protected", "_probation", "_protected")

    def __init__(self, limit: int) -> None:
        self._most_protected = max(1, int(limit * PROTECTED))
        self._probation: OrderedDict[K, None] = OrderedDict()
        self._protected: OrderedDict[K, None] = OrderedDict()

    def touch(self, key: K) -> None:
        """As `Policy.touch`."""
        if key in self._protected:
            _to_end(self._protected, key)
        elif key in self._probation:
            del self._probation[key]
            self._protected[key] = None
            if len(self._protected) > self._most_protected:
                self._probation[_pop_first(self._protected)] = None
        else:
            self._probation[key] = None

    def forget(self, key: K) -> None:
        """As `Policy.forget`."""
        self._probation.pop(key, None)
        self._protected.pop(key, None)

    def victims(self, over: int) -> list[K]:
        """As `Policy.victims`."""
        return list(islice(self.order(), max(over, 0)))

    def order(self) -> Iterator[K]:
        """All keys, the first to stop first. The iterator is invalid after any change."""
        return chain(self._probation, self._protected)

    def __contains__(self, key: K) -> bool:
        return key in self._probation or key in self._protected

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)


class LFU(Generic[K]):
    """The least often used key goes first, with aging: the floor rises with the keys that had to
    go.

    Each use adds one to a key's rank, which starts above the floor and is at most `MOST_COUNT`
    above it.
    """

    __slots__ = ("_floor", "_ranks", "_rows")

    def __init__(self) -> None:
        self._floor = 0
        self._ranks: dict[K, int] = {}
        self._rows: dict[int, OrderedDict[K, None]] = {}

    def touch(self, key: K) -> None:
        """As `Policy.touch`."""
        before = self._ranks.get(key)
        rank = self._floor + 1
        if before is not None:
            rank = max(rank, min(before + 1, self._floor + MOST_COUNT))
            self._remove(key, before)
        self._ranks[key] = rank
        row = self._rows.get(rank)
        if row is None:
            row = self._rows[rank] = OrderedDict()
        row[key] = None

    def forget(self, key: K) -> None:
        """As `Policy.forget`."""
        rank = self._ranks.pop(key, None)
        if rank is not None:
            self._remove(key, rank)

    def victims(self, over: int) -> list[K]:
        """As `Policy.victims`."""
        if over <= 0 or not self._ranks:
            return []
        # At most `MOST_COUNT` rows: no rank is further from the floor.
        rows = sorted(self._rows)
        self._floor = max(self._floor, rows[0] - 1)
        return list(islice(chain.from_iterable(self._rows[rank] for rank in rows), over))

    def __len__(self) -> int:
        return len(self._ranks)

    def _remove(self, key: K, rank: int) -> None:
        row = self._rows[rank]
        del row[key]
        if not row:
            del self._rows[rank]


class Sketch:
    """About how often a key was used recently, in a fixed number of bytes (count-min, 4 rows)."""

    __slots__ = ("_counts", "_left", "_mask", "_sample", "_width")

    def __init__(self, limit: int) -> None:
        width = 16
        while width < min(limit, MOST_WIDTH):
            width *= 2
        self._width = width
        self._mask = width - 1
        self._counts = bytearray(ROWS * width)
        self._sample = self._left = SAMPLE * width

    def add(self, digest: int) -> None:
        """One more use of the key with that 64-bit digest."""
        counts = self._counts
        places = self._places(digest)
        least = min(counts[place] for place in places)
        if least < TOP:
            # Only the smallest count can be right: raising the others would add to other keys.
            for place in places:
                if counts[place] == least:
                    counts[place] = least + 1
        self._left -= 1
        if self._left <= 0:
            self._counts = counts.translate(_HALVES)
            self._left = self._sample

    def count(self, digest: int) -> int:
        """About how often, up to `TOP`; never too low within one sample."""
        counts = self._counts
        return min(counts[place] for place in self._places(digest))

    def __len__(self) -> int:
        return len(self._counts)

    def _places(self, digest: int) -> tuple[int, int, int, int]:
        # Two halves of a good digest give as many independent positions as needed.
        low, step, mask, width = digest & _WORD, digest >> 32 | 1, self._mask, self._width
        return (
            low & mask,
            width + (low + step & mask),
            2 * width + (low + 2 * step & mask),
            3 * width + (low + 3 * step & mask),
        )


class TinyLFU(Generic[K]):
    """W-TinyLFU: a small window of new keys before a segmented main part.

    A key that leaves the window stays only if it was used more often than the main part's first
    victim. A sketch of all recent uses counts that, including uses of keys that are no longer
    resident.
    """

    __slots__ = ("_digest", "_limit", "_main", "_most_window", "_newcomers", "_sketch", "_window")

    def __init__(self, limit: int, digest: Callable[[K], int]) -> None:
        self._limit = limit
        self._digest = digest
        self._most_window = max(1, int(limit * WINDOW))
        self._window: OrderedDict[K, None] = OrderedDict()
        self._newcomers: OrderedDict[K, None] = OrderedDict()
        """Keys that left the window while there was no room; they compete with the main part's
        victims."""
        self._main: SLRU[K] = SLRU(max(1, limit - self._most_window))
        self._sketch = Sketch(limit)

    def touch(self, key: K) -> None:
        """As `Policy.touch`."""
        self._sketch.add(self._digest(key))
        if key in self._main:
            self._main.touch(key)
        elif key in self._newcomers:
            del self._newcomers[key]
            self._main.touch(key)
        else:
            _to_end(self._window, key)
            if len(self._window) > self._most_window:
                oldest = _pop_first(self._window)
                if len(self) < self._limit:
                    self._main.touch(oldest)
                else:
                    self._newcomers[oldest] = None

    def forget(self, key: K) -> None:
        """As `Policy.forget`."""
        self._window.pop(key, None)
        self._newcomers.pop(key, None)
        self._main.forget(key)

    def victims(self, over: int) -> list[K]:
        """As `Policy.victims`. A newcomer that wins against a victim joins the main part."""
        chosen: list[K] = []
        admitted: list[K] = []
        newcomers, settled = iter(tuple(islice(self._newcomers, max(over, 0)))), self._main.order()
        newcomer, victim = next(newcomers, None), next(settled, None)
        while len(chosen) < over and newcomer is not None and victim is not None:
            if self._count(newcomer) > self._count(victim):
                chosen.append(victim)
                admitted.append(newcomer)
                victim = next(settled, None)
            else:
                chosen.append(newcomer)
            newcomer = next(newcomers, None)
        if newcomer is not None:
            newcomers = chain((newcomer,), newcomers)
        if victim is not None:
            settled = chain((victim,), settled)
        rest = chain(newcomers, settled, self._window)
        chosen += islice(rest, max(over - len(chosen), 0))
        for key in admitted:
            del self._newcomers[key]
            self._main.touch(key)
        return chosen

    def __len__(self) -> int:
        return len(self._window) + len(self._newcomers) + len(self._main)

    def _count(self, key: K) -> int:
        return self._sketch.count(self._digest(key))


POLICIES = ("lru", "slru", "lfu", "mru", "tinylfu")
"""The values of `Settings.residents_policy`."""


def policy(name: str, limit: int, digest: Callable[[K], int]) -> Policy[K]:
    """A policy by its name, for at most `limit` keys. `digest` gives 64 well-mixed bits of a key,
    the same in every process."""
    match name:
        case "lru":
            return LRU()
        case "slru":
            return SLRU(limit)
        case "lfu":
            return LFU()
        case "mru":
            return MRU()
        case "tinylfu":
            return TinyLFU(limit, digest)
        case _:
            raise ConfigError(
                f"residents_policy={name!r} must be one of {', '.join(map(repr, POLICIES))}"
            )


def _to_end(keys: OrderedDict[K, None], key: K) -> None:
    keys[key] = None
    keys.move_to_end(key)


def _pop_first(keys: OrderedDict[K, None]) -> K:
    return keys.popitem(last=False)[0]
