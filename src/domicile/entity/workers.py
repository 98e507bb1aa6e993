"""Pooled tasks that run handlers, and the guard around each (L3, L4).

A handler that does not suspend runs to its end inside the worker that took it; only one that
awaits keeps that worker busy, and another worker goes on with what is ready. Nothing here knows
about shards: a job is a function that returns a coroutine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, Protocol

Job = Callable[[], Coroutine[Any, Any, None]]

QUANTUM = 128
"""Jobs run back to back before the event loop gets a turn."""

SPARE = 32
"""Idle workers that are kept."""


class Abandoned(BaseException):
    """The deadline passed by more than the stop budget: this coroutine is never resumed (L4)."""


class Watcher(Protocol):
    """Judges each step of a guarded coroutine."""

    def suspended(self) -> None:
        """It awaits something for the first time."""
        ...

    def may_resume(self) -> bool:
        """Before each resumption: the node's deadline has not passed."""
        ...

    def may_clean_up(self) -> bool:
        """Before an exception is thrown in: the hard deadline has not passed."""
        ...

    def abandon(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Keep it referenced: its `finally` blocks must not run either."""
        ...


class Guarded:
    """Awaits a coroutine, comparing the deadline before every resumption, not by a timer."""

    __slots__ = ("_coroutine", "_watcher")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], watcher: Watcher) -> None:
        self._coroutine = coroutine
        self._watcher = watcher

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine, watcher = self._coroutine, self._watcher
        try:
            waits_for = coroutine.send(None)
        except StopIteration as stop:
            return stop.value
        watcher.suspended()
        while True:
            thrown: BaseException | None = None
            value: Any = None
            try:
                value = yield waits_for
            except GeneratorExit:
                watcher.abandon(coroutine)
                raise
            except BaseException as error:
                thrown = error
            if thrown is None and not watcher.may_resume():
                thrown = asyncio.CancelledError("the node lost its lease")
            if thrown is not None and not watcher.may_clean_up():
                watcher.abandon(coroutine)
                raise Abandoned
            try:
                waits_for = coroutine.send(value) if thrown is None else coroutine.throw(thrown)
            except StopIteration as stop:
                return stop.value


class Workers:
    """Runs jobs in order of readiness. Owns its tasks; `close` ends them."""

    def __init__(self) -> None:
        self._ready: deque[Job] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._runner: asyncio.Task[None] | None = None
        self._waking = False
        self._closed = False

    def submit(self, job: Job) -> None:
        """Run a job as soon as a worker gets to it."""
        self._ready.append(job)
        self._wake()

    def left_running(self) -> None:
        """The current worker's job suspended: someone else goes on with what is ready."""
        if self._runner is asyncio.current_task():
            self._runner = None
            if self._ready:
                self._wake()

    async def close(self, limit_s: float) -> int:
        """End every worker; jobs not begun are dropped. How many did not end in time."""
        self._closed = True
        self._ready.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        try:
            async with asyncio.timeout(limit_s):
                for task in tasks:
                    try:
                        await asyncio.shield(task)
                    except asyncio.CancelledError:
                        if not task.cancelled():
                            raise
        except TimeoutError:
            pass
        return sum(not task.done() for task in tasks)

    def cancel_all(self) -> None:
        """Cancel what runs, without waiting (L4)."""
        self._closed = True
        self._ready.clear()
        for task in list(self._tasks):
            task.cancel()

    def _wake(self) -> None:
        if self._runner is not None or self._waking or self._closed:
            return
        self._waking = True
        while self._idle:
            parked = self._idle.pop()
            if not parked.done():
                parked.set_result(None)
                return
        # An empty context: handlers must not inherit the variables of whoever woke the pool.
        task = asyncio.get_running_loop().create_task(
            self._work(), name="domicile-worker", context=Context()
        )
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if self._runner is task:
            self._runner = None
        if self._ready:
            self._wake()
        if not task.cancelled() and task.exception() is not None:
            loop = task.get_loop()
            loop.call_exception_handler(
                {"message": "a worker failed", "exception": task.exception(), "task": task}
            )

    def _lead(self, worker: asyncio.Task[None]) -> None:
        """Become the one that goes on with what is ready, unless someone else is."""
        if self._runner is None:
            self._runner = worker

    async def _work(self) -> None:
        me = asyncio.current_task()
        assert me is not None
        done = 0
        while not self._closed:
            self._waking = False
            self._lead(me)
            while self._ready and self._runner is me:
                try:
                    await self._ready.popleft()()
                except Abandoned:
                    self._closed = True
                    return
                self._lead(me)
                done += 1
                if done % QUANTUM == 0:
                    await asyncio.sleep(0)
            if self._runner is me:
                self._runner = None
            if self._closed or len(self._idle) >= SPARE:
                return
            parked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(parked)
            await parked
