"""Time as leases need it: a clock that runs while the machine is suspended (A2).

Every part that waits or compares times takes a `Clock`; nothing else may read the time.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Protocol


class Timer(Protocol):
    """A callback that will be called unless cancelled."""

    def cancel(self) -> None:
        """Prevent the callback."""
        ...


class Clock(Protocol):
    """Elapsed time, wall time, and callbacks at an elapsed time."""

    def now(self) -> float:
        """Seconds since some fixed point, suspended time included. Never `loop.time()`."""
        ...

    def wall(self) -> datetime:
        """The time of day, in UTC, for people and for entities' `now()`."""
        ...

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call back on this process's event loop, once `now()` has reached `when`."""
        ...
