"""What a campaign's clusters do: rooms that chat, ask each other in chains, and keep ledgers.

The entities know nothing of the campaign; whether they were served right is read off the
history alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from domicile.core.hashing import shard_of
from domicile.core.ids import EntityKey, ShardKey
from domicile.entity.model.entity import Entity
from domicile.entity.model.handlers import handler
from domicile.errors import DomicileError, Rejection
from domicile.persist.eventsourced import EventSourced
from domicile.testing.history import History


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

    @handler(shared=True)
    async def cling(self, seconds: float, cleaning_s: float, friend: str) -> None:
        """Suspends for a while; if it is cancelled, it takes its time, whoever cancels it again,
        and tries to tell a friend."""
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            for _ in range(round(cleaning_s / 0.1)):
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.1)
                with suppress(DomicileError):
                    await self.ref(Room, friend).tell(Room.note, 1)
            raise

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

    @handler(shared=True)
    async def read(self, seconds: float) -> int:
        """The same after a while, beside other readers."""
        await asyncio.sleep(seconds)
        return len(await self.state())


class Notebook:
    """Where entities note what they know: the history of their run."""

    def __init__(self) -> None:
        self.history: History | None = None

    @asynccontextmanager
    async def resources(self) -> AsyncGenerator[dict[type[Any], Any]]:
        """Given to every node."""
        yield {Notebook: self}

    def note(self, kind: str, clerk: Clerk, **more: object) -> None:
        """An event of the history."""
        assert self.history is not None, "a run has begun"
        self.history.event(kind, type="clerk", id=clerk.id, epoch=clerk.epoch, **more)

    def heard(self, type: str, id: str, seq: int, value: int) -> None:
        """A durable entity has told another one its event number `seq`."""
        assert self.history is not None, "a run has begun"
        self.history.event("acked", type=type, id=id, seq=seq, value=value)


class Clerk(Entity, name="clerk", carry=True):
    """Counts, and takes its count and its alarm along when it moves."""

    count: int = 0

    async def on_start(self) -> None:
        """Note with which count it begins here."""
        self.resource(Notebook).note("woke", self, count=self.count)

    @handler
    async def add(self) -> int:
        """Ends in the turn that it starts in."""
        self.count += 1
        self.resource(Notebook).note("increased", self, count=self.count)
        return self.count

    @handler
    async def remind(self, delay_s: float, token: int) -> None:
        """Be called back, instead of what was wished before."""
        self.resource(Notebook).note("armed", self, delay=delay_s, token=token)
        self.after(delay_s, self.ring, token)

    async def ring(self, token: int) -> None:
        """What it wished for."""
        self.resource(Notebook).note("rang", self, token=token)


ENTITIES: tuple[type[Entity], ...] = (Room, Ledger, Clerk)


def clerk_of(shard: ShardKey, shards: int) -> str:
    """The id of a clerk at home in a shard."""
    number = 0
    while shard_of(EntityKey("clerk", f"c{number}"), shards) != shard.shard:
        number += 1
    return f"c{number}"


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
