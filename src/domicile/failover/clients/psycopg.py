"""Connections of psycopg 3 that stay with a group's primary, for threads and for the event loop.

They are kept for the next user, as in a pool. psycopg's own pool connects in threads of its own: it
pauses for seconds between two attempts, and does not tell its users why they failed. Here whoever
needs a connection opens it, so that the next primary is found at once, and an error is seen.

What certainly did not run is sent again to the next primary: the connection was not made, it had
ended before anything was sent, or the server refused the statement because it takes no writes. What
may have run is never repeated here.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from domicile.errors import ConfigError, Unavailable
from domicile.failover.clients.primary_course import (
    AGAIN_S,
    ALONE,
    REPEAT_S,
    BlockingGroup,
    Lifeline,
    PrimaryCourse,
    SyncPrimaryCourse,
)
from domicile.failover.following import Group, Primary

try:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict, make_conninfo
    from psycopg.errors import ReadOnlySqlTransaction
    from psycopg.pq import TransactionStatus
    from psycopg.sql import Composable
except ImportError as error:
    raise ConfigError(
        f"psycopg 3 can't be used here ({error}): pip install 'psycopg[binary]'"
    ) from error

if TYPE_CHECKING:
    from psycopg.abc import Query

    Params = Sequence[Any] | Mapping[str, Any]

MAX_SIZE = 10
"""How many connections are open at a time, unless the caller says another number."""

WAIT_S = 30.0
"""How long a call waits for a connection that others use, unless the caller says another time."""

CONNECT_S = 5
"""How long a server may take to accept a connection, unless the caller says another time."""

PLACES = ("host", "hostaddr", "port")
"""What says where a server is: the group does."""

WRONG_PASSWORD = "password authentication failed"
"""Another attempt would not help. libpq gives no code for an error of a connection attempt."""

MOST_READS = 10
"""I6: so often a server's last words are read until its end must have come."""

AnyConnection = TypeVar(
    "AnyConnection", bound="psycopg.Connection[Any] | psycopg.AsyncConnection[Any]"
)


class _Kept(Generic[AnyConnection]):
    """A connection to the primary of one epoch."""

    def __init__(self, connection: AnyConnection, epoch: int) -> None:
        self.connection, self.epoch = connection, epoch
        self.lifeline = Lifeline(connection.fileno())

    @property
    def rests(self) -> bool:
        """Whether it can have another user: it works, and is in no transaction."""
        connection = self.connection
        return (
            not connection.closed and connection.pgconn.transaction_status == TransactionStatus.IDLE
        )

    @property
    def ended(self) -> bool:
        """Whether the server has ended it, as far as that has arrived here."""
        try:
            for _ in range(MOST_READS):
                if not _readable(self.connection.fileno()):
                    return False
                self.connection.pgconn.consume_input()
        except psycopg.OperationalError:
            pass
        return True


def _readable(number: int) -> bool:
    if not hasattr(select, "poll"):
        return bool(select.select([number], [], [], 0)[0])
    poll = select.poll()
    poll.register(number, select.POLLIN)
    return bool(poll.poll(0))


def _not_to_repeat(error: psycopg.OperationalError) -> bool:
    return WRONG_PASSWORD in str(error)


def _is_alone(query: Query) -> bool:
    """Whether it is one statement that is one transaction."""
    if isinstance(query, Composable):
        text = query.as_string()
    elif isinstance(query, bytes):
        text = query.decode(errors="replace")
    else:
        text = str(query)
    return ALONE.fullmatch(text) is not None


def _none_free(most: int, waited_s: float) -> Unavailable:
    return Unavailable(
        f"all {most} connections were in use for {waited_s:g} s; nothing was sent. Retry is safe, "
        "or raise max_size"
    )


def _replaced() -> psycopg.OperationalError:
    said = "another primary was announced meanwhile; nothing was sent. Retry is safe"
    return psycopg.OperationalError(said)


class _Login:
    """What a connection is made with, but for the server's place."""

    def __init__(self, conninfo: str, options: Mapping[str, Any]) -> None:
        given = conninfo_to_dict(conninfo)
        for name in PLACES:
            given.pop(name, None)
        given.setdefault("connect_timeout", CONNECT_S)
        self._conninfo = make_conninfo("", **given)
        self._options = {name: options[name] for name in options if name not in PLACES}
        self.autocommit = bool(self._options.pop("autocommit", False))

    def to(self, primary: Primary) -> dict[str, Any]:
        """The arguments of psycopg's `connect`."""
        # Left out, the address would be that of PGHOSTADDR or of a service file.
        place = {"host": primary.host, "hostaddr": "", "port": primary.port}
        return {"conninfo": self._conninfo, **self._options, **place}


