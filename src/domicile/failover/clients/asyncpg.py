"""A pool of asyncpg that stays with a group's primary.

What certainly did not run is sent again to the next primary: the connection was not made, it had
ended before anything was sent, or the server refused the statement because it takes no writes. What
may have run is never repeated here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from inspect import signature
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

from domicile.errors import ConfigError
from domicile.failover.clients.primary_course import AGAIN_S, ALONE, REPEAT_S, PrimaryCourse
from domicile.failover.following import Group

try:
    import asyncpg
except ImportError as error:
    raise ConfigError(
        "a client of PostgreSQL needs the client library: pip install 'domicile[postgres]'"
    ) from error

if TYPE_CHECKING:
    Connected = asyncpg.Connection[asyncpg.Record]

log = logging.getLogger("domicile")

ENDED = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)
"""What a connection raises that ends while it is made ready for its next user."""

NOT_TAKEN = (
    OSError, TimeoutError, asyncpg.PostgresConnectionError, asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError, asyncpg.TooManyConnectionsError,
    asyncpg.InvalidAuthorizationSpecificationError,
)  # fmt: skip
"""How a server that is no primary any more, or not yet, answers a new connection."""


class FollowingPool(asyncpg.Pool):
    """As asyncpg's pool. `execute`, `fetch`, `fetchrow` and `fetchval` repeat what did not run."""

    repeat_s = REPEAT_S
    leads: Callable[[Any], bool]
    """Whether a connection is to the newest primary that was heard of."""

    async def _acquire(self, *args: Any) -> Any:
        """As asyncpg's, for all who acquire. Its own `expire_connections` is not for this: when an
        expired one has closed at last, it frees the place of the one that has replaced it."""
        taken = cast("Any", super())._acquire
        while True:
            found: Any = await taken(*args)
            if self.leads(found._con):
                return found
            found.terminate()
            await self._given_back(found)

    async def release(self, connection: Any, **options: Any) -> None:
        """As asyncpg's. One that was ended meanwhile is not in the pool any more."""
        try:
            await super().release(connection, **options)
        except asyncpg.InternalClientError as error:
            if connection._con is not None:
                raise
            log.debug("a connection ended while it was given back: %s", error)

    async def execute(self, query: str, *args: Any, **options: Any) -> str:
        """As asyncpg's."""
        found: str = await self._run("execute", query, args, options)
        return found

    async def fetch(self, query: str, *args: Any, **options: Any) -> list[Any]:
        """As asyncpg's."""
        found: list[Any] = await self._run("fetch", query, args, options)
        return found

    async def fetchrow(self, query: str, *args: Any, **options: Any) -> Any:
        """As asyncpg's."""
        return await self._run("fetchrow", query, args, options)

    async def fetchval(self, query: str, *args: Any, **options: Any) -> Any:
        """As asyncpg's."""
        return await self._run("fetchval", query, args, options)

    async def _run(
        self, call: str, query: str, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        until = monotonic() + self.repeat_s
        while True:
            connection: Any = await self._taken(until)
            try:
                # One that ended meanwhile takes nothing, so nothing is sent on it.
                if not connection.is_closed() or monotonic() >= until:
                    return await getattr(connection, call)(query, *args, **options)
            except asyncpg.ReadOnlySQLTransactionError:
                connection.terminate()
                if ALONE.fullmatch(query) is None or monotonic() >= until:
                    raise
            finally:
                await self._given_back(connection)
            await asyncio.sleep(AGAIN_S)

    async def _given_back(self, connection: Any) -> None:
        """To the pool. What the statement did stands, also if its connection ends now."""
        try:
            await self.release(connection)
        except ENDED as error:
            log.debug("a connection ended after its statement: %s", error)

    async def _taken(self, until: float) -> Any:
        """A connection to the primary. Nothing has been sent on it, so any failure is repeated."""
        while True:
            try:
                return await self.acquire()
            except NOT_TAKEN as error:
                if monotonic() >= until or isinstance(error, asyncpg.InvalidPasswordError):
                    raise
            await asyncio.sleep(AGAIN_S)


@asynccontextmanager
async def follow_asyncpg(
    group: Group, *, repeat_s: float = REPEAT_S, **options: Any
) -> AsyncGenerator[FollowingPool]:
    """An `asyncpg.Pool` whose every connection is to the group's present primary.

    `options` are those of `asyncpg.create_pool`, without a host and a port. A change of primary
    ends all its connections. A statement that certainly did not run is sent again to the next
    primary, for `repeat_s` seconds at most, if it was given to the pool itself: `execute`, `fetch`,
    `fetchrow` or `fetchval`, one statement, refused with SQLSTATE 25006 or before it was sent. So a
    planned switchover fails no such write that ends in time. Another statement under way raises an
    error of asyncpg's, and a commit under way may have happened. `acquire` gives a connection to
    the present primary; what runs on it is never repeated. Without a primary a call waits as
    `group.primary()` does. The client of `group` must outlive this block.
    """
    given = options.pop("connect", asyncpg.connect)
    opened: dict[Connected, int] = {}

    def forget(gone: Any) -> None:
        opened.pop(gone, None)

    async def ended() -> None:
        for connection, epoch in list(opened.items()):
            if epoch < course.epoch:
                del opened[connection]
                connection.terminate()

    async def connect(*args: Any, **found: Any) -> Connected:
        primary = await course.primary()
        # A URL's host would win over the primary's, and a password file knows a port.
        connection: Connected = await given(
            *args, **{**found, "host": primary.host, "port": primary.port}
        )
        opened[connection] = primary.epoch
        connection.add_termination_listener(forget)
        if primary.epoch < course.epoch:
            connection.terminate()
            raise ConnectionResetError("another primary was announced meanwhile; connect again")
        return connection

    def leads(connection: Any) -> bool:
        # One that has ended just now is its user's to find.
        return bool(opened.get(connection, course.epoch) == course.epoch)

    course = PrimaryCourse(group, ended)
    # The pool connects when it is used: there may be no primary yet.
    options.setdefault("min_size", 0)
    every = signature(asyncpg.create_pool).parameters.values()
    usual: dict[str, Any] = {one.name: one.default for one in every if one.default is not one.empty}
    dsn = options.pop("dsn", usual.pop("dsn", None))
    settled: dict[str, Any] = {**usual, "connect": connect, **options}
    made = FollowingPool(dsn, **settled)
    made.repeat_s, made.leads = repeat_s, leads
    async with course.followed(), made as pool:
        yield pool
