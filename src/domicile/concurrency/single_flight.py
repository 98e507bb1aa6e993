"""Work that is done once for all callers that need it at the same time.

The start of entities and the recovery of durable entities use it. It holds no outcome: each caller
checks the result of the work itself, and decides whether to try again. It must not call the work,
so that a handler's stack shows no frame of this module.
"""

from __future__ import annotations

import asyncio


class SingleFlight:
    """The first caller of `join` does the work and calls `land`; later callers wait for that."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] | None = None

    def join(self) -> asyncio.Future[None] | None:
        """What to await while another caller works. None: this caller works, and must `land`."""
        if self._waiters is None:
            self._waiters = []
            return None
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def land(self) -> None:
        """The work is done, failed or cancelled: wake the callers that wait."""
        waiters, self._waiters = self._waiters or [], None
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
