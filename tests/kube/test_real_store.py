"""The store on a real kube-apiserver: the contract of stores, nodes of which one is cut off (S8).

The clock by which the contract's clients judge leases is the test's, as on the server in memory, so
a slow machine ends no lease. The cluster runs on the clock of the machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from itertools import count
from random import Random

import pytest
from kube_lab import ApiServer, started

from domicile import Entity, Node, Settings, handler
from domicile.core.ids import Incarnation
from domicile.core.state.keys import KeyFamily, classify, node_key
from domicile.core.state.shardmap import decode_block
from domicile.incarnation.context import Backends
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.credentials import find_credentials
from domicile.kubeapi.exchange import ApiAnswer, ApiExchange, ApiRequest, BrokenExchange
from domicile.kubeapi.http_exchange import HttpExchange
from domicile.kubeapi.kinds import LEASES, NAMESPACES
from domicile.membership.clock import SystemClock
from domicile.ports.store import Store
from domicile.stores.kubernetes.address import KubernetesAddress
from domicile.stores.kubernetes.store import KubernetesStore
from domicile.stores.namespace import Namespace
from domicile.testing.checkers import check_handlers, check_stored
from domicile.testing.history import History
from domicile.testing.suites.store import StoreContract, Stores
from domicile.transports.memory import MemoryNetwork, MemoryTransport

NUMBERS = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    yield from started(tmp_path_factory.mktemp("kube"))


class Line:
    """What happens on the way of one process to the API server."""

    def __init__(self) -> None:
        self.cut = self.loses = False
        self.slow_s = 0.0
        self.broken = 0
        self.open_watches = 0


class LineExchange:
    """Implements `ApiExchange` over another one, with faults."""

    def __init__(self, inner: ApiExchange, line: Line) -> None:
        self._inner, self._line = inner, line
        self.server = inner.server

    @asynccontextmanager
    async def open(self, request: ApiRequest) -> AsyncGenerator[ApiAnswer, None]:
        line = self._line
        if line.cut:
            await asyncio.sleep(0.01)
            raise BrokenExchange("cut off", sent=False)
        await asyncio.sleep(line.slow_s)
        async with self._inner.open(request) as answer:
            if line.loses and request.writes and "/configmaps" in request.path:
                line.loses = False
                raise BrokenExchange("the answer was lost", sent=True)
            watch = "watch" in request.query
            line.open_watches += watch
            try:
                yield _LineAnswer(answer, line) if watch else answer
            finally:
                line.open_watches -= watch

    async def close(self) -> None:
        await self._inner.close()


class _LineAnswer:
    def __init__(self, inner: ApiAnswer, line: Line) -> None:
        self._inner, self._line, self._broken = inner, line, line.broken
        self.status = inner.status
        self.headers: Mapping[str, str] = inner.headers

    async def chunks(self) -> AsyncIterator[bytes]:
        pieces = aiter(self._inner.chunks())
        while True:
            piece = asyncio.ensure_future(anext(pieces))  # type: ignore[arg-type]
            try:
                while not piece.done():
                    if self._line.cut or self._line.broken != self._broken:
                        raise BrokenExchange("broken", sent=True)
                    await asyncio.wait([piece], timeout=0.02)
                yield piece.result()
            except StopAsyncIteration:
                return
            finally:
                piece.cancel()


class RealStores:
    """Implements the verbs of `domicile.testing.suites.store.Stores` in a namespace."""

    def __init__(self, server: ApiServer, admin: KubeClient, namespace: str) -> None:
        self._server, self._admin, self._namespace = server, admin, namespace
        self.stores: dict[str, KubernetesStore] = {}
        self._lines: dict[str, Line] = {}
        self.now = 1_000.0

    def client(self, by: str) -> Store:
        line = self._lines.setdefault(by, Line())

        def connect() -> KubeClient:
            inner = HttpExchange(find_credentials(str(self._server.kubeconfig)))
            return KubeClient(LineExchange(inner, line), timeout_s=20.0)

        made = self.stores[by] = KubernetesStore(
            KubernetesAddress(self._namespace), connect, now=lambda: self.now, by=by,
            op_timeout_s=20.0 if by != "away" else 1.0,
        )  # fmt: skip
        return made

    async def advance(self, seconds: float) -> None:
        await self.settled()
        self.now += seconds
        await self._end_leases()

    async def compact(self, revision: int) -> None:
        pytest.skip("an API server compacts its etcd by itself, every five minutes")

    async def outage(self) -> None:
        for line in self._lines.values():
            line.cut = True

    async def restore(self) -> None:
        for line in self._lines.values():
            line.cut = False
        await self.settled()
        await self._end_leases()

    async def lose_next_reply(self, client: Store) -> None:
        self._line(client).loses = True

    async def slow(self, seconds: float) -> None:
        for line in self._lines.values():
            line.slow_s = seconds

    async def break_watches(self, client: Store) -> None:
        self._line(client).broken += 1

    async def settled(self) -> None:
        while not await self._all_seen():  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def _all_seen(self) -> bool:
        if any(line.cut for line in self._lines.values()):
            return True
        listed = await self._admin.list(LEASES, self._namespace)
        leases = {one.metadata.name: one.metadata.resource_version for one in listed.items}
        for by, store in self._running():
            wanted = store.waiting_watches + (store.ending is not None)
            if self._lines[by].open_watches < wanted:
                return False
            if store.ending is not None and store.ending.leases.versions != leases:
                return False
        return True

    async def _end_leases(self) -> None:
        for by, store in self._running():
            if store.ending is not None and not self._lines[by].cut:
                await store.ending.pass_once()

    def _running(self) -> list[tuple[str, KubernetesStore]]:
        return [(by, store) for by, store in self.stores.items() if not store.closed]

    def _line(self, client: Store) -> Line:
        return next(self._lines[by] for by, store in self.stores.items() if store is client)


class TestOnARealApiServer(StoreContract):
    one_key = True
    ttl_s = 30.0
    slack_s = 0.1
    races = 2
    patience_s = 120.0

    @pytest.fixture(autouse=True)
    def _server(self, server: ApiServer) -> None:
        self.server = server

    def open(self) -> AbstractAsyncContextManager[Stores]:
        return self._open()

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[Stores, None]:
        async with self.server.client() as admin:
            name = f"store-{next(NUMBERS)}"
            await admin.create(NAMESPACES, {"metadata": {"name": name}})
            stores = RealStores(self.server, admin, name)
            try:
                yield stores
            finally:
                for store in stores.stores.values():
                    await store.close()


class Place(Entity, name="place"):
    @handler
    async def home(self) -> int:
        return self.epoch


class Cluster:
    """Nodes in this process, each with its own way to the API server."""

    def __init__(self, server: ApiServer, namespace: str) -> None:
        self._server, self._namespace = server, namespace
        self._network = MemoryNetwork()
        self.history = History(SystemClock().now)
        self.lines: dict[str, Line] = {}
        self.settings = Settings(
            shards=70, ttl_s=6.0, settle_s=0.05, settle_max_s=0.2, balance_interval_s=0.3,
            balance_limit=1.0, linger_s=1.0, drain_deadline_s=10.0,
        )  # fmt: skip
        self.operator = Namespace(self._store("operator"), "domicile")

    def node(self, name: str) -> Node:
        return Node(
            "kubernetes://x", entities=[Place], settings=self.settings, node_id=name,
            backends=lambda: self._backends(name),
        )  # fmt: skip

    def _store(self, name: str) -> KubernetesStore:
        line = self.lines.setdefault(name, Line())

        def connect() -> KubeClient:
            inner = HttpExchange(find_credentials(str(self._server.kubeconfig)))
            return KubeClient(LineExchange(inner, line), timeout_s=5.0)

        address = KubernetesAddress(self._namespace)
        return KubernetesStore(address, connect, now=SystemClock().now, by=name)

    def _backends(self, name: str) -> Backends:
        return Backends(
            store=Namespace(self._store(name), "domicile"),
            transport=lambda: MemoryTransport(self._network),
            journal=None,
            clock=SystemClock(),
            meter=self.history,
            random=Random(name),
        )

    async def until(self, fits: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        async with asyncio.timeout(240):
            while not fits(owners := await self._owners()):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        return owners

    async def incarnations(self) -> dict[str, str]:
        """Names of registered nodes by incarnation."""
        records = [
            KeyFamily.NODE.decode(item.value)
            for item in (await self.operator.list(b"nodes/")).items
        ]
        return {record.incarnation: record.node for record in records}

    async def _owners(self) -> dict[str, int]:
        names, found = await self.incarnations(), dict[str, int]()
        for item in (await self.operator.list(b"")).items:
            if classify(item.key) is KeyFamily.BLOCK:
                for entry in decode_block(item.value).entries:
                    home = names.get(entry.owner, "") if entry.state == "serving" else ""
                    found[home] = found.get(home, 0) + 1
        return found


@pytest.mark.scenario("LS-19", partial=True)
def test_a_node_whose_api_server_is_unreachable_downs_itself(server: ApiServer) -> None:
    async def main() -> None:
        name = f"store-{next(NUMBERS)}"
        async with server.client() as admin:
            await admin.create(NAMESPACES, {"metadata": {"name": name}})
        cluster = Cluster(server, name)
        async with AsyncExitStack() as stack:
            nodes = [cluster.node(one) for one in "abc"]
            for node in nodes:
                await stack.enter_async_context(node)
            await cluster.until(lambda now: "" not in now and len(now) == 3)
            known = {node: one for one, node in (await cluster.incarnations()).items()}
            victim = Incarnation(known["c"])
            cluster.lines["c"].cut = True
            await cluster.until(lambda now: "" not in now and "c" not in now)
            assert await cluster.operator.get(node_key(victim)) is None
            history = cluster.history
            over = [e.at for e in history.of("fenced", "ended") if e.fields["inc"] == victim]
            opened = [
                e.at
                for e in history.of("open")
                if e.fields["epoch"] > 1 and e.fields["inc"] != victim and over and e.at > over[0]
            ]
            assert over
            assert opened
            for number in range(20):
                await nodes[0].ref(Place, f"p{number}").ask(Place.home)
            assert [*check_handlers(history), *check_stored(history)] == []
            cluster.lines["c"].cut = False
        await cluster.operator.close()

    asyncio.run(main())
