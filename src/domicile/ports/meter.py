"""Where counts and protocol events go: metrics in production, a judged history in the simulator.

The kinds of events and their fields are listed in `domicile.testing.history`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Meter(Protocol):
    """Takes note. Must be cheap and must never raise.

    One with an attribute `takes_events = False` is spared the events that messages make; one with
    a method `took(type, handler, seconds)` is told how long some of the handlers' runs were.
    """

    def count(self, name: str, value: int = 1) -> None:
        """Add to a counter."""
        ...

    def event(self, kind: str, /, **fields: Any) -> None:
        """A protocol event, for histories."""
        ...


class NoMeter:
    """Forgets everything."""

    takes_events = False

    def count(self, name: str, value: int = 1) -> None:
        """Forget."""

    def event(self, kind: str, /, **fields: Any) -> None:
        """Forget."""


def takes_events(meter: Meter) -> bool:
    """Whether events are wanted at all; whoever makes one for each message asks first."""
    return bool(getattr(meter, "takes_events", True))


def sampler(meter: Meter) -> Callable[[str, str, float], None] | None:
    """Where the times of handlers' runs go that are sampled, if a meter wants them."""
    took: Callable[[str, str, float], None] | None = getattr(meter, "took", None)
    return took
