"""What the SQLite store keeps in memory and looks through has a bound, and an answer at it (I6)."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apsw
import pytest
from sqlite_lab import SqliteStores, held, lab, until

from domicile.core.state.txn import Change, Changes, Committed, Item, Put
from domicile.errors import StoreUnavailable
from domicile.stores.sqlite import threads as sqlite_threads
from domicile.stores.sqlite.file import Known
from domicile.stores.sqlite.jobs import CommitJob, News, StoreWriter
from domicile.stores.sqlite.recent import Recent
from domicile.stores.sqlite.schema import packed
from domicile.stores.sqlite.store import SqliteStore
from domicile.stores.sqlite.threads import FEW_JOBS, MOST_JOBS, SIFT_S, JobThread

FULL = "did not begin.*health of the store's disk, then try again"


@contextmanager
def stuck() -> Iterator[tuple[JobThread, Callable[[], None]]]:
    """A desk whose thread does nothing until the second is called."""
    begun, over = threading.Event(), threading.Event()
    desk = JobThread("stuck", lambda: None)
    try:
        desk.submit(lambda: (begun.set(), over.wait(10)))
        assert begun.wait(10)
        yield desk, over.set
    finally:
        over.set()
        desk.stop()
        desk.gone.result(10)
        desk.join()


class Value:
    """Something large."""


def test_a_stuck_thread_keeps_little_of_what_was_given_up() -> None:
    values: list[weakref.ref[Value]] = []
    with stuck() as (desk, _):
        waiting = [desk.submit(lambda: None) for _ in range(10)]
        for _ in range(MOST_JOBS * 3 // 2):
            value = Value()
            values.append(weakref.ref(value))
            desk.submit(partial(repr, value)).cancel()
            del value
        assert sum(value() is not None for value in values) <= FEW_JOBS
        assert not any(future.done() for future in waiting)


def test_a_full_queue_refuses_until_something_is_given_up_and_keeps_its_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sqlite_threads, "SIFT_S", 0.0)
    done: list[int] = []
    with stuck() as (desk, let_go):
        futures = [desk.submit(partial(done.append, n)) for n in range(MOST_JOBS)]
        for ask in (desk.submit, lambda job: desk.join_in(Alone(desk), job)):
            with pytest.raises(StoreUnavailable, match=FULL):
                ask(partial(done.append, -1))
        assert futures[500].cancel()
        last = desk.submit(partial(done.append, MOST_JOBS))
        with pytest.raises(StoreUnavailable, match=FULL):
            desk.submit(partial(done.append, -1))
        let_go()
        last.result(10)
        assert done == [n for n in range(MOST_JOBS + 1) if n != 500]
        desk.submit(partial(done.append, -2)).result(10)


def test_a_refusal_costs_little_if_there_was_one_just_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that does not give up would else have all that wait looked at each time."""
    now = 100.0
    with stuck() as (desk, _):
        futures = [desk.submit(lambda: None) for _ in range(MOST_JOBS)]
        with monkeypatch.context() as patch:
            patch.setattr(sqlite_threads, "time", SimpleNamespace(monotonic=lambda: now))
            for _ in range(2):
                with pytest.raises(StoreUnavailable, match=FULL):
                    desk.submit(lambda: None)
                futures[0].cancel()
            now += SIFT_S
            desk.submit(lambda: None)


class Alone:
    """Joins the one before it, and sees whether the queue could change meanwhile."""

    def __init__(self, desk: JobThread) -> None:
        self._desk = desk
        self.safe = False

    def joins(self, others: Sequence[Any]) -> bool:
        self.safe = self._desk._lock.locked()
        return True


def test_nobody_changes_the_queue_while_the_thread_decides_what_goes_together() -> None:
    """Else a job would be taken for that of another, which was given up then."""
    with stuck() as (desk, let_go):
        parts = [Alone(desk) for _ in range(3)]
        futures: list[Future[Alone]] = [desk.join_in(part, lambda parts: parts) for part in parts]
        let_go()
        assert [future.result(10) for future in futures] == parts
        assert [part.safe for part in parts] == [False, True, True]


def run(path: Path, scenario: Callable[[SqliteStores], Any]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), lab(path / "store.db") as stores:
            await scenario(stores)

    asyncio.run(main())


def test_every_call_of_a_store_that_is_stuck_is_refused_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(stores: SqliteStores) -> None:
        store = stores.client("a")
        await store.grant("l", 5.0)
        assert await store.commit([], [Put(b"k", b"")]) == Committed(1)
        side = store.beside()
        with held(store), held(store, 1), monkeypatch.context() as patch:
            patch.setattr(sqlite_threads, "MOST_JOBS", 2)
            waiting = [
                *(asyncio.ensure_future(store.commit([], [Put(b"k", b"")])) for _ in range(2)),
                *(asyncio.ensure_future(store.get(b"k")) for _ in range(2)),
            ]
            await asyncio.sleep(0)
            for call in (
                store.commit([], [Put(b"k", b"never")]),
                store.grant("m", 5.0),
                store.renew("l"),
                store.revoke("l"),
                store.get(b"k"),
                store.list(b""),
                anext(store.watch(b"", 0)),
            ):
                with pytest.raises(StoreUnavailable, match=FULL):
                    await call
            beside: list[Future[Any]] = [side.keep("l", b"k"), side.rewrite(b"k", 0, b"", "l")]
            for future in beside:
                with pytest.raises(StoreUnavailable, match=FULL):
                    future.result(0)
        await asyncio.gather(*waiting)
        assert await store.commit([], [Put(b"k", b"")]) == Committed(4), "nothing else happened"
        assert await store.renew("m") is None
        assert side.keep("l", b"k").result(10).ttl_s == 5.0

    run(tmp_path, scenario)


