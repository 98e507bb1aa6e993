"""A timer in the kernel that kills this process at a time, also while it is stopped (F2).

SIGKILL is the one signal that acts on a stopped process. The clock is the one of leases, which
counts time while the machine is suspended (A2). Linux only: elsewhere there is no such timer.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import time
from typing import Protocol

SIGEV_SIGNAL = 0
TIMER_ABSTIME = 1


class DeadlineTimer(Protocol):
    """Kills this process at a time."""

    def arm(self, at: float) -> None:
        """From now on at this time, on the clock of leases."""
        ...

    def disarm(self) -> None:
        """Not at all."""
        ...


class NoTimer:
    """A platform without such a timer."""

    def arm(self, at: float) -> None:
        """Do nothing."""

    def disarm(self) -> None:
        """Do nothing."""


class _SigEvent(ctypes.Structure):
    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    ]


class _TimerSpec(ctypes.Structure):
    _fields_ = [
        ("every_s", ctypes.c_long),
        ("every_ns", ctypes.c_long),
        ("at_s", ctypes.c_long),
        ("at_ns", ctypes.c_long),
    ]


class KernelTimer:
    """Implements `DeadlineTimer` by `timer_create`."""

    def __init__(self, clock: int) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        if not hasattr(library, "timer_create"):
            library = ctypes.CDLL("librt.so.1", use_errno=True)
        self._library = library
        self._timer = ctypes.c_void_p()
        event = _SigEvent(signo=int(signal.SIGKILL), notify=SIGEV_SIGNAL)
        if library.timer_create(
            ctypes.c_int(clock), ctypes.byref(event), ctypes.byref(self._timer)
        ):
            raise OSError(ctypes.get_errno(), "timer_create was refused")

    def arm(self, at: float) -> None:
        """As `DeadlineTimer.arm`. A time that has passed kills at once."""
        # Zero would disarm it.
        whole = max(int(at), 0)
        self._set(_TimerSpec(at_s=whole, at_ns=max(1, int((at - whole) * 1e9))))

    def disarm(self) -> None:
        """As `DeadlineTimer.disarm`."""
        self._set(_TimerSpec())

    def _set(self, spec: _TimerSpec) -> None:
        if self._library.timer_settime(
            self._timer, ctypes.c_int(TIMER_ABSTIME), ctypes.byref(spec), None
        ):
            raise OSError(ctypes.get_errno(), "timer_settime was refused")


def kernel_timer() -> DeadlineTimer | None:
    """The timer of this platform; None if it has none."""
    if sys.platform == "linux":
        return KernelTimer(time.CLOCK_BOOTTIME)
    else:
        return None
