"""Write quorums of synchronous mode, and how a group changes them without losing a write (F12).

A write is acknowledged once the primary and `count` members of a *write quorum* have it. An
election reads: for every quorum that the state lists, the primary itself, or so many members that
one of them must have each acknowledged write. So the state must list a quorum *before* the server
uses it, and may drop an old one only *after* the one in use holds everything up to the position at
which it came into use. In other words: tighten reads before loosening writes, and loosen reads
after catching up.

Pure. The machine calls it at the primary (`next_step`) and in an election (`unmet`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from domicile.failover.records import MAX_QUORUMS, WriteQuorum


class SyncMove(Enum):
    """What changes next. The values are texts for people."""

    LIST = "the state lists the new quorum"
    USE = "the server uses the new quorum"
    DROP = "the state drops the quorums that are no longer in use"


@dataclass(frozen=True, slots=True)
class SyncStep:
    """One step towards the wanted quorum. `listed` is what the state says after it."""

    move: SyncMove
    quorum: WriteQuorum
    listed: tuple[WriteQuorum, ...]


@dataclass(frozen=True, slots=True)
class InUse:
    """The quorum that the primary's server waits for, and its offset when that began."""

    quorum: WriteQuorum
    since: int


def holds(quorum: WriteQuorum, offset: int, acknowledged: Mapping[str, int]) -> bool:
    """Whether enough members have everything up to an offset."""
    have = [member for member in quorum.members if acknowledged.get(member, -1) >= offset]
    return len(have) >= quorum.count


def next_step(
    listed: Sequence[WriteQuorum],
    in_use: InUse,
    wanted: WriteQuorum,
    acknowledged: Mapping[str, int],
) -> SyncStep | None:
    """The next step of a serving primary towards `wanted`; None if there is nothing to do yet.

    `acknowledged`: up to which offset each member has confirmed that it has the data. The caller
    repeats this until it returns None. A step whose outcome is unknown may be repeated.
    """
    listed = tuple(listed)
    if wanted != in_use.quorum:
        if wanted in listed:
            return SyncStep(SyncMove.USE, wanted, listed)
        if len(listed) < MAX_QUORUMS:
            return SyncStep(SyncMove.LIST, wanted, (*listed, wanted))
        # Too many: the one in use must take over from the others first.
    if listed != (in_use.quorum,) and holds(in_use.quorum, in_use.since, acknowledged):
        return SyncStep(SyncMove.DROP, in_use.quorum, (in_use.quorum,))
    return None


@dataclass(frozen=True, slots=True)
class Unmet:
    """A listed quorum of which an election has read too little."""

    quorum: WriteQuorum
    missing: int
    """How many more members it needs; the primary of that quorum alone would do, too."""

    def __str__(self) -> str:
        return f"{self.quorum}: needs {self.quorum.primary}, or {self.missing} more of its members"


def unmet(listed: Sequence[WriteQuorum], readers: Collection[str]) -> tuple[Unmet, ...]:
    """The quorums that may hold an acknowledged write which none of these servers has (F7)."""
    found: list[Unmet] = []
    for quorum in listed:
        if quorum.primary in readers:
            continue
        read = sum(member in readers for member in quorum.members)
        needed = len(quorum.members) - quorum.count + 1
        if read < needed:
            found.append(Unmet(quorum, needed - read))
    return tuple(found)


def wanted_quorum(
    primary: str, followers: Sequence[str], count: int, now_used: WriteQuorum | None
) -> WriteQuorum | None:
    """The quorum of the members that follow the primary and are synchronized (FO-02).

    With fewer than `count` of them the present one stays: writes then wait, none is lost. None if
    there never was one.
    """
    members = tuple(sorted(dict.fromkeys(followers)))
    if len(members) < count:
        return now_used
    return WriteQuorum(primary, members, count)
