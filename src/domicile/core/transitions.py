"""The shape of a transition table. Machines run by theirs, and the docs draw from them."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

S = TypeVar("S")


class Transition(NamedTuple, Generic[S]):
    """Where an event may lead, the rule that says so, and what is done on the way."""

    to: tuple[S, ...]
    rule: str
    does: str
