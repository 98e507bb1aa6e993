"""Clients of redis-py that stay with a group's primary, on Valkey and on Redis.

One is for the event loop, `follow_redis`; one for threads, `follow_redis_sync`. What certainly was
not executed is sent again to the next primary: the connection was not made, nothing was sent, or
the server refused it because it is a replica. What may have run is never repeated here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic, sleep
from typing import Any, TypeVar, cast

from domicile.errors import ConfigError
from domicile.failover.clients.primary_course import (
    AGAIN_S,
    REPEAT_S,
    BlockingGroup,
    Lifeline,
    PrimaryCourse,
    SyncPrimaryCourse,
)
from domicile.failover.following import Group

try:
    import redis
    import redis.asyncio
    import redis.client
    from redis.asyncio.client import Pipeline
    from redis.exceptions import ConnectionError as NotConnected
    from redis.exceptions import ExecAbortError, ReadOnlyError
    from redis.exceptions import TimeoutError as NoAnswer
    from redis.maint_notifications import MaintNotificationsConfig
except ImportError as error:
    raise ConfigError(
        "a client of Valkey or Redis needs the client library: pip install 'domicile[redis]'"
    ) from error

T = TypeVar("T")


class NothingSent(NotConnected):
    """There was no connection to the primary, so nothing was executed. A retry is safe."""


class _ToPrimary(redis.asyncio.Connection):
    """One connection. It asks where the primary is each time that it is opened."""

    def __init__(
        self, *, course: PrimaryCourse, opened: dict[_ToPrimary, None], **options: Any
    ) -> None:
        super().__init__(**options)  # pyright: ignore[reportUnknownMemberType]
        self._course, self._opened = course, opened
        self._epoch = 0
        self._refused = False
        """Whether the server has shown that it is no primary any more."""
        self._lost = False
        """Whether it was ended, perhaps in somebody's hands, and that was not told yet."""

    @property
    def _leads(self) -> bool:
        return self._epoch == self._course.epoch and not self._refused

    async def connect_check_health(
        self, check_health: bool = True, retry_socket_connect: bool = True
    ) -> None:
        """Open it to the primary of now; nothing if it is open."""
        if self.is_connected and self._leads:
            return
        await self.disconnect()
        self._refused = self._lost = False
        found = await self._course.primary()
        self.host, self.port, self._epoch = found.host, found.port, found.epoch
        try:
            await super().connect_check_health(check_health, retry_socket_connect)
        except (NotConnected, NoAnswer) as error:
            raise NothingSent(f"the primary took no connection: {error}") from error
        self._opened[self] = None

    async def disconnect(self, *args: Any, **options: Any) -> None:
        """As redis-py's."""
        self._opened.pop(self, None)
        await super().disconnect(*args, **options)

    async def end_if_old(self) -> None:
        """End it if there is another primary by now."""
        if self.is_connected and self._epoch < self._course.epoch:
            self._lost = True
            await self.disconnect(nowait=True)

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Send, unless another primary has been announced since it was opened.

        redis-py would open it again: what was watched or begun on it would be lost without a word.
        """
        if self._lost or (self.is_connected and not self._leads):
            await self.disconnect()
            self._lost = False
            raise NothingSent("another primary was announced; nothing was sent. Retry is safe")
        await super().send_packed_command(command, check_health)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """The answer. A server that is no primary any more gets nothing after it."""
        try:
            # redis-py leaves the type of an answer open.
            return await super().read_response(*args, **options)  # pyright: ignore[reportUnknownVariableType]
        except ReadOnlyError:
            # Answers to the rest of a transaction may still come.
            self._refused = True
            raise


def _was_refused(error: Exception) -> bool:
    """Whether a replica refused a command, or a whole transaction: it executes no write."""
    return isinstance(error, ReadOnlyError) or (
        isinstance(error, ExecAbortError) and "READONLY" in str(error)
    )


def _nothing_ran(error: Exception) -> bool:
    return isinstance(error, NothingSent) or _was_refused(error)


async def _repeated(
    call: Callable[[], Awaitable[T]], again: Callable[[Exception], bool], repeat_s: float
) -> T:
    """The answer to a call that is made again while it certainly was not executed."""
    until = monotonic() + repeat_s
    while True:
        try:
            return await call()
        except (NothingSent, ReadOnlyError, ExecAbortError) as error:
            if not again(error) or monotonic() >= until:
                raise
        await asyncio.sleep(AGAIN_S)


class FollowingRedis(redis.asyncio.Redis):
    """As redis-py's client; what was certainly not executed is sent to the next primary."""

    repeat_s = REPEAT_S

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """As redis-py's: one command, on any connection."""
        # redis-py leaves the type of an answer open.
        call = cast("Any", super().execute_command)  # pyright: ignore[reportUnknownMemberType]
        if self.single_connection_client:
            # Commands before it may have begun what this one belongs to, as MULTI.
            return await call(*args, **options)
        return await _repeated(lambda: call(*args, **options), _nothing_ran, self.repeat_s)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        """As redis-py's."""
        pipeline = FollowingPipeline(
            self.connection_pool, self.response_callbacks, transaction, shard_hint
        )
        pipeline.repeat_s = self.repeat_s
        return pipeline


