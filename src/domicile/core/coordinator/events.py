"""What goes into a coordinator and what comes out of it: events and effects, all frozen.

Made by the shells in `control` (events) and by `coordinator` (effects). Data only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from domicile.core.ids import Incarnation, ShardKey
from domicile.core.machines import Arm
from domicile.core.placement.strategies import Situation
from domicile.core.state.shardmap import Entry
from domicile.core.state.txn import Changes, Condition, Item, Listing, Outcome, Write


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
    """An owner is done with an epoch, finally (H10); a journal has seen epochs up to `floor`."""

    owner: Incarnation
    shard: ShardKey
    epoch: int
    floor: int = 0


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


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    """A member tried to reach a node that the leader lost (C6)."""

    voter: Incarnation
    node: Incarnation
    reached: bool


@dataclass(frozen=True, slots=True)
class StoreReturned:
    """The store answers again after it was away (C8)."""


@dataclass(frozen=True, slots=True)
class StrategyAnswered:
    """What a user's function said to a `AskStrategy`; None: it failed or took too long."""

    situation: Situation
    wanted: Mapping[int, str] | None


DriverEvent = Listed | Changed | CommitDone | Reread | StoreReturned | Tick
"""What a driver feeds to any machine that decides by what the store says."""

ClusterEvent = ReleasedBy | RevertAsked | Heard | ProbeAnswered | StrategyAnswered
"""What nodes and a user's function say to a coordinator."""

CoordinatorEvent = DriverEvent | ClusterEvent


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
class AskProbe:
    """Ask a member whether it reaches a node; answered by `ProbeAnswered`, or not at all."""

    voter: Incarnation
    node: Incarnation


@dataclass(frozen=True, slots=True)
class AskStrategy:
    """Ask the user's function; answer with `StrategyAnswered`, in bounded time whatever it does."""

    situation: Situation


@dataclass(frozen=True, slots=True)
class Resign:
    """Leads no longer; this object is spent."""

    reason: str


DriverEffect = Commit | ReadBack | Arm | Resign
"""What a driver carries out for any machine."""

ClusterEffect = Tell | AskProbe | AskStrategy
"""What only a coordinator wants."""

CoordinatorEffect = DriverEffect | ClusterEffect
