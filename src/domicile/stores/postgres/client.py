"""Calls of a PostgreSQL store: what is sent, what comes back, and the connection that carries it.

The store has a client for its writes and one for its reads; the thread that renews leases has its
own. All of them share what is known of the store's past (S5). A client belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import asyncpg
from asyncpg.connect_utils import SessionAttribute

from domicile.core.state.txn import (
    Committed,
    Condition,
    Conflict,
    Item,
    Outcome,
    Unknown,
    Write,
    check_limits,
)
from domicile.errors import ConfigError, StoreUnavailable
from domicile.ports.findings import Finding
from domicile.ports.store import Kept
from domicile.postgres.sessions import (
    FAILURES,
    SessionPlace,
    check_session,
    explained,
    session_settings,
)
from domicile.stores.postgres.findings import CONTENTS, FACTS, MAY_LOOK, postgres_findings
from domicile.stores.postgres.history import KnownPast, Mark
from domicile.stores.postgres.line import ConnectionLine, LineJob
from domicile.stores.postgres.schema import (
    ABOUT,
    FORMAT,
    FUNCTIONS,
    KEEP,
    LOCK,
    REWOUND,
    SCHEMA,
    TABLES,
    THERE,
    TICK,
    UPGRADES,
    WRITE_COMMITS,
    commit_columns,
    operation_columns,
)
from domicile.stores.postgres.standby import TICK_S, StoreAge

if TYPE_CHECKING:
    from domicile.postgres.sessions import RawConnection

Records = list["asyncpg.Record"]

LOCK_SHARE = 0.8
"""The part of a call's time for which the server waits for a lock."""

RIGHTS = (
    f'the user must own the schema "{SCHEMA}", or may create it in the database; another user '
    f"needs USAGE on it and EXECUTE on its functions, which its owner grants"
)


class StoreServer:
    """Where the store is, and whether its tables are there. `shown` is its URL without secrets."""

    def __init__(self, url: str, shown: str, wait_s: float, *, creates: bool) -> None:
        self._url, self._wait_s, self._creates = url, wait_s, creates
        # Less than a call may take: then the server refuses, and the outcome is not unknown.
        self._lock_s = LOCK_SHARE * wait_s
        self.shown = shown
        self.was_open = False
        """Whether a session ever worked: then what is wrong now may pass."""
        self._place = SessionPlace(f"the store {shown}", SCHEMA, RIGHTS)

    async def connect(self, left_s: float) -> RawConnection:
        """A session that may be used: of a primary, with its own settings, on sound tables."""
        connection = await self._session(left_s, SessionAttribute.primary)
        try:
            await self._check_tables(connection)
        except BaseException:
            connection.terminate()
            raise
        self.was_open = True
        return connection

    async def look(self) -> list[Finding]:
        """What the server says of itself, and its tables if this user may read them."""
        try:
            async with asyncio.timeout(self._wait_s):
                connection = await self._session(self._wait_s, SessionAttribute.any)
                try:
                    facts = await connection.fetchrow(FACTS)
                    assert facts is not None
                    contents = None
                    if facts["owner"] is not None and await connection.fetchval(MAY_LOOK):
                        contents = await connection.fetchrow(CONTENTS)
                finally:
                    connection.terminate()
        except (*FAILURES, OSError, TimeoutError) as error:
            raise self.explained(error) from error
        return postgres_findings(dict(facts), None if contents is None else dict(contents))

    async def _session(self, left_s: float, wanted: SessionAttribute) -> RawConnection:
        settings = session_settings("domicile store", SCHEMA, self._lock_s)
        connection = await asyncpg.connect(
            self._url,
            timeout=left_s,
            server_settings=settings,
            target_session_attrs=None if "target_session_attrs" in self._url else wanted,
        )
        try:
            await check_session(connection, settings, self._place)
        except BaseException:
            connection.terminate()
            raise
        return connection

    def explained(self, error: Exception) -> Exception:
        """What to raise for an error."""
        if isinstance(error, ConfigError):
            said: Exception = error
        else:
            said = explained(error, self._place, self._lock_s, self._wait_s, StoreUnavailable)
        if isinstance(said, ConfigError) and self.was_open:
            return StoreUnavailable(str(said))
        return said

    async def _check_tables(self, connection: RawConnection) -> None:
        if not self._creates:
            if not await connection.fetchval(THERE):
                raise ConfigError(
                    f"there is no store in the database of {self.shown}: start a node with it "
                    "first, or name another"
                )
            self._check_format(await connection.fetchrow(ABOUT))
            return
        if await connection.fetchval(THERE):
            found = await connection.fetchrow(ABOUT)
            if self._check_format(found) == FORMAT:
                return
        async with connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock($1)", LOCK)
            if not await connection.fetchval(THERE):
                await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
                await connection.execute(TABLES + FUNCTIONS)
                return
            found = await connection.fetchrow(ABOUT)
            for older in range(self._check_format(found), FORMAT):
                await connection.execute(UPGRADES[older])
                await connection.execute(FUNCTIONS)
                await connection.execute(f"UPDATE {SCHEMA}.meta SET format = $1", older + 1)

    def _check_format(self, found: Any) -> int:
        number = int(found["format"])
        if number > FORMAT:
            raise ConfigError(
                f"the store {self.shown} has format {number}, this version of Domicile knows "
                f"formats up to {FORMAT}; a newer version has written to it: upgrade Domicile "
                "here, or name another database"
            )
        return number


