"""Where counts and protocol events go: metrics in production, a judged history in the simulator.

The kinds of events and their fields are listed in `domicile.testing.history`.
"""

from __future__ import annotations

from typing import Any, Protocol


class Meter(Protocol):
    """Takes note. Must be cheap and must never raise."""

    def count(self, name: str, value: int = 1) -> None:
        """Add to a counter."""
        ...

    def event(self, kind: str, /, **fields: Any) -> None:
        """A protocol event, for histories."""
        ...


class NoMeter:
    """Forgets everything."""

    def count(self, name: str, value: int = 1) -> None:
        """Forget."""

    def event(self, kind: str, /, **fields: Any) -> None:
        """Forget."""
