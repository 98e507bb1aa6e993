"""Asks between entities of one node, which run within their calls: order, one at a time, and room
for others, while shards move, entities stop and callers lose their patience."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from domicile import Entity, HandlerFailed, Node, Settings, handler
from domicile.testing import Sim, simulated

SEEDS = 6
SENDERS = 3
MESSAGES = 150
IDS = tuple(f"p{n}" for n in range(6))


class Ledger:
    """What ran, in virtual time; one for each run."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], list[int]] = {}
        self.sent: dict[tuple[str, str], int] = {}
        self.owed: list[tuple[str, str, int]] = []
        self.inside: dict[str, list[bool]] = {}
        self.within = 0
        """Handlers that began while another one's first step was not over."""

    def number(self, sender: str, to: str) -> int:
        self.sent[sender, to] = self.sent.get((sender, to), 0) + 1
        return self.sent[sender, to]


LEDGER = Ledger()


class Page(Entity, name="page", idle_s=0.5):
    """Notes who sent it which number, and does something with it."""

    async def on_stop(self) -> None:
        if self.id == IDS[0]:
            await asyncio.sleep(0.002)

    def _begin(self, sender: str, n: int, shared: bool = False) -> None:
        LEDGER.seen.setdefault((sender, self.id), []).append(n)
        inside = LEDGER.inside.setdefault(self.id, [])
        assert not inside or (shared and all(inside)), f"{self.id} runs {inside} and {shared}"
        inside.append(shared)

    def _end(self, shared: bool = False) -> None:
        LEDGER.inside[self.id].remove(shared)

    @property
    def _node(self) -> str:
        """Who sends what handlers send: the incarnation that this entity is at home with."""
        cell: Any = self._domicile_context()
        return str(cell.host.runtime.me)

    @handler
    async def note(self, sender: str, n: int) -> int:
        self._begin(sender, n)
        self._end()
        return n

    @handler(shared=True)
    async def read(self, sender: str, n: int, for_s: float) -> int:
        self._begin(sender, n, shared=True)
        try:
            if for_s:
                await asyncio.sleep(for_s)
            return n
        finally:
            self._end(shared=True)

    @handler
    async def linger(self, sender: str, n: int, for_s: float) -> int:
        self._begin(sender, n)
        try:
            await asyncio.sleep(for_s)
            return n
        finally:
            self._end()

    @handler
    async def leave(self, sender: str, n: int) -> int:
        self._begin(sender, n)
        self.passivate()
        self.after(0.001, self.tick)
        self._end()
        return n

    @handler
    async def pass_on(self, sender: str, n: int, path: list[str], aside: bool) -> int:
        """Ask the next of a path, at once or from a task of its own, and tell it, too."""
        self._begin(sender, n)
        try:
            if path:
                to, rest = path[0], path[1:]
                me, ref = self._node, self.ref(kind_of(to), to)
                LEDGER.within += 1
                await ref.tell(Page.note, me, LEDGER.number(me, to))
                if aside:
                    async with asyncio.TaskGroup() as group:
                        group.create_task(self._ask(me, to, rest))
                else:
                    await self._ask(me, to, rest)
            return n
        finally:
            self._end()

    async def _ask(self, me: str, to: str, rest: list[str]) -> None:
        n = LEDGER.number(me, to)
        await self.ref(kind_of(to), to).ask(Page.pass_on, me, n, rest, False)

    async def tick(self) -> None:
        inside = LEDGER.inside.setdefault(self.id, [])
        assert not inside, "an alarm runs alone"
        inside.append(False)
        await asyncio.sleep(0.001)
        inside.remove(False)


class Kept(Page, name="kept", idle_s=0.5, carry=True):
    """As a page; what it counts moves along."""

    count: int = 0


def kind_of(id: str) -> type[Page]:
    return Kept if id in IDS[::3] else Page


async def send_some(node: Node, random: Random, done: list[object]) -> None:
    """A mix of everything to everybody, numbered in the order of first awaits."""
    assert node.life is not None
    me = str(node.life.me)
    open_asks: list[asyncio.Task[object]] = []

    async def send(to: str, what: int) -> None:
        ref, n = node.ref(kind_of(to), to), LEDGER.number(me, to)
        if what < 6:
            LEDGER.owed.append((me, to, n))
        match what:
            case 0 | 1:
                assert await ref.ask(Page.note, me, n) == n
            case 2:
                await ref.tell(Page.note, me, n)
            case 3:
                assert await ref.ask(Page.leave, me, n) == n
            case 4:
                assert await ref.ask(Page.read, me, n, random.choice((0.0, 0.003))) == n
            case 5:
                # Upwards only: two that ask for each other would wait for good.
                path = [id for id in IDS if id > to and random.random() < 0.6]
                await ref.ask(Page.pass_on, me, n, path, random.random() < 0.5)
            case _:
                async with asyncio.timeout(random.choice((0.0, 0.001, 0.01))):
                    await ref.ask(Page.linger, me, n, 0.004)

    try:
        for _ in range(MESSAGES):
            to, what = random.choice(IDS), random.choice((0, 0, 0, 1, 2, 2, 3, 4, 5, 5, 6))
            if random.random() < 0.5 and what != 6:
                await send(to, what)
            else:
                task = asyncio.ensure_future(send(to, what))
                open_asks.append(task)
                if what == 6 and random.random() < 0.5:
                    asyncio.get_running_loop().call_later(random.random() / 200, task.cancel)
            if random.random() < 0.3:
                await asyncio.sleep(random.choice((0.0, 0.001, 0.02)))
        outcomes = await asyncio.gather(*open_asks, return_exceptions=True)
        impatient = (TimeoutError, asyncio.CancelledError)
        done += [o for o in outcomes if isinstance(o, BaseException) and type(o) not in impatient]
    except BaseException as error:
        done.append(error)
        raise
    finally:
        done.append(None)


