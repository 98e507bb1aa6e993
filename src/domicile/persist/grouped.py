"""Questions that are asked at the same time, as one call to the journal.

One thread hop or round trip serves a whole group: a node that takes over many shards claims them
and recovers many entities at once. `JournalWriter` uses it. It knows nothing about what is asked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from typing import Generic, TypeVar

from domicile.concurrency.task_set import TaskSet

Q = TypeVar("Q")
A = TypeVar("A")

GROUP = 256
"""Most questions in one call."""

CALLS = 2
"""Calls of one kind that may be under way: one is answered while the next is asked."""


class GroupedCalls(Generic[Q, A]):
    """Questions of one kind. `call` answers a group of them, in order."""

    def __init__(
        self,
        call: Callable[[Sequence[Q]], Awaitable[Sequence[A]]],
        tasks: TaskSet[None],
        *,
        group: int = GROUP,
        calls: int = CALLS,
    ) -> None:
        self._call, self._tasks = call, tasks
        self._group, self._most = group, calls
        self._waiting: deque[tuple[Q, asyncio.Future[A]]] = deque()
        self._calls = 0

    def begin(self, question: Q) -> asyncio.Future[A]:
        """Ask, and return where the answer comes. If its group's call fails, every caller gets that
        error."""
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer))
        if self._calls < self._most:
            self._calls += 1
            # Without the context of the caller that happened to be first.
            self._tasks.spawn(self._answer(), Context())
        return answer

    async def ask(self, question: Q) -> A:
        """The answer to a question."""
        return await self.begin(question)

    async def _answer(self) -> None:
        """Answer groups until none waits. What is asked in the same turn of the loop is in one."""
        group: list[tuple[Q, asyncio.Future[A]]] = []
        try:
            while self._waiting:
                group = [
                    self._waiting.popleft() for _ in range(min(self._group, len(self._waiting)))
                ]
                # A caller that was cancelled while it waited needs no answer.
                group = [one for one in group if not one[1].done()]
                if not group:
                    continue
                try:
                    answers = await self._call([question for question, _ in group])
                except Exception as error:
                    for _, answer in group:
                        if not answer.done():
                            answer.set_exception(error)
                else:
                    for (_, answer), found in zip(group, answers, strict=True):
                        if not answer.done():
                            answer.set_result(found)
        finally:
            self._calls -= 1
            for _, answer in group:
                answer.cancel()
