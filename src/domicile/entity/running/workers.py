"""Pooled tasks that run handlers, and the guard around each (L3, L4).

A handler begins in the very callback that brought its message, on loan from a worker: it sees that
worker's task as the current one and runs in that worker's context. One that does not suspend ends
there, and its worker was never resumed; one that awaits is handed to the worker's task, which goes
on with it. Nothing here knows about shards: work is a coroutine.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio import _enter_task, _leave_task  # pyright: ignore[reportPrivateUsage]
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, Protocol, TypeVar

TURN_S = 0.02
"""Once jobs have run back to back for this long, the event loop gets a turn."""

SPELL_S = 0.1
"""An estimate rests on at least so long a time in which somebody was ready all along."""


class Fairness:
    """The pace of one pool of workers."""

    __slots__ = ("_began", "_jobs", "_now", "_since", "_turns", "_until", "job_s")

    def __init__(self, now: Callable[[], float], turns: Callable[[], int]) -> None:
        self._now = now
        self._turns = turns
        """How many handlers have begun, also those that nobody had to wait for."""
        self._since = 0
        self._until = 0.0
        self._began = 0.0
        self._jobs = 0
        self.job_s = 0.0
        """From one job to the next, as of late; 0 while nobody has been ready for long enough."""

    def begin(self) -> None:
        """Jobs run from here on."""
        now = self._now()
        self._until = now + TURN_S
        if not self._began:
            self._began, self._since = now, self._turns()

    def ran(self) -> bool:
        """One has run; whether there is time for another in this turn."""
        self._jobs += 1
        return self._now() < self._until

    def end(self, ready: bool) -> None:
        """No more run in this turn, though some may be ready."""
        if not ready:
            # Whoever comes next waits for nobody.
            self._began, self._jobs, self.job_s = 0.0, 0, 0.0
            return
        now = self._now()
        if now - self._began >= SPELL_S and self._jobs:
            turns = self._turns()
            lately_s = (now - self._began) / max(self._jobs, turns - self._since)
            self.job_s = (self.job_s + lately_s) / 2 if self.job_s else lately_s
            self._began, self._since, self._jobs = now, turns, 0


def timeless() -> float:
    """The clock of a pool that nobody hurries."""
    return 0.0


T = TypeVar("T")

Work = Coroutine[Any, Any, None]
WorkerJob = Callable[["Worker"], None]
"""Begins work in the name of the worker it is given."""

QUANTUM = 128
"""Jobs run back to back before the event loop gets a turn."""

SPARE = 32
"""Idle workers that are kept."""

_HARMLESS = ("domicile_turn", "decimal_context")
"""Variables that stay in a worker's context: each turn sets its own, or they are a module's."""


# Before 3.12 the public function is a Python one, which costs as much as the rest of a loan.
_current_task: Callable[[asyncio.AbstractEventLoop], asyncio.Task[Any] | None]
if sys.version_info < (3, 12):
    _current_task = vars(asyncio.tasks)["_current_tasks"].get
else:
    _current_task = asyncio.current_task


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

    def rests(self) -> None:
        """After each resumption: it has ended, or awaits something again."""
        ...

    def abandon(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Keep it referenced: its `finally` blocks must not run either."""
        ...


class Guarded:
    """Awaits a coroutine, comparing the deadline before every resumption, not by a timer.

    `waits_for` is what it already waits for, if somebody else has begun it.
    """

    __slots__ = ("_begun", "_coroutine", "_waits_for", "_watcher")

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Any],
        watcher: Watcher,
        *,
        begun: bool = False,
        waits_for: Any = None,
    ) -> None:
        self._coroutine = coroutine
        self._watcher = watcher
        self._begun = begun
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine, watcher, waits_for = self._coroutine, self._watcher, self._waits_for
        if not self._begun:
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
            finally:
                watcher.rests()


class Handed:
    """Work that has begun and waits for something, for whoever goes on with it."""

    __slots__ = ("_waits_for", "_work", "thrown")

    def __init__(self, work: Coroutine[Any, Any, Any], waits_for: Any) -> None:
        self._work = work
        self._waits_for = waits_for
        self.thrown: BaseException | None = None
        """A cancellation that came before anyone went on with it."""

    def __await__(self) -> Generator[Any, Any, Any]:
        work, waits_for, thrown = self._work, self._waits_for, self.thrown
        if getattr(waits_for, "_asyncio_future_blocking", None) is False:
            waits_for._asyncio_future_blocking = True
        if thrown is not None and asyncio.isfuture(waits_for) and waits_for.cancel():
            # As a task does: what it waits for is cancelled, and that comes back as its outcome.
            thrown = None
        while True:
            value: Any = None
            if thrown is None:
                try:
                    value = yield waits_for
                except GeneratorExit:
                    work.close()
                    raise
                except BaseException as error:
                    thrown = error
            try:
                waits_for = work.send(value) if thrown is None else work.throw(thrown)
            except StopIteration as stop:
                return stop.value
            thrown = None


