"""The keys of the store: how each is made and how it is read.

Stored bytes are a contract between versions: a prefix is never reused for anything else.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

from domicile.core.ids import EntityKey, Incarnation, ShardKey

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
STARTED = b"started/"
PARDON = b"pardon/"
AUDIT = b"audit/"
STUCK = b"stuck/"
KICK = b"kick/"
REWOUND_KEY = b"rewound"
"""There while some process found that the store lost commits, and takeovers wait (S5)."""


def node_key(incarnation: Incarnation) -> bytes:
    """Where a node's record lives."""
    return NODES + incarnation.encode()


def node_lease(incarnation: Incarnation) -> str:
    """The lease that a node's record is attached to."""
    return f"node-{incarnation}"


def client_key(incarnation: Incarnation) -> bytes:
    """Where a client's record lives."""
    return CLIENTS + incarnation.encode()


def dead_key(incarnation: Incarnation) -> bytes:
    """Where the proof of an incarnation's death lives (C5)."""
    return DEAD + incarnation.encode()


def drain_key(node_id: str) -> bytes:
    """Where the wish to empty a node lives."""
    return DRAIN + node_id.encode()


def wish_key(shard: ShardKey) -> bytes:
    """Where an operator's wish for a shard's home (a node id) lives."""
    return WISH + f"{shard.role}/{shard.shard}".encode()


def parse_wish_key(key: bytes) -> ShardKey:
    """The inverse of `wish_key`."""
    role, shard = key[len(WISH) :].decode().rsplit("/", 1)
    return ShardKey(role, int(shard))


def release_key(incarnation: Incarnation, shard: ShardKey, epoch: int) -> bytes:
    """Where an owner that cannot reach the leader leaves its release (H10)."""
    return RELEASE + f"{incarnation}/{shard.role}/{shard.shard}@{epoch}".encode()


def started_key(incarnation: Incarnation, shard: ShardKey, epoch: int) -> bytes:
    """Where an owner notes that entities of a shard under suspicion start (DX-20)."""
    return STARTED + f"{incarnation}/{shard.role}/{shard.shard}@{epoch}".encode()


def pardon_key(shard: ShardKey) -> bytes:
    """Where an operator's wish to end a shard's quarantine lives."""
    return PARDON + f"{shard.role}/{shard.shard}".encode()


def parse_pardon_key(key: bytes) -> ShardKey:
    """The inverse of `pardon_key`."""
    role, shard = key[len(PARDON) :].decode().rsplit("/", 1)
    return ShardKey(role, int(shard))


def stuck_key(incarnation: Incarnation) -> bytes:
    """Where a node says which of its handlers have run for too long (DX-09)."""
    return STUCK + incarnation.encode()


def kick_key(shard: ShardKey, entity: EntityKey) -> bytes:
    """Where an operator's wish to end the handlers of an entity lives (DX-09)."""
    names = (shard.role, str(shard.shard), entity.type, entity.id)
    return KICK + "/".join(quote(name, safe="", errors="replace") for name in names).encode()


def parse_kick_key(key: bytes) -> tuple[ShardKey, EntityKey]:
    """The inverse of `kick_key`."""
    role, shard, kind, id = map(unquote, key[len(KICK) :].decode().split("/"))
    return ShardKey(role, int(shard)), EntityKey(kind, id)


def parse_started_key(key: bytes) -> tuple[Incarnation, ShardKey, int]:
    """The inverse of `started_key`."""
    return parse_release_key(RELEASE + key[len(STARTED) :])


def parse_release_key(key: bytes) -> tuple[Incarnation, ShardKey, int]:
    """The inverse of `release_key`."""
    incarnation, rest = key[len(RELEASE) :].decode().split("/", 1)
    role, tail = rest.rsplit("/", 1)
    shard, epoch = tail.split("@")
    return Incarnation(incarnation), ShardKey(role, int(shard)), int(epoch)


def block_key(role: str, block: int) -> bytes:
    """Where a block lives in the store."""
    return MAP + f"{role}/{block:05d}".encode()


def parse_block_key(key: bytes) -> tuple[str, int]:
    """The inverse of `block_key`."""
    role, block = key[len(MAP) :].decode().rsplit("/", 1)
    return role, int(block)
