"""The last resort of L4: ending a process that no longer can, or does not, stop by itself.

Process-global by nature, so armed only where the process is Domicile's own (`domicile run`).
"""

from __future__ import annotations

from typing import Protocol


class Watchdog(Protocol):
    """Ends this process if nobody feeds it in time, even while the event loop is blocked."""

    def feed(self, seconds: float) -> None:
        """The lease was renewed: all is well for so long."""
        ...

    def rest(self) -> None:
        """No lease is held, so there is nothing to outlive."""
        ...

    def stuck(self, handlers: int) -> None:
        """Handlers ignore their cancellation past the hard deadline: end the process now."""
        ...
