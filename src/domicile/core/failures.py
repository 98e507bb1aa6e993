"""When whoever fails again and again gives up. Counts, and knows no clock.

Asked by `life.lives` after a life that ended by something nobody expected. Most such things pass,
so another life begins; what comes back at once, time after time, has to be seen by whoever runs
the process.
"""

from __future__ import annotations

MOST_FAILED = 3
STEADY_S = 60.0
"""Of lives that ended by something unexpected, so many may follow on each other, each after less
than this time; with one more it ends for good."""


class Failures:
    """Lives that ended unexpectedly, one right after the other."""

    __slots__ = ("_count",)

    def __init__(self) -> None:
        self._count = 0

    def again(self, lasted_s: float) -> bool:
        """One more, after so long; whether another life may begin."""
        self._count = self._count + 1 if lasted_s < STEADY_S else 1
        return self._count <= MOST_FAILED
