"""What all machines of the core share: the shape of a transition table, and the wish for a tick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S")


class Transition(NamedTuple, Generic[S]):
    """Where an event may lead, the rule that says so, and what is done on the way."""

    to: tuple[S, ...]
    rule: str
    does: str


@dataclass(frozen=True, slots=True)
class Arm:
    """Wants a `Tick` at that time. Replaces the one before."""

    at: float
