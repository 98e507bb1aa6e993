"""When this process must advance store time (S4).

Store time advances with every write, by one tick at most, so it needs about four writes a second.
The processes of a store share that work without talking to each other: each answer of the store
says how long ago the last advance was. A process that finds store time stale begins to tick. It
stops when it sees that others do it, too.
"""

from __future__ import annotations

from random import Random

TICK_S = 0.23
"""Seconds between two ticks: less than `MAX_TICK_S` so that store time does not run slow, and by as
little as a busy machine allows (I8)."""

STALE_S = 0.33
"""Seconds since the last advance from which nobody seems to tick."""

SHARED = 3
"""Ticks in a row that came soon after another process's: then one of the two may stop."""


class TickPace:
    """Whether to tick, decided from the age of the last advance that each answer reports."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._shared = 0
        self.ticks = False
        """Whether this process must tick now."""

    def saw(self, age_s: float) -> None:
        """An answer: store time had last advanced that many seconds before."""
        if age_s > STALE_S:
            self.ticks, self._shared = True, 0

    def ticked(self, age_s: float) -> None:
        """A tick of this process, and how old the last advance was."""
        self._shared = self._shared + 1 if age_s < TICK_S * 0.6 else 0
        # By chance: two processes that tick in turns must not stop both.
        if self._shared >= SHARED and self._random.random() < 0.5:
            self.ticks, self._shared = False, 0

    def wait_s(self) -> float:
        """Seconds until the next tick, partly by chance: processes should not tick at once."""
        return TICK_S * self._random.uniform(0.85, 1.0)
