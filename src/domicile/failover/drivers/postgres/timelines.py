"""Timelines of PostgreSQL: where two servers part, and how one comes to follow the other. Pure.

A *lineage* is the timelines that a server's log went through, each with the place where it ends.
Numbers of timelines repeat: two standbys of one primary that are promoted both begin timeline 2.
What the chains of the group say goes first; a lineage says what PostgreSQL's own tools will do.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

SEGMENT_NAME = 24
"""Digits in the name of a log segment: eight for the timeline, sixteen for the place."""


class Stretch(NamedTuple):
    """One timeline of a lineage: its entries lie in [begin, end)."""

    timeline: int
    begin: int
    end: int


Lineage = tuple[Stretch, ...]


class Approach(Enum):
    """How a server comes to follow a primary. The values are texts for people."""

    STREAM = "its log is part of the primary's: it streams"
    REWIND = "it goes back to where the two part, by pg_rewind"
    COPY = "everything is copied, by pg_basebackup"


def lsn_of(text: str) -> int:
    """A place in the log from PostgreSQL's text, as `16/B374D848`."""
    high, _, low = text.partition("/")
    return (int(high, 16) << 32) + int(low, 16)


def lsn_text(lsn: int) -> str:
    """PostgreSQL's text of a place in the log."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def lineage(history: str, timeline: int, end: int) -> Lineage:
    """From the text of a timeline's history file; cut off at the server's own end."""
    found: list[Stretch] = []
    begin = 0
    for line in history.splitlines():
        words = line.split("#", 1)[0].split(None, 2)
        if len(words) >= 2:
            until = lsn_of(words[1])
            found.append(Stretch(int(words[0]), begin, until))
            begin = until
    found.append(Stretch(timeline, begin, end))
    return tuple(one._replace(end=min(one.end, end)) for one in found if one.begin < end)


def parting(own: Lineage, other: Lineage) -> int:
    """Up to which place PostgreSQL takes two logs for the same."""
    shared = 0
    for mine, theirs in zip(own, other, strict=False):
        if (mine.timeline, mine.begin) != (theirs.timeline, theirs.begin):
            break
        shared = min(mine.end, theirs.end)
        if mine.end != theirs.end:
            break
    return shared


def approach(own: Lineage, primary: Lineage, *, kept: int, oldest: int) -> Approach:
    """How to follow, if both are of one system. `kept`: up to where the chains agree.

    `oldest`: the first place of which the primary still has the log.
    """
    end = own[-1].end if own else 0
    parts = parting(own, primary)
    if end > kept and parts > kept:
        # PostgreSQL takes for shared what is not: two timelines with one number.
        return Approach.COPY
    if parts < oldest:
        return Approach.COPY
    return Approach.STREAM if parts >= end else Approach.REWIND


def segment_name(timeline: int, number: int, segment_bytes: int) -> str:
    """The name of the log segment with this number."""
    in_each = (1 << 32) // segment_bytes
    return f"{timeline:08X}{number // in_each:08X}{number % in_each:08X}"


def segment_number(name: str, segment_bytes: int) -> int:
    """The number of a log segment, from its name."""
    return int(name[8:16], 16) * ((1 << 32) // segment_bytes) + int(name[16:24], 16)


def is_segment(name: str) -> bool:
    """Whether a file's name is that of a log segment."""
    return len(name) == SEGMENT_NAME and all(digit in "0123456789ABCDEF" for digit in name)


def newest_timeline(names: Iterable[str], end: int, segment_bytes: int) -> int:
    """The timeline of a server whose log ends at `end`, by the names of its log's files; or 0."""
    number = max(0, end - 1) // segment_bytes
    return max(
        (
            int(name[:8], 16)
            for name in names
            if is_segment(name) and segment_number(name, segment_bytes) == number
        ),
        default=0,
    )
