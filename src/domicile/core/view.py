"""The coordinator's picture of the store, and the drafts of what it wants to change there.

Called by the coordinator only. The picture holds nothing that is not stored (C2, I3): what is
merely wanted lives in drafts until its commit is known. Unreadable values are left out; every
draft is conditional, so a gap in the picture can cost time but never a second owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from domicile.core.ids import (
    CONFIG_KEY,
    DRAIN,
    LEADER_KEY,
    MAP,
    NOBODY,
    NODES,
    PARDON,
    RELEASE,
    REWOUND_KEY,
    STARTED,
    TARGET_KEY,
    WISH,
    Incarnation,
    ShardKey,
    node_key,
    parse_pardon_key,
    parse_release_key,
    parse_started_key,
    parse_wish_key,
    release_key,
)
from domicile.core.plan import Decision, Move, Own, Quarantine
from domicile.core.records import ConfigRecord, NodeRecord, decode_record
from domicile.core.shardmap import (
    BLOCK_SIZE,
    FREE,
    Block,
    Entry,
    block_count,
    block_key,
    decode_block,
    encode_block,
    parse_block_key,
)
from domicile.core.txn import (
    MAX_OPERATIONS,
    Absent,
    At,
    Changes,
    Condition,
    Delete,
    Item,
    Listing,
    Present,
    Put,
    Write,
)

WORDS = (RELEASE, STARTED)
"""Keys of what owners say."""

CROWDS = (MAP, *WORDS)
"""Keys that change many at a time; the map only by the leader's own hand."""


class BlockKey(NamedTuple):
    """One block of one role's map."""

    role: str
    number: int

    @property
    def key(self) -> bytes:
        """Where it is stored."""
        return block_key(self.role, self.number)


def _read_block(item: Item) -> tuple[BlockKey, Stored] | None:
    """What a stored block says, if it is readable."""
    try:
        role, number = parse_block_key(item.key)
        block = decode_block(item.value)
    except (ValueError, msgspec.MsgspecError):
        return None
    return BlockKey(role, number), Stored(item.revision, block.txn, block.entries)


