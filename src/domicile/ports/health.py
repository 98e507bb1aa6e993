"""Proof of death: whether a named incarnation can never run again (L6, C9).

`membership.death_watch` asks it. Absence of proof must be `UNKNOWN`, never `DEAD`. A wrong `DEAD`
makes two homes (I1); every other error only costs time.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol, runtime_checkable

from domicile.core.ids import Incarnation


class Verdict(Enum):
    """What is known of an incarnation."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


class Health(Protocol):
    """Judges incarnations, and proves to other processes that those of this one are alive."""

    def hold(self, incarnation: Incarnation) -> None:
        """Show that an incarnation of this process is alive, before it registers (L6).

        Raises `StoreUnavailable` if that cannot be done.
        """
        ...

    def let_go(self, incarnation: Incarnation, *, gone: bool = True) -> None:
        """That incarnation has stopped everything permanently.

        `gone`: its record is gone, too. Otherwise others must judge it `DEAD` from now on, so that
        they remove the record. A node that removed the record of a dead client, or of a dead node
        that had a lease, also calls this: the proof is no longer needed.
        """
        ...

    def verdict(self, incarnation: Incarnation) -> Verdict:
        """What is known now; errors are `UNKNOWN`. Quick: called on the event loop."""
        ...

    def evidence(self, incarnation: Incarnation) -> str:
        """The proof for a `DEAD` incarnation, as a text for the store and the log."""
        ...


@runtime_checkable
class TellsAge(Protocol):
    """A `Health` that also knows when incarnations began; few do."""

    def age_s(self, incarnation: Incarnation) -> float | None:
        """How long ago an incarnation began; None if that is not known."""
        ...


@runtime_checkable
class SweepsProofs(Protocol):
    """A `Health` that keeps proofs of death, and can remove those that are old."""

    def sweep(self) -> int:
        """Look at a few proofs and remove the old ones; return how many. Quick: called on the event
        loop."""
        ...


@runtime_checkable
class JudgesByPlace(Protocol):
    """A `Health` that asks a server about the places in which processes run.

    A node's record says its place. Verdicts come from what the server said last, while `run` runs.
    """

    async def find_place(self) -> str:
        """Where this process runs, for its record.

        Raises `StoreUnavailable` if the server does not answer now, and `ConfigError` if it never
        will as things are.
        """
        ...

    def placed(self, incarnation: Incarnation, place: str) -> None:
        """The record of an incarnation names its place. Called before `verdict`, each time."""
        ...

    async def run(self, proved: Callable[[], None], shards: Callable[[], int]) -> None:
        """Ask the server until cancelled, and tell it how much would move if this process ended.

        `proved` is called when there is a new proof; `shards` says how many are at home here.
        """
        ...

    async def close(self) -> None:
        """Close the connections to the server."""
        ...
