"""Where counts and protocol events go: metrics in production, a judged history in the simulator.

The kinds of events and their fields are listed in `domicile.testing.history`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Meter(Protocol):
    """Takes counts and events. Must be cheap and must never raise.

    A meter with `takes_events = False` gets no events for messages. A meter with a method
    `took(type, handler, seconds)` gets the times of some handlers' runs.
    """

    def count(self, name: str, value: int = 1) -> None:
        """Add to a counter."""
        ...

    def event(self, kind: str, /, **fields: Any) -> None:
        """A protocol event, for histories."""
        ...


class NoMeter:
    """Drops everything."""

    takes_events = False

    def count(self, name: str, value: int = 1) -> None:
        """Do nothing."""

    def event(self, kind: str, /, **fields: Any) -> None:
        """Do nothing."""


def takes_events(meter: Meter) -> bool:
    """Whether a meter takes events. Callers that make one per message ask this first."""
    return bool(getattr(meter, "takes_events", True))


def sampler(meter: Meter) -> Callable[[str, str, float], None] | None:
    """The function that takes sampled times of handlers' runs, if a meter has one."""
    took: Callable[[str, str, float], None] | None = getattr(meter, "took", None)
    return took
