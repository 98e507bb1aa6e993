"""When a lease is renewed: the schedule that members and leaders share (L1).

A `LeaseKeeper` decides when the next renewal is due, from the result of the last one. A task
(`membership.task_renewer`) or a thread (`membership.thread_renewer`) acts on it. How long the lease
is valid is decided by `core.lease.lease.Lease`, not here. Nothing here reads a clock.
"""

from __future__ import annotations

from enum import Enum
from random import Random

JITTER = 0.1
"""A renewal comes up to this part of `renew_s` sooner or later, so that processes that started
together do not ask the store together."""

RETRY = 1 / 4
"""The part of `renew_s` after which a renewal without an acknowledgement is repeated."""


class Renewal(Enum):
    """The result of one renewal."""

    ACKNOWLEDGED = "the store renewed the lease: it is valid for longer, counted from the call"
    REFUSED = "the lease, or what it stood for, is gone: its holder is over, nothing is repeated"
    UNANSWERED = "nobody knows what became of it: it counts for nothing and is repeated soon"


class LeaseKeeper:
    """The schedule of one lease's renewals. The time to the first one counts from `since`.

    For a member, the time to the next renewal counts from when the last one was sent. For a leader
    (`from_answer`) it counts from the answer, and its retries have a jitter too.
    """

    __slots__ = ("_from_answer", "_random", "_renew_s", "away_since", "due")

    def __init__(
        self, renew_s: float, random: Random, since: float, *, from_answer: bool = False
    ) -> None:
        self._renew_s, self._random, self._from_answer = renew_s, random, from_answer
        self.due = since + renew_s * self._jitter()
        """When to renew next."""
        self.away_since: float | None = None
        """When the first unanswered renewal after the last acknowledged one was sent."""

    def ended(self, renewal: Renewal, sent_at: float, now: float) -> None:
        """A renewal that was sent at `sent_at` has ended now."""
        since = now if self._from_answer else sent_at
        if renewal is Renewal.ACKNOWLEDGED:
            self.away_since = None
            self.due = since + self._renew_s * self._jitter()
            return
        if self.away_since is None:
            self.away_since = sent_at
        jitter = self._jitter() if self._from_answer else 1.0
        self.due = since + self._renew_s * RETRY * jitter

    def _jitter(self) -> float:
        return self._random.uniform(1 - JITTER, 1 + JITTER)
