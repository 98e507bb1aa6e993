"""A connection to a journal's file: opened at its first use, closed after an error.

Only `domicile.journals.sqlite` uses it. A connection belongs to one thread at a time. Nothing here
may open and close the file except through SQLite: that would drop the locks that SQLite holds in
this process.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw

from domicile.errors import ConfigError
from domicile.journals.sqlite.schema import (
    APPLICATION_ID,
    FORMAT,
    FROM_1,
    MISNUMBERED,
    TABLES,
    rename_days,
)
from domicile.ports.journal import JournalUnknown, older_format

log = logging.getLogger("domicile")

BUSY_S = 0.001
"""Seconds of the first wait for a lock that is taken; later waits are up to five times longer."""

RETRY_S = 0.01
WAL_PAGES = 4_000
"""Pages of the -wal file after which a commit copies them into the database."""


class JournalLocked(JournalUnknown):
    """Another process held the lock for too long; nothing was written."""


class JournalFile:
    """One connection to the file, which waits up to `wait_s` for a lock.

    One that `reads_only` changes nothing: neither the format of the file nor its mode.
    """

    def __init__(
        self, path: Path, wait_s: float, *, create: bool, reads_only: bool = False
    ) -> None:
        self.path = path
        self._wait_s = wait_s
        self._create, self._reads_only = create, reads_only
        self._until = 0.0
        self._raw: Any = None

    def use(self) -> Any:
        """The connection; it waits for locks from now on for `wait_s` in all."""
        self._until = time.monotonic() + self._wait_s
        if self._raw is not None and self._moved():
            self.drop()
            raise JournalUnknown(
                f"the journal {self.path} was deleted or replaced while processes use it; put the "
                "file back with its -wal file, or stop all nodes before they go on without it"
            )
        if self._raw is None:
            self._raw = self._open()
        return self._raw

    def drop(self) -> None:
        """Close the connection; the next use opens another."""
        raw, self._raw = self._raw, None
        if raw is not None:
            # The last connection copies the -wal file into the database; if that fails, it stays.
            with suppress(apsw.Error):
                raw.close(True)

    def failed(self, error: apsw.Error) -> JournalUnknown:
        """What an error of SQLite means; the connection is dropped if it may be the cause."""
        if isinstance(error, apsw.BusyError | apsw.LockedError):
            return JournalLocked(self._explain(error))
        self.drop()
        return JournalUnknown(self._explain(error))

    def _open(self) -> Any:
        if os.path.isdir(self.path):
            raise ConfigError(f"the journal {self.path} is a directory; name a file in it")
        if self._create:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"the directory of the journal {self.path} can't be made ({error.strerror}); "
                    "make it, writable for this user, or name another path"
                ) from error
        create = apsw.SQLITE_OPEN_CREATE if self._create else 0
        while True:
            raw: Any = None
            try:
                raw = apsw.Connection(str(self.path), flags=apsw.SQLITE_OPEN_READWRITE | create)
                # SQLite's own handler may sleep a whole second between two tries.
                raw.set_busy_handler(self._busy)
                self._set_up(raw)
                return raw
            except apsw.Error as error:
                if raw is not None:
                    raw.close(True)
                # While another process creates the file, SQLite does not always wait.
                if isinstance(error, apsw.BusyError) and time.monotonic() < self._until:
                    time.sleep(RETRY_S)
                    continue
                raise
            except BaseException:
                if raw is not None:
                    raw.close(True)
                raise

    def _set_up(self, raw: Any) -> None:
        self._check_kind(raw)
        if self._reads_only:
            self._check_format(raw)
            raw.pragma("temp_store", "memory")
            return
        if raw.pragma("journal_mode", "wal") != "wal":
            raise ConfigError(
                f"the file system of {self.path} can't share memory between processes, which a "
                "journal needs; put it on a local disk"
            )
        raw.pragma("synchronous", "full")
        raw.pragma("wal_autocheckpoint", WAL_PAGES)
        if raw.pragma("application_id") == 0:
            _create(raw)
            self._check_kind(raw)
        if raw.pragma("user_version") < FORMAT:
            self._migrate(raw)
        raw.pragma("temp_store", "memory")

    def _check_format(self, raw: Any) -> None:
        """Refuse to read an older format: only a process that writes may change it."""
        found = raw.pragma("user_version")
        if raw.pragma("application_id") != APPLICATION_ID:
            raise JournalUnknown(f"{self.path} is empty: it is no journal yet; name another file")
        if found < FORMAT:
            raise JournalUnknown(older_format(str(self.path), found))

    def _migrate(self, raw: Any) -> None:
        """Bring the tables of an older format up to date, or leave all as it was."""
        offsets: dict[int, int] = defaultdict(int)

        def next_offset(fence: int) -> int:
            offsets[fence] += 1
            return offsets[fence]

        raw.execute("BEGIN EXCLUSIVE")
        try:
            # Another process may have done it, or a newer version may have come, meanwhile.
            found = raw.pragma("user_version")
            if found < FORMAT:
                log.warning(
                    "the journal %s has format %d and is brought to format %d; processes of an "
                    "older version can't write to it any more",
                    self.path, found, FORMAT,
                )  # fmt: skip
                if found < 2:
                    raw.create_scalar_function("next_offset", next_offset, 1)
                    raw.execute(FROM_1)
                    [(wrong,)] = raw.execute(MISNUMBERED).fetchall()
                    if wrong:
                        raise ConfigError(
                            f"the journal {self.path} can't be brought to format {FORMAT}: {wrong} "
                            "shards have other events than their fences say; nothing was changed; "
                            "keep the file, and run the version that made it"
                        )
                rename_days(raw)
                raw.pragma("user_version", FORMAT)
            raw.execute("COMMIT")
        except BaseException:
            if raw.in_transaction:
                raw.execute("ROLLBACK")
            raise
        finally:
            raw.create_scalar_function("next_offset", None, 1)
        self._check_kind(raw)

    def _check_kind(self, raw: Any) -> None:
        # In one reading transaction: another process may be creating the tables now.
        raw.execute("BEGIN")
        application = raw.pragma("application_id")
        [(tables,)] = raw.execute("SELECT count(*) FROM sqlite_schema").fetchall()
        version = raw.pragma("user_version")
        raw.execute("COMMIT")
        if application != APPLICATION_ID and (application or tables):
            raise ConfigError(
                f"{self.path} is not a journal but another program's database, or a store; name "
                "another path for the journal"
            )
        if application == APPLICATION_ID and version > FORMAT:
            raise ConfigError(
                f"the journal {self.path} has format {version}, this version of Domicile knows "
                f"formats up to {FORMAT}; a newer version has written to it: upgrade Domicile "
                "here, or name another path"
            )

    def _moved(self) -> bool:
        """Whether the file at the path is no longer the open one."""
        moved = ctypes.c_int(0)
        self._raw.file_control("main", apsw.SQLITE_FCNTL_HAS_MOVED, ctypes.addressof(moved))
        return moved.value != 0

    def _busy(self, tries: int) -> bool:
        """SQLite asks this when a lock is taken: whether to try again."""
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(left_s, BUSY_S * min(tries + 1, 5)))
        return True

    def _explain(self, error: apsw.Error) -> str:
        path = self.path
        if isinstance(error, apsw.BusyError | apsw.LockedError):
            return (
                f"the journal {path} stayed locked for {self._wait_s:.1f} s: another process is "
                f"stopped or stuck in the middle of a write (`fuser -v {path}` names those that "
                "have it open); let it go on or end it"
            )
        if isinstance(error, apsw.FullError):
            return f"the disk of the journal {path} is full; make room on it"
        if isinstance(error, apsw.ReadOnlyError | apsw.PermissionsError | apsw.CantOpenError):
            return (
                f"the journal {path} can't be written to: it, its directory or its file system is "
                "missing or read-only; make them writable for this user"
            )
        if isinstance(error, apsw.NotADBError | apsw.CorruptError):
            return (
                f"the journal {path} is damaged, or no journal ({error}); stop all processes that "
                "use it, then put a sound copy in its place"
            )
        code = getattr(error, "extendedresult", 0)
        return (
            f"the journal {path} failed ({type(error).__name__} {code}: {error}); look at its disk "
            "and the system's log"
        )


def _create(raw: Any) -> None:
    # Several statements in one transaction, unlike all later writes: no journal is open yet.
    raw.execute("BEGIN IMMEDIATE")
    try:
        if raw.pragma("application_id") == 0:
            raw.execute(TABLES)
            raw.pragma("user_version", FORMAT)
            raw.pragma("application_id", APPLICATION_ID)
        raw.execute("COMMIT")
    except BaseException:
        if raw.in_transaction:
            raw.execute("ROLLBACK")
        raise