def test_a_renewal_whose_reading_is_refused_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(stores: SqliteStores) -> None:
        store = stores.client("a")
        await store.grant("l", 5.0)
        side = store.beside()
        with held(store, 1), monkeypatch.context() as patch:
            patch.setattr(sqlite_threads, "MOST_JOBS", 1)
            waiting = asyncio.ensure_future(store.get(b"k"))
            await asyncio.sleep(0)
            with pytest.raises(StoreUnavailable, match=FULL):
                side.keep("l", b"k").result(10)
        assert await waiting is None

    run(tmp_path, scenario)


def test_a_watch_lives_on_while_too_much_waits_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = threading.Event()
    expire = SqliteStore.expire

    def noticed(store: SqliteStore) -> Future[Any]:
        try:
            return expire(store)
        except StoreUnavailable:
            refused.set()
            raise

    async def scenario(stores: SqliteStores) -> None:
        store = stores.client("a")
        await store.grant("l", 5.0)
        await store.commit([], [Put(b"k", b"", "l")])
        watch = store.watch(b"", 1)
        told = asyncio.ensure_future(anext(watch))
        await until(lambda: watch._waiter is not None)
        with monkeypatch.context() as patch:
            patch.setattr(sqlite_threads, "MOST_JOBS", 0)
            stores.now += 5.0
            await until(refused.is_set)
        assert await told == Changes(2, (Change(b"k", None),)), "once there is room"

    monkeypatch.setattr(SqliteStore, "expire", noticed)
    run(tmp_path, scenario)


def commit(revision: int, size: int) -> Changes:
    return Changes(revision, (Change(b"k", Item(b"k", bytes(size - 1), 1, revision)),))


def test_of_the_newest_commits_only_so_many_bytes_are_kept() -> None:
    recent = Recent(kept_bytes=1000)

    def known(*revisions: int) -> list[bool]:
        return [recent.after(b"", revision, 0) is not None for revision in revisions]

    recent.add(News(0, 3, [commit(1, 400), commit(2, 400), commit(3, 200)], 0, 0))
    assert known(0, 1, 2, 3) == [True] * 4
    recent.add(News(3, 4, [commit(4, 1)], 0, 0))
    assert known(0, 1, 4) == [False, True, True]
    recent.add(News(4, 5, [Changes(5, (Change(b"k" * 700, None),))], 0, 0))
    assert known(1, 2, 3, 5) == [False, True, True, True], "a deletion has a key, too"
    recent.add(News(5, 7, [commit(6, 1001), commit(7, 900)], 0, 0))
    assert known(5, 6, 7) == [False, True, True]
    recent.add(News(7, 8, [commit(8, 1001)], 0, 0))
    assert known(6, 7, 8) == [False, False, True]
    recent.add(News(8, 9, [commit(9, 600)], 0, 0))
    recent.add(News(9, 10, None, 0, 0))
    recent.add(News(10, 12, [commit(11, 500), commit(12, 500)], 0, 0))
    assert known(9, 10, 11, 12) == [False, True, True, True], "what was let go of counts no more"


def test_a_watch_finds_in_the_file_what_is_too_large_to_be_kept(tmp_path: Path) -> None:
    async def scenario(stores: SqliteStores) -> None:
        store, other = stores.client("a"), stores.client("b")
        store._recent = Recent(kept_bytes=100)
        assert await store.commit([], [Put(b"k", b"")]) == Committed(1)
        watch = store.watch(b"k", 1)
        told = asyncio.ensure_future(anext(watch))
        await until(lambda: watch._waiter is not None)
        for revision, size in enumerate((500, 10, 5000, 60, 60), 2):
            await other.commit([], [Put(b"k", bytes(size))])
            assert await told == Changes(
                revision, (Change(b"k", Item(b"k", bytes(size), 1, revision)),)
            )
            assert sum(len(one.changes) for one in store._recent._commits) <= 2
            told = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0)
        await store.commit([], [Put(b"k", b"")])
        assert (await told).revision == 7

    run(tmp_path, scenario)


def test_a_write_looks_at_no_leases_but_those_that_are_due(tmp_path: Path) -> None:
    """By the steps that SQLite takes for one commit."""
    steps: list[int] = []

    def count(event: dict[str, Any]) -> None:
        steps.append(event["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"])

    now = 1000.0
    known = Known(tmp_path / "store.db", lambda: None)
    writer = StoreWriter(tmp_path / "store.db", known, "n1", 10, lambda: now, b"")
    writer.boot = "this boot"
    far = float("inf")
    job = CommitJob(*packed([], [Put(b"k", b"")]), 0, far)

    def steps_of_a_commit() -> int:
        assert writer.handle.connection is not None
        raw = writer.handle.connection._raw
        steps.clear()
        raw.trace_v2(apsw.SQLITE_TRACE_PROFILE, count)
        writer.commit([job])
        raw.trace_v2(0, None)
        return max(steps)

    try:
        writer.commit([job])
        writer.run("grant", {"lease": "first", "ttl_s": 5.0}, 0, far)
        few = steps_of_a_commit()
        for number in range(200):
            writer.run("grant", {"lease": f"{number}", "ttl_s": 5.0}, 0, far)
        assert steps_of_a_commit() < few + 100
        now += 5.0
        assert steps_of_a_commit() > few + 200, "here they end"
        assert steps_of_a_commit() < few + 100
    finally:
        writer.handle.drop()
