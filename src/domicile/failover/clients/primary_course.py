"""Which primary connections belong to: asked for each new one, and watched for all others.

A connection is made only to the primary that a read of the store has just confirmed. After news of
a later epoch nothing more is sent on connections of earlier ones. They end a moment later: what is
under way may still be refused, which says that it did not run. News can be late, so safety does not
stand on it: the guard of an old primary has ended its sessions, and refuses writes.

`PrimaryCourse` is for programs with an event loop, `SyncPrimaryCourse` for threads. A thread that
waits for an answer can't be cancelled, and a client library's connection belongs to one thread. So
news ends such a connection by its socket alone: its thread then finds that the connection is over.
"""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import (
    AbstractContextManager,
    aclosing,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from typing import Protocol

from domicile.errors import Unavailable
from domicile.failover.following import Group, Primary

REPEAT_S = 15.0
"""How long what did not run is repeated, unless a client is told."""

AGAIN_S = 0.02
"""How soon it is repeated."""

LATE_S = 0.5
"""How long the primary of before may still answer what was sent to it, once there is another."""

ALONE = re.compile(r"\s*(insert|update|delete|merge|select|with|values|table)\b[^;]*;?\s*", re.I)
"""One statement that is one transaction: refused, it did nothing in the database. `CALL` and `DO`
may commit. What a function did outside of the database before it was refused is done again."""


class PrimaryCourse:
    """The newest primary that this program has heard of."""

    def __init__(self, group: Group, ended: Callable[[], Awaitable[None]]) -> None:
        """`ended`: connections of earlier epochs must end."""
        self._group, self._ended = group, ended
        self._following: asyncio.Task[None] | None = None
        self.epoch = 0
        """Grows with each change of primary. A connection of an earlier one must not be used."""

    async def primary(self) -> Primary:
        """The primary, read from the store now; `Unavailable` if there is none in time."""
        if self._following is not None and self._following.done():
            if self._following.cancelled():
                # The block has ended. Its cancellation is not that of the caller's task.
                raise Unavailable("this client was closed; nothing was sent")
            self._following.result()
        found = await self._group.primary()
        self.epoch = max(self.epoch, found.epoch)
        return found

    async def follow(self) -> None:
        """Hear of each new primary until cancelled."""
        last = 0
        async with aclosing(self._group.primaries()) as primaries:
            async for found in primaries:
                self.epoch = max(self.epoch, found.epoch)
                if last < found.epoch:
                    if last:
                        await asyncio.sleep(LATE_S)
                    last = found.epoch
                    await self._ended()

    @asynccontextmanager
    async def followed(self) -> AsyncGenerator[None]:
        """Follow in a task of its own for as long as the block lasts."""
        self._following = asyncio.create_task(self.follow(), name="domicile-primary-course")
        try:
            yield
        finally:
            self._following.cancel()
            await asyncio.wait([self._following])
            if not self._following.cancelled():
                self._following.exception()  # each new connection has raised it


class BlockingGroup(Protocol):
    """A group whose calls block their thread: what `connect_sync(...).group(name)` gives."""

    def primary(self, *, wait_s: float | None = None) -> Primary:
        """As `Group.primary`."""
        ...

    def followed(
        self, told: Callable[[Primary], None]
    ) -> AbstractContextManager[Callable[[], None]]:
        """Each new primary is told, by another thread, for as long as the block lasts.

        It gives a function that raises why there is no more news, if there is none.
        """
        ...


class Lifeline:
    """A handle of its own on a connection's socket, by which any thread may end the connection.

    The connection's own number of the socket may be another file's by the time it is used here.
    """

    def __init__(self, number: int) -> None:
        # The family does not matter to what is done here.
        self._socket = socket.fromfd(number, socket.AF_INET, socket.SOCK_STREAM)
        # As that of the course.
        self._lock = threading.RLock()

    def end(self) -> None:
        """Nothing is sent or received any more. Who waits for an answer finds the end."""
        with self._lock, suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of it; the connection itself is not ended."""
        with self._lock:
            self._socket.close()


class SyncPrimaryCourse:
    """The newest primary that this program has heard of, for threads."""

    def __init__(self, group: BlockingGroup) -> None:
        self._group = group
        # The garbage collector closes a connection in any thread, also in one that holds this.
        self._lock = threading.RLock()
        self._open: dict[Lifeline, int] = {}
        self._late: threading.Timer | None = None
        self._check: Callable[[], None] = lambda: None
        self.epoch = 0
        """Grows with each change of primary. A connection of an earlier one must not be used."""

    def primary(self) -> Primary:
        """The primary, read from the store now; `Unavailable` if there is none in time."""
        self._check()
        found = self._group.primary()
        self._note(found)
        return found

    def opened(self, lifeline: Lifeline, epoch: int) -> None:
        """A connection to the primary of this epoch ends once there is a later one."""
        with self._lock:
            self._open[lifeline] = epoch
            if epoch < self.epoch:
                lifeline.end()

    def closed(self, lifeline: Lifeline) -> None:
        """That connection is over."""
        with self._lock:
            self._open.pop(lifeline, None)
        lifeline.close()

    def _note(self, found: Primary) -> None:
        with self._lock:
            if found.epoch <= self.epoch:
                return
            self.epoch = found.epoch
            if self._late is None and self._open:
                self._late = threading.Timer(LATE_S, self._end_old)
                self._late.daemon = True
                self._late.start()

    def _end_old(self) -> None:
        with self._lock:
            self._late = None
            for lifeline, epoch in list(self._open.items()):
                if epoch < self.epoch:
                    lifeline.end()

    @contextmanager
    def followed(self) -> Generator[None]:
        """Hear of each new primary for as long as the block lasts."""
        try:
            with self._group.followed(self._note) as self._check:
                yield
        finally:
            with self._lock:
                late, self._late = self._late, None
            if late is not None:
                late.cancel()
