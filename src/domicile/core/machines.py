"""What all machines of the core share: the shape of a transition table, and the wish for a tick."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S")
A = TypeVar("A", bound=Enum)


class Transition(NamedTuple, Generic[S, A]):
    """Where an event may lead, the rule that says so, and what is done on the way.

    An action is a member of an enumeration; its value is the text that the diagrams show.
    """

    to: tuple[S, ...]
    rule: str
    does: A


@dataclass(frozen=True, slots=True)
class Arm:
    """Wants a `Tick` at that time. Replaces the one before."""

    at: float
