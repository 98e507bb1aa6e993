"""What a test may ask of any cluster, simulated or of real processes, by the same verbs.

Base of `Sim` and `Processes`. Operators' wishes are writes to the store. Each harness manages its
own processes; nothing here knows them.
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
"""Settings of test clusters that are given none. A test kills nodes itself, so no death may
quarantine a shard."""

RETRY_S = 0.05
WRITE_TRIES = 600


class Verbs(Client):
    """The verbs that need no more than a store. Nodes are numbered from 0."""

    settings: Settings

    async def drain(self, node: int) -> None:
        """Write the wish that a node be empty."""
        await self._write(Put(drain_key(self.node_id(node)), b""))

    async def undrain(self, node: int) -> None:
        """Remove that wish."""
        await self._write(Delete(drain_key(self.node_id(node))))

    async def wish(self, shard: ShardKey, node: int | None) -> None:
        """Write a wish for a shard's home; None removes it, and reverts a move under way."""
        key = wish_key(shard)
        await self._write(Delete(key) if node is None else Put(key, self.node_id(node).encode()))

    def shard(self, kind: type[Entity], id: str) -> ShardKey:
        """The shard of an entity."""
        described = entity_type(kind)
        number = described.place(EntityKey(described.name, id), self.settings.shards)
        return ShardKey(described.role, number)

    @abstractmethod
    def node_id(self, node: int) -> str:
        """The node id of the node with a number."""

    @abstractmethod
    def _operator_store(self) -> Store:
        """The store as an operator of this cluster writes to it."""

    async def _write(self, write: Write) -> None:
        """Repeat an operator's write until its outcome is certain; `StoreUnavailable` if it never
        is."""
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
