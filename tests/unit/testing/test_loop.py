"""Virtual time: asyncio works on it, faults act as signals do, order never depends on luck."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import domicile
from domicile.testing.sim import loop as loop_module
from domicile.testing.sim.loop import Deadlock, SimLoop, World
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


def test_sleeping_takes_no_real_time_and_exact_virtual_time(world: World, driver: SimLoop) -> None:
    async def main() -> str:
        assert asyncio.get_running_loop() is driver
        assert driver.time() == world.now == 1000.0
        await asyncio.sleep(86_400)
        assert driver.time() == world.now == 87_400.0
        return "done"

    assert world.run(main(), driver) == "done"


def test_a_result_and_an_error_come_out_of_run(world: World, driver: SimLoop) -> None:
    async def fails() -> None:
        await asyncio.sleep(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        world.run(fails(), driver)
    assert world.run(asyncio.sleep(1, "fine"), driver) == "fine"
    assert world.errors == []


def test_timeouts_events_queues_shields_and_groups(world: World, driver: SimLoop) -> None:
    async def main() -> list[object]:
        seen: list[object] = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await forever()
        seen.append(world.now)

        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=1)
        event = asyncio.Event()

        async def produce() -> None:
            for number in range(3):
                await queue.put(number)
            event.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            for _ in range(3):
                seen.append(await queue.get())
            await event.wait()

        inner = asyncio.create_task(asyncio.sleep(3, "kept"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.shield(inner)
        seen.append(await inner)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(forever())
                group.create_task(raise_after(1.0))
        except* ValueError:
            seen.append(world.now)
        assert asyncio.current_task() in asyncio.all_tasks()
        return seen

    async def raise_after(delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        raise ValueError

    assert world.run(main(), driver) == [1002.5, 0, 1, 2, "kept", 1006.5]
    assert world.errors == []


def test_a_cancelled_task_runs_its_finally(world: World, driver: SimLoop) -> None:
    async def main() -> float:
        task = asyncio.create_task(asyncio.sleep(100))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return world.now

    assert world.run(main(), driver) == 1001.0


def test_an_abandoned_async_generator_is_closed_in_its_own_process(
    world: World, driver: SimLoop
) -> None:
    other = world.process("other")
    closed_in: list[object] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(1)
            closed_in.append((asyncio.get_running_loop(), world.now))

    async def consume() -> None:
        async for _ in numbers():
            break

    async def main() -> None:
        other.create_task(consume())
        await asyncio.sleep(10)

    world.run(main(), driver)
    assert closed_in == [(other, 1001.0)]


def test_context_variables_stay_in_their_process(world: World, driver: SimLoop) -> None:
    variable: ContextVar[str] = ContextVar("variable", default="unset")
    other = world.process("other")
    seen: list[tuple[str, str]] = []

    async def child(name: str) -> None:
        seen.append((name, variable.get()))

    async def main() -> None:
        variable.set("driver's")
        await asyncio.create_task(child("own task"))
        other.create_task(child("other's task"))
        other.post(lambda: seen.append(("other's I/O", variable.get())))
        other.call_soon(lambda: seen.append(("other's callback", variable.get())))
        driver.call_soon(lambda: seen.append(("own callback", variable.get())))
        world.call_at(world.now, lambda: seen.append(("outside", variable.get())))
        await asyncio.sleep(1)

    variable.set("caller's")
    world.run(child("main"), driver)
    world.run(main(), driver)
    assert seen == [
        ("main", "caller's"),
        ("own task", "driver's"),
        ("outside", "unset"),
        ("other's task", "unset"),
        ("other's I/O", "unset"),
        ("other's callback", "unset"),
        ("own callback", "driver's"),
    ]


# Processes and order.


def test_each_process_sees_its_own_loop_and_the_world_none(world: World, driver: SimLoop) -> None:
    other = world.process("other")
    seen: list[object] = []

    def look() -> None:
        try:
            seen.append(asyncio.get_running_loop())
        except RuntimeError:
            seen.append(None)

    async def main() -> None:
        other.post(look)
        driver.post(look)
        world.call_at(world.now + 1, look)
        other.call_later(1, look)
        await asyncio.sleep(2)
        look()

    world.run(main(), driver)
    assert seen == [other, driver, None, other, driver]


def test_ready_callbacks_of_all_processes_run_in_global_order(
    world: World, driver: SimLoop
) -> None:
    loops = [driver, world.process("a"), world.process("b")]
    seen: list[int] = []

    async def main() -> None:
        for number in range(30):
            loops[number % 3].call_soon(seen.append, number)
        await asyncio.sleep(1)

    world.run(main(), driver)
    assert seen == list(range(30))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=40))
def test_timers_run_by_time_then_by_scheduling(plan: list[tuple[int, int]]) -> None:
    world = World(0)
    loops = [world.process(str(number)) for number in range(2)]
    seen: list[tuple[int, bool, int]] = []

    def note(delay_s: int, number: int) -> Callable[[], None]:
        def run() -> None:
            assert world.now == 1000.0 + delay_s
            inside = plan[number][1] != 2
            seen.append((delay_s, inside, number))

        return run

    async def main() -> None:
        for number, (delay_s, where) in enumerate(plan):
            when = 1000.0 + delay_s
            if where == 2:
                world.call_at(when, note(delay_s, number))
            else:
                loops[where].call_at(when, note(delay_s, number))
        await asyncio.sleep(10)

    world.run(main(), loops[0])
    assert seen == sorted(seen)
    assert len(seen) == len(plan)
    world.close()


def test_polling_without_delay_does_not_starve_timers_due_now(
    world: World, driver: SimLoop
) -> None:
    async def main() -> float:
        flag: list[int] = []
        world.call_at(world.now, lambda: flag.append(1))
        while not flag:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return world.now

    assert world.run(main(), driver) == 1000.0


def test_cancelled_timers_do_not_run_and_do_not_pile_up(world: World, driver: SimLoop) -> None:
    async def main() -> None:
        kept = driver.call_later(5, seen.append, "kept")
        for _ in range(5000):
            handle = driver.call_later(1_000_000, seen.append, "cancelled")
            handle.cancel()
            assert handle.cancelled()
            handle.cancel()
        assert kept.when() == 1005.0
        assert len(driver.agenda.timers) < 1000
        await asyncio.sleep(10)
        kept.cancel()

    seen: list[str] = []
    world.run(main(), driver)
    assert seen == ["kept"]
    assert world.now == 1010.0


def test_random_streams_are_stable_and_independent() -> None:
    first, second = World(3), World(3)
    second.random.random()
    assert first.stream("net").random() == second.stream("net").random()
    assert first.stream("net").random() != first.stream("disk").random()
    assert World(3).random.random() == first.random.random() != World(4).random.random()
    assert World(3).stream("net").getrandbits(64) == 7758108367477409204


# Freeze, thaw, kill.


def test_errors_in_callbacks_are_recorded_with_their_process(world: World, driver: SimLoop) -> None:
    node = world.process("node")

    async def fails() -> None:
        raise ValueError("nobody awaits this")

    async def main() -> None:
        node.call_soon(lambda: 1 // 0)
        world.call_at(world.now, lambda: [][0])
        node.create_task(fails())
        await asyncio.sleep(1)

    world.run(main(), driver)
    found = [(name, type(context["exception"])) for name, context in world.errors]
    assert found == [("", IndexError), ("node", ZeroDivisionError), ("node", ValueError)]


def test_an_exception_handler_replaces_the_record(world: World, driver: SimLoop) -> None:
    seen: list[object] = []
    driver.set_exception_handler(lambda loop, context: seen.append((loop, context["message"])))
    assert driver.get_exception_handler() is not None

    async def main() -> None:
        driver.call_soon(lambda: 1 // 0)
        await asyncio.sleep(0)

    world.run(main(), driver)
    assert len(seen) == 1
    assert world.errors == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupts_leave_the_run_at_once(
    world: World, driver: SimLoop, error: type[BaseException]
) -> None:
    def interrupt() -> None:
        raise error

    world.call_at(world.now + 1, interrupt)
    with pytest.raises(error):
        world.run(forever(), driver)
    assert world.errors == []


@pytest.mark.parametrize(
    "name",
    [
        "create_connection",
        "create_server",
        "sock_recv",
        "sock_connect",
        "add_reader",
        "run_in_executor",
        "subprocess_exec",
        "getaddrinfo",
        "add_signal_handler",
    ],
)
def test_real_io_on_a_loop_is_refused_with_advice(driver: SimLoop, name: str) -> None:
    with pytest.raises(SimulationError, match=rf"{name}\(\).*'driver' is real I/O .*; "):
        getattr(driver, name)(None, None)


def test_no_method_of_an_event_loop_is_left_out() -> None:
    inherited = [
        name
        for name, value in vars(asyncio.AbstractEventLoop).items()
        if callable(value) and not name.startswith("_") and name not in vars(SimLoop)
    ]
    assert inherited == []


def test_a_loop_cannot_be_driven_alone(driver: SimLoop) -> None:
    with pytest.raises(SimulationError, match=r"World\.run"):
        driver.run_forever()


def test_not_a_number_is_no_time(driver: SimLoop) -> None:
    with pytest.raises(ValueError, match="NaN"):
        driver.call_at(math.nan, print)


# Deadlocks.


async def waits_for_news() -> None:
    await forever()


def test_nothing_scheduled_is_a_deadlock_that_says_who_waits_where(
    world: World, driver: SimLoop
) -> None:
    node, dead = world.process("node"), world.process("dead")
    node.create_task(waits_for_news(), name="reader")
    dead.kill()
    with pytest.raises(Deadlock) as caught:
        world.run(waits_for_news(), driver)
    text = str(caught.value)
    assert "nothing is scheduled" in text
    assert "seed 7" in text
    main, _, others = text.partition("process driver (live), 0 tasks pending:")
    assert main.index("waits_for_news (") < main.index("forever (") < main.index("Event.wait (")
    assert f"{__file__}:" in main
    assert "process node (live), 1 tasks pending:\n  reader: Event.wait (" in others
    assert "process dead (dead)" in others


@pytest.mark.parametrize("end", ["freeze", "kill"])
def test_losing_the_main_process_is_a_deadlock(world: World, driver: SimLoop, end: str) -> None:
    world.call_at(1001.0, getattr(driver, end))
    with pytest.raises(Deadlock, match=r"process driver \((frozen|dead)\)"):
        world.run(asyncio.sleep(5), driver)


def test_main_stuck_while_others_tick_is_a_deadlock(world: World, driver: SimLoop) -> None:
    node = world.process("node")

    async def tick() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(1)

    async def main() -> None:
        await asyncio.sleep(10_000)
        await forever()

    node.create_task(tick())
    with pytest.raises(Deadlock, match="not resumed for 50 virtual seconds"):
        world.run(main(), driver, stuck_after_s=50)
    assert world.now == 11_050.0


def test_sleeping_for_ever_is_nothing_scheduled(world: World, driver: SimLoop) -> None:
    with pytest.raises(Deadlock, match="nothing is scheduled"):
        world.run(asyncio.sleep(math.inf), driver)
    assert world.now == 1000.0


def test_time_standing_still_is_a_deadlock(
    world: World, driver: SimLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "_CHECK_ROUNDS", 100)

    async def main() -> None:
        while world.now < 1001.0:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(Deadlock, match="time stands still"):
        world.run(main(), driver)


# Determinism.


def a_busy_run(seed: int) -> str:
    """A digest of a run in which every order that could vary is visible."""
    world = World(seed)
    loops = [world.process(f"p{number}") for number in range(4)]
    trace: list[str] = []

    def note(text: str) -> None:
        trace.append(f"{world.now:.6f} {text}")

    async def child(name: str, random: Any) -> None:
        try:
            for step in range(3):
                await asyncio.sleep(random.choice([0, 0.5, 1.0]))
                note(f"{name} {step}")
            if random.random() < 0.2:
                raise ValueError(name)
            await forever()
        except asyncio.CancelledError:
            # The order of these is the order in which a TaskGroup's set iterates.
            note(f"{name} cancelled")
            raise

    async def family(name: str) -> None:
        random = world.stream(name)
        try:
            async with asyncio.timeout(4), asyncio.TaskGroup() as group:
                for number in range(12):
                    group.create_task(child(f"{name}.{number}", random))
        except* (ValueError, TimeoutError) as caught:
            note(f"{name} {[str(error) for error in caught.exceptions]}")

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for number, loop in enumerate(loops[1:]):
                loop.create_task(family(f"{loop.name}/{number}"))
            group.create_task(family("main"))
            await asyncio.sleep(1.25)
            loops[1].freeze()
            await asyncio.sleep(5)
            loops[1].thaw()
            loops[2].kill()
            await asyncio.sleep(5)

    world.run(main(), loops[0])
    trace += [f"{name} {context['message']}" for name, context in world.errors]
    world.close()
    assert sum("cancelled" in line for line in trace) > 10
    return hashlib.blake2b("\n".join(trace).encode(), digest_size=8).hexdigest()


# The same on every supported Python; a change means that scheduling order changed.
GOLDEN = "79224e9a21932291"


def test_the_same_seed_gives_the_same_run() -> None:
    assert a_busy_run(1) == a_busy_run(1) == GOLDEN
    assert a_busy_run(1) != a_busy_run(2)


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_the_run_does_not_depend_on_the_hash_seed(hash_seed: str) -> None:
    source = Path(domicile.__file__).parents[1]
    here = Path(__file__)
    program = f"import {here.stem}; print({here.stem}.a_busy_run(1))"
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": os.pathsep.join([str(source), str(here.parent)]),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert found.stdout.strip() == GOLDEN, found.stderr
