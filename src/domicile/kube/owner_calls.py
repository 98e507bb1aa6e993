"""Calls for what an object controls: the object is let go of when none of them is at work (K3, K7).

The sharder asks for an object of the ring, not for what that controls: this follows its owner. So
an instance that gives an owner up has to end its calls for what the owner controls, too, and begins
none while it does. `RingMember` has one of these for all its controllers. It must never know of
labels: whether the owner is the instance's own is asked elsewhere, after `begin`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class OwnerCalls:
    """How many calls are at work for each owner, by the owner's key."""

    def __init__(self) -> None:
        self._running: dict[str, int] = {}
        self._closed: dict[str, int] = {}
        self._ended: dict[str, asyncio.Event] = {}

    def begin(self, owner: str) -> bool:
        """Whether a call may begin; then `end` has to follow."""
        if owner in self._closed:
            return False
        self._running[owner] = self._running.get(owner, 0) + 1
        return True

    def end(self, owner: str) -> None:
        """A call has ended."""
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
            ended = self._ended.pop(owner, None)
            if ended is not None:
                ended.set()

    @asynccontextmanager
    async def stopped(self, owner: str) -> AsyncGenerator[None, None]:
        """No call is at work within; those that were have ended by themselves."""
        self._closed[owner] = self._closed.get(owner, 0) + 1
        try:
            if owner in self._running:
                await self._ended.setdefault(owner, asyncio.Event()).wait()
            yield
        finally:
            self._closed[owner] -= 1
            if not self._closed[owner]:
                del self._closed[owner]
