"""A client of redis-py that stays with a group's primary, on Valkey and on Redis."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from domicile.errors import ConfigError
from domicile.failover.clients.primary_course import PrimaryCourse
from domicile.failover.following import Group

try:
    import redis.asyncio
    from redis.exceptions import ConnectionError as NotConnected
    from redis.exceptions import ReadOnlyError
except ImportError as error:
    raise ConfigError(
        "a client of Valkey or Redis needs the client library: pip install 'domicile[redis]'"
    ) from error

if TYPE_CHECKING:
    from redis.asyncio import Redis


class _ToPrimary(redis.asyncio.Connection):
    """One connection. It asks where the primary is each time that it is opened."""

    def __init__(self, *, course: PrimaryCourse, **options: Any) -> None:
        super().__init__(**options)  # pyright: ignore[reportUnknownMemberType]
        self._course = course
        self._epoch = 0

    async def connect(self) -> None:
        """Open it to the primary of now; nothing if it is open."""
        if self.is_connected and self._epoch == self._course.epoch:
            return
        await self.disconnect()
        found = await self._course.primary()
        self.host, self.port, self._epoch = found.host, found.port, found.epoch
        await super().connect()  # type: ignore[no-untyped-call]

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Send, unless another primary has been announced since it was opened."""
        if self.is_connected and self._epoch != self._course.epoch:
            await self.disconnect()
            raise NotConnected("another primary was announced; nothing was sent. Retry is safe")
        await super().send_packed_command(command, check_health)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """The answer. A server that is no primary any more is left."""
        try:
            # redis-py leaves the type of an answer open.
            return await super().read_response(*args, **options)  # pyright: ignore[reportUnknownVariableType]
        except ReadOnlyError:
            await self.disconnect()
            raise


@asynccontextmanager
async def follow_redis(group: Group, **options: Any) -> AsyncGenerator[Redis]:
    """A `redis.asyncio.Redis` whose every connection is to the group's present primary.

    `options` are those of a redis-py connection, and `max_connections`. A change of primary ends
    all its connections: a command under way raises redis-py's `ConnectionError` and may have run. A
    command that a restarted primary refuses raises `ReadOnlyError` and has not run. The next one is
    sent to the next primary, and waits for it as `group.primary()` does. The client of `group` must
    outlive this block.
    """
    # A retry would send a write again that may have run, so there is none unless it is asked for.
    options.setdefault("retry", None)
    pool: redis.asyncio.ConnectionPool

    async def ended() -> None:
        await pool.disconnect()

    course = PrimaryCourse(group, ended)
    pool = redis.asyncio.ConnectionPool(connection_class=_ToPrimary, course=course, **options)
    async with course.followed(), redis.asyncio.Redis(connection_pool=pool) as client:
        try:
            yield client
        finally:
            await pool.aclose()
