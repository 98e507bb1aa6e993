"""A desk whose handlers do all that may go wrong within one step, and ways to ask it at home."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from domicile import Entity, Node, Rejection, Settings, handler
from domicile.entity.model.ref import Ref
from domicile.testing import Sim

FEW = Settings(shards=4)
SEEDS = 2

LAPSE_S = 8.0
"""Longer than a lease that nobody renews, shorter than callers wait."""

LOG: list[Any] = []
SEEN: contextvars.ContextVar[str] = contextvars.ContextVar("seen", default="nothing")


class Unfit:
    """Whether `Fussy` can be made: what a sender could make, its receiver may not."""

    now = False


@dataclass
class Fussy:
    n: int

    def __post_init__(self) -> None:
        if Unfit.now:
            raise LookupError("not today")


class Endless(Rejection, name="hot.endless"):
    """Its argument holds itself, so it can't travel."""

    def __init__(self, parts: list[Any]) -> None:
        super().__init__(parts)


def endless() -> list[Any]:
    parts: list[Any] = []
    parts.append(parts)
    return parts


class Desk(Entity, name="desk"):
    def __init__(self) -> None:
        self.count = 0
        self.items: list[int] = []
        self.given: list[list[int]] = []
        self.task: asyncio.Task[Any] | None = None

    @property
    def me(self) -> Ref[Desk]:
        return self.ref(Desk, self.id)

    @handler
    async def add(self, n: int = 1) -> int:
        self.count += n
        return self.count

    @handler
    async def slow(self, for_s: float) -> int:
        LOG.append("slow begins")
        await asyncio.sleep(for_s)
        LOG.append("slow ends")
        self.count += 1
        return self.count

    @handler
    async def fussy(self, what: Fussy) -> int:
        return what.n

    @handler
    async def endless_reply(self) -> list[Any]:
        return endless()

    @handler
    async def endless_rejection(self) -> None:
        raise Endless(endless())

    @handler
    async def fail(self, how: str) -> None:
        self.count += 1
        if how == "cancelled":
            raise asyncio.CancelledError
        if how == "closed":
            raise GeneratorExit
        raise ValueError(how)

    # shared ones

    @handler(shared=True)
    async def look(self, for_s: float = 0.0) -> int:
        LOG.append("look begins")
        if for_s:
            await asyncio.sleep(for_s)
        LOG.append("look ends")
        return id(self)

    @handler(shared=True)
    async def look_twice(self, via: str, inner_s: float) -> int:
        LOG.append("outer begins")
        other = self.ref(Desk, via or self.id)
        if via:
            await other.ask(Desk.pass_on, self.id, inner_s)
        else:
            await other.ask(Desk.look, inner_s)
        await asyncio.sleep(1)
        LOG.append("outer ends")
        return id(self)

    @handler
    async def pass_on(self, to: str, for_s: float) -> int:
        return await self.ref(Desk, to).ask(Desk.look, for_s)

    @handler(shared=True)
    async def leave_below(self) -> int:
        self.count = 7
        await self.me.ask(Desk.leave)
        await asyncio.sleep(1)
        return id(self)

    @handler(shared=True)
    async def leave(self) -> None:
        self.passivate()

    # in circles

    @handler
    async def ask_myself(self) -> int:
        return await self.me.ask(Desk.add)

    @handler
    async def ask_back(self, via: str) -> int:
        return await self.ref(Desk, via).ask(Desk.ask_for, self.id)

    @handler
    async def ask_for(self, id: str) -> int:
        return await self.ref(Desk, id).ask(Desk.add)

    @handler
    async def ask_unseen(self) -> str:
        """Ask itself where nobody can see who asks."""
        LOG.append("unseen begins")
        call = self.me.ask(Desk.add)
        try:
            contextvars.Context().run(call.send, None)
        except StopIteration:
            return "ran within"
        finally:
            call.close()
        return "waits"

    @handler
    async def mark(self, n: int) -> None:
        LOG.append(n)

    @handler
    async def have_marked(self, id: str, n: int) -> None:
        await self.ref(Desk, id).ask(Desk.mark, n)

    # tasks

    @handler(shared=True)
    async def work(self) -> str:
        self.task = asyncio.current_task()
        await asyncio.sleep(1_000)
        return "never"

    @handler(shared=True)
    async def interrupt(self) -> None:
        assert self.task is not None
        self.task.cancel()

    @handler
    async def interrupt_myself(self, suspend: bool) -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        if suspend:
            await asyncio.sleep(1)
        return "ended"

    # values

    @handler
    async def keep(self, items: list[int]) -> None:
        self.items = items

    @handler
    async def show(self) -> list[int]:
        return self.items

    @handler
    async def identity(self, text: str) -> int:
        return id(text)

    @handler
    async def echo(self, n: int, text: str) -> int:
        assert text
        return n

    @handler
    async def seen(self) -> str:
        return SEEN.get()

    # time

    @handler
    async def block(self, for_s: float) -> str:
        BLOCK(for_s)
        return "late"

    @handler
    async def block_below(self, id: str, for_s: float) -> str:
        await self.ref(Desk, id).ask(Desk.block, for_s)
        LOG.append("went on")
        return "late"


class Farewell(Entity, name="farewell"):
    """Its `on_stop` ends by cancelling the task it runs in."""

    @handler
    async def hello(self) -> None: ...

    async def on_stop(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        LOG.append("on_stop")
        task.cancel()
        await asyncio.sleep(1)


def BLOCK(for_s: float) -> None:  # noqa: N802
    """Replaced by tests in which a handler holds up its process."""


async def inside(sim: Sim, work: Callable[[Node], Awaitable[None]], index: int = 0) -> None:
    """Run work in a node's process, and wait for it."""
    outcome: list[BaseException | None] = []

    async def run(node: Node) -> None:
        try:
            await work(node)
        except BaseException as error:
            outcome.append(error)
        else:
            outcome.append(None)

    sim.spawn(index, run)
    await sim.wait_until(lambda: bool(outcome), timeout_s=60)
    if outcome[0] is not None:
        raise outcome[0]


async def warm(node: Node, id: str = "d") -> Ref[Desk]:
    """A ref whose asks run within their calls from now on."""
    ref = node.ref(Desk, id)
    await ref.ask(Desk.add, 0)
    await asyncio.sleep(0.1)
    assert node.life is not None
    runs = node.life.runtime.observer.turns
    call = ref.ask(Desk.add, 0)
    with pytest.raises(StopIteration):
        call.send(None)
    assert node.life.runtime.observer.turns == runs + 1
    LOG.clear()
    return ref


def runtime_of(sim: Sim) -> Any:
    life = sim.node(0).life
    assert life is not None
    return life.runtime
