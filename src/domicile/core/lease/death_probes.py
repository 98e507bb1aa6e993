"""Which incarnations to probe, and when, and what to commit after a death is proved (C5, L6).

Only `domicile.membership.death_watch` calls this module; it asks the health port and removes
records. The cost of a probe round grows with the incarnations in it. Clients may end every few
milliseconds, so the end of a client must not cause a round over all incarnations (I8). A dead
incarnation's record is removed at once: it must not wait for its lease. Nothing here reads a clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

from domicile.core.ids import Incarnation
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.keys import LEADER_KEY, client_key, dead_key, node_key
from domicile.core.state.txn import At, Condition, Delete, Present, Put, Write

PROBE_S = 1.0
"""Seconds between two full probe rounds."""

SOON_S = (0.0, 0.01, 0.05, 0.1)
"""Pauses before the rounds after a connection broke. The sockets and locks of a dead process
disappear one by one, so one round is not enough."""

PARTED_S = (0.05, 0.2)
"""Pauses before probing a client whose connection broke. Most clients have just left, and their
record is gone by then."""

LOOKS = 1 + len(SOON_S)

EARLY_S = 0.01
"""A full probe round may start this many seconds early, so that a slightly early wake-up does not
wait a whole period."""

CLIENTS_AT_ONCE = 32
"""Clients in one full round; the next round continues with the following ones. Every node does this
from another starting point. A client has no shards, and its lease ends it in any case."""


class ProbeSchedule:
    """One node's probe schedule: each round has all nodes, the next few clients, and suspects."""

    def __init__(self, me: Incarnation) -> None:
        self._me = me
        self._last = me
        self._round_at = float("-inf")
        self._rests = 0
        self._alarmed = 0
        self._suspects: dict[Incarnation, None] = {}

    def alarm(self) -> None:
        """A connection to a node broke, or a node was found dead: more nodes may be dead."""
        self._alarmed = LOOKS
        self._rests = len(SOON_S)

    def suspect(self, client: Incarnation) -> None:
        """A client seems to be dead; that is no sign of other deaths."""
        self._suspects[client] = None

    def due(
        self, nodes: Iterable[Incarnation], clients: Mapping[Incarnation, object], now: float
    ) -> list[Incarnation]:
        """The incarnations to probe now."""
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
        """Seconds until the next round, unless something happens before."""
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
    """The commit that removes a dead incarnation's record, and the leader key if it was the leader.

    It also stores the evidence, under the lease of the node that found the death.
    """
    key = node_key(dead) if dead in members.nodes else client_key(dead)
    conditions: list[Condition] = [Present(key)]
    writes: list[Write] = [Delete(key), Put(dead_key(dead), evidence.encode(), lease)]
    if members.leader is not None and members.leader.incarnation == dead:
        # The lease of a dead leader must not delay the next election.
        conditions.append(At(LEADER_KEY, members.leader_revision))
        writes.append(Delete(LEADER_KEY))
    return tuple(conditions), tuple(writes)
