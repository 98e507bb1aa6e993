"""Counters and sampled handler times of one process, in the form that scrapers read.

`Metrics` is a `Meter` for production: counting is an addition to a dict, and protocol events are
dropped. Everything else is computed on request (`incarnation.observation`). Labels are role, phase,
type and handler, whose values a program's own classes bound. Ids and nodes must never be labels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from domicile.observe.catalogue import COUNTERS
from domicile.observe.exposition import Histogram, MetricFamily, Sample, write

BOUNDS_S = (
    *(0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
"""Upper bounds of the buckets of handler times: a plain handler takes microseconds, a stuck one
ends at `handler_timeout_s`."""

MAX_HANDLERS = 1_000
"""I6: pairs of type and handler that get their own times."""

PREFIX = "domicile_"

OTHERS = ("(others)", "(others)")


class Metrics:
    """Implements `domicile.ports.meter.Meter`. May be called from several threads.

    Give one to `Node(meter=...)` or `connect(meter=...)` to read the counters yourself; a node
    that is given no meter makes its own.
    """

    takes_events = False
    """Events are for histories only; callers that make one per message need not make it."""

    def __init__(self) -> None:
        # They start from zero, so that a scraper sees the first failure as a rise.
        self._counts: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self._taken: dict[tuple[str, str], Histogram] = {}

    def count(self, name: str, value: int = 1) -> None:
        """Add to a counter."""
        # Between reading and writing no Python function is called, so threads that share the
        # interpreter's lock don't lose each other's additions; a lock would triple the cost.
        try:
            self._counts[name] += value
        except KeyError:
            self._counts.setdefault(name, 0)
            self._counts[name] += value

    def event(self, kind: str, /, **fields: Any) -> None:
        """Do nothing."""

    def took(self, type: str, handler: str, seconds: float) -> None:
        """One sampled run of a handler, from its start to its end. On the event loop only."""
        taken = self._taken.get((type, handler))
        if taken is None:
            key = (type, handler) if len(self._taken) < MAX_HANDLERS else OTHERS
            taken = self._taken.setdefault(key, Histogram(BOUNDS_S))
        taken.add(seconds)

    @property
    def counts(self) -> dict[str, int]:
        """All counters by name, as they are now."""
        return dict(self._counts)

    def text(self, gauges: Iterable[MetricFamily] = ()) -> str:
        """Everything in the text format, with `gauges` computed elsewhere."""
        return write([*self.families(), *gauges])

    def families(self) -> list[MetricFamily]:
        """Counters by name, then the times of handlers."""
        found = [_counter(name, value) for name, value in sorted(self.counts.items())]
        samples: list[Sample] = []
        for (type, handler), taken in sorted(self._taken.items()):
            samples += taken.samples((("type", type), ("handler", handler)))
        help = (
            "Time from a handler's start to its end, of one turn in 61; what suspends counts too."
        )
        return [*found, MetricFamily(f"{PREFIX}handler_seconds", "histogram", help, samples)]


def _counter(name: str, value: int) -> MetricFamily:
    bare = "".join(letter if letter.isalnum() else "_" for letter in name)
    help = COUNTERS.get(name, f"How often {name} was counted.")
    return MetricFamily(f"{PREFIX}{bare}_total", "counter", help, (Sample(value),))
