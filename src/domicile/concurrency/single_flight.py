"""Work that is done once for all who need it at the same time.

Used where entities start and where durable ones recover. It holds no outcome: what the work leaves
behind is for its users to look at, and so is whether to try again. It calls nothing, so that a
handler's stack shows no frame of it.
"""

from __future__ import annotations

import asyncio


class SingleFlight:
    """The first one who joins does the work and lands; those who join meanwhile wait for that."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] | None = None

    def join(self) -> asyncio.Future[None] | None:
        """What to await while another one is at work; None: the caller does it, and must `land`."""
        if self._waiters is None:
            self._waiters = []
            return None
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def land(self) -> None:
        """The work is over, done, failed or cancelled: those who wait look for themselves."""
        waiters, self._waiters = self._waiters or [], None
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
