"""Whether the machine lets the processes of a chaos run work.

A round runs `felt` beside itself, and tests that judge a history do. Like
`domicile.testing.processes.pulse`, but for a loop that may be busy with something else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from domicile.testing.processes.history import SLACK_S

PULSE_S = 0.1
STARVED_S = SLACK_S - PULSE_S
"""A process that wakes up so much too late did not get its share of the machine. One that stands
still just after it was to wake up is seen only by so much less: whatever lasts longer than checkers
allow must be felt."""


def too_late(asked: float, at: float) -> bool:
    """Whether who asked to wake up after `PULSE_S` did so too late."""
    return at > asked + PULSE_S + STARVED_S


@contextmanager
def felt(now: Callable[[], float], late: Callable[[float, float], object]) -> Generator[None]:
    """Feel whether the machine lets processes run, by a thread; `late` hears when it did not.

    In a thread of its own, so that a loop that is busy with histories is not taken for that.
    """
    over = threading.Event()

    def feel() -> None:
        asked = now()
        while not over.wait(PULSE_S):
            if too_late(asked, at := now()):
                late(asked, at)
            asked = now()

    thread = threading.Thread(target=feel, name="chaos-pulse", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
