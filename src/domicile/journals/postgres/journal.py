"""The journal of a cluster over many machines: tables in a PostgreSQL database.

Implements the journal port. Every batch is one call of a function in the database (`schema`). A
call whose answer does not come raises `JournalUnknown`, and its caller settles the batch by its
number (J4). Nothing here may check a fence outside of the function that writes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import asyncpg

from domicile.core.ids import EntityKey
from domicile.journals.postgres.connections import Connections
from domicile.journals.postgres.schema import (
    CLAIM,
    INBOX,
    RECOVER,
    SEQS,
    SETTLE,
    WRITE,
    claim_arrays,
    entity_number,
    settle_arrays,
    write_arrays,
)
from domicile.ports.clock import Clock
from domicile.ports.journal import (
    Batch,
    Claim,
    JournalUnknown,
    Recovered,
    StoredReply,
    WriteRefused,
    Written,
)

LOOK_S = 600.0
"""Seconds after which the journal looks whether another day has begun."""


class PostgresJournal:
    """Implements `Journal`. `shown` is its URL without secrets, for texts that people read.

    `pause` is for tests: it is awaited in the middle of a write's transaction.
    """

    def __init__(
        self,
        url: str,
        cluster: str,
        clock: Clock,
        *,
        shown: str,
        wait_s: float = 5.0,
        pause: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._connections = Connections(url, shown, cluster, wait_s)
        self._clock, self._pause = clock, pause
        self._look_at = clock.now() + LOOK_S

    async def claim(self, claims: Sequence[Claim]) -> Sequence[int | None]:
        """As `Journal.claim`."""
        await self._look()
        async with self._connections.use() as connection:
            rows = await connection.fetch(CLAIM, *claim_arrays(claims))
        return [None if row["granted"] else row["newest"] for row in rows]

    async def write(self, batch: Batch) -> Sequence[Written | WriteRefused]:
        """As `Journal.write`."""
        await self._look()
        values = write_arrays(batch)
        async with self._connections.use() as connection:
            if self._pause is None:
                rows = await connection.fetch(WRITE, *values)
            else:
                async with connection.transaction():
                    rows = await connection.fetch(WRITE, *values)
                    if any(row["outcome"] == "ok" for row in rows):
                        await self._pause()
        return [
            Written(row["seq"], row["off"])
            if row["outcome"] == "ok"
            else WriteRefused(row["outcome"], row["newest"])
            for row in rows
        ]

    async def settle(self, batch: Batch) -> Sequence[Written | WriteRefused | None]:
        """As `Journal.settle`."""
        async with self._connections.use() as connection:
            found = await connection.fetch(SETTLE, *settle_arrays(batch))
            entities = [entity_number(write.entity) for write in batch.writes]
            seqs = [row[0] for row in await connection.fetch(SEQS, entities)]
        state = dict(zip([claim.shard for claim in batch.claims], found, strict=True))
        offsets = {shard: row["off"] for shard, row in state.items()}
        for write in batch.writes:
            offsets[write.shard] -= len(write.events)
        answers: list[Written | WriteRefused | None] = []
        for write, seq in zip(batch.writes, seqs, strict=True):
            row = state[write.shard]
            if row["outcome"] == "fenced":
                answers.append(WriteRefused("fenced", row["newest"]))
            elif row["outcome"] == "void":
                answers.append(None)
            else:
                offsets[write.shard] += len(write.events)
                answers.append(Written(seq, offsets[write.shard]))
        return answers

    async def recover(
        self, wanted: Sequence[tuple[EntityKey, int]], max_bytes: int
    ) -> Sequence[Recovered]:
        """As `Journal.recover`."""
        entities = [entity_number(entity) for entity, _ in wanted]
        afters = [after for _, after in wanted]
        async with self._connections.use() as connection:
            rows = await connection.fetch(RECOVER, entities, afters, max_bytes)
        return _fitting(afters, rows, max_bytes)

    async def inbox(self, asked: Sequence[tuple[EntityKey, str]]) -> Sequence[StoredReply | None]:
        """As `Journal.inbox`."""
        entities = [entity_number(entity) for entity, _ in asked]
        async with self._connections.use() as connection:
            rows = await connection.fetch(INBOX, entities, [key for _, key in asked])
        return [StoredReply(row["reply"]) if row["known"] else None for row in rows]

    async def close(self) -> None:
        """Close the connections."""
        await self._connections.close()

    async def _look(self) -> None:
        """From time to time: have a place for the keys of tomorrow before it begins."""
        now = self._clock.now()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            with suppress(JournalUnknown):
                await self._connections.begin_day()


def _fitting(
    afters: Sequence[int], rows: Sequence[asyncpg.Record], max_bytes: int
) -> list[Recovered]:
    """Pages that have about `max_bytes` together; each row has as many for itself alone."""
    found: list[Recovered] = []
    left, first = max_bytes, True
    for after, row in zip(afters, rows, strict=True):
        events: list[bytes] = []
        for event in row["data"] or ():
            if len(event) > left and not first:
                break
            events.append(event)
            left, first = left - len(event), False
        end = after + len(events)
        found.append(Recovered(tuple(events), end, end < (row["seq"] or 0)))
    return found
