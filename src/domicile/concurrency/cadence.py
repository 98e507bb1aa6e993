"""Calls that come at equal intervals, however long each of them takes.

A loop that sleeps the whole interval after each call is late by the duration of the calls, more so
on a busy machine. A clock's time is an argument, so this decides without waiting.
"""

from __future__ import annotations


class Cadence:
    """When the next of many calls is due."""

    def __init__(self, interval_s: float, now: float) -> None:
        self._interval_s = interval_s
        self._due = now

    def wait_s(self, now: float) -> float:
        """Seconds until the next call. One that is late begins at once, and none is caught up."""
        self._due = max(self._due + self._interval_s, now)
        return self._due - now
