"""Threads for users' functions that block or hang: daemons, so that none keeps a process alive.

The object that calls such functions owns them. A function that never returns keeps its thread. So
the number of threads is limited, and the owner chooses what happens when all of them are busy. The
event loop must never wait for one of these threads to end.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

KEEP_S = 5.0
"""Seconds that a thread without work waits for more before it ends."""


class ThreadsBusy(Exception):
    """All threads are busy, perhaps with functions that never return."""


class DaemonThreads:
    """Implements `Threads`. While all threads are busy a function waits, or is refused if `waits`
    is False.

    A process that rejoins the cluster keeps the same object, so that functions that never return
    stay within the limit.
    """

    def __init__(self, most: int, name: str, *, waits: bool = True) -> None:
        self._most, self._name, self._waits = most, name, waits
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._free = 0
        """Threads without work, minus jobs that no thread has taken yet."""

    async def run(self, work: Callable[[], T]) -> T:
        """As `Threads.run`; `ThreadsBusy` if the function would wait and `waits` is False."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def report(set_outcome: Callable[[], None]) -> None:
            # The loop may be closed by now, or the future cancelled.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: None if done.done() else set_outcome())

        def job() -> None:
            try:
                result = work()
            except BaseException as error:
                failure = error
                report(lambda: done.set_exception(failure))
            else:
                report(lambda: done.set_result(result))

        with self._lock:
            more = self._free <= 0 and self._threads < self._most
            if self._free <= 0 and not more and not self._waits:
                raise ThreadsBusy("earlier functions have not come back; this one is not called")
            self._free -= 1
            if more:
                self._threads += 1
                self._free += 1
            self._jobs.put(job)
        if more:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return await done

    def rest(self) -> None:
        """End the threads that have no work. The next job starts a thread again."""
        with self._lock:
            for _ in range(self._free):
                self._jobs.put(None)
            self._threads -= max(0, self._free)
            self._free = min(0, self._free)

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=KEEP_S)
            except queue.Empty:
                with self._lock:
                    if self._free > 0:
                        self._free -= 1
                        self._threads -= 1
                        return
                continue
            if job is None:
                return
            job()
            with self._lock:
                self._free += 1
