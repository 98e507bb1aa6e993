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

Further verbs are optional, each in a protocol of its own: `Settles`, `Rewinds`, `Crashes`,
`StepsWall`, `LosesHints`. A scenario that needs one of them is skipped by name if `open` yields an
object without it. A store on a server needs `Settles` too: otherwise "is waiting" is not proved.
`domicile.testing.suites.byte_proxy` has the faults of a connection.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import NoReturn, Protocol, TypeVar, runtime_checkable

import pytest

from domicile.core.state.txn import (
    MAX_COMMIT_BYTES,
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
from domicile.ports.store import (
    Kept,
    NeedsTicks,
    OffersThreads,
    Store,
    ThreadedStore,
    writes_one_key,
)

T = TypeVar("T")

PACED_S, PACE, PACE_TRIES = 1.0, 1.7, 20
"""A ttl in seconds, how many times as long its lease may last where store time is ticked, and how
often that is tried."""


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


@runtime_checkable
class Settles(Protocol):
    """Optional: tells when calls that have begun wait at the store."""

    async def settled(self) -> None:
        """Return once every watch that is being read has seen all commits so far and waits."""
        ...


@runtime_checkable
class Rewinds(Protocol):
    """Optional: the store can be put back, as by a backup or a failover that loses commits (S5)."""

    async def snapshot(self) -> object:
        """Everything that is stored now."""
        ...

    async def rewind(self, snapshot: object) -> None:
        """Lose every commit since a snapshot. Clients of the lost history are not told of it."""
        ...


@runtime_checkable
class Crashes(Protocol):
    """Optional: the store has a server, which can die."""

    async def kill(self) -> None:
        """SIGKILL to the server."""
        ...

    async def revive(self) -> None:
        """Start the server on what it left behind; returns once it answers."""
        ...


@runtime_checkable
class StepsWall(Protocol):
    """Optional: the wall clock of the store can be stepped (S4)."""

    async def step_wall(self, by_s: float) -> None:
        """Step the clock from which the store makes its time."""
        ...


@runtime_checkable
class LosesHints(Protocol):
    """Optional: the store pushes hints of new commits, which can get lost (S10)."""

    async def lose_hints(self, client: Store) -> None:
        """From now on no hint reaches this client, and it does not notice that."""
        ...


class StoreContract(ABC):
    """Derive a test class from this and define `open`."""

    ttl_s: float = 5.0
    """The ttl in seconds that leases ask for. A store on real time may want it small, but not below
    the least ttl that it grants (S2). Where `advance` is exact on top of real time it may be large:
    then a slow machine ends no lease."""

    slack_s: float = 0.0
    """Seconds beyond its ttl after which a lease has ended for sure."""

    races: int = 5
    """How often a scenario repeats a race. A store on real time may want it small."""

    patience_s: float = 10.0
    """Seconds of real time that one scenario may take."""

    slow_s: float = 0.05
    """Seconds that `Stores.slow` is given."""

    one_key: bool = False
    """Whether a commit promises one written key only (S8). Scenarios with commits of several keys
    are skipped then."""

    forgives_rewinds: bool = True
    """Whether a client goes on after a rewind that lost only what it never saw."""

    @abstractmethod
    def open(self) -> AbstractAsyncContextManager[Stores]:
        """A fresh, empty store."""

    def run(self, scenario: Callable[[Stores], Awaitable[None]]) -> None:
        """Run one scenario on a fresh store and a fresh event loop."""

        async def main() -> None:
            async with asyncio.timeout(self.patience_s), self.open() as stores:
                await scenario(stores)

        asyncio.run(main())

    def needs_several_keys(self) -> None:
        """Skip a scenario whose commits write several keys, if the store can't do that."""
        if self.one_key:
            pytest.skip("this store commits one key at a time (S8)")

    def test_a_store_of_single_keys_says_so_and_refuses_more(self) -> None:
        async def scenario(stores: Stores) -> None:
            store = stores.client("a")
            assert writes_one_key(store) == self.one_key
            if not self.one_key:
                return
            with pytest.raises(ValueError, match="S8"):
                await store.commit([], [Put(b"a", b""), Put(b"b", b"")])
            with pytest.raises(ValueError, match="S8"):
                await store.commit([At(b"a", 1)], [Put(b"b", b"")])
            assert await store.commit([Present(b"a")], [Put(b"b", b"")]) == Conflict(b"a")
            first = await put(store, b"a", b"")
            wrong: list[Condition] = [Absent(b"b"), Absent(b"a")]
            assert await store.commit(wrong, [Put(b"b", b"")]) == Conflict(b"a")
            wrong = [Present(b"a"), Present(b"b")]
            assert await store.commit(wrong, [Put(b"b", b"")]) == Conflict(b"b")
            held: list[Condition] = [Absent(b"b"), Present(b"a")]
            assert isinstance(await store.commit(held, [Put(b"b", b"")]), Committed)
            assert await store.commit([At(b"a", first + 1)], [Delete(b"a")]) == Conflict(b"a")
            assert isinstance(await store.commit([At(b"a", first)], [Delete(b"a")]), Committed)
            assert [item.key for item in (await store.list(b"")).items] == [b"b"]

        self.run(scenario)

    def test_one_lost_reply_is_unknown_and_the_write_is_found(self) -> None:
        async def scenario(stores: Stores) -> None:
            store, other = stores.client("a"), stores.client("b")
            last = await put(store, b"other", b"")
            await stores.lose_next_reply(store)
            assert await store.commit([Absent(b"k")], [Put(b"k", b"txn 1")]) == Unknown()
            changes = await anext(other.watch(b"", last))
            assert [change.key for change in changes.changes] == [b"k"]
            for client in (store, other):
                found = await client.get(b"k")
                assert found is not None
                assert (found.value, found.revision) == (b"txn 1", changes.revision)
            assert await store.commit([Absent(b"k")], [Put(b"k", b"txn 1")]) == Conflict(b"k")

        self.run(scenario)

    def test_a_lease_that_ends_takes_all_of_its_keys(self) -> None:
        """In one commit or, where a commit has one key, one after the other."""

        async def scenario(stores: Stores) -> None:
            store = stores.client("a")
            for lease, end in (("l", "expires"), ("m", "is revoked")):
                ttl_s = await store.grant(lease, self.ttl_s)
                await put(store, b"a", b"", lease)
                last = await put(store, b"b", b"", lease)
                watch = store.watch(b"", last)
                if end == "expires":
                    await stores.advance(ttl_s + 0.01 + self.slack_s)
                else:
                    await store.revoke(lease)
                gone: list[bytes] = []
                while len(gone) < 2:
                    gone += [change.key for change in (await anext(watch)).changes]
                assert sorted(gone) == [b"a", b"b"]
                assert (await store.list(b"")).items == ()
                assert await store.renew(lease) is None
                assert await store.commit([], [Put(b"d", b"", lease)]) == Conflict(b"d")

        self.run(scenario)

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
        self.needs_several_keys()

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
        self.needs_several_keys()

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

    def test_a_commit_has_a_limit_in_all(self) -> None:
        self.needs_several_keys()

        async def scenario(stores: Stores) -> None:
            store = stores.client("a")
            parts = 4
            part = bytes(MAX_COMMIT_BYTES // parts - 1)
            writes = [Put(b"%d" % n, part) for n in range(parts)]
            assert isinstance(await store.commit([], writes), Committed)
            assert [item.value for item in (await store.list(b"")).items] == [part] * parts
            with pytest.raises(ValueError, match="MAX_COMMIT_BYTES"):
                await store.commit([Absent(b"k")], writes)
            assert isinstance(await store.commit([], [Put(b"small", b"")]), Committed)

        self.run(scenario)

    def test_an_expired_lease_takes_its_keys_in_one_commit(self) -> None:
        self.needs_several_keys()

        async def scenario(stores: Stores) -> None:
            store = stores.client("a")
            ttl_s = await store.grant("l", self.ttl_s)
            await put(store, b"a", b"", "l")
            await put(store, b"b", b"", "l")
            last = await put(store, b"c", b"")
            await stores.advance(ttl_s + 0.01 + self.slack_s)
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
        self.needs_several_keys()

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
        self.needs_several_keys()

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
                await settled(stores)
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
            await settled(stores)
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
            await settled(stores)
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
            # Far ahead: others may commit to a store that several clusters share.
            with pytest.raises(StoreRewound):
                await anext(store.watch(b"", last + 1_000_000))

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
            await settled(stores)
            await holder.close()
            await stores.advance(ttl_s + 0.01 + self.slack_s)
            assert [change.key for change in (await waiting).changes] == [b"k"]

        self.run(scenario)

    def test_a_lost_reply_is_unknown_and_the_commit_is_found(self) -> None:
        self.needs_several_keys()

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
        self.needs_several_keys()

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
            await stores.advance(ttl_s + 0.01 + self.slack_s)
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
                await settled(stores)
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
            await settled(stores)
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
            await settled(stores)
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
        self.needs_several_keys()

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

    def test_renewals_that_race_with_the_end_of_a_lease_agree(self) -> None:
        """S3: whichever comes first is right for all, and the keys go with the lease."""

        async def scenario(stores: Stores) -> None:
            clients = [stores.client(name) for name in "abc"]
            for n in range(self.races):
                lease, key = f"l{n}", b"k%d" % n
                ttl_s = await clients[0].grant(lease, self.ttl_s)
                await put(clients[0], key, b"", lease)
                await stores.advance(ttl_s * 0.7)
                # A renewal that comes before the second step makes the lease outlast it.
                second = asyncio.create_task(stores.advance(ttl_s * 0.7 + self.slack_s))
                found = await asyncio.gather(*[client.renew(lease) for client in clients])
                await second
                found.append(await clients[1].renew(lease))
                assert len(set(found)) == 1, found
                there = await clients[2].get(key)
                assert (there is None) == (found[0] is None)

        self.run(scenario)

    # what only some stores can show

    def test_a_rewind_is_seen_by_every_client_that_knew_more(self) -> None:
        async def scenario(stores: Stores) -> None:
            if not isinstance(stores, Rewinds):
                without("snapshot and rewind")
            store, other = stores.client("a"), stores.client("b")
            await store.grant("l", self.ttl_s)
            kept = await put(store, b"k", b"kept")
            backup = await stores.snapshot()
            lost = await put(store, b"k", b"lost")
            assert (await other.list(b"")).revision == lost
            waiting = asyncio.create_task(after(other.watch(b"", lost)))
            await settled(stores)
            await stores.rewind(backup)
            with pytest.raises(StoreRewound):
                await store.commit([], [Put(b"k", b"more")])
            # One of the two is the first to notice it; the watch must end in any case.
            with suppress(StoreRewound):
                await other.renew("l")
            with pytest.raises(StoreRewound):
                await waiting
            fresh = stores.client("fresh")
            listing = await fresh.list(b"")
            assert listing.items == (Item(b"k", b"kept", kept, kept),)
            assert isinstance(await fresh.commit([At(b"k", kept)], [Delete(b"k")]), Committed)

        self.run(scenario)

    def test_a_rewind_is_seen_though_it_was_overtaken(self) -> None:
        """S5: the store has a higher revision than the client, and another past."""

        async def scenario(stores: Stores) -> None:
            if not isinstance(stores, Rewinds):
                without("snapshot and rewind")
            readers = {call: stores.client(call) for call in ("get", "list", "renew", "watch")}
            writer = stores.client("commit")
            await put(writer, b"k", b"before")
            backup = await stores.snapshot()
            lost = [await put(writer, b"k", b"lost %d" % n) for n in range(2)][-1]
            for reader in readers.values():
                assert await reader.renew("l") is None
                assert (await reader.list(b"")).revision == lost
            await stores.rewind(backup)
            newest = 0
            while newest <= lost + 1:
                newest = await put(stores.client("fresh"), b"k", b"instead")
            with pytest.raises(StoreRewound):
                await readers["get"].get(b"k")
            with pytest.raises(StoreRewound):
                await readers["list"].list(b"")
            with pytest.raises(StoreRewound):
                await readers["renew"].renew("l")
            with pytest.raises(StoreRewound):
                await anext(readers["watch"].watch(b"", lost))
            with pytest.raises(StoreRewound):
                await writer.commit([Present(b"k")], [Put(b"k", b"wrong")])
            item = await stores.client("last").get(b"k")
            assert item == Item(b"k", b"instead", item.created if item else 0, newest)

        self.run(scenario)

    def test_a_rewind_that_lost_nothing_that_a_client_knew_leaves_it_alone(self) -> None:
        async def scenario(stores: Stores) -> None:
            if not isinstance(stores, Rewinds):
                without("snapshot and rewind")
            if not self.forgives_rewinds:
                pytest.skip("this store tells every client of a rewind")
            store = stores.client("a")
            known = await put(store, b"k", b"")
            backup = await stores.snapshot()
            await put(stores.client("b"), b"k", b"lost")
            await stores.rewind(backup)
            assert await store.get(b"k") == Item(b"k", b"", known, known)

        self.run(scenario)

    def test_what_was_acknowledged_survives_the_death_of_the_server(self) -> None:
        self.needs_several_keys()

        async def scenario(stores: Stores) -> None:
            if not isinstance(stores, Crashes):
                without("kill and revive")
            acknowledged: dict[bytes, int] = {}
            asked: list[bytes] = []
            begun = asyncio.Event()

            async def commit(name: bytes) -> None:
                store = stores.client(name.decode())
                for n in range(100_000):
                    key = b"%s/%d" % (name, n)
                    asked.append(key)
                    both: list[Write] = [Put(key + b"/1", b""), Put(key + b"/2", b"")]
                    try:
                        outcome = await store.commit([], both)
                    except StoreUnavailable:
                        return
                    if not isinstance(outcome, Committed):
                        return
                    acknowledged[key] = outcome.revision
                    if len(acknowledged) > 20:
                        begun.set()

            holder = stores.client("holder")
            ttl_s = await holder.grant("l", self.ttl_s)
            await put(holder, b"leased", b"", "l")
            async with asyncio.TaskGroup() as tasks:
                for name in (b"a", b"b", b"c", b"d"):
                    tasks.create_task(commit(name))
                await begun.wait()
                await stores.kill()
            await stores.revive()
            fresh = stores.client("fresh")
            listing = await returned(lambda: fresh.list(b""))
            found = {item.key: item.revision for item in listing.items}
            for key in asked:
                pair = (found.get(key + b"/1"), found.get(key + b"/2"))
                assert pair[0] == pair[1], "a commit was done in part"
                if key in acknowledged:
                    assert pair[0] == acknowledged[key]
            assert await put(fresh, b"after", b"") > max(acknowledged.values())
            # S4: while the server is away, no time passes.
            assert b"leased" in found
            assert await returned(lambda: holder.renew("l")) == ttl_s

        self.run(scenario)

    def test_a_renewal_that_was_acknowledged_survives_the_death_of_the_server(self) -> None:
        """S4: a tick may be forgotten by a crash, a renewal never."""

        async def scenario(stores: Stores) -> None:
            if not isinstance(stores, Crashes):
                without("kill and revive")
            holder, other = stores.client("holder"), stores.client("other")
            ttl_s = await holder.grant("l", self.ttl_s)
            await put(other, b"leased", b"", "l")
            await stores.advance(ttl_s * 0.7)
            assert await holder.renew("l") == ttl_s
            await stores.kill()
            await stores.revive()
            await stores.advance(ttl_s * 0.6)
            assert await returned(lambda: other.get(b"leased")) is not None
            assert await returned(lambda: holder.renew("l")) == ttl_s

        self.run(scenario)

    def test_time_that_is_ticked_keeps_pace(self) -> None:
        """S4: a tick adds at most `MAX_TICK_S`, so ticks must come more often. Otherwise a lease
        lasts several times its ttl."""

        async def scenario(stores: Stores) -> None:
            store = stores.client("a")
            if not isinstance(store, NeedsTicks) or not store.tick_s:
                without("ticks")
            loop = asyncio.get_running_loop()
            took_s: list[float] = []
            # On a busy machine ticks come late at times, and time is late with them.
            while not took_s or (took_s[-1] > PACE * PACED_S and len(took_s) < PACE_TRIES):
                began = loop.time()
                await store.grant("l", PACED_S)
                await put(store, b"k", b"", "l")
                while await store.get(b"k") is not None:
                    await asyncio.sleep(store.tick_s)  # not `advance`, which ticks by itself
                    await store.tick()
                took_s.append(loop.time() - began)
            assert min(took_s) <= PACE * PACED_S

        self.run(scenario)

    @pytest.mark.parametrize("step_s", [3600.0, -3600.0])
    def test_a_step_of_the_wall_clock_ends_no_lease_and_keeps_none(self, step_s: float) -> None:
        async def scenario(stores: Stores) -> None:
            if not isinstance(stores, StepsWall):
                without("step_wall")
            store, other = stores.client("a"), stores.client("b")
            ttl_s = await store.grant("l", self.ttl_s)
            await put(store, b"k", b"", "l")
            await stores.step_wall(step_s)
            await put(other, b"other", b"")
            assert await other.get(b"k") is not None
            assert await store.renew("l") == ttl_s
            await stores.advance(ttl_s * 0.5)
            assert await other.get(b"k") is not None
            await stores.advance(ttl_s * 0.6 + self.slack_s)
            assert await other.get(b"k") is None
            assert await store.renew("l") is None

        self.run(scenario)

    @pytest.mark.parametrize("step_s", [3600.0, -3600.0])
    def test_a_step_of_a_clients_wall_clock_ends_no_lease_and_keeps_none(
        self, step_s: float
    ) -> None:
        """S4: a client counts nothing by a clock that can be stepped."""

        async def scenario(stores: Stores) -> None:
            store, other = stores.client("a"), stores.client("b")
            ttl_s = await store.grant("l", self.ttl_s)
            await put(store, b"k", b"", "l")
            # What a client keeps of a renewal or a tick is of before the step.
            assert await store.renew("l") == ttl_s
            await ticked(store)
            with stepped_wall(step_s):
                await ticked(store)
                assert await store.renew("l") == ttl_s
                assert await other.renew("l") == ttl_s
                assert await other.get(b"k") is not None
                await stores.advance(ttl_s + 0.01 + self.slack_s)
                assert await other.get(b"k") is None
                assert await store.renew("l") is None

        self.run(scenario)

    @pytest.mark.parametrize("by", ["client", "thread side"])
    def test_a_lost_hint_is_made_good_by_the_next_renewal(self, by: str) -> None:
        """S10: by the very next, and not by what else a client may ask of its own accord."""

        async def scenario(stores: Stores) -> None:
            if not isinstance(stores, LosesHints):
                without("lose_hints")
            store, other = stores.client("a"), stores.client("b")
            ttl_s = await store.grant("l", self.ttl_s)
            beside = thread_side(store, b"") if by == "thread side" else None

            async def renew() -> float | None:
                if beside is None:
                    return await store.renew("l")
                return (await asyncio.wrap_future(beside.keep("l", b"k"))).ttl_s

            # What comes with a first renewal, as a connection, is there.
            assert await renew() == ttl_s
            count = 1 + 2 * self.races
            follower = Follower(store, (await store.list(b"")).revision)
            following = asyncio.create_task(follower.follow(count))
            expected = [await put(other, b"k", b"1")]
            await follower.has_seen(1)
            await settled(stores)
            await stores.lose_hints(store)
            for _ in range(self.races):
                expected += [await put(other, b"k", b"%d" % n) for n in range(2)]
                # The store's time is new: no client has to make it advance.
                await ticked(other)
                assert await renew() == ttl_s
                await settled(stores)
                assert follower.seen == expected
            await following

        self.run(scenario)

    def test_a_lease_is_kept_while_the_loop_is_blocked(self) -> None:
        """L1: the thread side renews and reads the own record. Its answers need no turn here."""

        async def scenario(stores: Stores) -> None:
            store, other = stores.client("a"), stores.client("b")
            ttl_s = await store.grant("l", self.ttl_s)
            first = await put(store, b"n/k", b"1", "l")
            beside = thread_side(store, b"n/")
            kept = Kept(ttl_s, Item(b"k", b"1", first, first))
            for _ in range(3):
                # `result` blocks this loop.
                assert beside.keep("l", b"k").result(self.patience_s) == kept
                await stores.advance(ttl_s * 0.6)
            assert beside.keep("l", b"k").result(self.patience_s) == kept
            written = beside.rewrite(b"k", first, b"2", "l").result(self.patience_s)
            assert isinstance(written, Committed)
            item = Item(b"n/k", b"2", first, written.revision)
            assert await other.get(b"n/k") == item
            changes = await anext(store.watch(b"", first))
            assert changes == Changes(written.revision, (Change(b"n/k", item),))
            for revision in (first, written.revision - 1):
                refused = beside.rewrite(b"k", revision, b"3", "l").result(self.patience_s)
                assert refused == Conflict(b"k")
            assert isinstance(beside.rewrite(b"k", 0, b"4", "l").result(self.patience_s), Committed)
            await stores.advance(ttl_s + 0.01 + self.slack_s)
            assert beside.keep("l", b"k").result(self.patience_s) == Kept(None, None)
            gone = beside.rewrite(b"k", 0, b"5", "l").result(self.patience_s)
            assert gone == Conflict(b"k")
            await store.close()
            with pytest.raises(StoreUnavailable):
                beside.keep("l", b"k").result(self.patience_s)

        self.run(scenario)

    def test_the_thread_side_belongs_to_the_history_it_was_made_in(self) -> None:
        async def scenario(stores: Stores) -> None:
            if not isinstance(stores, Rewinds):
                without("snapshot and rewind")
            store = stores.client("a")
            await store.grant("l", self.ttl_s)
            await put(store, b"k", b"1", "l")
            backup = await stores.snapshot()
            await put(store, b"k", b"2", "l")
            beside = thread_side(store, b"")
            assert beside.keep("l", b"k").result(self.patience_s).ttl_s is not None
            await stores.rewind(backup)
            for _ in range(2):
                with pytest.raises(StoreRewound):
                    beside.keep("l", b"k").result(self.patience_s)
            with pytest.raises(StoreRewound):
                beside.rewrite(b"k", 0, b"3", "l").result(self.patience_s)
            item = await stores.client("fresh").get(b"k")
            assert item is not None
            assert item.value == b"1"

        self.run(scenario)


class Follower:
    """A watch that is started again where it broke, as callers must do."""

    def __init__(self, store: Store, seen: int) -> None:
        self.seen: list[int] = []
        self._store = store
        self._from = seen

    async def has_seen(self, count: int) -> None:
        """Wait until that many commits were seen."""
        while len(self.seen) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

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


async def settled(stores: Stores) -> None:
    """Let everything that has begun come to where it waits."""
    if isinstance(stores, Settles):
        await stores.settled()
    else:
        await asyncio.sleep(0)


async def ticked(store: Store) -> None:
    """Let the time of a store advance that needs it, as a coordinator does."""
    if isinstance(store, NeedsTicks) and store.tick_s:
        await store.tick()


@contextmanager
def stepped_wall(by_s: float) -> Generator[None]:
    """The wall clock of this process is stepped, as by an operator or NTP."""
    seconds, nanoseconds = time.time, time.time_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: seconds() + by_s)
        patch.setattr(time, "time_ns", lambda: nanoseconds() + int(by_s * 1e9))
        yield


def without(verbs: str) -> NoReturn:
    """Skip a scenario because the stores lack optional verbs."""
    pytest.skip(f"these stores have no verbs {verbs}")


def thread_side(store: Store, prefix: bytes) -> ThreadedStore:
    """The part of a store for a thread; skips the scenario if it has none."""
    beside = store.beside(prefix) if isinstance(store, OffersThreads) else None
    if beside is None:
        pytest.skip("this store has no thread side")
    return beside


async def returned(call: Callable[[], Awaitable[T]]) -> T:
    """The answer of a store that comes back."""
    while True:
        with suppress(StoreUnavailable):
            return await call()
        await asyncio.sleep(0.01)
