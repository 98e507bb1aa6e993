"""One thread's connection to the embedded store's file, and what its errors mean.

Only `domicile.stores.sqlite` uses it. A connection belongs to the thread that uses it. After an
error the connection is dropped, and the next use opens another; so a store recovers when the cause
is gone. Nothing here may open and close the file except through SQLite: that would drop the locks
that SQLite holds in this process.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import apsw

from domicile.errors import ConfigError, StoreRewound, StoreUnavailable
from domicile.stores.sqlite.schema import APPLICATION_ID, FORMAT, STATE, TABLES

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
BUSY_S = 0.001
"""Seconds of the first wait for a lock that is taken; later waits are up to five times longer."""
RETRY_S = 0.01
WAL_LIMIT_BYTES = 16 * 1024 * 1024


Row = tuple[Any, ...]


class Database:
    """A connection, reduced to the calls that are used here."""

    def __init__(self, path: Path, *, create: bool = True) -> None:
        flags = apsw.SQLITE_OPEN_READWRITE | (apsw.SQLITE_OPEN_CREATE if create else 0)
        self._raw: Any = apsw.Connection(str(path), flags=flags)
        self._until = 0.0
        # SQLite's own handler may sleep a whole second between two tries.
        self._raw.set_busy_handler(self._busy)

    def run(self, sql: str, values: Sequence[object] | Mapping[str, object] = ()) -> None:
        """Run statements that have no result."""
        self._raw.execute(sql, values)

    def rows(
        self, sql: str, values: Sequence[object] = (), *, most: int = sys.maxsize, same: int = 0
    ) -> list[Row]:
        """The rows of one statement: `most`, and then those that equal the last in column `same`.

        One statement sees one state of the file.
        """
        found: list[Row] = []
        cursor = self._raw.execute(sql, values)
        for row in cursor:
            if len(found) >= most and row[same] != found[-1][same]:
                break
            found.append(row)
        cursor.close()
        return found

    def one(self, sql: str) -> Row:
        """The only row of a statement."""
        (row,) = self.rows(sql)
        return row

    def pragma(self, name: str, value: object = None) -> object:
        """Set or read a setting of SQLite."""
        return self._raw.pragma(name) if value is None else self._raw.pragma(name, value)

    def wait_for_locks(self, until: float) -> None:
        """Set until when (by `time.monotonic`) a statement waits for a lock."""
        self._until = until

    def _busy(self, tries: int) -> bool:
        """SQLite asks this when a lock is taken: whether to try again."""
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(left_s, BUSY_S * min(tries + 1, 5)))
        return True

    @property
    def moved(self) -> bool:
        """Whether the file at the path is no longer the open one."""
        moved = ctypes.c_int(0)
        self._raw.file_control("main", apsw.SQLITE_FCNTL_HAS_MOVED, ctypes.addressof(moved))
        return moved.value != 0

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""
        return bool(self._raw.in_transaction)

    def close(self) -> None:
        """Close the connection, even within a transaction."""
        # The last connection copies the -wal file into the database; if that fails, it stays.
        with suppress(apsw.Error):
            self._raw.close(True)


class CommitUnknown(Exception):
    """A write failed, but it may have been stored, or may be after a crash (S1)."""


class Known:
    """What this process knows about the file: its history and its newest revision (S5).

    `generation` counts the rewinds. A call that began before a rewind was noticed gets
    `StoreRewound`.
    """

    def __init__(self, path: Path, rewound: Callable[[], None]) -> None:
        self.generation = 0
        self.opened = False
        """Whether the file was ever a valid store: then a fault of it may be temporary."""
        self.history: str | None = None
        self.revision = 0
        self._path = path
        self._rewound = rewound
        self._lock = threading.Lock()

    def now(self) -> tuple[str, int]:
        """The known history and revision, to compare with what a statement finds."""
        with self._lock:
            return self.history or "", self.revision

    def check(self, generation: int) -> None:
        """`StoreRewound` for a call that began before the last rewind was noticed."""
        if generation != self.generation:
            raise StoreRewound(
                f"the store {self._path} was replaced, deleted or put back to an older state; "
                "drop what was learned from it and list again"
            )

    def saw(self, history: str, revision: int, floor: int) -> None:
        """A connection read this state; `floor` is the revision known before it began to read."""
        with self._lock:
            self.opened = True
            if self.history is None:
                self.history = history
            if history == self.history and revision >= floor:
                self.revision = max(self.revision, revision)
                return
        self.rewind(self.generation, f"it is at revision {revision} after {floor}")

    def rewind(self, generation: int, why: str) -> NoReturn:
        """Note that the store lost commits; raises `StoreRewound`."""
        with self._lock:
            if generation == self.generation:
                self.generation += 1
                self.history, self.revision = None, 0
                self._rewound()
        raise StoreRewound(
            f"the store {self._path} went back: {why}; drop what was learned from it and list again"
        )


class Handle:
    """A connection that is opened at its first use, and again after it was dropped."""

    def __init__(self, path: Path, known: Known, prepare: str = "") -> None:
        self.connection: Database | None = None
        self.generation = 0
        """How many rewinds were known when the connection was opened."""
        self._path = path
        self._known = known
        self._prepare = prepare
        self._beside: tuple[tuple[int, int] | None, ...] = ()

    def use(self, deadline: float) -> Database:
        """The connection, which waits for locks until a deadline (by `time.monotonic`)."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise StoreUnavailable(
                f"the store {self._path} had no time for this: earlier calls take too long; "
                "look at the load of its disk, then try again"
            )
        if self.generation != self._known.generation:
            self.drop()
        self.check_place()
        if self.connection is None:
            self.generation = self._known.generation
            try:
                self.connection = self._open(deadline)
            except ConfigError as error:
                if not self._known.opened:
                    raise
                raise StoreUnavailable(str(error)) from error
        self.connection.wait_for_locks(deadline)
        return self.connection

    def check_place(self) -> None:
        """`StoreRewound` if the open files are no longer those at the path.

        Commits are first in the -wal file. Without it, the next process to open the store does not
        see them, and each process would continue with a history of its own (I1).
        """
        if self.connection is None:
            return
        if self.connection.moved:
            there = os.path.exists(self._path)
            why = "another file is in its place" if there else "it was deleted"
        elif self._look_beside() != self._beside:
            why = "its -wal or -shm file was deleted or replaced; leave them to SQLite"
        else:
            return
        self.drop()
        self._known.rewind(self.generation, why)

    def drop_old(self) -> None:
        """Close a connection that was opened before the last rewind: SQLite would share its -shm
        file with new connections."""
        if self.generation != self._known.generation:
            self.drop()

    def _look_beside(self) -> tuple[tuple[int, int] | None, ...]:
        # Not from a generator: CPython's tuple of a generator breaks if another thread calls
        # gc.get_objects() meanwhile, as leak detectors do.
        return _identity(f"{self._path}-wal"), _identity(f"{self._path}-shm")

    def drop(self) -> None:
        """Close the connection; the next use opens another."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()

    def failed(self, error: apsw.Error, waited_s: float) -> Exception:
        """What to raise for an error of SQLite; drops the connection if it may be the cause."""
        if not isinstance(error, apsw.BusyError | apsw.LockedError):
            self.drop()
        return explain(error, self._path, waited_s, opened=self._known.history is not None)

    def _open(self, deadline: float) -> Database:
        started = time.monotonic()
        if os.path.isdir(self._path):
            raise ConfigError(f"the store {self._path} is a directory; name a file in it")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except (NotADirectoryError, FileExistsError) as error:
            raise ConfigError(
                f"the store {self._path} can't be: a part of its path is a file; name another path"
            ) from error
        except OSError as error:
            raise StoreUnavailable(
                f"the directory of the store {self._path} can't be made ({error.strerror}); "
                "make it, writable for this user, or name another path"
            ) from error
        connection: Database | None = None
        while True:
            try:
                connection = Database(self._path)
                self._set_up(connection, deadline)
                return connection
            except apsw.Error as error:
                if connection is not None:
                    connection.close()
                # While another process creates the file, SQLite does not always wait.
                if isinstance(error, apsw.BusyError) and time.monotonic() < deadline:
                    time.sleep(RETRY_S)
                    continue
                opened = self._known.history is not None
                waited_s = time.monotonic() - started
                raise explain(error, self._path, waited_s, opened=opened) from error
            except BaseException:
                if connection is not None:
                    connection.close()
                raise

    def _set_up(self, connection: Database, deadline: float) -> None:
        connection.wait_for_locks(deadline)
        _check_kind(connection, self._path)
        if connection.pragma("journal_mode", "wal") != "wal":
            raise ConfigError(
                f"the file system of {self._path} can't share memory between processes, which the "
                "store needs; put it on a local disk"
            )
        connection.pragma("synchronous", "full")
        connection.pragma("journal_size_limit", WAL_LIMIT_BYTES)
        connection.pragma("temp_store", "memory")
        if connection.pragma("application_id") == 0:
            _create(connection)
            _check_kind(connection, self._path)
        if self._prepare:
            connection.run(self._prepare)
        _, floor = self._known.now()
        history, revision, *_ = connection.one(STATE)
        # After its first read, a connection prevents others from removing these files at close.
        self._beside = self._look_beside()
        if None in self._beside:
            raise StoreUnavailable(
                f"the -wal or -shm file of the store {self._path} was deleted while processes use "
                "it; try again once they have noticed, and leave these files to SQLite"
            )
        self._known.saw(history, revision, floor)


def _check_kind(connection: Database, path: Path) -> None:
    # In one reading transaction: another process may be creating the tables now.
    connection.run("BEGIN")
    application = connection.pragma("application_id")
    (tables,) = connection.one("SELECT count(*) FROM sqlite_schema")
    version = connection.pragma("user_version")
    connection.run("COMMIT")
    if application != APPLICATION_ID and (application or tables):
        raise ConfigError(f"{path} is another program's database; name another path for the store")
    if application == APPLICATION_ID and version != FORMAT:
        raise ConfigError(
            f"the store {path} has format {version}, this version of Domicile reads {FORMAT}; "
            "run the version that made it, or name another path"
        )


def _create(connection: Database) -> None:
    # Several statements in one transaction, unlike all later writes (S9): no store is open yet.
    connection.run("BEGIN IMMEDIATE")
    try:
        if connection.pragma("application_id") == 0:
            connection.run(TABLES)
            connection.run(
                "INSERT INTO meta VALUES (1, ?, ?, 0.0, 0, 0)", (secrets.token_hex(16), boot_id())
            )
            connection.pragma("user_version", FORMAT)
            connection.pragma("application_id", APPLICATION_ID)
        connection.run("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.run("ROLLBACK")
        raise


def _identity(path: str) -> tuple[int, int] | None:
    # The file is not opened: closing it again would drop this process's locks on it.
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def boot_id() -> str:
    """The id of the machine's present boot: its clock starts from 0 at each boot (S4)."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(
            f"the embedded store needs {BOOT_ID} to know which leases a restart of the machine "
            "voids; run it on Linux, or use another store"
        ) from error


