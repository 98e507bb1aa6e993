"""Trace context that travels with messages: who started the work that a handler does.

The runtime calls a tracer only if the process was given one; `NoTracer` is for whoever wants an
object in any case. A tracer must be cheap and must never raise: no message fails for its sake.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Tracer(Protocol):
    """Writes down where a message comes from, and goes on from there at its home."""

    def inject(self) -> str:
        """The W3C `traceparent` of what runs now; empty if that is not traced.

        Called in the sender's own context, before the message waits for anything.
        """
        ...

    def span(self, trace: str, name: str) -> AbstractContextManager[object]:
        """Around one handler's run, in its worker: a child of `trace`, named `name`."""
        ...


class NoTracer:
    """Traces nothing."""

    def inject(self) -> str:
        """Nothing."""
        return ""

    def span(self, trace: str, name: str) -> AbstractContextManager[object]:
        """Nothing."""
        return nullcontext()
