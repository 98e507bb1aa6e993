"""Clients of one PostgreSQL store, each behind a proxy, and everything that can happen to it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
from postgres_lab import PostgresServer

from domicile.core.state.txn import Changes
from domicile.ports.store import Store
from domicile.stores.postgres.line import LineJob
from domicile.stores.postgres.schema import SCHEMA
from domicile.stores.postgres.store import PostgresStore, _Watch
from domicile.testing.suites.byte_proxy import ByteProxy

PATIENCE_S = 120.0
TABLES = ("meta", "item", "lease", "txn", "change")


class LabStore(PostgresStore):
    """Knows its watches, and the proxy that it connects through."""

    def __init__(self, url: str, proxy: ByteProxy, by: str, **settings: Any) -> None:
        super().__init__(url, shown="postgresql://lab", by=by, **settings)
        self.proxy = proxy
        self.watches: list[_Watch] = []

    def watch(self, prefix: bytes, from_revision: int) -> AsyncIterator[Changes]:
        watch = super().watch(prefix, from_revision)
        assert isinstance(watch, _Watch)
        self.watches.append(watch)
        return watch

    @property
    def settled(self) -> bool:
        return all(watch.waits for watch in self.watches if watch._read)


class PostgresStores:
    """Implements `Stores` with all optional verbs. Time passes as a coordinator makes it pass."""

    def __init__(self, server: PostgresServer, admin: asyncpg.Connection[Any]) -> None:
        self.server, self._admin = server, admin
        self.clients: list[LabStore] = []
        self._copies = itertools.count()
        self._slow_s = 0.0

    def client(self, by: str, **settings: Any) -> LabStore:
        proxy = ByteProxy("127.0.0.1", self.server.port).start()
        url = self.server.url.replace(f":{self.server.port}/", f":{proxy.port}/")
        settings = {"op_timeout_s": 30.0, **settings}
        store = LabStore(url, proxy, by, **settings)
        self.clients.append(store)
        return store

    async def advance(self, seconds: float) -> None:
        await self._admin.execute(f"UPDATE {SCHEMA}.meta SET time = time + $1", seconds)
        await self.tick()

    async def tick(self) -> None:
        await self._admin.execute(f"SELECT {SCHEMA}.tick(NULL, NULL, NULL, true, 0)")

    async def compact(self, revision: int) -> None:
        await self.client("compactor").compact(revision)

    async def outage(self) -> None:
        for client in self.clients:
            await client.proxy.refuse()

    async def restore(self) -> None:
        for client in self.clients:
            await client.proxy.release()

    async def lose_next_reply(self, client: Store) -> None:
        assert isinstance(client, LabStore)
        await client.proxy.lose_next_answer()

    async def slow(self, seconds: float) -> None:
        for client in self.clients:
            await client.proxy.delay(seconds)

    async def break_watches(self, client: Store) -> None:
        assert isinstance(client, LabStore)
        waiting = [watch for watch in client.watches if watch.waits]
        await client.proxy.cut()
        await until(lambda: not any(watch.waits for watch in waiting))

    async def settled(self) -> None:
        # What was only just begun runs first.
        await asyncio.sleep(0)
        await until(lambda: all(client.settled for client in self.clients))

    async def snapshot(self) -> object:
        copy = f"copy_{next(self._copies)}"
        async with self._admin.transaction():
            await self._admin.execute(f"CREATE SCHEMA {copy}")
            for table in TABLES:
                await self._admin.execute(f"CREATE TABLE {copy}.{table} AS TABLE {SCHEMA}.{table}")
        return copy

    async def rewind(self, snapshot: object) -> None:
        async with self._admin.transaction():
            for table in TABLES:
                await self._admin.execute(f"DELETE FROM {SCHEMA}.{table}")
                await self._admin.execute(
                    f"INSERT INTO {SCHEMA}.{table} SELECT * FROM {snapshot}.{table}"
                )

    async def kill(self) -> None:
        await asyncio.to_thread(self.server.kill)

    async def revive(self) -> None:
        await asyncio.to_thread(self.server.start)
        self._admin = await asyncpg.connect(self.server.url)

    async def step_wall(self, by_s: float) -> None:
        # As if the clock had been stepped since: that is all that the store sees of a step.
        await self._admin.execute(
            f"UPDATE {SCHEMA}.meta SET wall = wall - $1, led = led - $1", by_s
        )

    async def lose_hints(self, client: Store) -> None:
        assert isinstance(client, LabStore)

        async def deaf(connection: Any, jobs: Sequence[LineJob]) -> Sequence[object]:
            await connection.execute("UNLISTEN *")
            return [None]

        loop = asyncio.get_running_loop()
        await client._reads()._line.do(LineJob(deaf, loop.time() + PATIENCE_S, 0))

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
            await client.proxy.close()
        await self._admin.close()


@asynccontextmanager
async def lab(server: PostgresServer) -> AsyncIterator[PostgresStores]:
    """An empty store in the server's own database."""
    admin = await asyncpg.connect(server.url)
    for row in await admin.fetch(
        "SELECT nspname FROM pg_namespace WHERE nspname = $1 OR nspname LIKE 'copy\\_%'", SCHEMA
    ):
        await admin.execute(f"DROP SCHEMA {row['nspname']} CASCADE")
    stores = PostgresStores(server, admin)
    try:
        yield stores
    finally:
        await stores.close()


async def until(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(patience_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
