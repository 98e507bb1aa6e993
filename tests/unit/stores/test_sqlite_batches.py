"""What a batch must not do to a commit in it: fail it, delay it, hide it or lose it (S9)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlite_lab import Ask, Batches, at_once, held, opened, until, worker

from domicile.core.state.txn import Absent, Committed, Conflict, Outcome, Put
from domicile.errors import StoreRewound, StoreUnavailable
from domicile.stores.sqlite import (
    file as sqlite_file,
)
from domicile.stores.sqlite import (
    jobs as sqlite_jobs,
)
from domicile.stores.sqlite import (
    store as sqlite,
)
from domicile.stores.sqlite import (
    threads as sqlite_threads,
)
from domicile.stores.sqlite.jobs import MOST_BYTES, MOST_COMMITS
from domicile.stores.sqlite.store import SqliteStore, commits

TIMEOUT_S = 30.0


class Time:
    """Is `time` to the store: it passes while a thread sleeps, and when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.then: tuple[float, Callable[[], object]] | None = None
        for module in (sqlite, sqlite_jobs, sqlite_file):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.then is not None and self.now >= self.then[0]:
            self.then[1]()
            self.then = None


@asynccontextmanager
async def started(path: Path, **settings: Any) -> AsyncIterator[SqliteStore]:
    """A store with a first commit."""
    store = SqliteStore(path, by="n1", op_timeout_s=TIMEOUT_S, elapsed=lambda: 1000.0, **settings)
    try:
        assert await store.commit((), [Put(b"first", b"")]) == Committed(1)
        yield store
    finally:
        await store.close()


async def ask(store: SqliteStore, key: bytes) -> asyncio.Future[Outcome]:
    """Ask for a commit, which waits in the queue then."""
    task = asyncio.ensure_future(store.commit((), [Put(key, b"")]))
    await asyncio.sleep(0)
    return task


def replace(path: Path, by: Path) -> None:
    """Put another store's file in place of one that is open."""
    for end in ("", "-wal", "-shm"):
        Path(f"{path}{end}").unlink(missing_ok=True)
    by.rename(path)


@pytest.mark.parametrize(
    "malformed",
    [
        ([], [Put(b"x", "text")]),  # type: ignore[arg-type]
        ([], [Put("x", b"")]),  # type: ignore[arg-type]
        ([Absent("x")], []),  # type: ignore[arg-type]
        ([], [Put(b"x", b"", b"lease")]),  # type: ignore[arg-type]
        ([], [Put(b"x", [300])]),  # type: ignore[arg-type]
    ],
)
def test_a_malformed_one_has_an_error_and_its_neighbours_commit(
    tmp_path: Path, malformed: Ask
) -> None:
    async def main() -> None:
        async with started(tmp_path / "s.db") as store:
            asks: list[Ask] = [([], [Put(b"a", b"1")]), malformed, ([], [Put(b"b", b"2")])]
            before, wrong, behind = await at_once(store, asks)
            assert (before, behind) == (Committed(2), Committed(3))
            assert isinstance(wrong, TypeError | ValueError)
            keys = [item.key for item in (await store.list(b"")).items]
            assert keys == [b"a", b"b", b"first"]

    asyncio.run(main())


@pytest.mark.parametrize("what", ["number", "values", "keys", "leases"])
def test_what_is_too_much_for_one_goes_in_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A process that stops in it holds up all: keys and names of leases take their time, too."""
    large = MOST_BYTES * 2 // 5

    async def main() -> None:
        async with started(tmp_path / "s.db") as store:
            asks: list[Ask]
            match what:
                case "number":
                    asks = [([], [Put(b"%d" % number, b"")]) for number in range(MOST_COMMITS + 8)]
                case "values":
                    asks = [([], [Put(b"%d" % number, bytes(large))]) for number in range(5)]
                case "keys":
                    asks = [([], [Put(b"%d" % number + bytes(large), b"")]) for number in range(5)]
                case _:
                    asks = [([], [Put(b"%d" % number, b"", "l" * large)]) for number in range(5)]
            batches = Batches(monkeypatch)
            outcomes = await at_once(store, asks)
            assert batches.sizes == ([MOST_COMMITS, 8] if what == "number" else [2, 2, 1])
            if what == "leases":
                assert outcomes == [Conflict(b"%d" % number) for number in range(5)]
            else:
                assert outcomes == [Committed(2 + number) for number in range(len(asks))]

    asyncio.run(main())


def test_one_that_has_time_left_does_not_end_with_one_that_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time, batches = Time(monkeypatch), Batches(monkeypatch)

    async def main() -> None:
        async with started(tmp_path / "s.db") as store:
            batches.sizes.clear()
            with held(store):
                one = await ask(store, b"1")
                time.now += 0.4
                two = await ask(store, b"2")
            assert (await one, await two) == (Committed(2), Committed(3))
            assert batches.sizes == [2], "there is time enough for both"
            batches.sizes.clear()
            with opened(tmp_path / "s.db") as other:
                other.execute("BEGIN IMMEDIATE")
                begun = time.now
                with held(store):
                    early = await ask(store, b"early")
                    time.now = begun + 0.4
                    late = await ask(store, b"late")
                    time.now = begun + TIMEOUT_S - 1.0
                    time.then = (begun + TIMEOUT_S + 0.2, lambda: other.execute("ROLLBACK"))
                with pytest.raises(StoreUnavailable, match="stayed locked"):
                    await early
                assert await late == Committed(4)
            assert batches.sizes == [1, 1]

    asyncio.run(main())


def test_none_waits_past_its_own_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    time, batches = Time(monkeypatch), Batches(monkeypatch)

    async def main() -> None:
        async with started(tmp_path / "s.db") as store:
            batches.sizes.clear()
            with opened(tmp_path / "s.db") as other:
                other.execute("BEGIN IMMEDIATE")
                begun = time.now
                with held(store):
                    asked = [await ask(store, b"1")]
                    time.now = begun + 0.4
                    asked.append(await ask(store, b"2"))
                answers = await asyncio.gather(*asked, return_exceptions=True)
            assert [type(answer) for answer in answers] == [StoreUnavailable] * 2
            assert batches.sizes == [2]
            assert time.now == pytest.approx(begun + TIMEOUT_S, abs=0.01)

    asyncio.run(main())


def test_those_of_two_histories_do_not_go_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S5: what was asked for before a rewind was noticed is refused, and what comes later is not.

    Also if so much waits that the thread can't be told to let go of the old file.
    """

    async def main() -> None:
        unhandled: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, error: unhandled.append(error))
        async with started(tmp_path / "other.db"):
            pass
        async with started(tmp_path / "s.db") as store:
            watch = store.watch(b"", 1)
            told = asyncio.ensure_future(anext(watch))
            await until(lambda: watch._waiter is not None)
            batches = Batches(monkeypatch)
            with held(store):
                old = await ask(store, b"old")
                with monkeypatch.context() as patch:
                    patch.setattr(sqlite_threads, "MOST_JOBS", 1)
                    replace(tmp_path / "s.db", tmp_path / "other.db")
                    with pytest.raises(StoreRewound):
                        await store.get(b"first")
                    await until(lambda: store._generation == 1)
                new = await ask(store, b"new")
                assert store._desks is not None
                assert len(store._desks[0]._jobs) == 2, "nothing is between them"
            with pytest.raises(StoreRewound):
                await old
            assert await new == Committed(2)
            assert batches.sizes == [1, 1]
            with pytest.raises(StoreRewound):
                await told
            assert not unhandled
            assert [one.puts[0][0] for one in commits(tmp_path / "s.db")] == [b"first", b"new"]

    asyncio.run(main())


