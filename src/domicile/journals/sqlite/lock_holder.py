"""A process that stands still in the middle of a write: which one it is, and how it is ended (J3).

SQLite has one writer at a time. A process that is stopped while it writes holds the lock, and all
others wait. A process whose lease is over may not write any more (L4), so it may be ended. Only the
journal of this room ends a holder, and only after it has seen that the record is gone. The demo
looks for one. Linux only: elsewhere no holder is found.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

# In the -shm file SQLite locks one byte for each of its locks; this is the byte of the only writer.
_FIND = """
import fcntl, os, struct, sys
lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 120, 1, 0)
with open(sys.argv[1], "r+b") as file:
    kind, _, _, _, pid = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, lock))
print(0 if kind == fcntl.F_UNLCK else pid)
"""

FIND_S = 10.0
"""Seconds that the look for the holder may take."""


def find_holder(path: Path) -> int | None:
    """The process id of the writer that holds the lock of a database; None if none is found.

    A child process asks: when a process closes the file, it loses all locks that it has on it.
    """
    if sys.platform != "linux":
        return None
    try:
        found = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _FIND, f"{path}-shm"],
            capture_output=True, timeout=FIND_S, check=True, text=True,
        )  # fmt: skip
        pid = int(found.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return pid if pid > 0 and pid != os.getpid() else None


def started_at(pid: int) -> str:
    """When a process started, in a form that no other process with this id has; empty if it is
    not there."""
    with suppress(OSError, IndexError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        # The name in brackets may have spaces; the start is the 22nd field.
        return f"{boot}/{stat.rpartition(')')[2].split()[19]}"
    return ""


def end_process(pid: int, started: str) -> bool:
    """End a process for certain (SIGKILL), if it is the one that started then."""
    try:
        handle = os.pidfd_open(pid)
    except (OSError, AttributeError):
        return False
    try:
        # The handle names one process for ever: after this check it can't be another one.
        if not started or started_at(pid) != started:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True
