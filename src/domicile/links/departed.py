"""Which incarnations are gone, in eight bytes each: their frames are never taken again (I1b).

The link layer keeps it as long as its own incarnation lasts. A process that runs for months sees
many incarnations end, so only a number may be kept of each: two sorted arrays of hashes, of which
the older one is dropped when the newer one is full.

An incarnation that is not gone is found here only if 64 bits of its hash equal those of another.
With as many remembered as allowed, that is one newcomer in 280 trillion. The link layer trusts a
record before this memory, so such a newcomer is refused only until its record is known.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort

import xxhash

from domicile.core.ids import Incarnation

MOST_GONE = 65_536
"""I6: half a megabyte. When the oldest are dropped, their records went before those of many others,
so their leases ended long ago. Then their own guards let nothing be sent (L3), and messages still
in the network carry epochs that are over (H7). No incarnation's name is ever used again."""


class DepartedPeers:
    """The last incarnations that are gone: at least half of `most`, and at most `most`."""

    __slots__ = ("_half", "_newer", "_older")

    def __init__(self, most: int = MOST_GONE) -> None:
        self._half = max(1, most // 2)
        self._newer = array("Q")
        self._older = array("Q")

    def __contains__(self, incarnation: Incarnation) -> bool:
        key = _key(incarnation)
        return _holds(self._newer, key) or _holds(self._older, key)

    def add(self, incarnation: Incarnation) -> None:
        """The incarnation is gone. Adding it twice is harmless."""
        if incarnation in self:
            return
        if len(self._newer) >= self._half:
            self._older, self._newer = self._newer, array("Q")
        insort(self._newer, _key(incarnation))


def _key(incarnation: Incarnation) -> int:
    return int(xxhash.xxh3_64_intdigest(incarnation.encode()))


def _holds(keys: array[int], key: int) -> bool:
    at = bisect_left(keys, key)
    return at < len(keys) and keys[at] == key
