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
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import apsw
import msgspec

from domicile.concurrency.daemon_threads import DaemonThreads
from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.errors import ConfigError
from domicile.journals.key_days import DayLooks, KeyDays, first_days
from domicile.journals.sqlite.file import JournalFile, JournalLocked
from domicile.journals.sqlite.inspection import (
    seen_faults,
    seen_fences,
    seen_figures,
    seen_names,
)
from domicile.journals.sqlite.lock_holder import end_process, find_holder, started_at
from domicile.journals.sqlite.recovery import recover_group
from domicile.journals.sqlite.schema import (
    CLAIM,
    CLASHES,
    HELD,
    SCRATCH,
    TAKEN,
    WRITTEN,
    claim_values,
    create_day,
    day_table,
    inbox_view,
    known_days,
    stored_days,
    write_triggers,
    write_values,
)
from domicile.journals.sqlite.transfer import Filling, stored_rows
from domicile.journals.trouble import JournalTrouble
from domicile.ports.journal import (
    SCAN_BYTES,
    Batch,
    Claim,
    EventPage,
    FenceSeen,
    JournalFigures,
    JournalMarks,
    JournalNames,
    JournalUnknown,
    Recovered,
    Remembered,
    StoredEvent,
    StoredReply,
    Wanted,
    WriteRefused,
    Written,
    counted,
    placed,
)
from domicile.ports.journal_rows import (
    ROWS_CLASH,
    EntityRow,
    EventRow,
    JournalRow,
    KeyRow,
    ShardRow,
)

T = TypeVar("T")

log = logging.getLogger("domicile")

_Answer = Written | WriteRefused

LOOK_S = 60.0
"""Seconds after which the count of days goes on."""

PAGE_ROWS = 1_000
PAGE_BYTES = 1 << 20
"""Rows, and about how many bytes, that go from thread to thread together."""

_ENTITY = "SELECT n, seq FROM entity WHERE cluster = ? AND type = ? AND id = ?"

_FENCE = """SELECT n, epoch, owner, next, batch, void FROM fence
    WHERE cluster = ? AND role = ? AND layout = ? AND shard = ?"""

# Reads return all values in one row: with a row for each event or entity the thread would need the
# interpreter's lock for each of them.

# No outer join: for that SQLite would copy all keys of all days first.
_INBOX = """SELECT json_group_array(json_array(i, length(reply))),
    CAST(group_concat(reply, '') AS BLOB) FROM (
        SELECT j.key AS i, x.reply FROM json_each(?2) j
        CROSS JOIN entity e ON e.cluster = ?1 AND e.type = j.value->>0 AND e.id = j.value->>1
        CROSS JOIN inbox x ON x.entity = e.n AND x.key = j.value->>2 ORDER BY j.key
)"""

_SCAN = """SELECT json_group_array(json_array(off, seq, type, id, length(data))),
    CAST(group_concat(data, '') AS BLOB) FROM (
        SELECT v.off, v.seq, e.type, e.id, v.data
        FROM event v CROSS JOIN entity e ON e.n = v.entity
        WHERE v.fence = ? AND v.off > ? ORDER BY v.off LIMIT ?
)"""

# How many events a page would have, and how many of them are not too many bytes together.
_FITTING = """SELECT count(*), count(*) FILTER (WHERE total <= ?4) FROM (
    SELECT sum(size) OVER (ORDER BY off) AS total FROM (
        SELECT v.off, coalesce(length(v.data), 0) AS size
        FROM event v WHERE v.fence = ?1 AND v.off > ?2 ORDER BY v.off LIMIT ?3
    )
)"""

_OFFSETS = """SELECT json_group_array(json_array(shard, next)) FROM fence
    WHERE cluster = ? AND role = ? AND layout = 0"""

_MARKS = """SELECT c.history, (
        SELECT json_group_array(json_array(f.role, f.shard, f.next)) FROM json_each(?2) j
        CROSS JOIN fence f ON f.cluster = c.n AND f.role = j.value->>0 AND f.layout = 0
            AND f.shard = j.value->>1)
    FROM cluster c WHERE c.n = ?1"""