class FollowingPipeline(Pipeline):
    """As redis-py's. What was refused is repeated only as a whole, so only a transaction is."""

    repeat_s = REPEAT_S

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        """As redis-py's: what was queued."""
        commands, explicit = list(self.command_stack), self.explicit_transaction
        whole = self.is_transaction or explicit
        # What a watch has read belongs to the server that was asked; a script may be loaded there.
        alone = self.watching or bool(self.scripts)

        def again(error: Exception) -> bool:
            nothing_ran = isinstance(error, NothingSent) or (whole and _was_refused(error))
            return nothing_ran and not alone

        call = cast("Any", super().execute)  # pyright: ignore[reportUnknownMemberType]

        async def attempt() -> list[Any]:
            self.command_stack, self.explicit_transaction = list(commands), explicit
            found: list[Any] = await call(raise_on_error)
            return found

        return await _repeated(attempt, again, self.repeat_s)


@asynccontextmanager
async def follow_redis(
    group: Group, *, repeat_s: float = REPEAT_S, **options: Any
) -> AsyncGenerator[FollowingRedis]:
    """A `redis.asyncio.Redis` whose every connection is to the group's present primary.

    `options` are those of a redis-py connection, and `max_connections`. A change of primary ends
    all its connections. A command or a transaction that certainly was not executed is sent again to
    the next primary, for `repeat_s` seconds at most: the connection was not made, or the server
    refused it with READONLY. So a planned switchover fails no write. What was under way when its
    connection broke raises redis-py's `ConnectionError`, and may have run. Of a pipeline without a
    transaction, and of one that watches keys, a part may have run: a refusal is the caller's then.
    Without a primary a command waits as `group.primary()` does. The client of `group` must outlive
    this block.
    """
    # A retry would send a write again that may have run, so there is none unless it is asked for.
    options.setdefault("retry", None)
    opened: dict[_ToPrimary, None] = {}

    async def ended() -> None:
        for connection in list(opened):
            await connection.end_if_old()

    course = PrimaryCourse(group, ended)
    pool = redis.asyncio.ConnectionPool(
        connection_class=_ToPrimary, course=course, opened=opened, **options
    )
    async with course.followed(), FollowingRedis(connection_pool=pool) as client:
        client.repeat_s = repeat_s
        try:
            yield client
        finally:
            await pool.aclose()


