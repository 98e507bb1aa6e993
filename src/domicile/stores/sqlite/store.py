"""The embedded store: one SQLite file that the processes of one machine share (S1–S9).

`SqliteStore` writes in one thread and reads in another; the event loop never waits for the file. A
write is one SQL statement (S9). So a process that is stopped or killed leaves no partial write, and
holds no lock while it waits for Python. The first process that notices an expired lease ends it
(S3).

The file must be on a local disk, together with its -wal and -shm files. Processes must open it only
through this module: a process that also opens it with another copy of SQLite loses its locks. A
`SqliteStore` must not be used in a forked child; make another one there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TypeVar

import apsw

from domicile.core.state.txn import (
    Changes,
    Committed,
    Condition,
    Conflict,
    Item,
    Listing,
    Outcome,
    Unknown,
    Write,
    check_limits,
)
from domicile.errors import ConfigError, StoreError, StoreRewound, StoreUnavailable
from domicile.ports.findings import Finding
from domicile.ports.meter import Meter, NoMeter
from domicile.stores.commit_log import QueuedCommit
from domicile.stores.sqlite.file import (
    CommitUnknown,
    Database,
    Known,
    boot_id,
    elapsed_s,
    explain,
)
from domicile.stores.sqlite.findings import file_findings
from domicile.stores.sqlite.jobs import (
    CommitJob,
    News,
    Result,
    StoreReader,
    StoreWriter,
    WatchedChanges,
)
from domicile.stores.sqlite.recent import Recent
from domicile.stores.sqlite.schema import COMMITS, packed
from domicile.stores.sqlite.threaded import SqliteThreadedStore
from domicile.stores.sqlite.threads import JobThread

log = logging.getLogger("domicile")

T = TypeVar("T")

KEPT_COMMITS = 10_000
READ_S = 5.0
REST_S = 1.0
"""Seconds for which the reading thread still looks for changes after the last watch ended."""

GRACE_S = 0.25
"""Seconds beyond `op_timeout_s` that a caller waits for a statement that the disk delays."""


def commits(path: Path) -> list[QueuedCommit]:
    """The commits that a store's file still keeps, the oldest first. Blocks; for checkers and
    tools."""
    found: list[QueuedCommit] = []
    database: Database | None = None
    try:
        database = Database(path, create=False)
        database.wait_for_locks(time.monotonic() + READ_S)
        for revision, at, by, expiry, key, value, lease in database.rows(COMMITS):
            if not found or found[-1].revision != revision:
                found.append(QueuedCommit(revision, at, by, [], [], bool(expiry)))
            if value is None:
                found[-1].deletes.append(key)
            else:
                found[-1].puts.append((key, value, lease))
    except apsw.Error as error:
        raise explain(error, path, READ_S, opened=True) from error
    finally:
        if database is not None:
            database.close()
    return found


class SqliteStore:
    """Implements `domicile.ports.store.Store` on a file. It opens the file at the first call.

    `by` names this process in the file's log, which keeps the newest `kept_commits`. A call ends
    within about `op_timeout_s`. `elapsed` replaces the machine's clock in tests. Commits that only
    concern keys under `unhurried` wake no other process: watches find them with the next commit or
    within about a second, in order (I8). With `reads_only` a read does not fail if this user may
    not end a lease that has expired: the processes of the store do that.
    """

    def __init__(
        self,
        path: Path,
        *,
        by: str = "",
        kept_commits: int = KEPT_COMMITS,
        op_timeout_s: float = 5.0,
        elapsed: Callable[[], float] | None = None,
        meter: Meter | None = None,
        unhurried: bytes = b"",
        reads_only: bool = False,
    ) -> None:
        if kept_commits < 1:
            raise ValueError(f"kept_commits is {kept_commits}; keep at least one commit")
        if not (isfinite(op_timeout_s) and op_timeout_s > 0):
            raise ValueError(f"op_timeout_s is {op_timeout_s}; it must be above 0")
        # Absolute: after a change of the working directory, a relative path would name another
        # file, and with it a second home for every shard (I1).
        self._path = path = path.absolute()
        self._op_timeout_s = op_timeout_s
        self._reads_only = reads_only
        self._meter = NoMeter() if meter is None else meter
        self._known = Known(path, self._noticed)
        self._generation = 0
        self._writer = StoreWriter(
            path, self._known, by, kept_commits, elapsed or elapsed_s, unhurried
        )
        self._reader = StoreReader(path, self._known, self, op_timeout_s, elapsed)
        self._desks: tuple[JobThread, JobThread] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._closed = False
        self._watches: dict[_Watch, None] = {}
        self._recent = Recent()
        self._resting = False

    async def get(self, key: bytes) -> Item | None:
        """As `Store.get`."""
        return await self._read(partial(self._reader.get, key))

    async def list(self, prefix: bytes) -> Listing:
        """As `Store.list`."""
        return await self._read(partial(self._reader.list, prefix))

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        """As `Store.commit`. A commit that changes nothing does not raise the revision."""
        check_limits(conditions, writes)
        operations = (*conditions, *writes)
        try:
            result = await self._commit(tuple(conditions), tuple(writes))
        except CommitUnknown as error:
            self._meter.count("store.unknown")
            log.warning("whether a commit happened is unknown: %s", error)
            return Unknown()
        if result.conflict is not None:
            return Conflict(operations[result.conflict].key)
        return Committed(result.revision)

    async def grant(self, lease: str, ttl_s: float) -> float:
        """As `Store.grant`."""
        if not (isfinite(ttl_s) and ttl_s > 0):
            raise ValueError(f"the ttl of lease {lease!r} is {ttl_s} s; it must be above 0")
        await self._lease("grant", lease=lease, ttl_s=float(ttl_s))
        return float(ttl_s)

    async def renew(self, lease: str) -> float | None:
        """As `Store.renew`."""
        return (await self._lease("renew", lease=lease)).ttl_s

    async def revoke(self, lease: str) -> None:
        """As `Store.revoke`."""
        await self._lease("revoke", lease=lease)

    def watch(self, prefix: bytes, from_revision: int) -> AsyncIterator[Changes]:
        """As `Store.watch`."""
        return _Watch(self, prefix, from_revision, self._generation)

    def beside(self, prefix: bytes = b"") -> SqliteThreadedStore:
        """As `OffersThreads.beside`: the two threads take jobs from any thread."""
        return SqliteThreadedStore(
            self._open(), self._writer, self._reader, prefix, self._generation, self._op_timeout_s
        )

    async def compact(self, revision: int) -> None:
        """Forget the changes up to a revision: a watch from before it must list again."""
        await self._lease("compact", upto=revision)

    async def findings(self) -> Sequence[Finding]:
        """As `InspectableStore.findings`."""
        return await asyncio.to_thread(file_findings, self._path)

    async def close(self) -> None:
        """End the threads and the watches. Leases stay until they expire."""
        self._closed = True
        error = StoreUnavailable(f"the store {self._path} was closed; make another one")
        for watch in tuple(self._watches):
            watch.break_off(error)
        if self._desks is not None and self._pid == os.getpid():
            for desk in self._desks:
                desk.stop()
            for desk in self._desks:
                await self._see_off(desk)

    async def _see_off(self, desk: JobThread) -> None:
        """Wait until the thread has ended after its current job, unless the disk blocks it (I6)."""
        try:
            async with asyncio.timeout(self._op_timeout_s + GRACE_S):
                await asyncio.wrap_future(desk.gone)
        except TimeoutError:
            log.warning("a thread of the store %s is stuck in its disk and left alone", self._path)
        else:
            desk.join()

    async def _lease(self, name: str, **fields: object) -> Result:
        try:
            return await self._write(name, **fields)
        except CommitUnknown as error:
            raise StoreUnavailable(str(error)) from error

    async def _commit(self, conditions: tuple[Condition, ...], writes: tuple[Write, ...]) -> Result:
        desk, _ = self._open()
        deadline = time.monotonic() + self._op_timeout_s
        commit = CommitJob(*packed(conditions, writes), self._generation, deadline)
        return await self._written(desk.join_in(commit, self._writer.commit))

    async def _write(self, name: str, **fields: object) -> Result:
        desk, _ = self._open()
        deadline = time.monotonic() + self._op_timeout_s
        job = partial(self._writer.run, name, fields, self._generation, deadline)
        return await self._written(desk.submit(job))

    async def _written(self, future: Future[Result]) -> Result:
        result = await self._answer(future)
        if self._watches and self._desks is not None:
            self._desks[1].nudge()
        return result

    async def _read(self, read: Callable[[int, float], tuple[bool, T]]) -> T:
        """Read; if a lease has expired, end it and read again (S3)."""
        due, found = await self.read(read, self._generation)
        if due:
            try:
                await self._lease("expire")
            except StoreUnavailable:
                if not self._reads_only:
                    raise
                return found
            _, found = await self.read(read, self._generation)
        return found

    async def read(self, read: Callable[[int, float], T], generation: int) -> T:
        """Read in the reading thread; `generation` is the one that the caller began with."""
        _, reader = self._open()
        deadline = time.monotonic() + self._op_timeout_s
        try:
            return await self._answer(reader.submit(partial(read, generation, deadline)))
        except CommitUnknown as error:
            raise StoreUnavailable(str(error)) from error

    async def _answer(self, future: Future[T]) -> T:
        # A job that has begun runs to its end in its thread, even if its caller no longer waits.
        try:
            async with asyncio.timeout(self._op_timeout_s + GRACE_S):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            text = (
                f"the store {self._path} did not answer within {self._op_timeout_s:g} s; "
                "look at the load and the health of its disk"
            )
            raise (StoreUnavailable if future.cancelled() else CommitUnknown)(text) from None
        except (StoreError, ConfigError, CommitUnknown):
            raise
        except Exception as error:
            log.exception("the store %s met something unexpected", self._path)
            text = f"the store {self._path} met something unexpected ({error!r}); it is asked again"
            raise CommitUnknown(text) from error

    def _open(self) -> tuple[JobThread, JobThread]:
        if self._closed:
            raise StoreUnavailable(f"the store {self._path} is closed; make another one")
        if self._desks is not None and self._pid != os.getpid():
            raise StoreUnavailable(
                f"the store {self._path} was opened before this process was forked; make another "
                "SqliteStore in the child"
            )
        self._loop = asyncio.get_running_loop()
        if self._desks is None:
            self._pid = os.getpid()
            self._writer.boot = self._reader.boot = boot_id()
            self._desks = self._start()
        return self._desks

    def _start(self) -> tuple[JobThread, JobThread]:
        started: list[JobThread] = []
        reader = self._reader
        try:
            started.append(
                JobThread(f"domicile-store-write {self._writer.by}", self._writer.handle.drop)
            )
            started.append(
                JobThread(
                    f"domicile-store-read {self._writer.by}", reader.handle.drop, reader.between
                )
            )
        except (OSError, RuntimeError) as error:
            for desk in started:
                desk.stop()
            raise StoreUnavailable(
                f"the threads of the store {self._path} can't be started ({error}); see that this "
                "process has file descriptors and threads left, then try again"
            ) from error
        return started[0], started[1]

    def wait(self, watch: _Watch) -> None:
        """A watch has seen all commits; call it when there are new ones."""
        _, reader = self._open()
        self._watches[watch] = None
        if not self._reader.watched:
            self._reader.watched = True
            reader.nudge()

    def leave(self, watch: _Watch) -> None:
        """A watch no longer waits."""
        self._watches.pop(watch, None)
        if not (self._watches or self._resting or self._loop is None or self._loop.is_closed()):
            # Later: most watches wait again in this turn, and the reading thread need not change.
            self._resting = True
            self._loop.call_later(REST_S, self._rest)

    def _rest(self) -> None:
        self._resting = False
        self._reader.watched = bool(self._watches)

    def recent(self, prefix: bytes, seen: int, generation: int) -> WatchedChanges | None:
        """As `look`, but without a read, if the newest commits are known; otherwise None."""
        current = generation == self._generation
        return self._recent.after(prefix, seen, generation) if current else None

    # The threads call the following four.

    def changed(self, news: News) -> None:
        """There are commits since the last look."""
        self._soon(partial(self._wake, news))

    def expire(self) -> Future[Result]:
        """A lease has expired."""
        assert self._desks is not None
        deadline = time.monotonic() + self._op_timeout_s
        job = partial(self._writer.run, "expire", {}, self._known.generation, deadline)
        return self._desks[0].submit(job)

    def broken(self, error: StoreError) -> None:
        """The file cannot be read: end the watches."""
        self._soon(partial(self._break, error))

    def _noticed(self) -> None:
        error = StoreRewound(
            f"the store {self._path} was replaced, deleted or put back to an older state; "
            "drop what was learned from it and list again"
        )
        self._soon(partial(self._rewound, self._known.generation, error))

    def _soon(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _wake(self, news: News) -> None:
        self._recent.add(news)
        for watch in tuple(self._watches):
            watch.changed()

    def _break(self, error: StoreError) -> None:
        self._meter.count("store.watches_broken", len(self._watches))
        for watch in tuple(self._watches):
            watch.break_off(error)

    def _rewound(self, generation: int, error: StoreError) -> None:
        self._generation = generation
        self._meter.count("store.rewound")
        for watch in tuple(self._watches):
            watch.break_off(error)
        if self._desks is not None and not self._closed:
            handles = (self._writer.handle, self._reader.handle)
            for desk, handle in zip(self._desks, handles, strict=True):
                # If too many jobs wait, the next job of this history drops the connection.
                with suppress(StoreUnavailable):
                    desk.submit(handle.drop_old)

    def look(self, prefix: bytes, seen: int) -> Callable[[int, float], WatchedChanges]:
        """The read of a watch, as an argument for `read`."""
        return partial(self._reader.log, prefix, seen)


class _Watch:
    """An iterator without a task: commits that it has not seen yet stay in the file's log."""

    def __init__(self, store: SqliteStore, prefix: bytes, seen: int, generation: int) -> None:
        self._store = store
        self._prefix = prefix
        self._seen = seen
        self._generation = generation
        self._found: deque[Changes] = deque()
        self._follows = False
        self._missed = False
        self._error: StoreError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._read = False

    def __aiter__(self) -> AsyncIterator[Changes]:
        return self

    async def __anext__(self) -> Changes:
        if self._read:
            raise RuntimeError("this watch is already being read; start a second watch instead")
        self._read = True
        try:
            while not self._found:
                await self._look()
        finally:
            self._read = False
        found = self._found.popleft()
        self._seen = found.revision
        return found

    async def _look(self) -> None:
        """Take new commits; if there are none, wait until there may be some."""
        self._check()
        self._missed = False
        self._store.wait(self)
        try:
            # The first time from the file, which knows which changes it has deleted.
            found = self._recent() if self._follows else None
            if found is None:
                found = await self._store.read(
                    self._store.look(self._prefix, self._seen), self._generation
                )
                self._follows = True
            if not found.changes:
                self._seen = found.upto
                if not (self._missed or self._error):
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        except StoreError as error:
            self._error = self._error or error
            raise
        finally:
            self._waiter = None
            self._store.leave(self)
        self._check()
        self._found.extend(found.changes)

    def _recent(self) -> WatchedChanges | None:
        return self._store.recent(self._prefix, self._seen, self._generation)

    def _check(self) -> None:
        if self._error is not None:
            # A new object each time: raising one twice would chain its tracebacks.
            raise type(self._error)(*self._error.args)

    def changed(self) -> None:
        """Continue if new commits concern this watch; otherwise they count as seen."""
        if self._waiter is None:
            self._missed = True
            return
        if self._waiter.done():
            return
        found = self._recent()
        if found is None or found.changes:
            self._found.extend(() if found is None else found.changes)
            self._waiter.set_result(None)
        else:
            self._seen = found.upto

    def break_off(self, error: StoreError) -> None:
        """End with an error, now and at every later call. Commits that were found are dropped: they
        belong to a lost history (S5), or the next watch finds them again."""
        self._error = error
        self._found.clear()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
