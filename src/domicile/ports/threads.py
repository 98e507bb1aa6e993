"""Where a user's blocking function runs, so that it blocks nothing else.

`entity.running.blocking` calls it. The function must not run on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Threads(Protocol):
    """Runs plain functions outside the event loop."""

    async def run(self, work: Callable[[], T]) -> T:
        """The function's result or error. Cancelling stops the wait, not the function."""
        ...
