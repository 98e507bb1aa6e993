"""Stopping many entities without blocking the event loop: a fixed number per turn, shard by shard.

Used by the hosts of draining shards. Between two turns the coordinator is told which shards are
released, and they get their next homes while others are still stopping. Callers of this node's
other shards wait only for a moment. This module counts and calls back; it stops nothing itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

STOPS_PER_TURN = 256
"""Entities that are stopped within one turn of the event loop: 2 ms, or less."""


class StopBudget:
    """How many more entities a node may stop in this turn of its event loop, and which shards
    wait."""

    __slots__ = ("_guard", "_left", "_loop", "_waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop, guard: Callable[[], bool]) -> None:
        self._loop, self._guard = loop, guard
        self._left = STOPS_PER_TURN
        self._waiting: deque[Callable[[], bool]] = deque()
        """At most one per draining shard."""

    def take(self) -> bool:
        """Count one stop; False if no more are allowed in this turn."""
        if not self._left:
            return False
        if self._left == STOPS_PER_TURN:
            self._loop.call_soon(self._turned)
        self._left -= 1
        return True

    def later(self, go_on: Callable[[], bool]) -> None:
        """Call `go_on` when stops are allowed again, after the others, until it returns True."""
        self._waiting.append(go_on)

    def _turned(self) -> None:
        self._left = STOPS_PER_TURN
        # The first one ends before the next begins: so its shard gets a home sooner.
        while self._waiting and self._left and self._guard():
            if self._waiting[0]():
                self._waiting.popleft()
