"""What every store must do (S1, S2, S3, S7).

For authors of stores: derive `class TestMine(StoreContract)` and define `open`. The scenarios
use nothing but the port and the two verbs of `Stores`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import pytest

from domicile.core.txn import (
    MAX_OPERATIONS,
    MAX_VALUE_BYTES,
    Absent,
    At,
    Change,
    Changes,
    Committed,
    Conflict,
    Delete,
    Item,
    Present,
    Put,
    Write,
)
from domicile.errors import StoreUnavailable, WatchCompacted
from domicile.ports.store import Store


class Stores(Protocol):
    """One empty store and what a test may do to it."""

    def client(self, by: str) -> Store:
        """Another process's way to it."""
        ...

    async def advance(self, seconds: float) -> None:
        """Let that much of the store's time pass."""
        ...

    async def compact(self, revision: int) -> None:
        """Forget the changes up to a revision."""
        ...


class StoreContract(ABC):
    """Derive a test class from this and define `open`."""

    ttl_s: float = 5.0
    """The ttl that leases ask for. A store on real time may want it small."""

    patience_s: float = 10.0
    """How long, in real time, one scenario may take."""

    @abstractmethod
    def open(self) -> AbstractAsyncContextManager[Stores]:
        """A fresh, empty store."""

    def run(self, scenario: Callable[[Stores], Awaitable[None]]) -> None:
        """Run one scenario on a fresh store and a fresh event loop."""

        async def main() -> None:
            async with asyncio.timeout(self.patience_s), self.open() as stores:
                await scenario(stores)

        asyncio.run(main())

    def test_revisions_rise_and_items_know_theirs(self) -> None:
        async def scenario(stores: Stores) -> None:
            store = stores.client("a")
            first = await put(store, b"k", b"1")
            second = await put(store, b"other", b"x")
            third = await put(store, b"k", b"2")
            assert first < second < third
            assert await store.get(b"k") == Item(b"k", b"2", created=first, revision=third)
            assert isinstance(await store.commit([], [Delete(b"k")]), Committed)
            assert await store.get(b"k") is None
            again = await put(store, b"k", b"3")
            assert await store.get(b"k") == Item(b"k", b"3", created=again, revision=again)

        self.run(scenario)

    def test_listing_is_sorted_and_of_one_revision(self) -> None:
        async def scenario(stores: Stores) -> None:
            store = stores.client("a")
            for key in (b"n/b", b"n/a", b"m/z", b"n/\xff", b"n"):
                last = await put(store, key, key)
            listing = await store.list(b"n/")
            assert [item.key for item in listing.items] == [b"n/a", b"n/b", b"n/\xff"]
            assert listing.revision == last
            assert len((await store.list(b"")).items) == 5

        self.run(scenario)

    def test_conditions_are_all_or_nothing(self) -> None:
        async def scenario(stores: Stores) -> None:
            store = stores.client("a")
            old = await put(store, b"k", b"1")
            new = await put(store, b"k", b"2")
            write: list[Write] = [Put(b"w", b""), Delete(b"k")]
            for holds, fails in (
                (At(b"k", new), At(b"k", old)),
                (Present(b"k"), Absent(b"k")),
                (Absent(b"w"), Present(b"w")),
                (Absent(b"w"), At(b"w", new)),
            ):
                outcome = await store.commit([holds, fails], write)
                assert outcome == Conflict(fails.key)
            assert await store.get(b"w") is None
            held = await store.commit([At(b"k", new), Present(b"k"), Absent(b"w")], write)
            assert isinstance(held, Committed)
            assert await store.get(b"k") is None
            written = await store.get(b"w")
            assert written is not None
            assert written.revision == held.revision

        self.run(scenario)

    def test_deleting_an_absent_key_is_no_error(self) -> None:
        async def scenario(stores: Stores) -> None:
            assert isinstance(await stores.client("a").commit([], [Delete(b"k")]), Committed)

        self.run(scenario)

    def test_limits_are_named(self) -> None:
        async def scenario(stores: Stores) -> None:
            store = stores.client("a")
            most = [Put(b"%d" % n, b"") for n in range(MAX_OPERATIONS)]
            assert isinstance(await store.commit([], most), Committed)
            with pytest.raises(ValueError, match="MAX_OPERATIONS"):
                await store.commit([Present(b"0")], most)
            largest = Put(b"k", bytes(MAX_VALUE_BYTES))
            assert isinstance(await store.commit([], [largest]), Committed)
            with pytest.raises(ValueError, match="MAX_VALUE_BYTES"):
                await store.commit([], [Put(b"k", bytes(MAX_VALUE_BYTES + 1))])
            with pytest.raises(ValueError, match="twice"):
                await store.commit([], [Put(b"k", b""), Delete(b"k")])

        self.run(scenario)

    def test_an_expired_lease_takes_its_keys_in_one_commit(self) -> None:
        async def scenario(stores: Stores) -> None:
            store = stores.client("a")
            ttl_s = await store.grant("l", self.ttl_s)
            await put(store, b"a", b"", "l")
            await put(store, b"b", b"", "l")
            last = await put(store, b"c", b"")
            await stores.advance(ttl_s + 0.01)
            changes = await anext(store.watch(b"", last))
            assert changes.revision > last
            assert {change.key for change in changes.changes} == {b"a", b"b"}
            assert all(change.item is None for change in changes.changes)
            assert [item.key for item in (await store.list(b"")).items] == [b"c"]
            assert await store.renew("l") is None
            assert await store.commit([], [Put(b"d", b"", "l")]) == Conflict(b"d")

        self.run(scenario)

    def test_renewal_keeps_a_lease_and_is_counted_from_now(self) -> None:
        async def scenario(stores: Stores) -> None:
            store = stores.client("a")
            ttl_s = await store.grant("l", self.ttl_s)
            await put(store, b"a", b"", "l")
            for _ in range(3):
                await stores.advance(ttl_s * 0.6)
                assert await store.renew("l") == ttl_s
            await stores.advance(ttl_s * 0.6)
            assert await store.grant("l", self.ttl_s) == ttl_s
            await stores.advance(ttl_s * 0.6)
            assert await store.get(b"a") is not None
            await stores.advance(ttl_s * 0.6)
            assert await store.get(b"a") is None

        self.run(scenario)

    def test_revoking_takes_the_keys_at_once(self) -> None:
        async def scenario(stores: Stores) -> None:
            store = stores.client("a")
            await store.grant("l", self.ttl_s)
            await put(store, b"a", b"", "l")
            last = await put(store, b"b", b"", "l")
            await store.revoke("l")
            await store.revoke("l")
            changes = await anext(store.watch(b"", last))
            assert {change.key for change in changes.changes} == {b"a", b"b"}
            assert (await store.list(b"")).revision == changes.revision
            assert await store.renew("l") is None

        self.run(scenario)

    def test_a_put_changes_the_lease_of_its_key(self) -> None:
        async def scenario(stores: Stores) -> None:
            store = stores.client("a")
            for lease in ("l", "m"):
                await store.grant(lease, self.ttl_s)
            for key in (b"freed", b"moved", b"kept"):
                await put(store, key, b"", "l")
            await put(store, b"freed", b"")
            await put(store, b"moved", b"", "m")
            await store.revoke("l")
            assert [item.key for item in (await store.list(b"")).items] == [b"freed", b"moved"]
            await store.revoke("m")
            assert [item.key for item in (await store.list(b"")).items] == [b"freed"]

        self.run(scenario)

    def test_a_deleted_key_leaves_its_lease(self) -> None:
        async def scenario(stores: Stores) -> None:
            store = stores.client("a")
            await store.grant("l", self.ttl_s)
            await put(store, b"k", b"", "l")
            await store.commit([], [Delete(b"k")])
            await put(store, b"k", b"new")
            await store.revoke("l")
            assert await store.get(b"k") is not None

        self.run(scenario)

    def test_a_watch_replays_and_follows_without_a_gap(self) -> None:
        async def scenario(stores: Stores) -> None:
            store, other = stores.client("a"), stores.client("b")
            start = (await store.list(b"")).revision
            expected = [await put(other, b"n/1", b"x")]
            await put(other, b"m", b"outside")
            watch = store.watch(b"n/", start)
            both = await other.commit([], [Put(b"n/2", b"y"), Delete(b"n/1"), Put(b"z", b"")])
            assert isinstance(both, Committed)
            expected.append(both.revision)
            seen = [await anext(watch), await anext(watch)]
            assert [changes.revision for changes in seen] == expected
            assert {change.key: change.item for change in seen[1].changes} == {
                b"n/1": None,
                b"n/2": Item(b"n/2", b"y", both.revision, both.revision),
            }
            async with asyncio.TaskGroup() as tasks:
                later = tasks.create_task(after(watch))
                await asyncio.sleep(0)
                await put(other, b"m", b"outside")
                last = await put(other, b"n/3", b"")
            assert later.result().revision == last

        self.run(scenario)

    def test_a_watch_resumes_and_watches_are_independent(self) -> None:
        async def scenario(stores: Stores) -> None:
            store = stores.client("a")
            start = (await store.list(b"")).revision
            revisions = [await put(store, b"k", b"%d" % n) for n in range(6)]
            for skip in range(6):
                from_revision = revisions[skip - 1] if skip else start
                watch = store.watch(b"", from_revision)
                seen = [(await anext(watch)).revision for _ in revisions[skip:]]
                assert seen == revisions[skip:]

        self.run(scenario)

    def test_a_cancelled_wait_loses_nothing(self) -> None:
        async def scenario(stores: Stores) -> None:
            store = stores.client("a")
            watch = store.watch(b"", (await store.list(b"")).revision)
            waiting = asyncio.create_task(after(watch))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            last = await put(store, b"k", b"")
            item = Item(b"k", b"", last, last)
            assert await anext(watch) == Changes(last, (Change(b"k", item),))

        self.run(scenario)

    def test_a_compacted_range_is_an_error(self) -> None:
        async def scenario(stores: Stores) -> None:
            store = stores.client("a")
            revisions = [await put(store, b"k", b"%d" % n) for n in range(4)]
            await stores.compact(revisions[1])
            with pytest.raises(WatchCompacted):
                await anext(store.watch(b"", revisions[0]))
            assert (await anext(store.watch(b"", revisions[1]))).revision == revisions[2]

        self.run(scenario)

    def test_a_closed_client_is_unavailable_and_its_leases_live_on(self) -> None:
        async def scenario(stores: Stores) -> None:
            store, other = stores.client("a"), stores.client("b")
            await store.grant("l", self.ttl_s)
            last = await put(store, b"k", b"", "l")
            waiting = asyncio.create_task(after(store.watch(b"", last)))
            await asyncio.sleep(0)
            await store.close()
            with pytest.raises(StoreUnavailable):
                await waiting
            with pytest.raises(StoreUnavailable):
                await store.get(b"k")
            assert await other.get(b"k") is not None

        self.run(scenario)


async def put(store: Store, key: bytes, value: bytes, lease: str | None = None) -> int:
    """Write one key; the revision of it."""
    outcome = await store.commit([], [Put(key, value, lease)])
    assert isinstance(outcome, Committed)
    return outcome.revision


async def after(watch: AsyncIterator[Changes]) -> Changes:
    """The next changes, as a coroutine that a task can run."""
    return await anext(watch)
