"""Whom a leader reaches, and what follows for those it does not (C5, C6).

Called by the coordinator. Silence alone evicts nobody: at least half of the other members must
fail to reach a node too. A leader that itself reaches under half of the members gives up. It
only says what is due; every removal is a commit under the leader's revision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from domicile.core.ids import Incarnation
from domicile.core.lease.lease import RECORD_FOREVER_S
from domicile.core.state.records import NodeRecord
from domicile.settings import CLOCK_DRIFT, Settings

MOST_PROBED = 32
"""I6: silent nodes that are asked about at one look; the others have their turn later."""

VOTE_S = 3.0
"""How long a member's word about a node counts."""

GIVE_UP = 1.5
"""A leader reaching under half resigns after this many times `evict_after_s`, so that records of
the dead have run out by then."""


UNREACHED = "it reaches under half of the members"
"""Why a leader resigns that should not campaign again soon."""


@dataclass(frozen=True, slots=True)
class EvictionSteps:
    """What follows from silence now."""

    probes: tuple[tuple[Incarnation, Incarnation], ...] = ()
    """Pairs of (voter, node): ask the one whether it reaches the other."""
    evict: tuple[Incarnation, ...] = ()
    remove: tuple[Incarnation, ...] = ()
    """Evicted so long ago that they have stopped, whatever happened to them (C5)."""
    resign: bool = False


class Eviction:
    """One leadership's view of who answers. Times are of its own clock."""

    def __init__(self, me: Incarnation, settings: Settings) -> None:
        self._me, self._settings = me, settings
        self._known_since: dict[Incarnation, float] = {}
        self._evicted_at: dict[Incarnation, float] = {}
        self._votes: dict[Incarnation, dict[Incarnation, tuple[bool, float]]] = {}
        self._probed_at: dict[Incarnation, float] = {}
        self._under_half_since: float | None = None

    @property
    def pace_s(self) -> float:
        """How often to look: also while a vote that was asked for at the last look still counts."""
        return min(self._settings.evict_after_s / 4, VOTE_S / 2)

    def voted(self, voter: Incarnation, node: Incarnation, reached: bool, now: float) -> None:
        """A member's word about a node it was asked about."""
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
            # C9: without a lease it would stop only if it read that; whoever is silent may not.
            if silent_s < self._settings.evict_after_s / 2 or nodes[node].ttl_s >= RECORD_FOREVER_S:
                continue
            # It has said why it is silent, and ends by itself if that lasts too long (DX-10).
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
        # C5: counted from when this leadership saw it committed; the next one waits afresh.
        self._evicted_at = {
            node: self._evicted_at.get(node, now)
            for node, record in nodes.items()
            if record.status == "evicted"
        }
        self._votes = {node: votes for node, votes in self._votes.items() if node in nodes}
        self._probed_at = {node: at for node, at in self._probed_at.items() if node in nodes}

    def _agreed(self, node: Incarnation, others: list[Incarnation], now: float) -> bool:
        """Whether at least half of the other members can't reach it either (C6)."""
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
