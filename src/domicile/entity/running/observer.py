"""Handlers' runs with an observer: within a span, and some of them timed.

A runtime has one `Observer`. The host of a shard counts down its runs and hands over the few that
are observed, so that all others cost one subtraction. It changes nothing of what a handler returns
or raises. It uses the process's own timer. A simulated process asks for no times, so that its runs
repeat exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from time import perf_counter
from typing import Any

from domicile.ports.trace import Tracer

SAMPLED = 61
"""One run in this many is timed. It is a prime, so that periodic load is not always sampled at the
same phase."""

Took = Callable[[str, str, float], None]
ObservedRun = Coroutine[Any, Any, Any]


class Observer:
    """Reports handlers' runs to a tracer (all), to a sampler (some), or to none.

    Before each run: `observer.left -= 1`, and if that is below zero, `work = look_at(work, …)`.
    """

    __slots__ = ("_every", "_looked", "_took", "left", "tracer")

    def __init__(self, tracer: Tracer | None = None, took: Took | None = None) -> None:
        self.tracer = tracer
        self._took = took
        self._every = SAMPLED if tracer is None else 1
        self._looked = 0
        self.left = self._every - 1
        """Runs until the next one that is observed."""

    @property
    def turns(self) -> int:
        """How many handlers have begun."""
        return self._looked + self._every - 1 - self.left

    def look_at(self, work: ObservedRun, type: str, handler: str, trace: str = "") -> ObservedRun:
        """The handler's run, wrapped in what observes it."""
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