_REMEMBERED = """SELECT json_group_array(json_array(type, id, last)) FROM (
    SELECT type, id, last FROM entity WHERE fence = ?1 AND remembered
        AND (?2 IS NULL OR last < ?2 OR (last = ?2 AND (type, id) > (?3, ?4)))
    ORDER BY last DESC, type, id LIMIT ?5
)"""


class SqliteJournal:
    """Implements `Journal`.

    `reads_only` is for tools: they neither create the file nor change its format. One that `serves`
    a node tells the log why it does not answer. `lives` says whether the store has a record of one
    of these incarnations, or one that names this process. With it the journal ends a process that
    has kept it locked for `ttl_s` seconds and has no record any more (J3). `now` is a clock that
    nobody can set: the days of keys are counted by it. `pause` is for tests: it blocks the writing
    thread between the checks of a batch and its writes.
    """

    one_writer = True

    def __init__(
        self,
        path: Path,
        cluster: str,
        *,
        wait_s: float = 5.0,
        reads_only: bool = False,
        serves: bool = False,
        lives: Callable[[Sequence[Incarnation], str], Awaitable[bool]] | None = None,
        ttl_s: float = 0.0,
        now: Callable[[], float] = time.monotonic,
        pause: Callable[[], None] | None = None,
    ) -> None:
        self._path, self._lives, self._ttl_s, self._now = path, lives, ttl_s, now
        self._cluster, self._wait_s = cluster, wait_s
        self._reads_only = reads_only
        self._writing = _WritingSide(JournalFile(path, wait_s, create=True), cluster, now, pause)
        self._reading = _ReadingSide(
            JournalFile(path, wait_s, create=False, reads_only=reads_only), cluster
        )
        self._writers = DaemonThreads(1, "domicile-journal-write")
        self._readers = DaemonThreads(1, "domicile-journal-read")
        self._trouble = JournalTrouble(str(path), is_told=serves)
        self.tells_trouble = serves
        self._holder: tuple[int, float] | None = None
        """The process that has the lock, and since when it has been seen with it."""
        self._used = False
        self._pending = 0
        self._counting = threading.Lock()

    async def claim(self, claims: Sequence[Claim], *, wait: bool = True) -> Sequence[int | None]:
        """As `Journal.claim`."""
        return await self._write(lambda: self._writing.claim(claims))

    async def write(self, batch: Batch) -> Sequence[_Answer]:
        """As `Journal.write`."""
        return await self._write(lambda: self._writing.write(batch))

    async def settle(self, batch: Batch) -> Sequence[_Answer | None]:
        """As `Journal.settle`."""
        return await self._write(lambda: self._writing.settle(batch))

    async def recover(self, wanted: Sequence[Wanted], max_bytes: int) -> Sequence[Recovered]:
        """As `Journal.recover`."""
        return await self._read(lambda: self._reading.recover(wanted, max_bytes))

    async def inbox(self, asked: Sequence[tuple[EntityKey, str]]) -> Sequence[StoredReply | None]:
        """As `Journal.inbox`."""
        return await self._read(lambda: self._reading.inbox(asked))

    async def scan(
        self, shard: ShardKey, after: int, limit: int, max_bytes: int = SCAN_BYTES
    ) -> EventPage:
        """As `Journal.scan`."""
        return await self._read(lambda: self._reading.scan(shard, after, limit, max_bytes))

    async def remembered(
        self, shard: ShardKey, after: Remembered | None, limit: int
    ) -> Sequence[Remembered]:
        """As `Journal.remembered`."""
        return await self._read(lambda: self._reading.remembered(shard, after, limit))

    async def offsets(self, role: str) -> dict[int, int]:
        """As `TellsOffsets.offsets`."""
        return await self._read(lambda: self._reading.offsets(role))

    async def figures(self) -> JournalFigures | None:
        """As `InspectableJournal.figures`."""
        return await self._read(lambda: self._reading.figures())

    async def fences(self) -> Sequence[FenceSeen]:
        """As `InspectableJournal.fences`."""
        return await self._read(lambda: self._reading.fences())

    async def names(self) -> JournalNames:
        """As `InspectableJournal.names`."""
        return await self._read(lambda: self._reading.names())

    async def faults(self) -> Sequence[str]:
        """As `InspectableJournal.faults`."""
        return await self._read(lambda: self._reading.faults())

    async def history(self) -> str:
        """As `Journal.history`. A file that is new gets its id here, or at the first claim."""
        if self._reads_only:
            return await self._read(self._reading.history)
        return await self._write(self._writing.history)

    async def marks(self, shards: Sequence[ShardKey]) -> JournalMarks:
        """As `ComparableJournal.marks`. The thread that writes asks: the file may be new."""
        return await self._write(lambda: self._writing.marks(shards))

    async def renew(self, history: str) -> None:
        """As `ComparableJournal.renew`."""
        await self._write(lambda: self._writing.renew(history))

    async def rows(self) -> AsyncGenerator[JournalRow, None]:
        """As `TransferableJournal.rows`. SQLite keeps what is written meanwhile in the -wal
        file."""
        file = JournalFile(self._path, self._wait_s, create=False, reads_only=self._reads_only)
        threads = DaemonThreads(1, "domicile-journal-rows")
        stored = stored_rows(file, self._cluster)
        try:
            while page := await threads.run(lambda: _told(file, lambda: list(_page(stored)))):
                for row in page:
                    yield row
        finally:
            await threads.run(file.drop)
            threads.rest()

    async def fill(self, rows: AsyncIterator[JournalRow]) -> None:
        """As `TransferableJournal.fill`."""
        await self.history()  # the file and its tables of today are there from now on
        file = JournalFile(self._path, self._wait_s, create=False)
        threads = DaemonThreads(1, "domicile-journal-rows")

        async def told(work: Callable[[], T]) -> T:
            return await threads.run(lambda: _told(file, work))

        try:
            filling = await told(lambda: Filling(file, self._cluster))
            page: list[JournalRow] = []
            size = 0
            async for row in rows:
                page.append(row)
                size += _size(row)
                if len(page) == PAGE_ROWS or size > PAGE_BYTES:
                    full, page, size = page, [], 0
                    await told(lambda full=full: filling.add(full))  # type: ignore[misc]
            await told(lambda: filling.add(page))
            await told(filling.done)
        finally:
            # A connection that is closed within a transaction takes it back.
            await threads.run(file.drop)
            threads.rest()

    async def close(self) -> None:
        """End the writes under way, and close the file."""
        if not self._used:
            return
        await self._writers.run(self._writing.close)
        await self._readers.run(self._reading.close)
        self._writers.rest()
        self._readers.rest()

    @property
    def process(self) -> str:
        """How node records name this process, for the journals of other processes."""
        return _process(os.getpid(), started_at(os.getpid()))

    @property
    def queued(self) -> int:
        """How many writes wait for the one that is under way, for tests."""
        return max(0, self._pending - 1)

    async def _read(self, work: Callable[[], T]) -> T:
        self._used = True
        try:
            return await self._readers.run(work)
        except JournalUnknown as error:
            self._trouble.came(error)
            raise

    async def _write(self, work: Callable[[], T]) -> T:
        try:
            found = await self._written(work)
        except JournalUnknown as error:
            self._trouble.came(error)
            raise
        if self._trouble.is_open:
            self._trouble.went()
        return found

    async def _written(self, work: Callable[[], T]) -> T:
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
            done = await self._writers.run(job)
        except JournalLocked:
            if not await self._ended_holder():
                raise
            done = await self._writers.run(work)
        self._holder = None
        return done

    async def _ended_holder(self) -> bool:
        """Whether the process that holds the lock was ended: it has had it for a whole ttl, and no
        record is of that process (J3).

        It may be another incarnation by now, which the file does not know: that one's first claim
        waits for the lock, too. So its record names the process.
        """
        if self._lives is None:
            return False
        pid = await self._readers.run(lambda: find_holder(self._path))
        if pid is None:
            self._holder = None
            return False
        now_s = self._now()
        if self._holder is None or self._holder[0] != pid:
            self._holder = (pid, now_s)
        if now_s - self._holder[1] < self._ttl_s:
            return False
        found = await self._readers.run(lambda: self._reading.incarnations(pid))
        if found is None:
            return False
        started, owners = found
        if await self._lives(owners, _process(pid, started)) or not end_process(pid, started):
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

    def _entity(self, connection: Any, entity: EntityKey) -> tuple[int, int]:
        """The number of an entity in this file, and its `seq`; zeros if it is not there."""
        rows = connection.execute(_ENTITY, (self._cluster, *entity)).fetchall()
        return rows[0] if rows else (0, 0)


