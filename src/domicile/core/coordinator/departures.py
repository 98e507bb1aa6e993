"""How nodes leave without gaps: how fast they empty, and when each of them may go (H14). Pure.

The coordinator asks `DrainPacing` about the planner's decisions before it commits any of them. A
leaving process (`incarnation.shutdown`) asks the other functions. Nothing here commits, sends or
reads a clock.

**How fast.** While a shard moves, its senders hold their messages until the shard has its next
home. If all shards of a node moved at once, each shard would be away as long as all of them take.
Nodes that leave together share one store and one coordinator, so they share the stages. A shard
that takes long to empty counts only for `STAGE_S`, so slow shards do not delay the others. If every
node leaves, the shards get no home and all move at once: no sender waits for a home, and the leader
may be gone later. Shards that move because their owner lacks a type (DX-26) share the stages: their
messages wait too, and the limits of balancing would let one slow shard hold up the others.

Nodes that stop together announce it milliseconds apart. A shard that the first node gave to the
second would have to move again, so the first node serves for `GATHER_S` longer.

**When it may go.** A node that leaves asks, in this order: is each of its shards finished
(`unfinished`); if its time is over, may it take more (`may_overstay`); must it stay for nodes that
leave with it (`must_stay`). A node releases its shards when a coordinator says so. If the last
eligible leader left first, the other leaving nodes would wait until their deadline and stop no
entity.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from domicile.core.coordinator.election import eligible
from domicile.core.handoff.tables import Phase
from domicile.core.ids import NOBODY, Incarnation, ShardKey
from domicile.core.placement.model import Decision, Move, PlanInput, departing
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.keys import BlockKey, block_of
from domicile.core.state.shardmap import Entry
from domicile.settings import Settings

STAGE = 16
"""Shards that may move at the same time. Slow shards do not count (`STAGE_S`)."""

STAGES = 8
"""With very many shards, 1 / `STAGES` of those that are left move at a time, and at least half as
many as in the first stage. So all begin within 2 * `STAGES` * `STAGE_S`, however slow they are."""

STAGE_S = 0.1
"""A shard that is not released this many seconds after its move began is slow."""

GATHER_S = 0.05
"""Grace period before a departing node's first shard moves: other nodes may announce their own
departure milliseconds later, and a shard must not move to one of them."""

NEVER = float("inf")


def late_s(settings: Settings) -> float:
    """Seconds beyond `drain_deadline_s` that a leaving node's last shard may need (H10, H14).

    A shard's deadline starts with its own stage. That stage may come after the wait for a new node
    (SM-14) and all other stages; half as much time again is for what the shard does at its end.
    """
    return settings.heard_s + GATHER_S + 3 * STAGES * STAGE_S


class DrainPacing:
    """The shards that move away from departing nodes, and since when."""

    def __init__(self) -> None:
        self._since: dict[ShardKey, float] = {}
        self._most = 0
        """The largest number of shards that the departing nodes had together."""
        self.at = NEVER
        """When more shards may move even without an event; `NEVER` if no decision was held back."""

    def pace(
        self,
        view: PlanInput,
        decisions: Iterable[Decision],
        now: float,
        ready: Callable[[BlockKey], bool] = lambda _: True,
    ) -> tuple[Decision, ...]:
        """The decisions that may be carried out now. A move in a block that is not ready for a
        commit must not use a place in a stage: it is left out."""
        self.at = NEVER
        leaving = departing(view.nodes, view.drains)
        before, self._since = self._since, {}
        if not leaving and not any(part.needs for part in view.roles.values()):
            self._most = 0
            return tuple(decisions)
        decisions = tuple(decisions)
        homes = sum(_unsuited(view, one, leaving) for one in decisions)
        swift: list[float] = []
        for role, part in view.roles.items():
            for number, entry in enumerate(part.entries):
                is_moving = entry.state == "moving" and number not in part.released
                if entry.owner not in leaving and not (is_moving and number in part.needs):
                    continue
                homes += 1
                if is_moving:
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
                if owner in leaving or _unsuited(view, decision, leaving):
                    ready_at = view.departing_since.get(owner, now - GATHER_S) + GATHER_S
                    if now < ready_at:
                        self.at = min(self.at, ready_at)
                        continue
                    if not ready(block_of(decision.shard)):
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


def _unsuited(view: PlanInput, decision: Decision, leaving: Container[Incarnation]) -> bool:
    """Whether a shard moves from an owner that stays, and an owner has lacked a type of it."""
    if not isinstance(decision, Move):
        return False
    part, number = view.roles[decision.shard.role], decision.shard.shard
    return number in part.needs and part.entries[number].owner not in leaving


def unfinished(
    entry: Entry,
    me: Incarnation,
    phase: Phase,
    epoch: int,
    *,
    handing_over: bool,
    may_place: Callable[[], bool],
) -> bool:
    """Whether `me`, which leaves, must stay because of this shard.

    `entry` is what the store says about the shard; `phase` and `epoch` are those of `me` as its
    owner. The store still names `me`, and one of these holds: `me` must release the shard, now or
    as soon as it sees the entry; `me` transfers fields to the next home (`handing_over`); the next
    home is not stored yet although it can be (`may_place`). A leader that left before that would
    lose the decision. Any owner that left before that would count as dead.
    """
    return entry.owner == me and (
        phase in (Phase.OPEN, Phase.DRAINING)
        or entry.epoch > epoch
        or handing_over
        or (entry.to != NOBODY and may_place())
    )


def may_overstay(*, draining: bool, unreleased: bool, decides: bool) -> bool:
    """Whether a node that leaves may take `late_s` beyond its drain deadline.

    A shard that is being emptied has its own deadline, which may have begun later (H10). Other
    `unreleased` shards wait for a decision, so the node waits for them only if a coordinator can
    decide (`decides`).
    """
    return draining or (unreleased and decides)


TOGETHER_S = 0.5
"""Seconds the last eligible leader waits, while leaving, for other nodes to announce that they
leave too."""


def must_stay(
    members: ClusterView, me: Incarnation, role: str, *, leads: bool, since: float, now: float
) -> bool:
    """Whether `me`, which leaves since `since`, must stay until the other leaving nodes are empty.

    Only if no eligible leader stays. Then the acting leader must stay; while there is none, every
    eligible node must stay until one of them has won. A leader that leaves too may have decided
    before it knew of `me`, so for `TOGETHER_S` `me` does not rely on it. `role` is the role that
    may lead; empty if every node may.
    """
    others = [record for node, record in members.nodes.items() if node != me]
    mine = members.nodes.get(me)
    if mine is None or any(eligible(record, role) for record in others):
        return False
    early = now < since + TOGETHER_S
    if not leads and not eligible(mine, role, leaving=True):
        return False
    # A node that has just won may see its own name in the store before `leads` is true.
    if not leads and members.leader is not None and members.leader.incarnation != me:
        leader = members.nodes.get(members.leader.incarnation)
        if not (early and leader is not None and leader.status == "leaving"):
            return False
    if early and any(record.status == "up" for record in others):
        return True
    return _waiting(members, me)


def _waiting(members: ClusterView, me: Incarnation) -> bool:
    """Whether another leaving node still needs a coordinator: to start emptying a shard, or to
    store its next home. A shard that moves to `NOBODY` needs none: its node empties it alone."""
    leavers = {
        node: record
        for node, record in members.nodes.items()
        if record.status == "leaving" and node != me
    }
    return bool(leavers) and any(
        entry.owner in leavers and not (entry.state == "moving" and entry.to == NOBODY)
        for _, entry in members.map
    )
