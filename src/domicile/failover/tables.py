"""The two tables of a replica group: how its state changes, and what each server shall be.

`GROUP_TRANSITIONS` has every change of the state record, with the event that an agent sees and the
rule that allows it. `WISHES` has the desired state of an agent's own server for what the record
says (F13). The machine looks up both; the docs draw both. Data only.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from domicile.core.machines import Transition
from domicile.failover.records import GroupPhase


class GroupEvent(Enum):
    """What an agent sees that may change the state. The values are the diagram's texts."""

    FOUNDED = "a configuration, and no state yet"
    PRIMARY_GONE = "the primary's record is gone"
    RELEASED = "the primary's server restarted, fell or is unfit, and refuses writes"
    TAKEN_OVER = "the primary's server ran on under a new agent"
    QUORUM_MOVED = "the write quorum must change, or has"
    SWITCH_ASKED = "an operator asks for a switchover"
    CAUGHT_UP = "the candidate has everything that the fenced primary has"
    SWITCH_FAILED = "the switchover is overdue, or its candidate's record is gone"
    ORCHESTRATOR_GONE = "the orchestrator's record is gone"
    DECIDED = "enough final positions, and a candidate"
    CANDIDATE_GONE = "the candidate's record is gone"
    CANDIDATE_BEHIND = "the candidate's server is behind its chosen position"
    PROMOTED = "the candidate's server confirms its promotion"


class GroupAction(Enum):
    """What the commit does. The values are the diagram's texts."""

    ELECT = "begin epoch + 1, with itself as orchestrator"
    ELECT_AGAIN = "begin one more epoch: each is promoted for once"
    CONTINUE = "take the orchestrator's place"
    ADOPT = "name the new agent, keep the epoch"
    LIST_QUORUMS = "list the new quorum, or drop those out of use"
    SWITCH = "name the candidate, keep the epoch"
    REVERT = "serve on in the same epoch"
    CHOOSE = "name the candidate and all positions"
    HAND_OVER = "name the candidate for epoch + 1"
    SERVE = "name the new primary, its own chain and its quorum"
    NOTHING = "nothing"


_T = Transition[GroupPhase, GroupAction]
_V, _S, _E = GroupPhase.VACANT, GroupPhase.SERVING, GroupPhase.ELECTING
_C, _X = GroupPhase.CHOSEN, GroupPhase.SWITCHING

GROUP_TRANSITIONS: dict[tuple[GroupPhase, GroupEvent], Transition[GroupPhase, GroupAction]] = {
    (_V, GroupEvent.FOUNDED): _T((_E,), "F5", GroupAction.ELECT),
    (_S, GroupEvent.PRIMARY_GONE): _T((_E,), "F4", GroupAction.ELECT),
    (_S, GroupEvent.RELEASED): _T((_E,), "F4", GroupAction.ELECT),
    (_S, GroupEvent.TAKEN_OVER): _T((_S,), "F4", GroupAction.ADOPT),
    (_S, GroupEvent.QUORUM_MOVED): _T((_S,), "F12", GroupAction.LIST_QUORUMS),
    (_S, GroupEvent.SWITCH_ASKED): _T((_X,), "F11", GroupAction.SWITCH),
    (_X, GroupEvent.CAUGHT_UP): _T((_C,), "F11", GroupAction.HAND_OVER),
    (_X, GroupEvent.SWITCH_FAILED): _T((_S,), "F11", GroupAction.REVERT),
    (_X, GroupEvent.PRIMARY_GONE): _T((_E,), "F5", GroupAction.ELECT),
    (_X, GroupEvent.RELEASED): _T((_E,), "F4", GroupAction.ELECT),
    (_E, GroupEvent.ORCHESTRATOR_GONE): _T((_E,), "F5", GroupAction.CONTINUE),
    (_E, GroupEvent.DECIDED): _T((_C,), "F8", GroupAction.CHOOSE),
    (_C, GroupEvent.CANDIDATE_GONE): _T((_E,), "F9", GroupAction.ELECT_AGAIN),
    (_C, GroupEvent.CANDIDATE_BEHIND): _T((_E,), "F9", GroupAction.ELECT_AGAIN),
    (_C, GroupEvent.PROMOTED): _T((_S,), "F9", GroupAction.SERVE),
}
"""A pair that is not here changes nothing: `transition` says so."""


def transition(phase: GroupPhase, event: GroupEvent) -> Transition[GroupPhase, GroupAction]:
    """What an event does in a phase."""
    return GROUP_TRANSITIONS.get((phase, event), _T((phase,), "F13", GroupAction.NOTHING))


class Place(Enum):
    """What the state says of an agent."""

    PRIMARY = "named as primary"
    CANDIDATE = "named as candidate"
    OTHER = "neither"


class ServerWish(Enum):
    """What an agent makes of its own server. The values are the table's texts."""

    CLOSED = "refuse writes, follow nobody"
    FOLLOWING = "refuse writes, follow the primary"
    READY = "refuse writes, follow the primary, be ready to be promoted"
    DRAINED = "refuse writes, go on feeding replicas"
    PROMOTED = "become primary of the new epoch, still refuse writes"
    OPEN = "accept writes until the guard's deadline"
    AS_IS = "refuse writes, else stay as it is"


class Wished(NamedTuple):
    """The wish for one place in one phase, and the rule that says so."""

    wish: ServerWish
    rule: str


WISHES: dict[tuple[GroupPhase, Place], Wished] = {
    (_V, Place.PRIMARY): Wished(ServerWish.CLOSED, "F3"),
    (_V, Place.CANDIDATE): Wished(ServerWish.CLOSED, "F3"),
    (_V, Place.OTHER): Wished(ServerWish.CLOSED, "F3"),
    (_S, Place.PRIMARY): Wished(ServerWish.OPEN, "F1"),
    (_S, Place.CANDIDATE): Wished(ServerWish.FOLLOWING, "F10"),
    (_S, Place.OTHER): Wished(ServerWish.FOLLOWING, "F10"),
    (_X, Place.PRIMARY): Wished(ServerWish.DRAINED, "F11"),
    (_X, Place.CANDIDATE): Wished(ServerWish.READY, "F11"),
    (_X, Place.OTHER): Wished(ServerWish.FOLLOWING, "F11"),
    (_E, Place.PRIMARY): Wished(ServerWish.CLOSED, "F6"),
    (_E, Place.CANDIDATE): Wished(ServerWish.CLOSED, "F6"),
    (_E, Place.OTHER): Wished(ServerWish.CLOSED, "F6"),
    (_C, Place.PRIMARY): Wished(ServerWish.AS_IS, "F11"),
    (_C, Place.CANDIDATE): Wished(ServerWish.PROMOTED, "F9"),
    (_C, Place.OTHER): Wished(ServerWish.CLOSED, "F11"),
}
