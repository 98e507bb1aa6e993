"""Time as leases need it: a clock that runs while the machine is suspended (A2)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Protocol


class Timer(Protocol):
    """Something that will happen unless cancelled."""

    def cancel(self) -> None:
        """Make it not happen."""
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
        """Call back on this process's event loop once `now()` has reached `when`."""
        ...
