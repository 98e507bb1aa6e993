"""Handlers' runs with someone looking on: within a span, and timed now and then.

A runtime has one `Observer`; the host of a shard counts its runs down and hands over the few that
are looked at, so that all others pay one subtraction. It changes nothing of what a handler returns
or raises, and uses the process's own timer: in a simulated process nobody wants times, so that its
runs repeat exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from time import perf_counter
from typing import Any

from domicile.ports.trace import Tracer

SAMPLED = 61
"""One run in so many is timed: a prime, so that load with a rhythm of its own is not always met at
the same beat."""

Took = Callable[[str, str, float], None]
ObservedRun = Coroutine[Any, Any, Any]


class Observer:
    """Whoever wants to know of handlers' runs: a tracer of all, a sampler of some, or nobody.

    Before each run: `observer.left -= 1`, and if that is below zero, `work = look_at(work, …)`.
    """

    __slots__ = ("_every", "_looked", "_took", "left", "tracer")

    def __init__(self, tracer: Tracer | None = None, took: Took | None = None) -> None:
        self.tracer = tracer
        self._took = took
        self._every = SAMPLED if tracer is None else 1
        self._looked = 0
        self.left = self._every - 1
        """Runs until the next one that is looked at."""

    @property
    def turns(self) -> int:
        """How many handlers have begun."""
        return self._looked + self._every - 1 - self.left

    def look_at(self, work: ObservedRun, type: str, handler: str, trace: str = "") -> ObservedRun:
        """A handler's run with what there is to see of it."""
        self._looked += self._every
        self.left = self._every - 1
        took = None if self._looked % SAMPLED else self._took
        if took is None and self.tracer is None:
            return work
        return _observed(work, type, handler, trace, self.tracer, took)


async def _observed(
    work: ObservedRun, type: str, handler: str, trace: str, tracer: Tracer | None, took: Took | None
) -> object:
    within = nullcontext() if tracer is None else tracer.span(trace, f"{type}.{handler}")
    began = perf_counter()
    try:
        with within:
            return await work
    finally:
        if took is not None:
            took(type, handler, perf_counter() - began)
