"""Tasks that one object owns: it begins them at any time and ends them together.

Any module above the core may use it. A set never swallows what a task raises: the event loop, or
the task group that the set was given, reports a task that fails outside `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class TaskSet(Generic[T]):
    """The running tasks of one owner, in the order in which they began. Ended tasks are removed.

    `name` is the name of all its tasks. Without a `group` they are tasks of the running loop.
    """

    __slots__ = ("_group", "_name", "_tasks")

    def __init__(self, name: str, group: asyncio.TaskGroup | None = None) -> None:
        self._name, self._group = name, group
        self._tasks: dict[asyncio.Task[T], None] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(
        self, work: Coroutine[Any, Any, T], context: Context | None = None
    ) -> asyncio.Task[T]:
        """Begin a task, in `context` or in a copy of the current context."""
        owner = asyncio.get_running_loop() if self._group is None else self._group
        task = owner.create_task(work, name=self._name, context=context)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Cancel all tasks, and wait for none."""
        for task in tuple(self._tasks):
            task.cancel()

    async def close(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        tasks = tuple(self._tasks)
        self.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._tasks.pop(task, None)
