"""Callers that wait no more: what has not started is not started, what is asked for them ends with
their time, and a handler that runs is interrupted only if it says that it may be."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from domicile import Entity, MaybeExecuted, Node, NotExecuted, Settings, handler
from domicile.core.ids import ShardKey
from domicile.testing import Sim, simulated

SEEDS = 3
FEW = Settings(shards=8)
LOG: list[Any] = []


class Clerk(Entity, name="impatience.clerk"):
    """Notes what it does."""

    @handler
    async def note(self, name: str) -> None:
        LOG.append(name)

    @handler
    async def work(self, name: str, for_s: float) -> str:
        LOG.append(f"{name} begins")
        try:
            await asyncio.sleep(for_s)
        except asyncio.CancelledError:
            LOG.append(f"{name} is cancelled")
            raise
        LOG.append(f"{name} ends")
        return name

    @handler(cancellable=True)
    async def stoppable(self, name: str, for_s: float) -> None:
        await self.work(name, for_s)

    @handler(shared=True)
    async def look(self, name: str, for_s: float) -> None:
        await self.work(name, for_s)

    @handler
    async def delegate(self, to: str, wait_s: float) -> str:
        """Asks somebody who takes long, after a while of its own."""
        await asyncio.sleep(wait_s)
        began = self.now()
        try:
            return await self.ref(Clerk, to).ask(Clerk.work, "nested", 100.0)
        except (NotExecuted, MaybeExecuted) as error:
            LOG.append((type(error).__name__, (self.now() - began).total_seconds(), str(error)))
            return "gave up"


async def begun(sim: Sim, name: str) -> None:
    await sim.wait_until(lambda: f"{name} begins" in LOG)


def spawned(sim: Sim, method: Any, *args: Any, id: str = "c", **options: Any) -> asyncio.Task[Any]:
    ref = sim.ref(Clerk, id)
    asked = ref.options(**options) if options else ref
    return asyncio.get_running_loop().create_task(asked.ask(method, *args))


def open_at_client(sim: Sim, shard: ShardKey) -> int:
    """Messages of the test's own client that count against its window."""
    life = sim.client_life
    assert life is not None
    return life.runtime.sending.senders[shard].open


# time is passed down


