"""A transaction of the application, on its own connection, under the fence of a shard (J10).

Only `domicile.journals.postgres` uses it. It locks the fence row first and looks at it afterwards:
a claim that another transaction has not committed yet is waited for, and one that comes later waits
for this transaction. Nothing here may look at the row without its lock (I2).
"""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from domicile.errors import ConfigError, Unavailable
from domicile.journals.postgres.connections import PLACE, Connections
from domicile.ports.journal import Claim, JournalUnknown

# The limits are those of J3: a process that stands still in the middle must not keep the row.
_LIMITS = f"""SELECT set_config('lock_timeout', $1, true),
    set_config('idle_in_transaction_session_timeout', $1, true), ({PLACE}) AS place"""

_HOLD = """SELECT epoch, owner, txid_current()::text AS transaction FROM "{schema}".fence
    WHERE role = $1 AND layout = $2 AND shard = $3 FOR NO KEY UPDATE"""

_SAME = "SELECT txid_current()::text"

_LOST = (asyncpg.PostgresConnectionError, asyncpg.InterfaceError, asyncpg.InternalClientError)
_UNSURE = ("08", "57", "58", "XX")
"""Classes of errors after which a commit may have happened: lost connections, shutdowns, faults."""


class PostgresFencedTransaction:
    """Implements `FencedTransaction`."""

    def __init__(self, connections: Connections, connection: object, claim: Claim) -> None:
        kind = type(connection).__qualname__
        if not isinstance(connection, asyncpg.Connection | PoolConnectionProxy):
            hint = "; acquire one of the pool" if isinstance(connection, asyncpg.Pool) else ""
            raise ConfigError(
                f"fenced() needs a connection of asyncpg, not {kind}"
                f"{hint}. Other drivers and databases are fenced by the token (shard, self.epoch): "
                "store it beside the row, and refuse a smaller one"
            )
        self._connections, self._claim = connections, claim
        self._connection: Any = connection
        self._transaction: Any = None
        self._number = ""
        """The server's own name of the transaction."""

    async def begin(self) -> int | None:
        """As `FencedTransaction.begin`."""
        try:
            if self._connection.is_in_transaction():
                raise ConfigError(
                    "fenced() begins and commits the transaction itself: pass a connection that is "
                    "in none. Inside the block, `async with conn.transaction()` makes a savepoint"
                )
            return await self._begin()
        except asyncpg.LockNotAvailableError as error:
            raise Unavailable(
                f"the fence row of shard {self._shard} stayed locked for "
                f"{self._connections.wait_s:.1f} s; nothing of this block ran"
            ) from error
        except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError) as error:
            raise self._elsewhere(f"has no schema {self._connections.schema!r}") from error
        except asyncpg.InsufficientPrivilegeError as error:
            schema = self._connections.schema
            raise ConfigError(
                f"the user of this connection may not lock the fence row of the journal: {error}; "
                f'GRANT USAGE ON SCHEMA "{schema}" and GRANT SELECT, UPDATE ON "{schema}".fence '
                "to it"
            ) from error
        except asyncpg.ReadOnlySQLTransactionError as error:
            raise ConfigError(
                f"this connection takes no writes: {error}; connect to the primary server"
            ) from error
        except (asyncpg.PostgresError, *_LOST, OSError, TimeoutError, JournalUnknown) as error:
            raise Unavailable(
                f"the connection given to fenced() failed ({type(error).__name__}: {error}); "
                "nothing of this block ran"
            ) from error

    async def check(self) -> None:
        """As `FencedTransaction.check`."""
        try:
            number = await self._connection.fetchval(_SAME)
        except asyncpg.InFailedSQLTransactionError as error:
            raise RuntimeError(
                "a statement in the fenced block failed, so PostgreSQL takes no more of it: "
                "nothing was committed. To go on after a failure, run the statement in "
                "`async with conn.transaction()`, a savepoint"
            ) from error
        except (*_LOST, OSError, TimeoutError) as error:
            raise Unavailable(
                f"the connection of the fenced block was lost before its commit ({error}): nothing "
                "was committed. A block that waits for something else than its connection for "
                f"{self._connections.wait_s:.1f} s is ended by the server"
            ) from error
        if number != self._number or not self._connection.is_in_transaction():
            raise RuntimeError(
                "the fenced block has ended its transaction itself; what came after that was not "
                "fenced. Leave COMMIT and ROLLBACK to fenced()"
            )

    async def commit(self) -> None:
        """As `FencedTransaction.commit`."""
        try:
            await self._transaction.commit()
        except asyncio.CancelledError:
            # Nobody waits for the outcome any more, but the row must not stay locked.
            self._connection.terminate()
            raise
        except asyncpg.PostgresError as error:
            sqlstate = str(error.sqlstate or "XX")
            if sqlstate[:2] in _UNSURE or sqlstate == "40003" or self._connection.is_closed():
                raise self._unknown(error) from error
            # The server refused it, and the transaction is over.
            self._transaction = None
            raise
        except (*_LOST, OSError, TimeoutError) as error:
            raise self._unknown(error) from error

    async def rollback(self) -> None:
        """As `FencedTransaction.rollback`."""
        transaction, self._transaction = self._transaction, None
        if transaction is None:
            return
        try:
            async with asyncio.timeout(self._connections.wait_s):
                await transaction.rollback()
        except (asyncpg.PostgresError, *_LOST, OSError, TimeoutError):
            # The server rolls back what a lost connection has left open.
            self._connection.terminate()
        except BaseException:
            self._connection.terminate()
            raise

    async def _begin(self) -> int | None:
        connection, claim = self._connection, self._claim
        self._transaction = connection.transaction(isolation="read_committed")
        await self._transaction.start()
        limits = await connection.fetchrow(_LIMITS, self._connections.wait_ms)
        if limits["place"] != await self._connections.place():
            raise self._elsewhere("is another one")
        row = await connection.fetchrow(
            _HOLD.format(schema=self._connections.schema),
            claim.shard.role, claim.layout, claim.shard.shard,
        )  # fmt: skip
        if row is None:
            raise self._elsewhere(f"has no fence of shard {self._shard}")
        self._number = row["transaction"]
        if (row["epoch"], row["owner"]) == (claim.epoch, claim.owner):
            return None
        return int(row["epoch"])

    @property
    def _shard(self) -> str:
        return f"{self._claim.shard.role}/{self._claim.shard.shard}"

    def _elsewhere(self, why: str) -> ConfigError:
        return ConfigError(
            f"fenced() needs a connection to the journal's own database, "
            f"{self._connections.shown}: the database of this connection {why}. Connect to that "
            "one, or fence by the token (shard, self.epoch)"
        )

    def _unknown(self, error: Exception) -> JournalUnknown:
        return JournalUnknown(
            f"the connection was lost while the fenced block was committed ({error}): it is "
            "committed as a whole, or not at all; look into its tables"
        )
