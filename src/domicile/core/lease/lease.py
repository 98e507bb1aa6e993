"""How long one incarnation may act: the arithmetic of its lease (L1, L4, L5) and its states.

The member or leadership that renews the lease feeds it. The code that runs handlers asks it before
every turn (L3), a leadership before every step. `TRANSITIONS` is the whole machine: `Lease` looks
up every step there, and the documentation draws its diagram from it. It must never read a clock,
and never count validity from the arrival of an answer: the store may have started the ttl as early
as the call was sent.
"""

from __future__ import annotations

from enum import Enum
from math import inf

from domicile.core.machines import Transition

FOREVER_S = inf
"""The ttl that counts under `fencing = "health"`: only a refusal ends the incarnation (C9)."""

RECORD_FOREVER_S = 3_155_760_000.0
"""The ttl in the record of a node without a lease: a hundred years. A leader waits that long before
it removes an evicted record by time alone (C5), so it never does. Not `inf`, because it is stored
as text."""


class LeaseState(Enum):
    """The state of an incarnation's lease."""

    UNREGISTERED = "unregistered"
    HELD = "held"
    FENCED = "fenced"
    ENDED = "ended"


class LeaseEvent(Enum):
    """What can happen to a lease."""

    GRANTED = "granted"
    ACKNOWLEDGED = "acknowledged"
    LATE_ACKNOWLEDGED = "acknowledged late"
    REFUSED = "refused, record gone or evicted"
    DEADLINE = "deadline passed"
    LEFT = "left"


class LeaseAction(Enum):
    """What a step of the table does. The values are the diagram's texts."""

    EXTEND = "valid_until = max(valid_until, sent_at + ttl - margin)"
    FENCE = "admit nothing, cancel, never resume past the hard deadline"
    END = "nothing runs any more, revoke the lease"
    IGNORE = "nothing"


EXTEND, FENCE = LeaseAction.EXTEND, LeaseAction.FENCE
END, IGNORE = LeaseAction.END, LeaseAction.IGNORE

_UNREGISTERED = LeaseState.UNREGISTERED
_HELD = LeaseState.HELD
_FENCED = LeaseState.FENCED
_ENDED = LeaseState.ENDED

# Of two targets, the first applies if the new deadline is in the future, otherwise the second.
TRANSITIONS: dict[tuple[LeaseState, LeaseEvent], Transition[LeaseState, LeaseAction]] = {
    (_UNREGISTERED, LeaseEvent.GRANTED): Transition((_HELD, _UNREGISTERED), "L1", EXTEND),
    (_UNREGISTERED, LeaseEvent.ACKNOWLEDGED): Transition((_UNREGISTERED,), "L1", IGNORE),
    (_UNREGISTERED, LeaseEvent.LATE_ACKNOWLEDGED): Transition((_UNREGISTERED,), "L1", IGNORE),
    (_UNREGISTERED, LeaseEvent.REFUSED): Transition((_FENCED,), "L5", FENCE),
    (_UNREGISTERED, LeaseEvent.DEADLINE): Transition((_UNREGISTERED,), "L1", IGNORE),
    (_UNREGISTERED, LeaseEvent.LEFT): Transition((_ENDED,), "H14", END),
    (_HELD, LeaseEvent.GRANTED): Transition((_HELD,), "L1", EXTEND),
    (_HELD, LeaseEvent.ACKNOWLEDGED): Transition((_HELD,), "L1", EXTEND),
    (_HELD, LeaseEvent.LATE_ACKNOWLEDGED): Transition((_HELD, _FENCED), "L1", EXTEND),
    (_HELD, LeaseEvent.REFUSED): Transition((_FENCED,), "L1", FENCE),
    (_HELD, LeaseEvent.DEADLINE): Transition((_FENCED,), "L4", FENCE),
    (_HELD, LeaseEvent.LEFT): Transition((_ENDED,), "H14", END),
    (_FENCED, LeaseEvent.GRANTED): Transition((_FENCED,), "L5", IGNORE),
    (_FENCED, LeaseEvent.ACKNOWLEDGED): Transition((_FENCED,), "L5", IGNORE),
    (_FENCED, LeaseEvent.LATE_ACKNOWLEDGED): Transition((_FENCED,), "L5", IGNORE),
    (_FENCED, LeaseEvent.REFUSED): Transition((_FENCED,), "L5", IGNORE),
    (_FENCED, LeaseEvent.DEADLINE): Transition((_FENCED,), "L5", IGNORE),
    (_FENCED, LeaseEvent.LEFT): Transition((_ENDED,), "L5", END),
    (_ENDED, LeaseEvent.GRANTED): Transition((_ENDED,), "L5", IGNORE),
    (_ENDED, LeaseEvent.ACKNOWLEDGED): Transition((_ENDED,), "L5", IGNORE),
    (_ENDED, LeaseEvent.LATE_ACKNOWLEDGED): Transition((_ENDED,), "L5", IGNORE),
    (_ENDED, LeaseEvent.REFUSED): Transition((_ENDED,), "L5", IGNORE),
    (_ENDED, LeaseEvent.DEADLINE): Transition((_ENDED,), "L5", IGNORE),
    (_ENDED, LeaseEvent.LEFT): Transition((_ENDED,), "L5", IGNORE),
}


