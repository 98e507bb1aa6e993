"""A pool of asyncpg that stays with a group's primary."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from domicile.errors import ConfigError
from domicile.failover.clients.primary_course import PrimaryCourse
from domicile.failover.following import Group

try:
    import asyncpg
except ImportError as error:
    raise ConfigError(
        "a client of PostgreSQL needs the client library: pip install 'domicile[postgres]'"
    ) from error

if TYPE_CHECKING:
    Connected = asyncpg.Connection[asyncpg.Record]


@asynccontextmanager
async def follow_asyncpg(group: Group, **options: Any) -> AsyncGenerator[asyncpg.Pool[Any]]:
    """An `asyncpg.Pool` whose every connection is to the group's present primary.

    `options` are those of `asyncpg.create_pool`, without a host and a port. A change of primary
    ends all its connections: a statement under way raises an error of asyncpg's, and a commit under
    way may have happened. `acquire` then connects to the next primary, and waits for it as
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

    course = PrimaryCourse(group, ended)
    # The pool connects when it is used: there may be no primary yet.
    options.setdefault("min_size", 0)
    async with course.followed(), asyncpg.create_pool(connect=connect, **options) as pool:
        yield pool
