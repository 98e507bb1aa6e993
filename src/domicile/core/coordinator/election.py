"""Who may become coordinator, and when to try (C1).

Called by the elected control plane. The store decides who wins; ranks only keep candidates from
trying all at once. Nobody is ever pre-empted.
"""

from __future__ import annotations

from collections.abc import Mapping

from domicile.core.ids import Incarnation
from domicile.core.state.records import NodeRecord

RANK_STEP_S = 0.2
"""C1: how long each rank leaves to the one before it."""


def eligible(record: NodeRecord, role: str = "", *, leaving: bool = False) -> bool:
    """Whether a node may lead: it wants to, it is staying (or `leaving` is no matter), and it has
    the role that may lead."""
    here = record.status == "up" or (leaving and record.status == "leaving")
    return record.candidate and here and (not role or role in record.roles)


def rank(me: Incarnation, candidates: Mapping[Incarnation, int]) -> int | None:
    """The place among candidates by create revision of their record; None if not among them."""
    if me not in candidates:
        return None
    mine = (candidates[me], me)
    return sum((created, other) < mine for other, created in candidates.items())


def campaign_at(
    me: Incarnation, candidates: Mapping[Incarnation, int], absent_since: float | None
) -> float | None:
    """When to try for the leader key, seen absent since then; None: not now."""
    place = rank(me, candidates)
    if place is None or absent_since is None:
        return None
    return absent_since + place * RANK_STEP_S
