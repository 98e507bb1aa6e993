"""Users' blocking functions in a simulated process: virtual time has no threads.

The simulator gives it to every node. It must start no thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class InlineThreads:
    """Implements `Threads`: the function runs at once, while virtual time stands still."""

    async def run(self, work: Callable[[], T]) -> T:
        """As `Threads.run`."""
        await asyncio.sleep(0)
        return work()
