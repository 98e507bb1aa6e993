"""Whether the machine lets this process run.

`domicile.testing.processes.cluster` runs `feel` beside each cluster: a test's own clients live in
the test's process. If the machine does not let it run, they lose their leases and are not to blame.
It must not hear of what the process did itself: a loop that is held by work is no starved one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from domicile.testing.processes.history import SLACK_S

PULSE_S = 0.1
STARVED_S = SLACK_S - PULSE_S
"""Seconds by which the event loop must turn too late. One that stands still just after a pulse is
seen only by so much less: whatever lasts longer than checkers allow must be felt."""


async def feel(
    now: Callable[[], float],
    spent: Callable[[], float],
    starved: Callable[[float, float], object],
) -> None:
    """Call `starved` with the beginning and the end of each time in which the event loop did not
    turn and the process used no processor either, until cancelled.

    `spent` is the processor time that the process has used so far, in seconds.
    """
    while True:
        since, before = now(), spent()
        await asyncio.sleep(PULSE_S)
        until = now()
        if until - since - PULSE_S - (spent() - before) > STARVED_S:
            starved(since, until)