def test_a_rewind_refuses_all_that_wait_together(tmp_path: Path) -> None:
    async def main() -> None:
        async with started(tmp_path / "other.db"):
            pass
        async with started(tmp_path / "s.db") as store:
            with held(store):
                asked = [await ask(store, b"%d" % number) for number in range(5)]
                replace(tmp_path / "s.db", tmp_path / "other.db")
            answers = await asyncio.gather(*asked, return_exceptions=True)
            assert [type(answer) for answer in answers] == [StoreRewound] * 5
            assert len({id(answer) for answer in answers}) == 5, "each has an error of its own"
            assert len(commits(tmp_path / "s.db")) == 1
            asks: list[Ask] = [([], [Put(b"%d" % number, b"")]) for number in range(3)]
            assert await at_once(store, asks) == [Committed(2), Committed(3), Committed(4)]

    asyncio.run(main())


NOTHING: Ask = ([Absent(b"first")], [])
HURRIED: Ask = ([], [Put(b"nodes/1", b"")])
UNHURRIED: Ask = ([], [Put(b"clients/1", b"")])


@pytest.mark.parametrize(
    ("asks", "rung", "revision"),
    [
        ([NOTHING, HURRIED], 1, 2),
        ([HURRIED, NOTHING], 1, 2),
        ([HURRIED, UNHURRIED], 1, 3),
        ([UNHURRIED, HURRIED], 1, 3),
        ([NOTHING, UNHURRIED, HURRIED, UNHURRIED, NOTHING], 1, 4),
        ([UNHURRIED, UNHURRIED], 0, 3),
        ([NOTHING, NOTHING], 0, 1),
    ],
)
def test_others_hear_of_a_batch_if_one_in_it_concerns_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: list[Ask], rung: int, revision: int
) -> None:
    rings: list[Path] = []

    async def main() -> None:
        async with started(tmp_path / "s.db", unhurried=b"clients/") as store:
            batches = Batches(monkeypatch)
            rings.clear()
            await at_once(store, asks)
            assert batches.sizes == [len(asks)]
            assert len(rings) == rung
            assert store._known.revision == revision, "that of the last one (S5)"

    monkeypatch.setattr(sqlite_jobs, "ring_file", rings.append)
    asyncio.run(main())


def test_what_a_killed_process_said_it_committed_is_there_once_and_whole(tmp_path: Path) -> None:
    """S1, kill -9: of each batch all or nothing is there, and a commit is never in halves."""
    path, said = tmp_path / "s.db", dict[bytes, int]()
    for lines in (40, 75, 110):
        with worker(path, "flood", 40) as process:
            assert process.stdout is not None
            answers = [process.stdout.readline() for _ in range(lines)]
            process.kill()
            answers += process.stdout.readlines()
        for answer in answers:
            key, revision = answer.split()
            said[key.encode()] = int(revision)
    log = commits(path)
    assert [one.revision for one in log] == list(range(1, len(log) + 1))
    assert [[key for key, _, _ in one.puts][1:] for one in log] == [
        [one.puts[0][0] + b"*"] for one in log
    ]
    there = {one.puts[0][0]: one.revision for one in log}
    assert len(there) == len(log)
    assert {key: there.get(key) for key in said} == said
    assert len({one.at for one in log}) < len(log), "there were batches"
