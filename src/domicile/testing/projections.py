"""A projection in memory, for tests of code that reads journals. It judges what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from domicile.persist.projections import JournalEvent


class MemoryProjection:
    """Implements `domicile.Projection`: keeps all events and offsets, as if in one transaction.

    It raises `AssertionError` for an event that it has already, or that is out of order.
    """

    def __init__(self) -> None:
        self.offsets: dict[int, int] = {}
        """The stored offset of each shard."""
        self.events: list[JournalEvent[Any]] = []
        """All events, in the order in which they came."""

    async def offset(self, shard: int, /) -> int:
        """As `Projection.offset`."""
        return self.offsets.get(shard, 0)

    async def apply(self, shard: int, events: Sequence[JournalEvent[Any]], upto: int, /) -> None:
        """As `Projection.apply`."""
        last = self.offsets.get(shard, 0)
        for one in events:
            assert last < one.offset <= upto, f"shard {shard} has offset {last}, then came {one}"
            last = one.offset
        assert upto >= last, f"shard {shard} went back from offset {last} to {upto}"
        self.offsets[shard] = upto
        self.events += events

    def of(self, id: str) -> list[Any]:
        """The events of the entities with an id."""
        return [one.event for one in self.events if one.id == id]
