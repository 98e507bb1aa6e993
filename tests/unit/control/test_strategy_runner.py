"""A user's allocation function: what it says is used, what it does otherwise costs one round."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from typing import Any, cast

import pytest

from domicile.concurrency.daemon_threads import DaemonThreads, ThreadsBusy
from domicile.control.strategy_runner import StrategyRunner
from domicile.core.placement.strategies import Seat, Situation, WantedHomes
from domicile.ports.meter import NoMeter

ASKED = Situation("r", ("a", "", "a"), (Seat("a"), Seat("b")))


def ask(strategy: Any, timeout_s: float = 5.0) -> WantedHomes | None:
    return asyncio.run(StrategyRunner(strategy, timeout_s, NoMeter()).ask(ASKED))


def test_a_plain_function_runs_beside_the_loop() -> None:
    names: list[str] = []

    def strategy(situation: Situation) -> Mapping[int, str]:
        names.append(threading.current_thread().name)
        return {1: situation.seats[1].node}

    assert ask(strategy) == {1: "b"}
    assert names == ["domicile-strategy"]


def test_an_async_function_runs_on_the_loop() -> None:
    async def strategy(situation: Situation) -> Mapping[int, str]:
        await asyncio.sleep(0)
        return {0: "b"}

    assert ask(strategy) == {0: "b"}


def test_one_that_raises_is_a_failure_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def strategy(situation: Situation) -> Mapping[int, str]:
        raise KeyError("zone")

    async def body() -> None:
        advisor = StrategyRunner(strategy, 5.0, NoMeter())
        assert await advisor.ask(ASKED) is None
        assert await advisor.ask(ASKED) is None

    with caplog.at_level(logging.ERROR, "domicile"):
        asyncio.run(body())
    (record,) = caplog.records
    assert "KeyError: 'zone'" in record.getMessage()


def test_one_that_hangs_is_given_up_and_asked_again() -> None:
    hanging, asked = threading.Event(), 0

    def strategy(situation: Situation) -> Mapping[int, str]:
        nonlocal asked
        asked += 1
        if asked == 1:
            hanging.wait(60)
        return {0: "b"}

    async def body() -> None:
        advisor = StrategyRunner(strategy, 0.05, NoMeter())
        assert await advisor.ask(ASKED) is None
        patient = StrategyRunner(strategy, 30.0, NoMeter(), advisor._threads)  # pyright: ignore
        assert await patient.ask(ASKED) == {0: "b"}

    try:
        asyncio.run(body())
    finally:
        hanging.set()


def test_only_a_few_may_hang_at_once() -> None:
    hanging = threading.Event()

    async def body() -> None:
        threads = DaemonThreads(1, "domicile-strategy", waits=False)
        stuck = asyncio.create_task(threads.run(lambda: hanging.wait(60)))
        await asyncio.sleep(0)
        with pytest.raises(ThreadsBusy):
            await threads.run(lambda: None)
        hanging.set()
        await stuck
        while True:
            try:
                await threads.run(lambda: None)
            except ThreadsBusy:
                await asyncio.sleep(0)  # the thread has answered but not quite ended
            else:
                break

    asyncio.run(body())


@pytest.mark.parametrize(
    "answer", [None, [(0, "a")], {7: "a"}, {-1: "a"}, {"0": "a"}, {0: 3}, {True: 1.0}]
)
def test_nonsense_is_a_failure(answer: object) -> None:
    assert ask(lambda situation: cast("Any", answer)) is None


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Unshowable(dict[int, str]):
    def items(self) -> Any:
        raise asyncio.CancelledError


@pytest.mark.parametrize(
    "trouble",
    [asyncio.CancelledError(), SystemExit(3), StopIteration(1), Unspeakable()],
    ids=lambda one: type(one).__name__,
)
@pytest.mark.parametrize("kind", ["plain", "async", "awaited"])
def test_whatever_it_raises_is_a_failure_of_one_round(trouble: BaseException, kind: str) -> None:
    def plain(situation: Situation) -> Mapping[int, str]:
        raise trouble

    async def later(situation: Situation) -> Mapping[int, str]:
        raise trouble

    strategy: Any = {"plain": plain, "async": later, "awaited": lambda one: later(one)}[kind]
    assert ask(strategy) is None


def test_an_answer_that_breaks_while_it_is_read_is_a_failure() -> None:
    assert ask(lambda _: Unshowable()) is None


def test_one_that_swallows_its_cancellation_is_given_up_and_not_called_without_end() -> None:
    called = 0
    free = False

    async def strategy(situation: Situation) -> Mapping[int, str]:
        nonlocal called
        called += 1
        while not free:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue
        return {0: "b"}

    async def body() -> None:
        nonlocal free
        advisor = StrategyRunner(strategy, 0.01, NoMeter())
        for _ in range(10):
            assert await advisor.ask(ASKED) is None
        assert called == 4, "the rest were not even called"
        free = True
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.05)
        assert await advisor.ask(ASKED) == {0: "b"}

    asyncio.run(body())


def test_the_end_of_a_leadership_ends_its_question() -> None:
    cancelled = 0

    async def strategy(situation: Situation) -> Mapping[int, str]:
        nonlocal cancelled
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled += 1
            raise
        return {}

    async def body() -> None:
        asking = asyncio.ensure_future(StrategyRunner(strategy, 60.0, NoMeter()).ask(ASKED))
        await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait((asking,))
        assert asking.cancelled()
        await asyncio.sleep(0)

    asyncio.run(body())
    assert cancelled == 1
