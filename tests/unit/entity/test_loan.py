"""Work that begins on loan from a worker behaves as in a task of its own: on every event loop."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import ContextVar
from typing import Any

import pytest
import uvloop

from domicile.entity.running.workers import Worker, Workers
from domicile.testing.sim.loop import World

colour: ContextVar[str] = ContextVar("colour", default="none")

Body = Callable[[Workers], Coroutine[Any, Any, None]]
Run = Callable[[Body], None]


def on_real_loop(new_loop: Callable[[], asyncio.AbstractEventLoop], body: Body) -> None:
    """No error may go unnoticed, and no worker may be left."""
    unnoticed: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, error: unnoticed.append(error))
        async with asyncio.timeout(20):
            await with_workers(body)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    assert unnoticed == []


def on_simulated_loop(body: Body) -> None:
    world = World(0)
    try:
        world.run(with_workers(body), world.process("p"))
        assert world.errors == []
    finally:
        world.close()


async def with_workers(body: Body) -> None:
    workers = Workers()
    try:
        await body(workers)
    finally:
        assert await workers.close(1.0) == 0
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "domicile-worker"]


@pytest.fixture(params=["asyncio", "uvloop", "simulated"])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "simulated":
        return on_simulated_loop
    new_loop = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop
    return lambda body: on_real_loop(new_loop, body)


@pytest.fixture(params=["new worker", "used worker"])
def used(request: pytest.FixtureRequest) -> bool:
    """Whether the worker's task has run before: one that has not cannot be resumed, only begun."""
    return bool(request.param == "used worker")


async def prepare(workers: Workers, used: bool) -> None:
    if used:
        workers.lend(lambda worker: None)
        await asyncio.sleep(0.001)