class Lease:
    """The right of an incarnation or a leadership to act. The caller passes all times, which come
    from one clock."""

    __slots__ = ("_margin_s", "_stop_budget_s", "reason", "state", "valid_until")

    def __init__(self, margin_s: float, stop_budget_s: float) -> None:
        self._margin_s = margin_s
        self._stop_budget_s = stop_budget_s
        self.state = LeaseState.UNREGISTERED
        self.valid_until = -inf
        self.reason = ""
        """Why the lease was fenced; empty before that."""

    @property
    def hard_until(self) -> float:
        """Until when cancelled handlers may clean up; after it no handler is resumed (L4)."""
        return self.valid_until + self._stop_budget_s

    def valid(self, now: float) -> bool:
        """Whether handlers may start, resume and answer (L3)."""
        return self.state is LeaseState.HELD and now < self.valid_until

    def may_resume(self, now: float) -> bool:
        """Whether a cancelled handler may still be resumed to clean up (L4)."""
        if self.state is LeaseState.HELD or self.state is LeaseState.FENCED:
            return now < self.hard_until
        return False

    def granted(self, sent_at: float, ttl_s: float, now: float) -> bool:
        """The store started the lease and holds the record; True if it counts."""
        return self._extend(LeaseEvent.GRANTED, sent_at, ttl_s, now)

    def acknowledged(self, sent_at: float, ttl_s: float, now: float) -> bool:
        """The store confirmed a renewal sent at `sent_at`; True if it counts.

        An answer after the deadline counts too if no guard has noticed the deadline yet: the store
        had renewed the lease in time. After a fence no answer counts (L5).
        """
        late = self.state is LeaseState.HELD and now >= self.valid_until
        event = LeaseEvent.LATE_ACKNOWLEDGED if late else LeaseEvent.ACKNOWLEDGED
        return self._extend(event, sent_at, ttl_s, now)

    def refused(self, now: float, reason: str) -> None:
        """The store refused a renewal, or the record is gone or evicted: fence at once (L1)."""
        self._stop(LeaseEvent.REFUSED, now, reason)

    def check(self, now: float) -> LeaseState:
        """Notice a passed deadline; the state after it."""
        if self.state is LeaseState.HELD and now >= self.valid_until:
            self._stop(LeaseEvent.DEADLINE, now, "deadline passed")
        return self.state

    def left(self, now: float) -> None:
        """The holder stopped everything and gives the lease back (H14, L5)."""
        self._stop(LeaseEvent.LEFT, now, "")

    def _extend(self, event: LeaseEvent, sent_at: float, ttl_s: float, now: float) -> bool:
        assert sent_at <= now, "an answer cannot come before its call"
        transition = TRANSITIONS[self.state, event]
        counts = transition.does is EXTEND
        if counts:
            self.valid_until = max(self.valid_until, sent_at + ttl_s - self._margin_s)
        ahead = now < self.valid_until
        self.state = transition.to[0] if ahead else transition.to[-1]
        if self.state is LeaseState.FENCED and counts:
            self.reason = "deadline passed"
        return counts

    def _stop(self, event: LeaseEvent, now: float, reason: str) -> None:
        transition = TRANSITIONS[self.state, event]
        self.state = transition.to[0]
        if transition.does is FENCE:
            self.reason = reason
        if transition.does is not IGNORE:
            # A fence before the deadline makes the hard deadline earlier too (L4).
            self.valid_until = min(self.valid_until, now)
