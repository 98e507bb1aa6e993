"""Stopping many entities without holding up the event loop: so many per turn, shard after shard.

Used by the hosts of draining shards. In between the loop turns: what is released already is told to
the coordinator and gets its next home while the rest is still being stopped, and whoever asks other
shards of this node waits for a moment only. It counts and calls back; it stops nothing itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

STOPS_PER_TURN = 256
"""How many entities are stopped within one turn of the event loop: 2 ms, or less."""


class StopBudget:
    """How many more entities one node may stop in this turn of its event loop, and who waits."""

    __slots__ = ("_guard", "_left", "_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop, guard: Callable[[], bool]) -> None:
        self._loop, self._guard = loop, guard
        self._left = STOPS_PER_TURN
        self._waiting: deque[Callable[[], bool]] = deque()
        """One per draining shard at the most."""

    def take(self) -> bool:
        """Whether one more may be stopped in this turn; it counts."""
        if not self._left:
            return False
        if self._left == STOPS_PER_TURN:
            self._loop.call_soon(self._turned)
        self._left -= 1
        return True

    def later(self, go_on: Callable[[], bool]) -> None:
        """Call this once more may be stopped, behind the others, until it says that it is done."""
        self._waiting.append(go_on)

    def _turned(self) -> None:
        self._left = STOPS_PER_TURN
        # The first one is done before the next begins: its shard gets a home sooner.
        while self._waiting and self._left and self._guard():
            if self._waiting[0]():
                self._waiting.popleft()
