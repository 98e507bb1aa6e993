"""A counter that lives in one process of a cluster, and the node that can be its home."""

from __future__ import annotations

from domicile import Entity, Node, handler

STORE = "sqlite:///.domicile/counter.db"


class Counter(Entity, name="counter"):
    """Counts in memory, for as long as it stays at home."""

    def __init__(self) -> None:
        self.total = 0

    @handler
    async def add(self, amount: int) -> int:
        """Count on and say how far."""
        self.total += amount
        return self.total


node = Node(STORE, entities=[Counter])
