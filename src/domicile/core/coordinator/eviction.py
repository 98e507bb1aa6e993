"""Which nodes a leader reaches, and what follows for the nodes that it does not reach (C5, C6).

The coordinator calls this module. Silence alone evicts no node: at least half of the other members
must fail to reach the node too. A leader that reaches under half of the members resigns. This
module only says what is due. It never removes anything: a removal is a commit under the leader's
revision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from domicile.core.ids import Incarnation
from domicile.core.lease.lease import RECORD_FOREVER_S
from domicile.core.state.records import NodeRecord
from domicile.settings import CLOCK_DRIFT, Settings

MOST_PROBED = 32
"""I6: silent nodes that one look asks about; later looks ask about the others."""

VOTE_S = 3.0
"""Seconds for which a member's vote about a node counts."""

GIVE_UP = 1.5
"""A leader that reaches under half of the members resigns after `GIVE_UP` * `evict_after_s`. By
then the records of dead nodes have expired."""


UNREACHED = "it reaches under half of the members"
"""The reason of a leader that resigns and should not campaign again soon."""


@dataclass(frozen=True, slots=True)
class EvictionSteps:
    """What follows from silence now."""

    probes: tuple[tuple[Incarnation, Incarnation], ...] = ()
    """Pairs of (voter, node): ask the voter whether it reaches the node."""
    evict: tuple[Incarnation, ...] = ()
    remove: tuple[Incarnation, ...] = ()
    """Nodes that were evicted so long ago that they have stopped in every case (C5)."""
    resign: bool = False


class Eviction:
    """One leadership's view of which nodes answer. All times are of its own clock."""

    def __init__(self, me: Incarnation, settings: Settings) -> None:
        self._me, self._settings = me, settings
        self._known_since: dict[Incarnation, float] = {}
        self._evicted_at: dict[Incarnation, float] = {}
        self._votes: dict[Incarnation, dict[Incarnation, tuple[bool, float]]] = {}
        self._probed_at: dict[Incarnation, float] = {}
        self._under_half_since: float | None = None

    @property
    def pace_s(self) -> float:
        """Seconds between two looks: short enough that a vote from the last look still counts."""
        return min(self._settings.evict_after_s / 4, VOTE_S / 2)

    def voted(self, voter: Incarnation, node: Incarnation, reached: bool, now: float) -> None:
        """A member says whether it reaches a node that the leader asked about."""
        if node in self._known_since and voter in self._known_since:
            self._votes.setdefault(node, {})[voter] = (reached, now)

    def look(
        self,
        nodes: Mapping[Incarnation, NodeRecord],
        heard_at: Mapping[Incarnation, float],
        now: float,
    ) -> EvictionSteps:
        """What is due now."""
        self._notice(nodes, now)
        staying = [node for node, record in nodes.items() if record.status != "evicted"]
        silent = {
            node: now - max(heard_at.get(node, 0.0), self._known_since[node])
            for node in staying
            if node != self._me
        }
        if self._gives_up(staying, silent, now):
            return EvictionSteps(resign=True)
        remove = tuple(
            node
            for node, since in self._evicted_at.items()
            if now >= since + nodes[node].ttl_s * (1 + CLOCK_DRIFT)
        )
        if self._settings.fencing != "lease":
            return EvictionSteps(remove=remove)
        probes: list[tuple[Incarnation, Incarnation]] = []
        evict: list[Incarnation] = []
        asked = 0
        for node, silent_s in silent.items():
            # C9: a node without a lease stops only if it reads the eviction, and a silent node may
            # not read it.
            if silent_s < self._settings.evict_after_s / 2 or nodes[node].ttl_s >= RECORD_FOREVER_S:
                continue
            # DX-10: the node itself reported a blocked loop, and it ends if that lasts too long.
            if nodes[node].stalled:
                continue
            others = [other for other in staying if other not in (self._me, node)]
            if silent_s >= self._settings.evict_after_s and self._agreed(node, others, now):
                evict.append(node)
            elif now - self._probed_at.get(node, float("-inf")) >= VOTE_S / 3:
                asked += 1
                if asked <= MOST_PROBED:
                    self._probed_at[node] = now
                    probes += [(other, node) for other in others]
        return EvictionSteps(tuple(probes), tuple(evict), remove)

    def _notice(self, nodes: Mapping[Incarnation, NodeRecord], now: float) -> None:
        self._known_since = {node: self._known_since.get(node, now) for node in nodes}
        # C5: counted from when this leadership saw the eviction; the next one starts again.
        self._evicted_at = {
            node: self._evicted_at.get(node, now)
            for node, record in nodes.items()
            if record.status == "evicted"
        }
        self._votes = {node: votes for node, votes in self._votes.items() if node in nodes}
        self._probed_at = {node: at for node, at in self._probed_at.items() if node in nodes}

    def _agreed(self, node: Incarnation, others: list[Incarnation], now: float) -> bool:
        """Whether at least half of the other members cannot reach the node either (C6)."""
        votes = self._votes.get(node, {})
        fresh = [votes[other] for other in others if other in votes]
        against = sum(not reached and now - at <= VOTE_S for reached, at in fresh)
        return 2 * against >= len(others)

    def _gives_up(
        self, staying: list[Incarnation], silent: Mapping[Incarnation, float], now: float
    ) -> bool:
        reached = sum(silent.get(node, 0.0) <= self._settings.heard_s for node in staying)
        if 2 * reached >= len(staying):
            self._under_half_since = None
            return False
        if self._under_half_since is None:
            self._under_half_since = now
        return now - self._under_half_since >= GIVE_UP * self._settings.evict_after_s
