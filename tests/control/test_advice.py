"""A user's allocation function: what it says is used, what it does otherwise costs one round."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from typing import Any, cast

import pytest

from domicile.control.advice import Advisor
from domicile.control.threads import DaemonThreads, ThreadsBusy
from domicile.core.strategies import Seat, Situation, Wanted
from domicile.ports.meter import NoMeter

ASKED = Situation("r", ("a", "", "a"), (Seat("a"), Seat("b")))


def ask(strategy: Any, timeout_s: float = 5.0) -> Wanted | None:
    return asyncio.run(Advisor(strategy, timeout_s, NoMeter()).ask(ASKED))


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
        advisor = Advisor(strategy, 5.0, NoMeter())
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
        advisor = Advisor(strategy, 0.05, NoMeter())
        assert await advisor.ask(ASKED) is None
        patient = Advisor(strategy, 30.0, NoMeter(), advisor._threads)  # pyright: ignore
        assert await patient.ask(ASKED) == {0: "b"}

    try:
        asyncio.run(body())
    finally:
        hanging.set()


def test_only_a_few_may_hang_at_once() -> None:
    hanging = threading.Event()

    async def body() -> None:
        threads = DaemonThreads(most=1)
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
