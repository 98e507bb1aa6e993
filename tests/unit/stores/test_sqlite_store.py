"""The SQLite store: the contract, and what only it does."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlite_lab import SqliteStores, lab, opened, until

from domicile.core.state.txn import (
    Absent,
    At,
    Committed,
    Condition,
    Conflict,
    Delete,
    Present,
    Put,
    Unknown,
    Write,
)
from domicile.errors import ConfigError, StoreRewound, StoreUnavailable, WatchCompacted
from domicile.ports.store import Store
from domicile.stores.key_range import above
from domicile.stores.memory.store import MemoryStore
from domicile.stores.sqlite.file import elapsed_s
from domicile.stores.sqlite.schema import CALLS
from domicile.stores.sqlite.store import QueuedCommit, SqliteStore, commits
from domicile.testing.sim.clock import ManualClock
from domicile.testing.suites.store import StoreContract, after, put


class TestSqliteStore(StoreContract):
    patience_s = 60.0
    forgives_rewinds = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[SqliteStores]:
        with tempfile.TemporaryDirectory() as directory:
            async with lab(Path(directory) / "store.db") as stores:
                yield stores


def run(path: Path, scenario: Callable[[SqliteStores], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), lab(path / "deep" / "er" / "store.db") as stores:
            await scenario(stores)

    asyncio.run(main())
    assert not [each for each in threading.enumerate() if each.name.startswith("domicile-store")]


def test_nothing_happens_before_the_first_call(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "none" / "store.db")
    store.watch(b"", 0)
    asyncio.run(store.close())
    assert list(tmp_path.iterdir()) == []


def test_a_write_is_one_statement() -> None:
    for statement in CALLS.values():
        assert ";" not in statement
        assert statement.startswith("INSERT INTO ")


def test_the_log_tells_who_did_what_when(tmp_path: Path) -> None:
    async def scenario(stores: SqliteStores) -> None:
        one, two = stores.client("n1"), stores.client("n2")
        await one.grant("l", 5.0)
        await one.commit([], [Put(b"a", b"1", "l"), Put(b"b", b"2"), Delete(b"absent")])
        stores.now += 1.5
        await two.commit([], [Delete(b"b")])
        assert await one.commit([], [Put(b"c", b"", "gone")]) == Conflict(b"c")
        assert await one.commit([], []) == Committed(2)
        stores.now += 5.0
        assert await two.get(b"a") is None
        assert commits(stores.path) == [
            QueuedCommit(1, 1000.0, "n1", [(b"a", b"1", "l"), (b"b", b"2", None)], [], False),
            QueuedCommit(2, 1001.5, "n2", [], [b"b"], False),
            QueuedCommit(3, 1006.5, "n2", [], [b"a"], True),
        ]

    run(tmp_path, scenario)


def test_a_lease_lives_until_its_deadline_and_not_at_it(tmp_path: Path) -> None:
    async def scenario(stores: SqliteStores) -> None:
        store = stores.client("a")
        await store.grant("l", 5.0)
        stores.now += 4.999
        assert await store.renew("l") == 5.0
        stores.now += 5.0
        assert await store.renew("l") is None

    run(tmp_path, scenario)


def test_a_refused_commit_still_expires_what_is_due(tmp_path: Path) -> None:
    """Else a client with a staler clock could renew what another was told is gone."""

    async def scenario(stores: SqliteStores) -> None:
        store, stale = stores.client("a"), stores.client("b")
        await store.grant("l", 5.0)
        await put(store, b"k", b"", "l")
        stores.now += 5.0
        assert await store.commit([Present(b"k")], []) == Conflict(b"k")
        stores.now -= 1.0
        assert await stale.renew("l") is None
        assert await stale.get(b"k") is None

    run(tmp_path, scenario)


def test_a_taken_lock_is_tried_again_soon_and_not_a_second_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def scenario(stores: SqliteStores) -> None:
        store = stores.client("a")
        await put(store, b"k", b"")
        await stores.outage()
        monkeypatch.setattr(time, "sleep", waits.append)
        waiting = asyncio.ensure_future(store.commit([], [Put(b"k", b"2")]))
        await until(lambda: len(waits) > 7)
        await stores.restore()
        assert await waiting == Committed(2)
        monkeypatch.undo()

    run(tmp_path, scenario)
    assert waits[:6] == [0.001, 0.002, 0.003, 0.004, 0.005, 0.005]


def test_time_never_goes_back(tmp_path: Path) -> None:
    async def scenario(stores: SqliteStores) -> None:
        store = stores.client("a")
        await put(store, b"k", b"")
        stores.now -= 100.0
        await store.grant("l", 5.0)
        await put(store, b"k", b"")
        assert [commit.at for commit in commits(stores.path)] == [1000.0, 1000.0]
        stores.now += 104.0
        assert await store.renew("l") == 5.0

    run(tmp_path, scenario)


def test_another_boot_voids_all_leases(tmp_path: Path) -> None:
    async def scenario(stores: SqliteStores) -> None:
        store, other = stores.client("a"), stores.client("b")
        await store.grant("l", 5.0)
        last = await put(store, b"k", b"", "l")
        with opened(stores.path) as connection:
            connection.execute("UPDATE meta SET boot = 'an earlier one', time = 1e9")
        assert [c.key for c in (await anext(other.watch(b"", last))).changes] == [b"k"]
        assert await store.renew("l") is None
        await store.grant("l", 5.0)
        stores.now += 5.0
        assert await store.renew("l") is None

    run(tmp_path, scenario)


def test_nothing_due_means_nothing_written(tmp_path: Path) -> None:
    async def scenario(stores: SqliteStores) -> None:
        store = stores.client("a")
        await store.grant("l", 5.0)
        last = await put(store, b"k", b"", "l")
        waiting = asyncio.create_task(after(store.watch(b"", last)))
        await asyncio.sleep(0)
        before = wal(stores.path)
        stores.now += 0.1
        assert await store.commit([Absent(b"k")], [Put(b"x", b"")]) == Conflict(b"k")
        assert await store.commit([], [Delete(b"absent")]) == Committed(last)
        assert await store.renew("other") is None
        await store.list(b"")
        assert wal(stores.path) == before
        stores.now += 5.0
        assert (await waiting).revision == last + 1
        assert wal(stores.path) != before

    run(tmp_path, scenario)


def wal(path: Path) -> bytes:
    # As a whole process of its own: closing the file in this one would drop SQLite's locks.
    copy = path.with_name("copy")
    assert os.spawnvp(os.P_WAIT, "cp", ["cp", f"{path}-wal", str(copy)]) == 0
    return copy.read_bytes()


def test_old_commits_are_forgotten_but_idle_watches_live_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = SqliteStore(tmp_path / "store.db", kept_commits=3)
        watch = store.watch(b"other", 0)
        idle = asyncio.create_task(after(watch))
        for _ in range(6):
            last = await put(store, b"k", b"")
            await until(lambda last=last: watch._seen == last)
        with pytest.raises(WatchCompacted, match="list again"):
            await anext(store.watch(b"k", last - 4))
        assert (await anext(store.watch(b"k", last - 3))).revision == last - 2
        last = await put(store, b"other", b"")
        assert (await idle).revision == last
        assert [commit.revision for commit in commits(tmp_path / "store.db")] == [5, 6, 7]
        await store.close()

    asyncio.run(scenario())


def test_many_changes_come_in_order_and_whole(tmp_path: Path) -> None:
    async def scenario(stores: SqliteStores) -> None:
        store = stores.client("a")
        await store.grant("l", 5.0)
        for n in range(12):
            await store.commit([], [Put(b"%d/%d" % (n, m), b"", "l") for m in range(60)])
        await store.revoke("l")
        watch = store.watch(b"", 0)
        sizes = [len((await anext(watch)).changes) for _ in range(13)]
        assert sizes == [60] * 12 + [720]

    run(tmp_path, scenario)


def test_an_io_error_in_a_commit_is_unknown_and_passes(tmp_path: Path) -> None:
    async def scenario(stores: SqliteStores) -> None:
        store = stores.client("a")
        last = await put(store, b"k", b"")
        stores.disk.bad_syncs["a"] = True
        assert await store.commit([], [Put(b"k", b"lost")]) == Unknown()
        with pytest.raises(StoreUnavailable, match=r"store\.db"):
            await store.grant("l", 5.0)
        stores.disk.bad_syncs.clear()
        assert await put(store, b"k", b"new") > last

    run(tmp_path, scenario)


def test_a_watch_that_failed_once_stays_broken(tmp_path: Path) -> None:
    async def scenario(stores: SqliteStores) -> None:
        store, other = stores.client("a"), stores.client("b")
        last = await put(store, b"k", b"")
        watch = store.watch(b"", last)
        await put(other, b"k", b"new")
        stores.disk.bad_reads["a"] = threading.Event()
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await anext(watch)
        assert (await anext(store.watch(b"", last))).revision == last + 1

    run(tmp_path, scenario)


def test_closing_twice_and_while_busy(tmp_path: Path) -> None:
    async def scenario(stores: SqliteStores) -> None:
        store = stores.client("a")
        await put(store, b"k", b"")
        await stores.outage()
        busy = asyncio.create_task(store.commit([], [Put(b"k", b"")]))
        queued = asyncio.create_task(store.commit([], [Put(b"k", b"")]))
        await asyncio.sleep(0)
        await asyncio.gather(store.close(), store.close())
        for each in (busy, queued):
            with pytest.raises(StoreUnavailable):
                await each
        await store.close()

    run(tmp_path, scenario)


def test_calls_that_queue_too_long_are_refused(tmp_path: Path) -> None:
    async def scenario(stores: SqliteStores) -> None:
        store = stores.client("a")
        last = await put(store, b"k", b"")
        await stores.outage()
        calls = [store.commit([], [Put(b"k", b"%d" % n)]) for n in range(4)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(answer, StoreUnavailable) for answer in answers)
        await stores.restore()
        assert await put(store, b"k", b"") == last + 1

    run(tmp_path, scenario)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_store_is_of_no_use_in_a_forked_child(tmp_path: Path) -> None:
    async def scenario(stores: SqliteStores) -> None:
        store = stores.client("a")
        await put(store, b"k", b"")
        child = os.fork()
        if child == 0:
            call = store.get(b"k")
            try:
                call.send(None)
            except StoreUnavailable as error:
                os._exit(0 if "fork" in str(error) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0  # noqa: ASYNC222
        assert await store.get(b"k") is not None

    run(tmp_path, scenario)


def test_one_watch_has_one_reader(tmp_path: Path) -> None:
    async def scenario(stores: SqliteStores) -> None:
        store = stores.client("a")
        watch = store.watch(b"", 0)
        waiting = asyncio.create_task(after(watch))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="already being read"):
            await anext(watch)
        await put(store, b"k", b"")
        await waiting

    run(tmp_path, scenario)


def go_back(path: Path, how: str) -> None:
    """Put a store back to what `backup.db` beside it holds, or to nothing."""
    backup = path.with_name("backup.db")
    parts = [path.with_name(path.name + name) for name in ("", "-wal", "-shm")]
    if how in ("replaced", "deleted"):
        for part in parts:
            part.unlink()
        if how == "replaced":
            shutil.copy(backup, path)
        return
    with opened(path) as there, opened(backup) as here:
        if how == "other history":
            here.execute("UPDATE meta SET history = 'other', revision = 1000")
        with there.backup("main", here, "main") as copying:
            copying.step()


@asynccontextmanager
async def nobody_looks(store: SqliteStore) -> AsyncIterator[None]:
    """The thread that looks for changes is busy: where a file is gone and not yet back, it would
    begin a new store, which the copy then overwrites while it is open."""
    began, over = threading.Event(), threading.Event()

    def wait(generation: int, deadline: float) -> None:
        began.set()
        over.wait()

    busy = asyncio.create_task(store.read(wait, 0))
    try:
        await asyncio.to_thread(began.wait)
        yield
    finally:
        over.set()
        await busy


WAYS_BACK = pytest.mark.parametrize("how", ["replaced", "deleted", "older", "other history"])


async def with_backup(stores: SqliteStores, store: Store) -> int:
    await put(store, b"k", b"old")
    with opened(stores.path) as connection:
        connection.execute("VACUUM INTO ?", (str(stores.path.with_name("backup.db")),))
    return await put(store, b"k", b"new")


@WAYS_BACK
def test_a_history_that_went_back_is_told_to_all_who_knew_it(tmp_path: Path, how: str) -> None:
    async def scenario(stores: SqliteStores) -> None:
        store = stores.client("a")
        last = await with_backup(stores, store)
        known = store.watch(b"", last)
        go_back(stores.path, how)
        calls = [store.commit([], [Put(b"k", b"late")]), store.get(b"k"), store.renew("l")]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(answer, StoreRewound) for answer in answers), answers
        with pytest.raises(StoreRewound):
            await anext(known)
        listing = await store.list(b"")
        left = [] if how == "deleted" else [b"old"]
        assert [item.value for item in listing.items] == left
        assert await put(store, b"k", b"on") == listing.revision + 1
        assert (await anext(store.watch(b"", listing.revision))).changes[0].key == b"k"

    run(tmp_path, scenario)


@WAYS_BACK
def test_a_watch_notices_by_itself_that_history_went_back(tmp_path: Path, how: str) -> None:
    async def scenario(stores: SqliteStores) -> None:
        store = stores.client("a")
        last = await with_backup(stores, store)

        async def watch() -> None:
            while True:
                # A look in the middle of the deletion finds files missing, and is repeated.
                with suppress(StoreUnavailable):
                    await after(store.watch(b"", last))

        waiting = asyncio.create_task(watch())
        await asyncio.sleep(0)
        async with nobody_looks(store) if how == "replaced" else nullcontext():
            go_back(stores.path, how)
        with pytest.raises(StoreRewound):
            await waiting
        await put(store, b"k", b"on")

    run(tmp_path, scenario)


def test_what_can_never_work_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a database, though long enough to have a header" * 50)
    with opened(tmp_path / "other.db") as connection:
        connection.execute("CREATE TABLE theirs (x)")
    with opened(tmp_path / "newer.db") as connection:
        connection.execute(f"PRAGMA application_id = {0x646F6D69}; PRAGMA user_version = 99")
    for name, says in (
        ("", "is a directory"),
        ("file", "is not a database"),
        ("file/store.db", "a part of its path is a file"),
        ("other.db", "another program"),
        ("newer.db", "format 99"),
    ):
        store = SqliteStore(tmp_path / name)

        async def ask(store: SqliteStore = store) -> None:
            try:
                await store.get(b"k")
            finally:
                await store.close()

        with pytest.raises(ConfigError, match=says) as raised:
            asyncio.run(ask())
        assert str(tmp_path) in str(raised.value)
    with opened(tmp_path / "other.db") as connection:
        assert connection.pragma("journal_mode") == "delete"


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf")])
def test_absurd_arguments_are_refused(tmp_path: Path, ttl_s: float) -> None:
    with pytest.raises(ValueError, match="ttl"):
        asyncio.run(SqliteStore(tmp_path / "store.db").grant("l", ttl_s))
    with pytest.raises(ValueError, match="op_timeout_s"):
        SqliteStore(tmp_path / "store.db", op_timeout_s=ttl_s)
    with pytest.raises(ValueError, match="kept_commits"):
        SqliteStore(tmp_path / "store.db", kept_commits=0)


def test_the_end_of_a_prefix() -> None:
    assert above(b"") is None
    assert above(b"\xff\xff") is None
    assert above(b"a\xff") == b"b"
    assert above(b"n/") == b"n0"


def test_a_watch_is_woken_by_its_own_store_and_by_others(tmp_path: Path) -> None:
    """On real time, where the system tells of writes to the file."""

    async def scenario() -> None:
        stores = [SqliteStore(tmp_path / "store.db", by=by) for by in "ab"]
        last = await put(stores[0], b"k", b"")
        seen: list[int] = []

        async def follow(store: Store) -> None:
            async for changes in store.watch(b"k", last):
                seen.append(changes.revision)

        async with asyncio.TaskGroup() as tasks:
            following = [tasks.create_task(follow(store)) for store in stores]
            for n in range(30):
                revision = await put(stores[n % 2], b"k", b"")
                await put(stores[n % 2], b"other", b"")
                await until(lambda revision=revision: seen.count(revision) == 2)
            for task in following:
                task.cancel()
        assert len(seen) == 60
        for store in stores:
            await store.close()

    asyncio.run(scenario())


def test_a_watcher_alone_lets_leases_run_out(tmp_path: Path) -> None:
    """On real time: nobody else is there to notice."""

    async def scenario() -> None:
        store = SqliteStore(tmp_path / "store.db")
        began = elapsed_s()
        await store.grant("l", 0.3)
        last = await put(store, b"k", b"", "l")
        changes = await anext(store.watch(b"", last))
        assert changes.changes[0].item is None
        _, expired = [commit.at for commit in commits(tmp_path / "store.db")]
        assert expired >= began + 0.3
        await store.close()

    asyncio.run(scenario())


KEYS = [b"a", b"b", b""]
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("commit"),
            st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 3)), max_size=2),
            st.lists(
                st.tuples(
                    st.sampled_from(KEYS),
                    st.one_of(st.none(), st.binary(max_size=2)),
                    st.sampled_from([None, "l", "m"]),
                ),
                max_size=3,
                unique_by=lambda write: write[0],
            ),
        ),
        st.tuples(st.sampled_from(["grant", "renew", "revoke"]), st.sampled_from(["l", "m"])),
        st.tuples(st.just("advance"), st.integers(1, 3)),
    ),
    max_size=20,
)


@settings(max_examples=25)
@given(steps=steps)
def test_it_does_as_the_reference_does(steps: list[tuple]) -> None:
    async def play(store: Store, advance: Callable[[float], None]) -> list[object]:
        answers: list[object] = []
        start = (await store.list(b"")).revision
        for what, *arguments in steps:
            match what:
                case "commit":
                    now = {item.key: item.revision for item in (await store.list(b"")).items}
                    conditions: list[Condition] = [
                        [Absent(key), Present(key), At(key, now.get(key, 9)), At(key, 10**6)][n]
                        for key, n in arguments[0]
                    ]
                    writes: list[Write] = [
                        Delete(key) if value is None else Put(key, value, lease)
                        for key, value, lease in arguments[1]
                    ]
                    outcome = await store.commit(conditions, writes)
                    committed = isinstance(outcome, Committed)
                    answers.append("committed" if committed else outcome)
                case "grant":
                    answers.append(await store.grant(arguments[0], 2.0))
                case "renew":
                    answers.append(await store.renew(arguments[0]))
                case "revoke":
                    answers.append(await store.revoke(arguments[0]))
                case _:
                    advance(arguments[0])
            listing = await store.list(b"")
            answers.append([(item.key, item.value) for item in listing.items])
        held: dict[bytes, bytes] = {}
        watch = store.watch(b"", start)
        end = (await store.list(b"")).revision
        while start < end:
            changes = await anext(watch)
            start = changes.revision
            for change in changes.changes:
                if change.item is None:
                    del held[change.key]
                else:
                    held[change.key] = change.item.value
        assert sorted(held.items()) == answers[-1] if answers else not held
        return answers

    async def main() -> None:
        clock = ManualClock()
        memory = MemoryStore(clock).client("a")
        expected = await play(memory, lambda seconds: clock.advance(seconds))
        with tempfile.TemporaryDirectory() as directory:
            async with lab(Path(directory) / "store.db") as stores:

                def advance(seconds: float) -> None:
                    stores.now += seconds

                assert await play(stores.client("a"), advance) == expected

    asyncio.run(main())
