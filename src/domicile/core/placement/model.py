"""The input and the output of a plan, all frozen, and small questions about the input.

The coordinator makes the input, `plan` makes the decisions. Nothing here decides or remembers.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from domicile.core.ids import NOBODY, EntityKey, Incarnation, ShardKey
from domicile.core.placement import versions
from domicile.core.state.records import NodeRecord
from domicile.core.state.shardmap import INNOCENT, Entry, Suspicion
from domicile.settings import Settings


class ShardTrials(NamedTuple):
    """What the owner of a shard has on trial in it."""

    new: tuple[EntityKey, ...] = ()
    """Entities of which a handler has just begun."""
    long: tuple[EntityKey, ...] = ()
    """Entities of which a handler has run for a while, or runs that ran well before."""
    alone: EntityKey | None = None
    """The one of the new entities that is tried alone, if no other entity is at this owner."""
    crowd: bool = False
    """Whether entities run that the owner could not name."""


@dataclass(frozen=True, slots=True)
class RoleInput:
    """One role's shards. Mappings are by shard number."""

    entries: tuple[Entry, ...]
    wishes: Mapping[int, str] = field(default_factory=dict[int, str])
    """Operators' wishes: node ids."""
    released: Mapping[int, int] = field(default_factory=dict[int, int])
    """Epochs that their owners released (H10), for the current owner and epoch only."""
    asked: Mapping[int, int] = field(default_factory=dict[int, int])
    """Epochs for which the owner asked to revert a move (H10)."""
    wished: Mapping[int, int] = field(default_factory=dict[int, int])
    """Epochs of moves under way whose reason is a wish."""
    resting_until: Mapping[int, float] = field(default_factory=dict[int, float])
    """For shards that could not be emptied in time: when they may be tried again."""
    recent_deaths: Mapping[int, int] = field(default_factory=dict[int, int])
    """How many owners a shard lost recently, before the present one."""
    needs: Mapping[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    """Entity types that an owner reported as needed by a shard and lacking (DX-26)."""
    named: Mapping[int, ShardTrials] = field(default_factory=dict[int, ShardTrials])
    """What the owner of a shard has on trial in it. A shard that is missing has nothing."""
    cleared: tuple[int, ...] = ()
    """Shards whose quarantines an operator wants to end."""
    due: tuple[int, ...] = ()
    """Shards whose quarantines have lasted long enough."""
    advice: Mapping[int, str] | None = None
    """Where a user's function wants shards: node ids. None: the named strategy decides."""
    undecided: bool = False
    """A user's function has not answered yet: no shard is placed or balanced for now."""


@dataclass(frozen=True, slots=True)
class PlanInput:
    """Everything that a plan depends on."""

    me: Incarnation
    nodes: Mapping[Incarnation, NodeRecord]
    """Every registered node, the oldest record first."""
    heard_at: Mapping[Incarnation, float]
    drains: tuple[str, ...]
    roles: Mapping[str, RoleInput]
    balance: bool = False
    strategy: str = "least_shards"
    target: str = ""
    """The version that operators want; empty: the newest that is present."""
    known_since: Mapping[Incarnation, float] = field(default_factory=dict[Incarnation, float])
    """When each record was first seen. A node that is missing here is not new."""
    departing_since: Mapping[Incarnation, float] = field(default_factory=dict[Incarnation, float])
    """When each departing node was first seen as departing. A node that is missing here has been
    departing for a long time."""


class Own(msgspec.Struct, frozen=True, gc=False):
    """A shard without a home gets an owner. `gone`: because the old owner's record is gone (X)."""

    shard: ShardKey
    owner: Incarnation
    gone: bool
    suspicion: Suspicion = INNOCENT


class Move(msgspec.Struct, frozen=True, gc=False):
    """A shard's owner must empty it for another node."""

    shard: ShardKey
    to: Incarnation


class Revert(msgspec.Struct, frozen=True, gc=False):
    """A move is cancelled; the shard stays with its owner."""

    shard: ShardKey


class Quarantine(msgspec.Struct, frozen=True, gc=False):
    """A shard that killed its owners gets no home for a while (DX-20)."""

    shard: ShardKey
    suspicion: Suspicion


Decision = Own | Move | Revert | Quarantine


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions, each shard in at most one of them."""

    owns: tuple[Own, ...] = ()
    moves: tuple[Move, ...] = ()
    reverts: tuple[Revert, ...] = ()
    quarantines: tuple[Quarantine, ...] = ()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """All decisions, the most urgent first."""
        return (*self.quarantines, *self.owns, *self.moves, *self.reverts)


def heard(view: PlanInput, node: Incarnation, now: float, heard_s: float) -> bool:
    """Whether a node was heard within `heard_s` (C7); this process always hears itself."""
    return node == view.me or now - view.heard_at.get(node, float("-inf")) <= heard_s


def new(view: PlanInput, node: Incarnation, now: float, heard_s: float) -> bool:
    """Whether a node has just registered."""
    return now - view.known_since.get(node, float("-inf")) <= heard_s


def timed_inputs(view: PlanInput, now: float, settings: Settings) -> tuple[object, ...]:
    """What a plan takes from its input that time alone can change, shards that rest aside.

    If these are equal at two times and the rest of the input is equal too, so are the plans.
    """
    heard_s = settings.heard_s
    return (
        tuple(
            (heard(view, node, now, heard_s), new(view, node, now, heard_s)) for node in view.nodes
        ),
        tuple(patient(view, now, settings)),
    )


def fresh(
    view: PlanInput,
    role: str,
    willing: Mapping[Incarnation, NodeRecord],
    now: float,
    settings: Settings,
) -> bool:
    """Whether a node of the target version has just registered and was not heard yet (SM-14).

    A shard that a departing node gave to another node now would have to move again. Leaving nodes
    count among the versions, so the last node of the old version waits too.
    """
    if not versions.mixed(one.version for one in view.nodes.values() if role in one.roles):
        return False
    allowed = versions.target_versions((record.version for record in willing.values()), view.target)
    return any(
        record.version in allowed
        and new(view, node, now, settings.heard_s)
        and not heard(view, node, now, settings.heard_s)
        for node, record in willing.items()
    )


def patient(view: PlanInput, now: float, settings: Settings) -> dict[Incarnation, float]:
    """Departing nodes that may wait for a new node of the target version, and until when.

    All new nodes share this time: a node that crashes and registers again, under any name, does not
    extend it.
    """
    ends = {node: since + settings.heard_s for node, since in view.departing_since.items()}
    return {node: end for node, end in ends.items() if now < end}


def emptying(
    view: PlanInput,
    role: str,
    leaving: Mapping[Incarnation, None],
    willing: Mapping[Incarnation, NodeRecord],
    now: float,
    settings: Settings,
) -> Mapping[Incarnation, None]:
    """The departing nodes that do not wait for a new node (SM-14)."""
    if not leaving or not fresh(view, role, willing, now, settings):
        return leaving
    waiting = patient(view, now, settings)
    return {node: None for node in leaving if node not in waiting}


def departing(
    nodes: Mapping[Incarnation, NodeRecord], drains: Container[str]
) -> dict[Incarnation, None]:
    """Nodes that leave or are drained."""
    return {
        node: None
        for node, record in nodes.items()
        if record.status == "leaving" or record.node in drains
    }


def receives(record: NodeRecord, role: str) -> bool:
    """Whether a node could be home to shards of a role: it has the role, is up, has capacity."""
    return role in record.roles and record.status == "up" and record.capacity > 0


def fitting(
    nodes: Mapping[Incarnation, NodeRecord], types: Iterable[str]
) -> dict[Incarnation, None]:
    """Nodes that have all these entity types (DX-26). Types that none of the nodes has do not
    count; without any other type, no node fits."""
    wanted = [kind for kind in types if any(kind in record.types for record in nodes.values())]
    return {
        node: None
        for node, record in nodes.items()
        if wanted and all(kind in record.types for kind in wanted)
    }


def willing(
    nodes: Mapping[Incarnation, NodeRecord], role: str, drains: Container[str]
) -> dict[Incarnation, NodeRecord]:
    """Nodes that may get shards of a role: able to receive, and not drained."""
    return {
        node: record
        for node, record in nodes.items()
        if receives(record, role) and record.node not in drains
    }


def stranded(view: PlanInput, role: str) -> list[int]:
    """Shards that move from one leaving node to another while no node stays that could have them
    (H14).

    They should move to `NOBODY` instead: then the next owner does not count an owner death (DX-20).
    """
    nodes, entries = view.nodes, view.roles[role].entries
    if any(receives(record, role) for record in nodes.values()):
        return []
    return [
        number
        for number, entry in enumerate(entries)
        if entry.state == "moving"
        and entry.to != NOBODY
        and entry.owner in nodes
        and nodes[entry.owner].status == "leaving"
    ]


def fallen(part: RoleInput, homeless: Iterable[int]) -> dict[int, Incarnation]:
    """Shards that may have caused the death of their owner, and that owner (DX-20).

    Not shards that moved to `NOBODY`: their owner left normally (H14).
    """
    owners: dict[int, Incarnation] = {}
    for shard in homeless:
        entry = part.entries[shard]
        left = entry.state == "moving" and entry.to == NOBODY
        if entry.owner != NOBODY and shard not in part.released and not left:
            owners[shard] = entry.owner
    return owners
