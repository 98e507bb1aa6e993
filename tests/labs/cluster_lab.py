"""Stores with a cluster in them, written through the store port alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from domicile.core.ids import NOBODY, Incarnation, ShardKey
from domicile.core.state.keys import (
    CONFIG_KEY,
    LEADER_KEY,
    block_key,
    client_key,
    drain_key,
    node_key,
    wish_key,
)
from domicile.core.state.records import (
    ClientRecord,
    ConfigRecord,
    LeaderRecord,
    NodeRecord,
    encode_record,
)
from domicile.core.state.shardmap import BLOCK_SIZE, Block, Entry, encode_block
from domicile.core.state.txn import Committed, Listing, Put
from domicile.stores.namespace import Namespace
from domicile.stores.sqlite.store import SqliteStore

A, B, C, GONE = (Incarnation(sign * 32) for sign in "abcf")


def serving(owner: Incarnation, epoch: int = 1) -> Entry:
    """A shard at home."""
    return Entry(owner, epoch, "serving", change=epoch, previous=f"node-{owner[:1]}")


def moving(owner: Incarnation, to: Incarnation, epoch: int = 1) -> Entry:
    """A shard on its way."""
    return Entry(owner, epoch, "moving", to, change=epoch, previous=f"node-{owner[:1]}")


def poisoned(deaths: int, epoch: int = 1) -> Entry:
    """A shard in quarantine."""
    return Entry(NOBODY, epoch, "quarantined", change=epoch, deaths=deaths)


def node(
    incarnation: Incarnation,
    *,
    roles: tuple[str, ...] = ("default",),
    types: tuple[str, ...] = ("counter", "room"),
    status: str = "up",
    version: str = "",
) -> NodeRecord:
    """A node called after the first letter of its incarnation."""
    name, port = f"node-{incarnation[0]}", 7000 + ord(incarnation[0])
    return NodeRecord(
        name, incarnation, f"127.0.0.1:{port}", roles, types, 6.0, version=version, status=status
    )


@dataclass
class Stored:
    """What a store shall hold."""

    nodes: Sequence[NodeRecord] = ()
    shards: dict[str, list[Entry]] = field(default_factory=dict[str, list[Entry]])
    clients: Sequence[Incarnation] = ()
    leader: NodeRecord | None = None
    drains: Sequence[str] = ()
    wishes: dict[ShardKey, str] = field(default_factory=dict[ShardKey, str])
    config: bool = True
    more: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])

    def write(self, path: Path, cluster: str = "domicile") -> str:
        """Commit it all; the store's URL."""
        asyncio.run(self._write(path, cluster))
        return f"sqlite:///{path}"

    async def _write(self, path: Path, cluster: str) -> None:
        store = Namespace(SqliteStore(path, by="test"), cluster)
        counts = {role: len(entries) for role, entries in self.shards.items()}
        puts = [Put(CONFIG_KEY, encode_record(ConfigRecord(counts)))] if self.config else []
        puts += [Put(key, value) for key, value in self.more.items()]
        puts += [Put(node_key(one.incarnation), encode_record(one)) for one in self.nodes]
        puts += [Put(client_key(one), encode_record(ClientRecord(one))) for one in self.clients]
        puts += [Put(drain_key(name), b"") for name in self.drains]
        puts += [Put(wish_key(shard), name.encode()) for shard, name in self.wishes.items()]
        if self.leader is not None:
            leader = LeaderRecord(self.leader.incarnation, self.leader.node)
            puts.append(Put(LEADER_KEY, encode_record(leader)))
        for role, entries in self.shards.items():
            for number, start in enumerate(range(0, len(entries), BLOCK_SIZE)):
                block = Block("t", tuple(entries[start : start + BLOCK_SIZE]))
                puts.append(Put(block_key(role, number), encode_block(block)))
        try:
            assert isinstance(await store.commit((), puts), Committed)
        finally:
            await store.close()


async def listed(path: Path, cluster: str = "domicile") -> Listing:
    """What a store holds of a cluster."""
    store = Namespace(SqliteStore(path, by="test"), cluster)
    try:
        return await store.list(b"")
    finally:
        await store.close()


def contents(path: Path, cluster: str = "domicile") -> dict[bytes, bytes]:
    """The keys and values of a cluster."""
    return {item.key: item.value for item in asyncio.run(listed(path, cluster)).items}


def healthy() -> Stored:
    """Two nodes that serve four shards."""
    a, b = node(A), node(B)
    homes = [serving(A), serving(B), serving(A, 3), serving(B)]
    return Stored(nodes=[a, b], leader=a, shards={"default": homes})