def elapsed_s() -> float:
    """Seconds since boot, suspended time included (A2); one clock for all processes."""
    # On other systems `boot_id` raises before this is called.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def explain(error: apsw.Error, path: Path, waited_s: float, *, opened: bool) -> Exception:
    """The error of Domicile for an error of SQLite: what happened and what to do."""
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return StoreUnavailable(
            f"the store {path} stayed locked for {waited_s:.1f} s: another process is stopped or "
            f"stuck in the middle of a write (`fuser -v {path}` names those that have it open); "
            "let it go on or end it"
        )
    if isinstance(error, apsw.FullError):
        return StoreUnavailable(f"the disk of the store {path} is full; make room on it")
    if isinstance(error, apsw.ReadOnlyError | apsw.PermissionsError):
        return StoreUnavailable(
            f"the store {path} can't be written to: it, its directory or its file system is "
            "read-only; make them writable for this user. A user who may only read gets an answer "
            "from `domicile status` while a process has the store open"
        )
    if isinstance(error, apsw.NotADBError):
        kind = StoreUnavailable if opened else ConfigError
        return kind(f"{path} is not a database; name another path for the store, or put it back")
    if isinstance(error, apsw.CorruptError):
        return StoreUnavailable(
            f"the store {path} is damaged ({error}); stop all processes that use it, then remove "
            "it with its -wal and -shm files, or put a sound copy in its place"
        )
    if isinstance(error, apsw.CantOpenError):
        return StoreUnavailable(
            f"the store {path} can't be opened; see that its directory exists, that this user may "
            "read and write in it, and that this process has file descriptors left"
        )
    code = getattr(error, "extendedresult", 0)
    return StoreUnavailable(
        f"the store {path} failed ({type(error).__name__} {code}: {error}); look at its disk and "
        "the system's log, then try again"
    )
