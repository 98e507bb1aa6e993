"""The journal of a cluster over many machines: tables in a PostgreSQL database.

Implements the journal port. Every batch is one call of a function in the database (`schema`). A
call whose answer does not come raises `JournalUnknown`, and its caller settles the batch by its
number (J4). Nothing here may check a fence outside of the function that writes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from uuid import UUID

import asyncpg

from domicile.core.ids import EntityKey, ShardKey
from domicile.errors import ConfigError
from domicile.journals.postgres.connections import Connections
from domicile.journals.postgres.fencing import PostgresFencedTransaction
from domicile.journals.postgres.inspection import (
    fence_rows,
    known_names,
    seen_tables,
    wrong_tables,
)
from domicile.journals.postgres.schema import (
    CLAIM,
    CLAIM_FREE,
    ERASE,
    INBOX,
    MARKS,
    OFFSETS,
    RECOVER,
    REMEMBERED,
    SCAN,
    SEQS,
    SETTLE,
    WRITE,
    claim_arrays,
    entity_number,
    recover_arrays,
    settle_arrays,
    write_arrays,
)
from domicile.journals.postgres.transfer import fill_tables, stored_tables
from domicile.ports.clock import Clock
from domicile.ports.journal import (
    MOST_KEYS,
    SCAN_BYTES,
    Batch,
    Claim,
    ClaimAnswer,
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
    placed,
)
from domicile.ports.journal_rows import ROWS_CLASH, JournalRow

LOOK_S = 600.0
"""Seconds after which the journal looks whether another day has begun, by its own count."""


class PostgresJournal:
    """Implements `Journal`. `shown` is its URL without secrets, for texts that people read.

    `reads_only` is for tools: they neither create tables nor change their format. One that `serves`
    a node tells the log why it does not answer. `pause` is for tests: it is awaited in the middle
    of a write's transaction.
    """

    def __init__(
        self,
        url: str,
        cluster: str,
        clock: Clock,
        *,
        shown: str,
        wait_s: float = 5.0,
        reads_only: bool = False,
        serves: bool = False,
        pause: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._connections = Connections(
            url, shown, cluster, wait_s, clock.now, reads_only=reads_only, serves=serves
        )
        self.tells_trouble = serves
        self._clock, self._pause = clock, pause
        self._look_at = clock.now() + LOOK_S

    async def claim(self, claims: Sequence[Claim], *, wait: bool = True) -> Sequence[ClaimAnswer]:
        """As `Journal.claim`."""
        await self._look()
        async with self._connections.use(writes=True) as connection:
            if wait:
                rows = await connection.fetch(CLAIM, *claim_arrays(claims))
            else:
                rows = await connection.fetch(CLAIM_FREE, *claim_arrays(claims))
        answers: list[ClaimAnswer] = ["busy"] * len(claims)
        for row in rows:
            answers[row["n"] - 1] = None if row["granted"] else row["newest"]
        return answers

    async def write(self, batch: Batch) -> Sequence[Written | WriteRefused]:
        """As `Journal.write`."""
        await self._look()
        values, erases = write_arrays(batch), any(write.erase for write in batch.writes)
        async with self._connections.use(writes=True) as connection:
            if self._pause is None and not erases:
                rows = await connection.fetch(WRITE, *values)
            else:
                async with connection.transaction():
                    rows = await connection.fetch(WRITE, *values)
                    if erases:
                        # The rows of the fences stay locked until the end of the transaction.
                        await connection.execute(ERASE, _erased(batch, rows))
                    if self._pause is not None and any(row["outcome"] == "ok" for row in rows):
                        await self._pause()
        return [
            Written(row["seq"], row["off"])
            if row["outcome"] == "ok"
            else WriteRefused(row["outcome"], row["newest"])
            for row in rows
        ]

    async def settle(self, batch: Batch) -> Sequence[Written | WriteRefused | None]:
        """As `Journal.settle`."""
        async with self._connections.use(writes=True) as connection:
            found = await connection.fetch(SETTLE, *settle_arrays(batch))
            entities = [entity_number(write.entity) for write in batch.writes]
            seqs = [row[0] for row in await connection.fetch(SEQS, entities)]
        state = dict(zip([claim.shard for claim in batch.claims], found, strict=True))
        offsets = {shard: row["off"] for shard, row in state.items()}
        for write in batch.writes:
            offsets[write.shard] -= placed(write)
        answers: list[Written | WriteRefused | None] = []
        for write, seq in zip(batch.writes, seqs, strict=True):
            row = state[write.shard]
            if row["outcome"] == "fenced":
                answers.append(WriteRefused("fenced", row["newest"]))
            elif row["outcome"] == "void":
                answers.append(None)
            else:
                offsets[write.shard] += placed(write)
                answers.append(Written(seq, offsets[write.shard]))
        return answers

    async def recover(self, wanted: Sequence[Wanted], max_bytes: int) -> Sequence[Recovered]:
        """As `Journal.recover`."""
        async with self._connections.use() as connection:
            rows = await connection.fetch(RECOVER, *recover_arrays(wanted, max_bytes))
        return _fitting(wanted, rows, max_bytes)

    async def inbox(self, asked: Sequence[tuple[EntityKey, str]]) -> Sequence[StoredReply | None]:
        """As `Journal.inbox`."""
        entities = [entity_number(entity) for entity, _ in asked]
        async with self._connections.use() as connection:
            rows = await connection.fetch(INBOX, entities, [key for _, key in asked])
        return [StoredReply(row["reply"]) if row["known"] else None for row in rows]

    async def scan(
        self, shard: ShardKey, after: int, limit: int, max_bytes: int = SCAN_BYTES
    ) -> EventPage:
        """As `Journal.scan`."""
        async with self._connections.use() as connection:
            rows = await connection.fetch(SCAN, shard.role, shard.shard, after, limit, max_bytes)
        events = [
            StoredEvent(row["off"], EntityKey(row["type"], row["id"]), row["seq"], row["data"])
            for row in rows
            if row["off"] is not None
        ]
        upto: int = rows[0]["next"] if rows else 0
        is_cut = len(events) == limit or (bool(events) and len(events) < rows[0]["found"])
        return EventPage(tuple(events), events[-1].offset if is_cut else upto)

    async def remembered(
        self, shard: ShardKey, after: Remembered | None, limit: int
    ) -> Sequence[Remembered]:
        """As `Journal.remembered`."""
        known = (None, None, None) if after is None else (after.last, *after.entity)
        async with self._connections.use() as connection:
            rows = await connection.fetch(REMEMBERED, shard.role, shard.shard, *known, limit)
        return [Remembered(EntityKey(row["type"], row["id"]), row["last"]) for row in rows]

    async def offsets(self, role: str) -> dict[int, int]:
        """As `TellsOffsets.offsets`."""
        async with self._connections.use() as connection:
            rows = await connection.fetch(OFFSETS, role)
        return {row["shard"]: row["next"] for row in rows}

    async def figures(self) -> JournalFigures:
        """As `InspectableJournal.figures`."""
        async with self._connections.use() as connection:
            return await seen_tables(connection)

    async def fences(self) -> Sequence[FenceSeen]:
        """As `InspectableJournal.fences`."""
        async with self._connections.use() as connection:
            return await fence_rows(connection)

    async def names(self) -> JournalNames:
        """As `InspectableJournal.names`."""
        async with self._connections.use() as connection:
            return await known_names(connection)

    async def faults(self) -> Sequence[str]:
        """As `InspectableJournal.faults`."""
        async with self._connections.use() as connection:
            return await wrong_tables(connection)

    async def history(self) -> str:
        """As `Journal.history`."""
        async with self._connections.use() as connection:
            return str(await connection.fetchval("SELECT history FROM meta"))

    async def marks(self, shards: Sequence[ShardKey]) -> JournalMarks:
        """As `ComparableJournal.marks`."""
        roles, numbers = [shard.role for shard in shards], [shard.shard for shard in shards]
        async with self._connections.use() as connection:
            rows = await connection.fetch(MARKS, roles, numbers)
        return JournalMarks(
            rows[0]["history"],
            {
                ShardKey(row["role"], row["shard"]): row["next"]
                for row in rows
                if row["role"] is not None
            },
        )

    async def renew(self, history: str) -> None:
        """As `ComparableJournal.renew`."""
        async with self._connections.use() as connection:
            await connection.execute("UPDATE meta SET history = $1", history)

    async def rows(self) -> AsyncGenerator[JournalRow, None]:
        """As `TransferableJournal.rows`."""
        async with (
            self._connections.use() as connection,
            aclosing(stored_tables(connection)) as rows,
        ):
            async for row in rows:
                yield row

    async def fill(self, rows: AsyncIterator[JournalRow]) -> None:
        """As `TransferableJournal.fill`."""
        async with self._connections.use() as connection:
            try:
                await fill_tables(connection, rows, self._connections.shown)
            except asyncpg.IntegrityConstraintViolationError as error:
                raise ConfigError(f"{ROWS_CLASH} ({error})") from error

    def fenced(self, connection: object, claim: Claim) -> PostgresFencedTransaction:
        """As `FencesConnections.fenced`."""
        return PostgresFencedTransaction(self._connections, connection, claim)

    async def close(self) -> None:
        """Close the connections."""
        await self._connections.close()

    async def _look(self) -> None:
        """From time to time: count time, and have a place for the keys of coming days."""
        now = self._clock.now()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            with suppress(JournalUnknown):
                await self._connections.look()


def _erased(batch: Batch, rows: Sequence[asyncpg.Record]) -> list[UUID]:
    """The entities of the writes that erase, as far as they are taken."""
    return [
        entity_number(write.entity)
        for write, row in zip(batch.writes, rows, strict=True)
        if write.erase and row["outcome"] == "ok"
    ]


def _fitting(
    wanted: Sequence[Wanted], rows: Sequence[asyncpg.Record], max_bytes: int
) -> list[Recovered]:
    """Pages that have about `max_bytes` together; the server has left out what lies far behind."""
    found: list[Recovered] = []
    left, first = max_bytes, True
    for one, row in zip(wanted, rows, strict=True):
        known = row["keys"]
        keys = None if known is None or len(known) > MOST_KEYS else tuple(known)
        if (row["seq"] or 0) <= one.after:
            found.append(Recovered((), one.after, False, keys=keys))
            continue
        fits = first or row["before"] < max_bytes
        state, snapshot = row["state"], None
        if fits and row["snapshot_seq"] is not None:
            snapshot = (row["snapshot_seq"], row["snapshot"])
        is_begun = state is not None or snapshot is not None
        size = len(state or b"") + len(snapshot[1] if snapshot else b"")
        events: list[bytes] = []
        if is_begun and (fits := first or size <= left):
            left, first = left - size, False
        if fits:
            for event in row["data"] or ():
                if len(event) > left and not first:
                    break
                events.append(event)
                left, first = left - len(event), False
        start = max(one.after, row["deleted"], snapshot[0] if snapshot else 0)
        last = start + len(events)
        if events and row["seqs"]:
            last = row["seqs"][len(events) - 1]
        more = last < (row["newest"] or 0)
        if not fits or (more and not (events or is_begun)):
            found.append(Recovered((), one.after, True))
            continue
        seq = last if more else row["seq"]
        found.append(Recovered(tuple(events), seq, more, snapshot, state, keys))
    return found
