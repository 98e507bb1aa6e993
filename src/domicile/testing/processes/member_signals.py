"""Stops and continues other processes by signals, all threads together and at a safe moment.

Used by `domicile.testing.processes.cluster`. On Linux a pause is complete before `pause` returns.
It must never stop a process that holds the store's write lock.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import apsw

STOP_S = 5.0
LOCKED_MS = 300
_TICK_S = 0.001


def pause(process: subprocess.Popen[bytes] | None, database: Path | None) -> bool:
    """Stop a process, but not while it holds the store's only write lock; False if that fails.

    A store that is no SQLite file has no such lock.
    """
    if process is None or sys.platform == "win32":
        return False
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline:
        process.send_signal(signal.SIGSTOP)
        if not _stopped(process.pid, deadline):
            return False
        if database is None or _writable(database):
            return True
        process.send_signal(signal.SIGCONT)
        time.sleep(_TICK_S)
    return False


def resume(process: subprocess.Popen[bytes] | None) -> None:
    """Continue a stopped process."""
    if process is not None and sys.platform != "win32":
        process.send_signal(signal.SIGCONT)


def standing_still(pid: int) -> bool:
    """Whether every thread of a process is stopped (Linux; on other systems it cannot be told)."""
    if sys.platform != "linux":
        return True
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            state = stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
        except OSError:
            continue  # that thread has just ended
        if state not in ("T", "t"):
            return False
    return True


def _stopped(pid: int, deadline: float) -> bool:
    while not standing_still(pid):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_TICK_S)
    return True


def _writable(database: Path) -> bool:
    connection = apsw.Connection(str(database))
    try:
        connection.set_busy_timeout(LOCKED_MS)
        connection.execute("BEGIN IMMEDIATE")  # pyright: ignore[reportUnknownMemberType]
        connection.execute("ROLLBACK")  # pyright: ignore[reportUnknownMemberType]
        return True
    except apsw.BusyError:
        return False
    finally:
        connection.close(force=True)
