"""Whom to look at, and when, to find the dead: shells ask the health port and remove records (L6).

Called by `domicile.membership.death_watch` only. A look costs as much as it has incarnations in it,
so what ends every few milliseconds, a client, must not cause looks at everybody (I8).

What to commit once an incarnation is proved dead (C5): it must not wait for its lease.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

from domicile.core.ids import Incarnation
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.keys import LEADER_KEY, client_key, dead_key, node_key
from domicile.core.state.txn import At, Condition, Delete, Present, Put, Write

PROBE_S = 1.0
"""How often everybody is looked at."""

SOON_S = (0.0, 0.01, 0.05, 0.1)
"""When to look again once a connection broke: sockets and locks of a dead process go one by one."""

PARTED_S = (0.05, 0.2)
"""When to look at a client after its connection broke, if its record is still there by then: most
have just left."""

LOOKS = 1 + len(SOON_S)

EARLY_S = 0.01
"""How much before its time a look at everybody may come: who waited need not wait once more."""

CLIENTS_AT_ONCE = 32
"""Of how many clients a look at everybody consists; the next one goes on behind them. All nodes do
that, each from elsewhere, and a client is home to nothing: its lease ends it in any case."""


class ProbeSchedule:
    """One node's looks. All nodes are looked at each time; clients in turn, and suspects."""

    def __init__(self, me: Incarnation) -> None:
        self._me = me
        self._last = me
        self._round_at = float("-inf")
        self._rests = 0
        self._alarmed = 0
        self._suspects: dict[Incarnation, None] = {}

    def alarm(self) -> None:
        """A connection to a node broke, or somebody found one dead: there may be more of them."""
        self._alarmed = LOOKS
        self._rests = len(SOON_S)

    def suspect(self, client: Incarnation) -> None:
        """A client seems to be dead, which says something of that client alone."""
        self._suspects[client] = None

    def due(
        self, nodes: Iterable[Incarnation], clients: Mapping[Incarnation, object], now: float
    ) -> list[Incarnation]:
        """Whom to look at now."""
        found: dict[Incarnation, None] = {}
        if self._alarmed or now >= self._round_at - EARLY_S:
            self._alarmed = max(0, self._alarmed - 1)
            self._round_at = now + PROBE_S
            found.update(dict.fromkeys(nodes))
            found.update(dict.fromkeys(self._some(clients)))
            found.pop(self._me, None)
        suspects, self._suspects = self._suspects, {}
        found.update({one: None for one in suspects if one in clients})
        return list(found)

    def next_rest_s(self, now: float) -> float:
        """How long to wait for the next look, unless something happens."""
        left_s = 0.0 if self._suspects else max(0.0, self._round_at - now)
        if not self._rests:
            return left_s
        self._rests -= 1
        return min(left_s, SOON_S[len(SOON_S) - 1 - self._rests])

    def _some(self, clients: Iterable[Incarnation]) -> list[Incarnation]:
        order = sorted(clients)
        first = bisect_right(order, self._last)
        some = (order[first:] + order[:first])[:CLIENTS_AT_ONCE]
        self._last = some[-1] if some else self._last
        return some


def removal(
    members: ClusterView, dead: Incarnation, evidence: str, lease: str
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
