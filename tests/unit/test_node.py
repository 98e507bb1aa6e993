"""Nodes on a real event loop: joining, asking each other, leaving, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from domicile import (
    ConfigError,
    Entity,
    EventSourced,
    HandlerFailed,
    Manager,
    Node,
    Settings,
    Unavailable,
    connect,
    connect_sync,
    handler,
)
from domicile.core.hashing import shard_of
from domicile.core.ids import EntityKey, ShardKey

QUICK = Settings(
    shards=4,
    ttl_s=2.0,
    settle_s=0.05,
    settle_max_s=0.1,
    balance_interval_s=0.1,
    balance_limit=1.0,
    link_timeout_s=1.0,
    linger_s=1.0,
    drain_deadline_s=2.0,
)


class Tool:
    """A resource that knows whether it is in use."""

    def __init__(self) -> None:
        self.open = False


class Counter(Entity, name="counter"):
    def __init__(self) -> None:
        self.value = 0

    @handler
    async def add(self, amount: int = 1) -> int:
        self.value += amount
        return self.value

    @handler
    async def fail(self) -> None:
        raise ValueError("no")

    @handler
    async def tool(self) -> bool:
        return self.resource(Tool).open

    @handler
    async def forward(self, other: str) -> int:
        return await self.ref(Counter, other).ask(Counter.add)


class Ledger(EventSourced[int, int], name="ledger"):
    @staticmethod
    def initial(id: str, /) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: int, /) -> int:
        return state + event

    @handler
    async def add(self, amount: int) -> int:
        return await self.persist(amount)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """A store of its own for each test."""
    return f"memory://{request.node.name}"


def node(url: str, **more: Any) -> Node:
    return Node(url, entities=[Counter, Ledger], settings=QUICK, **more)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition for a few seconds of real time."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def homes(node: Node) -> list[int]:
    """The shards that a node has open."""
    assert node.life is not None
    hosts = node.life.runtime.hosts.values()
    return [host.shard.shard for host in hosts if host.owner.admits]


def ids_by_shard(kind: str = "counter") -> list[str]:
    found: dict[int, str] = {}
    for number in range(100):
        found.setdefault(shard_of(EntityKey(kind, f"c{number}"), QUICK.shards), f"c{number}")
    return [found[shard] for shard in range(QUICK.shards)]


def test_two_nodes_share_the_shards_ask_each_other_and_leave_in_order(url: str) -> None:
    ids = ids_by_shard()

    async def main() -> None:
        async with node(url) as first:
            for id in ids:
                assert await first.ref(Counter, id).ask(Counter.add, 5) == 5
            assert await first.ref(Ledger, "l").ask(Ledger.add, 7) == 7
            assert len(homes(first)) == 4
            async with node(url) as second:
                await until(lambda: len(homes(first)) == len(homes(second)) == 2)
                assert sorted(homes(first) + homes(second)) == [0, 1, 2, 3]
                for sender in (first, second):
                    for id in ids:
                        assert await sender.ref(Counter, id).ask(Counter.add) > 0
                        assert await sender.ref(Counter, id).ask(Counter.forward, f"{id}x") > 0
                    with pytest.raises(HandlerFailed, match="no"):
                        await sender.ref(Counter, ids[0]).ask(Counter.fail)
                kept = [await second.ref(Counter, ids[s]).ask(Counter.add) for s in homes(second)]
                assert kept == [3, 3], "moved shards started afresh"
            assert len(homes(first)) == 4, "an orderly leave hands everything over"
            assert first.life is not None
            entry = first.life.member.members.map.get(ShardKey("default", 0))
            assert entry.owner == first.life.me
            for id in ids:
                assert await first.ref(Counter, id).ask(Counter.add) > 0
            assert await first.ref(Ledger, "l").ask(Ledger.add, 1) == 8

    asyncio.run(main())


def test_messages_under_way_survive_an_orderly_leave(url: str) -> None:
    ids = ids_by_shard()

    async def main() -> None:
        async with node(url) as first:
            second = await node(url).__aenter__()
            await until(lambda: len(homes(first)) == len(homes(second)) == 2)
            leaving = asyncio.get_running_loop().create_task(second.__aexit__())
            done = 0
            while not leaving.done():
                for id in ids:
                    await first.ref(Counter, id).ask(Counter.add)
                    done += 1
            await leaving
            assert done >= len(ids)

    asyncio.run(main())


def test_a_node_does_no_work_before_it_is_entered_and_none_after(url: str) -> None:
    async def main() -> None:
        made = node(url)
        assert made.life is None
        with pytest.raises(Unavailable, match="async with"):
            await made.ref(Counter, "c").ask(Counter.add)
        with pytest.raises(ConfigError, match="start the node first"):
            await made.run()
        async with made:
            assert await made.ref(Counter, "c").ask(Counter.add) == 1
            with pytest.raises(ConfigError, match="started already"):
                await made.__aenter__()
            assert await made.ref(Counter, "c").ask(Counter.add) == 2
        with pytest.raises(Unavailable):
            await made.ref(Counter, "c").ask(Counter.add)
        with pytest.raises(ConfigError, match="make a new Node"):
            await made.__aenter__()
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing is left running"

    asyncio.run(main())


def test_lifespan_runs_a_node_with_its_resources_around_an_application(url: str) -> None:
    tool = Tool()

    @asynccontextmanager
    async def resources() -> AsyncGenerator[Mapping[type[Any], Any]]:
        tool.open = True
        yield {Tool: tool}
        tool.open = False

    async def main() -> None:
        made = node(url, resources=resources)
        assert not tool.open
        async with made.lifespan(object()):
            assert await made.ref(Counter, "c").ask(Counter.tool) is True
        assert not tool.open
        assert made.life is None

    asyncio.run(main())


def test_resources_that_fail_start_nothing(url: str) -> None:
    @asynccontextmanager
    async def resources() -> AsyncGenerator[Mapping[type[Any], Any]]:
        raise OSError("no database")
        yield {}

    async def main() -> None:
        with pytest.raises(OSError, match="no database"):
            async with node(url, resources=resources):
                pass
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_run_serves_until_cancelled(url: str) -> None:
    async def main() -> None:
        made = node(url)

        async def serve() -> None:
            async with made:
                await made.run()

        server = asyncio.get_running_loop().create_task(serve())
        await until(lambda: made.life is not None)
        assert await made.ref(Counter, "c").ask(Counter.add) == 1
        server.cancel()
        with pytest.raises(asyncio.CancelledError):
            await server
        assert made.life is None

    asyncio.run(main())


def test_a_node_that_does_not_fit_the_cluster_is_refused(url: str) -> None:
    async def main() -> None:
        async with node(url):
            other = Node(url, entities=[Counter, Ledger], settings=Settings(shards=8))
            with pytest.raises(ConfigError, match="shards"):
                await other.__aenter__()

    asyncio.run(main())


@pytest.mark.parametrize("store", ["", "memory", "postgres://x", "x.db", "sqlite://", "sqlite:///"])
def test_an_unknown_store_is_refused_at_once(store: str) -> None:
    with pytest.raises(ConfigError, match="memory://name"):
        Node(store)


@pytest.mark.parametrize("cluster", ["", "a/b", "a\n"])
def test_a_name_that_would_reach_into_other_clusters_is_refused(cluster: str) -> None:
    for make in (Node, connect):
        with pytest.raises(ConfigError, match="no name for a cluster"):
            make("sqlite:///x.db", cluster=cluster)


@pytest.mark.parametrize(
    ("store", "hint"),
    [
        ("dev.db", "sqlite:///dev.db"),
        ("sqlite:/dev.db", "sqlite:///dev.db"),
        ("sqlit:///dev.db", "sqlite:///dev.db"),
    ],
)
def test_a_store_that_is_almost_right_gets_a_hint(store: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean {hint}\?"):
        Node(store)


def test_bad_entities_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="both named 'counter'"):
        Node("memory://x", entities=[Counter, Counter])


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOMICILE_MAILBOX", "17")
    assert Node("memory://x").settings.mailbox == 17
    assert Node("memory://x", settings=QUICK).settings is QUICK


@pytest.mark.parametrize(
    ("entities", "words"),
    [
        (Counter, r"entities=Counter must be a list of entity classes, as in entities=\[Counter\]"),
        (None, r"entities=None must be a list"),
    ],
)
def test_entities_that_are_no_list_are_refused_with_the_right_form(
    entities: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Node("memory://no-list", entities=entities)


def test_entities_may_be_any_iterable() -> None:
    kinds = iter([Ledger, Ledger])
    with pytest.raises(ConfigError, match="both named"):
        Node("sqlite:///no.db", entities=kinds)  # type: ignore[arg-type]


def test_nodes_managers_and_clients_say_what_they_are() -> None:
    store = "memory://said"

    async def main() -> None:
        node = Node(store, entities=[Counter], settings=QUICK, node_id="node-1")
        client = connect(store, settings=QUICK)
        assert repr(node) == "<Node node-1 of cluster 'domicile' in memory://said: not started>"
        async with node, client:
            assert repr(node) == "<Node node-1 of cluster 'domicile' in memory://said: joined>"
            said = "<ConnectedClient of cluster 'domicile' in memory://said: joined>"
            assert repr(client) == said
        assert repr(node).endswith(": left>")
        assert repr(client).endswith(": left>")

    asyncio.run(main())
    manager = Manager("memory://admin:secret@host/said", node_id="m")
    assert repr(manager) == "<Manager m of cluster 'domicile' in memory://host/said: not started>"
    assert repr(connect_sync("memory://said")) == "<SyncClient in memory://said: not connected>"


def test_a_call_never_raises_before_it_is_awaited() -> None:
    """`asyncio.gather(*(ref.ask(...) for ref in refs))` must not end in the middle."""

    async def main() -> None:
        node = Node("memory://away", entities=[Counter], settings=QUICK)
        ref = node.ref(Counter, "c")
        asked, told = ref.ask(Counter.add), ref.tell(Counter.add)
        for call in (asked, told):
            with pytest.raises(Unavailable, match="not part of a cluster now"):
                await call

    asyncio.run(main())
