"""A thread with an event loop of its own, for work that must go on while the main loop is blocked.

Stores on servers renew leases there. The owner starts and stops it. Work that runs in it must not
touch anything of another loop; it is handed over as a function that makes a coroutine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """A daemon thread that runs coroutines. It starts with the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def submit(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run a coroutine; may be called from any thread and returns at once.

        `RuntimeError` after `close`. Cancelling the future cancels the coroutine.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the thread {self._name} has been closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._run, args=(self._loop,), name=self._name, daemon=True
                ).start()
            return asyncio.run_coroutine_threadsafe(work(), self._loop)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Run a last coroutine, cancel what still runs, end the thread. Returns at once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._loop is not None:
                ending = self._end(self._loop, last)
                asyncio.run_coroutine_threadsafe(ending, self._loop)

    async def _end(
        self, loop: asyncio.AbstractEventLoop, last: Callable[[], Coroutine[Any, Any, None]] | None
    ) -> None:
        try:
            if last is not None:
                await last()
        finally:
            loop.stop()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            with suppress(RuntimeError):
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.close()
