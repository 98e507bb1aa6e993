"""What a coordinator commits: drafts of blocks, evictions, removals, deletions of obsolete keys.

Only the coordinator calls this module. Each commit is conditional on the leader's revision, or it
writes a block that is sealed with the leader's term (S8). Each key has at most one open commit. The
watch shows every commit, so an outcome only ends the wait. After a refused commit the block waits
until the watch shows the reason; an earlier commit would be refused again. No block may be written
without the one or the other (C1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from domicile.core.coordinator.events import Announce, Commit, OwnersLost
from domicile.core.ids import NOBODY, Incarnation, ShardKey
from domicile.core.placement.model import Decision, Move, Own, Quarantine, receives
from domicile.core.placement.suspicion import loses_owners
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.keys import (
    REWOUND_KEY,
    BlockKey,
    OwnerReport,
    clearance_key,
    needs_key,
    node_key,
    node_lease,
    release_key,
    trial_key,
)
from domicile.core.state.records import OnTrial, encode_record
from domicile.core.state.shardmap import (
    BLOCK_SIZE,
    Block,
    Entry,
    Suspicion,
    encode_block,
)
from domicile.core.state.txn import (
    MAX_OPERATIONS,
    Absent,
    At,
    Condition,
    Delete,
    Present,
    Put,
    Write,
)


@dataclass(frozen=True, slots=True)
class Reconsider:
    """What speaks against a serving shard changes, and nothing else (DX-20): owner deaths are too
    old to count, or its entities that were put away are served again."""

    shard: ShardKey
    suspicion: Suspicion


@dataclass(frozen=True, slots=True)
class Draft:
    """One commit to a block: its conditions, its writes, and the nodes to tell about it."""

    txn: str
    block: BlockKey
    conditions: tuple[Condition, ...]
    writes: tuple[Write, ...]
    entries: tuple[Entry, ...]
    tells: tuple[tuple[Incarnation, ShardKey, Entry], ...]
    news: tuple[Announce | OwnersLost, ...] = ()


def draft(
    view: ClusterView,
    block: BlockKey,
    decisions: Sequence[Decision | Reconsider],
    leader: At,
    txn: str,
    floors: Mapping[ShardKey, int] | None = None,
    *,
    sealing: bool = False,
) -> Draft:
    """A commit of as many of a block's decisions as fit (S7), with the conditions of C4.

    With `sealing` it writes the block alone, which carries the leader's term already (S8).
    """
    stored = view.blocks.get(block)
    key = block.key
    base = At(key, stored.revision) if stored and stored.revision else Absent(key)
    conditions: dict[Condition, None] = {leader: None, base: None}
    if sealing:
        conditions = {base: None}
    deletes: dict[Write, None] = {}
    entries = list(view.entries(block))
    tells: dict[tuple[Incarnation, ShardKey], int] = {}
    news: list[Announce | OwnersLost] = []
    lost: list[tuple[ShardKey, int]] = []
    for decision in decisions:
        index = decision.shard.shard % BLOCK_SIZE
        old = entries[index]
        needs = _needs(decision, old, sealing)
        # S8: one written key. The sweep deletes what became obsolete.
        obsolete = {} if sealing else _releases(view, decision, old)
        count = len(conditions) + len(deletes) + len(needs) + len(obsolete)
        if count >= MAX_OPERATIONS:
            break
        conditions.update(needs)
        deletes.update(obsolete)
        floor = 0 if floors is None else floors.get(decision.shard, 0)
        entries[index] = new = _changed(view, decision, old, floor)
        tells[new.owner, decision.shard] = index
        if old.tries != new.tries or old.barred != new.barred:
            news.append(Announce(decision.shard, old, new))
        elif new.deaths > old.deaths and loses_owners(new):
            lost.append((decision.shard, new.deaths))
        if old.owner not in (NOBODY, new.owner):
            tells[old.owner, decision.shard] = index
    if lost:
        news.append(OwnersLost(tuple(lost)))
    value = encode_block(Block(txn, tuple(entries)))
    # I3: two decisions may concern one shard; only the entry after both is stored.
    told = tuple([(to, shard, entries[index]) for (to, shard), index in tells.items()])
    writes = (Put(key, value), *deletes)
    return Draft(txn, block, tuple(conditions), writes, tuple(entries), told, tuple(news))


def seal(view: ClusterView, block: BlockKey, txn: str) -> Draft:
    """S8: the leader's term for a block, with the revision and the content of one read."""
    entries = view.entries(block)
    write = Put(block.key, encode_block(Block(txn, entries)))
    base = At(block.key, view.blocks[block].revision)
    return Draft(txn, block, (base,), (write,), entries, ())


