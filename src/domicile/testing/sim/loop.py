"""Virtual time: many simulated processes in one real one, on one clock and one scheduler.

A `World` owns the clock, the seed and everything that is due. A `SimLoop` is the event loop of one
simulated process; asyncio's own tasks, futures, timeouts and task groups run on it. The harness
creates processes and freezes, thaws or kills them; the simulated network and servers use
`World.call_at` and `SimLoop.post`. Nothing here may read a real clock or do real I/O. The order of
callbacks must depend only on the order in which they were scheduled: the same seed runs alike on
every Python and under every hash seed.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import warnings
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextvars import Context, copy_context
from heapq import heappush
from math import inf
from random import Random
from typing import Any, NoReturn, TypeVar

from domicile.testing.sim.event_queue import Agenda, Entry, Handle
from domicile.testing.sim.sandbox import LOOP_REFUSALS, SimulationError, refusal, sandbox
from domicile.testing.sim.tasks import SimTask, Watched, abandon, stack_of, tasks_of

T = TypeVar("T")

# Pytest shows the lines of a test, not those that run it; `--full-trace` shows all.
__tracebackhide__ = True

_CHECK_ROUNDS = 100_000
_STANDSTILL_CHECKS = 50
_REPORTED_TASKS = 20


class Deadlock(SimulationError):
    """The main coroutine cannot, or does not, go on. The message shows which task waits where."""


class SimLoop(asyncio.AbstractEventLoop):
    """The event loop of one simulated process. Made by `World.process`, driven by `World.run`."""

    def __init__(self, agenda: Agenda, name: str) -> None:
        self.agenda = agenda
        self.name = name
        self.frozen = False
        self.dead = False
        self._ready = agenda.ready
        self._timers = agenda.timers
        self._next_sequence = agenda.next_sequence
        self.context = Context()
        self._enqueue: Callable[[Handle], object] = self._ready.append
        self._parked: deque[Handle] = deque()
        self.late: list[Entry] = []
        self.buried: list[object] = []
        self._exception_handler: Callable[[Any, dict[str, Any]], object] | None = None

    def __repr__(self) -> str:
        state = "dead" if self.dead else "frozen" if self.frozen else "live"
        return f"<SimLoop {self.name} {state}>"

    # Faults and I/O of the simulated process.

    def post(self, callback: Callable[[], object]) -> None:
        """An I/O event arrives: runs as soon as possible, in order; kept while frozen."""
        if not self.dead:
            self._enqueue(Handle(self, callback, (), self.context.copy()))

    def freeze(self) -> None:
        """Like SIGSTOP: nothing of this process runs; arriving I/O is kept."""
        if self.frozen or self.dead:
            return
        self.frozen = True
        self._parked.extend(self.agenda.take_ready(self))
        self._enqueue = self._parked.append

    def thaw(self) -> None:
        """Like SIGCONT: what was ready runs first, then the kept I/O, then due timers."""
        if not self.frozen or self.dead:
            return
        self.frozen = False
        self._enqueue = self._ready.append
        self._ready.extend(self._parked)
        self._parked.clear()
        # Timers follow at the start of the next round, behind all of the above, as in a selector
        # loop: a fence that relies on a timer alone is late (I1).
        for entry in self.late:
            if not entry[2].cancelled():
                entry[2].queued = True
                heappush(self._timers, entry)
        self.late.clear()

    def kill(self) -> None:
        """Like SIGKILL: nothing of this process ever runs again, `finally` blocks included."""
        if self.dead:
            return
        self.dead = True
        self.frozen = False
        # Kept until the world ends: collecting a suspended coroutine would run its finally blocks.
        self.buried += [
            *tasks_of(self),
            *self.agenda.take_ready(self),
            *self.agenda.take_timers(self),
            *self._parked,
            *self.late,
        ]
        self._parked.clear()
        self.late.clear()
        self._enqueue = self._bury

    def _bury(self, handle: Handle) -> None:
        if self.agenda.closed:
            abandon(handle)
        else:
            self.buried.append((handle.callback, handle.args))
            handle.cancel()

    # Scheduling.

    def time(self) -> float:
        """Virtual seconds, the same in every process."""
        return self.agenda.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        """Run a callback after everything that is ready now."""
        handle = Handle(self, callback, args, self._new_context() if context is None else context)
        self._enqueue(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Handle:
        """Run a callback after some virtual seconds."""
        return self.call_at(self.agenda.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Handle:
        """Run a callback at a virtual time; ties run in the order of these calls."""
        if when != when:
            raise ValueError("call_at() needs a time, not NaN")
        handle = Handle(self, callback, args, self._new_context() if context is None else context)
        handle.due_at = when
        if self.dead:
            self._bury(handle)
        else:
            handle.queued = True
            heappush(self._timers, (when, self._next_sequence(), handle))
        return handle

    def _new_context(self) -> Context:
        # Context variables must not leak from one simulated process into another.
        return copy_context() if self.agenda.current is self else self.context.copy()

    def create_future(self) -> asyncio.Future[Any]:
        """A future of this process."""
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: Context | None = None,
        **kwargs: Any,
    ) -> asyncio.Task[T]:
        """Run a coroutine in this process. Its default name is stable from run to run."""
        number = self.agenda.next_task()
        task: SimTask[T] = SimTask(
            coro,
            number,
            loop=self,
            name=f"{self.name}-{number}" if name is None else name,
            context=self._new_context() if context is None else context,
            **kwargs,
        )
        if self.dead:
            if self.agenda.closed:
                abandon(task)
            else:
                self.buried.append(task)
        return task

    # Errors.

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Report an error that no task awaits."""
        if self.dead:
            return
        if self._exception_handler is None:
            self.default_exception_handler(context)
        else:
            self._exception_handler(self, context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Note the error in `World.errors`, so that a harness can fail the test."""
        self.agenda.errors.append((self.name, context))

    def set_exception_handler(
        self, handler: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None
    ) -> None:
        """Replace the default handler."""
        self._exception_handler = handler

    def get_exception_handler(
        self,
    ) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None:
        """The handler set, if any."""
        return self._exception_handler

    # State, as asyncio asks for it.

    def get_debug(self) -> bool:
        """Never: asyncio's debug mode reads the real clock."""
        return False

    def set_debug(self, enabled: bool) -> None:
        """Ignored."""

    def is_running(self) -> bool:
        """Whether the world runs and this process is alive."""
        return self.agenda.running and not self.dead

    def is_closed(self) -> bool:
        """Whether this process is dead."""
        return self.dead

    def close(self) -> None:
        """The end of the process: the same as `kill`."""
        self.kill()

    def get_task_factory(self) -> None:
        """None: the world numbers its tasks itself."""
        return None

    async def shutdown_asyncgens(self) -> None:
        """Nothing to do."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Nothing to do: there is no executor."""

    def finalize(self, generator: AsyncGenerator[Any, Any]) -> None:
        """A generator of this process was dropped before its end."""
        if not self.dead:
            self.create_task(generator.aclose())


for _name, _why in LOOP_REFUSALS.items():
    setattr(SimLoop, _name, refusal(_name, _why))


class World:
    """One seeded simulation: the clock, the scheduler and the processes on it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(f"domicile {seed}")
        self.processes: list[SimLoop] = []
        self._agenda = agenda = Agenda()
        self.clock: Callable[[], float] = lambda: agenda.now
        """`now` as a function."""
        self._outside = SimLoop(self._agenda, "")  # type: ignore[abstract]

    @property
    def now(self) -> float:
        """Virtual seconds."""
        return self._agenda.now

    @property
    def errors(self) -> list[tuple[str, dict[str, Any]]]:
        """Errors that no task awaited: the process's name and asyncio's context."""
        return self._agenda.errors

    def stream(self, name: str) -> Random:
        """A random generator for one purpose: the same seed and name give the same numbers."""
        return Random(f"domicile {self.seed} {name}")

    def process(self, name: str) -> SimLoop:
        """A new simulated process. Names need not be unique: a restart is a new process."""
        loop = SimLoop(self._agenda, name)  # type: ignore[abstract]
        if self._agenda.closed:
            loop.kill()
        self.processes.append(loop)
        return loop

    def call_at(self, when: float, callback: Callable[[], object]) -> Handle:
        """Run a callback outside of all processes: no fault of a process stops it.

        At the same time it comes before what processes do, in the order of these calls.
        """
        # One context for all of them: they hold no variables and never run inside each other.
        return self._outside.call_at(when, callback, context=self._outside.context)

    def run(
        self, main: Coroutine[Any, Any, T], loop: SimLoop, *, stuck_after_s: float = 300.0
    ) -> T:
        """Run everything until `main`, a coroutine of `loop`, is done; returns its result.

        Raises `Deadlock` when nothing is left to happen, when `main` was not resumed for
        `stuck_after_s` (sleeping is fine), or when callbacks keep coming while time stands still.
        """
        if self._agenda.running or self._agenda.closed or asyncio._get_running_loop() is not None:
            main.close()
            state = "closed" if self._agenda.closed else "already running, or inside a running loop"
            raise SimulationError(f"World.run() on a world that is {state}; use a new World")
        watched = Watched(main, self._agenda)
        task = loop.create_task(watched, name="main", context=copy_context())
        hooks = sys.get_asyncgen_hooks()
        collecting = gc.isenabled()
        self._agenda.running = True
        generators = _Generators(self._agenda)
        # Finalizers must not run at moments that differ between versions of Python.
        gc.disable()
        try:
            with sandbox():
                sys.set_asyncgen_hooks(generators.begun, generators.dropped)
                self._drive(task, watched, stuck_after_s)
        finally:
            self._agenda.running = False
            self._agenda.current = None
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)
            if collecting:
                gc.enable()
        return task.result()

    def close(self) -> None:
        """End all processes. What is suspended is never resumed and nothing is reported."""
        if self._agenda.running:
            raise SimulationError("World.close() inside World.run(); close it after run() returns")
        if self._agenda.closed:
            return
        everyone = [self._outside, *self.processes]
        for loop in everyone:
            loop.kill()
        self._agenda.closed = True
        # A coroutine that awaits in a finally block raises when it is closed. That is ignored now.
        reported, sys.unraisablehook = sys.unraisablehook, _say_nothing
        log = logging.getLogger("domicile")
        muted, log.disabled = log.disabled, True
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                for loop in everyone:
                    _bury(loop)
                # If the garbage collector is disabled, everything from the run is in the youngest
                # generation.
                gc.collect(2 if gc.isenabled() else 0)
        finally:
            sys.unraisablehook, log.disabled = reported, muted

    def _drive(self, task: asyncio.Task[Any], watched: Watched[Any], stuck_after_s: float) -> None:
        agenda = self._agenda
        ready, timers = agenda.ready, agenda.timers
        take = ready.popleft
        set_running_loop = asyncio._set_running_loop
        outside = self._outside
        current: SimLoop | None = None
        finished: list[object] = []
        task.add_done_callback(finished.append)
        rounds = standing = 0
        checked_at = agenda.now
        while not finished:
            rounds += 1
            if rounds == _CHECK_ROUNDS:
                rounds = 0
                gc.collect(1)
                standing = standing + 1 if checked_at == agenda.now else 0
                checked_at = agenda.now
                if standing == _STANDSTILL_CHECKS:
                    self._deadlock("time stands still while callbacks keep coming", task)
            if not ready and not (timers and timers[0][0] <= agenda.now):
                self._advance(task, watched, stuck_after_s)
            if timers and timers[0][0] <= agenda.now:
                agenda.current = current = None
                set_running_loop(None)
                agenda.collect_due(outside)
            for _ in range(len(ready)):
                if not ready:  # a freeze or kill took the rest
                    break
                handle = take()
                callback = handle.callback
                if callback is None:
                    continue
                loop = handle.loop
                if loop is not current:
                    agenda.current = current = loop
                    set_running_loop(loop)
                try:
                    handle.context.run(callback, *handle.args)
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:
                    handle.failed(callback, error)
                if finished:
                    return

    def _advance(
        self, task: asyncio.Task[Any], watched: Watched[Any], stuck_after_s: float
    ) -> None:
        when = self._agenda.next_due()
        if when == inf:
            self._deadlock("nothing is scheduled any more", task)
        if when - watched.resumed_at > stuck_after_s:
            wakes_at = self._wakes_at(task)
            if wakes_at is None:
                self._deadlock(f"main was not resumed for {stuck_after_s:g} virtual seconds", task)
            watched.resumed_at = wakes_at
        self._agenda.now = when

    def _wakes_at(self, task: asyncio.Task[Any]) -> float | None:
        """When a timer resolves the very future that a task waits for, as in a sleep."""
        waiter = getattr(task, "_fut_waiter", None)
        for when, _, handle in self._agenda.timers:
            if waiter is not None and when < inf and any(arg is waiter for arg in handle.args):
                return when
        return None

    def _deadlock(self, why: str, task: asyncio.Task[Any]) -> NoReturn:
        lines = [f"deadlock at {self.now:.6f} (seed {self.seed}): {why}", "main waits in:"]
        lines += [f"  {where}" for where in stack_of(task)] or ["  (not started)"]
        for loop in self.processes:
            tasks = [pending for pending in tasks_of(loop) if pending is not task]
            state = "dead" if loop.dead else "frozen" if loop.frozen else "live"
            lines.append(f"process {loop.name} ({state}), {len(tasks)} tasks pending:")
            for pending in tasks[:_REPORTED_TASKS]:
                where = stack_of(pending)
                lines.append(f"  {pending.get_name()}: {where[-1] if where else '(not started)'}")
        raise Deadlock("\n".join(lines))


class _Generators:
    """Which process an asynchronous generator belongs to: where it was first iterated."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        # By id, because weak references are gone when the hook runs; a reused id is noted again.
        self._owners: dict[int, SimLoop | None] = {}

    def begun(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._owners[id(generator)] = self._agenda.current

    def dropped(self, generator: AsyncGenerator[Any, Any]) -> None:
        owner = self._owners.pop(id(generator), None)
        if owner is not None:
            owner.finalize(generator)


def _bury(loop: SimLoop) -> None:
    """Drop everything that a process left."""
    buried, loop.buried = loop.buried, []
    asyncio._set_running_loop(loop)
    try:
        for thing in buried:
            abandon(thing)
    finally:
        asyncio._set_running_loop(None)


def _say_nothing(_: object) -> None:
    """For `sys.unraisablehook` while a world ends."""