class _SyncToPrimary(redis.Connection):
    """As `_ToPrimary`, for one thread at a time. The course ends it by its lifeline."""

    def __init__(self, *, course: SyncPrimaryCourse, **options: Any) -> None:
        self._course = course
        self._epoch = 0
        self._refused = False
        self._lifeline: Lifeline | None = None
        super().__init__(**options)  # type: ignore[no-untyped-call]

    @property
    def _leads(self) -> bool:
        return self._epoch == self._course.epoch and not self._refused

    def connect_check_health(
        self, check_health: bool = True, retry_socket_connect: bool = True
    ) -> None:
        """Open it to the primary of now; nothing if it is open."""
        if self.is_connected and self._leads:
            return
        self.disconnect()
        self._refused = False
        found = self._course.primary()
        self.host, self.port, self._epoch = found.host, found.port, found.epoch
        try:
            super().connect_check_health(check_health, retry_socket_connect)
        except (NotConnected, NoAnswer) as error:
            raise NothingSent(f"the primary took no connection: {error}") from error

    def _connect(self) -> Any:
        # redis-py leaves the type of a socket open.
        opened: Any = super()._connect()  # type: ignore[no-untyped-call]
        self._lifeline = Lifeline(opened.fileno())
        self._course.opened(self._lifeline, self._epoch)
        return opened

    def disconnect(self, *args: Any, **options: Any) -> None:
        """As redis-py's."""
        super().disconnect(*args, **options)  # type: ignore[no-untyped-call]
        lifeline, self._lifeline = self._lifeline, None
        if lifeline is not None:
            self._course.closed(lifeline)

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Send, unless another primary has been announced since it was opened."""
        if self.is_connected and not self._leads:
            self.disconnect()
            raise NothingSent("another primary was announced; nothing was sent. Retry is safe")
        super().send_packed_command(command, check_health)  # type: ignore[no-untyped-call]

    def read_response(self, *args: Any, **options: Any) -> Any:
        """The answer. A server that is no primary any more gets nothing after it."""
        try:
            # redis-py leaves the type of an answer open.
            return super().read_response(*args, **options)  # pyright: ignore[reportUnknownVariableType]
        except ReadOnlyError:
            self._refused = True
            raise


def _repeated_sync(call: Callable[[], T], again: Callable[[Exception], bool], repeat_s: float) -> T:
    """As `_repeated`."""
    until = monotonic() + repeat_s
    while True:
        try:
            return call()
        except (NothingSent, ReadOnlyError, ExecAbortError) as error:
            if not again(error) or monotonic() >= until:
                raise
        sleep(AGAIN_S)


class SyncFollowingRedis(redis.Redis):
    """As redis-py's client; what was certainly not executed is sent to the next primary."""

    repeat_s = REPEAT_S

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """As redis-py's: one command, on any connection."""
        # redis-py leaves the type of an answer open.
        call = cast("Any", super().execute_command)  # pyright: ignore[reportUnknownMemberType]
        if self.connection is not None:
            # As that of the event loop.
            return call(*args, **options)
        return _repeated_sync(lambda: call(*args, **options), _nothing_ran, self.repeat_s)

    def pipeline(
        self, transaction: bool = True, shard_hint: str | None = None
    ) -> SyncFollowingPipeline:
        """As redis-py's."""
        pipeline = SyncFollowingPipeline(
            self.connection_pool, self.response_callbacks, transaction, shard_hint
        )
        pipeline.repeat_s = self.repeat_s
        return pipeline


class SyncFollowingPipeline(redis.client.Pipeline):
    """As redis-py's. What was refused is repeated only as a whole, so only a transaction is."""

    repeat_s = REPEAT_S

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        """As redis-py's: what was queued."""
        # redis-py leaves its types open, and its flag has the name of a method of its base.
        own = cast("Any", self)
        commands, explicit = list(own.command_stack), self.explicit_transaction
        whole = bool(own.transaction) or explicit
        # What a watch has read belongs to the server that was asked; a script may be loaded there.
        alone = self.watching or bool(self.scripts)

        def again(error: Exception) -> bool:
            nothing_ran = isinstance(error, NothingSent) or (whole and _was_refused(error))
            return nothing_ran and not alone

        call = cast("Any", super().execute)  # pyright: ignore[reportUnknownMemberType]

        def attempt() -> list[Any]:
            own.command_stack, self.explicit_transaction = list(commands), explicit
            found: list[Any] = call(raise_on_error)
            return found

        return _repeated_sync(attempt, again, self.repeat_s)


@contextmanager
def follow_redis_sync(
    group: BlockingGroup, *, repeat_s: float = REPEAT_S, **options: Any
) -> Generator[SyncFollowingRedis]:
    """A `redis.Redis` whose every connection is to the group's present primary, for threads.

    As `follow_redis`, with the group of a client of `connect_sync`, which must outlive this block.
    Any number of threads may use it.
    """
    # A retry would send a write again that may have run, so there is none unless it is asked for.
    options.setdefault("retry", None)
    # By these a server may send its clients elsewhere.
    options.setdefault("maint_notifications_config", MaintNotificationsConfig(enabled=False))
    course = SyncPrimaryCourse(group)
    pool = redis.ConnectionPool(connection_class=_SyncToPrimary, course=course, **options)
    with course.followed(), SyncFollowingRedis(connection_pool=pool) as client:
        client.repeat_s = repeat_s
        try:
            yield client
        finally:
            pool.disconnect()
