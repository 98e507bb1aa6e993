"""What goes into a coordinator and what comes out of it: events and effects, all frozen.

The driver in `control` makes the events, `machine` makes the effects. Data only: nothing here
decides.
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
    """One later commit, as the watch delivers it."""

    changes: Changes


@dataclass(frozen=True, slots=True)
class ReleasedBy:
    """An owner has finished an epoch, finally (H10). A journal has seen epochs up to `floor`."""

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
    """A node answered, or sent any other message."""

    node: Incarnation


@dataclass(frozen=True, slots=True)
class CommitDone:
    """The outcome of a `Commit`."""

    txn: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Reread:
    """What is stored now under the key of a `ReadBack` (S1)."""

    txn: str
    item: Item | None


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of the latest `Arm` is reached."""


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    """A member tried to reach a node that the leader cannot reach (C6)."""

    voter: Incarnation
    node: Incarnation
    reached: bool


@dataclass(frozen=True, slots=True)
class StoreReturned:
    """The store answers again after an outage (C8)."""


@dataclass(frozen=True, slots=True)
class StrategyAnswered:
    """The answer of a user's function to `AskStrategy`; None: it failed or took too long."""

    situation: Situation
    wanted: Mapping[int, str] | None


DriverEvent = Listed | Changed | CommitDone | Reread | StoreReturned | Tick
"""What a driver feeds to any machine that decides from the contents of the store."""

ClusterEvent = ReleasedBy | RevertAsked | Heard | ProbeAnswered | StrategyAnswered
"""What nodes and a user's function report to a coordinator."""

CoordinatorEvent = DriverEvent | ClusterEvent


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit this to the store; answer with `CommitDone`."""

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
    """Send a stored entry to a node (C3)."""

    to: Incarnation
    shard: ShardKey
    entry: Entry


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell operators that a shard or some of its entities are put away, or no longer (DX-24)."""

    shard: ShardKey
    before: Entry
    after: Entry


@dataclass(frozen=True, slots=True)
class OwnersLost:
    """Tell operators of shards that lost one more owner in a row, with no entity to blame yet."""

    shards: tuple[tuple[ShardKey, int], ...]
    """Each with the number of owners that it lost."""


@dataclass(frozen=True, slots=True)
class AskProbe:
    """Ask a member whether it reaches a node. `ProbeAnswered` may follow, or nothing."""

    voter: Incarnation
    node: Incarnation


@dataclass(frozen=True, slots=True)
class AskStrategy:
    """Ask the user's function; answer with `StrategyAnswered` in bounded time in every case."""

    situation: Situation


@dataclass(frozen=True, slots=True)
class Resign:
    """This leadership is over; its `Coordinator` object takes no more events."""

    reason: str


DriverEffect = Commit | ReadBack | Arm | Resign
"""What a driver carries out for any machine."""

ClusterEffect = Tell | Announce | OwnersLost | AskProbe | AskStrategy
"""The effects that only a coordinator has."""

CoordinatorEffect = DriverEffect | ClusterEffect
