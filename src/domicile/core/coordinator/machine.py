"""The acting coordinator: a machine from events to effects (C2-C8, H12, S1).

The driver in `control` calls it; one object is one leadership. The machine commits what the planner
wants under C4's conditions, with one open commit per block. It tells nodes only what is stored
(I3). It never reads a clock or a store, and after it has resigned it returns no effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random

from domicile.core.coordinator.commits import (
    HOLD_S,
    CommitBackoff,
    Draft,
    Housekeeping,
    Reconsider,
    draft,
    seal,
)
from domicile.core.coordinator.custom_strategy import CUSTOM, CustomStrategy
from domicile.core.coordinator.departures import DrainPacing
from domicile.core.coordinator.events import (
    AskProbe,
    AskStrategy,
    Changed,
    Commit,
    CommitDone,
    CoordinatorEffect,
    CoordinatorEvent,
    Heard,
    Listed,
    ProbeAnswered,
    ReadBack,
    ReleasedBy,
    Reread,
    Resign,
    RevertAsked,
    StoreReturned,
    StrategyAnswered,
    Tell,
    Tick,
)
from domicile.core.coordinator.eviction import UNREACHED, Eviction
from domicile.core.coordinator.quarantine import OwnerDeaths
from domicile.core.coordinator.reports import Reports
from domicile.core.coordinator.waiting import StartupWait, patience_ends, silent
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.machines import Arm
from domicile.core.placement.model import (
    Decision,
    Move,
    Own,
    PlanInput,
    RoleInput,
    timed_inputs,
)
from domicile.core.placement.plan import plan_in_slices
from domicile.core.placement.slices import Slices
from domicile.core.state.cluster_view import (
    BlockChanged,
    ClientGone,
    ClientUp,
    ClusterView,
    KickWished,
    NodeUp,
    NoteChanged,
    StoredBlock,
    Unreadable,
    ViewChange,
)
from domicile.core.state.keys import LEADER_KEY, BlockKey, KeyFamily, block_of, classify
from domicile.core.state.shardmap import BLOCK_SIZE, Entry, leader_txn, term_of
from domicile.core.state.txn import At, Changes, Committed, Conflict, Item, Listing, Outcome
from domicile.settings import Settings

SLICE = 4_096
"""Shards that a round handles before other work gets its turn: 10 to 20 ms of CPU time at most."""

DRAFT = 512
"""What one drafted block counts for: its commit and the nodes that are told of it take time too."""

BATCH_S = 0.005
"""H12: seconds that the first release waits for more releases."""

MOST_SEALS = 64
"""I6: blocks that a new leader seals at a time (S8): a map of 4,096 shards."""

LISTEN_S = 0.5
"""Seconds that a new leader waits to hear from all nodes before it places any shard (C7)."""

NEVER = float("inf")

TimedInputs = tuple[object, ...]
"""What of a round's input changes by time alone, to be compared with another."""

REPORTS = (KeyFamily.RELEASE, KeyFamily.NEEDS)
"""Families of keys in which owners leave their reports."""

CROWDS = (KeyFamily.BLOCK, *REPORTS)
"""Families of which many keys change within milliseconds. Only the leader itself changes blocks."""