class StoreClient:
    """One connection's calls. `heard` is told what each answer says of the store."""

    def __init__(
        self,
        server: StoreServer,
        known: KnownPast,
        open: Callable[[float], Awaitable[RawConnection]],
        lost: Callable[[], None],
        *,
        by: str,
        kept_commits: int,
        op_timeout_s: float,
        unhurried: bytes,
    ) -> None:
        self._known, self._by, self._kept = known, by, kept_commits
        self._op_timeout_s, self._unhurried = op_timeout_s, unhurried
        self._line = ConnectionLine(open, server.explained, lost, f"domicile-store {by}")

    @property
    def connected(self) -> bool:
        """Whether there is a connection that works, as far as is known."""
        return self._line.connected

    async def ask(self, generation: int, sql: str, *values: object) -> Records:
        """One call of a function that is no commit; its rows."""

        async def run(connection: RawConnection, jobs: Sequence[LineJob]) -> Sequence[object]:
            return [await self._fetch(connection, generation, sql, *values)]

        rows: Records = await self._line.do(LineJob(run, self._deadline(), generation))
        return rows

    async def commit(
        self, generation: int, conditions: Sequence[Condition], writes: Sequence[Write]
    ) -> Outcome:
        """As `Store.commit`."""
        check_limits(conditions, writes)
        loud = not self._unhurried or not all(
            write.key.startswith(self._unhurried) for write in writes
        )
        part = operation_columns(conditions, writes)
        job = LineJob(
            self._write, self._deadline(), generation, part=part, loud=loud, unknown=Unknown()
        )
        found: Committed | Unknown | int = await self._line.do(job)
        return Conflict(part.keys[found]) if isinstance(found, int) else found

    async def keep(self, generation: int, lease: str, key: bytes) -> tuple[Kept, int, StoreAge]:
        """Renew a lease, then read a key (L1); also the store's revision and age."""
        (row,) = await self.ask(generation, KEEP, lease, key)
        item = None
        if row["revision"] is not None:
            item = Item(key, row["value"], row["created"], row["revision"])
        return Kept(row["ttl"], item), row["newest"], StoreAge(row["stale"], row["led"])

    async def tick(
        self, generation: int, *, leads: bool, gap_s: float = TICK_S * 0.9
    ) -> tuple[int, StoreAge]:
        """Advance store time unless somebody did within `gap_s`; its revision, and its age
        before."""
        (row,) = await self.ask(generation, TICK, leads, gap_s)
        return row["newest"], StoreAge(row["stale"], row["led"])

    async def close(self) -> None:
        """Close the connection."""
        await self._line.close()

    async def _write(
        self, connection: RawConnection, jobs: Sequence[LineJob]
    ) -> Sequence[Committed | int]:
        firsts, *columns = commit_columns([job.part for job in jobs if job.part is not None])
        loud = [job.loud for job in jobs]
        rows = await self._fetch(
            connection, jobs[0].generation, WRITE_COMMITS,
            self._by, self._kept, firsts, loud, *columns,
        )  # fmt: skip
        return [
            Committed(row["revision"]) if row["conflict"] is None else row["conflict"] - 1
            for row in rows[:-1]
        ]

    async def _fetch(
        self, connection: RawConnection, generation: int, sql: str, *values: object
    ) -> Records:
        mark = self._known.now(generation)
        try:
            rows: Records = await connection.fetch(sql, *mark, *values)
        except asyncpg.PostgresError as error:
            if getattr(error, "sqlstate", None) == REWOUND:
                self._known.rewind(generation, str(error))
            raise
        state = rows[0] if rows[0]["history"] is not None else rows[-1]
        seen = Mark(state["history"], state["newest"], state["newest_tag"])
        self._known.saw(generation, seen)
        return rows

    def _deadline(self) -> float:
        return time.monotonic() + self._op_timeout_s
