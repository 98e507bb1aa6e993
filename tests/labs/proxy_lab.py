"""Small servers on real sockets that stand for a group's databases, and records that name them.

A `LineServer` takes numbered lines, keeps them, and answers each. The store is in memory, written
by the test in place of agents.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from groups_lab import CHAIN, VALKEY, electing, incarnation, server, serving
from msgspec import structs

from domicile.core.state.txn import Item, Listing, Put
from domicile.errors import StoreUnavailable
from domicile.failover.following import GroupFollower
from domicile.failover.proxy import GroupProxy, ProxyLimits
from domicile.failover.records import (
    GroupPhase,
    GroupState,
    config_key,
    encode_group_record,
    server_key,
    state_key,
)
from domicile.membership.clock import SystemClock
from domicile.observe.metrics import Metrics
from domicile.ports.store import Store
from domicile.stores.memory.store import MemoryStore


class LineServer:
    """Keeps each line that it takes, and answers it with its own name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: list[str] = []
        self.sessions: dict[asyncio.StreamWriter, None] = {}
        self.most_sessions = 0
        self.answers = True
        self.address = ""
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.sessions[writer] = None
        self.most_sessions = max(self.most_sessions, len(self.sessions))
        try:
            with suppress(ConnectionError):
                while line := await reader.readline():
                    self.lines.append(line.decode().strip())
                    if self.answers:
                        writer.write(f"{self.name} {line.decode()}".encode())
                        await writer.drain()
        finally:
            self.sessions.pop(writer, None)
            writer.close()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self.sessions):
            writer.transport.abort()


class CutStore:
    """The store as the proxy reaches it: with a line that a test can cut. As `Store`, to read."""

    def __init__(self, group: ProxiedGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group.store, name)

    async def get(self, key: bytes) -> Item | None:
        self._check()
        return await self._group.store.get(key)

    async def list(self, prefix: bytes) -> Listing:
        self._check()
        return await self._group.store.list(prefix)

    def _check(self) -> None:
        if self._group.cut:
            raise StoreUnavailable("the test has cut the line")


class ProxiedGroup:
    """A group of line servers, their records, a follower and a proxy."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.cut = False
        """Whether the follower's store does not answer."""
        self.servers = {name: LineServer(name) for name in ("s1", "s2")}
        self.meter = Metrics()
        self.follower = GroupFollower("orders", CutStore(self), SystemClock(), confirm_s=0.1)
        self.proxy = GroupProxy(self.follower, "127.0.0.1:0", meter=self.meter)

    async def write(self, state: GroupState) -> None:
        await self.store.commit([], [Put(state_key("orders"), encode_group_record(state))])

    async def serve(self, name: str, epoch: int, *, opened: bool = True) -> None:
        """The state names this primary; its agent says so once the guard has opened it."""
        await self.tell(name, "fenced")
        await self.write(serving(name, epoch))
        if opened:
            await self.tell(name, "primary")

    async def tell(self, name: str, role: str) -> None:
        """A server's agent tells its role."""
        record = server(name, role=role, address=self.servers[name].address, chain=CHAIN[:2])
        key = server_key("orders", name, incarnation(name))
        await self.store.commit([], [Put(key, encode_group_record(record))])

    async def elect(self, epoch: int) -> None:
        await self.write(electing(epoch))

    async def switch(self, to: str, epoch: int) -> None:
        before = serving("s1", epoch)
        await self.write(
            structs.replace(
                before, phase=GroupPhase.SWITCHING, candidate=incarnation(to), candidate_server=to
            )
        )
        await self.tell("s1", "fenced")

    async def relocate(self, name: str) -> None:
        """A server is at another address from now on."""
        epoch = self.follower.records.state.epoch if self.follower.records.state else 1
        await self.elect(epoch + 1)
        await self.serve(name, epoch + 1)

    async def client(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.proxy.address.rpartition(":")
        return await asyncio.open_connection(host, int(port))


@asynccontextmanager
async def proxied_group(limits: ProxyLimits | None = None) -> AsyncIterator[ProxiedGroup]:
    """A group whose first primary is s1, epoch 1, behind a proxy."""
    group = ProxiedGroup(MemoryStore(SystemClock()).client("lab"))
    if limits is not None:
        group.proxy = GroupProxy(group.follower, "127.0.0.1:0", limits=limits, meter=group.meter)
    puts = [Put(config_key("orders"), encode_group_record(VALKEY))]
    for name, one in group.servers.items():
        await one.start()
        role = "primary" if name == "s1" else "replica"
        record = server(name, role=role, address=one.address, chain=CHAIN[:2])
        puts.append(Put(server_key("orders", name, incarnation(name)), encode_group_record(record)))
    await group.store.commit([], puts)
    await group.serve("s1", 1)
    await group.proxy.start()
    tasks = [asyncio.ensure_future(one) for one in (group.follower.run(), group.proxy.run())]
    try:
        yield group
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()
        await group.proxy.close()
        for one in group.servers.values():
            await one.close()
        await group.store.close()
