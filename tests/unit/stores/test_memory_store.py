"""The memory store: the contract, its events, and what only it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest
from memory_store_lab import MemoryStores

from domicile.core.state.txn import (
    Committed,
    Conflict,
    Delete,
    Put,
)
from domicile.errors import StoreRewound, WatchCompacted
from domicile.settings import MAX_TICK_S
from domicile.stores.memory.store import MemoryStore
from domicile.testing.sim.clock import ManualClock
from domicile.testing.suites.store import StoreContract, after, put

T = TypeVar("T")


class LateTimers(MemoryStores):
    """Timers never run: expiry must not depend on them."""

    async def advance(self, seconds: float) -> None:
        self.clock.advance(seconds, timers=False)


class OnAWallClock(MemoryStores):
    """Leases run on store time, made from a clock that can be stepped (S4)."""

    def __init__(self) -> None:
        self._ahead_s = 0.0
        super().__init__(lambda now: now + self._ahead_s)

    async def step_wall(self, by_s: float) -> None:
        self._ahead_s += by_s


class TestMemoryStore(StoreContract):
    forgives_rewinds = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[MemoryStores]:
        yield MemoryStores()


class TestMemoryStoreOnAWallClock(StoreContract):
    forgives_rewinds = False
    slack_s = MAX_TICK_S

    @asynccontextmanager
    async def open(self) -> AsyncIterator[MemoryStores]:
        yield OnAWallClock()


class TestMemoryStoreWithLateTimers(StoreContract):
    forgives_rewinds = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[MemoryStores]:
        yield LateTimers()


def run(scenario: Callable[[MemoryStores], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            await scenario(MemoryStores())

    asyncio.run(main())


def test_commits_and_expiries_are_reported() -> None:
    async def scenario(stores: MemoryStores) -> None:
        store = stores.store.client("n1")
        await store.grant("l", 5.0)
        await store.commit([], [Put(b"a", b"1", "l"), Put(b"b", b"2"), Delete(b"absent")])
        await stores.store.client("n2").commit([], [Delete(b"b")])
        await store.commit([], [Put(b"c", b"", "gone")])
        await store.commit([], [])
        stores.clock.advance(5.0)
        assert [(event.at, event.kind, event.fields) for event in stores.history.events] == [
            (
                1000.0,
                "commit",
                {
                    "by": "n1",
                    "revision": 1,
                    "puts": [(b"a", b"1", "l"), (b"b", b"2", None)],
                    "deletes": [],
                },
            ),
            (1000.0, "commit", {"by": "n2", "revision": 2, "puts": [], "deletes": [b"b"]}),
            (1005.0, "expire", {"revision": 3, "deletes": [b"a"]}),
        ]

    run(scenario)


def test_nothing_changed_raises_no_revision() -> None:
    async def scenario(stores: MemoryStores) -> None:
        store = stores.store.client("a")
        await put(store, b"k", b"")
        assert await store.commit([], [Delete(b"absent")]) == Committed(1)
        await store.grant("empty", 1.0)
        await store.revoke("empty")
        assert stores.store.revision == 1

    run(scenario)


def test_a_lease_lives_until_its_deadline_and_not_at_it() -> None:
    async def scenario(stores: MemoryStores) -> None:
        store = stores.store.client("a")
        await store.grant("l", 5.0)
        stores.clock.advance(4.999)
        assert await store.renew("l") == 5.0
        stores.clock.advance(5.0, timers=False)
        assert await store.renew("l") is None
        assert await store.commit([], [Put(b"k", b"", "l")]) == Conflict(b"k")

    run(scenario)


def test_leases_expire_each_in_its_commit_in_order_of_deadline() -> None:
    async def scenario(stores: MemoryStores) -> None:
        store = stores.store.client("a")
        for lease, ttl_s in (("late", 3.0), ("early", 1.0), ("kept", 9.0), ("middle", 2.0)):
            await store.grant(lease, ttl_s)
            await put(store, lease.encode(), b"", lease)
        stores.clock.advance(4.0, timers=False)
        await store.get(b"any")
        expired = [event.fields["deletes"] for event in stores.history.of("expire")]
        assert expired == [[b"early"], [b"middle"], [b"late"]]
        assert stores.store.revision == 7

    run(scenario)


def test_the_timer_alone_wakes_a_watch() -> None:
    async def scenario(stores: MemoryStores) -> None:
        store = stores.store.client("a")
        await store.grant("l", 5.0)
        last = await put(store, b"k", b"", "l")
        waiting = asyncio.create_task(after(store.watch(b"", last)))
        await asyncio.sleep(0)
        stores.clock.advance(3.0)
        assert await store.renew("l") == 5.0
        stores.clock.advance(4.9)
        await asyncio.sleep(0)
        assert not waiting.done()
        stores.clock.advance(0.1)
        assert (await waiting).revision == last + 1

    run(scenario)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf")])
def test_an_absurd_ttl_is_refused(ttl_s: float) -> None:
    async def scenario(stores: MemoryStores) -> None:
        with pytest.raises(ValueError, match="ttl"):
            await stores.store.client("a").grant("l", ttl_s)

    run(scenario)


def test_a_slow_watch_is_bounded_by_the_log_and_an_idle_one_is_not() -> None:
    async def scenario() -> None:
        store = MemoryStore(ManualClock(), kept_commits=3).client("a")
        slow, idle = store.watch(b"k", 0), store.watch(b"other", 0)
        waiting = asyncio.create_task(after(idle))
        await asyncio.sleep(0)
        for _ in range(5):
            await put(store, b"k", b"")
        with pytest.raises(WatchCompacted, match="list again"):
            await anext(slow)
        last = await put(store, b"other", b"")
        assert (await waiting).revision == last

    asyncio.run(scenario())


def test_a_watch_from_the_future_means_that_history_went_back() -> None:
    async def scenario(stores: MemoryStores) -> None:
        with pytest.raises(StoreRewound):
            await anext(stores.store.client("a").watch(b"", 1))

    run(scenario)


def test_one_watch_has_one_reader() -> None:
    async def scenario(stores: MemoryStores) -> None:
        watch = stores.store.client("a").watch(b"", 0)
        waiting = asyncio.create_task(after(watch))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="already being read"):
            await anext(watch)
        await put(stores.store.client("a"), b"k", b"")
        await waiting

    run(scenario)


def test_kept_commits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="kept_commits"):
        MemoryStore(ManualClock(), kept_commits=0)
