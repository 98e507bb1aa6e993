"""What `domicile inspect` shows of one node or one entity, from the store alone.

Called by `ops.stuck.commands`. It must ask no node and write nothing. Of what runs inside a node
it knows only what the node has reported: handlers that have run for too long (DX-09).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.ops.operator_commits import StoreSnapshot, find_node_record
from domicile.ops.status import ClusterReader, EntityPlace, NodeSeen, place_of, summed_up
from domicile.ops.stuck_seen import StuckSeen, stuck_record, stuck_seen


@dataclass(frozen=True, slots=True)
class NodeInspected:
    """One node, its shards by role, and its late handlers."""

    node: NodeSeen
    ttl_s: float
    protocols: tuple[int, int]
    serving: dict[str, list[int]]
    moving: dict[str, list[int]]
    residents: int | None
    """As of its last report on late handlers; None if it has reported none."""
    stuck: list[StuckSeen] = field(default_factory=list[StuckSeen])
    more_stuck: int = 0


@dataclass(frozen=True, slots=True)
class EntityInspected:
    """Where an entity is at home, and its late handlers."""

    place: EntityPlace
    stuck: list[StuckSeen] = field(default_factory=list[StuckSeen])


async def inspect_node(reader: ClusterReader, name: str) -> NodeInspected:
    """Everything that the store holds of a node, by its name or incarnation."""
    picture, now_s = await reader.picture(), reader.now_s()
    try:
        incarnation = find_node_record(picture, name)
    except LookupError:
        if _is_type(picture, name):
            raise LookupError(
                f"{name!r} is an entity type: say its id too, as in `domicile inspect {name} c1`"
            ) from None
        raise
    record = picture.members.nodes.get(incarnation)
    if record is None:
        raise LookupError(f"{name!r} is a client: it is home to nothing")
    status = summed_up(picture, reader.url, reader.cluster, reader.dead, reader.age, now_s)
    late = stuck_record(picture, incarnation)
    return NodeInspected(
        node=next(seen for seen in status.nodes if seen.incarnation == incarnation),
        ttl_s=record.ttl_s,
        protocols=record.protocols,
        serving=_shards(picture, incarnation, "serving"),
        moving=_shards(picture, incarnation, "moving"),
        residents=None if late is None else late.residents,
        stuck=[] if late is None else stuck_seen(picture.members, incarnation, late, now_s),
        more_stuck=0 if late is None else late.more,
    )


async def inspect_entity(
    reader: ClusterReader, kind: str, id: str, role: str | None = None
) -> EntityInspected:
    """The home of an entity, and its late handlers."""
    picture, now_s = await reader.picture(), reader.now_s()
    place = place_of(picture.members, EntityKey(kind, id), role, reader.dead)
    found: list[StuckSeen] = []
    owner = Incarnation(place.incarnation or "")
    late = stuck_record(picture, owner) if owner in picture.members.nodes else None
    if late is not None:
        seen = stuck_seen(picture.members, owner, late, now_s)
        found = [one for one in seen if (one.type, one.id) == (kind, id)]
    return EntityInspected(place, found)


def _is_type(picture: StoreSnapshot, name: str) -> bool:
    config, nodes = picture.members.config, picture.members.nodes.values()
    return (config is not None and name in config.types) or any(name in one.types for one in nodes)


def ranges(numbers: list[int]) -> str:
    """Numbers in order as people write them: `0-3, 7`."""
    runs: list[str] = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        first, last = members[0], members[-1]
        runs.append(str(first) if first == last else f"{first}-{last}")
    return ", ".join(runs)


def _shards(picture: StoreSnapshot, owner: Incarnation, state: str) -> dict[str, list[int]]:
    config = picture.members.config
    found: dict[str, list[int]] = {}
    for role, shards in sorted(({} if config is None else config.shards).items()):
        for number in range(shards):
            entry = picture.members.map.get(ShardKey(role, number))
            if entry.owner == owner and entry.state == state:
                found.setdefault(role, []).append(number)
    return found