class Coordinator:
    """One leadership, named by the revision of its leader key."""

    def __init__(
        self,
        me: Incarnation,
        leader_revision: int,
        settings: Settings,
        random: Random,
        strategy: str = "least_shards",
        *,
        sealing: bool = False,
    ) -> None:
        self._me, self._settings, self._random = me, settings, random
        self._sealing = sealing
        """S8: the store writes one key at a time, so the leader's term in each block stands for
        the condition on the leader key."""
        self._leader = At(LEADER_KEY, leader_revision)
        self._view = ClusterView(follow_entries=False)
        self._reports = Reports()
        self._drafts: dict[BlockKey, Draft] = {}
        self._backoff = CommitBackoff()
        self._txns = 0
        self._eviction = Eviction(me, settings)
        self._startup_wait = StartupWait(settings)
        self._owner_deaths = OwnerDeaths(settings)
        self._housekeeping = Housekeeping(self._leader, sealing=sealing)
        self._drain_pacing = DrainPacing()
        self._strategy, self._custom_strategy = strategy, CustomStrategy(settings)
        self._listed = self._over = self._dirty = self._balance_due = self._listening = False
        self._listen_until = self._balance_at = self._reach_at = 0.0
        self._batch_at = self._armed_at = self._patience_ends_at = self._resume_at = NEVER
        self._round: Slices[None] | None = None
        """The round under way, if it pauses; what it wants done is in `_out`."""
        self._out: list[CoordinatorEffect] = []
        self._rest: TimedInputs | None = None
        """If the last round found nothing to do: what of its input time alone can change."""

    def step(self, event: CoordinatorEvent, now: float) -> tuple[CoordinatorEffect, ...]:
        """Take one event; return what the driver must do, in order."""
        if self._over:
            return ()
        effects: list[CoordinatorEffect] = []
        match event:
            case Heard(node):
                if not self._hear(node, now):
                    return ()
            case Listed(listing):
                effects += self._list(listing, now)
            case Changed(changes):
                effects += self._change(changes, now)
            case ReleasedBy(owner, shard, epoch, floor):
                effects += self._release(owner, shard, epoch, floor, now)
            case RevertAsked(owner, shard, epoch):
                effects += self._ask_revert(owner, shard, epoch)
            case CommitDone(txn, outcome):
                effects += self._done(txn, outcome, now)
            case Reread(txn, item):
                effects += self._reread(txn, item, now)
            case ProbeAnswered(voter, node, reached):
                self._eviction.voted(voter, node, reached, now)
            case StoreReturned():
                self._startup_wait.returned(now)
                self._dirty = True
            case StrategyAnswered(situation, wanted):
                self._custom_strategy.advised(situation, wanted)
                self._dirty = True
            case Tick():
                self._tick(now)
        if self._over or not self._listed:
            return tuple(effects)
        if now >= self._reach_at:
            effects += self._look_around(now)
        if not self._over:
            if begins := self._dirty and self._round is None:
                self._begin_round(now)
            if begins or (self._round is not None and isinstance(event, Tick)):
                effects += self._go_on(now)
        return (*effects, *([] if self._over else self._arm()))

    @property
    def doing(self) -> str:
        """What the machine does at the moment, in a few words."""
        if not self._listed:
            return "listing"
        if self._drafts:
            return "committing"
        if self._round is not None:
            return "planning"
        if self._batch_at != NEVER:
            return "batching releases"
        if self._startup_wait.at != NEVER:
            return "settling"
        return "waiting for releases" if self._view.moving else "idle"

    # events

    def _hear(self, node: Incarnation, now: float) -> bool:
        """Whether this node was silent before, so that a plan may change."""
        if self._listed and node not in self._view.nodes:
            return False  # I8: a client gets no shards, so its messages must not cost a plan
        last = self._reports.heard_at.get(node, float("-inf"))
        self._reports.heard_at[node] = now
        if now - last <= self._settings.heard_s:
            return False
        self._dirty = True
        return True

    def _list(self, listing: Listing, now: float) -> list[CoordinatorEffect]:
        if listing.revision < self._view.revision:
            return []
        self._view.load(listing)
        if not self._listed:
            self._listed = True
            self._startup_wait.joined(now)
            self._listen_until = now + LISTEN_S
            self._balance_at = now + self._settings.balance_interval_s
        self._dirty = True
        return self._refreshed(now, tuple(self._view.blocks if self._sealing else self._drafts))

    def _change(self, changes: Changes, now: float) -> list[CoordinatorEffect]:
        if not self._listed:
            return []
        facts = self._view.apply(changes)
        if not any(map(_matters, facts)):
            return []
        if any(isinstance(fact, NodeUp) for fact in facts):
            self._startup_wait.joined(now)
        if all(classify(change.key) in CROWDS for change in changes.changes):
            self._soon(now)
        else:
            self._dirty = True
        changed = [fact.block for fact in facts if isinstance(fact, BlockChanged)]
        return self._refreshed(now, changed)

    def _soon(self, now: float) -> None:
        """H12: many changes wait for one plan, because each plan looks at all shards."""
        self._batch_at = min(self._batch_at, now + BATCH_S)

    def _refreshed(self, now: float, blocks: Iterable[BlockKey]) -> list[CoordinatorEffect]:
        """The view changed: resign if another process leads; notice own commits to these blocks."""
        blocks = tuple(blocks)
        if self._view.leader_revision != self._leader.revision:
            return self._resign("deposed")
        if self._sealing and (late := self._sealed_later(blocks)):
            return self._resign(late)
        effects: list[CoordinatorEffect] = []
        for block in blocks:
            made, stored = self._drafts.get(block), self._view.blocks.get(block)
            if made is not None and stored is not None and stored.txn == made.txn:
                effects += self._landed(made, stored.revision, now)
        return effects

    def _sealed_later(self, blocks: Iterable[BlockKey]) -> str:
        """S8: a higher term in a block deposes this leader, whatever the leader key says."""
        for block in blocks:
            stored = self._view.blocks.get(block)
            if stored is not None and term_of(stored.txn) > self._leader.revision:
                return (
                    f"block {block.number} of {block.role} is sealed by a later leader (term "
                    f"{term_of(stored.txn)}, this one's is {self._leader.revision})"
                )
        return ""

    def _release(
        self, owner: Incarnation, shard: ShardKey, epoch: int, floor: int, now: float
    ) -> list[CoordinatorEffect]:
        """Keep a release that may be current, also before this leader has listed the store."""
        entry = self._view.entry(shard)
        if epoch < entry.epoch or (epoch == entry.epoch and owner != entry.owner):
            return [Tell(owner, shard, entry)] if entry.change else []
        known = not self._listed or self._view.knows(shard)
        if known and self._reports.release(shard, (owner, epoch), floor):
            self._soon(now)
        return []

    def _ask_revert(
        self, owner: Incarnation, shard: ShardKey, epoch: int
    ) -> list[CoordinatorEffect]:
        entry = self._view.entry(shard)
        if self._listed and (entry.owner, entry.epoch, entry.state) != (owner, epoch, "moving"):
            return [Tell(owner, shard, entry)] if entry.change else []
        self._reports.ask_revert(shard, (owner, epoch))
        self._dirty = True
        return []

    def _done(self, txn: str, outcome: Outcome, now: float) -> list[CoordinatorEffect]:
        if isinstance(outcome, Conflict) and outcome.key == LEADER_KEY:
            return self._resign("deposed")
        if self._housekeeping.done(txn, now):
            return []
        made = self._draft(txn)
        if made is None:
            return []
        if isinstance(outcome, Committed):
            return self._landed(made, outcome.revision, now)
        if isinstance(outcome, Conflict):
            until = now + HOLD_S * (0.5 + self._random.random())
            self._backoff.refused(made, outcome.key, until)
            del self._drafts[made.block]
            self._dirty = True
            return []
        return [ReadBack(txn, made.block.key)]

    def _reread(self, txn: str, item: Item | None, now: float) -> list[CoordinatorEffect]:
        """S1. A commit that is not found may still be stored later. The next commit is conditional
        on the block's revision, so only one of the two can succeed."""
        stored = self._view.take_block(item) if item is not None else None
        if self._sealing and item is not None:
            block: BlockKey = KeyFamily.BLOCK.parse(item.key)
            if late := self._sealed_later((block,)):
                return self._resign(late)
        made = self._draft(txn)
        self._dirty = True
        if made is None:
            return []
        if stored is not None and stored.txn == txn:
            return self._landed(made, stored.revision, now)
        del self._drafts[made.block]
        return []

    def _tick(self, now: float) -> None:
        self._armed_at = NEVER
        self._dirty |= now >= min(self._times())
        self._backoff.expire(now)
        if now >= self._balance_at:
            self._balance_at = now + self._settings.balance_interval_s
            self._balance_due = self._dirty = self._dirty or not self._rests(now)

    def _rests(self, now: float) -> bool:
        """Whether a round to balance would find nothing again: the last one found nothing, and
        since then neither an event nor time has changed its input (I8)."""
        return self._rest is not None and self._rest == self._timed_inputs(self._cluster(now), now)

    def _timed_inputs(self, view: PlanInput, now: float) -> TimedInputs:
        recent = self._startup_wait.returned_recently(now)
        return timed_inputs(view, now, self._settings), self._reports.resting(now), recent

    # outcomes

    def _draft(self, txn: str) -> Draft | None:
        return next((made for made in self._drafts.values() if made.txn == txn), None)

    def _landed(self, made: Draft, revision: int, now: float) -> list[CoordinatorEffect]:
        """A commit is known to be stored; only now may the leader tell nodes about it (I3)."""
        del self._drafts[made.block]
        stored = StoredBlock(revision, made.txn, made.entries)
        self._view.take_own(made.block, stored, made.writes)
        if self._drafts or self._round is not None:
            self._soon(now)
        else:
            self._dirty = True
        rest_until = now + self._settings.drain_deadline_s
        for _, shard, entry in made.tells:
            if entry.state == "serving":
                self._reports.reverted(shard, entry, rest_until)
        nodes = self._view.nodes
        tells = [Tell(to, shard, entry) for to, shard, entry in made.tells if to in nodes]
        return [*tells, *made.news]

    def _resign(self, reason: str) -> list[CoordinatorEffect]:
        """C1: discard everything remembered; the next leadership starts from a listing."""
        self._over = True
        self._view, self._reports = ClusterView(follow_entries=False), Reports()
        self._drafts, self._backoff = {}, CommitBackoff()
        self._round, self._out = None, []
        return [Resign(reason)]

    # decisions

    def _look_around(self, now: float) -> list[CoordinatorEffect]:
        """C6: probe silent nodes; evict them if others agree; resign if this leader is cut off."""
        self._reach_at = now + self._eviction.pace_s
        due = self._eviction.look(self._view.nodes, self._reports.heard_at, now)
        if due.resign:
            return self._resign(UNREACHED)
        exiles = [
            *(
                self._housekeeping.evict(self._view, node, self._next_txn(), now)
                for node in due.evict
            ),
            *(
                self._housekeeping.remove_dead(self._view, node, self._next_txn(), now)
                for node in due.remove
            ),
        ]
        probes = [AskProbe(voter, node) for voter, node in due.probes]
        return [*probes, *(commit for commit in exiles if commit is not None)]

    def _begin_round(self, now: float) -> None:
        self._dirty, self._rest = False, None
        self._batch_at = self._drain_pacing.at = NEVER
        self._round = self._in_slices(now)

    def _go_on(self, now: float) -> list[CoordinatorEffect]:
        """One slice of the round. The next one follows when the event loop has turned."""
        assert self._round is not None
        left = SLICE
        for handled in self._round:
            left -= handled
            if left <= 0:
                break
        else:
            self._round = None
        self._resume_at = NEVER if self._round is None and not self._dirty else now
        effects, self._out = self._out, []
        return effects

    def _in_slices(self, now: float) -> Slices[None]:
        """Plan from what is known now, and draft what is wanted, into `_out`.

        While the round pauses, the machine takes other events. What they change is decided by the
        next round. A decision of this one is drafted only if what it relies on is still so.
        """
        balance, self._balance_due = self._balance_due, False
        if self._sealing:
            yield from self._seal_blocks(now)
        view = yield from self._planned_view(now, balance)
        self._patience_ends_at = patience_ends(view, now, self._settings)
        self._listening = now < self._listen_until and silent(view, now, self._settings.heard_s)
        if self._listening:
            self._balance_due |= balance
            return
        if self._strategy == CUSTOM:
            asked, view = self._custom_strategy.consult(view, now)
            self._out += [AskStrategy(situation) for situation in asked]
            self._balance_due |= balance and self._custom_strategy.waiting
        found = (yield from plan_in_slices(view, now, self._settings)).decisions
        decisions = self._drain_pacing.pace(view, found, now, lambda one: self._ready(one, now))
        yield len(decisions)
        obsolete = self._owner_deaths.reconsidered(view, decisions)
        wanted: dict[BlockKey, list[Decision | Reconsider]] = {}
        for done, decision in enumerate((*decisions, *obsolete), 1):
            wanted.setdefault(block_of(decision.shard), []).append(decision)
            if not done % SLICE:
                yield SLICE
        for block, of_block in wanted.items():
            if self._ready(block, now):
                self._issue(block, of_block, view)
                yield DRAFT
        rewind_over = not self._startup_wait.after_rewind(self._view.rewound, now)
        waste = self._housekeeping.waste(self._view, rewind_over)
        if waste and self._housekeeping.may_sweep(now):
            self._out += self._housekeeping.sweep(waste, self._next_txn)
        # A user's function may use data outside the plan's input, so every round asks it.
        if balance and not (found or obsolete or waste or self._strategy == CUSTOM):
            self._rest = self._timed_inputs(view, now)

    def _ready(self, block: BlockKey, now: float) -> bool:
        return self._idle(block, now) and not (self._sealing and self._unsealed(block))

    def _idle(self, block: BlockKey, now: float) -> bool:
        return block not in self._drafts and not self._backoff.held(block, self._view, now)

    def _unsealed(self, block: BlockKey) -> bool:
        """Whether a stored block carries a lower term: this leader must not decide in it (S8). One
        that is not stored is made with the term."""
        stored = self._view.blocks.get(block)
        if stored is None or not stored.revision:
            return False
        return term_of(stored.txn) < self._leader.revision

    def _seal_blocks(self, now: float) -> Slices[None]:
        """S8: seal the stored blocks of lower terms, a few at a time. Nothing waits for the last
        one: the leader decides in each block as soon as its own seal has landed."""
        under_way = 0
        for block in tuple(self._view.blocks):
            if under_way == MOST_SEALS:
                break
            if not self._unsealed(block):
                continue
            under_way += 1
            if self._idle(block, now):
                self._drafts[block] = made = seal(self._view, block, self._next_txn())
                self._out.append(Commit(made.txn, made.conditions, made.writes))
                yield DRAFT

    def _issue(
        self, block: BlockKey, decisions: Sequence[Decision | Reconsider], planned: PlanInput
    ) -> None:
        first, entries = block.number * BLOCK_SIZE, planned.roles[block.role].entries
        if self._view.entries(block) != entries[first : first + BLOCK_SIZE]:
            return  # The event that changed it causes the next round.
        if self._dirty:
            decisions = [one for one in decisions if self._stands(one, planned)]
            if not decisions:
                return
        self._reports.prove(self._view)
        for shard, floor in self._view.floors.items():
            self._reports.floor(shard, floor)
        floors = self._reports.floors
        made = draft(
            self._view, block, decisions, self._leader, self._next_txn(), floors,
            sealing=self._sealing,
        )  # fmt: skip
        self._drafts[block] = made
        for decision in decisions:
            if isinstance(decision, Move):
                self._reports.move(self._view, decision.shard, decision.to)
        self._out.append(Commit(made.txn, made.conditions, made.writes))

    def _stands(self, decision: Decision | Reconsider, planned: PlanInput) -> bool:
        """Whether the two nodes of a decision and the wish for its shard are as planned."""
        view, part = self._view, planned.roles[decision.shard.role]
        number = decision.shard.shard
        nodes = [part.entries[number].owner]
        if isinstance(decision, Own):
            nodes.append(decision.owner)
        elif isinstance(decision, Move):
            nodes.append(decision.to)
        drained = [record.node for node in nodes if (record := planned.nodes.get(node))]
        return (
            all(view.nodes.get(node) == planned.nodes.get(node) for node in nodes)
            and all((node in view.drains) == (node in planned.drains) for node in drained)
            and view.wishes.get(decision.shard) == part.wishes.get(number)
        )

    def _next_txn(self) -> str:
        self._txns += 1
        return leader_txn(self._me, self._leader.revision, self._txns)

    def _cluster(self, now: float, balance: bool = False) -> PlanInput:
        """A plan's input without the roles."""
        view, reports = self._view, self._reports
        return PlanInput(
            self._me, dict(view.nodes), dict(reports.heard_at), tuple(view.drains), {}, balance,
            self._strategy, view.target, reports.known_since(view, now),
            reports.departing_since(view, now),
        )  # fmt: skip

    def _planned_view(self, now: float, balance: bool) -> Slices[PlanInput]:
        """What is stored, with the drafts under way in its place, so no decision is made twice."""
        view = self._view
        self._reports.prune(view, now)
        self._startup_wait.at = self._owner_deaths.at = NEVER
        cluster = self._cluster(now, balance)
        heard_at = {**cluster.heard_at, self._me: now}
        known: dict[str, list[Entry]] = {}
        for role in () if self._startup_wait.after_rewind(view.rewound, now) else view.shards:
            entries = known[role] = []
            for block in view.role_blocks(role):
                made = self._drafts.get(block)
                entries += made.entries if made else view.entries(block)
        roles: dict[str, RoleInput] = {}
        for role, entries in known.items():
            yield len(entries)
            if self._startup_wait.settled(role, entries, cluster.nodes, heard_at, now):
                part = self._reports.role_view(view, role, entries)
                yield len(entries)
                roles[role] = self._owner_deaths.added_to(part, view, role, now)
        return replace(cluster, roles=roles)

    def _times(self) -> list[float]:
        """The times at which something other than `_look_around` and balancing is due."""
        times = [self._batch_at, self._startup_wait.at, self._owner_deaths.at]
        times += [self._patience_ends_at, self._drain_pacing.at, *self._backoff.times]
        return [*times, self._listen_until] if self._listening else times

    def _arm(self) -> list[CoordinatorEffect]:
        at = min([self._reach_at, self._balance_at, self._resume_at, *self._times()])
        if at == self._armed_at:
            return []
        self._armed_at = at
        return [Arm(at)]


def _matters(fact: ViewChange) -> bool:
    """Whether a fact may change a decision. Deleted reports do not: the leader has used them, or
    their epoch is over. Clients do not: only nodes get shards. What an owner has on trial matters
    only when the owner is gone. How far a journal is decides nothing about homes."""
    if isinstance(fact, NoteChanged) and fact.family in (KeyFamily.TRIAL, KeyFamily.OFFSET):
        return False
    if isinstance(fact, NoteChanged):
        return fact.value is not None or fact.family not in REPORTS
    return not isinstance(fact, (ClientUp, ClientGone, KickWished, Unreadable))
