"""Where a server stands: its chain of histories, and its position in them (F6, F8, F10).

A primary of epoch e begins history e at the offset that it has when it is promoted. A server's
*chain* names the histories that its data went through, the oldest first. Its *position* is the
epoch of its last entry and its offset. Positions are compared by the epoch first: an offset alone
says nothing about the content. Pure functions; the machine, the choice and the drivers use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

BEFORE_THE_GROUP = 0
"""The epoch of what a server had before it joined a group."""


class HistoryStart(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The history of one epoch, and the offset behind which its entries stand."""

    epoch: int
    begin: int


Chain = tuple[HistoryStart, ...]

ORIGIN: Chain = (HistoryStart(BEFORE_THE_GROUP, 0),)
"""The chain of a server that no primary of the group has written to."""


class Position(NamedTuple):
    """The epoch of a server's last entry, and its offset. Greater means more advanced (F8)."""

    epoch: int
    offset: int

    def __str__(self) -> str:
        return f"{self.epoch}:{self.offset}"


NOWHERE = Position(BEFORE_THE_GROUP, 0)


def own_chain(chain: Sequence[HistoryStart], offset: int) -> Chain:
    """The histories of which a server has an entry.

    A server shows the history of the primary that it follows before one byte of it has arrived.
    """
    return tuple(
        start for start in chain if start.begin < offset or start.epoch == BEFORE_THE_GROUP
    )


def position_of(chain: Sequence[HistoryStart], offset: int) -> Position:
    """A server's position, by the history of its last entry."""
    owned = own_chain(chain, offset)
    return Position(owned[-1].epoch if owned else BEFORE_THE_GROUP, offset)


def common_offset(chain: Sequence[HistoryStart], offset: int, other: Sequence[HistoryStart]) -> int:
    """Up to which offset a server agrees with a primary, as far as both chains tell (F10).

    What the server has beyond is not part of the primary's histories.
    """
    shared = 0
    while shared < min(len(chain), len(other)) and chain[shared] == other[shared]:
        shared += 1
    if not shared:
        return 0
    parts = [one[shared].begin for one in (chain, other) if shared < len(one)]
    return min([offset, *parts])


def next_chain(chain: Sequence[HistoryStart], offset: int, epoch: int) -> Chain:
    """The chain of a server that is promoted for an epoch at this offset (F9)."""
    return (*own_chain(chain, offset), HistoryStart(epoch, offset))
