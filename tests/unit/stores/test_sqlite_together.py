"""Commits that wait side by side go to the disk together, and yet each is one by itself (S9)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import apsw
import pytest
from sqlite_lab import Ask, at_once

from domicile.core.state.txn import Absent, At, Committed, Conflict, Put, Unknown
from domicile.errors import StoreUnavailable
from domicile.stores.sqlite.file import Database
from domicile.stores.sqlite.jobs import MOST_BYTES, MOST_COMMITS, TOGETHER_S, CommitJob
from domicile.stores.sqlite.schema import CALLS
from domicile.stores.sqlite.store import SqliteStore, commits
from domicile.stores.sqlite.threads import JobThread


class Statements:
    """How many commits each statement had; it may be told to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.fails: apsw.Error | None = None
        run = Database.run

        def counted(
            database: Database, sql: str, values: Sequence[object] | Mapping[str, object] = ()
        ) -> None:
            if sql == CALLS["commit"]:
                self.count += 1
                if self.fails is not None:
                    raise self.fails
            run(database, sql, values)

        monkeypatch.setattr(Database, "run", counted)


def run(path: Path, scenario: Callable[[SqliteStore], Awaitable[None]]) -> None:
    async def main() -> None:
        store = SqliteStore(path / "store.db", by="n1")
        try:
            await store.commit((), [Put(b"first", b"")])
            await scenario(store)
        finally:
            await store.close()

    asyncio.run(main())


def test_each_is_judged_by_itself_in_the_order_of_asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statements = Statements(monkeypatch)

    async def scenario(store: SqliteStore) -> None:
        statements.count = 0
        asks: list[Ask] = [
            ([Absent(b"a")], [Put(b"a", b"1")]),
            ([Absent(b"a")], [Put(b"a", b"2"), Put(b"c", b"x")]),
            ([At(b"a", 2)], [Put(b"a", b"3"), Put(b"b", b"y")]),
            ([], []),
            ([], [Put(b"d", b"", "no such lease")]),
            ([At(b"a", 3)], [Put(b"a", b"4")]),
        ]
        outcomes = await at_once(store, asks)
        assert outcomes == [
            Committed(2), Conflict(b"a"), Committed(3), Committed(3), Conflict(b"d"), Committed(4),
        ]  # fmt: skip
        assert statements.count == 1
        found = [(item.key, item.value) for item in (await store.list(b"")).items]
        assert found == [(b"a", b"4"), (b"b", b"y"), (b"first", b"")]
        seen = [(one.revision, one.puts) for one in commits(tmp_path / "store.db")[1:]]
        assert seen == [
            (2, [(b"a", b"1", None)]),
            (3, [(b"a", b"3", None), (b"b", b"y", None)]),
            (4, [(b"a", b"4", None)]),
        ]

    run(tmp_path, scenario)


def test_a_watch_sees_them_one_by_one(tmp_path: Path) -> None:
    async def scenario(store: SqliteStore) -> None:
        watch = store.watch(b"", 1)
        await at_once(store, [([], [Put(b"k", b"%d" % number)]) for number in range(5)])
        found = [await anext(watch) for _ in range(5)]
        assert [changes.revision for changes in found] == [2, 3, 4, 5, 6]
        values = [[change.item and change.item.value for change in one.changes] for one in found]
        assert values == [[b"0"], [b"1"], [b"2"], [b"3"], [b"4"]]

    run(tmp_path, scenario)


def test_if_the_disk_is_full_for_all_of_them_none_has_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statements = Statements(monkeypatch)

    async def scenario(store: SqliteStore) -> None:
        statements.count, statements.fails = 0, apsw.FullError("database or disk is full")
        found = await at_once(store, [([], [Put(b"k%d" % number, b"")]) for number in range(3)])
        assert [type(one) for one in found] == [StoreUnavailable] * 3
        assert len({id(one) for one in found}) == 3, "each caller has an error of its own"
        assert statements.count == 1
        statements.fails = None
        assert await store.commit((), [Put(b"k", b"")]) == Committed(2)
        assert len((await store.list(b"k")).items) == 1

    run(tmp_path, scenario)


def test_if_the_disk_fails_it_is_unknown_of_each_whether_it_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statements = Statements(monkeypatch)

    async def scenario(store: SqliteStore) -> None:
        statements.fails = apsw.IOError("disk I/O error")
        found = await at_once(store, [([], [Put(b"k%d" % number, b"")]) for number in range(3)])
        assert found == [Unknown()] * 3
        statements.fails = None
        assert await store.commit((), [Put(b"k", b"")]) == Committed(2)

    run(tmp_path, scenario)


def test_what_was_given_up_before_it_began_does_not_happen(tmp_path: Path) -> None:
    async def scenario(store: SqliteStore) -> None:
        busy = threading.Event()
        assert store._desks is not None
        store._desks[0].submit(lambda: busy.wait(10))
        tasks = [
            asyncio.ensure_future(store.commit((), [Put(b"k%d" % number, b"")]))
            for number in range(3)
        ]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        busy.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in outcomes] == [Committed, asyncio.CancelledError, Committed]
        keys = [item.key for item in (await store.list(b"k")).items]
        assert keys == [b"k0", b"k2"]

    run(tmp_path, scenario)


def test_nobody_overtakes_another_kind_of_write(tmp_path: Path) -> None:
    async def scenario(store: SqliteStore) -> None:
        await store.grant("l", 10.0)
        busy = threading.Event()
        assert store._desks is not None
        store._desks[0].submit(lambda: busy.wait(10))
        before = asyncio.ensure_future(store.commit((), [Put(b"a", b"", "l")]))
        await asyncio.sleep(0)
        end = asyncio.ensure_future(store.revoke("l"))
        await asyncio.sleep(0)
        after = asyncio.ensure_future(store.commit((), [Put(b"b", b"", "l")]))
        await asyncio.sleep(0)
        busy.set()
        assert (await before, await end, await after) == (Committed(2), None, Conflict(b"b"))

    run(tmp_path, scenario)


def test_only_so_many_and_so_much_go_together() -> None:
    soon = time.monotonic() + 60.0

    def job(size: int, generation: int = 0, deadline: float = soon) -> CommitJob:
        return CommitJob("", b"x" * size, generation, deadline)

    assert job(1).joins([job(1)] * (MOST_COMMITS - 1))
    assert not job(1).joins([job(1)] * MOST_COMMITS)
    assert job(MOST_BYTES // 2).joins([job(MOST_BYTES // 2)])
    assert not job(MOST_BYTES // 2).joins([job(MOST_BYTES // 2 + 1)])
    assert not job(1, generation=1).joins([job(1)]), "the file was another one then"
    assert not job(1).joins([job(1, deadline=0.0)]), "it came too late, and alone"
    assert not job(1).joins([job(1, deadline=soon - TOGETHER_S - 0.1)]), "nor has it as little time"


def test_a_thread_that_ends_refuses_parts_too() -> None:
    busy = threading.Event()
    desk = JobThread("test", lambda: None)
    desk.submit(lambda: busy.wait(10))
    part = desk.join_in(CommitJob("[]", b"", 0, 1.0), lambda parts: [None for _ in parts])
    desk.stop()
    busy.set()
    with pytest.raises(StoreUnavailable):
        part.result(10)
    desk.gone.result(10)
    desk.join()
