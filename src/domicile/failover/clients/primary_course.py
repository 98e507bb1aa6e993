"""Which primary connections belong to: asked for each new one, and watched for all others.

A connection is made only to the primary that a read of the store has just confirmed. News of a
later epoch ends all connections of earlier ones. News can be late, so safety does not stand on it:
the guard of an old primary has ended its sessions, and refuses writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from domicile.failover.following import Group, Primary


class PrimaryCourse:
    """The newest primary that this program has heard of."""

    def __init__(self, group: Group, ended: Callable[[], Awaitable[None]]) -> None:
        self._group, self._ended = group, ended
        self._following: asyncio.Task[None] | None = None
        self.epoch = 0
        """Grows with each change of primary. A connection of an earlier one must not be used."""

    async def primary(self) -> Primary:
        """The primary, read from the store now; `Unavailable` if there is none in time."""
        if self._following is not None and self._following.done():
            self._following.result()
        found = await self._group.primary()
        await self._note(found)
        return found

    async def _note(self, found: Primary) -> None:
        if found.epoch > self.epoch:
            self.epoch = found.epoch
            await self._ended()

    async def follow(self) -> None:
        """Hear of each new primary until cancelled."""
        async for found in self._group.primaries():
            await self._note(found)

    @asynccontextmanager
    async def followed(self) -> AsyncGenerator[None]:
        """Follow in a task of its own for as long as the block lasts."""
        self._following = asyncio.create_task(self.follow(), name="domicile-primary-course")
        try:
            yield
        finally:
            self._following.cancel()
            await asyncio.wait([self._following])
