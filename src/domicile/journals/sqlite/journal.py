"""The journal of the processes of one machine: a SQLite file with one writer at a time.

Implements the journal port. Two threads wait for the disk, one for writes and one for reads; the
event loop never does. Every write is one SQL statement (`schema`). If SQLite does not tell the
outcome of a call, the call raises `JournalUnknown`, and its caller settles the batch by its number
(J4). Nothing here may check a fence outside of the statement that writes.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import apsw
import msgspec

from domicile.concurrency.daemon_threads import DaemonThreads
from domicile.core.ids import EntityKey, Incarnation
from domicile.journals.sqlite.file import JournalFile, JournalLocked
from domicile.journals.sqlite.lock_holder import end_process, find_holder, started_at
from domicile.journals.sqlite.schema import (
    CLAIM,
    CLASHES,
    FILL_IN,
    HELD,
    KEPT_DAYS,
    SCRATCH,
    TAKEN,
    WRITE,
    WRITTEN,
    claim_values,
    create_day,
    day_table,
    inbox_view,
    write_triggers,
    write_values,
)
from domicile.ports.journal import (
    Batch,
    Claim,
    Recovered,
    StoredReply,
    WriteRefused,
    Written,
)

T = TypeVar("T")

log = logging.getLogger("domicile")

_Answer = Written | WriteRefused

DAY_S = 86_400

PAGE_EVENTS = 4_096
"""Most events of one entity in one page of a recovery."""

_ENTITY = "SELECT n, seq, bytes FROM entity WHERE cluster = ? AND type = ? AND id = ?"

_FENCE = """SELECT n, epoch, owner, next, batch, void FROM fence
    WHERE cluster = ? AND role = ? AND layout = ? AND shard = ?"""

# All values in one row: with a row for each event the thread would need the interpreter's lock for
# each of them.
_PAGE = """SELECT json_group_array(length(data)), CAST(group_concat(data, '') AS BLOB) FROM (
    SELECT data FROM event WHERE entity = ? AND seq > ? ORDER BY seq LIMIT ?
)"""

_FITS = """SELECT count(*) FROM (
    SELECT sum(length(data)) OVER (ORDER BY seq) AS total
    FROM event WHERE entity = ? AND seq > ? ORDER BY seq LIMIT ?
) WHERE total <= ?"""


class SqliteJournal:
    """Implements `Journal`.

    `lives` says whether the record of an incarnation is in the store. With it the journal ends a
    process that stands still in the middle of a write although its record is gone (J3). `pause` is
    for tests: it blocks the writing thread between the checks of a batch and its writes.
    """

    def __init__(
        self,
        path: Path,
        cluster: str,
        *,
        wait_s: float = 5.0,
        lives: Callable[[Incarnation], Awaitable[bool]] | None = None,
        days: Callable[[], float] = lambda: time.time() / DAY_S,
        pause: Callable[[], None] | None = None,
    ) -> None:
        self._path, self._lives = path, lives
        self._writing = _WritingSide(JournalFile(path, wait_s, create=True), cluster, days, pause)
        self._reading = _ReadingSide(JournalFile(path, wait_s, create=False), cluster)
        self._writers = DaemonThreads(1, "domicile-journal-write")
        self._readers = DaemonThreads(1, "domicile-journal-read")
        self._used = False
        self._pending = 0
        self._counting = threading.Lock()

    async def claim(self, claims: Sequence[Claim]) -> Sequence[int | None]:
        """As `Journal.claim`."""
        return await self._write(lambda: self._writing.claim(claims))

    async def write(self, batch: Batch) -> Sequence[_Answer]:
        """As `Journal.write`."""
        return await self._write(lambda: self._writing.write(batch))

    async def settle(self, batch: Batch) -> Sequence[_Answer | None]:
        """As `Journal.settle`."""
        return await self._write(lambda: self._writing.settle(batch))

    async def recover(
        self, wanted: Sequence[tuple[EntityKey, int]], max_bytes: int
    ) -> Sequence[Recovered]:
        """As `Journal.recover`."""
        self._used = True
        return await self._readers.run(lambda: self._reading.recover(wanted, max_bytes))

    async def inbox(self, asked: Sequence[tuple[EntityKey, str]]) -> Sequence[StoredReply | None]:
        """As `Journal.inbox`."""
        self._used = True
        return await self._readers.run(lambda: self._reading.inbox(asked))

    async def close(self) -> None:
        """End the writes under way, and close the file."""
        if not self._used:
            return
        await self._writers.run(self._writing.close)
        await self._readers.run(self._reading.close)
        self._writers.rest()
        self._readers.rest()

    @property
    def queued(self) -> int:
        """How many writes wait for the one that is under way, for tests."""
        return max(0, self._pending - 1)

    async def _write(self, work: Callable[[], T]) -> T:
        def job() -> T:
            try:
                return work()
            finally:
                with self._counting:
                    self._pending -= 1

        self._used = True
        with self._counting:
            self._pending += 1
        try:
            return await self._writers.run(job)
        except JournalLocked:
            if not await self._ended_holder():
                raise
        return await self._writers.run(work)

    async def _ended_holder(self) -> bool:
        """Whether the process that holds the lock was ended: all its records are gone (J3)."""
        if self._lives is None:
            return False
        pid = await self._readers.run(lambda: find_holder(self._path))
        if pid is None:
            return False
        found = await self._readers.run(lambda: self._reading.incarnations(pid))
        if found is None:
            return False
        started, owners = found
        for owner in owners:
            if await self._lives(owner):
                return False
        if not end_process(pid, started):
            return False
        log.warning(
            "process %d stood still while it wrote to the journal %s, and its lease is over: it "
            "was ended (SIGKILL), so that other nodes can write; start it anew",
            pid, self._path,
        )  # fmt: skip
        return True


class _Side:
    """What the writing and the reading thread have in common: a connection and the cluster's
    number."""

    def __init__(self, file: JournalFile, cluster: str) -> None:
        self._file = file
        self._name = cluster
        self._cluster: int | None = None
        self._connection: Any = None

    def close(self) -> None:
        """Close the file."""
        self._file.drop()

    def _use(self) -> Any:
        """The connection, prepared anew if it is another one than last time."""
        connection = self._file.use()
        if connection is not self._connection:
            self._prepare(connection)
            self._connection = connection
        return connection

    def _prepare(self, connection: Any) -> None:
        self._cluster = self._find(connection)

    def _find(self, connection: Any) -> int | None:
        rows = connection.execute("SELECT n FROM cluster WHERE name = ?", (self._name,)).fetchall()
        return rows[0][0] if rows else None

    def _entity(self, connection: Any, entity: EntityKey) -> tuple[int, int, int]:
        """The number of an entity in this file, its events and their bytes; zeros if it has
        none."""
        rows = connection.execute(_ENTITY, (self._cluster, *entity)).fetchall()
        return rows[0] if rows else (0, 0, 0)


class _WritingSide(_Side):
    """What the writing thread does."""

    def __init__(
        self,
        file: JournalFile,
        cluster: str,
        days: Callable[[], float],
        pause: Callable[[], None] | None,
    ) -> None:
        super().__init__(file, cluster)
        self._days, self._pause = days, pause
        self._today = -1

    def claim(self, claims: Sequence[Claim]) -> list[int | None]:
        """Raise fences (J1)."""
        return self._told(lambda connection: self._claim(connection, claims))

    def write(self, batch: Batch) -> list[_Answer]:
        """Write a batch (J2, J3)."""
        return self._told(lambda connection: self._write(connection, batch))

    def settle(self, batch: Batch) -> list[_Answer | None]:
        """Say what became of a batch (J4)."""
        return self._told(lambda connection: self._settle(connection, batch))

    def _told(self, work: Callable[[Any], T]) -> T:
        try:
            connection = self._use()
            if self._today != int(self._days()):
                self._begin_day(connection)
            try:
                return work(connection)
            except apsw.SQLError:
                # Another process began a day, and dropped a table that the trigger names.
                self._begin_day(connection)
                return work(connection)
        except apsw.Error as error:
            raise self._file.failed(error) from error

    def _prepare(self, connection: Any) -> None:
        connection.execute(SCRATCH)
        if self._pause is not None:
            connection.create_scalar_function("pause", self._pause, 0)
        self._today = -1
        super()._prepare(connection)

    def _begin_day(self, connection: Any) -> None:
        """Have a table for the keys of today, and drop those that are too old."""
        today = int(self._days())
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.execute(
                "INSERT INTO cluster (name, history) VALUES (?, ?) ON CONFLICT DO NOTHING",
                (self._name, secrets.token_hex(16)),
            )
            found = connection.execute(
                "SELECT name FROM sqlite_schema WHERE type = 'table' AND name GLOB 'inbox_*'"
            ).fetchall()
            known = sorted(int(name.removeprefix("inbox_")) for (name,) in found)
            # A clock that went back finds tables of later days; the newest is in use until then.
            today = max([today, *known])
            days = [day for day in known if day >= today - KEPT_DAYS]
            if today not in days:
                connection.execute(create_day(today))
                days.append(today)
            if days != known:
                connection.execute(inbox_view(days))
                for day in known:
                    if day not in days:
                        connection.execute(f"DROP TABLE {day_table(day)}")
            ended = [
                (owner,)
                for owner, pid, started in connection.execute(
                    "SELECT owner, pid, started FROM process"
                ).fetchall()
                if started_at(pid) != started
            ]
            connection.executemany("DELETE FROM process WHERE owner = ?", ended)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        connection.execute(write_triggers(days, pauses=self._pause is not None))
        self._cluster = self._find(connection)
        self._today = int(self._days())

    def _claim(self, connection: Any, claims: Sequence[Claim]) -> list[int | None]:
        assert self._cluster is not None
        pid = os.getpid()
        connection.execute(CLAIM, claim_values(self._cluster, pid, started_at(pid), claims))
        return [None if ok else epoch for ok, epoch, _ in _listed(connection, HELD)]

    def _write(self, connection: Any, batch: Batch) -> list[_Answer]:
        assert self._cluster is not None
        statement = FILL_IN if any(write.replies for write in batch.writes) else WRITE
        connection.execute(statement, write_values(self._cluster, batch))
        held = dict(
            zip([claim.shard for claim in batch.claims], _listed(connection, HELD), strict=True)
        )
        answers: list[_Answer] = []
        for write, (fault, seq) in zip(batch.writes, _listed(connection, WRITTEN), strict=True):
            row = held[write.shard]
            ok, epoch, offset = row
            if ok == TAKEN:
                count = len(write.events)
                row[2] = offset + count
                answers.append(Written(seq + count, offset + count))
            elif ok == CLASHES:
                answers.append(WriteRefused(fault or "busy", epoch))
            else:
                answers.append(WriteRefused("fenced", epoch or 0))
        return answers

    def _settle(self, connection: Any, batch: Batch) -> list[_Answer | None]:
        answers: dict[EntityKey, _Answer | None] = {}
        connection.execute("BEGIN IMMEDIATE")
        try:
            for claim in batch.claims:
                self._settle_shard(connection, batch, claim, answers)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return [answers[write.entity] for write in batch.writes]

    def _settle_shard(
        self,
        connection: Any,
        batch: Batch,
        claim: Claim,
        answers: dict[EntityKey, _Answer | None],
    ) -> None:
        (role, shard), writes = claim.shard, [w for w in batch.writes if w.shard == claim.shard]
        rows = connection.execute(_FENCE, (self._cluster, role, claim.layout, shard)).fetchall()
        n, epoch, owner, offset, last, void = rows[0] if rows else (0, 0, "", 0, 0, 0)
        if (epoch, owner) != (claim.epoch, claim.owner):
            # The number alone proves nothing: the successor counts, too.
            answers |= {write.entity: WriteRefused("fenced", epoch) for write in writes}
        elif last < batch.number or void == batch.number:
            # The late batch then writes nothing. The row remembers that it never wrote: a second
            # settling, after a lost answer, must not take its number for a proof.
            connection.execute(
                "UPDATE fence SET batch = max(batch, ?1), void = ?1 WHERE n = ?2", (batch.number, n)
            )
            answers |= dict.fromkeys([write.entity for write in writes])
        else:
            offset -= sum(len(write.events) for write in writes)
            for write in writes:
                offset += len(write.events)
                _, seq, _ = self._entity(connection, write.entity)
                answers[write.entity] = Written(seq, offset)


class _ReadingSide(_Side):
    """What the reading thread does. It sees what is committed, and waits for no writer."""

    def incarnations(self, pid: int) -> tuple[str, list[Incarnation]] | None:
        """When a running process started, and what it was in this cluster; None if it was in
        another one, or is unknown."""
        return self._told(lambda connection: self._incarnations(connection, pid, started_at(pid)))

    def _incarnations(
        self, connection: Any, pid: int, started: str
    ) -> tuple[str, list[Incarnation]] | None:
        rows = connection.execute(
            "SELECT owner, cluster FROM process WHERE pid = ? AND started = ?", (pid, started)
        ).fetchall()
        if not rows or any(cluster != self._cluster for _, cluster in rows):
            return None
        return started, [Incarnation(owner) for owner, _ in rows]

    def recover(self, wanted: Sequence[tuple[EntityKey, int]], max_bytes: int) -> list[Recovered]:
        """Pages of events, one for each entity."""
        return self._told(lambda connection: self._recover(connection, wanted, max_bytes))

    def inbox(self, asked: Sequence[tuple[EntityKey, str]]) -> list[StoredReply | None]:
        """What is stored for keys."""
        return self._told(lambda connection: self._inbox(connection, asked))

    def _told(self, work: Callable[[Any], T]) -> T:
        try:
            connection = self._use()
            if self._cluster is None:
                self._cluster = self._find(connection)
            return work(connection)
        except apsw.Error as error:
            raise self._file.failed(error) from error

    def _recover(
        self, connection: Any, wanted: Sequence[tuple[EntityKey, int]], max_bytes: int
    ) -> list[Recovered]:
        found: list[Recovered] = []
        left, first = max_bytes, True
        for entity, after in wanted:
            n, seq, size = self._entity(connection, entity)
            count = min(seq - after, PAGE_EVENTS)
            if count > 0 and size > left:
                [(count,)] = connection.execute(_FITS, (n, after, count, left)).fetchall()
                count = max(count, int(first))
            events: list[bytes] = []
            if count > 0:
                [(sizes, data)] = connection.execute(_PAGE, (n, after, count)).fetchall()
                at = 0
                for length in msgspec.json.decode(sizes, type=list[int]):
                    events.append(data[at : at + length])
                    at += length
                left -= at
                first = False
            end = after + len(events)
            found.append(Recovered(tuple(events), end, end < seq))
        return found

    def _inbox(
        self, connection: Any, asked: Sequence[tuple[EntityKey, str]]
    ) -> list[StoredReply | None]:
        found: list[StoredReply | None] = []
        for entity, key in asked:
            n, _, _ = self._entity(connection, entity)
            rows = connection.execute(
                "SELECT reply FROM inbox WHERE entity = ? AND key = ?", (n, key)
            ).fetchall()
            found.append(StoredReply(rows[0][0]) if rows else None)
        return found


def _listed(connection: Any, query: str) -> list[list[Any]]:
    """The rows of a query that returns them as one JSON text."""
    [(text,)] = connection.execute(query).fetchall()
    return msgspec.json.decode(text, type=list[list[Any]])
