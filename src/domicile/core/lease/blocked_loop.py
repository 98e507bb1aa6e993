"""Whether a node whose event loop may be blocked renews its lease, and what it says of itself.

Asked by the thread that renews beside the loop (`membership.thread_renewer`), which acts on the
answers. A blocking call must cost no shard, and a loop that is dead must lose them: so renewals go
on for `stall_limit_s` after the loop last turned, and not a moment longer. It must never read a
clock.
"""

from __future__ import annotations

from enum import Enum

BEAT_S = 1.0
"""The longest time between two looks whether a loop turns."""

LOOKS = 8
"""How many times the renewing thread looks at the loop before a leader may evict its node (C6)."""

STILL = 1 / 3
"""The part of `evict_after_s` after which a node says that it stands still: before a leader asks
others about it, which is at half of it."""


RESTS, MOST_RESTS = 40, 200
"""How often a loop rests at a time, and for one renewal: a store that does not answer must not hold
up the loop, too."""

LATE_S = 0.1
"""A renewal that is not acknowledged so long after it was due may wait for the interpreter."""


class Step(Enum):
    """What the renewing thread does now."""

    WAIT = "wait"
    RENEW = "renew"
    STALLED = "the loop has not turned for too long: no renewal, so that the lease runs out"
    LAPSED = "the deadline has passed: this incarnation is over"


def beat_s(evict_after_s: float, stall_limit_s: float) -> float:
    """How old the last sign of a healthy loop may be; well below all that silence leads to."""
    return min(BEAT_S, evict_after_s / LOOKS, stall_limit_s / 4)


def step(
    *, now: float, turned_at: float, due: float, valid_until: float, stall_limit_s: float
) -> Step:
    """Renew, or not. `turned_at` is when the loop last showed that it turns."""
    if now >= valid_until:
        # As on the loop: past the own deadline nothing is renewed, whatever the store says (L1).
        return Step.LAPSED
    if now - turned_at >= stall_limit_s:
        return Step.STALLED
    return Step.RENEW if now >= due else Step.WAIT


def next_look(now: float, due: float, valid_until: float, evict_after_s: float) -> float:
    """When to ask again; always later than now."""
    soon = now + evict_after_s / LOOKS
    return min((at for at in (due, valid_until) if now < at < soon), default=soon)


def rests(now: float, due: float, rested: int) -> int:
    """How often a loop that turns should rest now to make room for the thread that renews, if it
    did so `rested` times for this renewal."""
    return min(RESTS, MOST_RESTS - rested) if now >= due + LATE_S else 0


def stands_still(now: float, turned_at: float, evict_after_s: float) -> bool:
    """Whether to say in the own record that the loop is blocked.

    Peers do not reach such a node, yet it is no hostage (C6): it renews by its own choice, stops
    that by itself, and nothing else frees its shards before.
    """
    return now - turned_at >= evict_after_s * STILL