def begin(workers: Workers, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Begin work as a handler begins; the task that it sees as its own."""

    def start(worker: Worker) -> asyncio.Task[None]:
        worker.start(work)
        return worker.task

    return workers.lend(start)


async def until(condition: Callable[[], object]) -> None:
    for _ in range(2_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to that")


# whose task it is


def test_work_sees_one_task_before_and_after_it_first_suspends(run: Run, used: bool) -> None:
    seen: list[asyncio.Task[Any] | None] = []

    async def work() -> None:
        seen.append(asyncio.current_task())
        await asyncio.sleep(0)
        seen.append(asyncio.current_task())
        await asyncio.sleep(0.001)
        seen.append(asyncio.current_task())

    async def body(workers: Workers) -> None:
        await prepare(workers, used)
        caller = asyncio.current_task()
        task = begin(workers, work())
        assert asyncio.current_task() is caller
        await until(lambda: len(seen) == 3)
        assert seen == [task] * 3
        assert task is not caller

    run(body)


def test_a_callback_without_a_task_lends_too(run: Run) -> None:
    seen: list[object] = []

    async def work() -> None:
        seen.append(asyncio.current_task())

    async def body(workers: Workers) -> None:
        def callback() -> None:
            begin(workers, work())
            seen.append(asyncio.current_task())

        asyncio.get_running_loop().call_soon(callback)
        await until(lambda: len(seen) == 2)
        assert isinstance(seen[0], asyncio.Task)
        assert seen[1] is None

    run(body)


def test_loans_within_loans_are_of_different_workers(run: Run) -> None:
    seen: list[asyncio.Task[Any] | None] = []

    async def body(workers: Workers) -> None:
        async def nest(depth: int) -> None:
            seen.append(asyncio.current_task())
            if depth:
                begin(workers, nest(depth - 1))
            seen.append(asyncio.current_task())

        begin(workers, nest(3))
        assert seen[:4] == list(reversed(seen[4:]))
        assert len(set(map(id, seen))) == 4

    run(body)


def test_an_error_of_what_borrows_leaves_the_caller_its_task(run: Run) -> None:
    async def body(workers: Workers) -> None:
        caller = asyncio.current_task()
        for error in (ValueError("no"), asyncio.CancelledError(), KeyboardInterrupt()):

            def fail(worker: Worker, error: BaseException = error) -> None:
                raise error

            with pytest.raises(type(error)):
                workers.lend(fail)
            assert asyncio.current_task() is caller
        done: list[int] = []

        async def work() -> None:
            await asyncio.sleep(0)
            done.append(1)

        begin(workers, work())
        await until(lambda: done)

    run(body)


# what tasks are for


@pytest.mark.parametrize("limit_s", [0.0, 0.01])
def test_a_timeout_that_was_entered_at_once_ends_the_work(
    run: Run, used: bool, limit_s: float
) -> None:
    seen: list[object] = []

    async def work() -> None:
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.sleep(10)
        except TimeoutError:
            seen.append("timeout")
        task = asyncio.current_task()
        assert task is not None
        seen.append(task.cancelling())
        await asyncio.sleep(0.001)
        seen.append("went on")

    async def body(workers: Workers) -> None:
        await prepare(workers, used)
        begin(workers, work())
        await until(lambda: len(seen) == 3)
        assert seen == ["timeout", 0, "went on"]

    run(body)


def test_a_failing_child_of_a_group_ends_the_others(run: Run, used: bool) -> None:
    seen: list[str] = []

    async def child() -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            seen.append("child cancelled")
            raise

    async def fail() -> None:
        raise ValueError("no")

    async def work() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(child())
                group.create_task(fail())
                await asyncio.sleep(10)
        except* ValueError:
            seen.append("group failed")

    async def body(workers: Workers) -> None:
        await prepare(workers, used)
        begin(workers, work())
        await until(lambda: len(seen) == 2)
        assert seen == ["child cancelled", "group failed"]

    run(body)


def test_the_callers_variables_are_unknown_and_own_ones_stay(run: Run, used: bool) -> None:
    seen: list[str] = []

    async def work() -> None:
        seen.append(colour.get())
        colour.set("green")
        await asyncio.sleep(0)
        seen.append(colour.get())

    async def body(workers: Workers) -> None:
        await prepare(workers, used)
        colour.set("red")
        begin(workers, work())
        assert colour.get() == "red"
        await until(lambda: len(seen) == 2)
        assert seen == ["none", "green"]

    run(body)


def test_work_that_yields_lets_others_go_on(run: Run) -> None:
    seen: list[tuple[str, int]] = []

    async def work(name: str) -> None:
        for turn in range(3):
            seen.append((name, turn))
            await asyncio.sleep(0)

    async def body(workers: Workers) -> None:
        begin(workers, work("a"))
        begin(workers, work("b"))
        await until(lambda: len(seen) == 6)
        assert seen == [(name, turn) for turn in range(3) for name in "ab"]

    run(body)


@pytest.mark.parametrize("resolved", ["before", "after"])
def test_many_may_await_one_future(run: Run, resolved: str) -> None:
    seen: list[object] = []

    async def body(workers: Workers) -> None:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def wait() -> None:
            seen.append(await future)

        begin(workers, wait())
        begin(workers, wait())
        other = asyncio.ensure_future(wait())
        if resolved == "before":
            future.set_result(7)
        await asyncio.sleep(0.001)
        begin(workers, wait())
        if resolved == "after":
            future.set_result(7)
        await other
        await until(lambda: len(seen) == 4)
        assert seen == [7] * 4

    run(body)


def test_what_no_task_may_await_is_refused(run: Run) -> None:
    seen: list[str] = []

    class Odd:
        def __await__(self) -> Any:
            yield "not a future"

    async def work(itself: bool) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await (task if itself else Odd())
        except RuntimeError as error:
            seen.append(str(error))

    async def body(workers: Workers) -> None:
        begin(workers, work(itself=True))
        begin(workers, work(itself=False))
        await until(lambda: len(seen) == 2)
        assert "await on itself" in seen[0]
        assert "bad yield" in seen[1]

    run(body)


# cancellations


@pytest.mark.parametrize("later", [False, True], ids=["before handover", "after handover"])
def test_a_cancellation_reaches_the_work_and_what_it_waits_for(
    run: Run, used: bool, later: bool
) -> None:
    seen: list[str] = []
    children: list[asyncio.Task[None]] = []

    async def child() -> None:
        await asyncio.sleep(10)

    async def work() -> None:
        children.append(asyncio.ensure_future(child()))
        try:
            await children[0]
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        finally:
            await asyncio.sleep(0)
            seen.append("cleaned up")

    async def body(workers: Workers) -> None:
        await prepare(workers, used)
        task = begin(workers, work())
        if later:
            await asyncio.sleep(0.001)
        task.cancel()
        await until(lambda: len(seen) == 2)
        assert seen == ["cancelled", "cleaned up"]
        assert children[0].cancelled()

    run(body)


def test_work_that_ignores_a_cancellation_before_the_handover_goes_on(run: Run, used: bool) -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            seen.append("ignored")
        await asyncio.sleep(0.001)
        seen.append("went on")

    async def body(workers: Workers) -> None:
        await prepare(workers, used)
        begin(workers, work()).cancel()
        await until(lambda: len(seen) == 2)
        assert seen == ["ignored", "went on"]

    run(body)


def test_work_may_cancel_itself(run: Run, used: bool) -> None:
    seen: list[str] = []

    async def work(name: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        if name == "ends":
            seen.append(name)
            return
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            seen.append(name)
            raise

    async def innocent() -> None:
        await asyncio.sleep(0.001)
        seen.append("innocent")

    async def body(workers: Workers) -> None:
        for name in ("ends", "suspends"):
            await prepare(workers, used)
            begin(workers, work(name))
            begin(workers, innocent())
            await until(lambda: "innocent" in seen)
            assert sorted(seen) == sorted([name, "innocent"])
            seen.clear()

    run(body)


def test_the_callers_cancellation_is_not_the_works(run: Run) -> None:
    seen: list[str] = []

    async def work() -> None:
        await asyncio.sleep(0.002)
        seen.append("done")

    async def body(workers: Workers) -> None:
        async def caller() -> None:
            begin(workers, work())
            await asyncio.sleep(10)

        task = asyncio.ensure_future(caller())
        await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()
        await until(lambda: seen)

    run(body)


# ends


def test_close_waits_for_work_whose_worker_never_ran(run: Run) -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(0.001)
            seen.append("cleaned up")

    async def body(workers: Workers) -> None:
        begin(workers, work())
        assert await workers.close(1.0) == 0
        assert seen == ["cleaned up"]

    run(body)


def test_close_counts_what_does_not_end(run: Run) -> None:
    over: list[asyncio.Future[None]] = []

    async def work() -> None:
        while True:
            try:
                await over[0]
            except asyncio.CancelledError:
                if over[0].cancelled():
                    over[0] = asyncio.get_running_loop().create_future()
            else:
                return

    async def body(workers: Workers) -> None:
        over.append(asyncio.get_running_loop().create_future())
        begin(workers, work())
        await asyncio.sleep(0.001)
        assert await workers.close(0.01) == 1
        over[0].set_result(None)
        assert await workers.close(1.0) == 0

    run(body)


def test_an_asynchronous_generator_of_unfinished_work_is_closed_with_its_loop(run: Run) -> None:
    seen: list[str] = []

    async def numbers() -> AsyncGenerator[int]:
        try:
            yield 1
            yield 2
        finally:
            seen.append("closed")

    async def work() -> None:
        async for _ in numbers():
            await asyncio.sleep(10)

    async def body(workers: Workers) -> None:
        begin(workers, work())
        await asyncio.sleep(0.001)
        assert await workers.close(1.0) == 0
        gc.collect()
        await until(lambda: seen)

    run(body)
