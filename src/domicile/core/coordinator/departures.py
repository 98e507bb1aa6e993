"""How nodes leave without gaps: how fast they empty, and when each of them may go (H14). Pure.

**How fast.** The coordinator asks `DrainPacing` about what the planner wants, before it commits any
of it. Once the store says that a shard moves, its senders hold their messages until it has its next
home. If all shards of a node moved at once, each would be away for as long as all of them take.
Nodes that leave together share one store and one coordinator, so they share the stages, too.
A shard that takes long to empty does not count for long, so slow shards hold up no others. Shards
that get no home, because every node leaves, go all at once: nobody waits for them, and the leader
that could tell them later may be gone by then.

Nodes that leave together announce it together, but not in the very same moment. What the first of
them gave to the second would have to move once more: so it serves on for a moment.

**When it may go.** A node that leaves asks, in this order: is each of its shards finished
(`unfinished`); if its time is over, may it take more (`may_overstay`); must it stay for nodes that
leave with it (`must_stay`). Nodes let go of their shards by the word of a coordinator: if the last
eligible leader went first, they would wait for their deadline and stop nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from domicile.core.coordinator.election import eligible
from domicile.core.handoff.tables import Phase
from domicile.core.ids import NOBODY, Incarnation, ShardKey
from domicile.core.placement.model import Decision, Move, PlanInput, departing
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.shardmap import Entry
from domicile.settings import Settings

STAGE = 16
"""So many shards may be on the move at a time, and more only of those that are slow."""

STAGES = 8
"""Where very many leave, this part of what is left moves at a time, and never less than half of
what it was in the beginning: so all of them begin within less than twice so many times `STAGE_S`,
however slow they are."""

STAGE_S = 0.1
"""Who has not released a shard after this time is slow."""

GATHER_S = 0.05
"""So long who departs keeps its shards, for others may be about to say that they depart, too."""

NEVER = float("inf")


def late_s(settings: Settings) -> float:
    """How much later than its node began to leave a shard may have ended (H10, H14).

    Its stage comes late, perhaps after a wait for a newcomer (SM-14), and has its whole deadline
    from there on; half as much time as all stages take is for what it does at its end.
    """
    return settings.heard_s + GATHER_S + 3 * STAGES * STAGE_S


class DrainPacing:
    """What moves away from departing nodes, and since when."""

    def __init__(self) -> None:
        self._since: dict[ShardKey, float] = {}
        self._most = 0
        """How many shards those who depart had at the most."""
        self.at = NEVER
        """When more may move although nothing happened; never if nothing was held back."""

    def pace(
        self, view: PlanInput, decisions: Iterable[Decision], now: float
    ) -> tuple[Decision, ...]:
        """Those decisions that may be carried out now."""
        self.at = NEVER
        leaving = departing(view.nodes, view.drains)
        before, self._since = self._since, {}
        if not leaving:
            self._most = 0
            return tuple(decisions)
        homes = 0
        swift: list[float] = []
        for role, part in view.roles.items():
            for number, entry in enumerate(part.entries):
                if entry.owner not in leaving:
                    continue
                homes += 1
                if entry.state == "moving" and number not in part.released:
                    shard = ShardKey(role, number)
                    since = self._since[shard] = before.get(shard, now)
                    if now < since + STAGE_S:
                        swift.append(since)
        paced: list[Decision] = []
        self._most = max(self._most, homes) if homes else 0
        stage, full = max(STAGE, homes // STAGES, self._most // (2 * STAGES)), False
        for decision in decisions:
            if isinstance(decision, Move) and decision.to != NOBODY:
                role, number = decision.shard
                owner = view.roles[role].entries[number].owner
                if owner in leaving:
                    ready_at = view.departing_since.get(owner, now - GATHER_S) + GATHER_S
                    if now < ready_at:
                        self.at = min(self.at, ready_at)
                        continue
                    if len(swift) >= stage:
                        full = True
                        continue
                    swift.append(now)
                    self._since[decision.shard] = now
            paced.append(decision)
        if full:
            self.at = min(self.at, min(swift) + STAGE_S)
        return tuple(paced)


def unfinished(
    entry: Entry,
    me: Incarnation,
    phase: Phase,
    epoch: int,
    *,
    handing_over: bool,
    may_place: Callable[[], bool],
) -> bool:
    """Whether a shard keeps `me`, which leaves, from going.

    `entry` is what the store says of the shard; `phase` and `epoch` are those of `me` as its owner.
    The store still names `me`, and `me` has something to release, or will have as soon as it sees
    the entry, or hands fields over to the next home (`handing_over`). Or the next home is not
    stored yet although it can be (`may_place`). If `me` leads and goes before that, the decision
    goes with it; and any owner that goes before that would be taken for one that died.
    """
    return entry.owner == me and (
        phase in (Phase.OPEN, Phase.DRAINING)
        or entry.epoch > epoch
        or handing_over
        or (entry.to != NOBODY and may_place())
    )


def may_overstay(*, draining: bool, unreleased: bool, decides: bool) -> bool:
    """Whether a node that leaves may take `late_s` beyond its drain deadline.

    A shard that is being emptied has a deadline of its own, which may have begun later (H10). What
    is `unreleased` otherwise waits for a decision, so it is waited for only if one can come
    (`decides`).
    """
    return draining or (unreleased and decides)


TOGETHER_S = 0.5
"""Seconds the last eligible leader waits, while leaving, for other nodes to announce that they
leave too."""


def must_stay(
    members: ClusterView, me: Incarnation, role: str, *, leads: bool, since: float, now: float
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


def _waiting(members: ClusterView, me: Incarnation) -> bool:
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
