"""Faults of a store with a server: they strike it as they say, are mended, and count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import cast

import pytest

from domicile.backends.redis import REDIS
from domicile.backends.registry import OpenOptions
from domicile.core.state.txn import Committed, Put
from domicile.errors import StoreUnavailable
from domicile.ports.store import Store
from domicile.settings import Settings
from domicile.testing.processes.cluster import Processes
from proving.chaos.faults import Chaos
from proving.chaos.load import Load
from proving.chaos.server import ServedStore, StoreServer, server_faults
from proving.chaos.tally import SERVED, Tally
from proving.redis_server import RedisProcess

NODES = 3
PATIENCE_S = 60.0


@dataclass
class Server:
    """What faults ask of a server; each verb may end the calm, so that no fault lasts."""

    port: int = 1
    verbs: list[str] = field(default_factory=list[str])

    def new_database(self) -> str:
        return "redis://127.0.0.1:1/0?prefix=a"

    def kill(self) -> None:
        self.verbs.append("kill")

    def start(self) -> None:
        self.verbs.append("start")

    def freeze(self) -> None:
        self.verbs.append("freeze")

    def thaw(self) -> None:
        self.verbs.append("thaw")


@dataclass
class Town:
    """The verbs and questions of `Processes` that these faults need."""

    notes: list[tuple[str, int | None]] = field(default_factory=list[tuple[str, int | None]])
    settings: Settings = field(default_factory=Settings)
    calm: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.nodes = [
            SimpleNamespace(index=index, up=True, incarnation=f"inc-{index}")
            for index in range(NODES)
        ]

    def now(self) -> float:
        return 100.0

    def leader(self) -> int:
        return 0

    def incarnation(self, node: int) -> str:
        return f"inc-{node}"

    def note_fault(self, kind: str, node: SimpleNamespace | None = None) -> None:
        """What the checkers hear. The calm comes with the first word, so the fault ends."""
        self.notes.append((kind, None if node is None else cast(int, node.index)))
        self.calm.set()

    def note_standstill(self, since: float, until: float) -> None:
        """When the server did nothing at all."""
        self.notes.append(("standstill", None))


def chaos_in(town: Town) -> Chaos:
    chaos = Chaos(cast(Processes, town), Tally(), cast(Load, None), scale=1.0)
    town.calm = chaos.calm
    return chaos


@pytest.mark.parametrize(
    ("kind", "verbs"), [("server kill", ["kill", "start"]), ("server freeze", ["freeze", "thaw"])]
)
def test_a_server_that_was_struck_comes_back_and_the_checkers_know(
    kind: str, verbs: list[str]
) -> None:
    server, town = Server(), Town()
    chaos = chaos_in(town)
    store = ServedStore(cast(StoreServer, server), NODES)
    asyncio.run(_strike(kind, store, chaos))
    assert server.verbs == verbs
    assert town.notes == [("stall", None), ("standstill", None), ("flow", None)]
    assert chaos.tally.faults == {kind: 1}


@pytest.mark.parametrize("kind", SERVED)
def test_nothing_strikes_in_the_calm(kind: str) -> None:
    server, town = Server(), Town()
    chaos = chaos_in(town)
    chaos.calm.set()
    asyncio.run(_strike(kind, ServedStore(cast(StoreServer, server), NODES), chaos))
    assert (server.verbs, town.notes, chaos.tally.faults.total()) == ([], [], 0)


async def _strike(kind: str, store: ServedStore, chaos: Chaos) -> None:
    await server_faults(store)[kind](chaos, Random(1))


# with a real server


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisProcess]:
    server = RedisProcess()
    server.start()
    try:
        yield server
    finally:
        server.stop()


@asynccontextmanager
async def served(server: RedisProcess) -> AsyncIterator[tuple[ServedStore, list[Store]]]:
    """A store of a round, and what each of its nodes opens."""
    store = ServedStore(server, NODES)
    store.start()
    opened = [
        REDIS.open_store(store.at(node), OpenOptions(f"node-{node}", op_timeout_s=1.0))
        for node in range(NODES)
    ]
    try:
        yield store, opened
    finally:
        for one in opened:
            await one.close()
        await store.close()


async def answers(store: Store) -> bool:
    try:
        async with asyncio.timeout(PATIENCE_S):
            return isinstance(await store.commit([], [Put(b"k", b"v")]), Committed)
    except StoreUnavailable:
        return False


def test_nodes_share_a_store_and_each_asks_it_through_a_proxy_of_its_own(
    redis: RedisProcess,
) -> None:
    async def main() -> None:
        async with served(redis) as (store, opened):
            assert len({store.at(node) for node in range(NODES)}) == NODES
            assert isinstance(await opened[0].commit([], [Put(b"k", b"v")]), Committed)
            for one in opened:
                item = await one.get(b"k")
                assert item is not None
                assert item.value == b"v"
        async with served(redis) as (other, opened):
            assert await opened[0].get(b"k") is None, "each round has a store of its own"
            assert other.url != store.url

    asyncio.run(main())


def test_a_node_that_is_cut_off_the_server_is_alone_with_that(redis: RedisProcess) -> None:
    async def main() -> None:
        chaos = chaos_in(Town())
        town = Town()
        chaos.cluster = cast(Processes, town)
        cut = asyncio.Event()
        town.calm = cut
        async with served(redis) as (store, opened):
            for proxy in store.proxies:
                # Each of the three ways is chosen by chance; this one shows at once.
                proxy.hold = proxy.lose_next_answer = proxy.refuse  # type: ignore[method-assign, assignment]
            fault = asyncio.create_task(_strike("server cut", store, chaos))
            async with asyncio.timeout(PATIENCE_S):
                await cut.wait()
                (victim,) = chaos.touched
                while await answers(opened[victim]):
                    pass
                reached = [await answers(one) for one in opened]
            assert reached == [node != victim for node in range(NODES)]
            chaos.calm.set()
            await fault
            assert await answers(opened[victim])
        assert town.notes == [("outage", victim), ("back", victim)]
        assert chaos.tally.faults == {"server cut": 1}
        assert chaos.touched == {}

    asyncio.run(main())
