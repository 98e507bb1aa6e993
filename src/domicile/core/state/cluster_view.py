"""What the store holds, as one class for members, leaders, operators and status.

The code that lists and watches the store feeds a `ClusterView` and acts on the facts that it
returns. A view decides nothing and must never guess (C2, I3): all its contents are stored. They
were in the store at `revision`, or are an own commit, or an entry that another process sent after
it was stored. Unreadable values are left out. Every commit is conditional, so a gap here can cost
time but never cause a second owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.state.keys import (
    BlockKey,
    KeyFamily,
    OffsetMark,
    OwnerReport,
    block_of,
    classify,
    node_key,
    parse_block_key,
)
from domicile.core.state.records import (
    ClientRecord,
    ConfigRecord,
    LeaderRecord,
    MoveRecord,
    NodeRecord,
    TrialRecord,
)
from domicile.core.state.shardmap import (
    BLOCK_SIZE,
    FREE,
    Entry,
    ShardMap,
    block_count,
    decode_block,
)
from domicile.core.state.txn import (
    Absent,
    At,
    Change,
    Changes,
    Condition,
    Delete,
    Item,
    Listing,
    Write,
)


@dataclass(frozen=True, slots=True)
class NodeUp:
    """A node registered."""

    record: NodeRecord


@dataclass(frozen=True, slots=True)
class NodeChanged:
    """A node's record was rewritten: it leaves, or was evicted."""

    record: NodeRecord


@dataclass(frozen=True, slots=True)
class NodeGone:
    """A node's record is gone, so its incarnation never acts again (C4 X)."""

    incarnation: Incarnation
    record: NodeRecord


@dataclass(frozen=True, slots=True)
class ClientUp:
    """A client registered."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class ClientGone:
    """A client's record is gone."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class LeaderChanged:
    """Another coordinator acts now, or none."""

    record: LeaderRecord | None


@dataclass(frozen=True, slots=True)
class EntryChanged:
    """A shard's entry is newer than the entry known before."""

    shard: ShardKey
    entry: Entry


@dataclass(frozen=True, slots=True)
class ConfigSeen:
    """What every member agrees on: told when first seen and whenever it changes."""

    record: ConfigRecord


@dataclass(frozen=True, slots=True)
class KickWished:
    """An operator wants to end the running handlers of an entity (DX-09)."""

    shard: ShardKey
    entity: EntityKey
    item: Item


@dataclass(frozen=True, slots=True)
class BlockChanged:
    """A block was written or removed. A leader gets this fact instead of its entries (C2)."""

    block: BlockKey


