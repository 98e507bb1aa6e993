"""The measured processes of the durable benchmarks: a home of durable entities, and its clients.

Run by `proving.benchmarks.part`. Only what `domicile` exports is used, as a program would; the home
collects garbage as `domicile run` does. An event
has 100 bytes as it is stored, a reply 16; each ask has a key of its own.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import msgspec

from domicile import Client, EventSourced, Node, Ref, Settings, connect, handler
from domicile.observe import Metrics
from domicile.ops.serve import collect_rarely
from proving.benchmarks.caller import closed_loop, summary
from proving.benchmarks.part import Options, Part

FILLING = b"x" * 90
REPLY = b"r" * 14
EVENTS = 200
"""Events of one entity that is replayed."""


class Noted(msgspec.Struct, frozen=True, array_like=True):
    """An event of 100 bytes in its stored form: its name and this."""

    data: bytes


class Notebook(EventSourced[int, Noted], name="notebook"):
    """Keeps what it is told, and knows how much that is."""

    @staticmethod
    def initial(id: str, /) -> int:
        """Nothing."""
        return 0

    @staticmethod
    def apply(state: int, event: Noted, /) -> int:
        """One more."""
        return state + 1

    @handler
    async def note(self, data: bytes) -> bytes:
        """Keep it."""
        await self.persist(Noted(data))
        return REPLY

    @handler
    async def fill(self, data: bytes, times: int) -> int:
        """Keep it so many times."""
        return await self.persist(*[Noted(data)] * times)

    @handler
    async def total(self) -> int:
        """How much there is."""
        return await self.state()


class Durable:
    """Asks of durable entities, by a client or by the home itself."""

    def __init__(self, client: Client, entities: int) -> None:
        self._client = client
        self._refs = [client.ref(Notebook, str(number)) for number in range(entities)]
        self._keys = (f"{os.getpid()}-{number}" for number in count())

    async def run(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """One measurement, by the name of a method."""
        measure: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
        measure = getattr(self, wanted["what"])
        return await measure(wanted)

    async def asks(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Keyed asks in a closed loop, of so many entities, after a warm-up."""
        refs = self._refs[: wanted["entities"]]
        await each(self._note, refs, wanted["depth"])
        warmed = len(refs)

        async def ask(number: int) -> None:
            await self._note(refs[number % len(refs)])

        if wanted["warm_s"] > 0:
            warmed += (await closed_loop(ask, wanted["depth"], wanted["warm_s"]))["count"]
        gc.collect()
        told = await closed_loop(ask, wanted["depth"], wanted["seconds"])
        return {**told, "all": told["count"] + warmed}

    async def many(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """So many keyed asks, of all entities in turn."""
        refs = [self._refs[number % len(self._refs)] for number in range(wanted["count"])]
        return await timed(each(self._note, refs, wanted["depth"]), len(refs))

    async def fill(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Entities for `replay`, with many events each, and for `cold`, with one."""

        async def long(ref: Ref[Notebook]) -> None:
            await ref.options(key="fill").ask(Notebook.fill, FILLING, EVENTS)

        began = time.perf_counter()
        await each(long, self._named("long", wanted["long"]), 16)
        await each(self._note, self._named("short", wanted["short"]), wanted["depth"])
        return {"took_s": time.perf_counter() - began}

    async def know(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Entities without events, so that what follows finds its shards claimed."""
        await each(_total(0), self._named("new", wanted["count"]), wanted["depth"])
        return {}

    async def replay(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Entities that nobody has asked yet, with many events each."""
        refs = self._named("long", wanted["long"])
        return await timed(each(_total(EVENTS), refs, wanted["depth"]), len(refs) * EVENTS)

    async def cold(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Entities that nobody has asked yet, with one event each."""
        refs = self._named("short", wanted["short"])
        return await timed(each(_total(1), refs, wanted["depth"]), len(refs))

    def _named(self, kind: str, many: int) -> list[Ref[Notebook]]:
        return [self._client.ref(Notebook, f"{kind}-{number}") for number in range(many)]

    async def _note(self, ref: Ref[Notebook]) -> None:
        await ref.options(key=next(self._keys)).ask(Notebook.note, FILLING)


def _total(wanted: int) -> Callable[[Ref[Notebook]], Awaitable[None]]:
    async def ask(ref: Ref[Notebook]) -> None:
        found = await ref.ask(Notebook.total)
        if found != wanted:
            raise AssertionError(f"{ref} has {found} events instead of {wanted}")

    return ask


async def each(
    one: Callable[[Ref[Notebook]], Awaitable[None]], refs: Sequence[Ref[Notebook]], depth: int
) -> None:
    """All of them, so many at a time."""
    left = iter(refs)

    async def work() -> None:
        for ref in left:
            await one(ref)

    await asyncio.gather(*(work() for _ in range(min(depth, len(refs)))))


async def timed(work: Awaitable[None], many: int) -> dict[str, Any]:
    """What took how long."""
    gc.collect()
    began = time.perf_counter()
    await work
    took_s = time.perf_counter() - began
    return {**summary(many, took_s, [took_s]), "all": many}


def settings() -> Settings:
    """Nobody is passivated or refused while it is measured."""
    return Settings(idle_s=3_600.0, settle_s=0.05, ask_timeout_s=60.0, node_wait_s=60.0, ttl_s=30.0)


@asynccontextmanager
async def home(options: Options) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """A node that is home to everything, and can call itself."""
    node = Node(
        options["where"], entities=[Notebook], journal=options.get("journal"), node_id="home",
        settings=settings(), meter=Metrics(),
    )  # fmt: skip
    async with node:
        # As `domicile run` does.
        collect_rarely()
        yield options["where"], {"durable": Durable(node, options["entities"])}


@asynccontextmanager
async def client(options: Options) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """A client of that home."""
    async with connect(options["where"], settings=settings(), meter=Metrics()) as connected:
        yield options["where"], {"durable": Durable(connected, options["entities"])}


PARTS: dict[str, Part] = {"server": home, "client": client}
