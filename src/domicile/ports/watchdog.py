"""The last resort of L4: ends a process that cannot, or does not, stop by itself.

It affects the whole process, so it is armed only if the process is Domicile's own (`domicile run`).
"""

from __future__ import annotations

from typing import Protocol


class Watchdog(Protocol):
    """Ends this process unless `feed` is called in time, even while the event loop is blocked."""

    def feed(self, seconds: float) -> None:
        """The lease was renewed: do nothing for so many seconds."""
        ...

    def rest(self) -> None:
        """No lease is held: disarm."""
        ...

    def stuck(self, handlers: int) -> None:
        """Handlers ignore their cancellation past the hard deadline: end the process now."""
        ...
