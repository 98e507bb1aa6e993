"""How a journal counts the days for which it keeps the keys of asks.

A key that is forgotten too early takes effect twice, so no clock that somebody may set decides it.
A journal has a count of its own, in seconds, and stores it beside its keys. A process adds the time
that it has seen pass between two of its looks, by a clock that nobody can set. Time that no process
saw is not counted: keys are then kept for longer.

Why no key goes before `PROMISED_DAYS` have passed: let V be the count as it would be if all
processes looked now. Each process starts from a count that was stored when it looked, and adds
what has passed since. So V never runs faster than time, whatever the order of the looks, and the
stored count is at most `STEP_S` behind it. A key gets the stored day of its commit. It goes when
the stored count is `KEPT_DAYS` whole days behind the end of that day. `KEPT_DAYS` has one day more
than is promised, and `STEP_S` is half a day. So a process that was stopped, suspended or idle, and
comes back with a late look, makes nobody forget a key.

The journals use this. It is pure: it reads no clock and no table. The time of day gives the first
day its number and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

DAY_S = 86_400

PROMISED_DAYS = 7
"""For how many days a key is known at least."""

KEPT_DAYS = PROMISED_DAYS + 1
"""For how many whole days of the count the keys of a day are kept after it."""

STEP_S = DAY_S / 2
"""The most seconds that one look adds to the count."""


class KeyDays(NamedTuple):
    """The count of a journal, as it is stored."""

    counted_s: float
    since: int
    """The day that the count began with: earlier days had their numbers from somewhere else."""

    @property
    def today(self) -> int:
        """The day that new keys get."""
        return int(self.counted_s // DAY_S)

    def keeps(self, day: int) -> bool:
        """Whether the keys of a day are still known."""
        return self.today - max(day, self.since) <= KEPT_DAYS


def first_days(wall_s: float, known: Iterable[int]) -> KeyDays:
    """The count of a journal that has none; `known` are days of keys that are there already."""
    today = max([int(wall_s // DAY_S), *(day + 1 for day in known)])
    return KeyDays(float(today * DAY_S), today)


class DayLooks:
    """The looks of one process at one journal, by a clock that nobody can set."""

    __slots__ = ("_at_s", "_counted_s")

    def __init__(self) -> None:
        self._at_s: float | None = None
        self._counted_s = 0.0

    def counted(self, stored_s: float, now_s: float) -> float:
        """The count now. `stored_s` was read, and locked, before the clock was."""
        if self._at_s is None:
            return stored_s
        passed_s = min(max(0.0, now_s - self._at_s), STEP_S)
        return max(stored_s, self._counted_s + passed_s)

    def stored(self, counted_s: float, now_s: float) -> None:
        """This look's count is stored: the next look goes on from it."""
        self._at_s, self._counted_s = now_s, counted_s
