"""What every store must do (S1, S2, S3, S5, S7), also while there are faults.

For authors of stores: derive `class TestMine(StoreContract)` and define `open`, which yields a
`Stores`: it makes clients of one empty store, and has verbs for what can really happen to that
store. The scenarios use nothing else. Let a verb do the real thing if possible (stop the server,
hold its lock, cut the connection); only then does the suite prove something about the store.

- `client`, `advance`, `compact`: always needed.
- `outage`, `restore`: the store can't be written to. Reads may fail or go on.
- `lose_next_reply`: a commit that happens, now or soon, and whose caller is not told.
- `slow`: commits take longer, as on a busy disk or network.
- `break_watches`: connections of one client that break while the store is well.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Protocol

import pytest

from domicile.core.state.txn import (
    MAX_OPERATIONS,
    MAX_VALUE_BYTES,
    Absent,
    At,
    Change,
    Changes,
    Committed,
    Condition,
    Conflict,
    Delete,
    Item,
    Present,
    Put,
    Unknown,
    Write,
)
from domicile.errors import StoreRewound, StoreUnavailable, WatchCompacted
from domicile.ports.store import Store


class Stores(Protocol):
    """One empty store and what a test may do to it."""

    def client(self, by: str) -> Store:
        """A client of the store, as in another process."""
        ...

    async def advance(self, seconds: float) -> None:
        """Let that much of the store's time pass."""
        ...

    async def compact(self, revision: int) -> None:
        """Drop the changes up to a revision."""
        ...

    async def outage(self) -> None:
        """From now on no client can write: calls end in time with `StoreUnavailable` or
        `Unknown`."""
        ...

    async def restore(self) -> None:
        """End the outage."""
        ...

    async def lose_next_reply(self, client: Store) -> None:
        """The next commit of this client happens, but the client is not told."""
        ...

    async def slow(self, seconds: float) -> None:
        """From now on a commit takes at least that many seconds; less than a call may take."""
        ...

    async def break_watches(self, client: Store) -> None:
        """Every watch of this client that waits now ends with `StoreUnavailable`."""
        ...


