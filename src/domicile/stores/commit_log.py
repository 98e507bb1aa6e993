"""A commit as the log of a store keeps it, for checkers and tools."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueuedCommit:
    """Who committed what, and when by the clock of this machine; `expiry`: it ended leases.

    `guessed`: the log has no time of it, and `at` is that of the next one that has.
    """

    revision: int
    at: float
    by: str
    puts: list[tuple[bytes, bytes, str | None]]
    deletes: list[bytes]
    expiry: bool
    guessed: bool = False