@simulated(entities=[Clerk], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_nested_ask_ends_with_the_time_of_its_caller(sim: Sim) -> None:
    LOG.clear()
    outer = sim.ref(Clerk, "outer").options(timeout_s=2.0)
    assert await outer.ask(Clerk.delegate, "inner", 0.5) == "gave up", "in time to say so"
    ((kind, after_s, _),) = [entry for entry in LOG if isinstance(entry, tuple)]
    assert kind == "MaybeExecuted"
    assert 1.35 < after_s < 1.47


@simulated(entities=[Clerk], nodes=2, seeds=SEEDS, settings=FEW)
async def test_nothing_is_asked_for_a_caller_that_waits_no_more(sim: Sim) -> None:
    LOG.clear()
    outer = sim.ref(Clerk, "outer").options(timeout_s=1.0)
    with pytest.raises(MaybeExecuted):
        await outer.ask(Clerk.delegate, "inner", 3.0)
    await sim.wait_until(lambda: bool(LOG))
    await sim.advance(1)
    ((kind, after_s, text),) = LOG
    assert (kind, after_s) == ("Unavailable", 0.0)
    assert "no longer waits" in text


@simulated(entities=[Clerk], nodes=2, seeds=SEEDS, settings=FEW)
async def test_nobody_waits_for_a_tell_so_that_what_it_asks_has_its_own_time(sim: Sim) -> None:
    LOG.clear()
    await sim.ref(Clerk, "outer").options(timeout_s=1.0).tell(Clerk.delegate, "inner", 2.0)
    await sim.wait_until(lambda: any(isinstance(entry, tuple) for entry in LOG))
    ((kind, after_s, _),) = [entry for entry in LOG if isinstance(entry, tuple)]
    assert kind == "MaybeExecuted"
    assert after_s == pytest.approx(FEW.ask_timeout_s, abs=0.1)


@simulated(entities=[Clerk], nodes=2, seeds=SEEDS, settings=FEW)
async def test_an_expired_request_is_not_executed(sim: Sim) -> None:
    LOG.clear()
    long = spawned(sim, Clerk.work, "long", 3.0)
    await begun(sim, "long")
    with pytest.raises(MaybeExecuted):
        await sim.ref(Clerk, "c").options(timeout_s=1.0).ask(Clerk.note, "late")
    await long
    await sim.ref(Clerk, "c").ask(Clerk.note, "next")
    assert LOG == ["long begins", "long ends", "next"]


# what nobody waits for is not started


@simulated(entities=[Clerk], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_request_whose_caller_is_cancelled_is_not_started(sim: Sim) -> None:
    LOG.clear()
    long = spawned(sim, Clerk.work, "long", 2.0)
    await begun(sim, "long")
    called_off = [spawned(sim, Clerk.note, f"called off {number}") for number in range(5)]
    kept = [spawned(sim, Clerk.note, f"kept {number}") for number in range(3)]
    await sim.advance(0.2)
    shard = sim.shard(Clerk, "c")
    assert open_at_client(sim, shard) == 8
    for task in called_off:
        task.cancel()
    await sim.advance(0.5)
    assert open_at_client(sim, shard) == 3, "their places are free long before anything starts"
    await asyncio.gather(long, *kept)
    assert LOG == ["long begins", "long ends", "kept 0", "kept 1", "kept 2"]
    assert sim.history.counts["request.called_off"] == 5


@simulated(entities=[Clerk], nodes=2, seeds=SEEDS, settings=FEW)
async def test_readers_go_on_when_the_writer_before_them_is_called_off(sim: Sim) -> None:
    LOG.clear()
    reader = spawned(sim, Clerk.look, "reader", 5.0)
    await begun(sim, "reader")
    writer = spawned(sim, Clerk.note, "writer")
    await sim.advance(0.2)
    second = spawned(sim, Clerk.look, "second", 1.0)
    await sim.advance(0.2)
    assert LOG == ["reader begins"]
    writer.cancel()
    await second
    assert LOG == ["reader begins", "second begins", "second ends"]
    await reader


@simulated(entities=[Clerk], nodes=1, seeds=SEEDS, settings=FEW)
async def test_a_local_request_is_called_off_as_well(sim: Sim) -> None:
    LOG.clear()

    async def inside(node: Node) -> None:
        clerk = node.ref(Clerk, "c")
        loop = asyncio.get_running_loop()
        long = loop.create_task(clerk.ask(Clerk.work, "long", 2.0))
        await asyncio.sleep(0.1)
        called_off = loop.create_task(clerk.ask(Clerk.note, "called off"))
        await asyncio.sleep(0.1)
        called_off.cancel()
        await long
        await clerk.ask(Clerk.note, "next")

    sim.spawn(0, inside)
    await sim.wait_until(lambda: "next" in LOG)
    assert LOG == ["long begins", "long ends", "next"]


@simulated(entities=[Clerk], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_draining_shard_does_not_wait_for_what_is_called_off(sim: Sim) -> None:
    LOG.clear()
    long = spawned(sim, Clerk.work, "long", 1.0)
    await begun(sim, "long")
    task = spawned(sim, Clerk.note, "called off")
    await sim.advance(0.1)
    to = (sim.owner(Clerk, "c") + 1) % 2
    await sim.wish(sim.shard(Clerk, "c"), to)
    task.cancel()
    await long
    await sim.wait_until(lambda: sim.owner(Clerk, "c") == to and sim.settled())
    await sim.ref(Clerk, "c").ask(Clerk.note, "next")
    assert LOG == ["long begins", "long ends", "next"]


@simulated(entities=[Clerk], nodes=2, seeds=5, settings=FEW, rough=True)
async def test_order_holds_among_what_is_and_what_is_not_called_off(sim: Sim) -> None:
    """The checkers judge order, at most once and honest outcomes (I5, I9)."""
    tasks = [
        spawned(sim, Clerk.work, f"{number}", 0.02, id=f"c{number % 4}") for number in range(80)
    ]
    for number in range(0, 80, 3):
        await sim.advance(0.01)
        tasks[number].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    done = [result for result in results if isinstance(result, str)]
    assert len(done) > 20


# what runs goes on


@simulated(entities=[Clerk], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_handler_is_not_interrupted_by_its_callers_impatience(sim: Sim) -> None:
    LOG.clear()
    task = spawned(sim, Clerk.work, "work", 2.0)
    await begun(sim, "work")
    task.cancel()
    await sim.wait_until(lambda: "work ends" in LOG)
    assert LOG == ["work begins", "work ends"]


@simulated(entities=[Clerk], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_cancellable_handler_ends_with_its_caller(sim: Sim) -> None:
    LOG.clear()
    task = spawned(sim, Clerk.stoppable, "work", 20.0)
    await begun(sim, "work")
    await sim.advance(0.5)
    task.cancel()
    await sim.ref(Clerk, "c").ask(Clerk.note, "next")
    assert LOG == ["work begins", "work is cancelled", "next"]


@simulated(entities=[Clerk], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_cancellable_handler_ends_with_its_callers_time(sim: Sim) -> None:
    LOG.clear()
    with pytest.raises(MaybeExecuted):
        await sim.ref(Clerk, "c").options(timeout_s=1.0).ask(Clerk.stoppable, "work", 20.0)
    await sim.wait_until(lambda: "work is cancelled" in LOG, timeout_s=1.0)
    await sim.ref(Clerk, "c").ask(Clerk.note, "next")
    assert LOG == ["work begins", "work is cancelled", "next"]
