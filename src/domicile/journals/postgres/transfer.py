"""A PostgreSQL journal as rows, and made of rows. Only `PostgresJournal` calls it.

Both ways are one transaction. Nobody waits for an answer of a few seconds here: a slow disk at the
other end must not end the session.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any

from domicile.core.ids import NOBODY, EntityKey
from domicile.errors import ConfigError
from domicile.journals.postgres.schema import TODAY, entity_number
from domicile.ports.journal_rows import EntityRow, EventRow, JournalRow, KeyRow, ShardRow

if TYPE_CHECKING:
    from asyncpg.cursor import Cursor

    from domicile.postgres.sessions import Connection

PAGE = 100
"""Rows that are fetched at a time: each may have some megabytes."""

COPIED = 1_000
COPIED_BYTES = 8 << 20
"""Most rows and bytes of one table that wait until they are written together."""

STEP_S = 3_600.0
"""Seconds that one statement may take."""

_PATIENT = "SET LOCAL idle_in_transaction_session_timeout = 0"

_SHARDS = """SELECT n, role, layout, shard, epoch, next, writes FROM fence
    ORDER BY role, layout, shard"""

_ENTITIES = """SELECT e.entity, e.type, e.id, e.seq, e.fence, e.last, e.deleted, e.remembered,
        e.state, s.seq AS at, s.data AS snapshot
    FROM entity e LEFT JOIN snapshot s USING (entity) ORDER BY e.entity"""

_EVENTS = "SELECT entity, fence, off, seq, data FROM event ORDER BY entity, seq"

_KEYS = "SELECT entity, key, day, reply FROM inbox ORDER BY entity, key, day"

_COLUMNS = {
    "entity": ("entity", "type", "id", "seq", "fence", "last", "deleted", "remembered", "state"),
    "event": ("entity", "fence", "off", "seq", "data"),
    "snapshot": ("entity", "seq", "data"),
    "inbox": ("entity", "key", "day", "reply"),
}


class _Pages:
    """The rows of a query, one after the other, with the entity of the next one."""

    def __init__(self, cursor: Cursor[Any]) -> None:
        self._cursor = cursor
        self._rows: list[Any] = []
        self._at = 0

    async def of(self, entity: object) -> AsyncIterator[Any]:
        """The rows of an entity, if they are the next ones."""
        while (row := await self._peek()) is not None and row["entity"] == entity:
            self._at += 1
            yield row

    async def every(self) -> AsyncIterator[Any]:
        """All rows."""
        while (row := await self._peek()) is not None:
            self._at += 1
            yield row

    async def _peek(self) -> Any:
        if self._at == len(self._rows):
            self._rows, self._at = await self._cursor.fetch(PAGE, timeout=STEP_S), 0
        return self._rows[self._at] if self._rows else None


async def stored_tables(connection: Connection) -> AsyncGenerator[JournalRow, None]:
    """All rows of a cluster, in one reading transaction."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        await connection.execute(_PATIENT)
        places: dict[int, int] = {}
        for place, row in enumerate(await connection.fetch(_SHARDS)):
            n, *values = row
            places[n] = place
            yield ShardRow(*values)
        entities, events, keys = [
            _Pages(await connection.cursor(query, timeout=STEP_S))
            for query in (_ENTITIES, _EVENTS, _KEYS)
        ]
        async for one in entities.every():
            fence = one["fence"]
            yield EntityRow(
                one["type"], one["id"], one["seq"], None if fence is None else places[fence],
                one["last"], one["deleted"], one["remembered"], one["state"],
                None if one["at"] is None else (one["at"], one["snapshot"]),
            )  # fmt: skip
            async for event in events.of(one["entity"]):
                yield EventRow(places[event["fence"]], event["off"], event["seq"], event["data"])
            async for asked in keys.of(one["entity"]):
                yield KeyRow(asked["key"], asked["day"], asked["reply"])


async def fill_tables(connection: Connection, rows: AsyncIterator[JournalRow], shown: str) -> None:
    """Take all rows in one transaction, or nothing."""
    async with connection.transaction():
        await connection.execute(_PATIENT)
        # Nobody may begin to use the journal meanwhile.
        await connection.execute("LOCK TABLE fence, entity IN EXCLUSIVE MODE", timeout=STEP_S)
        if await connection.fetchval(
            "SELECT EXISTS (SELECT 1 FROM fence) OR EXISTS (SELECT 1 FROM entity)"
        ):
            raise ConfigError(
                f"the journal {shown} has something of this cluster already; import into a new "
                "database, or under another --cluster"
            )
        # Another journal counted the days of keys. It is known from now on only what passes.
        today: int = await connection.fetchval(TODAY)
        await _Tables(connection, today).take(rows)


class _Tables:
    """Rows on their way into the tables, a page of each table at a time."""

    def __init__(self, connection: Connection, today: int) -> None:
        self._connection = connection
        self._today = today
        self._shards: list[int] = []
        self._pages: dict[str, list[tuple[object, ...]]] = {table: [] for table in _COLUMNS}
        self._bytes = dict.fromkeys(_COLUMNS, 0)

    async def take(self, rows: AsyncIterator[JournalRow]) -> None:
        entity: object = None
        async for row in rows:
            match row:
                case ShardRow():
                    self._shards.append(await self._fence(row))
                case EntityRow():
                    entity = entity_number(EntityKey(row.type, row.id))
                    fence = None if row.shard is None else self._shards[row.shard]
                    await self._add(
                        "entity", entity, row.type, row.id, row.seq, fence, row.last, row.deleted,
                        row.remembered, row.state,
                    )  # fmt: skip
                    if row.snapshot is not None:
                        await self._add("snapshot", entity, *row.snapshot)
                case EventRow():
                    fence = self._shards[row.shard]
                    await self._add("event", entity, fence, row.offset, row.seq, row.data)
                case KeyRow():
                    await self._add("inbox", entity, row.key, self._today, row.reply)
        for table in _COLUMNS:
            await self._copy(table)

    async def _fence(self, row: ShardRow) -> int:
        n: int = await self._connection.fetchval(
            "INSERT INTO fence (role, layout, shard, epoch, next, writes, owner) "
            "VALUES ($1, $2, $3, $4, $5, $6, $7) RETURNING n",
            row.role, row.layout, row.shard, row.epoch, row.offset, row.writes, NOBODY,
        )  # fmt: skip
        return n

    async def _add(self, table: str, *values: object) -> None:
        self._pages[table].append(values)
        self._bytes[table] += sum(len(one) for one in values if isinstance(one, bytes))
        if len(self._pages[table]) == COPIED or self._bytes[table] > COPIED_BYTES:
            await self._copy(table)

    async def _copy(self, table: str) -> None:
        page, self._pages[table], self._bytes[table] = self._pages[table], [], 0
        if page:
            await self._connection.copy_records_to_table(
                table, records=page, columns=_COLUMNS[table], timeout=STEP_S
            )