@dataclass(frozen=True, slots=True)
class NoteChanged:
    """An operator's wish or an owner's report: present with a value, or gone (None)."""

    family: KeyFamily
    name: Any
    value: Any


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A key or value that cannot be read; it did not change the view."""

    key: bytes
    why: str


ViewChange = (
    NodeUp
    | NodeChanged
    | NodeGone
    | ClientUp
    | ClientGone
    | LeaderChanged
    | EntryChanged
    | ConfigSeen
    | KickWished
    | BlockChanged
    | NoteChanged
    | Unreadable
)

_RANKS = {family: rank for rank, family in enumerate(KeyFamily)}
_UNREAD = len(_RANKS)


class StoredBlock(NamedTuple):
    """A block as stored. Revision 0: the block was removed, but its epochs stay valid (I1)."""

    revision: int
    txn: str
    entries: tuple[Entry, ...]


class ClusterView:
    """What the store holds. `load` starts again from a listing, `apply` takes one later commit.
    Both return what is new: removed keys first, then changes in the order of `KeyFamily`.

    Of the map it keeps two forms. `blocks` are the blocks as stored, ordered by their revisions
    (C2): the conditions of leaders and operators use them. `map` has the newest known entry of each
    shard, also from a leader or a Return, ordered by `change` (C3). A leader does not need `map`
    and follows no entries: it gets facts about blocks instead.
    """

    def __init__(self, *, follow_entries: bool = True) -> None:
        self.revision = 0
        self.nodes: dict[Incarnation, NodeRecord] = {}
        """In the order of creation. Always the same dict object, because others keep it."""
        self.created: dict[Incarnation, int] = {}
        """Create revision of each node's record; it ranks candidates by age (C1)."""
        self.node_revisions: dict[Incarnation, int] = {}
        self.clients: dict[Incarnation, ClientRecord] = {}
        self.leader: LeaderRecord | None = None
        self.leader_revision = 0
        """Revision of the leader key, even if its record is unreadable; 0: absent (C1)."""
        self.config: ConfigRecord | None = None
        self.config_revision = 0
        self.shards: dict[str, int] = {}
        """How many shards each role of the config has, sorted by role."""
        self.blocks: dict[BlockKey, StoredBlock] = {}
        self.map = ShardMap()
        self.drains: dict[str, bool] = {}
        """Node ids that an operator wants empty, as keys."""
        self.wishes: dict[ShardKey, str] = {}
        """Node ids that an operator wants as homes, by shard."""
        self.releases: dict[OwnerReport, int] = {}
        """Releases that owners stored, with the epochs that journals have seen."""
        self.floors: dict[ShardKey, int] = {}
        """The epochs above that are not 0. They are kept after their releases, until a listing
        (J1)."""
        self.needs: dict[ShardKey, tuple[str, ...]] = {}
        """Entity types that messages of a shard need and an owner of it lacked (DX-26)."""
        self.offsets: dict[ShardKey, OffsetMark] = {}
        """How far shards are known to have been in their journals (J11)."""
        self.trials: dict[Incarnation, TrialRecord] = {}
        """What owners have or had on trial; an owner that is gone is in no other dict (DX-20)."""
        self.clearances: dict[ShardKey, bool] = {}
        """Shards whose quarantines an operator wants to end, as keys (DX-20)."""
        self.kicks: dict[tuple[ShardKey, EntityKey], int] = {}
        """Wishes to end handlers that were already returned as facts, with their revisions."""
        self._target: dict[None, str] = {}
        self._rewound: dict[None, bool] = {}
        self._moved: dict[None, MoveRecord] = {}
        self._notes: dict[KeyFamily, dict[Any, Any]] = {
            KeyFamily.DRAIN: self.drains,
            KeyFamily.WISH: self.wishes,
            KeyFamily.RELEASE: self.releases,
            KeyFamily.NEEDS: self.needs,
            KeyFamily.OFFSET: self.offsets,
            KeyFamily.TRIAL: self.trials,
            KeyFamily.CLEARANCE: self.clearances,
            KeyFamily.TARGET: self._target,
            KeyFamily.REWOUND: self._rewound,
            KeyFamily.MOVED: self._moved,
        }
        """The families that this view keeps as names with values, without other rules."""
        self._follow_entries = follow_entries
        self._types: dict[str, tuple[str, ...]] = {}

    @property
    def target(self) -> str:
        """The version that operators want; empty: none is stored."""
        return self._target.get(None, "")

    @property
    def rewound(self) -> bool:
        """Whether a process has found that the store lost commits (S5)."""
        return bool(self._rewound)

    @property
    def moved(self) -> MoveRecord | None:
        """Why no process may use the cluster in this store; None: all may."""
        return self._moved.get(None)

    # what the store says

    def load(self, listing: Listing) -> list[ViewChange]:
        """Start again from a listing of the store (C2); what it lacks is gone.

        A listing that is older than the view is ignored.
        """
        if listing.revision < self.revision:
            return []
        present = {item.key: item for item in listing.items}
        changes = [Change(key, None) for key in self._keys() if key not in present]
        for incarnation, created in self.created.items():
            item = present.get(node_key(incarnation))
            if item is not None and item.created != created:
                changes.append(Change(item.key, None))
        # Only the listing says which blocks exist and their revisions, also after a store went back
        # (S5). Only own commits after the listing are newer (S1).
        for block, stored in self.blocks.items():
            if stored.revision <= listing.revision:
                self.blocks[block] = stored._replace(revision=0)
        self.floors.clear()
        changes += [Change(item.key, item) for item in listing.items]
        return self._take(listing.revision, changes)

    def apply(self, changes: Changes) -> list[ViewChange]:
        """Take what one commit changed; nothing if the commit is known already (C2)."""
        if changes.revision <= self.revision:
            return []
        return self._take(changes.revision, changes.changes)

    def take_own(self, block: BlockKey, stored: StoredBlock, writes: Iterable[Write]) -> None:
        """Take an own commit that is known to be stored, before the watch delivers it (I3, S1)."""
        assert not self._follow_entries, "a process learns of entries, not of blocks"
        self._put_block(block, stored)
        for write in writes:
            if isinstance(write, Delete) and classify(write.key) is KeyFamily.RELEASE:
                self.releases.pop(KeyFamily.RELEASE.parse(write.key), None)

    def take_block(self, item: Item) -> StoredBlock | None:
        """Take a block that was read (S1); return it, or None if it is unreadable."""
        assert not self._follow_entries, "a process learns of entries, not of blocks"
        try:
            block, stored = parse_block_key(item.key), _stored(item)
        except (ValueError, msgspec.MsgspecError):
            return None
        self._put_block(block, stored)
        return stored

    def _put_block(self, block: BlockKey, stored: StoredBlock) -> bool:
        """Take a block from the watch, a read or an own commit; False if it is not newer."""
        known = self.blocks.get(block)
        if known is not None and stored.revision <= known.revision:
            return False
        self.blocks[block] = stored
        return True

    @staticmethod
    def contradiction(listing: Listing, known: Mapping[ShardKey, Entry]) -> str:
        """What in a listing proves that the store lost commits (S5); empty if nothing does.

        `known` is the map at the time when the listing was requested. All of it had been stored
        before (I3), so no listing can be older, and one `change` cannot have two entries. Entries
        learned after the request may be newer than the listing.
        """
        for item in listing.items:
            if classify(item.key) is not KeyFamily.BLOCK:
                continue
            try:
                role, number = parse_block_key(item.key)
                entries = decode_block(item.value).entries
            except (msgspec.MsgspecError, ValueError):
                continue
            for index, entry in enumerate(entries):
                shard = ShardKey(role, number * BLOCK_SIZE + index)
                before = known.get(shard, FREE)
                if before.change > entry.change or (
                    before.change == entry.change and before != entry
                ):
                    return (
                        f"it lists change {entry.change} of shard {role}/{shard.shard}, and "
                        f"another change {before.change} had been stored"
                    )
        return ""

    # which members are registered

    def knows_type(self, role: str, kind: str) -> bool:
        """Whether any registered node of a role serves an entity type."""
        return kind in self.types(role)

    def types(self, role: str) -> tuple[str, ...]:
        """The entity types that registered nodes of a role serve, sorted."""
        known = self._types.get(role)
        if known is None:
            found = {
                kind: None
                for record in self.nodes.values()
                if role in record.roles
                for kind in record.types
            }
            known = self._types[role] = tuple(sorted(found))
        return known

    def clash(self, record: NodeRecord) -> NodeRecord | None:
        """A node that is up under the same node id but with other roles (SM-28)."""
        for other in self.nodes.values():
            same = other.node == record.node and other.incarnation != record.incarnation
            if same and other.status == "up" and sorted(other.roles) != sorted(record.roles):
                return other
        return None

    # the map as stored

    def knows(self, shard: ShardKey) -> bool:
        """Whether the config has this shard."""
        return 0 <= shard.shard < self.shards.get(shard.role, 0)

    def entry(self, shard: ShardKey) -> Entry:
        """A shard's stored entry."""
        stored = self.blocks.get(block_of(shard))
        index = shard.shard % BLOCK_SIZE
        return stored.entries[index] if stored and index < len(stored.entries) else FREE

    def entries(self, block: BlockKey) -> tuple[Entry, ...]:
        """A block's stored entries, filled with `FREE` up to the number in the config."""
        stored = self.blocks.get(block)
        entries = stored.entries if stored else ()
        missing = self.size(block) - len(entries)
        return entries + (FREE,) * missing

    def size(self, block: BlockKey) -> int:
        """How many shards a block holds."""
        left = self.shards.get(block.role, 0) - block.number * BLOCK_SIZE
        return max(0, min(BLOCK_SIZE, left))

    def role_blocks(self, role: str) -> list[BlockKey]:
        """All blocks of a role's map, stored or not."""
        return [BlockKey(role, number) for number in range(block_count(self.shards[role]))]

    @property
    def moving(self) -> bool:
        """Whether any shard moves."""
        blocks = (block for role in self.shards for block in self.role_blocks(role))
        return any(entry.state == "moving" for block in blocks for entry in self.entries(block))

    def satisfies(self, condition: Condition) -> bool:
        """Whether a condition about a node or a block holds as far as this view knows."""
        family = classify(condition.key)
        if family is KeyFamily.NODE:
            present = KeyFamily.NODE.parse(condition.key) in self.nodes
            return present != isinstance(condition, Absent)
        if family is KeyFamily.BLOCK:
            stored = self.blocks.get(KeyFamily.BLOCK.parse(condition.key))
            revision = stored.revision if stored else 0
            return revision == (condition.revision if isinstance(condition, At) else 0)
        return True

    # one key after the other

    def _keys(self) -> list[bytes]:
        """The keys of everything in this view, except the map's."""
        named: dict[KeyFamily, Iterable[Any]] = {
            KeyFamily.NODE: self.nodes,
            KeyFamily.CLIENT: self.clients,
            KeyFamily.CONFIG: () if self.config is None else (None,),
            KeyFamily.LEADER: (None,) if self.leader_revision else (),
            KeyFamily.KICK: self.kicks,
            **self._notes,
        }
        return [family.key(name) for family, names in named.items() for name in names]

    def _take(self, revision: int, changes: Iterable[Change]) -> list[ViewChange]:
        facts: list[ViewChange] = []
        for change in sorted(changes, key=_rank):
            family = classify(change.key)
            try:
                if family is not None:
                    self._one(family, change.key, change.item, revision, facts)
            except (msgspec.MsgspecError, ValueError) as error:
                facts.append(Unreadable(change.key, str(error)))
        self.revision = revision
        if any(isinstance(fact, NodeUp) for fact in facts):
            self._order_nodes()
        return facts

    def _one(
        self,
        family: KeyFamily,
        key: bytes,
        item: Item | None,
        revision: int,
        facts: list[ViewChange],
    ) -> None:
        if family is KeyFamily.BLOCK:
            self._block(key, item, revision, facts)
        elif family is KeyFamily.NODE:
            self._node(KeyFamily.NODE.parse(key), item, facts)
        elif family is KeyFamily.CLIENT:
            self._client(KeyFamily.CLIENT.parse(key), item, facts)
        elif family is KeyFamily.LEADER:
            self._leader(item, facts)
        elif family is KeyFamily.CONFIG:
            self._config(item, facts)
        elif family is KeyFamily.KICK:
            self._kick(KeyFamily.KICK.parse(key), item, facts)
        elif family in self._notes:
            self._note(family, family.parse(key), item, revision, facts)

    def _block(self, key: bytes, item: Item | None, revision: int, facts: list[ViewChange]) -> None:
        block: BlockKey = KeyFamily.BLOCK.parse(key)
        known = self.blocks.get(block)
        if item is None:
            if known is None or known.revision >= revision:
                return
            self.blocks[block] = known._replace(revision=0)
        elif not self._put_block(block, _stored(item)):
            return
        if not self._follow_entries:
            facts.append(BlockChanged(block))
        elif item is not None:
            before = () if known is None else known.entries
            changed = self.map.merge_block(*block, self.blocks[block].entries, before)
            facts += [EntryChanged(shard, entry) for shard, entry in changed]

    def _node(self, incarnation: Incarnation, item: Item | None, facts: list[ViewChange]) -> None:
        before = self.nodes.get(incarnation)
        if item is None:
            if before is not None:
                del self.nodes[incarnation], self.created[incarnation]
                del self.node_revisions[incarnation]
                self._types.clear()
                facts.append(NodeGone(incarnation, before))
            return
        record: NodeRecord = KeyFamily.NODE.decode(item.value)
        self.nodes[incarnation] = record
        self.created[incarnation] = item.created
        self.node_revisions[incarnation] = item.revision
        self._types.clear()
        if before is None:
            facts.append(NodeUp(record))
        elif before != record:
            facts.append(NodeChanged(record))

    def _order_nodes(self) -> None:
        order = sorted(self.nodes, key=lambda node: (self.created[node], node))
        if order != list(self.nodes):
            nodes = {node: self.nodes[node] for node in order}
            self.nodes.clear()
            self.nodes.update(nodes)

    def _client(self, incarnation: Incarnation, item: Item | None, facts: list[ViewChange]) -> None:
        known = incarnation in self.clients
        if item is None:
            if known:
                del self.clients[incarnation]
                facts.append(ClientGone(incarnation))
            return
        self.clients[incarnation] = KeyFamily.CLIENT.decode(item.value)
        if not known:
            facts.append(ClientUp(incarnation))

    def _kick(
        self, name: tuple[ShardKey, EntityKey], item: Item | None, facts: list[ViewChange]
    ) -> None:
        if item is None:
            self.kicks.pop(name, None)
        elif self.kicks.get(name) != item.revision:
            # A listing repeats what the watch has shown: each wish becomes one fact.
            facts.append(KickWished(*name, item))
            self.kicks[name] = item.revision

    def _leader(self, item: Item | None, facts: list[ViewChange]) -> None:
        revision = 0 if item is None else item.revision
        if revision == self.leader_revision:
            return
        # C1: the new revision alone deposes the former leader, even if the record is unreadable.
        self.leader_revision, self.leader = revision, None
        try:
            if item is not None:
                self.leader = KeyFamily.LEADER.decode(item.value)
        finally:
            facts.append(LeaderChanged(self.leader))

    def _config(self, item: Item | None, facts: list[ViewChange]) -> None:
        before = self.config
        self.config = None if item is None else KeyFamily.CONFIG.decode(item.value)
        self.config_revision = 0 if item is None else item.revision
        # No process removes a config. If it is removed anyway, the leader keeps the known roles.
        if self.config is not None and self.config != before:
            self.shards = dict(sorted(self.config.shards.items()))
            facts.append(ConfigSeen(self.config))

    def _note(
        self,
        family: KeyFamily,
        name: Any,
        item: Item | None,
        revision: int,
        facts: list[ViewChange],
    ) -> None:
        notes = self._notes[family]
        before = notes.get(name)
        if item is None:
            notes.pop(name, None)
            value = None
        else:
            value = notes[name] = family.decode(item.value)
            if family is KeyFamily.RELEASE and value:
                self.floors[name.shard] = value
        # An operator who repeats a wish causes a new fact, although the value is the same.
        if value != before or (item is not None and item.revision == revision):
            facts.append(NoteChanged(family, name, value))


def _rank(change: Change) -> tuple[bool, int, bytes]:
    family = classify(change.key)
    rank = _UNREAD if family is None else _RANKS[family]
    return change.item is not None, rank, change.key


def _stored(item: Item) -> StoredBlock:
    block = decode_block(item.value)
    return StoredBlock(item.revision, block.txn, block.entries)
