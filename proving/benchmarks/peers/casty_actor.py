"""casty: virtual actors with a core in Rust; a node, and a client of it. Nothing is written."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

from casty import ActorSystem, Askable, Client, Cluster, Context, Limits, actor

from proving.benchmarks.caller import PAYLOAD, Arrivals, Caller

ARRIVALS = Arrivals()
LONG = timedelta(hours=1)


@dataclass(frozen=True)
class Say(Askable[bytes]):
    """To be given back."""

    data: bytes


@dataclass(frozen=True)
class Note:
    """To be counted."""

    data: bytes


@dataclass(frozen=True)
class Count(Askable[int]):
    """How many?"""


@dataclass(frozen=True)
class Reach(Askable[int]):
    """Answer once so many have run."""

    wanted: int


@actor(initial=0, idle_after=LONG)
async def echo(ctx: Context[int, Say | Note]) -> None:
    """Does as little as an actor can."""
    async for message in ctx.inbox:
        if isinstance(message, Say):
            message.reply_to.tell(message.data)
        else:
            ARRIVALS.note()


@actor(initial=0, idle_after=LONG)
async def tally(ctx: Context[int, Count | Reach]) -> None:
    """Knows how many have run at this node."""
    async for message in ctx.inbox:
        if isinstance(message, Reach):
            await ARRIVALS.reach(message.wanted)
        message.reply_to.tell(ARRIVALS.count)


class Casty(Caller):
    """Refs of a client, or of the node itself."""

    def __init__(self, system: Any, refs: Sequence[Any]) -> None:
        self._system, self._refs = system, refs
        self._tally = system.ref(tally, "tally")
        self._made = count()

    @classmethod
    async def to(cls, system: Any, entities: int) -> Casty:
        """A caller of actors that have all been started."""
        refs = [system.ref(echo, str(number)) for number in range(entities)]
        for ref in refs:
            await ref.ask(Say(PAYLOAD))
        return cls(system, refs)

    async def ask(self, number: int) -> None:
        """One actor after the other."""
        await self._refs[number % len(self._refs)].ask(Say(PAYLOAD))

    async def new(self, number: int) -> None:
        """A key that nobody had."""
        key = f"new-{os.getpid()}-{next(self._made)}"
        await self._system.ref(echo, key).ask(Say(PAYLOAD))

    async def begin(self, part: int) -> int:
        """What the node has seen, of whomever."""
        return int(await self._tally.ask(Count()))

    async def send(self, first: int, count: int) -> None:
        """One actor after the other."""
        refs = self._refs
        for number in range(first, first + count):
            refs[number % len(refs)].tell(Note(PAYLOAD))

    async def confirm(self, total: int) -> None:
        """An ask."""
        await self._tally.ask(Reach(total))


@asynccontextmanager
async def server(options: dict[str, Any]) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """A node alone, on a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    async with ActorSystem(cluster=Cluster(bind=where), ask_timeout=timedelta(minutes=1)) as system:
        yield where, {"casty": await Casty.to(system, options["entities"])}


@asynccontextmanager
async def client(options: dict[str, Any]) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """A client of that node."""
    async with Client(
        seeds=(options["where"],), limits=Limits(), ask_timeout=timedelta(minutes=1)
    ) as connected:
        yield options["where"], {"casty": await Casty.to(connected, options["entities"])}


PARTS = {"server": server, "client": client}
