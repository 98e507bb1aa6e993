"""When a process that leaves has to stay for others who leave with it (H14).

Called by `life` while it leaves. Nodes let go of their shards by the word of a coordinator: if the
last that could lead went first, they would wait for their deadline and stop nothing.
"""

from __future__ import annotations

from domicile.core.election import eligible
from domicile.core.ids import NOBODY, Incarnation
from domicile.core.members import Members

TOGETHER_S = 0.5
"""Who leaves as the last that could lead waits so long for others to say that they leave."""


def needed(
    members: Members, me: Incarnation, role: str, *, leads: bool, since: float, now: float
) -> bool:
    """Whether `me`, which leaves since then, has to see others off.

    Only if nobody stays who could lead; then it is for whoever leads, and while nobody does for all
    who could, until one of them has won. A leader that leaves, too, may have made up its mind
    before it knew of `me`: so that is not relied upon at once. `role` is the one that leads, if not
    all do.
    """
    others = [record for node, record in members.nodes.items() if node != me]
    mine = members.nodes.get(me)
    if mine is None or any(eligible(record, role) for record in others):
        return False
    early = now < since + TOGETHER_S
    if not leads and not eligible(mine, role, leaving=True):
        return False
    # Who has just won may see its own name before it knows.
    if not leads and members.leader is not None and members.leader.incarnation != me:
        leader = members.nodes.get(members.leader.incarnation)
        if not (early and leader is not None and leader.status == "leaving"):
            return False
    if early and any(record.status == "up" for record in others):
        return True
    return _waiting(members, me)


def _waiting(members: Members, me: Incarnation) -> bool:
    """Whether another that leaves waits for a coordinator's word: to begin to empty a shard, or to
    have its next home stored. What goes to nobody it empties by itself."""
    leavers = {
        node: record
        for node, record in members.nodes.items()
        if record.status == "leaving" and node != me
    }
    return bool(leavers) and any(
        entry.owner in leavers and not (entry.state == "moving" and entry.to == NOBODY)
        for _, entry in members.map
    )