class Worker:
    """A task of the pool with its own context; parked while it has nothing to go on with."""

    __slots__ = ("context", "job", "known", "loop", "parked", "task")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        # Empty: handlers must not inherit the variables of whoever woke the pool.
        self.context = Context()
        self.known = 0
        """How many variables of its context are nobody's secret."""
        self.job: Handed | None = None
        self.parked: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None]

    def clean(self) -> bool:
        """Whether no handler left variables in its context that the next one would see."""
        if len(self.context) > self.known:
            if any(variable.name not in _HARMLESS for variable in self.context):
                return False
            self.known = len(self.context)
        return True

    def take(self) -> Handed | None:
        """What this worker's task has to go on with."""
        job, self.job = self.job, None
        return job

    def start(self, work: Work) -> None:
        """While on loan: run work until it first suspends; then this worker is taken."""
        try:
            waits_for = work.send(None)
        except StopIteration:
            return
        if getattr(waits_for, "_asyncio_future_blocking", None):
            # The mark of one who is about to wait; until that is so, others may await it, too.
            waits_for._asyncio_future_blocking = False
        self.job = Handed(work, waits_for)


class Workers:
    """Lends workers to what begins now, and runs jobs in order. `close` ends its tasks."""

    def __init__(self, now: Callable[[], float] = timeless, turns: Callable[[], int] = int) -> None:
        self._ready: deque[WorkerJob] = deque()
        self._pace = Fairness(now, turns)
        self._spare: list[Worker] = []
        self._all: dict[asyncio.Task[None], Worker] = {}
        self._called = False
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether nothing may begin here any more."""
        return self._closed

    @property
    def line(self) -> tuple[int, float]:
        """How many jobs are ready, and the time from one to the next: 0 as long as nobody knows."""
        return len(self._ready), self._pace.job_s

    def submit(self, job: WorkerJob) -> None:
        """Run a job in a turn of the event loop soon."""
        self._ready.append(job)
        if not self._called and not self._closed:
            self._called = True
            asyncio.get_running_loop().call_soon(self._run_ready)

    def lend(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in the name of a spare worker. It may `start` work until one suspends."""
        worker = self._spare.pop() if self._spare else self._hire()
        loop, task = worker.loop, worker.task
        caller = _current_task(loop)
        if caller is not None:
            _leave_task(loop, caller)
        _enter_task(loop, task)
        try:
            return worker.context.run(function, worker, *args)
        finally:
            _leave_task(loop, task)
            if caller is not None:
                _enter_task(loop, caller)
            if worker.job is not None:
                if worker.parked is not None and not worker.parked.done():
                    worker.parked.set_result(None)
            elif not (task.cancelling() or self._closed):
                if len(worker.context) <= worker.known or worker.clean():
                    self._spare.append(worker)
                else:
                    task.cancel()

    async def close(self, limit_s: float) -> int:
        """End every worker; jobs not begun are dropped. How many did not end in time."""
        self.cancel_all()
        try:
            async with asyncio.timeout(limit_s):
                while self._all:
                    # Also those that take over from one that was cancelled before it first ran.
                    await asyncio.wait(tuple(self._all))
                    await asyncio.sleep(0)
        except TimeoutError:
            pass
        return len(self._all)

    def cancel_all(self) -> None:
        """Cancel what runs, without waiting (L4)."""
        self._closed = True
        self._ready.clear()
        self._spare.clear()
        for task in list(self._all):
            task.cancel()

    def _run_ready(self) -> None:
        self._called = False
        left = QUANTUM
        self._pace.begin()
        while self._ready and left and not self._closed:
            left = self.lend(self._run_some, left)
        self._pace.end(bool(self._ready))
        if self._ready and not self._called and not self._closed:
            self._called = True
            asyncio.get_running_loop().call_soon(self._run_ready)

    def _run_some(self, worker: Worker, left: int) -> int:
        """Begin jobs until one suspends; how many more may begin in this turn."""
        while self._ready and left and not self._closed and worker.job is None and worker.clean():
            left -= 1
            try:
                self._ready.popleft()(worker)
            except Exception as error:
                self._report(worker.task, error)
            if not self._pace.ran():
                return 0
        return left

    def _hire(self) -> Worker:
        loop = asyncio.get_running_loop()
        worker = Worker(loop)
        worker.task = loop.create_task(
            self._work(worker), name="domicile-worker", context=worker.context
        )
        self._all[worker.task] = worker
        worker.task.add_done_callback(self._ended)
        return worker

    async def _work(self, worker: Worker) -> None:
        """Go on with what was begun in this worker's name, one after the other."""
        while True:
            job = worker.take()
            if job is None:
                worker.parked = asyncio.get_running_loop().create_future()
                try:
                    await worker.parked
                    job = worker.take()
                except asyncio.CancelledError as error:
                    job = worker.take()
                    if job is None:
                        raise
                    job.thrown = error
            if job is not None:
                try:
                    await job
                except Abandoned:
                    self._closed = True
                    return
                except Exception as error:
                    self._report(worker.task, error)
            if self._closed or len(self._spare) >= SPARE or worker.task.cancelling():
                return
            if not worker.clean():
                return
            worker.parked = None
            self._spare.append(worker)

    def _ended(self, task: asyncio.Task[None]) -> None:
        worker = self._all.pop(task)
        if worker in self._spare:
            self._spare.remove(worker)
        job = worker.take()
        if job is not None:
            # It was cancelled before it ran for the first time: the cancellation is the work's.
            job.thrown = asyncio.CancelledError()
            self._hire().job = job
        if not task.cancelled() and task.exception() is not None:
            self._report(task, task.exception())

    def _report(self, task: asyncio.Task[None], error: BaseException | None) -> None:
        task.get_loop().call_exception_handler(
            {"message": "a worker failed", "exception": error, "task": task}
        )
