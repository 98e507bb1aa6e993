"""What the embedded store's two threads do with its file: one writes, one reads and finds changes.

Only `domicile.stores.sqlite` uses it. Every method runs in its own thread and must never touch the
event loop.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import NamedTuple, Protocol

import apsw

from domicile.core.state.txn import Change, Changes, Item, Listing
from domicile.errors import ConfigError, StoreError, StoreRewound, StoreUnavailable, WatchCompacted
from domicile.stores.key_range import above
from domicile.stores.sqlite.file import (
    CommitUnknown,
    Database,
    Handle,
    Known,
    Row,
    elapsed_s,
    explain,
)
from domicile.stores.sqlite.schema import (
    CALLS,
    COLUMNS,
    GET,
    HURRIED,
    LIST,
    LOG,
    OUTCOME,
    OUTCOMES,
    PREPARE,
    ranged,
    together,
)
from domicile.stores.sqlite.threads import FileNotifier, ring_file

log = logging.getLogger("domicile")

BATCH_ROWS = 256
"""About how many changes are read at once; if there are more, each watch reads them itself."""

MOST_COMMITS = 32
MOST_BYTES = 256 * 1024
"""Most commits and bytes in one transaction: a process that is stopped in it delays all others
(S9)."""

TOGETHER_S = 0.5
"""Most seconds between the deadlines of commits that go together."""

LOOK_S = 0.02
"""Seconds between two looks for changes if the system does not report writes to the file."""

IDLE_LOOK_S = 1.0
"""Seconds between two looks for changes if the system reports writes but has reported none."""

BELL = "-bell"
"""Suffix of the file that is written after each commit, so that other processes notice it. Not the
-wal file: renewals go there too, and each would wake every process (I8)."""


# After these errors the statement did nothing. After others the disk may hold the commit (S1).
_REFUSALS = (
    apsw.BusyError,
    apsw.CantOpenError,
    apsw.ConstraintError,
    apsw.CorruptError,
    apsw.FullError,
    apsw.LockedError,
    apsw.NotADBError,
    apsw.PermissionsError,
    apsw.ReadOnlyError,
)


Rows = list[Row]


class Result(NamedTuple):
    revision: int
    conflict: int | None
    ttl_s: float | None


class CommitJob(NamedTuple):
    """A commit as the writing thread gets it; neighbours in the queue may go together."""

    ops: str
    data: bytes
    generation: int
    deadline: float

    @property
    def size_bytes(self) -> int:
        """Bytes that the commit gives to the file: keys, values and the names of leases."""
        return len(self.ops) + len(self.data)

    def joins(self, others: Sequence[CommitJob]) -> bool:
        """Whether this commit may go together with the commits before it.

        All share the first deadline, so that must not be over or much earlier than its own. The
        sum must be small, so that the file is not locked for long (S9).
        """
        first = others[0]
        left_s = first.deadline - time.monotonic()
        return (
            len(others) < MOST_COMMITS
            and self.generation == first.generation
            and left_s > 0
            and self.deadline - first.deadline <= min(TOGETHER_S, left_s / 4)
            and self.size_bytes + sum(one.size_bytes for one in others) <= MOST_BYTES
        )


class WatchedChanges(NamedTuple):
    """What a watch finds: changes, and the revision up to which they are complete."""

    changes: list[Changes]
    upto: int


class News(NamedTuple):
    """What a look found: all changes between two revisions; None if there are too many.

    The file has deleted the changes up to `trimmed`. `generation` counts the rewinds that the
    reader knew (S5).
    """

    since: int
    upto: int
    changes: list[Changes] | None
    trimmed: int
    generation: int


class ReaderEvents(Protocol):
    """The callbacks of the reading thread. Each call returns at once."""

    def changed(self, news: News) -> None:
        """There are commits since the last look."""
        ...

    def broken(self, error: StoreError) -> None:
        """The file cannot be read."""
        ...

    def expire(self) -> Future[Result]:
        """A lease has expired; `StoreUnavailable` if that cannot be written now."""
        ...


class StoreWriter:
    """What the writing thread does."""

    boot = ""

    def __init__(
        self,
        path: Path,
        known: Known,
        by: str,
        kept: int,
        elapsed: Callable[[], float],
        unhurried: bytes,
    ) -> None:
        self.by = by
        self._unhurried = unhurried
        self.handle = Handle(path, known, PREPARE)
        self._bell = path.with_name(path.name + BELL)
        self._known = known
        self._kept = kept
        self._elapsed = elapsed

    def run(self, name: str, fields: dict[str, object], generation: int, deadline: float) -> Result:
        """One write that is not a commit."""
        (result,) = self._call(name, fields, OUTCOME, (), generation, deadline)
        return result

    def commit(self, commits: Sequence[CommitJob]) -> list[Result]:
        """Commits of one generation, one after the other, with one wait for the disk."""
        ops, data = together([(one.ops, one.data) for one in commits])
        deadline = min(one.deadline for one in commits)
        fields: dict[str, object] = {"ops": ops, "data": data}
        count = len(commits)
        return self._call("commit", fields, OUTCOMES, (count,), commits[0].generation, deadline)

    def _call(
        self,
        name: str,
        fields: dict[str, object],
        outcome: str,
        parameters: tuple[object, ...],
        generation: int,
        deadline: float,
    ) -> list[Result]:
        known, started = self._known, time.monotonic()
        known.check(generation)
        try:
            connection = self.handle.use(deadline)
            known.check(generation)
        except apsw.Error as error:
            raise self.handle.failed(error, time.monotonic() - started) from error
        history, floor = known.now()
        values: dict[str, object] = {
            **dict.fromkeys(COLUMNS),
            **{"history": history, "floor": floor, "boot": self.boot},
            **{"elapsed": self._elapsed(), "by": self.by, "kept": self._kept},
            **fields,
        }
        try:
            connection.run(CALLS[name], values)
        except apsw.ConstraintError as error:
            self.handle.drop()
            if str(error) != "rewound":
                raise StoreUnavailable(
                    f"the store refused a write ({error}); its file was changed by other means: "
                    "put a sound copy in its place"
                ) from error
            known.rewind(generation, f"it has another history, or less than {floor}")
        except apsw.Error as error:
            raised = self.handle.failed(error, time.monotonic() - started)
            if isinstance(error, _REFUSALS):
                raise raised from error
            raise CommitUnknown(str(raised)) from error
        results = [Result(*row) for row in connection.rows(outcome, parameters)]
        # If the file was replaced meanwhile, this write is lost (S5).
        self.handle.check_place()
        newest = results[-1].revision
        known.saw(history, newest, floor)
        # A change of a lease alone concerns no watch. But any write may find an expired lease, and
        # its end is a commit (S3).
        if newest > floor and self._hurried(connection, floor):
            ring_file(self._bell)
        return results

    def _hurried(self, connection: Database, since: int) -> bool:
        """Whether other processes should notice the commits after a revision at once."""
        if not self._unhurried:
            return True
        prefix = self._unhurried
        try:
            ((hurried,),) = connection.rows(HURRIED, (since, prefix, above(prefix)))
        except apsw.Error:
            return True
        return bool(hurried)


class StoreReader:
    """What the reading thread does: reads, and looks for changes while watches wait."""

    boot = ""
    watched = False

    def __init__(
        self,
        path: Path,
        known: Known,
        lookout: ReaderEvents,
        op_timeout_s: float,
        elapsed: Callable[[], float] | None,
    ) -> None:
        self.handle = Handle(path, known)
        self._path = path
        self._bell = path.with_name(path.name + BELL)
        self._known = known
        self._lookout = lookout
        self._op_timeout_s = op_timeout_s
        self._elapsed = elapsed or elapsed_s
        self._real_time = elapsed is None
        self._listens_to: Database | None = None
        self._hears = False
        self._listen_at = 0.0
        self._version: object = -1
        self._looked_at = -1
        self._next_deadline: float | None = None
        self._failing_since: float | None = None
        self._expiring: Future[Result] | None = None
        self._expiry_at = 0.0

    def get(self, key: bytes, generation: int, deadline: float) -> tuple[bool, Item | None]:
        """Whether a lease has expired, and the item."""
        rows = self._rows(GET, (key,), generation, deadline)
        due = self._is_due(rows[0])
        return due, None if rows[0][5] is None else Item(*rows[0][5:9])

    def list(self, prefix: bytes, generation: int, deadline: float) -> tuple[bool, Listing]:
        """Whether a lease has expired, and the items."""
        rows = self._rows(*ranged(LIST, prefix), generation, deadline)
        items = tuple([Item(*row[5:9]) for row in rows if row[5] is not None])
        return self._is_due(rows[0]), Listing(rows[0][1], items)

    def log(self, prefix: bytes, seen: int, generation: int, deadline: float) -> WatchedChanges:
        """The first changes after a revision."""
        rows = self._rows(*ranged(LOG, prefix, seen), generation, deadline, most=BATCH_ROWS)
        revision, trimmed = rows[0][1], rows[0][5]
        if seen > revision:
            raise StoreRewound(
                f"a watch from revision {seen} is ahead of the store {self._path} at {revision}: "
                "its history went back; drop what was learned from it and list again"
            )
        if seen < trimmed:
            raise WatchCompacted(
                f"changes after revision {seen} are kept only from {trimmed + 1} on; "
                "list again and watch from the listing's revision"
            )
        changes = _changes(rows)
        return WatchedChanges(changes, changes[-1].revision if changes else revision)

    def between(self, bell: FileNotifier, modified: bool) -> float | None:
        """Look for changes if watches wait; return the seconds until the next look."""
        if not self.watched:
            return None
        if modified:
            bell.hush()
        try:
            self._look(bell)
            self._failing_since = None
        except (apsw.BusyError, apsw.LockedError) as error:
            self._fail(error)
        except apsw.Error as error:
            self._broken(self.handle.failed(error, 0.0))
        except (StoreError, ConfigError) as error:
            self._broken(error)
        except Exception as error:
            # Without this thread no read would be answered, so it continues with a new connection.
            log.exception("looking for changes in the store %s failed", self._path)
            self.handle.drop()
            self._broken(error)
        return self._rest_s()

    def _look(self, bell: FileNotifier) -> None:
        """Report changes since the last look, and let expired leases end."""
        patience_s = LOOK_S if self.handle.connection is not None else self._op_timeout_s
        connection = self.handle.use(time.monotonic() + patience_s)
        if connection is not self._listens_to:
            self._listens_to, self._version, self._looked_at = connection, -1, -1
        self._listen(bell)
        version = connection.pragma("data_version")
        if version != self._version:
            since, (_, floor) = self._looked_at, self._known.now()
            # The first time only the state is needed: no commit has so high a revision.
            query = ranged(LOG, b"", since if since >= 0 else sys.maxsize)
            rows = connection.rows(*query, most=BATCH_ROWS, same=6)
            self.handle.check_place()
            history, upto, _, boot, deadline, trimmed = rows[0][:6]
            self._known.saw(history, upto, floor)
            self._version, self._looked_at = version, upto
            other_boot = deadline is not None and boot != self.boot
            self._next_deadline = -inf if other_boot else deadline
            if upto > since:
                complete = trimmed <= since and len(rows) < BATCH_ROWS
                changes = _changes(rows) if complete else None
                generation = self.handle.generation
                self._lookout.changed(News(since, upto, changes, trimmed, generation))
        self._expire_due()

    def _listen(self, bell: FileNotifier) -> None:
        """Make sure that the notifier watches the file; create the file again if it was removed."""
        if bell.hears(self._bell):
            return
        now = time.monotonic()
        if self._hears or now >= self._listen_at:
            self._listen_at = now + IDLE_LOOK_S
            ring_file(self._bell)
            self._hears = bell.listen(self._bell)

    def _expire_due(self) -> None:
        now = time.monotonic()
        if self._next_deadline is None or self._elapsed() < self._next_deadline:
            return
        if now < self._expiry_at or (self._expiring is not None and not self._expiring.done()):
            return
        self._expiry_at = now + LOOK_S
        # If too many writes wait, a later look tries again; reads still work (I6).
        with suppress(StoreUnavailable):
            self._expiring = self._lookout.expire()

    def _rest_s(self) -> float:
        if not self._hears or not self._real_time or self._failing_since is not None:
            return LOOK_S
        rest_s = IDLE_LOOK_S
        if self._next_deadline is not None:
            due_s = max(LOOK_S / 4, self._next_deadline - self._elapsed())
            rest_s = min(rest_s, due_s)
        return rest_s

    def _fail(self, error: apsw.Error) -> None:
        """A lock blocks even readers: end the watches if that lasts."""
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        if now - self._failing_since > self._op_timeout_s:
            self._broken(explain(error, self._path, now - self._failing_since, opened=True))

    def _broken(self, error: Exception) -> None:
        self._failing_since = None
        if not isinstance(error, StoreRewound):
            self._lookout.broken(
                error if isinstance(error, StoreError) else StoreUnavailable(str(error))
            )

    def _rows(
        self,
        query: str,
        parameters: tuple[object, ...],
        generation: int,
        deadline: float,
        most: int = sys.maxsize,
    ) -> Rows:
        """As `Database.rows`, from the history that the caller knows."""
        known, started = self._known, time.monotonic()
        known.check(generation)
        try:
            connection = self.handle.use(deadline)
            known.check(generation)
            _, floor = known.now()
            rows = connection.rows(query, parameters, most=most, same=6)
            self.handle.check_place()
        except apsw.Error as error:
            raise self.handle.failed(error, time.monotonic() - started) from error
        known.saw(rows[0][0], rows[0][1], floor)
        return rows

    def _is_due(self, row: Row) -> bool:
        time_s, boot, deadline = row[2:5]
        if deadline is None:
            return False
        return bool(boot != self.boot or max(time_s, self._elapsed()) >= deadline)


def _changes(rows: Rows) -> list[Changes]:
    """The changes in rows of `LOG`, by commit."""
    found: dict[int, list[Change]] = {}
    for *_, at, key, value, created in rows:
        if at is not None:
            item = None if value is None else Item(key, value, created, at)
            found.setdefault(at, []).append(Change(key, item))
    return [Changes(at, tuple(each)) for at, each in found.items()]
