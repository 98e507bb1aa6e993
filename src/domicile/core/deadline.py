"""How long a call may take that a handler makes for its own caller: deadlines are passed down.

Pure arithmetic, used where asks begin. Nothing here waits.
"""

from __future__ import annotations

from math import frexp, ldexp

SLACK = 1 / 32
"""What remains to the handler of the time that is left, at least; and not much more than twice."""

BITS = 6
"""Of the rest, so many significant bits count."""


def nested_timeout_s(timeout_s: float, left_s: float) -> float:
    """The time that a nested ask gets: its own, but not more than its handler's caller waits.

    A part of what is left stays with the handler, so that it can still say so before its caller
    gives up if its own ask runs out of time. The rest is rounded down: asks of about the same time
    share a timer.
    """
    if left_s >= timeout_s:
        return timeout_s
    if left_s <= 0.0:
        return 0.0
    fraction, exponent = frexp(left_s * (1 - SLACK))
    return ldexp(int(fraction * (1 << BITS)), exponent - BITS)
