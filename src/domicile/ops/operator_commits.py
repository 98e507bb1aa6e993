"""What an operator's commands commit: deaths, freed shards, ended quarantines, raised epochs.

Called by the command line. Everything here is decided from one listing of the store and is
conditional on what was read, so a cluster that has changed since refuses it. Only `raised_block`
writes the map, which is the leader's: it is for a store that lost commits, while no node runs (S5).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from domicile.core.coordinator.commits import put_away
from domicile.core.ids import NOBODY, EntityKey, Incarnation, ShardKey
from domicile.core.lease.death_probes import removal
from domicile.core.lease.lease import RECORD_FOREVER_S
from domicile.core.placement.versions import ranks
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.keys import (
    TARGET_KEY,
    KeyFamily,
    block_key,
    classify,
    clearance_key,
    drain_key,
    kick_key,
    node_key,
    node_lease,
    release_key,
)
from domicile.core.state.shardmap import (
    BLOCK_SIZE,
    FREE,
    Block,
    Entry,
    block_count,
    decode_block,
    encode_block,
)
from domicile.core.state.txn import (
    MAX_OPERATIONS,
    Absent,
    At,
    Condition,
    Delete,
    Item,
    Listing,
    Present,
    Put,
    Write,
)
from domicile.diagnose.records import KickRecord, encode_kick
from domicile.errors import ConfigError

KEPT_AUDITS = 100
"""I6: the number of records of operators' commands that are kept."""

EPOCH_GAP = 1_000_000
"""More epochs than can be used after a backup: over ten a second for a day."""

LEAST_PREFIX = 6
"""Characters of an incarnation that must be given to name it."""


class Ambiguous(LookupError):
    """A name that means several incarnations; the message lists them."""


class AuditRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who did what to a cluster, when and why, as stored."""

    at: str
    by: str
    command: str
    what: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class OperatorCommit:
    """One commit. `what` names its object exactly: another `what` is another commit."""

    what: str
    conditions: tuple[Condition, ...]
    writes: tuple[Write, ...]


class StoreSnapshot:
    """The store as one listing shows it."""

    def __init__(self, listing: Listing) -> None:
        self.members = ClusterView()
        self.members.load(listing)
        self._items = {item.key: item for item in listing.items}

    def item(self, key: bytes) -> Item | None:
        """The item stored under a key."""
        return self._items.get(key)

    def under(self, prefix: bytes) -> list[Item]:
        """The items whose keys begin so, in the order of their keys."""
        return [item for key, item in sorted(self._items.items()) if key.startswith(prefix)]

    @property
    def target(self) -> str:
        """The version that operators want; empty if they have set none."""
        return self.members.target

    @property
    def audits(self) -> list[bytes]:
        """The keys of stored audit records, the oldest first."""
        return sorted(key for key in self._items if classify(key) is KeyFamily.AUDIT)

    def audit_records(self) -> list[AuditRecord]:
        """The stored audit records that can be read, the oldest first."""
        found: list[AuditRecord] = []
        for key in self.audits:
            with suppress(msgspec.MsgspecError):
                found.append(msgspec.json.decode(self._items[key].value, type=AuditRecord))
        return found

    def last_audit(self) -> AuditRecord | None:
        """The newest record of an operator's command that can be read."""
        found = self.audit_records()
        return found[-1] if found else None

    def shards(self, role: str) -> int:
        """How many shards a role has; raises `LookupError`."""
        known = {} if self.members.config is None else self.members.config.shards
        if role not in known:
            listed = f"known ones: {', '.join(sorted(known))}" if known else "there are none yet"
            raise LookupError(f"there is no role {role!r}; {listed}")
        return known[role]

    def entry(self, shard: ShardKey) -> Entry:
        """A shard's entry; raises `LookupError` if there is no such shard."""
        count = self.shards(shard.role)
        if not 0 <= shard.shard < count:
            raise LookupError(
                f"role {shard.role!r} has no shard {shard.shard}; they are 0 to {count - 1}"
            )
        return self.members.map.get(shard)


def parse_shard(text: str) -> ShardKey:
    """A shard as people write it, `default/7`; raises `ConfigError`."""
    role, slash, number = text.rpartition("/")
    if not slash or not role or not (number.isascii() and number.isdecimal()):
        raise ConfigError(f"{text!r} names no shard: write role and number, as in default/7")
    return ShardKey(role, int(number))


def find_node_record(picture: StoreSnapshot, name: str) -> Incarnation:
    """The incarnation that a node id, an incarnation or the beginning of one means."""
    members = picture.members
    everyone = (*members.nodes, *members.clients)
    found = [one for one, record in members.nodes.items() if record.node == name]
    if not found and len(name) >= LEAST_PREFIX:
        found = [one for one in everyone if one.startswith(name)]
    if not found:
        known = [f"{record.node} ({one[:8]})" for one, record in members.nodes.items()]
        listed = f"registered: {', '.join(sorted(known))}" if known else "no node is registered"
        raise LookupError(f"nobody is registered as {name!r}; {listed}")
    if len(found) > 1:
        raise Ambiguous(
            f"{name!r} has several incarnations; say which one is dead: "
            + " or ".join(f"{one} (at {_address(members, one)})" for one in found)
        )
    return found[0]


