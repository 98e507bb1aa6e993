"""The acting coordinator: a machine from events to effects (C2-C4, C7, C8, H12, S1).

Driven by the shells in `control`; one object is one leadership. It commits what the planner
wants under C4's conditions, one commit per block at a time, and tells nodes only what is stored
(I3). It never reads a clock or a store, and once it has resigned it says nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from domicile.config import Settings
from domicile.core.coordination import (
    Arm,
    Changed,
    Commit,
    CommitDone,
    Effect,
    Event,
    Heard,
    Listed,
    ReadBack,
    ReleasedBy,
    Reread,
    Resign,
    RevertAsked,
    Tell,
    Tick,
)
from domicile.core.hearsay import Hearsay
from domicile.core.ids import LEADER_KEY, Incarnation, ShardKey
from domicile.core.plan import Decision, Move, RoleView, View, heard, plan
from domicile.core.shardmap import Entry
from domicile.core.txn import (
    MAX_OPERATIONS,
    At,
    Changes,
    Committed,
    Condition,
    Conflict,
    Delete,
    Item,
    Listing,
    Outcome,
)
from domicile.core.view import BlockKey, Draft, Stored, StoreView, block_of, draft

__all__ = [
    "Arm",
    "Changed",
    "Commit",
    "CommitDone",
    "Coordinator",
    "Effect",
    "Event",
    "Heard",
    "Listed",
    "ReadBack",
    "ReleasedBy",
    "Reread",
    "Resign",
    "RevertAsked",
    "Tell",
    "Tick",
]

BATCH_S = 0.005
"""H12: how long the first release waits for others."""

LISTEN_S = 0.5
"""How long a new leader waits to hear from everybody before it places anything (C7)."""

HOLD_S = 0.2
"""How long a refused commit is not repeated unless the watch brings the reason."""

NEVER = float("inf")


class _Hold(NamedTuple):
    until: float
    refused: tuple[Condition, ...]


class Coordinator:
    """One leadership, named by the revision of its leader key."""

    def __init__(
        self, me: Incarnation, leader_revision: int, settings: Settings, random: Random
    ) -> None:
        self._me, self._settings, self._random = me, settings, random
        self._leader = At(LEADER_KEY, leader_revision)
        self._view = StoreView()
        self._hearsay = Hearsay()
        self._drafts: dict[BlockKey, Draft] = {}
        self._holds: dict[BlockKey, _Hold] = {}
        self._first_look: dict[str, float] = {}
        self._txns = 0
        self._cleaning: tuple[str, tuple[bytes, ...]] = ("", ())
        self._clean_after = 0.0
        self._listed = self._over = self._dirty = self._balance_due = False
        self._joined_at = self._listen_until = self._balance_at = 0.0
        self._batch_at = self._settle_at = self._armed_at = NEVER

    def step(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Take one event; what is to be done, in order."""
        if self._over:
            return ()
        effects: list[Effect] = []
        match event:
            case Heard(node):
                if not self._hear(node, now):
                    return ()
            case Listed(listing):
                effects += self._list(listing, now)
            case Changed(changes):
                effects += self._change(changes, now)
            case ReleasedBy(owner, shard, epoch):
                effects += self._release(owner, shard, epoch, now)
            case RevertAsked(owner, shard, epoch):
                effects += self._ask_revert(owner, shard, epoch)
            case CommitDone(txn, outcome):
                effects += self._done(txn, outcome, now)
            case Reread(txn, item):
                effects += self._reread(txn, item, now)
            case Tick():
                self._tick(now)
        if self._over or not self._listed:
            return tuple(effects)
        if self._dirty:
            effects += self._decide(now)
        return (*effects, *self._arm())

    @property
    def doing(self) -> str:
        """Which of its steps it is at, in a few words."""
        if not self._listed:
            return "listing"
        if self._drafts:
            return "committing"
        if self._batch_at != NEVER:
            return "batching releases"
        if self._settle_at != NEVER:
            return "settling"
        view = self._view
        blocks = (block for role in view.shards for block in view.role_blocks(role))
        moving = any(entry.state == "moving" for block in blocks for entry in view.entries(block))
        return "waiting for releases" if moving else "idle"

    # events

    def _hear(self, node: Incarnation, now: float) -> bool:
        """Whether hearing this node is news."""
        if self._listed and node not in self._view.nodes:
            return False  # I8: a client is given no shards, so its messages must not cost a plan
        last = self._hearsay.heard_at.get(node, float("-inf"))
        self._hearsay.heard_at[node] = now
        if now - last <= self._settings.heard_s:
            return False
        self._dirty = True
        return True

    def _list(self, listing: Listing, now: float) -> list[Effect]:
        if not self._view.load(listing):
            return []
        if not self._listed:
            self._listed = True
            self._joined_at = now
            self._listen_until = now + LISTEN_S
            self._balance_at = now + self._settings.balance_interval_s
        return self._refreshed(now)

    def _change(self, changes: Changes, now: float) -> list[Effect]:
        joined = self._view.joined
        if not self._listed or not self._view.apply(changes):
            return []
        if self._view.joined != joined:
            self._joined_at = now
        return self._refreshed(now)

    def _refreshed(self, now: float) -> list[Effect]:
        """The picture moved on: am I still the leader, has a commit of mine landed?"""
        if self._view.leader_revision != self._leader.revision:
            return self._resign("deposed")
        self._dirty = True
        effects: list[Effect] = []
        for made in tuple(self._drafts.values()):
            stored = self._view.blocks.get(made.block)
            if stored is not None and stored.txn == made.txn:
                effects += self._landed(made, stored.revision, now)
        return effects

    def _release(self, owner: Incarnation, shard: ShardKey, epoch: int, now: float) -> list[Effect]:
        entry = self._view.entry(shard)
        if epoch < entry.epoch or (epoch == entry.epoch and owner != entry.owner):
            return [Tell(owner, shard, entry)] if entry.change else []
        known = not self._listed or self._view.knows(shard)
        if known and self._hearsay.release(shard, (owner, epoch)):
            self._batch_at = min(self._batch_at, now + BATCH_S)
        return []

    def _ask_revert(self, owner: Incarnation, shard: ShardKey, epoch: int) -> list[Effect]:
        entry = self._view.entry(shard)
        if self._listed and (entry.owner, entry.epoch, entry.state) != (owner, epoch, "moving"):
            return [Tell(owner, shard, entry)] if entry.change else []
        self._hearsay.ask_revert(shard, (owner, epoch))
        self._dirty = True
        return []

    def _done(self, txn: str, outcome: Outcome, now: float) -> list[Effect]:
        if isinstance(outcome, Conflict) and outcome.key == LEADER_KEY:
            return self._resign("deposed")
        if txn == self._cleaning[0]:
            self._cleaned(outcome, now)
            return []
        made = self._draft(txn)
        if made is None:
            return []
        if isinstance(outcome, Committed):
            return self._landed(made, outcome.revision, now)
        if isinstance(outcome, Conflict):
            refused = tuple(one for one in made.conditions if one.key == outcome.key)
            until = now + HOLD_S * (0.5 + self._random.random())
            self._holds[made.block] = _Hold(until, refused)
            del self._drafts[made.block]
            self._dirty = True
            return []
        return [ReadBack(txn, made.block.key)]

    def _reread(self, txn: str, item: Item | None, now: float) -> list[Effect]:
        """S1. Not found is no proof that it will not land yet; the block's revision is the guard
        of whatever is tried next, so only one of the two can."""
        stored = self._view.take(item) if item is not None else None
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
        self._dirty = True
        self._holds = {block: hold for block, hold in self._holds.items() if now < hold.until}
        if now >= self._balance_at:
            self._balance_due = True
            self._balance_at = now + self._settings.balance_interval_s

    # outcomes

    def _draft(self, txn: str) -> Draft | None:
        return next((made for made in self._drafts.values() if made.txn == txn), None)

    def _landed(self, made: Draft, revision: int, now: float) -> list[Effect]:
        """A commit is known to be stored; only now may anyone hear of it (I3)."""
        del self._drafts[made.block]
        self._view.put_block(made.block, Stored(revision, made.txn, made.entries))
        for write in made.writes:
            self._view.releases.pop(write.key, None)
        self._dirty = True
        rest_until = now + self._settings.drain_deadline_s
        for _, shard, entry in made.tells:
            if entry.state == "serving":
                self._hearsay.reverted(shard, entry, rest_until)
        nodes = self._view.nodes
        return [Tell(to, shard, entry) for to, shard, entry in made.tells if to in nodes]

    def _cleaned(self, outcome: Outcome, now: float) -> None:
        if isinstance(outcome, Committed):
            for key in self._cleaning[1]:
                self._view.releases.pop(key, None)
        self._clean_after = now + HOLD_S
        self._cleaning = ("", ())

    def _resign(self, reason: str) -> list[Effect]:
        """C1: discard memory; the next leadership starts from a listing."""
        self._over = True
        self._view, self._hearsay = StoreView(), Hearsay()
        self._drafts, self._holds = {}, {}
        return [Resign(reason)]

    # decisions

    def _decide(self, now: float) -> list[Effect]:
        self._batch_at = NEVER
        view = self._planned_view(now)
        if now < self._listen_until and self._silent(view, now):
            return []
        self._dirty = self._balance_due = False
        wanted: dict[BlockKey, list[Decision]] = {}
        for decision in plan(view, now, self._settings).decisions:
            wanted.setdefault(block_of(decision.shard), []).append(decision)
        effects: list[Effect] = [
            self._issue(block, decisions)
            for block, decisions in wanted.items()
            if block not in self._drafts and not self._held(block, now)
        ]
        return effects + self._clean(now)

    def _silent(self, view: View, now: float) -> bool:
        """Whether some node has not been heard yet; a new leader gives them a moment (C7)."""
        heard_s = self._settings.heard_s
        return any(
            record.status == "up" and not heard(view, node, now, heard_s)
            for node, record in view.nodes.items()
        )

    def _issue(self, block: BlockKey, decisions: Sequence[Decision]) -> Commit:
        made = draft(self._view, block, decisions, self._leader, self._next_txn())
        self._drafts[block] = made
        for decision in decisions:
            if isinstance(decision, Move):
                self._hearsay.move(self._view, decision.shard, decision.to)
        return Commit(made.txn, made.conditions, made.writes)

    def _next_txn(self) -> str:
        self._txns += 1
        return f"{self._me}-{self._leader.revision}-{self._txns}"

    def _held(self, block: BlockKey, now: float) -> bool:
        """Whether a refused commit waits for the watch to bring the reason."""
        hold = self._holds.get(block)
        if hold is None:
            return False
        if now < hold.until and all(map(self._view.satisfies, hold.refused)):
            return True
        del self._holds[block]
        return False

    def _clean(self, now: float) -> list[Effect]:
        """Delete release keys of epochs that are over."""
        if self._cleaning[0] or now < self._clean_after:
            return []
        obsolete = tuple(
            key
            for key, release in self._view.releases.items()
            if self._view.entry(release.shard).epoch > release.epoch
        )[: MAX_OPERATIONS - 1]
        if not obsolete:
            return []
        self._cleaning = (self._next_txn(), obsolete)
        return [Commit(self._cleaning[0], (self._leader,), tuple(map(Delete, obsolete)))]

    def _planned_view(self, now: float) -> View:
        """The stored picture with the drafts under way laid over it, so nothing is done twice."""
        view = self._view
        self._hearsay.prune(view, now)
        self._settle_at = NEVER
        roles: dict[str, RoleView] = {}
        for role in view.shards:
            entries: list[Entry] = []
            for block in view.role_blocks(role):
                made = self._drafts.get(block)
                entries += made.entries if made else view.entries(block)
            if self._settled(role, entries, now):
                roles[role] = self._hearsay.role_view(view, role, entries)
        return View(
            self._me,
            view.nodes,
            self._hearsay.heard_at,
            tuple(view.drains),
            roles,
            self._balance_due,
        )

    def _settled(self, role: str, entries: Sequence[Entry], now: float) -> bool:
        """C8: where no owner lives, wait until registrations are quiet."""
        nodes = self._view.nodes
        if any(entry.owner in nodes for entry in entries):
            self._first_look.pop(role, None)
            return True
        first_look = self._first_look.setdefault(role, now)
        settled_at = min(
            self._joined_at + self._settings.settle_s, first_look + self._settings.settle_max_s
        )
        if now < settled_at:
            self._settle_at = min(self._settle_at, settled_at)
            return False
        ready = sum(role in record.roles and record.status == "up" for record in nodes.values())
        return any(entry.epoch for entry in entries) or ready >= self._settings.min_nodes

    def _arm(self) -> list[Effect]:
        times = [self._balance_at, self._batch_at, self._settle_at]
        times += [hold.until for hold in self._holds.values()]
        if self._dirty:
            times.append(self._listen_until)
        at = min(times)
        if at == self._armed_at:
            return []
        self._armed_at = at
        return [Arm(at)]
