"""What to commit once an incarnation is proved dead (C5): it must not wait for its lease."""

from __future__ import annotations

from domicile.core.ids import LEADER_KEY, Incarnation, client_key, dead_key, node_key
from domicile.core.members import Members
from domicile.core.txn import At, Condition, Delete, Present, Put, Write


def burial(
    members: Members, dead: Incarnation, evidence: str, lease: str
) -> tuple[tuple[Condition, ...], tuple[Write, ...]]:
    """Remove a dead incarnation's record, and the leader key if it held that.

    The evidence is stored in the same commit, under the lease of who found it.
    """
    key = node_key(dead) if dead in members.nodes else client_key(dead)
    conditions: list[Condition] = [Present(key)]
    writes: list[Write] = [Delete(key), Put(dead_key(dead), evidence.encode(), lease)]
    if members.leader is not None and members.leader.incarnation == dead:
        # A killed leader must not delay its own replacement.
        conditions.append(At(LEADER_KEY, members.leader_revision))
        writes.append(Delete(LEADER_KEY))
    return tuple(conditions), tuple(writes)
