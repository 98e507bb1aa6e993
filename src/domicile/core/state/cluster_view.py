"""What one process knows of the cluster: nodes, clients, leader, config, wishes and the map.

A member feeds it what the store says, listing or watch, and passes the returned facts on. It
decides nothing and must never guess: what it holds was in the store at `revision`.

The coordinator's picture of the store, and the drafts of what it wants to change there.

Called by the coordinator only. The picture holds nothing that is not stored (C2, I3): what is
merely wanted lives in drafts until its commit is known. Unreadable values are left out; every
draft is conditional, so a gap in the picture can cost time but never a second owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.state.keys import (
    CLIENTS,
    CONFIG_KEY,
    DRAIN,
    KICK,
    LEADER_KEY,
    MAP,
    NODES,
    PARDON,
    RELEASE,
    REWOUND_KEY,
    STARTED,
    TARGET_KEY,
    WISH,
    client_key,
    drain_key,
    node_key,
    parse_block_key,
    parse_kick_key,
    parse_pardon_key,
    parse_release_key,
    parse_started_key,
    parse_wish_key,
    wish_key,
)
from domicile.core.state.records import (
    ClientRecord,
    ConfigRecord,
    LeaderRecord,
    NodeRecord,
    decode_record,
)
from domicile.core.state.shardmap import (
    BLOCK_SIZE,
    FREE,
    BlockKey,
    Entry,
    ShardMap,
    block_count,
    block_of,
    decode_block,
)
from domicile.core.state.txn import (
    Absent,
    At,
    Change,
    Changes,
    Condition,
    Item,
    Listing,
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
    """A node's record is gone, so that incarnation never acts again (C4 X)."""

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
    """Another coordinator acts, or none."""

    record: LeaderRecord | None


@dataclass(frozen=True, slots=True)
class EntryChanged:
    """A shard's entry is newer than what was known."""

    shard: ShardKey
    entry: Entry


@dataclass(frozen=True, slots=True)
class ConfigSeen:
    """What every member agrees on, at first sight and whenever it grows."""

    record: ConfigRecord


@dataclass(frozen=True, slots=True)
class KickWished:
    """An operator wants the running handlers of an entity ended (DX-09)."""

    shard: ShardKey
    entity: EntityKey
    item: Item


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A key or value that makes no sense; it changed nothing here."""

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
    | Unreadable
)

# Departures before arrivals, arrivals before the entries that name them.
_ORDER = (NODES, CLIENTS, CONFIG_KEY, LEADER_KEY, MAP, DRAIN, WISH, KICK)


class Members:
    """The view. `relist` replaces it, `apply` carries it forward; both return what is new."""

    def __init__(self) -> None:
        self.revision = 0
        self.nodes: dict[Incarnation, NodeRecord] = {}
        self.created: dict[Incarnation, int] = {}
        """Create revision of each node's record: the age by which candidates rank (C1)."""
        self.clients: dict[Incarnation, ClientRecord] = {}
        self.leader: LeaderRecord | None = None
        self.leader_revision = 0
        self.config: ConfigRecord | None = None
        self.config_revision = 0
        self.drains: dict[str, None] = {}
        """Node ids that an operator wants empty, as keys."""
        self.wishes: dict[ShardKey, str] = {}
        """Node ids that an operator wants as homes."""
        self.kicks: dict[bytes, int] = {}
        """Wishes to end handlers that were passed on, by key, with their revisions."""
        self.map = ShardMap()
        self._types: dict[str, tuple[str, ...]] = {}

    def relist(self, listing: Listing) -> list[ViewChange]:
        """Take a whole listing of the store; what it lacks has vanished."""
        present = {item.key: item for item in listing.items}
        changes = [Change(key, None) for key in self._keys() if key not in present]
        for incarnation, created in self.created.items():
            item = present.get(node_key(incarnation))
            if item is not None and item.created != created:
                changes.append(Change(item.key, None))
        changes += [Change(item.key, item) for item in listing.items]
        return self._take(listing.revision, changes)

    @staticmethod
    def contradiction(listing: Listing, known: Mapping[ShardKey, Entry]) -> str:
        """What a listing says that can't be if the store kept all it showed before (S5).

        `known` is the map as it was when the listing was asked for. Whatever was known then had
        been stored before it was told (I3), so no listing is behind it, and no change means two
        things. What was learned since may well be newer than the listing.
        """
        for item in listing.items:
            if not item.key.startswith(MAP):
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

    def apply(self, changes: Changes) -> list[ViewChange]:
        """Take what one commit changed."""
        return self._take(changes.revision, changes.changes)

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

    def _keys(self) -> list[bytes]:
        keys = [node_key(incarnation) for incarnation in self.nodes]
        keys += [client_key(incarnation) for incarnation in self.clients]
        if self.config is not None:
            keys.append(CONFIG_KEY)
        if self.leader is not None:
            keys.append(LEADER_KEY)
        keys += [drain_key(node) for node in self.drains]
        keys += [wish_key(shard) for shard in self.wishes]
        keys += list(self.kicks)
        return keys

    def _take(self, revision: int, changes: Iterable[Change]) -> list[ViewChange]:
        facts: list[ViewChange] = []
        for change in sorted(changes, key=_rank):
            try:
                self._one(change.key, change.item, facts)
            except (msgspec.MsgspecError, ValueError) as error:
                facts.append(Unreadable(change.key, str(error)))
        self.revision = revision
        return facts

    def _one(self, key: bytes, item: Item | None, facts: list[ViewChange]) -> None:
        if key.startswith(MAP):
            if item is not None:
                role, number = parse_block_key(key)
                changed = self.map.merge_block(role, number, decode_block(item.value))
                facts += [EntryChanged(shard, entry) for shard, entry in changed]
        elif key.startswith(NODES):
            self._node(Incarnation(key[len(NODES) :].decode()), item, facts)
        elif key.startswith(CLIENTS):
            self._client(Incarnation(key[len(CLIENTS) :].decode()), item, facts)
        elif key == LEADER_KEY:
            self._leader(item, facts)
        elif key == CONFIG_KEY:
            self._config(item, facts)
        elif key.startswith(DRAIN):
            node = key[len(DRAIN) :].decode()
            if item is not None:
                self.drains[node] = None
            else:
                self.drains.pop(node, None)
        elif key.startswith(WISH):
            shard = parse_wish_key(key)
            if item is not None:
                self.wishes[shard] = item.value.decode()
            else:
                self.wishes.pop(shard, None)
        elif key.startswith(KICK):
            self._kick(key, item, facts)

    def _node(self, incarnation: Incarnation, item: Item | None, facts: list[ViewChange]) -> None:
        before = self.nodes.get(incarnation)
        if item is None:
            if before is not None:
                del self.nodes[incarnation], self.created[incarnation]
                self._types.clear()
                facts.append(NodeGone(incarnation, before))
            return
        record = decode_record(item.value, NodeRecord)
        self.nodes[incarnation] = record
        self.created[incarnation] = item.created
        self._types.clear()
        if before is None:
            facts.append(NodeUp(record))
        elif before != record:
            facts.append(NodeChanged(record))

    def _client(self, incarnation: Incarnation, item: Item | None, facts: list[ViewChange]) -> None:
        known = incarnation in self.clients
        if item is None:
            if known:
                del self.clients[incarnation]
                facts.append(ClientGone(incarnation))
            return
        self.clients[incarnation] = decode_record(item.value, ClientRecord)
        if not known:
            facts.append(ClientUp(incarnation))

    def _kick(self, key: bytes, item: Item | None, facts: list[ViewChange]) -> None:
        if item is None:
            self.kicks.pop(key, None)
        elif self.kicks.get(key) != item.revision:
            # A listing shows again what the watch has shown: each is passed on once.
            facts.append(KickWished(*parse_kick_key(key), item))
            self.kicks[key] = item.revision

    def _leader(self, item: Item | None, facts: list[ViewChange]) -> None:
        revision = 0 if item is None else item.revision
        if revision == self.leader_revision:
            return
        self.leader = None if item is None else decode_record(item.value, LeaderRecord)
        self.leader_revision = revision
        facts.append(LeaderChanged(self.leader))

    def _config(self, item: Item | None, facts: list[ViewChange]) -> None:
        before = self.config
        self.config = None if item is None else decode_record(item.value, ConfigRecord)
        self.config_revision = 0 if item is None else item.revision
        if self.config is not None and self.config != before:
            facts.append(ConfigSeen(self.config))


