"""Proof of death: whether a named incarnation can never run again (L6, C9).

Absence of proof is `UNKNOWN`, never `DEAD`. A wrong `DEAD` makes two homes (I1); everything else
only costs time.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol, runtime_checkable

from domicile.core.ids import Incarnation


class Verdict(Enum):
    """What is known of an incarnation."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


class Health(Protocol):
    """Judges incarnations, and shows its own process's ones to the judges of others."""

    def hold(self, incarnation: Incarnation) -> None:
        """Show that an incarnation of this process lives; before it registers (L6).

        Raises `StoreUnavailable` if that can't be done.
        """
        ...

    def let_go(self, incarnation: Incarnation, *, gone: bool = True) -> None:
        """That incarnation has stopped everything for good.

        `gone`: its record is gone, too. Otherwise others must from now on judge it `DEAD`, so
        that they remove the record. Also said of a dead client by the node that removed its
        record: nobody needs the proof any more.
        """
        ...

    def verdict(self, incarnation: Incarnation) -> Verdict:
        """What is known now; errors are `UNKNOWN`. Quick: called on the event loop."""
        ...

    def evidence(self, incarnation: Incarnation) -> str:
        """For a `DEAD` one: what proves it, in words for the store and the log."""
        ...


@runtime_checkable
class TellsAge(Protocol):
    """What a `Health` has that also knows when incarnations began; few have it."""

    def age_s(self, incarnation: Incarnation) -> float | None:
        """How long ago an incarnation began; None if that is not known."""
        ...