class SyncFollowingPsycopg:
    """Connections of psycopg, each to the present primary. Any number of threads may use them."""

    def __init__(
        self, course: SyncPrimaryCourse, login: _Login, *,
        max_size: int, wait_s: float, repeat_s: float,
    ) -> None:  # fmt: skip
        self._course, self._login = course, login
        self._max_size, self._wait_s, self._repeat_s = max_size, wait_s, repeat_s
        self._places = threading.Semaphore(max_size)
        self._lock = threading.Lock()
        self._free: list[_Kept[psycopg.Connection[Any]]] = []
        self._closed = False
        self._process = os.getpid()

    @property
    def _forked(self) -> bool:
        """Whether this process is a fork: the connections are those of the process before."""
        return os.getpid() != self._process

    def execute(
        self, query: Query, params: Params | None = None, **options: Any
    ) -> psycopg.Cursor[Any]:
        """As psycopg's `Connection.execute`: one statement that is a transaction of its own.

        The cursor has all rows. What certainly did not run is sent again to the next primary.
        """
        until = monotonic() + self._repeat_s
        while True:
            with self._lent(until) as connection:
                connection.autocommit = True
                # psycopg has one signature for texts, and another one for templates.
                run: Any = connection.execute
                try:
                    found: psycopg.Cursor[Any] = run(query, params, **options)
                    return found
                except ReadOnlySqlTransaction:
                    connection.close()
                    if not _is_alone(query) or monotonic() >= until:
                        raise
            sleep(AGAIN_S)

    @contextmanager
    def connection(self) -> Generator[psycopg.Connection[Any]]:
        """A connection to the present primary for a block, which is one transaction.

        It commits at the end of the block, and rolls back if the block raises. With `autocommit`
        each statement is a transaction of its own. Nothing that ran in it is repeated.
        """
        with self._lent(monotonic() + self._repeat_s) as connection:
            connection.autocommit = self._login.autocommit
            try:
                yield connection
            except BaseException:
                if not self._forked:
                    with suppress(psycopg.Error):
                        connection.rollback()
                raise
            if not self._forked and (not connection.closed or connection.broken):
                connection.commit()

    def close(self) -> None:
        """Close those that nobody uses; the others close when they are given back."""
        if self._forked:
            return
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
        for kept in free:
            self._discard(kept)

    @contextmanager
    def _lent(self, until: float) -> Generator[psycopg.Connection[Any]]:
        if self._forked:
            raise ConfigError(
                "this client was made before this process was forked, and its connections are "
                "those of the process before: make one in this process. Nothing was sent"
            )
        if not self._places.acquire(timeout=self._wait_s):
            raise _none_free(self._max_size, self._wait_s)
        try:
            kept = self._taken(until)
            try:
                yield kept.connection
            finally:
                self._given_back(kept)
        finally:
            self._places.release()

    def _taken(self, until: float) -> _Kept[psycopg.Connection[Any]]:
        """A connection to the primary. Nothing has been sent on it, so any failure is repeated."""
        while True:
            kept = self._kept()
            if kept is not None:
                # One that ended meanwhile takes nothing, so nothing is sent on it.
                if kept.epoch == self._course.epoch and not kept.ended:
                    return kept
                self._discard(kept)
                continue
            try:
                return self._opened()
            except psycopg.OperationalError as error:
                if _not_to_repeat(error) or monotonic() >= until:
                    raise
            sleep(AGAIN_S)

    def _kept(self) -> _Kept[psycopg.Connection[Any]] | None:
        with self._lock:
            if self._closed:
                raise Unavailable("this client was closed; nothing was sent")
            return self._free.pop() if self._free else None

    def _opened(self) -> _Kept[psycopg.Connection[Any]]:
        primary = self._course.primary()
        kept = _Kept(psycopg.Connection[Any].connect(**self._login.to(primary)), primary.epoch)
        self._course.opened(kept.lifeline, kept.epoch)
        if kept.epoch < self._course.epoch:
            self._discard(kept)
            raise _replaced()
        return kept

    def _given_back(self, kept: _Kept[psycopg.Connection[Any]]) -> None:
        if self._forked:
            return
        if kept.rests and kept.epoch == self._course.epoch:
            with self._lock:
                if not self._closed:
                    self._free.append(kept)
                    return
        self._discard(kept)

    def _discard(self, kept: _Kept[psycopg.Connection[Any]]) -> None:
        kept.connection.close()
        self._course.closed(kept.lifeline)


