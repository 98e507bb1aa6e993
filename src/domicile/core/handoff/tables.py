"""The hand-off protocol as two tables: a shard's phase at an owner, a sender's state to an owner.

The machines in `owner` and `sender` look up every step here, and the docs draw their diagrams from
these tables. A missing (state, event) pair would be a bug: the tests assert that none is missing.
Data only: nothing here acts.
"""

from __future__ import annotations

from enum import Enum

from domicile.core.machines import Transition


class Phase(Enum):
    """The state of a shard at this incarnation."""

    CLOSED = "closed"
    OPEN = "open"
    DRAINING = "draining"
    RELEASED = "released"


class OwnerEvent(Enum):
    """What can happen to a phase. Entries are compared with the newest epoch owned here."""

    SERVING_NEWER = "serving(me), newer epoch"
    SERVING_SAME = "serving(me), own epoch"
    MOVING_NEWER = "moving(me), newer epoch"
    MOVING_SAME = "moving(me), own epoch"
    FOREIGN = "someone else, newer epoch"
    STALE = "older entry"
    EMPTY = "nothing runs, waits or is resident"
    OVERDUE = "drain deadline"
    OUTRUN = "a journal knows a newer epoch"
    FENCED = "lease lost"


class OwnerAction(Enum):
    """What the owner's shell has to do after a step. The values are the diagram's texts."""

    NOTHING = "nothing"
    OPEN = "open"
    REOPEN = "reopen"
    REVERT = "revert"
    CUT = "cut"
    DROP = "drop"
    DROP_AND_RELEASE = "drop and release"
    RELEASE = "release"
    REPEAT_RELEASED = "repeat Released"
    OVERDUE = "ask for revert, or cancel"


DROPS = (OwnerAction.REOPEN, OwnerAction.DROP, OwnerAction.DROP_AND_RELEASE)
"""Actions after which nothing of the previous epoch may run, wait or be resident (I1)."""

_P = Transition[Phase, OwnerAction]
_NONE = OwnerAction.NOTHING
_C, _O, _D, _R = Phase.CLOSED, Phase.OPEN, Phase.DRAINING, Phase.RELEASED

OWNER_TRANSITIONS: dict[tuple[Phase, OwnerEvent], Transition[Phase, OwnerAction]] = {
    (_C, OwnerEvent.SERVING_NEWER): _P((_O,), "H11", OwnerAction.OPEN),
    (_C, OwnerEvent.SERVING_SAME): _P((_C,), "L5", _NONE),
    (_C, OwnerEvent.MOVING_NEWER): _P((_R,), "H9", OwnerAction.RELEASE),
    (_C, OwnerEvent.MOVING_SAME): _P((_C,), "L5", _NONE),
    (_C, OwnerEvent.FOREIGN): _P((_C,), "C3", _NONE),
    (_C, OwnerEvent.STALE): _P((_C,), "C3", _NONE),
    (_C, OwnerEvent.EMPTY): _P((_C,), "H10", _NONE),
    (_C, OwnerEvent.OVERDUE): _P((_C,), "H10", _NONE),
    (_C, OwnerEvent.OUTRUN): _P((_C,), "J1", _NONE),
    (_C, OwnerEvent.FENCED): _P((_C,), "L4", _NONE),
    (_O, OwnerEvent.SERVING_NEWER): _P((_O,), "H11", OwnerAction.REOPEN),
    (_O, OwnerEvent.SERVING_SAME): _P((_O,), "C3", _NONE),
    (_O, OwnerEvent.MOVING_NEWER): _P((_R,), "H9", OwnerAction.DROP_AND_RELEASE),
    (_O, OwnerEvent.MOVING_SAME): _P((_D,), "H9", OwnerAction.CUT),
    (_O, OwnerEvent.FOREIGN): _P((_C,), "I1", OwnerAction.DROP),
    (_O, OwnerEvent.STALE): _P((_O,), "C3", _NONE),
    (_O, OwnerEvent.EMPTY): _P((_O,), "H10", _NONE),
    (_O, OwnerEvent.OVERDUE): _P((_O,), "H10", _NONE),
    (_O, OwnerEvent.OUTRUN): _P((_D,), "J1", OwnerAction.CUT),
    (_O, OwnerEvent.FENCED): _P((_C,), "L4", OwnerAction.DROP),
    (_D, OwnerEvent.SERVING_NEWER): _P((_O,), "H11", OwnerAction.REOPEN),
    (_D, OwnerEvent.SERVING_SAME): _P((_O,), "H11", OwnerAction.REVERT),
    (_D, OwnerEvent.MOVING_NEWER): _P((_R,), "H9", OwnerAction.DROP_AND_RELEASE),
    (_D, OwnerEvent.MOVING_SAME): _P((_D,), "C3", _NONE),
    (_D, OwnerEvent.FOREIGN): _P((_C,), "I1", OwnerAction.DROP),
    (_D, OwnerEvent.STALE): _P((_D,), "C3", _NONE),
    (_D, OwnerEvent.EMPTY): _P((_R,), "H10", OwnerAction.RELEASE),
    (_D, OwnerEvent.OVERDUE): _P((_D,), "H10", OwnerAction.OVERDUE),
    (_D, OwnerEvent.OUTRUN): _P((_D,), "J1", _NONE),
    (_D, OwnerEvent.FENCED): _P((_C,), "L4", OwnerAction.DROP),
    (_R, OwnerEvent.SERVING_NEWER): _P((_O,), "H11", OwnerAction.OPEN),
    (_R, OwnerEvent.SERVING_SAME): _P((_R,), "H11", OwnerAction.REPEAT_RELEASED),
    (_R, OwnerEvent.MOVING_NEWER): _P((_R,), "H9", OwnerAction.RELEASE),
    (_R, OwnerEvent.MOVING_SAME): _P((_R,), "H10", OwnerAction.REPEAT_RELEASED),
    (_R, OwnerEvent.FOREIGN): _P((_R,), "C3", _NONE),
    (_R, OwnerEvent.STALE): _P((_R,), "C3", _NONE),
    (_R, OwnerEvent.EMPTY): _P((_R,), "H10", _NONE),
    (_R, OwnerEvent.OVERDUE): _P((_R,), "H10", _NONE),
    (_R, OwnerEvent.OUTRUN): _P((_R,), "J1", _NONE),
    (_R, OwnerEvent.FENCED): _P((_C,), "L4", _NONE),
}


