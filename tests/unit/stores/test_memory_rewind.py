"""The memory store's own troubles: rewinds, halts, and a wall clock that is stepped."""

from __future__ import annotations

import asyncio

import pytest

from domicile.core.state.txn import Committed, Put
from domicile.errors import StoreRewound
from domicile.stores.memory.store import MemoryStore
from domicile.testing.history import History
from domicile.testing.sim.clock import ManualClock


class Wall:
    """A wall clock that is on time until it is stepped."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return self.clock.now() + self.ahead_s


def test_a_rewind_ends_every_watch_and_client_of_the_old_history() -> None:
    async def scenario() -> None:
        history = History(lambda: 0.0)
        store = MemoryStore(ManualClock(), history)
        client = store.client("a")
        await client.commit((), (Put(b"k", b"1"),))
        backup = store.snapshot()
        await client.commit((), (Put(b"k", b"2"), Put(b"l", b"")))
        watch = asyncio.ensure_future(anext(client.watch(b"", 2)))
        await asyncio.sleep(0)
        store.rewind(backup)
        with pytest.raises(StoreRewound, match="history 2"):
            await watch
        for call in (client.get(b"k"), client.list(b""), client.renew("x"), client.revoke("x")):
            with pytest.raises(StoreRewound):
                await call
        with pytest.raises(StoreRewound):
            await client.commit((), (Put(b"k", b"3"),))
        fresh = store.client("a")
        listing = await fresh.list(b"")
        assert [(item.key, item.value) for item in listing.items] == [(b"k", b"1")]
        assert listing.revision == 1
        assert await fresh.commit((), (Put(b"m", b""),)) == Committed(2)
        (told,) = history.of("rewound")
        assert told.fields == {"revision": 1, "history": 2, "items": [(b"k", b"1")]}

    asyncio.run(scenario())


def test_a_restored_lease_has_the_time_it_had_left_then() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        store = MemoryStore(clock)
        client = store.client("a")
        await client.grant("old", 6.0)
        await client.commit((), (Put(b"old", b"", "old"),))
        clock.advance(2.0)
        backup = store.snapshot()
        clock.advance(3.0)
        await client.renew("old")
        await client.grant("new", 60.0)
        await client.commit((), (Put(b"new", b"", "new"),))
        store.rewind(backup)
        assert store.peek(b"new") is None
        clock.advance(3.9)
        assert store.peek(b"old") is not None
        clock.advance(0.2)
        assert store.peek(b"old") is None

    asyncio.run(scenario())


def test_a_snapshot_is_not_changed_by_what_follows() -> None:
    async def scenario() -> None:
        store = MemoryStore(ManualClock())
        client = store.client("a")
        await client.grant("l", 6.0)
        backup = store.snapshot()
        await client.commit((), (Put(b"k", b"", "l"),))
        for _ in range(2):
            store.rewind(backup)
            assert store.peek(b"k") is None
            await store.client("a").commit((), (Put(b"k", b"", "l"),))

    asyncio.run(scenario())


@pytest.mark.parametrize("step_s", [3600.0, -3600.0, 0.0])
def test_on_store_time_a_step_ends_no_lease_early_and_keeps_none_alive(step_s: float) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        wall = Wall(clock)
        store = MemoryStore(clock, wall=wall)
        client = store.client("a")
        await client.grant("l", 6.0)
        await client.commit((), (Put(b"k", b"", "l"),))
        clock.advance(1.0)
        wall.ahead_s += step_s
        clock.advance(4.7)
        assert store.peek(b"k") is not None, "a step may cost one tick of 0.25 s, no more"
        clock.advance(0.6)
        assert store.peek(b"k") is None

    asyncio.run(scenario())


def test_a_halted_store_expires_nobody() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        store = MemoryStore(clock, wall=Wall(clock))
        client = store.client("a")
        await client.grant("l", 6.0)
        await client.commit((), (Put(b"k", b"", "l"),))
        store.halt()
        clock.advance(3600.0)
        assert store.peek(b"k") is not None
        store.go_on()
        clock.advance(5.5)
        assert store.peek(b"k") is not None
        clock.advance(0.5)
        assert store.peek(b"k") is None

    asyncio.run(scenario())
