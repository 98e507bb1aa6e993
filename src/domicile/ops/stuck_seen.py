"""What nodes report in the store about handlers that have run for too long (DX-09).

Used by `ops.status` and by `domicile inspect`. A record that can't be read counts as none.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from domicile.core.ids import Incarnation
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.keys import stuck_key
from domicile.diagnose.records import StuckRecord, decode_stuck
from domicile.ops.operator_commits import StoreSnapshot


@dataclass(frozen=True, slots=True)
class StuckSeen:
    """A handler that has run for too long (DX-09)."""

    node: str
    incarnation: str
    type: str
    id: str
    role: str
    shard: int
    handler: str
    kind: str
    age_s: float
    queue: int
    stack: tuple[str, ...]


def stuck_record(picture: StoreSnapshot, incarnation: Incarnation) -> StuckRecord | None:
    """A node's report on its late handlers, if there is a readable one."""
    item = picture.item(stuck_key(incarnation))
    if item is None:
        return None
    try:
        return decode_stuck(item.value)
    except msgspec.MsgspecError:
        return None


def stuck_seen(
    members: ClusterView, incarnation: Incarnation, record: StuckRecord, now_s: float | None
) -> list[StuckSeen]:
    """The late handlers of one node, the oldest first."""
    node = members.nodes[incarnation].node
    return [
        StuckSeen(
            node, incarnation, turn.type, turn.id, turn.role, turn.shard, turn.handler, turn.kind,
            round(record.age_s(turn, now_s), 3), turn.queue, turn.stack,
        )
        for turn in record.turns
    ]  # fmt: skip
