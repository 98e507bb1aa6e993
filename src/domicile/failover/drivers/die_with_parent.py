"""Becomes another program that the kernel kills as soon as its parent is gone (F2). Linux only.

A program of its own, run by its path and never imported: what a child does between fork and exec
must not depend on what its parent's threads hold. Usage: die_with_parent.py PARENT COMMAND...
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def become(parent: int, command: list[str]) -> None:
    """Ask for SIGKILL at the parent's death, then run the command in this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL)):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    if os.getppid() != parent:
        # It died before it was asked for: nobody would take this process along.
        sys.exit(f"the parent {parent} is gone")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} can't be run: {error.strerror}")


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
