"""Pooled workers and the guard around each handler (L3, L4), on a simulated loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest

from domicile.entity.running.workers import QUANTUM, SPARE, Abandoned, Guarded, Worker, Workers
from domicile.testing.sim.loop import World

colour: ContextVar[str] = ContextVar("colour", default="none")


def run(body: Callable[[Workers], Coroutine[Any, Any, None]]) -> None:
    """Run a body with workers in one simulated process; no error may go unnoticed."""
    world = World(0)

    async def main() -> None:
        workers = Workers()
        try:
            await body(workers)
        finally:
            await workers.close(1.0)
        assert not pool(), "close leaves no worker"

    try:
        world.run(main(), world.process("p"))
        assert world.errors == []
    finally:
        world.close()


def pool() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == "domicile-worker"]


class Watcher:
    """Counts steps; the test decides what is still allowed."""

    def __init__(self, workers: Workers | None = None) -> None:
        self.workers = workers
        self.resumable = True
        self.cleanable = True
        self.suspensions = 0
        self.judged = 0
        self.kept: list[Coroutine[Any, Any, Any]] = []

    def suspended(self) -> None:
        self.suspensions += 1

    def may_resume(self) -> bool:
        self.judged += 1
        return self.resumable

    def may_clean_up(self) -> bool:
        return self.cleanable

    def rests(self) -> None:
        pass

    def abandon(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self.kept.append(coroutine)


def job_of(make: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[Worker], None]:
    return lambda worker: worker.start(make())


async def guarded(workers: Workers, work: Coroutine[Any, Any, Any]) -> None:
    await Guarded(work, Watcher(workers))


# workers


def test_jobs_that_do_not_suspend_share_one_worker_and_run_in_order() -> None:
    done: list[tuple[int, asyncio.Task[Any] | None]] = []

    async def job(number: int) -> None:
        done.append((number, asyncio.current_task()))

    async def body(workers: Workers) -> None:
        for number in range(20):
            workers.submit(job_of(partial(job, number)))
        await asyncio.sleep(1)
        assert [number for number, _ in done] == list(range(20))
        assert len({task for _, task in done}) == 1
        assert len(pool()) == 1

    run(body)


def test_a_job_that_suspends_keeps_its_worker_and_another_goes_on() -> None:
    steps: list[str] = []

    async def slow() -> None:
        steps.append("slow begins")
        await asyncio.sleep(1)
        steps.append("slow ends")

    async def quick() -> None:
        steps.append("quick")

    async def body(workers: Workers) -> None:
        workers.submit(job_of(partial(guarded, workers, slow())))
        workers.submit(job_of(quick))
        await asyncio.sleep(0.5)
        assert steps == ["slow begins", "quick"]
        await asyncio.sleep(1)
        assert steps[-1] == "slow ends"

    run(body)


def test_idle_workers_are_used_again_and_only_a_few_are_kept() -> None:
    async def slow() -> None:
        await asyncio.sleep(1)

    async def body(workers: Workers) -> None:
        for _ in range(2 * SPARE):
            workers.submit(job_of(partial(guarded, workers, slow())))
        await asyncio.sleep(0.5)
        assert len(pool()) >= 2 * SPARE
        await asyncio.sleep(1)
        kept = len(pool())
        assert kept <= SPARE
        for _ in range(kept):
            workers.submit(job_of(partial(guarded, workers, slow())))
        await asyncio.sleep(0.5)
        assert len(pool()) == kept

    run(body)


def test_the_loop_gets_a_turn_between_many_jobs() -> None:
    done: list[str] = []

    async def job() -> None:
        done.append("job")

    async def body(workers: Workers) -> None:
        for _ in range(3 * QUANTUM):
            workers.submit(job_of(job))
        asyncio.get_running_loop().call_soon(done.append, "turn")
        await asyncio.sleep(1)
        assert len(done) == 3 * QUANTUM + 1
        assert done.index("turn") <= QUANTUM

    run(body)


def test_a_job_submitted_by_a_job_runs() -> None:
    done: list[str] = []

    async def body(workers: Workers) -> None:
        async def second() -> None:
            done.append("second")

        async def first() -> None:
            done.append("first")
            workers.submit(job_of(second))
            done.append("still first")

        workers.submit(job_of(first))
        await asyncio.sleep(1)
        assert done == ["first", "still first", "second"]

    run(body)


def test_jobs_inherit_no_context() -> None:
    seen: list[str] = []

    async def job() -> None:
        seen.append(colour.get())
        colour.set("blue")

    async def body(workers: Workers) -> None:
        colour.set("red")
        workers.submit(job_of(job))
        await asyncio.sleep(1)
        assert seen == ["none"]
        assert colour.get() == "red"

    run(body)


def test_a_failing_job_is_reported_and_the_others_go_on() -> None:
    world = World(0)
    done: list[str] = []

    async def bad() -> None:
        raise ValueError("broken")

    async def good() -> None:
        done.append("good")

    async def main() -> None:
        workers = Workers()
        workers.submit(job_of(bad))
        workers.submit(job_of(good))
        await asyncio.sleep(1)
        await workers.close(1.0)

    try:
        world.run(main(), world.process("p"))
        assert done == ["good"]
        assert [str(context["exception"]) for _, context in world.errors] == ["broken"]
    finally:
        world.close()


def test_timeouts_and_task_groups_work_in_jobs() -> None:
    seen: list[str] = []

    async def job() -> None:
        try:
            async with asyncio.timeout(0.5):
                await asyncio.sleep(5)
        except TimeoutError:
            seen.append("timeout")
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0.1))
        seen.append("group")

    async def body(workers: Workers) -> None:
        workers.submit(job_of(partial(guarded, workers, job())))
        await asyncio.sleep(2)
        assert seen == ["timeout", "group"]

    run(body)


def test_close_cancels_what_runs_and_drops_what_waits() -> None:
    seen: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(5)
        finally:
            seen.append("ended")

    async def never() -> None:
        seen.append("never")

    async def body(workers: Workers) -> None:
        workers.submit(job_of(partial(guarded, workers, slow())))
        await asyncio.sleep(0.1)
        workers.submit(job_of(never))
        await workers.close(1.0)
        assert seen == ["ended"]
        workers.submit(job_of(never))
        await asyncio.sleep(1)
        assert seen == ["ended"]

    run(body)


def test_cancel_all_does_not_wait() -> None:
    seen: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(5)
        finally:
            seen.append("ended")

    async def body(workers: Workers) -> None:
        workers.submit(job_of(partial(guarded, workers, slow())))
        await asyncio.sleep(0.1)
        workers.cancel_all()
        assert seen == []
        await asyncio.sleep(0.1)
        assert seen == ["ended"]

    run(body)


# the guard


def test_a_coroutine_that_does_not_suspend_is_not_judged() -> None:
    async def work() -> int:
        return 7

    async def body(workers: Workers) -> None:
        watcher = Watcher()
        assert await Guarded(work(), watcher) == 7
        assert (watcher.suspensions, watcher.judged) == (0, 0)

    run(body)


def test_every_resumption_is_judged() -> None:
    async def work() -> str:
        for _ in range(3):
            await asyncio.sleep(0.1)
        return "done"

    async def body(workers: Workers) -> None:
        watcher = Watcher()
        assert await Guarded(work(), watcher) == "done"
        assert (watcher.suspensions, watcher.judged) == (1, 3)

    run(body)


def test_errors_pass_through_both_ways() -> None:
    async def work() -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.set_exception(KeyError("inside"))
        with pytest.raises(KeyError):
            await future
        await asyncio.sleep(0.1)
        raise OSError("outside")

    async def body(workers: Workers) -> None:
        with pytest.raises(OSError, match="outside"):
            await Guarded(work(), Watcher())

    run(body)


def test_past_the_deadline_a_handler_is_cancelled_instead_of_resumed() -> None:
    """L3: by comparison, not by a timer."""
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(0.1)
            seen.append("resumed")
        except asyncio.CancelledError as cancelled:
            seen.append(str(cancelled))
            raise

    async def body(workers: Workers) -> None:
        watcher = Watcher()
        watcher.resumable = False
        with pytest.raises(asyncio.CancelledError):
            await Guarded(work(), watcher)
        assert seen == ["the node lost its lease"]
        assert watcher.kept == []

    run(body)


def test_past_the_hard_deadline_nothing_of_a_handler_runs_any_more() -> None:
    """L4: not even its `finally` blocks, and not when it is collected."""
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(0.1)
        finally:
            seen.append("cleaned up")

    watcher = Watcher()
    watcher.resumable = watcher.cleanable = False

    async def body(workers: Workers) -> None:
        with pytest.raises(Abandoned):
            await Guarded(work(), watcher)
        assert seen == []
        assert len(watcher.kept) == 1

    run(body)
    assert seen == []


def test_a_cancellation_past_the_hard_deadline_abandons_too() -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(5)
        finally:
            seen.append("cleaned up")

    async def body(workers: Workers) -> None:
        watcher = Watcher()
        task = asyncio.get_running_loop().create_task(guarded_by(watcher, work()))
        await asyncio.sleep(0.1)
        watcher.cleanable = False
        task.cancel()
        with pytest.raises(Abandoned):
            await task
        assert seen == []
        assert len(watcher.kept) == 1

    run(body)


def test_an_abandoned_job_ends_its_pool() -> None:
    done: list[str] = []
    watcher = Watcher()
    watcher.resumable = watcher.cleanable = False

    async def work() -> None:
        await asyncio.sleep(0.1)

    async def later() -> None:
        done.append("later")

    async def body(workers: Workers) -> None:
        watcher.workers = workers
        workers.submit(job_of(partial(guarded_by, watcher, work())))
        await asyncio.sleep(0.5)
        workers.submit(job_of(later))
        await asyncio.sleep(0.5)
        assert done == []

    run(body)


async def guarded_by(watcher: Watcher, work: Coroutine[Any, Any, Any]) -> None:
    await Guarded(work, watcher)
