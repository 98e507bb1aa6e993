"""A simulated process's clock: the world's virtual time, which never stops for one process.

Handed to whatever needs a `Clock` inside a simulation. Timers belong to the process, so they
are late after a freeze, as real ones are (L3).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from domicile.ports.clock import Timer
from domicile.testing.loop import SimLoop, World

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
"""The time of day at virtual second 0."""


class SimClock:
    """Implements `Clock` for one process of a world."""

    def __init__(self, world: World, loop: SimLoop) -> None:
        self._world = world
        self._loop = loop

    def now(self) -> float:
        """Virtual seconds."""
        return self._loop.agenda.now

    def wall(self) -> datetime:
        """The virtual time of day."""
        return EPOCH + timedelta(seconds=self._world.now)

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call back in this process; never while it is frozen, never once it is dead."""
        return self._loop.call_at(when, callback)


class ManualClock:
    """Implements `Clock` for tests without a world: time stands still until `advance`."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self._timers: list[_ManualTimer] = []

    def now(self) -> float:
        """Seconds, as advanced."""
        return self._now

    def wall(self) -> datetime:
        """The time of day, as advanced."""
        return EPOCH + timedelta(seconds=self._now)

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Call back from within the `advance` that reaches `when`."""
        timer = _ManualTimer(when, callback)
        self._timers.append(timer)
        return timer

    def advance(self, seconds: float, *, timers: bool = True) -> None:
        """Let time pass with what falls due; `timers=False` leaves timers late, as a freeze."""
        end = self._now + seconds
        while timers and (due := [timer for timer in self._timers if timer.when <= end]):
            timer = min(due, key=lambda timer: timer.when)
            self._timers.remove(timer)
            self._now = max(self._now, timer.when)
            if not timer.cancelled:
                timer.callback()
        self._now = end


class _ManualTimer:
    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback = callback
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