def _needs(decision: Decision | Reconsider, old: Entry, sealing: bool) -> dict[Condition, None]:
    """C4's conditions for one new owner; moves and reverts need only the block's revision.

    That the old owner's record is absent is final, so it may be looked up before the write. That
    the new one's is present is not: it saves a round elsewhere, and is left out with `sealing`.
    """
    if isinstance(decision, Quarantine):
        return {Absent(node_key(old.owner)): None}
    if not isinstance(decision, Own):
        return {}
    needs: dict[Condition, None] = {Present(node_key(decision.owner)): None}
    if sealing:
        needs.clear()
    if decision.gone:
        needs[Absent(node_key(old.owner))] = None
    return needs


def _releases(view: ClusterView, decision: Decision | Reconsider, old: Entry) -> dict[Write, None]:
    """The release key that a new owner's entry makes obsolete; `sweep` deletes older ones."""
    report = OwnerReport(old.owner, decision.shard, old.epoch)
    if not isinstance(decision, Own) or report not in view.releases:
        return {}
    return {Delete(release_key(*report)): None}


def _changed(view: ClusterView, decision: Decision | Reconsider, old: Entry, floor: int) -> Entry:
    """The entry after a decision: a new epoch for a new owner only, a new change always."""
    change = old.change + 1
    if isinstance(decision, Own):
        node = view.nodes[decision.owner].node
        return Entry(
            decision.owner, max(old.epoch, floor) + 1, "serving", NOBODY, change, node,
            *decision.suspicion,
        )  # fmt: skip
    if isinstance(decision, Quarantine):
        return Entry(
            NOBODY, old.epoch, "quarantined", NOBODY, change, old.previous, *decision.suspicion
        )
    if isinstance(decision, Reconsider):
        return msgspec.structs.replace(old, change=change, **decision.suspicion._asdict())
    if isinstance(decision, Move):
        return msgspec.structs.replace(old, state="moving", to=decision.to, change=change)
    return msgspec.structs.replace(old, state="serving", to=NOBODY, change=change)


HOLD_S = 0.2
"""Seconds before the same key may have its next housekeeping commit, after any outcome."""

SWEEP = b""
"""The key under which `Housekeeping` counts a sweep."""

SINGLE_SWEEP = 16
"""Keys that one sweep deletes in a store that commits one key at a time."""


