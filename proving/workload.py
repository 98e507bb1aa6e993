"""What a campaign's clusters do: rooms that chat, ask each other in chains, and keep ledgers.

The entities know nothing of the campaign; whether they were served right is read off the
history alone.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random

from domicile.core.hashing import shard_of
from domicile.core.ids import EntityKey, ShardKey
from domicile.entity.model.entity import Entity
from domicile.entity.model.handlers import handler
from domicile.errors import Rejection
from domicile.persist.eventsourced import EventSourced


class Enough(Rejection, name="campaign.Enough"):
    """A ledger's refusal."""


@dataclass(frozen=True)
class Noted:
    """A ledger's event."""

    what: int


class Room(Entity, name="room"):
    """Has a little state, takes a little time, talks to other rooms."""

    notes: int = 0

    async def on_stop(self) -> None:
        """Takes a moment, sometimes."""
        if self.notes % 3 == 0:
            await asyncio.sleep(0.001)

    @handler
    async def note(self, what: int) -> int:
        """Ends in the turn that it starts in."""
        self.notes += 1
        return what

    @handler
    async def think(self, seconds: float) -> int:
        """Suspends for a while."""
        await asyncio.sleep(seconds)
        return self.notes

    @handler(shared=True)
    async def peek(self, seconds: float) -> int:
        """Beside other readers."""
        await asyncio.sleep(seconds)
        return self.notes

    @handler
    async def relay(self, seconds: float, path: list[str]) -> int:
        """Think, then tell and ask the next room on the path, and wait for its answer."""
        await asyncio.sleep(seconds)
        if not path:
            return 0
        there = self.ref(Room, path[0])
        await there.tell(Room.note, 1)
        return 1 + await there.ask(Room.relay, seconds, path[1:])


class Ledger(EventSourced[list[int], Noted], name="ledger"):
    """Durable numbers."""

    @staticmethod
    def initial(id: str, /) -> list[int]:
        """Nothing noted."""
        return []

    @staticmethod
    def apply(state: list[int], event: Noted, /) -> list[int]:
        """One more."""
        return [*state, event.what]

    @handler
    async def note(self, what: int) -> int:
        """Persist, then answer with how many there are."""
        if what < 0:
            raise Enough(what)
        return len(await self.persist(Noted(what)))

    @handler(shared=True)
    async def total(self) -> int:
        """How many there are."""
        return len(await self.state())


ENTITIES: tuple[type[Entity], ...] = (Room, Ledger)


def rooms_by_shard(random: Random, shards: int, hot: int, each: int) -> dict[ShardKey, list[str]]:
    """Some hot shards with several room ids each, so that rooms of one shard can meet."""
    chosen: dict[ShardKey, list[str]] = {
        ShardKey("default", number): [] for number in random.sample(range(shards), hot)
    }
    number = 0
    while any(len(ids) < each for ids in chosen.values()):
        id = f"r{number}"
        number += 1
        shard = ShardKey("default", shard_of(EntityKey("room", id), shards))
        if shard in chosen and len(chosen[shard]) < each:
            chosen[shard].append(id)
    return chosen