class FollowingPsycopg:
    """As `SyncFollowingPsycopg`, for the event loop."""

    def __init__(
        self, course: PrimaryCourse, login: _Login, *,
        max_size: int, wait_s: float, repeat_s: float,
    ) -> None:  # fmt: skip
        self._course, self._login = course, login
        self._max_size, self._wait_s, self._repeat_s = max_size, wait_s, repeat_s
        self._places = asyncio.Semaphore(max_size)
        self._free: list[_Kept[psycopg.AsyncConnection[Any]]] = []
        self._open: dict[_Kept[psycopg.AsyncConnection[Any]], None] = {}
        self._closed = False

    async def execute(
        self, query: Query, params: Params | None = None, **options: Any
    ) -> psycopg.AsyncCursor[Any]:
        """As `SyncFollowingPsycopg.execute`."""
        until = monotonic() + self._repeat_s
        while True:
            async with self._lent(until) as connection:
                await connection.set_autocommit(True)
                run: Any = connection.execute
                try:
                    found: psycopg.AsyncCursor[Any] = await run(query, params, **options)
                    return found
                except ReadOnlySqlTransaction:
                    await connection.close()
                    if not _is_alone(query) or monotonic() >= until:
                        raise
            await asyncio.sleep(AGAIN_S)

    @asynccontextmanager
    async def connection(self) -> AsyncGenerator[psycopg.AsyncConnection[Any]]:
        """As `SyncFollowingPsycopg.connection`."""
        async with self._lent(monotonic() + self._repeat_s) as connection:
            await connection.set_autocommit(self._login.autocommit)
            try:
                yield connection
            except BaseException:
                with suppress(psycopg.Error):
                    await connection.rollback()
                raise
            if not connection.closed or connection.broken:
                await connection.commit()

    async def close(self) -> None:
        """As `SyncFollowingPsycopg.close`."""
        self._closed = True
        free, self._free = self._free, []
        for kept in free:
            await self._discard(kept)

    async def end_former(self) -> None:
        """End the connections of former primaries; their users find that they are over."""
        for kept in self._open:
            if kept.epoch < self._course.epoch:
                kept.lifeline.end()

    @asynccontextmanager
    async def _lent(self, until: float) -> AsyncGenerator[psycopg.AsyncConnection[Any]]:
        try:
            async with asyncio.timeout(self._wait_s):
                await self._places.acquire()
        except TimeoutError:
            raise _none_free(self._max_size, self._wait_s) from None
        try:
            kept = await self._taken(until)
            try:
                yield kept.connection
            finally:
                await self._given_back(kept)
        finally:
            self._places.release()

    async def _taken(self, until: float) -> _Kept[psycopg.AsyncConnection[Any]]:
        """A connection to the primary. Nothing has been sent on it, so any failure is repeated."""
        while True:
            if self._closed:
                raise Unavailable("this client was closed; nothing was sent")
            if self._free:
                kept = self._free.pop()
                # One that ended meanwhile takes nothing, so nothing is sent on it.
                if kept.epoch == self._course.epoch and not kept.ended:
                    return kept
                await self._discard(kept)
                continue
            try:
                return await self._opened()
            except psycopg.OperationalError as error:
                if _not_to_repeat(error) or monotonic() >= until:
                    raise
            await asyncio.sleep(AGAIN_S)

    async def _opened(self) -> _Kept[psycopg.AsyncConnection[Any]]:
        primary = await self._course.primary()
        login = self._login.to(primary)
        kept = _Kept(await psycopg.AsyncConnection[Any].connect(**login), primary.epoch)
        self._open[kept] = None
        if kept.epoch < self._course.epoch:
            await self._discard(kept)
            raise _replaced()
        return kept

    async def _given_back(self, kept: _Kept[psycopg.AsyncConnection[Any]]) -> None:
        if kept.rests and kept.epoch == self._course.epoch and not self._closed:
            self._free.append(kept)
        else:
            await self._discard(kept)

    async def _discard(self, kept: _Kept[psycopg.AsyncConnection[Any]]) -> None:
        self._open.pop(kept, None)
        kept.lifeline.close()
        await kept.connection.close()


@contextmanager
def follow_psycopg_sync(
    group: BlockingGroup,
    conninfo: str = "",
    *,
    max_size: int = MAX_SIZE,
    wait_s: float = WAIT_S,
    repeat_s: float = REPEAT_S,
    **options: Any,
) -> Generator[SyncFollowingPsycopg]:
    """Connections of psycopg 3 that are all to the group's present primary, for threads.

    `conninfo` and `options` are those of `psycopg.connect`, without a place. A change of primary
    ends all connections to the one before. A statement that certainly did not run is sent again to
    the next primary, for `repeat_s` seconds at most, if it was given to `execute`: one statement,
    refused with SQLSTATE 25006 or before it was sent. So a planned switchover fails no such write
    that ends in time. Another statement under way raises an error of psycopg's, and a commit under
    way may have happened. `connection` gives a connection to the present primary for a block; what
    runs on it is never repeated. At most `max_size` are open; a call waits for one `wait_s` at
    most, and then raises `Unavailable`. So it does without a primary, as `group.primary()`. The
    client of `group` must outlive this block.
    """
    course = SyncPrimaryCourse(group)
    made = SyncFollowingPsycopg(
        course, _Login(conninfo, options), max_size=max_size, wait_s=wait_s, repeat_s=repeat_s
    )
    with course.followed():
        try:
            yield made
        finally:
            made.close()


@asynccontextmanager
async def follow_psycopg(
    group: Group,
    conninfo: str = "",
    *,
    max_size: int = MAX_SIZE,
    wait_s: float = WAIT_S,
    repeat_s: float = REPEAT_S,
    **options: Any,
) -> AsyncGenerator[FollowingPsycopg]:
    """As `follow_psycopg_sync`, for the event loop: `psycopg.AsyncConnection`."""

    async def ended() -> None:
        await made.end_former()

    course = PrimaryCourse(group, ended)
    made = FollowingPsycopg(
        course, _Login(conninfo, options), max_size=max_size, wait_s=wait_s, repeat_s=repeat_s
    )
    async with course.followed():
        try:
            yield made
        finally:
            await made.close()