def block_of(shard: ShardKey) -> BlockKey:
    """The block that holds a shard."""
    return BlockKey(shard.role, shard.shard // BLOCK_SIZE)


class Stored(NamedTuple):
    """A block as stored. Revision 0: it was removed, its epochs go on all the same."""

    revision: int
    txn: str
    entries: tuple[Entry, ...]


class Word(NamedTuple):
    """What an owner left in the store about an epoch: its release (H10), or its first start."""

    owner: Incarnation
    shard: ShardKey
    epoch: int


class StoreView:
    """What the store holds, as of the newest listing, changes and own commits."""

    def __init__(self) -> None:
        self.joined = 0
        """How many node records have appeared so far."""
        self.blocks: dict[BlockKey, Stored] = {}
        self._clear()

    def _clear(self) -> None:
        self.revision = 0
        self.leader_revision = 0
        self.nodes: dict[Incarnation, NodeRecord] = {}
        self.shards: dict[str, int] = {}
        self.drains: dict[str, None] = {}
        self.wishes: dict[ShardKey, str] = {}
        self.releases: dict[bytes, Word] = {}
        self.floors: dict[ShardKey, int] = {}
        """Epochs that journals have seen, as releases say (J1)."""
        self.started: dict[bytes, Word] = {}
        self.pardons: dict[ShardKey, None] = {}
        self.target = ""
        self.rewound = False
        self.node_revisions: dict[Incarnation, int] = {}
        self._created: dict[Incarnation, int] = {}

    def load(self, listing: Listing) -> bool:
        """Start over from a listing (C2); False if it is older than what is known."""
        if listing.revision < self.revision:
            return False
        joined, known = self.joined, self.nodes
        self._clear()
        for block, stored in self.blocks.items():
            if stored.revision <= listing.revision:
                self.blocks[block] = stored._replace(revision=0)
        self.revision = listing.revision
        for item in listing.items:
            self._put(item)
        self.joined = joined + sum(node not in known for node in self.nodes)
        return True

    def apply(self, changes: Changes) -> bool:
        """Take one commit's changes; True if anything may matter to a decision."""
        if changes.revision <= self.revision:
            return False
        self.revision = changes.revision
        matters = False
        for change in changes.changes:
            if change.item is not None:
                matters = self._put(change.item) or matters
            else:
                matters = self._remove(change.key, changes.revision) or matters
        return matters

    def put_block(self, block: BlockKey, stored: Stored) -> bool:
        """Take a block, from the watch, a read or an own commit; False if it is not newer."""
        known = self.blocks.get(block)
        if known is not None and stored.revision <= known.revision:
            return False
        self.blocks[block] = stored
        return True

    def take(self, item: Item) -> Stored | None:
        """Take a block that was read; what it says, if it is readable."""
        read = _read_block(item)
        if read is None:
            return None
        self.put_block(*read)
        return read[1]

    def knows(self, shard: ShardKey) -> bool:
        """Whether the config has such a shard."""
        return 0 <= shard.shard < self.shards.get(shard.role, 0)

    def entry(self, shard: ShardKey) -> Entry:
        """A shard's stored entry."""
        stored = self.blocks.get(block_of(shard))
        index = shard.shard % BLOCK_SIZE
        return stored.entries[index] if stored and index < len(stored.entries) else FREE

    def entries(self, block: BlockKey) -> tuple[Entry, ...]:
        """A block's stored entries, as many as the config wants."""
        stored = self.blocks.get(block)
        entries = stored.entries if stored else ()
        missing = self.size(block) - len(entries)
        return entries + (FREE,) * missing

    def size(self, block: BlockKey) -> int:
        """How many shards a block holds."""
        left = self.shards.get(block.role, 0) - block.number * BLOCK_SIZE
        return max(0, min(BLOCK_SIZE, left))

    def role_blocks(self, role: str) -> list[BlockKey]:
        """All blocks that a role's map consists of, stored or not."""
        return [BlockKey(role, number) for number in range(block_count(self.shards[role]))]

    @property
    def moving(self) -> bool:
        """Whether some shard moves."""
        blocks = (block for role in self.shards for block in self.role_blocks(role))
        return any(entry.state == "moving" for block in blocks for entry in self.entries(block))

    def satisfies(self, condition: Condition) -> bool:
        """Whether a condition holds as far as this picture knows."""
        key = condition.key
        if key.startswith(NODES):
            present = Incarnation(key[len(NODES) :].decode()) in self.nodes
            return present != isinstance(condition, Absent)
        if key.startswith(MAP):
            stored = self.blocks.get(BlockKey(*parse_block_key(key)))
            revision = stored.revision if stored else 0
            return revision == (condition.revision if isinstance(condition, At) else 0)
        return True

    def _put(self, item: Item) -> bool:
        key = item.key
        try:
            if key.startswith(MAP):
                read = _read_block(item)
                return read is not None and self.put_block(*read)
            if key.startswith(NODES):
                self._put_node(item)
            elif key.startswith(WISH):
                self.wishes[parse_wish_key(key)] = item.value.decode()
            elif key.startswith(DRAIN):
                self.drains[key[len(DRAIN) :].decode()] = None
            elif key.startswith(RELEASE):
                self.releases[key] = word = Word(*parse_release_key(key))
                if item.value:
                    self.floors[word.shard] = int(item.value)
            elif key.startswith(STARTED):
                self.started[key] = Word(*parse_started_key(key))
            elif key.startswith(PARDON):
                self.pardons[parse_pardon_key(key)] = None
            elif key == TARGET_KEY:
                self.target = item.value.decode()
            elif key == REWOUND_KEY:
                self.rewound = True
            elif key == CONFIG_KEY:
                self.shards = dict(sorted(decode_record(item.value, ConfigRecord).shards.items()))
            elif key == LEADER_KEY:
                self.leader_revision = item.revision
            else:
                return False
        except (ValueError, msgspec.MsgspecError):
            return False
        return True

    def _put_node(self, item: Item) -> None:
        record = decode_record(item.value, NodeRecord)
        if record.incarnation not in self.nodes:
            self.joined += 1
        self.nodes[record.incarnation] = record
        self._created[record.incarnation] = item.created
        self.node_revisions[record.incarnation] = item.revision
        order = sorted(self.nodes, key=lambda node: (self._created[node], node))
        self.nodes = {node: self.nodes[node] for node in order}

    def _remove(self, key: bytes, revision: int) -> bool:
        try:
            if key.startswith(MAP):
                block = BlockKey(*parse_block_key(key))
                stored = self.blocks.get(block)
                if stored is not None and stored.revision < revision:
                    self.blocks[block] = stored._replace(revision=0)
            elif key.startswith(NODES):
                node = Incarnation(key[len(NODES) :].decode())
                self.nodes.pop(node, None)
                self._created.pop(node, None)
                self.node_revisions.pop(node, None)
            elif key.startswith(WISH):
                self.wishes.pop(parse_wish_key(key), None)
            elif key.startswith(DRAIN):
                self.drains.pop(key[len(DRAIN) :].decode(), None)
            elif key.startswith(WORDS):
                # Gone because it was heeded, or its epoch is over: nothing to decide.
                self.releases.pop(key, None)
                self.started.pop(key, None)
                return False
            elif key.startswith(PARDON):
                self.pardons.pop(parse_pardon_key(key), None)
            elif key == TARGET_KEY:
                self.target = ""
            elif key == REWOUND_KEY:
                self.rewound = False
            elif key == LEADER_KEY:
                self.leader_revision = 0
            else:
                return False
        except ValueError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Forgive:
    """A shard's deaths are long ago: it starts over (DX-20)."""

    shard: ShardKey


@dataclass(frozen=True, slots=True)
class Draft:
    """One commit to a block: what it needs, what it writes, and who should hear of it."""

    txn: str
    block: BlockKey
    conditions: tuple[Condition, ...]
    writes: tuple[Write, ...]
    entries: tuple[Entry, ...]
    tells: tuple[tuple[Incarnation, ShardKey, Entry], ...]


def draft(
    view: StoreView,
    block: BlockKey,
    decisions: Sequence[Decision | Forgive],
    leader: At,
    txn: str,
    floors: Mapping[ShardKey, int] | None = None,
) -> Draft:
    """As many of a block's decisions as fit into one commit (S7), with C4's conditions."""
    stored = view.blocks.get(block)
    key = block.key
    base = At(key, stored.revision) if stored and stored.revision else Absent(key)
    conditions: dict[Condition, None] = {leader: None, base: None}
    deletes: dict[Write, None] = {}
    entries = list(view.entries(block))
    tells: dict[tuple[Incarnation, ShardKey], int] = {}
    for decision in decisions:
        index = decision.shard.shard % BLOCK_SIZE
        old = entries[index]
        needs = _needs(decision, old)
        obsolete = _releases(view, decision, old)
        count = len(conditions) + len(deletes) + len(needs) + len(obsolete)
        if count >= MAX_OPERATIONS:
            break
        conditions.update(needs)
        deletes.update(obsolete)
        floor = 0 if floors is None else floors.get(decision.shard, 0)
        entries[index] = new = _changed(view, decision, old, floor)
        tells[new.owner, decision.shard] = index
        if old.owner not in (NOBODY, new.owner):
            tells[old.owner, decision.shard] = index
    value = encode_block(Block(txn, tuple(entries)))
    # I3: two decisions may concern one shard, and only what came of both is stored.
    told = tuple([(to, shard, entries[index]) for (to, shard), index in tells.items()])
    return Draft(txn, block, tuple(conditions), (Put(key, value), *deletes), tuple(entries), told)


def _needs(decision: Decision | Forgive, old: Entry) -> dict[Condition, None]:
    """C4's conditions of one new owner; moves and reverts rest on the block's revision."""
    if isinstance(decision, Quarantine):
        return {Absent(node_key(old.owner)): None}
    if not isinstance(decision, Own):
        return {}
    needs: dict[Condition, None] = {Present(node_key(decision.owner)): None}
    if decision.gone:
        needs[Absent(node_key(old.owner))] = None
    return needs


def _releases(view: StoreView, decision: Decision | Forgive, old: Entry) -> dict[Write, None]:
    """The release key that a new owner's entry makes obsolete; older ones are swept."""
    key = release_key(old.owner, decision.shard, old.epoch)
    return {Delete(key): None} if isinstance(decision, Own) and key in view.releases else {}


def _changed(view: StoreView, decision: Decision | Forgive, old: Entry, floor: int) -> Entry:
    """The entry after a decision: a new epoch for a new owner only, a new change always."""
    change = old.change + 1
    if isinstance(decision, Own):
        node = view.nodes[decision.owner].node
        return Entry(
            decision.owner, max(old.epoch, floor) + 1, "serving", NOBODY, change, node,
            decision.strikes,
        )  # fmt: skip
    if isinstance(decision, Quarantine):
        return Entry(
            NOBODY, old.epoch, "quarantined", NOBODY, change, old.previous, decision.strikes
        )
    if isinstance(decision, Forgive):
        return msgspec.structs.replace(old, strikes=0, change=change)
    if isinstance(decision, Move):
        return msgspec.structs.replace(old, state="moving", to=decision.to, change=change)
    return msgspec.structs.replace(old, state="serving", to=NOBODY, change=change)