def title(members: ClusterView, incarnation: Incarnation) -> str:
    """An incarnation's name for people."""
    record = members.nodes.get(incarnation)
    return f"{'client' if record is None else record.node} ({incarnation[:8]})"


def death_commit(picture: StoreSnapshot, dead: Incarnation, evidence: str) -> OperatorCommit:
    """C5, C9: an operator asserts that an incarnation can never run again."""
    conditions, writes = removal(picture.members, dead, evidence, "")
    # An operator has no lease: this evidence is not attached to one.
    kept = tuple(Put(one.key, one.value) if isinstance(one, Put) else one for one in writes)
    return OperatorCommit(f"{title(picture.members, dead)} = {dead}", conditions, kept)


def free_commit(picture: StoreSnapshot, shard: ShardKey) -> OperatorCommit:
    """C4 (R) without the owner's consent: a release of the current epoch in the owner's name."""
    entry, name = picture.entry(shard), f"{shard.role}/{shard.shard}"
    if entry.state == "quarantined":
        raise LookupError(f"{name} is quarantined and has no owner; see domicile unquarantine")
    if entry.owner == NOBODY:
        raise LookupError(f"{name} has no owner to be taken from; it waits for a node of its role")
    if entry.owner not in picture.members.nodes:
        raise LookupError(
            f"{name} needs no force: the record of its owner ({entry.owner[:8]}) is gone, so a "
            "coordinator gives it a new home; see that one is there: domicile status"
        )
    block = picture.item(block_key(shard.role, shard.shard // BLOCK_SIZE))
    assert block is not None, "an owner is only known from a stored block"
    return OperatorCommit(
        f"{name}@{entry.epoch} from {title(picture.members, entry.owner)}",
        (At(block.key, block.revision), Present(node_key(entry.owner))),
        (Put(release_key(entry.owner, shard, entry.epoch), b""),),
    )


MOST_CLEARED = 32
"""S7: shards whose quarantines one commit ends."""


def put_away_shards(picture: StoreSnapshot) -> list[ShardKey]:
    """Shards that are quarantined, or of which entities are; raises `LookupError` if none is."""
    found = sorted(shard for shard, entry in picture.members.map if put_away(entry))
    if not found:
        raise LookupError("nothing is quarantined")
    return found


def unquarantine_commit(picture: StoreSnapshot, shards: Sequence[ShardKey]) -> OperatorCommit:
    """End all quarantines in some shards (DX-20): the leader has everything in them served."""
    for shard in shards:
        entry = picture.entry(shard)
        if not put_away(entry):
            raise LookupError(f"{shard.role}/{shard.shard} is not quarantined; it is {entry.state}")
    names = ", ".join(f"{shard.role}/{shard.shard}" for shard in shards)
    return OperatorCommit(names, (), tuple(Put(clearance_key(shard), b"") for shard in shards))


def target_commit(version: str | None) -> OperatorCommit:
    """The version that receives shards while versions are mixed; None: the newest."""
    if version is None:
        return OperatorCommit("no target version", (), (Delete(TARGET_KEY),))
    if not version.strip() or not version.isprintable():
        raise ConfigError(f"{version!r} is no version: write what nodes have as version=")
    return OperatorCommit(version, (), (Put(TARGET_KEY, version.encode()),))


def check_version(version: str, present: Collection[str]) -> None:
    """Raise `ConfigError` for a text that is no kind of version, unless a node has it."""
    # One version of each kind: what can be compared with it is of that kind. "1" is also a PEP 440
    # one.
    if version in present or any(ranks((version, one)) for one in ("1", "2000-01-01")):
        return
    raise ConfigError(
        f"{version!r} is no version: write what nodes have as version=, which is a whole number, "
        "a PEP 440 version such as 2.1.0 or an ISO time; --force takes any text"
    )


def has_shards(picture: StoreSnapshot, node: str) -> bool:
    """Whether any shard is at home at an incarnation of a node."""
    nodes = picture.members.nodes
    owners = {one: None for one, record in nodes.items() if record.node == node}
    return any(entry.owner in owners for _, entry in picture.members.map)


def has_takers(picture: StoreSnapshot, node: str) -> bool:
    """Whether any other node of a node's roles may receive shards."""
    members = picture.members
    roles = {role: None for one in members.nodes.values() if one.node == node for role in one.roles}
    return any(
        one.node != node and one.status == "up" and one.node not in members.drains
        and any(role in roles for role in one.roles)
        for one in members.nodes.values()
    )  # fmt: skip


def drain_commit(picture: StoreSnapshot, node: str, *, undo: bool) -> OperatorCommit:
    """Store the wish that a node be empty, or remove that wish."""
    if undo:
        if node not in picture.members.drains:
            wished = ", ".join(picture.members.drains) or "none"
            raise LookupError(f"{node!r} is not drained; nodes that are: {wished}")
        return OperatorCommit(node, (), (Delete(drain_key(node)),))
    known = {record.node: None for record in picture.members.nodes.values() if record.roles}
    if node not in known:
        listed = f"registered: {', '.join(sorted(known))}" if known else "nor is any other"
        raise LookupError(f"no node is registered as {node!r}; {listed}")
    return OperatorCommit(node, (), (Put(drain_key(node), b""),))


def own_drain_commit(picture: StoreSnapshot, node: str) -> OperatorCommit:
    """Store the wish that a node be empty until it ends: the wish goes with the node's lease."""
    mine = [one for one, record in picture.members.nodes.items() if record.node == node]
    if not mine:
        raise LookupError(f"no node is registered as {node!r}")
    if picture.members.nodes[mine[0]].ttl_s >= RECORD_FOREVER_S:
        raise LookupError(
            f'{node!r} has no lease (fencing="health"), so a wish would outlive it: end it by '
            "SIGTERM, which empties it, too"
        )
    wish = Put(drain_key(node), b"", node_lease(mine[0]))
    return OperatorCommit(node, (Present(node_key(mine[0])),), (wish,))


def blocks(picture: StoreSnapshot) -> list[tuple[str, int]]:
    """Every block that the map consists of, stored or not: role and number."""
    config = picture.members.config
    roles = {} if config is None else config.shards
    return [
        (role, number)
        for role, shards in sorted(roles.items())
        for number in range(block_count(shards))
    ]


def raised_block(
    picture: StoreSnapshot, role: str, number: int, gap: int, txn: str
) -> OperatorCommit:
    """S5: every epoch of one block raised by a gap, so that none is used a second time.

    Entries' change numbers rise as well; otherwise a process that knows lost entries would ignore
    the new ones. Owners that are not registered are dropped; so are moves to such nodes.
    """
    key = block_key(role, number)
    item = picture.item(key)
    entries = () if item is None else decode_block(item.value).entries
    size = min(BLOCK_SIZE, picture.shards(role) - number * BLOCK_SIZE)
    entries += (FREE,) * (size - len(entries))
    raised = tuple(_raised(picture.members, entry, gap) for entry in entries)
    return OperatorCommit(
        f"{role}, block {number}: epochs + {gap}",
        (Absent(key) if item is None else At(key, item.revision),),
        (Put(key, encode_block(Block(txn, raised))),),
    )


def _raised(members: ClusterView, entry: Entry, gap: int) -> Entry:
    epoch, change = entry.epoch + gap, entry.change + gap
    if entry.state == "quarantined":
        return msgspec.structs.replace(entry, epoch=epoch, change=change)
    if entry.owner not in members.nodes:
        return Entry(NOBODY, epoch, "free", NOBODY, change, entry.previous, *entry.suspicion)
    return msgspec.structs.replace(entry, epoch=epoch, change=change)


def audited(
    deed: OperatorCommit, key: bytes, record: AuditRecord, kept: Sequence[bytes]
) -> OperatorCommit:
    """The same commit with its audit record; the oldest records are deleted (I6)."""
    room = MAX_OPERATIONS - len(deed.conditions) - len(deed.writes) - 1
    deletes = tuple(map(Delete, outdated_audits(kept)[:room]))
    put = Put(key, encode_audit(record))
    return OperatorCommit(deed.what, deed.conditions, (*deed.writes, put, *deletes))


def encode_audit(record: AuditRecord) -> bytes:
    """The stored form of an audit record."""
    return msgspec.json.encode(record)


def outdated_audits(kept: Sequence[bytes]) -> list[bytes]:
    """The oldest audit records, which make room for one more (I6)."""
    return sorted(kept)[: max(0, len(kept) + 1 - KEPT_AUDITS)]


def _address(members: ClusterView, incarnation: Incarnation) -> str:
    record = members.nodes.get(incarnation)
    return "no address: a client" if record is None else record.address


MOST_KICKS = 64
"""I6: kick requests that may wait at a time."""
MOST_KEY_BYTES = 4_096


def kick_commit(
    picture: StoreSnapshot, shard: ShardKey, entity: EntityKey, record: KickRecord
) -> OperatorCommit:
    """Request the end of an entity's handlers; raises `LookupError` if no node could do it."""
    entry, name = picture.entry(shard), f"{shard.role}/{shard.shard}"
    shown = f"{entity.type} {entity.id!r}"
    if entry.owner not in picture.members.nodes:
        raise LookupError(f"nothing of {shown} runs: its shard {name} has no owner ({entry.state})")
    key = kick_key(shard, entity)
    if len(key) > MOST_KEY_BYTES:
        raise ConfigError(f"the id of {entity.type} is too long for a key in the store")
    if picture.item(key) is not None:
        raise LookupError(f"{shown} is being kicked by somebody else; look again in a moment")
    waiting = len(picture.members.kicks)
    if waiting >= MOST_KICKS:
        raise LookupError(f"{waiting} other kicks wait for their owners; try again in a moment")
    owner = picture.members.nodes[entry.owner].node
    return OperatorCommit(
        f"{shown} in {name} at {owner}",
        (Absent(key), Present(node_key(entry.owner))),
        (Put(key, encode_kick(record), record.lease),),
    )
