"""Notes that entities of a shard under suspicion start at this owner (DX-20).

Used by `entity.shard`. Only a death after such a note may count against a shard for the last time,
so the note is stored before the first entity starts (I3), once per epoch and shared by all that
wait for it. A shard that lost no owners needs none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class Marks:
    """The notes of one shard at one owner. `store` writes one; True once it is stored."""

    __slots__ = ("_enough", "_epoch", "_store", "_waiters")

    def __init__(self, poison_deaths: int, store: Callable[[int], Awaitable[bool]]) -> None:
        self._enough = poison_deaths - 1
        self._store = store
        self._epoch = 0
        self._waiters: list[asyncio.Future[None]] | None = None

    def due(self, strikes: int, epoch: int) -> bool:
        """Whether one more death would end it, and nothing is stored for this epoch yet."""
        return strikes >= self._enough and self._epoch != epoch

    async def make(self, epoch: int) -> bool:
        """Have it stored; False if that failed, also for all who wait for the same try."""
        if self._waiters is not None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
            return self._epoch == epoch
        self._waiters = []
        try:
            if await self._store(epoch):
                self._epoch = epoch
        finally:
            waiters, self._waiters = self._waiters, None
            for other in waiters:
                if not other.done():
                    other.set_result(None)
        return self._epoch == epoch
