"""The log of commits of a PostgreSQL store, for checkers and tools that run beside its server."""

from __future__ import annotations

import time
from collections.abc import Callable

import asyncpg

from domicile.errors import StoreUnavailable
from domicile.postgres.sessions import FAILURES
from domicile.stores.commit_log import QueuedCommit
from domicile.stores.loop_thread import LoopThread
from domicile.stores.postgres.schema import SCHEMA

READ_S = 30.0

_COMMITS = f"""SELECT t.revision, t.at, t.by, t.expiry, c.key, c.value, c.lease
    FROM {SCHEMA}.txn t JOIN {SCHEMA}.change c USING (revision)
    WHERE t.revision > $1 ORDER BY t.revision, c.n"""


def stored_commits(
    url: str, shown: str, after: int, now: Callable[[], float]
) -> list[QueuedCommit]:
    """The commits after a revision that the store still keeps, the oldest first.

    Blocks, whether or not the caller has an event loop. Its user must own the tables. The times are
    those of the clock `now` of this machine, if the server is on it, too.
    """

    async def read() -> list[asyncpg.Record]:
        connection = await asyncpg.connect(url, timeout=READ_S, command_timeout=READ_S)
        try:
            return await connection.fetch(_COMMITS, after)
        finally:
            await connection.close()

    thread = LoopThread("domicile-store-log")
    try:
        rows = thread.submit(read).result(READ_S)
    except (*FAILURES, OSError, TimeoutError) as error:
        raise StoreUnavailable(f"the log of the store {shown} can't be read: {error}") from error
    finally:
        thread.close()
    ahead_s = time.time() - now()
    found: list[QueuedCommit] = []
    for row in rows:
        if not found or found[-1].revision != row["revision"]:
            at = row["at"] - ahead_s
            found.append(QueuedCommit(row["revision"], at, row["by"], [], [], row["expiry"]))
        if row["value"] is None:
            found[-1].deletes.append(row["key"])
        else:
            found[-1].puts.append((row["key"], row["value"], row["lease"]))
    return found
