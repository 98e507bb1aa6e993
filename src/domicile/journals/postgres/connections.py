"""The connections of a journal to its database, and its schema.

Only `domicile.journals.postgres` uses it. The schema of a cluster is created or refused when the
first connection is made. Connections never wait longer than `wait_s` for a lock or an answer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Container, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import asyncpg

from domicile.errors import ConfigError
from domicile.journals.key_days import DayLooks, KeyDays, first_days
from domicile.journals.postgres.inspection import known_clusters
from domicile.journals.postgres.schema import (
    ALL_FILLED,
    DAY_PARTITION,
    DAYS_AHEAD,
    FORMAT,
    FROM_1,
    FROM_2,
    FUNCTIONS,
    LOCK,
    LOST,
    TABLES,
    WITHOUT_FUNCTIONS,
    create_partition,
    day_partition,
)
from domicile.journals.trouble import JournalTrouble
from domicile.ports.journal import JournalAbsent, JournalUnknown, older_format
from domicile.postgres.sessions import (
    FAILURES,
    SessionPlace,
    check_session,
    explained,
    session_settings,
)

if TYPE_CHECKING:
    from domicile.postgres.sessions import Connection, RawConnection

    Pool = asyncpg.Pool[asyncpg.Record]

log = logging.getLogger("domicile")

MIGRATION_S = 3_600.0
"""Seconds that a statement may take which copies the events of an older format."""

SHORT_MS = 100
"""Milliseconds that a change of partitions waits for a lock, if it can be made later as well."""

CONNECTIONS = 8
"""Most connections of one process. A batch that waits for a row keeps one meanwhile."""

WALL = "SELECT extract(epoch FROM clock_timestamp())::double precision"
"""The time of day of the server: it gives the first day its number, and decides nothing."""

PLACE = """SELECT extract(epoch FROM pg_postmaster_start_time())::text || ' ' || oid::text
    FROM pg_database WHERE datname = current_database()"""
"""Tells databases apart, also one server from a copy of it that runs elsewhere."""


class Connections:
    """A pool of connections, opened at the first use. Texts call the journal `shown`."""

    def __init__(
        self,
        url: str,
        shown: str,
        cluster: str,
        wait_s: float,
        now: Callable[[], float],
        *,
        reads_only: bool = False,
        serves: bool = False,
    ) -> None:
        self._url, self.shown, self._wait_s, self._now = url, shown, wait_s, now
        self._schema = f"{cluster}_journal"
        self._named = SessionPlace(
            f"the journal {shown}",
            self._schema,
            f'the user must own the schema "{self._schema}", or may create it in the database',
        )
        self._reads_only = reads_only
        self._trouble = JournalTrouble(shown, is_told=serves)
        self._place = ""
        self._pool: Pool | None = None
        self._opening = asyncio.Lock()
        self._looks = DayLooks()

    @asynccontextmanager
    async def use(self, *, writes: bool = False) -> AsyncGenerator[Connection, None]:
        """A connection; whatever goes wrong with it is `JournalUnknown` or `ConfigError`."""
        try:
            pool = self._pool or await self._open()
            async with pool.acquire(timeout=self._wait_s) as connection:
                yield connection
        except (*FAILURES, OSError, TimeoutError) as error:
            why = explained(error, self._named, self._wait_s, 2 * self._wait_s, JournalUnknown)
            if isinstance(why, JournalUnknown):
                self._trouble.came(why)
            raise why from error
        if writes and self._trouble.is_open:
            self._trouble.went()

    async def look(self) -> None:
        """Count the time that has passed, have partitions for the keys of today and the next days,
        and drop those too old."""
        async with self.use() as connection:
            await self._partition(connection)

    # for transactions of the application (J10)

    @property
    def schema(self) -> str:
        """The schema with the cluster's tables."""
        return self._schema

    @property
    def wait_s(self) -> float:
        """Seconds that a statement waits for a lock, and that a transaction may do nothing."""
        return self._wait_s

    @property
    def wait_ms(self) -> str:
        """The same, as the server takes it."""
        return str(max(1, int(self._wait_s * 1000)))

    async def place(self) -> str:
        """Which database it is: as the newest connection of the journal has found it."""
        if self._pool is None:
            async with self.use():
                pass
        return self._place

    async def close(self) -> None:
        """Close all connections."""
        pool, self._pool = self._pool, None
        if pool is not None:
            try:
                async with asyncio.timeout(self._wait_s):
                    await pool.close()
            except TimeoutError:
                pool.terminate()

    async def _open(self) -> Pool:
        async with self._opening:
            if self._pool is None:
                pool = await asyncpg.create_pool(
                    self._url,
                    # asyncpg tells the log of each try to keep a least number, with a traceback.
                    min_size=0,
                    max_size=CONNECTIONS,
                    timeout=self._wait_s,
                    command_timeout=2 * self._wait_s,
                    server_settings=self._session(),
                    init=self._check_session,
                )
                try:
                    async with pool.acquire(timeout=self._wait_s) as connection:
                        await self._set_up(connection)
                except BaseException:
                    pool.terminate()
                    raise
                self._pool = pool
            return self._pool

    def _session(self) -> dict[str, str]:
        # A plan that was made while the tables were empty must not last.
        settings = session_settings("domicile journal", self._schema, self._wait_s)
        return {**settings, "enable_seqscan": "off"}

    async def _check_session(self, connection: RawConnection) -> None:
        await check_session(connection, self._session(), self._named)
        self._place = await connection.fetchval(PLACE)

    async def _set_up(self, connection: Connection) -> None:
        if self._reads_only:
            await self._check_tables(connection)
            return
        schema = self._schema
        async with connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock($1)", LOCK)
            there = await connection.fetchval(
                "SELECT EXISTS (SELECT 1 FROM pg_namespace WHERE nspname = $1)", schema
            )
            if not there:
                await connection.execute(f'CREATE SCHEMA "{schema}"')
            made = await connection.fetchval("SELECT to_regclass('meta') IS NOT NULL")
            if not made:
                await connection.execute(TABLES + FUNCTIONS)
                count = first_days(await connection.fetchval(WALL), ())
                await connection.execute(
                    "INSERT INTO meta VALUES ($1, $2, $3, $4)",
                    FORMAT, secrets.token_hex(16), *count,
                )  # fmt: skip
            found = await self._format(connection)
            if found < FORMAT:
                await self._migrate(connection, found)
        await self._partition(connection)

    async def _check_tables(self, connection: Connection) -> None:
        """Refuse to read what is not there, or has an older format; nothing is created.

        A node may create it, or change the format, at any time: so the answer is not final.
        """
        if not await connection.fetchval("SELECT to_regclass('meta') IS NOT NULL"):
            listed = ", ".join(await known_clusters(connection)) or "no cluster"
            raise JournalAbsent(
                f"the journal {self.shown} has nothing of cluster "
                f"{self._schema.removesuffix('_journal')!r}, it holds {listed}: say another "
                "--cluster or --journal"
            )
        found = await self._format(connection)
        if found < FORMAT:
            raise JournalUnknown(older_format(f"{self.shown}, schema {self._schema},", found))

    async def _format(self, connection: Connection) -> int:
        found: int = await connection.fetchval("SELECT format FROM meta")
        if found > FORMAT:
            raise ConfigError(
                f"the journal {self.shown}, schema {self._schema}, has format {found}, this "
                f"version of Domicile knows formats up to {FORMAT}; a newer version has "
                "written to it: upgrade Domicile here, or name another database"
            )
        return found

    async def _migrate(self, connection: Connection, found: int) -> None:
        """Bring the tables of an older format up to date, in the transaction of the caller."""
        log.warning(
            "the journal %s, schema %s, has format %d and is brought to format %d; processes of "
            "an older version can't write to it any more",
            self.shown, self._schema, found, FORMAT,
        )  # fmt: skip
        # It takes as long as it takes: nobody waits for an answer of a few seconds here.
        await connection.execute("SET LOCAL enable_seqscan = on")
        await connection.execute(WITHOUT_FUNCTIONS)
        if found < 2:
            await connection.execute(FROM_1, timeout=MIGRATION_S)
            lost: int = await connection.fetchval(LOST, timeout=MIGRATION_S)
            if lost:
                raise ConfigError(
                    f"the journal {self.shown}, schema {self._schema}, can't be brought to format "
                    f"{FORMAT}: {lost} events are of shards without a fence; nothing was changed; "
                    "run the version that made it"
                )
            await connection.execute("DROP TABLE event_1")
        await self._begin_count(connection)
        await connection.execute(FUNCTIONS)
        await connection.execute("UPDATE meta SET format = $1", FORMAT)

    async def _begin_count(self, connection: Connection) -> None:
        """From format 2, whose days were those of the server: count days from here on."""
        # What an older process is writing commits first: a table that looks empty may get a key.
        await connection.execute("LOCK TABLE inbox IN ACCESS EXCLUSIVE MODE")
        known: list[int] = []
        for name in await _partitions(connection):
            if await connection.fetchval(f"SELECT EXISTS (SELECT 1 FROM {name})"):
                day = int(name.removeprefix("inbox_"))
                await connection.execute(f"ALTER TABLE {name} RENAME TO {day_partition(day)}")
                known.append(day)
            else:
                await connection.execute(f"DROP TABLE {name}")
        await connection.execute(FROM_2)
        count = first_days(await connection.fetchval(WALL), known)
        await connection.execute("UPDATE meta SET counted_s = $1, since = $2", *count)
        await connection.execute(ALL_FILLED)

    async def _partition(self, connection: Connection) -> None:
        """Have partitions for today and some days after it, and drop those that are too old.

        Nothing here may keep writes waiting: what can't be had at once is tried again later, unless
        today itself has no partition yet. A day begins only if it has one.
        """
        today = (await _stored_days(connection)).today
        names = await _partitions(connection)
        known = [name for name in names if name.startswith(DAY_PARTITION)]
        ahead = {day_partition(day): day for day in range(today, today + DAYS_AHEAD + 1)}
        missing = {name: day for name, day in ahead.items() if name not in known}
        is_late = day_partition(today) in missing
        if missing and not await self._change(
            connection, [create_partition(day) for day in missing.values()], waits=is_late
        ):
            return
        count = await self._count(connection, {*known, *ahead})
        old = [name for name in known if not count.keeps(int(name.removeprefix(DAY_PARTITION)))]
        if old:
            statements = [f"DROP TABLE IF EXISTS {name}" for name in old]
            await self._change(connection, statements, waits=False)

    async def _count(self, connection: Connection, partitions: Container[str]) -> KeyDays:
        """Add the time that this process has seen pass; the day it is by now."""
        async with connection.transaction():
            # First the lock, then the clock: what passes in between is not counted twice.
            stored = await _stored_days(connection, locks=True)
            now_s = self._now()
            counted_s = self._looks.counted(stored.counted_s, now_s)
            count = stored._replace(counted_s=counted_s)
            if day_partition(count.today) not in partitions:
                return stored
            await connection.execute("UPDATE meta SET counted_s = $1", counted_s)
        self._looks.stored(counted_s, now_s)
        return count

    async def _change(
        self, connection: Connection, statements: Sequence[str], *, waits: bool
    ) -> bool:
        """Change partitions, all or none; False: it has to wait, and may not, so nothing was
        changed."""
        try:
            async with connection.transaction():
                if not waits:
                    # What asks for this table meanwhile stands behind the change, in its queue.
                    await connection.execute(f"SET LOCAL lock_timeout = {SHORT_MS}")
                await connection.execute("SELECT pg_advisory_xact_lock($1)", LOCK)
                for statement in statements:
                    await connection.execute(statement)
        except asyncpg.LockNotAvailableError:
            if waits:
                raise
            return False
        return True


async def _stored_days(connection: Connection, *, locks: bool = False) -> KeyDays:
    row = await connection.fetchrow(
        f"SELECT counted_s, since FROM meta{' FOR UPDATE' if locks else ''}"
    )
    assert row is not None
    return KeyDays(*row)


async def _partitions(connection: Connection) -> list[str]:
    rows = await connection.fetch(
        "SELECT inhrelid::regclass::text AS name FROM pg_inherits "
        "WHERE inhparent = 'inbox'::regclass"
    )
    return [str(row["name"]) for row in rows]
