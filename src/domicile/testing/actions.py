"""What a test may ask of any cluster, simulated or of real processes, in the same words.

Base of `Sim` and `Processes`. The wishes are an operator's writes to the store; whose process
holds what is the business of each harness.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod

from domicile.core.ids import EntityKey, ShardKey
from domicile.core.state.keys import drain_key, wish_key
from domicile.core.state.txn import Committed, Delete, Put, Write
from domicile.entity.model.client import Client
from domicile.entity.model.entity import Entity, entity_type
from domicile.errors import StoreUnavailable
from domicile.ports.store import Store
from domicile.settings import Settings

LENIENT = Settings(poison_deaths=1_000_000)
"""Settings of test clusters that are given none: who dies by a test's own hand dies of no shard, so
nothing is quarantined for it."""

RETRY_S = 0.05
WRITE_TRIES = 600


class Verbs(Client):
    """The verbs that need no more than a store. Nodes are numbered from 0."""

    settings: Settings

    async def drain(self, node: int) -> None:
        """Wish a node empty."""
        await self._write(Put(drain_key(self.node_id(node)), b""))

    async def undrain(self, node: int) -> None:
        """Take that wish back."""
        await self._write(Delete(drain_key(self.node_id(node))))

    async def wish(self, shard: ShardKey, node: int | None) -> None:
        """Wish a shard's home; None takes the wish back, and a move under way with it."""
        key = wish_key(shard)
        await self._write(Delete(key) if node is None else Put(key, self.node_id(node).encode()))

    def shard(self, kind: type[Entity], id: str) -> ShardKey:
        """The shard of an entity."""
        described = entity_type(kind)
        number = described.place(EntityKey(described.name, id), self.settings.shards)
        return ShardKey(described.role, number)

    @abstractmethod
    def node_id(self, node: int) -> str:
        """What the node at a number calls itself."""

    @abstractmethod
    def _operator_store(self) -> Store:
        """Where an operator of this cluster writes."""

    async def _write(self, write: Write) -> None:
        """An operator's write, until it is certain; `StoreUnavailable` if it never is."""
        store = self._operator_store()
        for _ in range(WRITE_TRIES):
            try:
                if isinstance(await store.commit((), (write,)), Committed):
                    return
            except StoreUnavailable:
                pass
            await asyncio.sleep(RETRY_S)
        raise StoreUnavailable(
            f"an operator's write failed {WRITE_TRIES} times; see whether the store is there"
        )
