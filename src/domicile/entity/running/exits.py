"""Errors that end a program: raised by a handler they fail its call, raised by Ctrl-C they end it.

Asked by all code that runs users' handlers and hooks. Such code must let through what `is_ctrl_c`
names, and must treat every other error as a failure of the handler.
"""

from __future__ import annotations

import signal
import threading
from functools import partial
from types import CodeType

EXITS = (SystemExit, KeyboardInterrupt, GeneratorExit)


def is_ctrl_c(error: BaseException) -> bool:
    """Whether the program's SIGINT handler raised this error, and not the code that it interrupted.

    Python's own handler leaves no frame in the traceback. While it is installed, every
    `KeyboardInterrupt` in the main thread counts: a second Ctrl-C must end the process.
    """
    if not isinstance(error, KeyboardInterrupt):
        return False
    if threading.current_thread() is not threading.main_thread():
        return False
    installed = signal.getsignal(signal.SIGINT)
    if installed is signal.SIG_IGN or installed is signal.SIG_DFL:
        return False
    while isinstance(installed, partial):
        installed = installed.func
    code: CodeType | None = getattr(installed, "__code__", None)
    place = error.__traceback__
    while place is not None and place.tb_frame.f_code is not code:
        place = place.tb_next
    return code is None or place is not None


def exit_hint(error: BaseException) -> str:
    """What the log adds to a failure if the handler meant to end the process; else nothing."""
    if not isinstance(error, EXITS):
        return ""
    return (
        f": {type(error).__name__} in a handler does not end the node. To stop this node, use "
        "os.kill(os.getpid(), signal.SIGTERM)"
    )
