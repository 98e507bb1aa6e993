"""Entities that note what they do, and short ways to move, find and await them in a simulation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from domicile import (
    Entity,
    Rejection,
    Settings,
    handler,
)
from domicile.testing import Sim

FEW = Settings(shards=8)
SEEDS = 2

LOG: list[Any] = []
"""What entities did, in the order of virtual time; emptied at the start of each run."""


class Note:
    """A resource."""

    def __init__(self, text: str) -> None:
        self.text = text


class Missing:
    """A resource that no node has."""


@asynccontextmanager
async def notes() -> AsyncGenerator[Mapping[type[Any], Any]]:
    yield {Note: Note("hello")}


class Broke(Rejection, name="room.broke"):
    """Crosses the wire as itself."""

    def __init__(self, missing: int, currency: str) -> None:
        super().__init__(missing, currency)
        self.missing = missing


class Room(Entity, name="room"):
    def __init__(self) -> None:
        self.count = 0

    async def on_start(self) -> None:
        LOG.append(("on_start", self.id, self.epoch))

    async def on_stop(self) -> None:
        LOG.append(("on_stop", self.id, self.epoch))

    @handler
    async def enter(self) -> int:
        self.count += 1
        LOG.append(("enter", self.id, self.epoch))
        return self.count

    @handler
    async def work(self, name: str, for_s: float) -> str:
        LOG.append(("begin", name))
        try:
            await asyncio.sleep(for_s)
        except asyncio.CancelledError:
            LOG.append(("cancelled", name))
            raise
        LOG.append(("end", name))
        return name

    @handler(shared=True)
    async def look(self, name: str, for_s: float) -> int:
        LOG.append(("begin", name))
        await asyncio.sleep(for_s)
        LOG.append(("end", name))
        return self.count

    @handler(timeout_s=2)
    async def hurry(self, for_s: float) -> None:
        await asyncio.sleep(for_s)

    @handler
    async def fail(self) -> None:
        self.count += 10
        raise KeyError("no such chair")

    @handler
    async def pay(self, amount: int) -> None:
        raise Broke(amount, "euros")

    @handler
    async def leave(self) -> None:
        self.passivate()
        LOG.append(("leave", self.id))

    @handler
    async def text(self, data: str) -> int:
        return len(data)

    @handler
    async def note(self) -> str:
        return self.resource(Note).text

    @handler
    async def missing(self) -> None:
        self.resource(Missing)

    @handler
    async def numbers(self) -> tuple[float, float]:
        return self.now().timestamp(), self.random.random()

    @handler
    async def send_to(self, other: str) -> int:
        return await self.ref(Room, other).ask(Room.enter)

    async def hidden(self) -> None: ...


class Alarmed(Entity, name="alarmed"):
    @handler
    async def ring_in(self, delay_s: float, name: str) -> None:
        self.after(delay_s, self.ring, name, at=self.now().timestamp())

    @handler
    async def both(self) -> None:
        self.after(1, self.ring, "ring", at=0.0)
        self.after(1, self.chime)

    @handler
    async def busy(self, for_s: float) -> None:
        LOG.append("busy")
        await asyncio.sleep(for_s)
        LOG.append("free")

    @handler
    async def leave(self) -> None:
        self.passivate()

    async def ring(self, name: str, at: float) -> None:
        LOG.append((name, self.now().timestamp() - at))

    async def chime(self) -> None:
        LOG.append("chime")
        raise ValueError("a failing alarm")


class Sleeper(Entity, name="sleeper", idle_s=20):
    async def on_start(self) -> None:
        LOG.append("on_start")

    async def on_stop(self) -> None:
        LOG.append("on_stop")

    @handler
    async def touch(self) -> None: ...


class Hesitant(Entity, name="hesitant"):
    """Fails to start while `LOG` is shorter than three entries."""

    async def on_start(self) -> None:
        LOG.append(self.now())
        await asyncio.sleep(0.01)
        if len(LOG) < 3:
            raise OSError("not yet")

    @handler(shared=True)
    async def hello(self) -> str:
        return "hello"


class Stubborn(Entity, name="stubborn"):
    """Does not end by itself."""

    async def on_start(self) -> None:
        if self.id == "never starts":
            await asyncio.sleep(1_000)

    async def on_stop(self) -> None:
        LOG.append("on_stop")
        if self.id == "fails to stop":
            raise OSError("cannot save")
        try:
            await asyncio.sleep(1_000)
        except asyncio.CancelledError:
            LOG.append("cut short")
            raise

    @handler
    async def hello(self) -> None: ...


async def move(sim: Sim, kind: type[Entity], id: str) -> int:
    """Move an entity's shard to another node; returns that node once it is home."""
    to = (sim.owner(kind, id) + 1) % len(sim.nodes)
    await sim.wish(sim.shard(kind, id), to)
    await sim.wait_until(lambda: sim.owner(kind, id) == to and sim.settled())
    return to


async def begun(sim: Sim, name: str) -> None:
    await sim.wait_until(lambda: ("begin", name) in LOG)


def cell_of(sim: Sim, kind: type[Entity], id: str) -> Any:
    node = sim.nodes[sim.owner(kind, id)].node
    assert node is not None
    assert node.life is not None
    cells = node.life.runtime.hosts[sim.shard(kind, id)].cells
    return next((cell for key, cell in cells.items() if key.id == id), None)


def submitted(sim: Sim, method: str) -> int:
    events = sim.history.events
    return sum(e.kind == "submit" and e.fields["method"] == method for e in events)