class _WritingSide(_Side):
    """What the writing thread does."""

    def __init__(
        self,
        file: JournalFile,
        cluster: str,
        now: Callable[[], float],
        pause: Callable[[], None] | None,
    ) -> None:
        super().__init__(file, cluster)
        self._now, self._pause = now, pause
        self._looks = DayLooks()
        self._look_at = -inf

    def claim(self, claims: Sequence[Claim]) -> list[int | None]:
        """Raise fences (J1)."""
        return self._told(lambda connection: self._claim(connection, claims))

    def write(self, batch: Batch) -> list[_Answer]:
        """Write a batch (J2, J3)."""
        return self._told(lambda connection: self._write(connection, batch))

    def settle(self, batch: Batch) -> list[_Answer | None]:
        """Say what became of a batch (J4)."""
        return self._told(lambda connection: self._settle(connection, batch))

    def history(self) -> str:
        """The id of the cluster's part of this file (J11)."""
        return self._told(self._history)

    def marks(self, shards: Sequence[ShardKey]) -> JournalMarks:
        """The id, and how far shards are."""
        return self._told(lambda connection: self._marks(connection, shards))

    def _marks(self, connection: Any, shards: Sequence[ShardKey]) -> JournalMarks:
        rows = msgspec.json.encode([tuple(shard) for shard in shards]).decode()
        [(history, found)] = connection.execute(_MARKS, (self._cluster, rows)).fetchall()
        offsets = msgspec.json.decode(found, type=list[tuple[str, int, int]])
        return JournalMarks(
            history, {ShardKey(role, shard): offset for role, shard, offset in offsets}
        )

    def renew(self, history: str) -> None:
        """Replace the id."""
        self._told(
            lambda connection: connection.execute(
                "UPDATE cluster SET history = ? WHERE n = ?", (history, self._cluster)
            )
        )

    def _history(self, connection: Any) -> str:
        [(history,)] = connection.execute(
            "SELECT history FROM cluster WHERE n = ?", (self._cluster,)
        ).fetchall()
        return str(history)

    def _told(self, work: Callable[[Any], T]) -> T:
        try:
            connection = self._use()
            if self._now() >= self._look_at:
                self._look(connection)
            try:
                return work(connection)
            except (apsw.SQLError, apsw.ConstraintError):
                # Another process began a day. It may have dropped a table that the trigger names.
                self._look(connection)
                return work(connection)
        except apsw.Error as error:
            raise self._file.failed(error) from error

    def _prepare(self, connection: Any) -> None:
        connection.execute(SCRATCH)
        if self._pause is not None:
            connection.create_scalar_function("pause", self._pause, 0)
        self._look_at = -inf
        super()._prepare(connection)

    def _look(self, connection: Any) -> None:
        """Count the time that has passed, have a table for the keys of today, and drop those that
        are too old."""
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.execute(
                "INSERT INTO cluster (name, history) VALUES (?, ?) ON CONFLICT DO NOTHING",
                (self._name, secrets.token_hex(16)),
            )
            now_s = self._now()
            known = known_days(connection)
            count = self._counted(connection, known, now_s)
            days = [day for day in known if count.keeps(day)]
            if count.today not in days:
                connection.execute(create_day(count.today))
                days.append(count.today)
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
        self._looks.stored(count.counted_s, now_s)
        self._look_at = now_s + LOOK_S

    def _counted(self, connection: Any, known: Sequence[int], now_s: float) -> KeyDays:
        """The count of days, with the time that this process has seen pass."""
        stored = stored_days(connection)
        if stored is None:
            count = first_days(time.time(), known)
        else:
            count = stored._replace(counted_s=self._looks.counted(stored.counted_s, now_s))
        connection.execute("INSERT OR REPLACE INTO key_days VALUES (1, ?, ?)", count)
        return count

    def _claim(self, connection: Any, claims: Sequence[Claim]) -> list[int | None]:
        assert self._cluster is not None
        pid = os.getpid()
        connection.execute(CLAIM, claim_values(self._cluster, pid, started_at(pid), claims))
        return [None if ok else epoch for ok, epoch, _ in _listed(connection, HELD)]

    def _write(self, connection: Any, batch: Batch) -> list[_Answer]:
        assert self._cluster is not None
        connection.execute(*write_values(self._cluster, batch))
        held = dict(
            zip([claim.shard for claim in batch.claims], _listed(connection, HELD), strict=True)
        )
        answers: list[_Answer] = []
        for write, (fault, seq) in zip(batch.writes, _listed(connection, WRITTEN), strict=True):
            row = held[write.shard]
            ok, epoch, offset = row
            if ok == TAKEN:
                row[2] = offset = offset + placed(write)
                answers.append(Written(seq + counted(write), offset))
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
            offset -= sum(map(placed, writes))
            for write in writes:
                offset += placed(write)
                _, seq = self._entity(connection, write.entity)
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

    def recover(self, wanted: Sequence[Wanted], max_bytes: int) -> list[Recovered]:
        """What entities were, and pages of events since."""
        return self._told(lambda connection: self._recover(connection, wanted, max_bytes))

    def inbox(self, asked: Sequence[tuple[EntityKey, str]]) -> list[StoredReply | None]:
        """What is stored for keys."""
        return self._told(lambda connection: self._inbox(connection, asked))

    def scan(self, shard: ShardKey, after: int, limit: int, max_bytes: int) -> EventPage:
        """A page of a shard's events."""
        return self._told(lambda connection: self._scan(connection, shard, after, limit, max_bytes))

    def remembered(self, shard: ShardKey, after: Remembered | None, limit: int) -> list[Remembered]:
        """A page of a shard's remembered entities."""
        return self._told(lambda connection: self._remembered(connection, shard, after, limit))

    def _told(self, work: Callable[[Any], T]) -> T:
        try:
            connection = self._use()
            # What several statements read belongs together.
            connection.execute("BEGIN")
            try:
                if self._cluster is None:
                    self._cluster = self._find(connection)
                return work(connection)
            finally:
                if connection.in_transaction:
                    connection.execute("COMMIT")
        except apsw.Error as error:
            raise self._file.failed(error) from error

    def _recover(
        self, connection: Any, wanted: Sequence[Wanted], max_bytes: int
    ) -> list[Recovered]:
        return recover_group(connection, self._cluster, wanted, max_bytes)

    def _inbox(
        self, connection: Any, asked: Sequence[tuple[EntityKey, str]]
    ) -> list[StoredReply | None]:
        rows = msgspec.json.encode([(*entity, key) for entity, key in asked]).decode()
        [(sizes, data)] = connection.execute(_INBOX, (self._cluster, rows)).fetchall()
        found: list[StoredReply | None] = [None] * len(asked)
        at = 0
        for i, size in msgspec.json.decode(sizes, type=list[tuple[int, int | None]]):
            found[i] = StoredReply(None if size is None else data[at : at + size])
            at += size or 0
        return found

    def _scan(
        self, connection: Any, shard: ShardKey, after: int, limit: int, max_bytes: int
    ) -> EventPage:
        n, upto = self._fence(connection, shard)
        [(found, fitting)] = connection.execute(_FITTING, (n, after, limit, max_bytes)).fetchall()
        if fitting < found:
            limit = max(1, fitting)
        [(rows, data)] = connection.execute(_SCAN, (n, after, limit)).fetchall()
        events: list[StoredEvent] = []
        at = 0
        for offset, seq, type, id, size in msgspec.json.decode(rows, type=list[_Scanned]):
            piece = None if size is None else data[at : at + size]
            at += size or 0
            events.append(StoredEvent(offset, EntityKey(type, id), seq, piece))
        return EventPage(tuple(events), events[-1].offset if len(events) == limit else upto)

    def _remembered(
        self, connection: Any, shard: ShardKey, after: Remembered | None, limit: int
    ) -> list[Remembered]:
        n, _ = self._fence(connection, shard)
        known = (None, None, None) if after is None else (after.last, *after.entity)
        rows = _listed(connection, _REMEMBERED, (n, *known, limit))
        return [Remembered(EntityKey(type, id), last) for type, id, last in rows]

    def offsets(self, role: str) -> dict[int, int]:
        """The last offsets of a role's shards."""
        rows = self._told(lambda connection: _listed(connection, _OFFSETS, (self._cluster, role)))
        return {row[0]: row[1] for row in rows}

    def figures(self) -> JournalFigures | None:
        """What there is of the cluster."""
        return self._told(lambda connection: seen_figures(connection, self._cluster))

    def fences(self) -> list[FenceSeen]:
        """The fence rows of the cluster."""
        return self._told(lambda connection: seen_fences(connection, self._cluster))

    def history(self) -> str:
        """The id of the cluster's part; empty if there is none."""
        rows = self._told(
            lambda connection: connection.execute(
                "SELECT history FROM cluster WHERE n = ?", (self._cluster,)
            ).fetchall()
        )
        return str(rows[0][0]) if rows else ""

    def names(self) -> JournalNames:
        """The clusters of the file, and the types of this one."""
        return self._told(lambda connection: seen_names(connection, self._cluster))

    def faults(self) -> list[str]:
        """What does not agree."""
        return self._told(lambda connection: seen_faults(connection, self._cluster))

    def _fence(self, connection: Any, shard: ShardKey) -> tuple[int, int]:
        """The number of a shard's fence in this file, and its last offset."""
        rows = connection.execute(_FENCE, (self._cluster, shard.role, 0, shard.shard)).fetchall()
        return (rows[0][0], rows[0][3]) if rows else (0, 0)


