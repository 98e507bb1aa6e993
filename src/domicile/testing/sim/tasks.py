"""Tasks of a simulated world: numbered, watched, described and dropped.

Only `domicile.testing.sim.loop` calls this. Nothing here resumes a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from types import FrameType
from typing import Any, TypeVar, cast

from domicile.testing.sim.event_queue import Agenda, Handle

T = TypeVar("T")

# Pytest shows the lines of a test, not those that run it; `--full-trace` shows all.
__tracebackhide__ = True

_CLOSE_ATTEMPTS = 8


class SimTask(asyncio.Task[T]):
    """A task whose hash is its number in the world, so that sets of tasks iterate alike."""

    __slots__ = ("number",)

    def __init__(self, coro: Any, number: int, **kwargs: Any) -> None:
        self.number = number
        super().__init__(coro, **kwargs)

    def __hash__(self) -> int:
        return self.number


class Watched(Coroutine[Any, Any, T]):
    """The main coroutine, noting when it was last resumed."""

    def __init__(self, coro: Coroutine[Any, Any, T], agenda: Agenda) -> None:
        self.watched = coro
        self.agenda = agenda
        self.resumed_at = agenda.now

    def send(self, value: Any, /) -> Any:
        self.resumed_at = self.agenda.now
        return self.watched.send(value)

    def throw(self, *error: Any) -> Any:
        self.resumed_at = self.agenda.now
        return self.watched.throw(*error)

    def close(self) -> None:
        self.watched.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self.watched.__await__()


def tasks_of(loop: asyncio.AbstractEventLoop) -> list[SimTask[Any]]:
    """The unfinished tasks of a process, oldest first."""
    tasks = [task for task in asyncio.all_tasks(loop) if isinstance(task, SimTask)]
    return sorted(tasks, key=lambda task: task.number)


def stack_of(task: asyncio.Task[Any]) -> list[str]:
    """Where a suspended task is, outermost frame first."""
    coro: Any = task.get_coro()
    coro = getattr(coro, "watched", coro)
    found: list[str] = []
    while coro is not None:
        frame: FrameType | None = None
        for kind, inner in (("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")):
            if hasattr(coro, inner):
                frame, coro = getattr(coro, f"{kind}_frame"), getattr(coro, inner)
                break
        else:
            break
        if frame is not None:
            code = frame.f_code
            found.append(f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})")
    return found


def abandon(thing: object) -> None:
    """Drop what a dead process left, without a trace in logs or warnings."""
    if isinstance(thing, tuple):
        for part in cast("tuple[object, ...]", thing):
            abandon(part)
    elif isinstance(thing, Handle):
        args = thing.args
        thing.cancel()
        abandon(args)
    elif isinstance(thing, SimTask):
        abandon(cast("object", thing.get_coro()))
    elif isinstance(thing, Coroutine):
        # A coroutine that awaits in a finally block suspends again instead of closing.
        for _ in range(_CLOSE_ATTEMPTS):
            try:
                thing.close()
            except KeyboardInterrupt:
                raise
            except BaseException:
                continue
            return
