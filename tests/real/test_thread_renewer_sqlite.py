"""The embedded store, asked from a thread while the event loop that opened it is blocked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import apsw
import pytest

from domicile.core.state.txn import Committed, Conflict, Item, Put
from domicile.errors import StoreRewound, StoreUnavailable
from domicile.ports.store import Kept, OffersThreads, ThreadedStore
from domicile.stores.memory.store import MemoryStore
from domicile.stores.namespace import Namespace
from domicile.stores.sqlite.store import SqliteStore
from domicile.testing.sim.clock import SimClock
from domicile.testing.sim.loop import World

T = TypeVar("T")
WAIT_S = 60.0
KEY = b"nodes/a"


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 2 * WAIT_S))


def blocked(ask: Callable[[], Future[T]]) -> T:
    """The answer to a thread's question while the calling thread, the loop's, waits."""
    answers: list[Future[T]] = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()
    thread.join(WAIT_S)
    (future,) = answers
    return future.result(WAIT_S)


class Place:
    """A cluster's part of a store, with one lease and one record under it."""

    def __init__(self, path: Path) -> None:
        self.sqlite = SqliteStore(path, by="n", op_timeout_s=1.0)
        self.store = Namespace(self.sqlite, "blue")

    async def begin(self) -> tuple[ThreadedStore, int]:
        await self.store.grant("lease", 30.0)
        outcome = await self.store.commit([], [Put(KEY, b"one", "lease")])
        assert isinstance(outcome, Committed)
        side = self.store.beside()
        assert side is not None
        return side, outcome.revision


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "store.db")


def test_it_renews_and_then_reads(place: Place) -> None:
    async def main() -> None:
        side, revision = await place.begin()
        kept = blocked(lambda: side.keep("lease", KEY))
        assert kept == Kept(30.0, Item(KEY, b"one", revision, revision))
        assert blocked(lambda: side.keep("lease", b"nodes/b")) == Kept(30.0, None)
        assert blocked(lambda: side.keep("other", KEY)) == Kept(None, None)
        await place.store.revoke("lease")
        assert blocked(lambda: side.keep("lease", KEY)) == Kept(None, None)
        await place.store.close()

    run(main())


def test_a_lease_that_ran_out_stays_gone(tmp_path: Path) -> None:
    """S3: a renewal past the deadline is refused, by the store's own time."""
    now = [100.0]
    store = SqliteStore(tmp_path / "store.db", elapsed=lambda: now[0])

    async def main() -> None:
        await store.grant("lease", 2.0)
        await store.commit([], [Put(KEY, b"one", "lease")])
        side = store.beside()
        now[0] += 1.9
        assert blocked(lambda: side.keep("lease", KEY)).ttl_s == 2.0
        now[0] += 1.9
        assert blocked(lambda: side.keep("lease", KEY)).ttl_s == 2.0
        now[0] += 2.0
        assert blocked(lambda: side.keep("lease", KEY)) == Kept(None, None)
        assert await store.get(KEY) is None
        await store.close()

    run(main())


def test_it_rewrites_only_what_it_knows(place: Place) -> None:
    async def main() -> None:
        side, revision = await place.begin()
        watch = place.store.watch(b"", revision)
        seen = asyncio.ensure_future(anext(watch))
        outcome = blocked(lambda: side.rewrite(KEY, revision, b"two", "lease"))
        assert outcome == Committed(revision + 1)
        assert blocked(lambda: side.rewrite(KEY, revision, b"three", "lease")) == Conflict(KEY)
        item = await place.store.get(KEY)
        assert item == Item(KEY, b"two", revision, revision + 1)
        assert [change.item for change in (await seen).changes] == [item]
        await place.store.revoke("lease")
        assert await place.store.get(KEY) is None, "it hangs on the lease"
        refused = blocked(lambda: side.rewrite(KEY, revision + 1, b"four", "lease"))
        assert refused == Conflict(KEY)
        await place.store.close()

    run(main())


def test_a_rewind_that_the_blocked_loop_has_not_noticed_refuses_everything(
    place: Place, tmp_path: Path
) -> None:
    path = tmp_path / "store.db"

    async def main() -> None:
        await place.store.grant("lease", 30.0)
        await place.store.commit([], [Put(KEY, b"one", "lease")])
        await asyncio.to_thread(copy, path, tmp_path / "backup.db")
        side, revision = await place.begin()
        put_back(tmp_path / "backup.db", path)
        for _ in range(3):
            with pytest.raises(StoreRewound):
                blocked(lambda: side.keep("lease", KEY))
            with pytest.raises(StoreRewound):
                blocked(lambda: side.rewrite(KEY, revision, b"two", "lease"))
        # Also once the loop has noticed, and works with what is there now.
        with pytest.raises(StoreRewound):
            await place.store.get(KEY)
        await asyncio.sleep(0)
        assert await place.store.get(KEY) is not None
        with pytest.raises(StoreRewound):
            blocked(lambda: side.keep("lease", KEY))
        await place.store.close()

    run(main())


def put_back(backup: Path, path: Path) -> None:
    for end in ("", "-wal", "-shm"):
        Path(f"{path}{end}").unlink(missing_ok=True)
    backup.rename(path)


def copy(path: Path, to: Path) -> None:
    """A backup of a store in use, as an operator would make it."""
    source, target = apsw.Connection(str(path)), apsw.Connection(str(to))
    with target.backup("main", source, "main") as backup:
        backup.step()
    target.close()
    source.close()


def test_a_store_that_is_locked_or_closed_says_so(place: Place, tmp_path: Path) -> None:
    async def main() -> None:
        side, revision = await place.begin()
        other = apsw.Connection(str(tmp_path / "store.db"))
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="stayed locked"):
            blocked(lambda: side.keep("lease", KEY))
        with pytest.raises(StoreUnavailable, match="stayed locked"):
            blocked(lambda: side.rewrite(KEY, revision, b"two", "lease"))
        other.execute("ROLLBACK")
        other.close()
        assert blocked(lambda: side.keep("lease", KEY)).ttl_s == 30.0
        await place.store.close()
        with pytest.raises(StoreUnavailable, match="closed"):
            blocked(lambda: side.keep("lease", KEY))
        with pytest.raises(StoreUnavailable, match="closed"):
            blocked(lambda: side.rewrite(KEY, revision, b"two", "lease"))

    run(main())


def test_only_a_store_with_threads_offers_it() -> None:
    world = World(1)
    memory = MemoryStore(SimClock(world, world.process("n"))).client("n")
    try:
        assert not isinstance(memory, OffersThreads)
        assert Namespace(memory, "blue").beside() is None
    finally:
        world.close()
