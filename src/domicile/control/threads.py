"""Threads for users' functions that may hang: daemons, so that none can keep a process alive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

MOST = 4
"""I6: functions that may be stuck at once; one more is refused until one of them ends."""


class ThreadsBusy(Exception):
    """Too many earlier calls have not come back."""


class DaemonThreads:
    """Implements `Threads`: one thread per call, a few at most."""

    def __init__(self, most: int = MOST) -> None:
        self._free = threading.BoundedSemaphore(most)

    async def run(self, work: Callable[[], T]) -> T:
        """As `Threads.run`; raises `ThreadsBusy` if too many are stuck."""
        if not self._free.acquire(blocking=False):
            raise ThreadsBusy("earlier calls of this function have not come back; it is not called")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def report(set_outcome: Callable[[], None]) -> None:
            # The loop may be closed by now, and the future given up.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: None if done.done() else set_outcome())

        def body() -> None:
            try:
                result = work()
            except BaseException as error:
                failure = error
                report(lambda: done.set_exception(failure))
            else:
                report(lambda: done.set_result(result))
            finally:
                self._free.release()

        threading.Thread(target=body, name="domicile-strategy", daemon=True).start()
        return await done
