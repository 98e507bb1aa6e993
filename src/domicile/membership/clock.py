"""The machine's own clock, for leases: it also counts time while the machine is suspended (A2).

Nodes and clients outside the simulator use it. It must never be `loop.time()`: on Linux that clock
stops during suspension, and a stale owner would take its lease for valid.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

from domicile.ports.clock import Timer


def _elapsed() -> Callable[[], float]:
    if sys.platform == "linux":
        clock = time.CLOCK_BOOTTIME
    elif sys.platform == "win32":
        # Windows runs clients only; none of them is ever home to a shard.
        return time.monotonic
    else:
        # On macOS this clock counts sleep, unlike `time.monotonic`.
        clock = time.CLOCK_MONOTONIC
    return partial(time.clock_gettime, clock)


class SystemClock:
    """Implements `domicile.ports.clock.Clock` on the running event loop."""

    def __init__(self, elapsed: Callable[[], float] | None = None) -> None:
        # Called before every message, so it is the C function itself, without a wrapper.
        self.now = _elapsed() if elapsed is None else elapsed
        """Seconds since boot, suspended time included."""

    def wall(self) -> datetime:
        """The time of day in UTC."""
        return datetime.now(UTC)

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call back on the running loop once `now()` has reached `when`, never before."""
        return _Timer(self, when, callback)


class _Timer:
    """A loop timer that checks its own clock when it fires, and waits again if it is early."""

    __slots__ = ("_callback", "_clock", "_handle", "_loop", "_when")

    def __init__(self, clock: SystemClock, when: float, callback: Callable[[], None]) -> None:
        self._clock = clock
        self._when = when
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._handle = self._arm()

    def cancel(self) -> None:
        """Prevent the callback."""
        self._handle.cancel()

    def _arm(self) -> asyncio.TimerHandle:
        return self._loop.call_later(max(0.0, self._when - self._clock.now()), self._fire)

    def _fire(self) -> None:
        if self._clock.now() < self._when:
            self._handle = self._arm()
        else:
            self._callback()
