"""Nodes of entities that have nothing but an API server (S8), on the one in memory.

Each node has a client of its own, so one of them can be cut off from the API server alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from random import Random

import pytest

from domicile import Entity, Node, Settings, handler
from domicile.core.ids import Incarnation
from domicile.core.state.keys import LEADER_KEY, KeyFamily, classify, node_key
from domicile.core.state.shardmap import decode_block, term_of
from domicile.core.state.txn import Delete
from domicile.incarnation.context import Backends
from domicile.kubeapi.client import KubeClient
from domicile.membership.clock import SystemClock
from domicile.stores.kubernetes.address import KubernetesAddress
from domicile.stores.kubernetes.store import KubernetesStore
from domicile.stores.namespace import Namespace
from domicile.testing.checkers import check_handlers, check_stored
from domicile.testing.history import History
from domicile.testing.kube import FakeApiServer, FakeExchange
from domicile.transports.memory import MemoryNetwork, MemoryTransport

SETTINGS = Settings(
    shards=70, ttl_s=4.0, settle_s=0.05, settle_max_s=0.2, balance_interval_s=0.3,
    balance_limit=1.0, link_timeout_s=1.0, linger_s=1.0, drain_deadline_s=5.0,
)  # fmt: skip


class Place(Entity, name="place"):
    @handler
    async def home(self) -> str:
        return str(self.epoch)


class Unthreaded(KubernetesStore):
    """The API server in memory belongs to one event loop."""

    def beside(self, prefix: bytes = b"") -> None:  # type: ignore[override]
        return None


class Cluster:
    def __init__(self) -> None:
        self.server = FakeApiServer(delay_s=(0.0, 0.002))
        self.network = MemoryNetwork()
        self.history = History(SystemClock().now)
        self.exchanges: dict[str, list[FakeExchange]] = {}
        self.operator = Namespace(self._store("operator"), "domicile")

    def node(self, name: str) -> Node:
        return Node(
            "kubernetes://default",
            entities=[Place],
            settings=SETTINGS,
            node_id=name,
            journal="memory://",
            backends=lambda: self._backends(name),
        )

    def cut(self, name: str) -> None:
        for exchange in self.exchanges[name]:
            exchange.cut = True
        self.server.break_watches()

    def _store(self, name: str) -> KubernetesStore:
        def connect() -> KubeClient:
            exchange = self.server.exchange(name)
            self.exchanges.setdefault(name, []).append(exchange)
            return KubeClient(exchange, timeout_s=2.0)

        return Unthreaded(KubernetesAddress("default"), connect, now=SystemClock().now, by=name)

    def _backends(self, name: str) -> Backends:
        return Backends(
            store=Namespace(self._store(name), "domicile"),
            transport=lambda: MemoryTransport(self.network),
            journal=None,
            clock=SystemClock(),
            meter=self.history,
            random=Random(name),
        )

    async def incarnation(self, name: str) -> Incarnation:
        for item in (await self.operator.list(b"nodes/")).items:
            record = KeyFamily.NODE.decode(item.value)
            if record.node == name:
                return Incarnation(record.incarnation)
        raise AssertionError(f"no node {name} is registered")

    async def owners(self) -> dict[str, int]:
        """How many shards each registered node has, by node id; "" for what has no home."""
        listing = await self.operator.list(b"")
        names: dict[str, str] = {}
        for item in listing.items:
            if classify(item.key) is KeyFamily.NODE:
                record = KeyFamily.NODE.decode(item.value)
                names[record.incarnation] = record.node
        found: dict[str, int] = {}
        for item in listing.items:
            if classify(item.key) is KeyFamily.BLOCK:
                for entry in decode_block(item.value).entries:
                    home = names.get(entry.owner, "") if entry.state == "serving" else ""
                    found[home] = found.get(home, 0) + 1
        return found

    async def until(self, fits: Callable[[dict[str, int]], bool]) -> dict[str, int]:
        async with asyncio.timeout(90):
            while not fits(owners := await self.owners()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return owners


@pytest.mark.scenario("LS-19", partial=True)
def test_a_node_that_is_cut_off_from_the_api_server_downs_itself_and_is_replaced() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with AsyncExitStack() as stack:
            nodes = [cluster.node(name) for name in "abc"]
            for node in nodes:
                await stack.enter_async_context(node)
            await cluster.until(lambda now: "" not in now and len(now) == 3)
            incarnation = await cluster.incarnation("c")
            cluster.cut("c")
            after = await cluster.until(lambda now: "" not in now and "c" not in now)
            assert sum(after.values()) == SETTINGS.shards
            assert await cluster.operator.get(node_key(incarnation)) is None
            history = cluster.history
            ended = [
                event.at
                for event in history.of("fenced", "ended")
                if event.fields["inc"] == incarnation
            ]
            opened = [
                event.at
                for event in history.of("open")
                if event.fields["epoch"] > 1 and event.fields["inc"] != incarnation
            ]
            assert ended
            assert min(ended) < min(opened)
            for number in range(20):
                await nodes[0].ref(Place, f"p{number}").ask(Place.home)
            assert [*check_handlers(cluster.history), *check_stored(cluster.history)] == []
            # So that it can leave.
            for exchange in cluster.exchanges["c"]:
                exchange.cut = False
        await cluster.operator.close()

    asyncio.run(main())


def test_a_new_leader_seals_every_block_of_the_old_one() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with AsyncExitStack() as stack:
            for name in "ab":
                await stack.enter_async_context(cluster.node(name))
            await cluster.until(lambda now: "" not in now and len(now) == 2)
            first = await _terms(cluster)
            leader = await cluster.operator.get(LEADER_KEY)
            assert leader is not None
            assert set(first.values()) == {leader.revision}
            # As if the leader's Lease had ended: the first candidate that notices leads next.
            store = cluster.operator
            await store.commit([], [Delete(LEADER_KEY)])
            async with asyncio.timeout(60):
                while True:
                    now = await store.get(LEADER_KEY)
                    terms = await _terms(cluster)
                    if now is not None and set(terms.values()) == {now.revision}:
                        break
                    await asyncio.sleep(0.05)
            assert min(terms.values()) > max(first.values())
        await cluster.operator.close()

    asyncio.run(main())


async def _terms(cluster: Cluster) -> dict[bytes, int]:
    items = (await cluster.operator.list(b"map/")).items
    return {item.key: term_of(decode_block(item.value).txn) for item in items}