class StoreContract(ABC):
    """Derive a test class from this and define `open`."""

    ttl_s: float = 5.0
    """The ttl in seconds that leases ask for. A store on real time may want it small."""

    patience_s: float = 10.0
    """Seconds of real time that one scenario may take."""

    slow_s: float = 0.05
    """Seconds that `Stores.slow` is given."""

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

    def test_a_watch_from_the_future_means_that_history_went_back(self) -> None:
        async def scenario(stores: Stores) -> None:
            store = stores.client("a")
            last = await put(store, b"k", b"")
            with pytest.raises(StoreRewound):
                await anext(store.watch(b"", last + 1))

        self.run(scenario)

    def test_competing_clients_lose_no_update(self) -> None:
        async def scenario(stores: Stores) -> None:
            async def add(store: Store, times: int) -> list[int]:
                won: list[int] = []
                while len(won) < times:
                    item = await store.get(b"n")
                    held: Condition = At(b"n", item.revision) if item else Absent(b"n")
                    value = int(item.value) + 1 if item else 1
                    outcome = await store.commit([held], [Put(b"n", b"%d" % value)])
                    if isinstance(outcome, Committed):
                        won.append(outcome.revision)
                return won

            clients = [stores.client(f"c{n}") for n in range(4)]
            won = await asyncio.gather(*[add(client, 5) for client in clients])
            item = await clients[0].get(b"n")
            assert item is not None
            assert item.value == b"20"
            assert len({revision for each in won for revision in each}) == 20

        self.run(scenario)

    def test_a_lease_runs_out_for_watchers_though_its_holder_is_gone(self) -> None:
        async def scenario(stores: Stores) -> None:
            holder, other = stores.client("a"), stores.client("b")
            ttl_s = await holder.grant("l", self.ttl_s)
            last = await put(holder, b"k", b"", "l")
            waiting = asyncio.create_task(after(other.watch(b"", last)))
            await asyncio.sleep(0)
            await holder.close()
            await stores.advance(ttl_s + 0.01)
            assert [change.key for change in (await waiting).changes] == [b"k"]

        self.run(scenario)

    def test_a_lost_reply_is_unknown_and_the_commit_is_found(self) -> None:
        async def scenario(stores: Stores) -> None:
            store, other = stores.client("a"), stores.client("b")
            last = await put(store, b"other", b"")
            await stores.lose_next_reply(store)
            asked: list[Write] = [Put(b"k", b"txn 1"), Delete(b"other")]
            assert await store.commit([Absent(b"k")], asked) == Unknown()
            changes = await anext(other.watch(b"", last))
            assert {change.key for change in changes.changes} == {b"k", b"other"}
            for client in (store, other):
                found = await client.get(b"k")
                assert found is not None
                assert (found.value, found.revision) == (b"txn 1", changes.revision)
            assert await store.commit([Absent(b"k")], asked) == Conflict(b"k")

        self.run(scenario)

    def test_nothing_is_written_during_an_outage_and_all_goes_on_after_it(self) -> None:
        async def scenario(stores: Stores) -> None:
            store = stores.client("a")
            last = await put(store, b"k", b"before")
            await stores.outage()
            for key in (b"x", b"y"):
                with suppress(StoreUnavailable):
                    assert await store.commit([], [Put(key, b""), Put(b"k", key)]) == Unknown()
            with pytest.raises(StoreUnavailable):
                await store.grant("l", self.ttl_s)
            with pytest.raises(StoreUnavailable):
                await store.renew("l")
            await stores.restore()
            # Requests may still be under way; each of them must be done whole or not at all.
            assert await put(store, b"after", b"") > last
            listing = await store.list(b"")
            found = {item.key: item for item in listing.items}
            assert found[b"k"].value in (b"before", b"x", b"y")
            for key in (b"x", b"y"):
                if found[b"k"].value == key:
                    assert found[b"k"].revision == found[key].revision
            assert await store.grant("l", self.ttl_s) == await store.renew("l")

        self.run(scenario)

    def test_after_an_outage_a_lease_and_its_keys_are_there_or_gone_together(self) -> None:
        async def scenario(stores: Stores) -> None:
            store = stores.client("a")
            ttl_s = await store.grant("l", self.ttl_s)
            await put(store, b"k", b"", "l")
            await stores.outage()
            await stores.advance(ttl_s + 0.01)
            await stores.restore()
            renewed = await store.renew("l")
            assert (await store.get(b"k") is None) == (renewed is None)

        self.run(scenario)

    def test_a_watch_outlasts_an_outage_or_can_be_resumed(self) -> None:
        async def scenario(stores: Stores) -> None:
            store, other = stores.client("a"), stores.client("b")
            last = await put(store, b"k", b"")
            follower = Follower(store, last)
            async with asyncio.TaskGroup() as tasks:
                following = tasks.create_task(follower.follow(3))
                await asyncio.sleep(0)
                await stores.outage()
                await stores.restore()
                expected = [await put(other, b"k", b"%d" % n) for n in range(3)]
                await following
            assert follower.seen == expected

        self.run(scenario)

    def test_a_broken_watch_says_so_and_resumes_without_a_gap(self) -> None:
        async def scenario(stores: Stores) -> None:
            store, other = stores.client("a"), stores.client("b")
            last = await put(store, b"k", b"")
            watch = store.watch(b"", last)
            waiting = asyncio.create_task(after(watch))
            expected = [await put(other, b"k", b"1")]
            assert (await waiting).revision == expected[0]
            waiting = asyncio.create_task(after(watch))
            await asyncio.sleep(0)
            await stores.break_watches(store)
            with pytest.raises(StoreUnavailable):
                await waiting
            expected += [await put(other, b"k", b"%d" % n) for n in range(3)]
            with pytest.raises(StoreUnavailable):
                await anext(watch)
            follower = Follower(store, expected[0])
            await follower.follow(3)
            assert [expected[0], *follower.seen] == expected

        self.run(scenario)

    def test_what_was_compacted_during_a_break_must_be_listed(self) -> None:
        async def scenario(stores: Stores) -> None:
            store, other = stores.client("a"), stores.client("b")
            last = await put(store, b"k", b"")
            waiting = asyncio.create_task(after(store.watch(b"", last)))
            await asyncio.sleep(0)
            await stores.break_watches(store)
            with pytest.raises(StoreUnavailable):
                await waiting
            missed = [await put(other, b"k", b"%d" % n) for n in range(3)]
            await stores.compact(missed[1])
            with pytest.raises(WatchCompacted):
                await anext(store.watch(b"", last))
            listing = await store.list(b"")
            assert listing.items == (Item(b"k", b"2", last, missed[2]),)
            newest = await put(other, b"k", b"")
            assert (await anext(store.watch(b"", listing.revision))).revision == newest

        self.run(scenario)

    def test_a_commit_that_its_caller_gave_up_is_done_whole_or_not_at_all(self) -> None:
        async def scenario(stores: Stores) -> None:
            store = stores.client("a")
            last = await put(store, b"k", b"")
            await stores.slow(self.slow_s)
            for n in range(4):
                both: list[Write] = [Put(b"a", b"%d" % n), Put(b"b", b"%d" % n)]
                given_up = asyncio.create_task(store.commit([], both))
                await asyncio.sleep(self.slow_s * n / 3)
                given_up.cancel()
                await asyncio.gather(given_up, return_exceptions=True)
            end = await put(store, b"end", b"")
            await stores.slow(0.0)
            seen: list[Changes] = []
            watch = store.watch(b"", last)
            while not seen or seen[-1].revision < end:
                seen.append(await anext(watch))
            for changes in seen[:-1]:
                assert [change.key for change in changes.changes] == [b"a", b"b"]
                values = {change.item.value for change in changes.changes if change.item}
                assert len(values) == 1

        self.run(scenario)

    def test_leases_are_kept_by_slow_renewals(self) -> None:
        async def scenario(stores: Stores) -> None:
            store = stores.client("a")
            ttl_s = await store.grant("l", self.ttl_s)
            await put(store, b"k", b"", "l")
            await stores.slow(self.slow_s)
            for _ in range(3):
                await stores.advance(ttl_s * 0.6)
                assert await store.renew("l") == ttl_s
            assert await store.get(b"k") is not None

        self.run(scenario)


class Follower:
    """A watch that is started again where it broke, as callers must do."""

    def __init__(self, store: Store, seen: int) -> None:
        self.seen: list[int] = []
        self._store = store
        self._from = seen

    async def follow(self, count: int) -> None:
        """Follow until that many commits were seen."""
        while len(self.seen) < count:
            with suppress(StoreUnavailable):
                async for changes in self._store.watch(b"", self._from):
                    self._from = changes.revision
                    self.seen.append(changes.revision)
                    if len(self.seen) >= count:
                        return
            await asyncio.sleep(0)


async def put(store: Store, key: bytes, value: bytes, lease: str | None = None) -> int:
    """Write one key; returns its revision."""
    outcome = await store.commit([], [Put(key, value, lease)])
    assert isinstance(outcome, Committed)
    return outcome.revision


async def after(watch: AsyncIterator[Changes]) -> Changes:
    """The next changes, as a coroutine that a task can run."""
    return await anext(watch)