class Housekeeping:
    """The open housekeeping commits, by the key that they write.

    A deposed leader's are harmless, which matters with `sealing` (S8): a mark and a removal are
    conditional on the node's record, and what a sweep deletes is of past epochs or noted again.
    """

    def __init__(self, leader: At, *, sealing: bool = False) -> None:
        self._sealing = sealing
        self._conditions: tuple[Condition, ...] = () if sealing else (leader,)
        self._busy: dict[bytes, str] = {}
        self._sweeping: dict[str, None] = {}
        self._after: dict[bytes, float] = {}

    def done(self, txn: str, now: float) -> bool:
        """A commit has an outcome; True if it was a commit of this class."""
        if txn in self._sweeping:
            del self._sweeping[txn]
            if not self._sweeping:
                self._after[SWEEP] = now + HOLD_S
            return True
        for key, mine in self._busy.items():
            if mine == txn:
                del self._busy[key]
                self._after[key] = now + HOLD_S
                return True
        return False

    def evict(self, view: ClusterView, node: Incarnation, txn: str, now: float) -> Commit | None:
        """Mark a node that the members do not reach (C6); the node stops when it sees that (L1)."""
        record = view.nodes[node]
        value = encode_record(msgspec.structs.replace(record, status="evicted"))
        return self._begin(view, node, Put(node_key(node), value, node_lease(node)), txn, now)

    def remove_dead(
        self, view: ClusterView, node: Incarnation, txn: str, now: float
    ) -> Commit | None:
        """Remove an evicted node's record after the time in which the node must stop (C5)."""
        return self._begin(view, node, Delete(node_key(node)), txn, now)

    def waste(self, view: ClusterView, rewind_over: bool) -> list[bytes]:
        """Keys of reports about past epochs, of needs that no longer matter, of clearances that are
        carried out, and of the mark of a rewind that is over."""
        obsolete = [release_key(*report) for report in view.releases if _is_over(view, report)]
        obsolete += [needs_key(shard) for shard in _satisfied(view)]
        obsolete += [
            trial_key(owner)
            for owner, record in view.trials.items()
            if owner not in view.nodes
            and all(_is_over(view, OwnerReport(owner, *_subject(one))) for one in record.trials)
        ]
        obsolete += [
            clearance_key(shard) for shard in view.clearances if not put_away(view.entry(shard))
        ]
        if view.rewound and rewind_over:
            obsolete.append(REWOUND_KEY)
        return obsolete

    def may_sweep(self, now: float) -> bool:
        """Whether no sweep is open or was made a moment ago."""
        return self._free(SWEEP, now) and not (self._sealing and self._sweeping)

    def sweep(self, waste: Sequence[bytes], next_txn: Callable[[], str]) -> list[Commit]:
        """Delete as many of these keys as fit into one commit (S7), or a few, one by one (S8)."""
        if self._sealing:
            commits = [Commit(next_txn(), (), (Delete(key),)) for key in waste[:SINGLE_SWEEP]]
            self._sweeping = {commit.txn: None for commit in commits}
            return commits
        self._busy[SWEEP] = txn = next_txn()
        writes = tuple(map(Delete, waste[: MAX_OPERATIONS - 1]))
        return [Commit(txn, self._conditions, writes)]

    def _begin(
        self, view: ClusterView, node: Incarnation, write: Write, txn: str, now: float
    ) -> Commit | None:
        if not self._free(write.key, now):
            return None
        self._busy[write.key] = txn
        at = At(write.key, view.node_revisions[node])
        return Commit(txn, (*self._conditions, at), (write,))

    def _free(self, key: bytes, now: float) -> bool:
        if key in self._busy or now < self._after.get(key, float("-inf")):
            return False
        self._after.pop(key, None)
        return True


def put_away(entry: Entry) -> bool:
    """Whether a shard or any of its entities is put away (DX-20)."""
    return entry.state == "quarantined" or bool(entry.barred)


def _subject(one: OnTrial) -> tuple[ShardKey, int]:
    return ShardKey(one.role, one.shard), one.epoch


def _is_over(view: ClusterView, report: OwnerReport) -> bool:
    return view.entry(report.shard).epoch > report.epoch


def _satisfied(view: ClusterView) -> list[ShardKey]:
    """Shards whose needs no longer matter: of each type, all nodes of the role that receive shards
    have it, or no registered node has it (DX-26)."""
    mixed: dict[tuple[str, str], bool] = {}
    over: list[ShardKey] = []
    for shard, types in view.needs.items():
        role = shard.role
        for kind in types:
            if (role, kind) not in mixed:
                mixed[role, kind] = view.knows_type(role, kind) and any(
                    receives(record, role) and kind not in record.types
                    for record in view.nodes.values()
                )
        if not view.knows(shard) or not any(mixed[role, kind] for kind in types):
            over.append(shard)
    return over


class _Hold(NamedTuple):
    until: float
    refused: tuple[Condition, ...]


class CommitBackoff:
    """Blocks that wait after a refused commit, and until when at the latest."""

    def __init__(self) -> None:
        self._holds: dict[BlockKey, _Hold] = {}

    @property
    def times(self) -> list[float]:
        """When each wait ends."""
        return [hold.until for hold in self._holds.values()]

    def refused(self, made: Draft, key: bytes, until: float) -> None:
        """The store refused a commit, because `key` was not as the condition says."""
        refused = tuple(one for one in made.conditions if one.key == key)
        self._holds[made.block] = _Hold(until, refused)

    def expire(self, now: float) -> None:
        """Forget the blocks whose wait is over."""
        self._holds = {block: hold for block, hold in self._holds.items() if now < hold.until}

    def held(self, block: BlockKey, view: ClusterView, now: float) -> bool:
        """Whether a block waits: the view still satisfies the condition that the store refused."""
        hold = self._holds.get(block)
        if hold is None:
            return False
        if now < hold.until and all(map(view.satisfies, hold.refused)):
            return True
        del self._holds[block]
        return False
