"""Whether a node with a blocked event loop renews its lease, and what its record says about it.

The thread renewer (`membership.thread_renewer`) asks these functions and acts on the answers. A
blocking call must cost no shard, and a loop that never returns must lose its shards. So renewals
continue until `stall_limit_s` after the loop last turned, and not longer. Nothing here reads a
clock.
"""

from __future__ import annotations

from enum import Enum

BEAT_S = 1.0
"""Most seconds between two checks whether a loop turns."""

LOOKS = 8
"""Times the thread renewer checks the loop before peers act on its silence (C6)."""

STILL = 1 / 3
"""Part of `notice_s` after which a node's record says that its loop is blocked. A leader asks
other members about a silent node at 1/2 of `evict_after_s`, which is later."""


LEAST_NOTICE_S = 1.0
"""Least seconds of silence that count, so that a node does not look at its loop all the time."""

RESTS, MOST_RESTS = 40, 200
"""Pauses of the loop in one go, and pauses for one renewal. The limit keeps a store that does not
answer from delaying the loop."""

LATE_S = 0.1
"""Seconds after its due time from which a renewal is late. Its thread may be waiting for the
interpreter lock."""


class Step(Enum):
    """What the thread renewer does now."""

    WAIT = "wait"
    RENEW = "renew"
    STALLED = "the loop has not turned for too long: no renewal, so that the lease runs out"
    LAPSED = "the deadline has passed: this incarnation is over"


def beat_s(evict_after_s: float, stall_limit_s: float) -> float:
    """Most seconds since the last sign that a healthy loop turns; well below all limits on it."""
    return min(BEAT_S, evict_after_s / LOOKS, stall_limit_s / 4)


def step(
    *, now: float, turned_at: float, due: float, valid_until: float, stall_limit_s: float
) -> Step:
    """Whether to renew now. `turned_at` is when the loop last showed that it turns."""
    if now >= valid_until:
        # As on the loop: after the own deadline nothing is renewed, whatever the store says (L1).
        return Step.LAPSED
    if now - turned_at >= stall_limit_s:
        return Step.STALLED
    return Step.RENEW if now >= due else Step.WAIT


def next_look(now: float, due: float, valid_until: float, notice_s: float) -> float:
    """When to ask again; always later than now."""
    soon = now + notice_s / LOOKS
    return min((at for at in (due, valid_until) if now < at < soon), default=soon)


def notice_s(evict_after_s: float, link_timeout_s: float) -> float:
    """Seconds of silence after which peers act on it: the leader evicts (C6), senders lose links.

    The record must say before that that the loop is blocked.
    """
    return min(evict_after_s, max(LEAST_NOTICE_S, link_timeout_s))


def rests(now: float, due: float, rested: int) -> int:
    """How many pauses a loop that turns should make now, so that the thread renewer can run. The
    loop has already made `rested` pauses for this renewal."""
    return min(RESTS, MOST_RESTS - rested) if now >= due + LATE_S else 0


def stands_still(now: float, turned_at: float, notice_s: float) -> bool:
    """Whether the node's own record should say that its loop is blocked.

    Peers do not reach such a node, but a leader must not evict it (C6): it renews on purpose, stops
    renewing by itself, and until then keeps its shards.
    """
    return now - turned_at >= notice_s * STILL
