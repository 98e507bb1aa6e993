"""Sessions of a PostgreSQL server: their settings, and what their errors mean to people.

`domicile.stores.postgres` and `domicile.journals.postgres` use it. A session is refused unless it
has the settings that it asked for: a pooler in transaction mode would lose them, and with them what
the rules rely on. No text from here may contain a password.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import asyncpg

from domicile.errors import ConfigError

if TYPE_CHECKING:
    from asyncpg.pool import PoolConnectionProxy

    Connection = PoolConnectionProxy[asyncpg.Record]
    RawConnection = asyncpg.Connection[asyncpg.Record]

FAILURES = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""What asyncpg raises. The last: the server said that it ends, and its connection is not closed
yet."""


class SessionPlace(NamedTuple):
    """How texts speak of a place in a database."""

    what: str
    """With its URL, as `the journal postgresql://host/name`."""
    schema: str
    rights: str
    """What its user must be allowed to do."""


def session_settings(name: str, schema: str, wait_s: float) -> dict[str, str]:
    """Settings that every session needs; `wait_s` bounds its waits for locks and for the client."""
    wait_ms = str(max(1, int(wait_s * 1000)))
    return {
        "application_name": name,
        "search_path": f'"{schema}"',
        "synchronous_commit": "on",
        # A statement that is cancelled while it waits for a standby counts as committed.
        "statement_timeout": "0",
        "default_transaction_isolation": "read committed",
        "jit": "off",
        "plan_cache_mode": "force_generic_plan",
        "lock_timeout": wait_ms,
        "idle_in_transaction_session_timeout": wait_ms,
        "tcp_user_timeout": wait_ms,
    }


async def check_session(
    connection: RawConnection, wanted: Mapping[str, str], place: SessionPlace
) -> None:
    """Refuse a connection whose settings are not its own, before it is used."""
    rows = await connection.fetch(
        "SELECT name, setting FROM pg_settings WHERE name = ANY($1)", list(wanted)
    )
    found = {row["name"]: row["setting"] for row in rows}
    # A connection by a socket file has no TCP timeout.
    lost = [
        name
        for name, value in wanted.items()
        if name != "tcp_user_timeout" and found.get(name) != value
    ]
    if lost:
        raise ConfigError(
            f"{place.what} ignores settings of the session ({', '.join(sorted(lost))}), as "
            "PgBouncer does in transaction mode; name the server itself, or a pool in session mode"
        )


def explained(
    error: Exception,
    place: SessionPlace,
    lock_s: float,
    answer_s: float,
    away: Callable[[str], Exception],
) -> Exception:
    """What to raise for an error: `ConfigError`, or `away` for what may pass.

    A session waits `lock_s` for a lock, a caller `answer_s` for an answer.
    """
    what = place.what
    match error:
        case asyncpg.InvalidPasswordError() | asyncpg.InvalidAuthorizationSpecificationError():
            return ConfigError(
                f"{what} refuses this user: {error}; look at the user and the password in its "
                "URL, or in PGUSER and PGPASSWORD"
            )
        case asyncpg.InvalidCatalogNameError():
            return ConfigError(
                f"{what} names a database that is not there: {error}; create it, as in "
                "`createdb`, or name another one"
            )
        case asyncpg.InsufficientPrivilegeError():
            return ConfigError(f"{what} does not let this user work: {error}; {place.rights}")
        case asyncpg.ReadOnlySQLTransactionError():
            return away(f"{what} takes no writes now: {error}; name the primary server")
        case asyncpg.TargetServerAttributeNotMatched():
            return away(f"{what} has no primary among the servers of its URL; name the primary")
        case asyncpg.DiskFullError():
            return away(
                f"{what} takes no writes: the disk of the server is full ({error}); nothing of "
                "this call was stored, and what was stored before is safe; make room on that disk, "
                "then writes go on by themselves"
            )
        case asyncpg.LockNotAvailableError():
            return away(
                f"a row or table of {what} stayed locked for {lock_s:.1f} s: another session holds "
                "it; pg_stat_activity names it"
            )
        case asyncpg.PostgresError() if "startup parameter" in str(error):
            return ConfigError(
                f"{what} refuses settings of the session ({error}), as PgBouncer does; name the "
                "server itself, or a pool in session mode"
            )
        case asyncpg.InvalidSQLStatementNameError() | asyncpg.DuplicatePreparedStatementError():
            return ConfigError(
                f"{what} loses prepared statements ({error}), as PgBouncer does in transaction "
                "mode; name the server itself, or a pool in session mode"
            )
        case TimeoutError():
            return away(
                f"{what} did not answer within {answer_s:.1f} s; look at its load and the network"
            )
        case ssl.SSLCertVerificationError():
            return ConfigError(
                f"{what} shows a certificate that is not accepted: {error.verify_message}; name "
                "its authority by ?sslrootcert=FILE in the URL, and the server as its certificate "
                "names it"
            )
        case ConnectionError() if "rejected SSL upgrade" in str(error):
            return ConfigError(
                f"{what} speaks no TLS: {error}; see that a PostgreSQL server is at this address. "
                "If one is, switch `ssl` on there, or leave out sslmode= in the URL"
            )
        case OSError() | asyncpg.InterfaceError():
            return away(
                f"{what} can't be reached: {error}; see that the server runs and that this machine "
                "may connect to it"
            )
        case _:
            return away(f"{what} failed ({type(error).__name__}: {error})")
