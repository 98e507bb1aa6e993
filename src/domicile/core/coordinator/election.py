"""Which nodes may become coordinator, and when they try (C1).

The elected control plane calls this module. The store decides which candidate wins; ranks only keep
candidates from trying at the same time. No candidate ever displaces an acting leader.
"""

from __future__ import annotations

from collections.abc import Mapping

from domicile.core.ids import Incarnation
from domicile.core.state.records import NodeRecord

RANK_STEP_S = 0.2
"""C1: seconds that a candidate waits for each candidate with a lower rank."""


def eligible(record: NodeRecord, role: str = "", *, leaving: bool = False) -> bool:
    """Whether a node may lead: it is a candidate, it has the role that may lead, and it is up. With
    `leaving`, a node that leaves may lead too."""
    here = record.status == "up" or (leaving and record.status == "leaving")
    return record.candidate and here and (not role or role in record.roles)


def rank(me: Incarnation, candidates: Mapping[Incarnation, int]) -> int | None:
    """The place of `me` among the candidates, ordered by the create revision of their records.
    None if `me` is not a candidate."""
    if me not in candidates:
        return None
    mine = (candidates[me], me)
    return sum((created, other) < mine for other, created in candidates.items())


def campaign_at(
    me: Incarnation, candidates: Mapping[Incarnation, int], absent_since: float | None
) -> float | None:
    """When to try for the leader key, which is absent since `absent_since`; None: not now."""
    place = rank(me, candidates)
    if place is None or absent_since is None:
        return None
    return absent_since + place * RANK_STEP_S
