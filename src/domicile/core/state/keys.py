"""Every kind of key that the store holds, as one table: how it is made, parsed and decoded.

The cluster view reads by this table; every module that writes makes its keys with the functions
here. A new kind of key is one entry in `KeyFamily` and, if processes must know it, one field in
`cluster_view.ClusterView`. The bytes are a contract between versions: they must never change, and
no prefix is reused for another kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import msgspec

from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.state.records import (
    ClientRecord,
    ConfigRecord,
    LeaderRecord,
    MoveRecord,
    NodeRecord,
    TrialRecord,
    decode_record,
)
from domicile.core.state.shardmap import BLOCK_SIZE, decode_block

CONFIG_KEY = b"config"
LEADER_KEY = b"leader"
NODES = b"nodes/"
CLIENTS = b"clients/"
MAP = b"map/"
RELEASE = b"release/"
DRAIN = b"drain/"
WISH = b"wish/"
DEAD = b"dead/"
TARGET_KEY = b"target"
TRIAL = b"trial/"
CLEARANCE = b"pardon/"
AUDIT = b"audit/"
NEEDS = b"needs/"
STUCK = b"stuck/"
KICK = b"kick/"
OFFSET = b"offset/"
REWOUND_KEY = b"rewound"
"""Present while takeovers wait because a process found that the store lost commits (S5)."""
MOVED_KEY = b"moved"
"""Present while this store must not be used, because the cluster is or was copied elsewhere."""


class BlockKey(NamedTuple):
    """One block of one role's map."""

    role: str
    number: int

    @property
    def key(self) -> bytes:
        """The key under which the block is stored."""
        return block_key(self.role, self.number)


class OwnerReport(NamedTuple):
    """A shard's owner and epoch: the subject of a release (H10)."""

    owner: Incarnation
    shard: ShardKey
    epoch: int


class OffsetMark(NamedTuple):
    """How far a shard was in the journal with this history: it can't end before this offset."""

    history: str
    offset: int