class SenderState(Enum):
    """Whether a sender may have messages at an owner."""

    UNBOUND = "unbound"
    BOUND = "bound"
    FLUSHING = "flushing"


class SenderEvent(Enum):
    """What can happen to a sender's state."""

    WRITE = "head of the queue may be written"
    MISMATCH = "record no longer matches the bond"
    MOVING = "moving first seen"
    RETURN = "mail came back"
    FLUSHED = "Flushed of this flush"
    LATE = "Flushed of another flush"
    LINK_LOST = "link lost"
    HOLD_TIMEOUT = "Flushed is overdue"


class SenderAction(Enum):
    """What a sender does at a step. The values are the diagram's texts."""

    WRITE = "write"
    HOLD = "hold"
    NOTE = "note it as seen"
    REINSERT = "reinsert"
    REINSERT_AND_FLUSH = "reinsert, flush"
    FLUSH = "flush"
    GO_ON = "go on"
    RESOLVE = "resolve what that owner had"
    IGNORE = "ignore"


FLUSHES = (SenderAction.FLUSH, SenderAction.REINSERT_AND_FLUSH)
"""Actions that send a flush to the owner that the sender is bound to (H4)."""

_L = Transition[SenderState, SenderAction]
_U, _B, _F = SenderState.UNBOUND, SenderState.BOUND, SenderState.FLUSHING

SENDER_TRANSITIONS: dict[tuple[SenderState, SenderEvent], Transition[SenderState, SenderAction]] = {
    (_U, SenderEvent.WRITE): _L((_B,), "H2", SenderAction.WRITE),
    (_U, SenderEvent.MISMATCH): _L((_U,), "H2", SenderAction.HOLD),
    (_U, SenderEvent.MOVING): _L((_U,), "H4", SenderAction.NOTE),
    (_U, SenderEvent.RETURN): _L((_U,), "H3", SenderAction.REINSERT),
    (_U, SenderEvent.FLUSHED): _L((_U,), "H5", SenderAction.IGNORE),
    (_U, SenderEvent.LATE): _L((_U,), "H5", SenderAction.IGNORE),
    (_U, SenderEvent.LINK_LOST): _L((_U,), "H6", SenderAction.RESOLVE),
    (_U, SenderEvent.HOLD_TIMEOUT): _L((_U,), "H6", SenderAction.IGNORE),
    (_B, SenderEvent.WRITE): _L((_B,), "H2", SenderAction.WRITE),
    (_B, SenderEvent.MISMATCH): _L((_F,), "H4", SenderAction.FLUSH),
    (_B, SenderEvent.MOVING): _L((_F,), "H4", SenderAction.FLUSH),
    (_B, SenderEvent.RETURN): _L((_F,), "H3", SenderAction.REINSERT_AND_FLUSH),
    (_B, SenderEvent.FLUSHED): _L((_B,), "H5", SenderAction.IGNORE),
    (_B, SenderEvent.LATE): _L((_B,), "H5", SenderAction.IGNORE),
    (_B, SenderEvent.LINK_LOST): _L((_U,), "H6", SenderAction.RESOLVE),
    (_B, SenderEvent.HOLD_TIMEOUT): _L((_B,), "H6", SenderAction.IGNORE),
    (_F, SenderEvent.WRITE): _L((_F,), "H1", SenderAction.HOLD),
    (_F, SenderEvent.MISMATCH): _L((_F,), "H4", SenderAction.HOLD),
    (_F, SenderEvent.MOVING): _L((_F,), "H4", SenderAction.NOTE),
    (_F, SenderEvent.RETURN): _L((_F,), "H3", SenderAction.REINSERT),
    (_F, SenderEvent.FLUSHED): _L((_U,), "H5", SenderAction.GO_ON),
    (_F, SenderEvent.LATE): _L((_F,), "H5", SenderAction.IGNORE),
    (_F, SenderEvent.LINK_LOST): _L((_U,), "H6", SenderAction.RESOLVE),
    (_F, SenderEvent.HOLD_TIMEOUT): _L((_U,), "H6", SenderAction.RESOLVE),
}
