"""Ticks of a PostgreSQL store while no coordinator ticks it (S4).

Before a coordinator is elected, and after one has died, its lease must be able to end: then every
client that sees store time stand still makes it advance. It stops as soon as somebody leads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

from domicile.concurrency.cadence import Cadence
from domicile.errors import DomicileError

TICK_S = 0.23
"""Seconds between two ticks: less than `MAX_TICK_S` so that store time keeps pace, and by as little
as a busy machine allows (I8)."""

STALE_S = 0.4
"""Seconds without a tick after which a client ticks too."""

LED_S = 1.0
"""A coordinator that has ticked within so many seconds ticks on."""

IDLE_S = 10.0
"""A client that nobody has used for so long ticks no more."""


class StoreAge(NamedTuple):
    """How long ago store time was advanced, and how long ago by a coordinator, in seconds."""

    stale_s: float
    led_s: float

    @property
    def led(self) -> bool:
        """Whether a coordinator ticks."""
        return 0 <= self.led_s < LED_S


class StandbyTicker:
    """Ticks while it is needed. `tick` advances store time unless somebody did just now."""

    def __init__(self, tick: Callable[[], Awaitable[StoreAge]]) -> None:
        self._tick = tick
        self._until = 0.0
        self._task: asyncio.Task[None] | None = None

    def saw(self, age: StoreAge) -> None:
        """A call of this client was answered; it found the store that old."""
        self._until = time.monotonic() + IDLE_S
        stands = not 0 <= age.stale_s <= STALE_S
        if stands and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run(), name="domicile-store-ticks")

    async def close(self) -> None:
        """Tick no more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        cadence = Cadence(TICK_S, time.monotonic())
        while time.monotonic() < self._until:
            # A store that does not answer, or went back, is noticed by those who need an answer.
            with suppress(DomicileError):
                if (await self._tick()).led:
                    return
            await asyncio.sleep(cadence.wait_s(time.monotonic()))
