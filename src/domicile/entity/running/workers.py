"""Pooled tasks that run handlers, and the guard around each (L3, L4).

A handler begins in the callback that brought its message, in the name of a worker: it sees the
worker's task as the current one and runs in that worker's context. If it does not suspend, it ends
there, and the worker's task never runs. If it suspends, the worker's task continues it. Shard hosts
and the runtime use this. Nothing here knows about shards: work is a coroutine.
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
"""Seconds that jobs may run one after another before the event loop gets a turn."""

SPELL_S = 0.1
"""Seconds, at least, of a spell: a time during which a job was always ready."""

SPELLS = 3
"""An estimate is the shortest of so many spells in a row. One stall of the process, e.g. on a busy
machine, makes one spell long and says nothing about the jobs."""


class Fairness:
    """Measures one pool of workers, and says when the event loop must get a turn."""

    __slots__ = ("_began", "_jobs", "_now", "_since", "_spells", "_turns", "_until", "job_s")

    def __init__(self, now: Callable[[], float], turns: Callable[[], int]) -> None:
        self._now = now
        self._turns = turns
        """How many handlers have begun, including those that did not wait in line."""
        self._since = 0
        self._until = 0.0
        self._began = 0.0
        self._jobs = 0
        self._spells: deque[float] = deque(maxlen=SPELLS)
        """Seconds from one job to the next in each of the last spells."""
        self.job_s = 0.0
        """Recent seconds from one job to the next; 0 while jobs have not been ready for long
        enough."""

    def begin(self) -> None:
        """A series of jobs begins."""
        now = self._now()
        self._until = now + TURN_S
        if not self._began:
            self._began, self._since = now, self._turns()

    def ran(self) -> bool:
        """A job has run; returns whether there is time for another in this turn."""
        self._jobs += 1
        return self._now() < self._until

    def end(self, ready: bool) -> None:
        """The series ends for this turn; `ready` says whether jobs are left."""
        if not ready:
            # The next job does not wait for another one.
            self._began, self._jobs, self.job_s = 0.0, 0, 0.0
            self._spells.clear()
            return
        now = self._now()
        if now - self._began >= SPELL_S and self._jobs:
            turns = self._turns()
            self._spells.append((now - self._began) / max(self._jobs, turns - self._since))
            if len(self._spells) == SPELLS:
                self.job_s = min(self._spells)
            self._began, self._since, self._jobs = now, turns, 0


def timeless() -> float:
    """The clock of a pool without a time limit."""
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
"""Variables that may stay in a worker's context: each turn sets its own, or a module owns them."""


# Before 3.12 the public function is a Python one, which costs as much as the rest of `lend`.
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
        """The coroutine awaits something for the first time."""
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
        """Keep a reference to the coroutine: its `finally` blocks must not run either."""
        ...


class Guarded:
    """Awaits a coroutine, and checks the deadline before every resumption, without a timer.

    `waits_for` is what the coroutine already waits for, if it has begun elsewhere.
    """

    __slots__ = ("_begun", "_coroutine", "_waits_for", "_watcher", "closed")

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
        self.closed = False
        """Whether the coroutine that awaits this was closed. A handler may raise the same error."""

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
                self.closed = True
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
    """Work that has begun and is suspended, for the task that continues it."""

    __slots__ = ("_waits_for", "_work", "thrown")

    def __init__(self, work: Coroutine[Any, Any, Any], waits_for: Any) -> None:
        self._work = work
        self._waits_for = waits_for
        self.thrown: BaseException | None = None
        """A cancellation that came before a task continued it."""

    def __await__(self) -> Generator[Any, Any, Any]:
        work, waits_for, thrown = self._work, self._waits_for, self.thrown
        if getattr(waits_for, "_asyncio_future_blocking", None) is False:
            waits_for._asyncio_future_blocking = True
        if thrown is not None and asyncio.isfuture(waits_for) and waits_for.cancel():
            # As a task does it: what the work waits for is cancelled, and that comes back as the
            # outcome.
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
    """A task of the pool with its own context; parked while it has nothing to continue."""

    __slots__ = ("context", "job", "known", "loop", "parked", "task")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        # Empty: handlers must not inherit the variables of the code that woke the pool.
        self.context = Context()
        self.known = 0
        """How many variables of its context were found harmless."""
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
        """The work that this worker's task has to continue, if any."""
        job, self.job = self.job, None
        return job

    def start(self, work: Work) -> None:
        """While lent: run work until it first suspends; then this worker is occupied."""
        try:
            waits_for = work.send(None)
        except StopIteration:
            return
        if getattr(waits_for, "_asyncio_future_blocking", None):
            # This mark says that a task is about to wait. Until one does, others may await the
            # future, too.
            waits_for._asyncio_future_blocking = False
        self.job = Handed(work, waits_for)


class Workers:
    """Lends workers to work that begins now, and runs submitted jobs in order. `close` ends its
    tasks."""

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
        """How many jobs are ready, and the seconds from one to the next: 0 while that is not
        known."""
        return len(self._ready), self._pace.job_s

    def submit(self, job: WorkerJob) -> None:
        """Run a job in a turn of the event loop soon."""
        self._ready.append(job)
        if not self._called and not self._closed:
            self._called = True
            asyncio.get_running_loop().call_soon(self._run_ready)

    def lend(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in the name of a spare worker. The function may `start` work until one
        suspends."""
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
                    # Also workers that take over from one that was cancelled before it first ran.
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
        """Continue the work that began in this worker's name, one after the other."""
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
            # The task was cancelled before it first ran: the cancellation is meant for the work.
            job.thrown = asyncio.CancelledError()
            self._hire().job = job
        if not task.cancelled() and task.exception() is not None:
            self._report(task, task.exception())

    def _report(self, task: asyncio.Task[None], error: BaseException | None) -> None:
        task.get_loop().call_exception_handler(
            {"message": "a worker failed", "exception": error, "task": task}
        )
