"""Where `@blocking` methods run: outside the event loop, in a bounded number of threads.

Made by the runtime, reached through an entity's context. A function that runs in a thread cannot be
cancelled. So the handler that waits for it goes on waiting, and its entity stays busy until the
function ends, whatever the caller was told meanwhile. Nothing here knows about shards or messages.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from domicile.concurrency.daemon_threads import DaemonThreads
from domicile.entity.model.handlers import in_thread
from domicile.entity.running.exits import EXITS
from domicile.errors import Overloaded
from domicile.ports.meter import Meter
from domicile.ports.threads import Threads
from domicile.settings import Settings

T = TypeVar("T")


def blocking_threads(settings: Settings) -> DaemonThreads:
    """The threads of a process's blocking methods; a method that finds none free waits."""
    return DaemonThreads(settings.blocking_threads, "domicile-blocking")


class Waiter(Protocol):
    """A turn that waits for a function which cannot be interrupted."""

    threads: int
    """How many of its functions run in threads or are about to."""
    thread: int | None
    """The thread that runs one of them, while one does."""


class Blocking:
    """One incarnation's blocking functions: `most` run, `most_waiting` wait, the rest are
    refused."""

    def __init__(
        self,
        threads: Threads,
        meter: Meter,
        guard: Callable[[], bool],
        *,
        most: int,
        most_waiting: int,
    ) -> None:
        self._threads, self._meter, self._guard = threads, meter, guard
        self._most, self._most_waiting = most, most_waiting
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._places = 0
        """Places taken by running functions, and places given to a waiter that has not resumed
        yet."""
        self._closed = False

    @property
    def running(self) -> int:
        """How many functions run now, including those for which no handler waits any more."""
        return len(self._tasks)

    @property
    def waiting(self) -> int:
        """How many functions wait for a thread."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Whether another function would be refused (I6)."""
        return self._places >= self._most and len(self._waiting) >= self._most_waiting

    def check(self, name: str) -> None:
        """`Overloaded` if a blocking method would be refused now. Call it before the method
        starts."""
        if self.full:
            self._meter.count("blocking.refused")
            raise Overloaded(
                f"{name} did not run: {len(self._tasks)} blocking methods run and "
                f"{len(self._waiting)} wait at this node; slow down, or raise blocking_threads"
            )

    async def run(self, name: str, work: Callable[[], T], waiter: Waiter | None = None) -> T:
        """The function's result or error, once it has ended; a cancellation waits for that end,
        too.

        It takes effect at once only before the function has a thread, and after `shut`.
        """
        self.check(name)
        if self._places >= self._most:
            await self._line_up()
        else:
            self._places += 1
        context = contextvars.copy_context()
        call = self._call(lambda: context.run(_inside, work, waiter))
        task = asyncio.get_running_loop().create_task(call)
        self._tasks[task] = None
        task.add_done_callback(self._over)
        if waiter is not None:
            waiter.threads += 1
        cancelled: asyncio.CancelledError | None = None
        try:
            while not task.done():
                try:
                    await asyncio.wait((task,))
                except asyncio.CancelledError as error:
                    if self._closed:
                        raise
                    cancelled = error
        finally:
            if waiter is not None:
                waiter.threads -= 1
        if cancelled is not None:
            raise cancelled
        return task.result()

    def shut(self) -> None:
        """L4: handlers stop waiting for functions; functions that wait for a thread get none."""
        self._closed = True
        for place in self._waiting:
            place.cancel()
        self._waiting.clear()

    async def close(self, limit_s: float) -> int:
        """End, and wait for running functions. How many still run after `limit_s` (L4)."""
        self.shut()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=limit_s)
        if isinstance(self._threads, DaemonThreads):
            self._threads.rest()
        return len(self._tasks)

    async def _line_up(self) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place in self._waiting:
                self._waiting.remove(place)
            else:
                # It had got a place and gives it up: the next in line takes the place.
                self._call_up()
            raise

    def _call_up(self) -> None:
        """A place is free: the first in line gets it."""
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._places -= 1

    def _over(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        if not task.cancelled():
            task.exception()
        self._call_up()

    async def _call(self, work: Callable[[], T]) -> T:
        if not self._guard():
            # L3: the function would begin after the deadline.
            raise asyncio.CancelledError("the node lost its lease")
        return await self._threads.run(work)


def _inside(work: Callable[[], T], waiter: Waiter | None) -> T:
    in_thread.set(True)
    if waiter is not None:
        waiter.thread = threading.get_ident()
    try:
        return work()
    except (*EXITS, StopIteration, asyncio.CancelledError) as error:
        # A future cannot hold these errors, or they would end more than this one call.
        kind = type(error).__name__
        raise RuntimeError(f"a blocking method raised {kind}: {error}") from error
    finally:
        if waiter is not None:
            waiter.thread = None
