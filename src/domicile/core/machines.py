"""What all machines of the core share: the form of a transition table, and the timer effect.

The machines and their tables import this. Data only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S")
A = TypeVar("A", bound=Enum)


class Transition(NamedTuple, Generic[S, A]):
    """The states to which an event may lead, the rule that says so, and the action.

    An action is a member of an enumeration; its value is the text that the diagrams show.
    """

    to: tuple[S, ...]
    rule: str
    does: A


@dataclass(frozen=True, slots=True)
class Arm:
    """Ask for a tick at this time. It replaces the time asked for before."""

    at: float