def _process(pid: int, started: str) -> str:
    """How node records name a process; empty where nobody can tell two with one id apart."""
    return f"{pid} {started}" if started else ""


def _told(file: JournalFile, work: Callable[[], T]) -> T:
    """Errors of SQLite as what they mean."""
    try:
        return work()
    except apsw.ConstraintError as error:
        raise ConfigError(f"{ROWS_CLASH} ({error})") from error
    except apsw.Error as error:
        raise file.failed(error) from error


def _page(rows: Iterator[JournalRow]) -> Iterator[JournalRow]:
    """As many rows as go from thread to thread together."""
    size = 0
    for count, row in enumerate(rows, 1):
        yield row
        size += _size(row)
        if count == PAGE_ROWS or size > PAGE_BYTES:
            return


def _size(row: JournalRow) -> int:
    """About how many bytes a row has."""
    match row:
        case EventRow():
            return len(row.data or b"")
        case EntityRow():
            return len(row.state or b"") + (0 if row.snapshot is None else len(row.snapshot[1]))
        case KeyRow():
            return len(row.reply or b"")
        case ShardRow():
            return 0


_Scanned = tuple[int, int, str, str, int | None]


def _listed(connection: Any, query: str, values: tuple[object, ...] = ()) -> list[list[Any]]:
    """The rows of a query that returns them as one JSON text."""
    [(text,)] = connection.execute(query, values).fetchall()
    return msgspec.json.decode(text, type=list[list[Any]])
