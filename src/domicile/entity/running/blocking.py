"""Where `@blocking` methods run: beside the event loop, in a bounded number of threads.

Made by the runtime, reached through an entity's context. A function that runs in a thread cannot be
cancelled, so whoever waits for it goes on waiting: its entity stays busy until the function is
over, whatever the caller was told meanwhile. Nothing here knows about shards or messages.
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
from domicile.errors import Overloaded
from domicile.ports.meter import Meter
from domicile.ports.threads import Threads
from domicile.settings import Settings

T = TypeVar("T")


def blocking_threads(settings: Settings) -> DaemonThreads:
    """The threads of a process's blocking methods: those that find none wait for one."""
    return DaemonThreads(settings.blocking_threads, "domicile-blocking")


class Waiter(Protocol):
    """A turn that waits for a function which cannot be interrupted."""

    threads: int
    """How many functions of it wait in threads for their end, or are about to."""
    thread: int | None
    """The thread that runs one of them, while one does."""


class Blocking:
    """One incarnation's blocking functions: so many run, so many wait, the rest is refused."""

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
        """Places of running functions, also those given to someone who has not resumed yet."""
        self._closed = False

    @property
    def running(self) -> int:
        """How many functions run now, those of which nobody waits any more included."""
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
        """`Overloaded` if a blocking method would be refused now: before it counts as started."""
        if self.full:
            self._meter.count("blocking.refused")
            raise Overloaded(
                f"{name} did not run: {len(self._tasks)} blocking methods run and "
                f"{len(self._waiting)} wait at this node; slow down, or raise blocking_threads"
            )

    async def run(self, name: str, work: Callable[[], T], waiter: Waiter | None = None) -> T:
        """The function's result or error, once it is over; a cancellation waits for that, too.

        Only before the function has a thread, and once all is closed, it ends at once.
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
        """L4: nobody waits for a function any more; those that wait for a thread get none."""
        self._closed = True
        for place in self._waiting:
            place.cancel()
        self._waiting.clear()

    async def close(self, limit_s: float) -> int:
        """It is over. How many functions still run after a while (L4)."""
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
                # It was called up and goes away: the next in line takes its place.
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
            # L3: it would begin past the deadline.
            raise asyncio.CancelledError("the node lost its lease")
        return await self._threads.run(work)


def _inside(work: Callable[[], T], waiter: Waiter | None) -> T:
    in_thread.set(True)
    if waiter is not None:
        waiter.thread = threading.get_ident()
    try:
        return work()
    except (StopIteration, GeneratorExit, SystemExit, asyncio.CancelledError) as error:
        # No future can hold them, or they would end more than this one call.
        kind = type(error).__name__
        raise RuntimeError(f"a blocking method raised {kind}: {error}") from error
    finally:
        if waiter is not None:
            waiter.thread = None
