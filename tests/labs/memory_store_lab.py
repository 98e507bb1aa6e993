"""A memory store behind a way that can fail: what suites and tests may do to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from domicile.core.state.txn import (
    Changes,
    Condition,
    Item,
    Listing,
    Outcome,
    Unknown,
    Write,
)
from domicile.errors import StoreUnavailable
from domicile.ports.store import Store
from domicile.stores.memory.data import Snapshot
from domicile.stores.memory.store import MemoryStore
from domicile.testing.history import History
from domicile.testing.sim.clock import ManualClock
from domicile.testing.suites.store import after

T = TypeVar("T")


class Faults:
    """What is wrong between all clients and the store."""

    def __init__(self) -> None:
        self.out = False
        self.slow_s = 0.0


class FaultyClient:
    """A client of a memory store over a way that can fail. Implements `Store`."""

    def __init__(self, store: Store, faults: Faults) -> None:
        self._store = store
        self._faults = faults
        self._watches: dict[FaultyWatch, None] = {}
        self.loses_reply = False

    async def get(self, key: bytes) -> Item | None:
        return await self._call(self._store.get(key))

    async def list(self, prefix: bytes) -> Listing:
        return await self._call(self._store.list(prefix))

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        lost, self.loses_reply = self.loses_reply, False
        outcome = await self._call(self._store.commit(conditions, writes))
        return Unknown() if lost else outcome

    async def grant(self, lease: str, ttl_s: float) -> float:
        return await self._call(self._store.grant(lease, ttl_s))

    async def renew(self, lease: str) -> float | None:
        return await self._call(self._store.renew(lease))

    async def revoke(self, lease: str) -> None:
        await self._call(self._store.revoke(lease))

    def watch(self, prefix: bytes, from_revision: int) -> AsyncIterator[Changes]:
        return FaultyWatch(self._store.watch(prefix, from_revision), self._watches)

    async def close(self) -> None:
        await self._store.close()

    def break_watches(self) -> None:
        for watch in tuple(self._watches):
            watch.break_off()

    async def _call(self, call: Coroutine[Any, Any, T]) -> T:
        if self._faults.out:
            call.close()
            raise StoreUnavailable("the way to the store is cut")
        if not self._faults.slow_s:
            return await call
        task = asyncio.create_task(self._later(call))
        return await asyncio.shield(task)

    async def _later(self, call: Coroutine[Any, Any, T]) -> T:
        await asyncio.sleep(self._faults.slow_s)
        return await call


class FaultyWatch:
    def __init__(self, watch: AsyncIterator[Changes], standing: dict[FaultyWatch, None]) -> None:
        self._watch = watch
        self._standing = standing
        self._broken = False
        self._reading: asyncio.Task[Changes] | None = None

    def __aiter__(self) -> AsyncIterator[Changes]:
        return self

    async def __anext__(self) -> Changes:
        if self._broken:
            raise StoreUnavailable("the connection was reset")
        self._standing[self] = None
        self._reading = asyncio.create_task(after(self._watch))
        try:
            return await self._reading
        except asyncio.CancelledError:
            if not self._broken:
                raise
            raise StoreUnavailable("the connection was reset") from None
        finally:
            del self._standing[self]

    def break_off(self) -> None:
        self._broken = True
        assert self._reading is not None
        self._reading.cancel()


class MemoryStores:
    def __init__(self, wall: Callable[[float], float] | None = None) -> None:
        self.clock = ManualClock()
        self.history = History(self.clock.now)
        self.store = MemoryStore(
            self.clock, self.history, wall=None if wall is None else lambda: wall(self.clock.now())
        )
        self.faults = Faults()

    def client(self, by: str) -> Store:
        return FaultyClient(self.store.client(by), self.faults)

    async def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    async def compact(self, revision: int) -> None:
        self.store.compact(revision)

    async def outage(self) -> None:
        self.faults.out = True

    async def restore(self) -> None:
        self.faults.out = False

    async def lose_next_reply(self, client: Store) -> None:
        assert isinstance(client, FaultyClient)
        client.loses_reply = True

    async def slow(self, seconds: float) -> None:
        self.faults.slow_s = seconds

    async def break_watches(self, client: Store) -> None:
        assert isinstance(client, FaultyClient)
        client.break_watches()

    async def snapshot(self) -> object:
        return self.store.snapshot()

    async def rewind(self, snapshot: object) -> None:
        assert isinstance(snapshot, Snapshot)
        self.store.rewind(snapshot)
