"""Freezing, killing and closing simulated processes."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest

from domicile.testing import Sim
from domicile.testing.sim.loop import SimLoop, World
from domicile.testing.sim.sandbox import SimulationError


@pytest.fixture
def world() -> Iterator[World]:
    made = World(7)
    yield made
    made.close()


@pytest.fixture
def driver(world: World) -> SimLoop:
    return world.process("driver")


async def forever() -> None:
    await asyncio.Event().wait()


# asyncio on virtual time.


def test_after_a_thaw_ready_work_then_io_then_timers(world: World, driver: SimLoop) -> None:
    node = world.process("node")
    seen: list[object] = []

    async def main() -> None:
        node.call_at(1002.0, seen.append, "timer 2")
        node.call_at(1001.0, seen.append, "timer 1")
        node.call_at(1001.5, seen.append, "timer 1.5").cancel()
        node.call_at(1900.0, seen.append, "timer later")
        cancelled_while_frozen = node.call_at(1003.0, seen.append, "never")
        node.call_soon(seen.append, "ready 1")
        node.post(lambda: seen.append("ready 2"))
        node.freeze()
        assert node.frozen
        await asyncio.sleep(1)
        node.post(lambda: seen.append("io 1"))
        await asyncio.sleep(4)
        node.post(lambda: seen.append("io 2"))
        await asyncio.sleep(1)
        cancelled_while_frozen.cancel()
        assert seen == []
        assert node.time() == 1006.0
        node.thaw()
        node.post(lambda: seen.append("io 3"))
        assert seen == []
        await asyncio.sleep(0.001)
        assert seen == ["ready 1", "ready 2", "io 1", "io 2", "io 3", "timer 1", "timer 2"]

    world.run(main(), driver)


def test_a_fence_by_timer_alone_is_late_after_a_freeze(world: World, driver: SimLoop) -> None:
    node = world.process("node")
    fenced: list[float] = []
    admitted: list[bool] = []

    async def main() -> None:
        node.call_at(1005.0, lambda: fenced.append(world.now))
        await asyncio.sleep(1)
        node.freeze()
        await asyncio.sleep(20)
        for _ in range(3):
            node.post(lambda: admitted.append(not fenced))
        node.thaw()
        await asyncio.sleep(1)
        assert admitted == [True, True, True]
        assert fenced == [1021.0]

    world.run(main(), driver)


def test_a_frozen_process_stops_alone_and_world_calls_go_on(world: World, driver: SimLoop) -> None:
    node = world.process("node")
    ticks: list[float] = []
    packets: list[float] = []

    async def tick() -> None:
        while True:
            await asyncio.sleep(1)
            ticks.append(world.now)

    async def main() -> None:
        node.create_task(tick())
        for number in range(1, 10):
            world.call_at(1000.25 + number, lambda: packets.append(world.now))
        await asyncio.sleep(2.5)
        node.freeze()
        node.freeze()
        await asyncio.sleep(4)
        assert ticks == [1001.0, 1002.0]
        assert len(packets) == 6
        node.thaw()
        node.thaw()
        await asyncio.sleep(2)
        assert ticks == [1001.0, 1002.0, 1006.5, 1007.5]

    world.run(main(), driver)


def test_a_freeze_in_the_middle_of_a_batch_takes_effect_at_once(
    world: World, driver: SimLoop
) -> None:
    node = world.process("node")
    seen: list[str] = []

    async def main() -> None:
        node.call_soon(seen.append, "before")
        driver.call_soon(node.freeze)
        node.call_soon(seen.append, "after")
        driver.call_soon(seen.append, "driver")
        await asyncio.sleep(1)
        assert seen == ["before", "driver"]
        node.thaw()
        await asyncio.sleep(1)
        assert seen == ["before", "driver", "after"]

    world.run(main(), driver)


@pytest.mark.parametrize("frozen_before", [False, True])
def test_a_killed_process_never_runs_again(
    world: World, driver: SimLoop, frozen_before: bool
) -> None:
    node = world.process("node")
    seen: list[str] = []
    gate = driver.create_future()

    async def work(waits: Callable[[], Coroutine[Any, Any, object]]) -> None:
        try:
            await waits()
        finally:
            seen.append("finally")

    async def wait_for(futures: list[asyncio.Future[None]]) -> None:
        await futures[0]

    async def main() -> None:
        inside: list[asyncio.Future[None]] = [node.create_future()]
        for waits in (lambda: asyncio.sleep(1), lambda: wait_for(inside), forever):
            node.create_task(work(waits))
        await asyncio.sleep(0)
        node.create_task(work(forever))
        node.call_soon(seen.append, "soon")
        node.call_later(1, seen.append, "later")
        if frozen_before:
            node.freeze()
            await asyncio.sleep(5)
        node.kill()
        node.kill()
        assert node.dead
        assert node.is_closed()
        node.post(lambda: seen.append("post"))
        assert node.call_soon(seen.append, "soon").cancelled()
        assert node.call_later(1, seen.append, "later").cancelled()
        assert node.call_soon_threadsafe(seen.append, "soon").cancelled()
        inside.pop().set_result(None)
        late = node.create_task(work(forever))
        node.thaw()
        node.freeze()
        assert not node.frozen
        gc.collect()
        await asyncio.sleep(10)
        assert not late.done()
        gate.set_result(None)
        await gate

    world.run(main(), driver)
    gc.collect()
    assert seen == []
    assert world.errors == []


def test_killing_oneself_ends_at_the_next_suspension(world: World, driver: SimLoop) -> None:
    node = world.process("node")
    seen: list[str] = []

    async def suicidal() -> None:
        node.kill()
        seen.append("same step")
        await asyncio.sleep(0)
        seen.append("never")

    async def main() -> None:
        node.create_task(suicidal())
        await asyncio.sleep(5)

    world.run(main(), driver)
    assert seen == ["same step"]


# The end of a world.


def test_close_is_silent(
    recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    unraisable: list[object] = []
    hook, sys.unraisablehook = sys.unraisablehook, unraisable.append
    world = World(1)
    driver, dead, frozen = (world.process(name) for name in ("driver", "dead", "frozen"))
    ran: list[str] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(1)

    async def stubborn() -> None:
        try:
            async with asyncio.timeout(1000), asyncio.TaskGroup() as group:
                group.create_task(forever())
                await forever()
        finally:
            ran.append("finally")
            asyncio.get_running_loop().call_soon(ran.append, "scheduled")
            later = asyncio.create_task(forever())
            await asyncio.sleep(1)
            await later
            ran.append("never")

    async def iterates() -> None:
        async for _ in numbers():
            await forever()

    async def main() -> None:
        for loop in (driver, dead, frozen):
            loop.create_task(stubborn())
            loop.create_task(iterates())
        await asyncio.sleep(1)
        for loop in (driver, dead, frozen):
            loop.create_task(forever())
            loop.call_soon(loop.create_task, forever())
            loop.call_later(5, loop.create_task, forever())
        dead.kill()
        frozen.freeze()
        frozen.call_soon(frozen.create_task, forever())
        world.call_at(world.now + 1, lambda: ran.append("world"))
        dead.create_task(forever())
        dead.call_soon(dead.create_task, forever())

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            world.run(main(), driver)
            assert ran == []
            world.close()
            world.close()
            assert ran == ["finally"] * 3
            gc.collect()
            driver.create_task(forever())
            assert driver.call_soon(driver.create_task, forever()).cancelled()
            assert world.process("late").dead
            gc.collect()
    finally:
        sys.unraisablehook = hook
    assert ran == ["finally"] * 3
    assert [str(warning.message) for warning in caught] == []
    assert unraisable == []
    assert caplog.records == []
    assert len(recwarn) == 0


def test_a_closed_or_running_world_cannot_be_run(world: World, driver: SimLoop) -> None:
    async def main() -> None:
        with pytest.raises(SimulationError, match="already running"):
            world.run(forever(), driver)
        with pytest.raises(SimulationError, match="inside"):
            world.close()

    world.run(main(), driver)
    world.close()
    with pytest.raises(SimulationError, match="closed"):
        world.run(forever(), driver)


def test_run_leaves_the_interpreter_as_it_was(world: World, driver: SimLoop) -> None:
    hooks = sys.get_asyncgen_hooks()

    async def main() -> None:
        assert driver.is_running()
        assert not gc.isenabled()

    world.run(main(), driver)
    assert not driver.is_running()
    assert gc.isenabled()
    assert sys.get_asyncgen_hooks() == hooks
    assert asyncio.run(asyncio.sleep(0, "real")) == "real"


# Errors.


def test_the_end_of_a_whole_cluster_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Lives that are cut short complain of it, and in a report on a failed test that misleads."""
    sim = Sim(0, entities=[], nodes=2)

    async def main() -> None:
        async with sim:
            await sim.wait_until(sim.settled)
            caplog.clear()

    sim.world.run(main(), sim.loop)
    sim.close()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
    assert not logging.getLogger("domicile").disabled
