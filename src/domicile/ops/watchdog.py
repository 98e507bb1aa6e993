"""Ends a process that hangs past its lease (L4). Armed by `domicile run` only.

The timer is process-global and runs in a C thread, so it fires while the event loop is blocked and
while the GIL is held. It counts from the last acknowledged renewal and never needs the loop. If a
thread renews while the loop is blocked, that thread feeds it, until it stops (DX-10). It reads the
stacks of running threads, so it may end in a crash instead: the process ends either way. A process
that was stopped (SIGSTOP) past its hard deadline is ended as soon as it continues, unless its loop
is quicker and fences it. Both are safe: it owns nothing by then.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys

log = logging.getLogger("domicile")

STUCK_EXIT = 70
"""The exit code after handlers that ignored their cancellation; a blocked loop ends with 1."""

SHORTEST_S = 0.001
"""Seconds at least: the timer does not accept zero."""


class ProcessWatchdog:
    """Implements `domicile.ports.watchdog.Watchdog` for the whole process."""

    def __init__(self, stderr: int = 2) -> None:
        self._stderr = stderr

    def feed(self, seconds: float) -> None:
        """Wait so many seconds; then show the stacks of all threads and end the process."""
        faulthandler.dump_traceback_later(max(seconds, SHORTEST_S), exit=True, file=self._stderr)

    def rest(self) -> None:
        """No lease is held: disarm."""
        faulthandler.cancel_dump_traceback_later()

    def stuck(self, handlers: int) -> None:
        """End the process now: cancelled handlers still run past the hard deadline."""
        noun = "handler ignores its" if handlers == 1 else "handlers ignore their"
        log.critical(
            "%d %s cancellation past the hard deadline: this process ends (L4). Let handlers "
            "raise CancelledError again, and bound what they do in `finally`",
            handlers,
            noun,
        )
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            # A closed pipe must not keep the process alive.
            try:
                stream.flush()
            except (OSError, ValueError):
                continue
        os._exit(STUCK_EXIT)
