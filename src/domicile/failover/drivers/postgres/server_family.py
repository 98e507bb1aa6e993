"""The processes of one PostgreSQL server, and the watcher that ends them when its guard is gone.

A postmaster that is killed leaves its sessions behind, and a busy one goes on for as long as its
statement takes: it commits, and answers. One that is stopped heeds no signal but SIGKILL, so it
ends nobody. The watcher is a process of its own beside the server. It waits until the guard's end
of a pipe is gone, and then kills whatever is left (F2).

Run by its path, it needs the standard library only: server_family.py DATA POSTMASTER, with the pipe
as its input. The guard's process imports it for the functions.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

SHARED = "/SYSV"
"""The memory that all processes of a server share, as their maps show it."""

CAP_SYS_PTRACE = 19
"""Its number in the kernel."""

POLL_S = 0.02


def family(data: Path) -> list[int]:
    """The processes of the server with this data directory, also those without a postmaster.

    They stand in that directory, as a shell may, and share the server's memory, as no shell does.
    """
    found: list[int] = []
    try:
        own = data.stat()
    except OSError:
        return found
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            at = os.stat(f"/proc/{name}/cwd")
            if (at.st_dev, at.st_ino) != (own.st_dev, own.st_ino):
                continue
            if SHARED in Path(f"/proc/{name}/maps").read_text():
                found.append(int(name))
        except OSError:
            # It has ended.
            continue
    return found


def left_behind(data: Path, postmaster: int) -> list[int]:
    """Of the family, this postmaster and those that have none: a new guard may have begun anew."""
    found = family(data)
    return [
        one
        for one in found
        if one == postmaster
        or _parent(one) == postmaster
        or (_parent(one) not in found and one != named_postmaster(data))
    ]


def may_see_others() -> bool:
    """Whether this process may see where processes of other users stand. Being root is not enough:
    containers take the right for that (CAP_SYS_PTRACE) away."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    line = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(line.split()[1], 16) >> CAP_SYS_PTRACE & 1)


def named_postmaster(data: Path) -> int:
    """The main process by the server's own file, whether it lives or not; 0: there is none."""
    try:
        return max(0, int((data / "postmaster.pid").read_text().split("\n", 1)[0]))
    except (OSError, ValueError):
        return 0


def lives(pid: int) -> bool:
    """Whether a process can still do anything."""
    return _stat(pid)[:1] not in ([], ["Z"], ["X"])


def send(pid: int, what: signal.Signals) -> None:
    """A signal to a process that may be gone."""
    try:
        os.kill(pid, what)
    except ProcessLookupError:
        return


def _parent(pid: int) -> int:
    found = _stat(pid)
    return int(found[1]) if len(found) > 1 else 0


def _stat(pid: int) -> list[str]:
    """What follows the name of a process: its state, its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def watch(data: Path, postmaster: int) -> None:
    """Wait until nobody has the other end of the pipe; then kill, until nothing is left."""
    # A service manager asks all to end at once; this one ends last.
    for kind in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(kind, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    while left := left_behind(data, postmaster):
        for one in left:
            send(one, signal.SIGKILL)
        time.sleep(POLL_S)


if __name__ == "__main__":
    watch(Path(sys.argv[1]), int(sys.argv[2]))