def _rank(change: Change) -> tuple[int, int, bytes]:
    for rank, prefix in enumerate(_ORDER):
        if change.key.startswith(prefix):
            return int(change.item is not None), rank, change.key
    return 1, len(_ORDER), change.key


REPORTS = (RELEASE, STARTED)
"""Keys of what owners say."""

CROWDS = (MAP, *REPORTS)
"""Keys that change many at a time; the map only by the leader's own hand."""


def _read_block(item: Item) -> tuple[BlockKey, StoredBlock] | None:
    """What a stored block says, if it is readable."""
    try:
        role, number = parse_block_key(item.key)
        block = decode_block(item.value)
    except (ValueError, msgspec.MsgspecError):
        return None
    return BlockKey(role, number), StoredBlock(item.revision, block.txn, block.entries)


class StoredBlock(NamedTuple):
    """A block as stored. Revision 0: it was removed, its epochs go on all the same."""

    revision: int
    txn: str
    entries: tuple[Entry, ...]


class OwnerReport(NamedTuple):
    """What an owner left in the store about an epoch: its release (H10), or its first start."""

    owner: Incarnation
    shard: ShardKey
    epoch: int


class StoreView:
    """What the store holds, as of the newest listing, changes and own commits."""

    def __init__(self) -> None:
        self.joined = 0
        """How many node records have appeared so far."""
        self.blocks: dict[BlockKey, StoredBlock] = {}
        self._clear()

    def _clear(self) -> None:
        self.revision = 0
        self.leader_revision = 0
        self.nodes: dict[Incarnation, NodeRecord] = {}
        self.shards: dict[str, int] = {}
        self.drains: dict[str, None] = {}
        self.wishes: dict[ShardKey, str] = {}
        self.releases: dict[bytes, OwnerReport] = {}
        self.floors: dict[ShardKey, int] = {}
        """Epochs that journals have seen, as releases say (J1)."""
        self.started: dict[bytes, OwnerReport] = {}
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

    def put_block(self, block: BlockKey, stored: StoredBlock) -> bool:
        """Take a block, from the watch, a read or an own commit; False if it is not newer."""
        known = self.blocks.get(block)
        if known is not None and stored.revision <= known.revision:
            return False
        self.blocks[block] = stored
        return True

    def take(self, item: Item) -> StoredBlock | None:
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
                self.releases[key] = word = OwnerReport(*parse_release_key(key))
                if item.value:
                    self.floors[word.shard] = int(item.value)
            elif key.startswith(STARTED):
                self.started[key] = OwnerReport(*parse_started_key(key))
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
            elif key.startswith(REPORTS):
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
