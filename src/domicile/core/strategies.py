"""Where shards should be: strategies by name, and what a user's own function gets and gives.

Called by the planner, and by the coordinator's shell for a user's function. A strategy is pure:
it says where shards belong, never when they may go there (C4), nor how many at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seat:
    """A node that may receive shards."""

    node: str
    capacity: float = 1.0
    version: str = ""


@dataclass(frozen=True, slots=True)
class Situation:
    """One role as a strategy sees it."""

    role: str
    homes: tuple[str, ...]
    """Of each shard by number: the node id of its home, or where it is going; "" if none."""
    seats: tuple[Seat, ...]
    """Nodes that may receive, the oldest first."""


Wanted = Mapping[int, str]
"""Node ids by shard number; shards left out stay, or go where the default strategy says."""

Strategy = Callable[[Situation], Wanted | Awaitable[Wanted]]
"""A user's own function, plain or async."""

NAMES = ("least_shards", "consistent_ring", "ranges")
