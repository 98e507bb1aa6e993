"""A store, a journal and a transport that are not Domicile's: checked by the suites, then used."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest
from memory_store_lab import Faults, FaultyClient, MemoryStores

from domicile import EventSourced, Node, Settings, connect, handler
from domicile.backends import Backend, OpenOptions, register
from domicile.core.ids import EntityKey, ShardKey
from domicile.journals.memory import MemoryJournal
from domicile.membership.clock import SystemClock
from domicile.ports.journal import (
    SCAN_BYTES,
    Batch,
    Claim,
    ClaimAnswer,
    EventPage,
    Journal,
    Recovered,
    Remembered,
    StoredReply,
    Wanted,
    WriteRefused,
    Written,
)
from domicile.ports.store import Store
from domicile.ports.transport import ConnectionHandler, Transport
from domicile.stores.memory.store import MemoryStore
from domicile.testing.suites.journal import JournalContract
from domicile.testing.suites.store import StoreContract
from domicile.testing.suites.transport import TransportContract, TransportMaker


class TheirJournal:
    """What the port asks for and nothing else. Implements `Journal`."""

    def __init__(self, kept: MemoryJournal) -> None:
        self._kept = kept

    async def claim(self, claims: Sequence[Claim], *, wait: bool = True) -> Sequence[ClaimAnswer]:
        return await self._kept.claim(claims, wait=wait)

    async def write(self, batch: Batch) -> Sequence[Written | WriteRefused]:
        return await self._kept.write(batch)

    async def settle(self, batch: Batch) -> Sequence[Written | WriteRefused | None]:
        return await self._kept.settle(batch)

    async def recover(self, wanted: Sequence[Wanted], max_bytes: int) -> Sequence[Recovered]:
        return await self._kept.recover(wanted, max_bytes)

    async def inbox(self, asked: Sequence[tuple[EntityKey, str]]) -> Sequence[StoredReply | None]:
        return await self._kept.inbox(asked)

    async def scan(
        self, shard: ShardKey, after: int, limit: int, max_bytes: int = SCAN_BYTES
    ) -> EventPage:
        return await self._kept.scan(shard, after, limit, max_bytes)

    async def remembered(
        self, shard: ShardKey, after: Remembered | None, limit: int
    ) -> Sequence[Remembered]:
        return await self._kept.remembered(shard, after, limit)

    async def history(self) -> str:
        return await self._kept.history()

    async def close(self) -> None:
        pass


class Pipe:
    """One end of a connection within this loop. Implements `Connection`."""

    def __init__(self, owner: TheirTransport, handler: ConnectionHandler) -> None:
        self.handler, self.peer, self.is_over = handler, self, False
        self._owner = owner
        self._coming: deque[bytes | None] = deque()

    def send(self, data: bytes) -> None:
        if not self.is_over:
            self.peer.push(bytes(data))

    def close(self) -> None:
        if not self.is_over:
            self.end()
            self.peer.push(None)

    def end(self) -> None:
        self.is_over = True
        self._owner.pipes.discard(self)

    def push(self, data: bytes | None) -> None:
        self._coming.append(data)
        asyncio.get_running_loop().call_soon(self._pop)

    def _pop(self) -> None:
        data = self._coming.popleft()
        if self.is_over:
            return
        if data is None:
            self.end()
            self.handler.closed("the other end has closed")
        else:
            self.handler.received(data)


class TheirTransport:
    """Connections within one loop. Implements `Transport`."""

    def __init__(self, listeners: dict[str, Callable[[Pipe], None]]) -> None:
        self._listeners = listeners
        self._mine: list[str] = []
        self.pipes: set[Pipe] = set()
        self._is_closed = False

    async def listen(self, accept: Callable[[], ConnectionHandler]) -> str:
        def arrive(near: Pipe) -> None:
            far = Pipe(self, accept())
            self.pipes.add(far)
            far.peer, near.peer = near, far
            far.handler.opened(far)
            near.handler.opened(near)

        address = f"theirs:{len(self._listeners)}"
        self._listeners[address] = arrive
        self._mine.append(address)
        return address

    def dial(self, address: str, handler: ConnectionHandler) -> None:
        if not self._is_closed:
            near = Pipe(self, handler)
            self.pipes.add(near)
            asyncio.get_running_loop().call_soon(self._connect, address, near)

    def _connect(self, address: str, near: Pipe) -> None:
        if near.is_over:
            return
        arrive = self._listeners.get(address)
        if arrive is None:
            near.end()
            near.handler.closed(f"nobody is at {address}")
        else:
            arrive(near)

    async def close(self) -> None:
        self._is_closed = True
        for address in self._mine:
            self._listeners.pop(address, None)
        for pipe in list(self.pipes):
            if pipe.peer is pipe:
                pipe.end()
            else:
                pipe.close()


class TheirBackend(Backend):
    """`theirs://name`: all three, for the nodes of one process."""

    scheme = "theirs"
    stores = "theirs://name (one process)"
    journals = "theirs://name (one process)"
    reach = "process"

    def __init__(self) -> None:
        self._store = MemoryStore(SystemClock())
        self._journal = TheirJournal(MemoryJournal())
        self._listeners: dict[str, Callable[[Pipe], None]] = {}

    def open_store(self, url: str, options: OpenOptions) -> Store:
        return FaultyClient(self._store.client(options.by), Faults())

    def transport(self, url: str, options: OpenOptions) -> Callable[[], Transport]:
        return lambda: TheirTransport(self._listeners)

    def open_journal(self, url: str, options: OpenOptions) -> Journal:
        return self._journal


@pytest.mark.scenario("LS-18", partial=True)
class TestTheirStore(StoreContract):
    forgives_rewinds = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[MemoryStores]:
        yield MemoryStores()


@pytest.mark.scenario("LS-18", partial=True)
class TestTheirJournal(JournalContract):
    @asynccontextmanager
    async def open(self, pause: Callable[[], Awaitable[None]]) -> AsyncIterator[Journal]:
        self._kept = MemoryJournal(pause=pause)
        yield TheirJournal(self._kept)

    async def queued(self, journal: Journal) -> int:
        return self._kept.queued


@pytest.mark.scenario("LS-18", partial=True)
class TestTheirTransport(TransportContract):
    @asynccontextmanager
    async def open(self) -> AsyncIterator[TransportMaker]:
        listeners: dict[str, Callable[[Pipe], None]] = {}
        made: list[TheirTransport] = []

        def make() -> Transport:
            made.append(TheirTransport(listeners))
            return made[-1]

        yield make
        for one in made:
            await one.close()


@dataclass(frozen=True)
class Put:
    amount: int


class Jar(EventSourced[int, Put], name="theirs.jar"):
    @staticmethod
    def initial(id: str, /) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: Put, /) -> int:
        return state + event.amount

    @handler
    async def put(self, amount: int) -> int:
        return await self.persist(Put(amount))


@pytest.mark.scenario("LS-18")
def test_a_cluster_runs_on_parts_of_somebody_else() -> None:
    """The suites above judge each part; here nodes use all three, and a home moves."""
    register(TheirBackend())
    url = "theirs://shop"
    settings = Settings(shards=8)

    def node() -> Node:
        return Node(url, entities=[Jar], journal=url, settings=settings)

    async def scenario() -> None:
        first = AsyncExitStack()
        await first.enter_async_context(node())
        async with connect(url) as client:
            jars = [client.ref(Jar, f"j{n}") for n in range(20)]
            assert [await jar.ask(Jar.put, 1) for jar in jars] == [1] * 20
            async with node():
                await first.aclose()
                assert [await jar.ask(Jar.put, 1) for jar in jars] == [2] * 20
                keyed = [jar.options(key="once") for jar in jars]
                assert [await jar.ask(Jar.put, 1) for jar in keyed * 2] == [3] * 40

    asyncio.run(scenario())
