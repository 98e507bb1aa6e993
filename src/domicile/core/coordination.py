"""What goes into a coordinator and what comes out of it: events and effects, all frozen.

Made by the shells in `control` (events) and by `coordinator` (effects). Data only.
"""

from __future__ import annotations

from dataclasses import dataclass

from domicile.core.ids import Incarnation, ShardKey
from domicile.core.shardmap import Entry
from domicile.core.txn import Changes, Condition, Item, Listing, Outcome, Write


@dataclass(frozen=True, slots=True)
class Listed:
    """Everything in the store at one revision (C2)."""

    listing: Listing


@dataclass(frozen=True, slots=True)
class Changed:
    """One later commit, as the watch brings it."""

    changes: Changes


@dataclass(frozen=True, slots=True)
class ReleasedBy:
    """An owner is done with an epoch, finally (H10)."""

    owner: Incarnation
    shard: ShardKey
    epoch: int


@dataclass(frozen=True, slots=True)
class RevertAsked:
    """An owner could not empty a shard in time and asks to keep it (H10)."""

    owner: Incarnation
    shard: ShardKey
    epoch: int


@dataclass(frozen=True, slots=True)
class Heard:
    """A node answered, or said anything else."""

    node: Incarnation


@dataclass(frozen=True, slots=True)
class CommitDone:
    """What became of a `Commit`."""

    txn: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Reread:
    """What is stored now under the key of a `ReadBack` (S1)."""

    txn: str
    item: Item | None


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of the latest `Arm` has come."""


Event = Listed | Changed | ReleasedBy | RevertAsked | Heard | CommitDone | Reread | Tick


@dataclass(frozen=True, slots=True)
class Commit:
    """Ask the store; answer with `CommitDone`."""

    txn: str
    conditions: tuple[Condition, ...]
    writes: tuple[Write, ...]


@dataclass(frozen=True, slots=True)
class ReadBack:
    """The commit's outcome is unknown: read the key again, answer with `Reread` (S1)."""

    txn: str
    key: bytes


@dataclass(frozen=True, slots=True)
class Tell:
    """Push a stored entry to a node (C3)."""

    to: Incarnation
    shard: ShardKey
    entry: Entry


@dataclass(frozen=True, slots=True)
class Arm:
    """Wants a `Tick` at that time. Replaces the one before."""

    at: float


@dataclass(frozen=True, slots=True)
class Resign:
    """Leads no longer; this object is spent."""

    reason: str


Effect = Commit | ReadBack | Tell | Arm | Resign
