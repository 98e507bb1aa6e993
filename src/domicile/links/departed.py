"""Who is gone, in eight bytes each: incarnations whose frames nobody takes any more (I1b).

Kept by the link layer for as long as its own incarnation lives. A process that lives for months
sees many come and go, so nothing may be kept of one but a number: two sorted arrays of hashes, of
which the older one is dropped when the newer one is full.

One that never was here is found only if 64 bits of its hash are those of another: with as many
remembered as may be, once in 280 trillion newcomers. The link layer believes the record of whoever
is registered before it believes this memory, so that such a one is refused only until it is known.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort

import xxhash

from domicile.core.ids import Incarnation

MOST_GONE = 65_536
"""I6: half a megabyte. When the oldest are dropped, their records went before those of many
others, so their leases ended long ago and their own guards let nothing leave (L3); what the network
still holds of them carries epochs that are over (H7); no name is ever used again."""


class DepartedPeers:
    """The last incarnations that are gone: at least half of `most`, and no more than that."""

    __slots__ = ("_half", "_newer", "_older")

    def __init__(self, most: int = MOST_GONE) -> None:
        self._half = max(1, most // 2)
        self._newer = array("Q")
        self._older = array("Q")

    def __contains__(self, incarnation: Incarnation) -> bool:
        key = _key(incarnation)
        return _holds(self._newer, key) or _holds(self._older, key)

    def add(self, incarnation: Incarnation) -> None:
        """It is gone, for good. Harmless if that is known."""
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
