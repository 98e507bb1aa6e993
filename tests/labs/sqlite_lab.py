"""SQLite stores for tests: on a time of their own, with a disk that does as it is told."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from domicile.core.state.txn import Condition, Outcome, Write
from domicile.ports.store import Store
from domicile.stores.sqlite.jobs import CommitJob, Result, StoreWriter
from domicile.stores.sqlite.store import SqliteStore

Ask = tuple[Sequence[Condition], Sequence[Write]]

WORKER = Path(__file__).with_name("sqlite_worker.py")
PATIENCE_S = 120.0


class Disk(apsw.VFS):
    """Files that need no sync, get slow, stall or fail. Threads of clients are told by name."""

    NAME = "domicile-lab"

    def __init__(self) -> None:
        super().__init__(self.NAME, "unix", makedefault=True)
        self.slow_s = 0.0
        self.stalls: dict[str, threading.Event] = {}
        self.bad_reads: dict[str, threading.Event] = {}
        self.bad_syncs: dict[str, bool] = {}

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        return DiskFile(self, name, flags)


class DiskFile(apsw.VFSFile):
    def __init__(self, disk: Disk, name: Any, flags: list[int]) -> None:
        super().__init__("unix", name, flags)
        self._disk = disk
        self._wal = bool(flags[0] & apsw.SQLITE_OPEN_WAL)

    def xSync(self, flags: int) -> None:  # noqa: N802
        if not self._wal:
            return
        by = _thread("domicile-store-write ")
        if self._disk.bad_syncs.get(by):
            raise _io_error(apsw.SQLITE_IOERR_FSYNC)
        time.sleep(self._disk.slow_s)
        stall = self._disk.stalls.pop(by, None)
        if stall is not None:
            assert stall.wait(PATIENCE_S)

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802
        bad = self._disk.bad_reads.pop(_thread("domicile-store-read "), None)
        if bad is not None:
            bad.set()
            raise _io_error(apsw.SQLITE_IOERR_READ)
        return super().xRead(amount, offset)


def _thread(prefix: str) -> str:
    """Which client this thread works for, if it has that kind of name."""
    name = threading.current_thread().name
    return name.removeprefix(prefix) if name.startswith(prefix) else "-"


def _io_error(code: int) -> apsw.IOError:
    error = apsw.IOError("as the test wants it")
    error.result, error.extendedresult = apsw.SQLITE_IOERR, code
    return error


class LabStore(SqliteStore):
    """Ends its stall once its caller has given up."""

    stall: threading.Event | None = None

    def __init__(self, path: Path, by: str, **settings: Any) -> None:
        super().__init__(path, by=by, **settings)
        self.by = by

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        try:
            return await super().commit(conditions, writes)
        finally:
            if self.stall is not None:
                self.stall.set()


class SqliteStores:
    """Clients of one file. Implements `Stores`; an outage is a lock that somebody holds."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self.disk = disk
        self.now = 1000.0
        self.clients: list[SqliteStore] = []
        self._blocker: apsw.Connection | None = None
        self._copies = 0

    def client(self, by: str) -> LabStore:
        store = LabStore(self.path, by, elapsed=lambda: self.now, op_timeout_s=2.0)
        self.clients.append(store)
        return store

    async def advance(self, seconds: float) -> None:
        self.now += seconds

    async def compact(self, revision: int) -> None:
        await self.client("compactor").compact(revision)

    async def outage(self) -> None:
        self._blocker = direct(self.path)
        self._blocker.execute("BEGIN IMMEDIATE")

    async def restore(self) -> None:
        assert self._blocker is not None
        self._blocker.close()
        self._blocker = None

    async def lose_next_reply(self, client: Store) -> None:
        assert isinstance(client, LabStore)
        client.stall = self.disk.stalls[client.by] = threading.Event()

    async def slow(self, seconds: float) -> None:
        self.disk.slow_s = seconds

    async def break_watches(self, client: Store) -> None:
        assert isinstance(client, LabStore)
        failed = self.disk.bad_reads[client.by] = threading.Event()
        with opened(self.path) as connection:
            connection.execute("UPDATE meta SET time = time + 0.001")
        await until(failed.is_set)

    async def settled(self) -> None:
        await until(lambda: all(store_waits(client) for client in self.clients))

    async def snapshot(self) -> object:
        self._copies += 1
        copy = self.path.with_name(f"copy-{self._copies}.db")
        with opened(self.path) as connection:
            connection.execute("VACUUM INTO ?", (str(copy),))
            # A copy has another mark of its format than the file it was made of.
            ((mark,),) = connection.execute("PRAGMA application_id").fetchall()
        with opened(copy) as connection:
            connection.execute(f"PRAGMA application_id = {mark}")
        return copy

    async def rewind(self, snapshot: object) -> None:
        assert isinstance(snapshot, Path)
        for end in ("-wal", "-shm"):
            self.path.with_name(self.path.name + end).unlink(missing_ok=True)
        snapshot.replace(self.path)

    async def close(self) -> None:
        if self._blocker is not None:
            self._blocker.close()
        for client in self.clients:
            await client.close()


def store_waits(store: SqliteStore) -> bool:
    """Whether every watch that is being read waits for the next commit."""
    return all(watch._waiter is not None for watch in store._watches)


@contextmanager
def held(store: SqliteStore, desk: int = 0) -> Iterator[None]:
    """The writing (0) or reading (1) thread is stuck meanwhile, and all that is asked waits."""
    begun, over = threading.Event(), threading.Event()
    assert store._desks is not None
    store._desks[desk].submit(lambda: (begun.set(), over.wait(PATIENCE_S)))
    assert begun.wait(PATIENCE_S)
    try:
        yield
    finally:
        over.set()


async def at_once(store: SqliteStore, asks: Sequence[Ask]) -> list[Outcome | BaseException]:
    """Ask for all while the writing thread is busy with something else."""
    with held(store):
        tasks = [asyncio.ensure_future(store.commit(*ask)) for ask in asks]
        await asyncio.sleep(0)
    return await asyncio.gather(*tasks, return_exceptions=True)


class Batches:
    """How many commits went to the file together, each time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        commit = StoreWriter.commit

        def counted(writer: StoreWriter, commits: Sequence[CommitJob]) -> list[Result]:
            self.sizes.append(len(commits))
            return commit(writer, commits)

        monkeypatch.setattr(StoreWriter, "commit", counted)


@asynccontextmanager
async def lab(path: Path) -> AsyncIterator[SqliteStores]:
    disk = Disk()
    stores = SqliteStores(path, disk)
    try:
        yield stores
    finally:
        await stores.close()
        disk.unregister()


def direct(path: Path) -> apsw.Connection:
    """A connection of somebody else, on a disk without faults."""
    connection = apsw.Connection(str(path), vfs="unix")
    connection.set_busy_timeout(5_000)
    return connection


@contextmanager
def opened(path: Path) -> Iterator[apsw.Connection]:
    connection = direct(path)
    try:
        yield connection
    finally:
        connection.close()


async def until(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(patience_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@contextmanager
def worker(*arguments: object, wrapped: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """A process that works on a store as `sqlite_worker.py` says; killed at the end."""
    process = subprocess.Popen(
        [*wrapped, sys.executable, str(WORKER), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
