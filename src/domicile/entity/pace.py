"""How fast what is ready gets its turns: when the event loop may turn, and how long a line takes.

Used by `workers` alone. It compares times and counts; it starts and stops nothing.
"""

from __future__ import annotations

from collections.abc import Callable

TURN_S = 0.02
"""Once jobs have run back to back for this long, the event loop gets a turn."""

SPELL_S = 0.1
"""An estimate rests on at least so long a time in which somebody was ready all along."""


class Pace:
    """The pace of one pool of workers."""

    __slots__ = ("_began", "_jobs", "_now", "_since", "_turns", "_until", "job_s")

    def __init__(self, now: Callable[[], float], turns: Callable[[], int]) -> None:
        self._now = now
        self._turns = turns
        """How many handlers have begun, also those that nobody had to wait for."""
        self._since = 0
        self._until = 0.0
        self._began = 0.0
        self._jobs = 0
        self.job_s = 0.0
        """From one job to the next, as of late; 0 while nobody has been ready for long enough."""

    def begin(self) -> None:
        """Jobs run from here on."""
        now = self._now()
        self._until = now + TURN_S
        if not self._began:
            self._began, self._since = now, self._turns()

    def ran(self) -> bool:
        """One has run; whether there is time for another in this turn."""
        self._jobs += 1
        return self._now() < self._until

    def end(self, ready: bool) -> None:
        """No more run in this turn, though some may be ready."""
        if not ready:
            # Whoever comes next waits for nobody.
            self._began, self._jobs, self.job_s = 0.0, 0, 0.0
            return
        now = self._now()
        if now - self._began >= SPELL_S and self._jobs:
            turns = self._turns()
            lately_s = (now - self._began) / max(self._jobs, turns - self._since)
            self.job_s = (self.job_s + lately_s) / 2 if self.job_s else lately_s
            self._began, self._since, self._jobs = now, turns, 0


def timeless() -> float:
    """The clock of a pool that nobody hurries."""
    return 0.0