def block_of(shard: ShardKey) -> BlockKey:
    """The block that holds a shard."""
    return BlockKey(shard.role, shard.shard // BLOCK_SIZE)


# How keys are made


def node_key(incarnation: Incarnation) -> bytes:
    """The key of a node's record."""
    return NODES + incarnation.encode()


def node_lease(incarnation: Incarnation) -> str:
    """The lease to which a node's record is attached."""
    return f"node-{incarnation}"


def client_key(incarnation: Incarnation) -> bytes:
    """The key of a client's record."""
    return CLIENTS + incarnation.encode()


def dead_key(incarnation: Incarnation) -> bytes:
    """The key of the proof of an incarnation's death (C5)."""
    return DEAD + incarnation.encode()


def drain_key(node_id: str) -> bytes:
    """The key of an operator's wish to empty a node."""
    return DRAIN + node_id.encode()


def wish_key(shard: ShardKey) -> bytes:
    """The key of an operator's wish for a shard's home (a node id)."""
    return WISH + _shard_text(shard)


def clearance_key(shard: ShardKey) -> bytes:
    """The key of a clearance: an operator's wish to end a quarantine in a shard."""
    return CLEARANCE + _shard_text(shard)


def release_key(incarnation: Incarnation, shard: ShardKey, epoch: int) -> bytes:
    """The key of a release that an owner stores because it cannot reach the leader (H10)."""
    return RELEASE + _report_text(incarnation, shard, epoch)


def needs_key(shard: ShardKey) -> bytes:
    """The key of an owner's report that a shard needs entity types that the owner lacks (DX-26)."""
    return NEEDS + _shard_text(shard)


def offset_key(shard: ShardKey) -> bytes:
    """The key of the last offset that a shard is known to have had in its journal (J11)."""
    return OFFSET + _shard_text(shard)


def trial_key(incarnation: Incarnation) -> bytes:
    """The key of what an owner has on trial (DX-20)."""
    return TRIAL + incarnation.encode()


def stuck_key(incarnation: Incarnation) -> bytes:
    """The key of a node's report about handlers that have run for too long (DX-09)."""
    return STUCK + incarnation.encode()


def kick_key(shard: ShardKey, entity: EntityKey) -> bytes:
    """The key of an operator's wish to end the handlers of an entity (DX-09)."""
    names = (shard.role, str(shard.shard), entity.type, entity.id)
    return KICK + "/".join(quote(name, safe="", errors="replace") for name in names).encode()


def block_key(role: str, block: int) -> bytes:
    """The key of a block of the shard map."""
    return MAP + f"{role}/{block:05d}".encode()


def _audit_key(name: str) -> bytes:
    return AUDIT + name.encode()


def _of_parts(make: Callable[..., bytes]) -> Callable[[tuple[Any, ...]], bytes]:
    def made(name: tuple[Any, ...]) -> bytes:
        return make(*name)

    return made


def _shard_text(shard: ShardKey) -> bytes:
    return f"{shard.role}/{shard.shard}".encode()


def _report_text(incarnation: Incarnation, shard: ShardKey, epoch: int) -> bytes:
    return f"{incarnation}/{shard.role}/{shard.shard}@{epoch}".encode()


# How the rest of a key, behind its prefix, is parsed


def _parse_shard(text: str) -> ShardKey:
    role, shard = text.rsplit("/", 1)
    return ShardKey(role, int(shard))


def _parse_report(text: str) -> OwnerReport:
    incarnation, rest = text.split("/", 1)
    shard, epoch = rest.rsplit("@", 1)
    return OwnerReport(Incarnation(incarnation), _parse_shard(shard), int(epoch))


def _parse_kick(text: str) -> tuple[ShardKey, EntityKey]:
    role, shard, kind, id = map(unquote, text.split("/"))
    return ShardKey(role, int(shard)), EntityKey(kind, id)


def _parse_block(text: str) -> BlockKey:
    return BlockKey(*_parse_shard(text))


# How values are decoded


def _decode_floor(value: bytes) -> int:
    """The epoch that a journal has seen, if the releasing owner knows one (J1); otherwise 0."""
    return int(value) if value else 0


def encode_needs(types: Iterable[str]) -> bytes:
    """The value of a report that a shard needs these entity types: JSON, sorted, none twice."""
    return msgspec.json.encode(sorted(dict.fromkeys(types)))


def _decode_needs(value: bytes) -> tuple[str, ...]:
    return msgspec.json.decode(value, type=tuple[str, ...])


def encode_offset(mark: OffsetMark) -> bytes:
    """The value of a note how far a shard was: the offset, a space, the history."""
    return f"{mark.offset} {mark.history}".encode()


def _decode_offset(value: bytes) -> OffsetMark:
    offset, history = value.decode().split(" ")
    return OffsetMark(history, int(offset))


def _present(_: bytes) -> bool:
    """For keys without a value: their presence is the information."""
    return True


class KeyFamily(Enum):
    """The kinds of keys: the prefix or the one exact key, how to make and parse a key, and how to
    decode its value. A value that only one package can decode stays `bytes` here.

    A view takes the changes of one commit in this order: members come before the leader and the
    map's entries, which name members.
    """

    NODE = (NODES, node_key, Incarnation, partial(decode_record, kind=NodeRecord))
    CLIENT = (CLIENTS, client_key, Incarnation, partial(decode_record, kind=ClientRecord))
    CONFIG = (CONFIG_KEY, None, None, partial(decode_record, kind=ConfigRecord))
    LEADER = (LEADER_KEY, None, None, partial(decode_record, kind=LeaderRecord))
    BLOCK = (MAP, _of_parts(block_key), _parse_block, decode_block)
    DRAIN = (DRAIN, drain_key, str, _present)
    WISH = (WISH, wish_key, _parse_shard, bytes.decode)
    KICK = (KICK, _of_parts(kick_key), _parse_kick, bytes)
    RELEASE = (RELEASE, _of_parts(release_key), _parse_report, _decode_floor)
    NEEDS = (NEEDS, needs_key, _parse_shard, _decode_needs)
    OFFSET = (OFFSET, offset_key, _parse_shard, _decode_offset)
    TRIAL = (TRIAL, trial_key, Incarnation, partial(decode_record, kind=TrialRecord))
    CLEARANCE = (CLEARANCE, clearance_key, _parse_shard, _present)
    TARGET = (TARGET_KEY, None, None, bytes.decode)
    REWOUND = (REWOUND_KEY, None, None, _present)
    MOVED = (MOVED_KEY, None, None, partial(decode_record, kind=MoveRecord))
    DEAD = (DEAD, dead_key, Incarnation, bytes.decode)
    STUCK = (STUCK, stuck_key, Incarnation, bytes)
    AUDIT = (AUDIT, _audit_key, str, bytes)

    def __init__(
        self,
        prefix: bytes,
        make: Callable[[Any], bytes] | None,
        parse: Callable[[str], Any] | None,
        decode: Callable[[bytes], Any],
    ) -> None:
        self.prefix = prefix
        """The start of all keys of the family; the whole key if the family has one key."""
        self._make, self._parse, self.decode = make, parse, decode

    def __repr__(self) -> str:
        return f"KeyFamily.{self.name}"

    def key(self, name: Any = None) -> bytes:
        """The key for this name; a family of one exact key has no names."""
        return self.prefix if self._make is None else self._make(name)

    def parse(self, key: bytes) -> Any:
        """The inverse of `key`; `ValueError` for a key that `key` would write in another way.

        A caller that deletes by name must delete exactly the key from which the name was read.
        """
        if self._parse is None:
            return None
        name = self._parse(key[len(self.prefix) :].decode())
        if self.key(name) != key:
            raise ValueError(f"not a key as it is written here: {self.key(name)!r} would be")
        return name


_BY_PREFIX = {family.prefix: family for family in KeyFamily}


def classify(key: bytes) -> KeyFamily | None:
    """The family of a key; None for a key that this version does not know."""
    return _BY_PREFIX.get(key[: key.find(b"/") + 1] or key)


def parse_block_key(key: bytes) -> BlockKey:
    """The inverse of `block_key`."""
    name: BlockKey = KeyFamily.BLOCK.parse(key)
    return name
