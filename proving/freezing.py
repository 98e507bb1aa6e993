"""Processes that are stopped, and have stopped: on a busy machine SIGSTOP takes its time."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 60.0


def freeze(*pids: int) -> None:
    """SIGSTOP; returns once no thread of these processes runs any more.

    A stop begins when one thread takes the signal. Until then the others run on, and a server
    answers: for a second or more at a load of 30.
    """
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + PATIENCE_S
    while not all(map(_stands, pids)):
        assert time.monotonic() < until, f"of the processes {pids} one does not stop"
        time.sleep(0.001)


def _stands(pid: int) -> bool:
    """Whether every thread of a process is stopped, or has ended."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            text = stat.read_text(encoding="ascii", errors="replace")
            if text.rpartition(")")[2].split()[0] not in "TtZX":
                return False
    return True