@pytest.mark.scenario("RG-05", partial=True)
@simulated(entities=[Page, Kept], nodes=SENDERS, seeds=SEEDS, settings=Settings(shards=3))
async def test_any_mix_of_local_and_remote_calls_keeps_order_and_one_at_a_time(sim: Sim) -> None:
    global LEDGER
    LEDGER = Ledger()
    random = sim.world.stream("local asks")
    done: list[object] = []
    for index in range(SENDERS):
        sim.spawn(index, lambda node: send_some(node, Random(random.random()), done))
    moves = 0
    while done.count(None) < SENDERS:
        id = random.choice(IDS)
        shard = sim.shard(kind_of(id), id)
        await sim.wish(shard, random.randrange(SENDERS))
        await sim.advance(random.choice((0.01, 0.03, 0.06)))
        moves += 1
    assert done == [None] * SENDERS
    assert moves > 5
    await sim.wait_until(lambda: not any(LEDGER.inside.values()))
    await sim.advance(1.0)
    for (sender, to), numbers in LEDGER.seen.items():
        assert numbers == sorted(set(numbers)), f"{sender} to {to}: each at most once, in order"
    for sender, to, n in LEDGER.owed:
        assert n in LEDGER.seen[sender, to], f"message {n} of {sender} to {to} is lost"
    assert LEDGER.within > 20


# depth


class Stair(Entity, name="stair"):
    @handler
    async def descend(self, depth: int) -> int:
        if depth == 0:
            return 0
        return 1 + await self.ref(Stair, f"s{depth}").ask(Stair.descend, depth - 1)


@pytest.mark.scenario("DX-16")
@simulated(entities=[Stair], nodes=1, seeds=1, settings=Settings(shards=2, chain=400))
async def test_long_chains_of_local_asks_do_not_exhaust_the_stack(sim: Sim) -> None:
    outcome: list[object] = []

    async def work(node: Node) -> None:
        try:
            for _ in range(2):
                outcome.append(await node.ref(Stair, "top").ask(Stair.descend, 300))
        except HandlerFailed as error:
            outcome.append(error)

    sim.spawn(0, work)
    await sim.wait_until(lambda: len(outcome) == 2)
    assert outcome == [300, 300]


# room for others


class Busy(Entity, name="busy"):
    @handler
    async def quick(self) -> int:
        return 1

    @handler
    async def burn(self) -> None:
        """Hold the event loop, as a handler that computes does."""
        ends = time.perf_counter() + 0.002
        while time.perf_counter() < ends:
            pass
        BURNT.append(TICKS[0])


BURNT: list[int] = []
TICKS = [0]


@asynccontextmanager
async def ticking() -> AsyncGenerator[None]:
    """A timer that others must leave room for."""
    loop = asyncio.get_running_loop()
    TICKS[0] = 0
    BURNT.clear()

    def tick() -> None:
        nonlocal timer
        TICKS[0] += 1
        timer = loop.call_later(0.001, tick)

    timer = loop.call_later(0.001, tick)
    try:
        yield
    finally:
        timer.cancel()


def test_a_task_that_asks_without_end_leaves_room_for_timers() -> None:
    async def main() -> None:
        async with Node("memory://endless", entities=[Busy], settings=Settings(shards=2)) as node:
            ref = node.ref(Busy, "b")
            await ref.ask(Busy.quick)
            async with ticking():
                for _ in range(500_000):
                    await ref.ask(Busy.quick)
                    if TICKS[0] >= 3:
                        return
                raise AssertionError("no timer came")

    asyncio.run(main())


def test_a_storm_of_messages_leaves_room_for_timers() -> None:
    # A busy machine stretches the time that each of them holds the loop.
    patient = Settings(shards=2, ask_timeout_s=120.0, node_wait_s=120.0)

    async def main() -> None:
        async with (
            Node("memory://storm", entities=[Busy], settings=patient) as node,
            ticking(),
        ):
            refs = [node.ref(Busy, f"b{n}") for n in range(400)]
            await asyncio.gather(*(ref.ask(Busy.quick) for ref in refs))
            for ref in refs:
                await ref.tell(Busy.burn)
            await asyncio.gather(*(ref.ask(Busy.quick) for ref in refs))
            assert len(BURNT) == len(refs)
            assert len(set(BURNT)) >= 3, "all of one batch ran in one turn of the loop"

    asyncio.run(main())
