"""Trace context that travels with messages: which work caused the work of a handler.

The runtime calls a tracer only if the process was given one; `NoTracer` is for code that needs an
object in any case. A tracer must be cheap and must never raise: no message may fail because of it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Tracer(Protocol):
    """Records where a message comes from, and continues that trace at its home."""

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
        """Do nothing."""
        return ""

    def span(self, trace: str, name: str) -> AbstractContextManager[object]:
        """Do nothing."""
        return nullcontext()
