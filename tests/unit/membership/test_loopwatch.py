"""Who holds an event loop up: seen from a thread beside it, and step by step on a clock by hand."""

from __future__ import annotations

import asyncio
import json
import logging
import selectors
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from domicile.membership.clock import SystemClock
from domicile.membership.loopwatch import (
    KEPT,
    NO_HANDLER,
    STARVED,
    UNNAMED,
    LoopWatch,
    RunningHandler,
    waits_for_events,
    where_in,
)
from domicile.ports.clock import Timer
from domicile.ports.meter import NoMeter
from domicile.settings import Settings

WAIT_S = 20.0
SETTINGS = Settings(slow_s=0.1, ttl_s=6)
TAGS = {"node": "n1"}


class Counts(NoMeter):
    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()

    def count(self, name: str, value: int = 1) -> None:
        self.totals[name] += value


def describe(turn: object) -> RunningHandler:
    assert isinstance(turn, str)
    return RunningHandler("mason", "m1", turn)


# by hand


class Hands:
    """A clock and a loop that do what a test says, for a watch without its thread."""

    def __init__(self) -> None:
        self.at = 100.0
        self.running: object | None = None
        self.posted: list[Callable[[], None]] = []
        self.meter = Counts()
        self.watch = LoopWatch(
            clock=self,
            meter=self.meter,
            settings=SETTINGS,
            running=lambda: self.running,
            describe=describe,
            tags=TAGS,
        )
        self.watch._loop = self  # type: ignore[assignment]
        self.watch._home = threading.get_ident()

    def now(self) -> float:
        return self.at

    def wall(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        raise NotImplementedError

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        self.posted.append(callback)

    def turn(self) -> None:
        """The loop goes round once."""
        posted, self.posted = self.posted, []
        for callback in posted:
            callback()

    def look(self, times: int = 1, each_s: float = 0.1) -> None:
        for _ in range(times):
            self.at = round(self.at + each_s, 6)
            self.watch._look()

    def held(self) -> list[tuple[RunningHandler, float, bool]]:
        return [(one.handler, pytest.approx(one.held_s), one.over) for one in self.watch.reports]  # type: ignore[misc]


@pytest.fixture
def hands() -> Hands:
    return Hands()


def test_an_idle_loop_is_asked_rarely(hands: Hands) -> None:
    turns = 0
    for _ in range(50):
        hands.look()
        turns += bool(hands.posted)
        hands.turn()
    assert turns <= 10, "five seconds, every half of one"
    assert hands.watch.turned_at() >= hands.at - 0.5
    assert not hands.watch.reports


def test_a_handler_that_holds_the_loop_is_named_once_it_is_over(hands: Hands) -> None:
    hands.running = "lay"
    hands.look(3)
    assert not hands.watch.reports, "how long it takes is not known yet"
    hands.turn()
    hands.look()
    assert hands.held() == [(RunningHandler("mason", "m1", "lay"), 0.2, True)]
    assert " in " in hands.watch.reports[0].where
    hands.turn()
    assert hands.meter.totals["loop.held"] == 1


def test_what_takes_long_is_named_before_it_is_over(
    hands: Hands, caplog: pytest.LogCaptureFixture
) -> None:
    hands.running = "lay"
    hands.look(12)
    assert hands.held() == [(RunningHandler("mason", "m1", "lay"), 1.0, False)]
    hands.look(31)
    hands.turn()
    hands.look()
    assert hands.held() == [(RunningHandler("mason", "m1", "lay"), 4.2, True)]
    first, second = [record.getMessage() for record in caplog.records]
    assert "lay of mason 'm1' holds the event loop, for 1.0 s so far, at " in first
    assert "lay of mason 'm1' held the event loop for 4.20 s, at " in second
    assert caplog.records[0].__dict__["node"] == "n1"


def test_what_is_quicker_is_not_named(hands: Hands) -> None:
    for _ in range(50):
        hands.running = "lay"
        hands.look(1)
        hands.running = None
        hands.turn()
        hands.look()
        hands.turn()
    assert not hands.watch.reports
    assert not hands.meter.totals


def test_many_quick_handlers_in_one_turn_hold_nothing_alone(hands: Hands) -> None:
    for number in range(40):
        hands.running = f"handler-{number}"
        hands.look()
    hands.turn()
    hands.look()
    assert not hands.watch.reports


def test_a_process_that_stood_still_blames_nobody(hands: Hands) -> None:
    hands.running = "lay"
    hands.look()
    hands.look(each_s=10)
    hands.turn()
    hands.look()
    assert not hands.watch.reports


def test_what_goes_on_while_it_is_looked_at_is_not_named(hands: Hands) -> None:
    hands.running = "lay"
    hands.look(2)

    def slow_description(turn: object) -> RunningHandler:
        hands.turn()
        return describe(turn)

    hands.watch._describe = slow_description
    hands.look(3)
    hands.look(5)
    assert not hands.watch.reports


def test_a_handler_is_named_once_in_a_while_and_counted_always(hands: Hands) -> None:
    def hold(name: str) -> None:
        hands.running = name
        hands.look(5)
        hands.running = None
        hands.turn()
        hands.look()

    for name in ("lay", "lay", "stand", "lay"):
        hold(name)
    hands.turn()
    assert [handler.handler for handler, *_ in hands.held()] == ["lay", "stand"]
    assert hands.meter.totals["loop.held"] == 4
    for _ in range(110):
        hands.look()
        hands.turn()
    hold("lay")
    assert [handler.handler for handler, *_ in hands.held()] == ["lay", "stand", "lay"]
    for number in range(2 * KEPT):
        hold(f"handler-{number}")
    assert len(hands.watch.reports) == KEPT
    assert hands.watch.reports[-1].handler.handler == f"handler-{2 * KEPT - 1}"


def test_something_else_that_holds_the_loop_is_shown_by_its_place(
    hands: Hands, caplog: pytest.LogCaptureFixture
) -> None:
    hands.look(14)
    hands.turn()
    hands.look()
    ((handler, _, over),) = hands.held()
    assert handler == NO_HANDLER
    assert over
    assert "something that is not a handler held the event loop" in caplog.text


@pytest.fixture
def in_selector(hands: Hands) -> Iterator[Callable[[], None]]:
    """The thread of the loop waits in its selector; what this gives lets it go on."""
    here, there = socket.socketpair()
    selector = selectors.DefaultSelector()
    selector.register(there, selectors.EVENT_READ)
    loop = threading.Thread(target=selector.select, args=(WAIT_S,))
    loop.start()
    assert loop.ident is not None
    hands.watch._home = loop.ident
    while not waits_for_events(sys._current_frames().get(loop.ident)):
        time.sleep(0.001)

    def go_on() -> None:
        hands.watch._home = threading.get_ident()

    yield go_on
    here.send(b"x")
    loop.join()
    selector.close()
    here.close()
    there.close()


def test_a_loop_that_gets_no_processor_time_blames_nobody(
    hands: Hands, in_selector: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    while not hands.posted:
        hands.look()
    hands.look(3)
    assert hands.held() == [], "it may turn any moment"
    hands.turn()
    hands.look()
    ((handler, _, over),) = hands.held()
    assert (handler, over) == (STARVED, True)
    assert hands.watch.reports[0].held_s > SETTINGS.slow_s
    assert "this process got no processor time" in caplog.text
    assert "selectors.py" not in caplog.text
    assert hands.meter.totals["loop.held"] == 0


def test_what_runs_after_the_wait_is_blamed_for_its_own_time_only(
    hands: Hands, in_selector: Callable[[], None]
) -> None:
    while not hands.posted:
        hands.look()
    hands.look(3)
    in_selector()
    hands.look(4)
    hands.turn()
    hands.look()
    starved, blamed = hands.watch.reports
    assert starved.handler == STARVED
    assert blamed.handler == NO_HANDLER
    assert blamed.where
    assert blamed.held_s < 0.5


def test_what_has_no_name_is_counted_all_the_same(hands: Hands) -> None:
    hands.running = 7
    hands.look(5)
    hands.turn()
    hands.look()
    ((handler, *_),) = hands.held()
    assert handler == UNNAMED


# where


def test_the_place_is_in_the_function_that_was_called_by_the_library() -> None:
    found: list[str] = []

    class Spy(dict[str, int]):
        def items(self) -> Any:
            found.append(where_in(sys._getframe()))
            return super().items()

    def handler() -> None:
        json.dumps(Spy(a=1), indent=1)  # the frames inside say less

    async def main() -> None:
        asyncio.get_running_loop().call_soon(handler)
        await asyncio.sleep(0)

    asyncio.run(main())
    line = handler.__code__.co_firstlineno + 1
    assert found == [f"{__file__}:{line} in handler"]
    assert where_in(None) == "?"


# with its thread


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - another thread makes it true
            await asyncio.sleep(0.002)


def stand_in_the_way(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not until():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.002)


def watches() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "domicile-loop-watch"]


def watching(running: Callable[[], object | None], meter: Counts) -> LoopWatch:
    return LoopWatch(
        clock=SystemClock(),
        meter=meter,
        settings=SETTINGS,
        running=running,
        describe=describe,
        tags=TAGS,
    )


def test_a_real_loop_is_seen_to_turn_to_stand_and_to_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turns: list[str | None] = [None]
    meter = Counts()

    async def main() -> None:
        watch = watching(lambda: turns[0], meter)
        watch.start()
        try:
            first = watch.turned_at()
            await wait_until(lambda: watch.turned_at() > first)
            turns[0] = "stand"
            stand_in_the_way(lambda: bool(watch.reports))
            (report,) = watch.reports
            assert (report.handler, report.over) == (RunningHandler("mason", "m1", "stand"), False)
            assert "test_loopwatch.py" in report.where
            assert report.where.endswith(" in main")
            stood = watch.turned_at()
            turns[0] = None
            await wait_until(lambda: watch.turned_at() > stood)
            await wait_until(lambda: watch.reports[-1].over)
            assert watch.reports[-1].held_s >= 1.0
            assert meter.totals["loop.held"] == 1
        finally:
            watch.stop()
        assert not watches()
        watch.stop()

    with caplog.at_level(logging.WARNING, logger="domicile"):
        run(main())
    assert len(caplog.records) == 2


def test_a_look_that_fails_ends_no_watch(caplog: pytest.LogCaptureFixture) -> None:
    """The lease hangs on this thread: without it the loop would count as blocked."""
    failures: list[None] = [None] * 3

    def running() -> None:
        if failures:
            failures.pop()
            raise SystemError("bad argument to internal function")

    async def main() -> None:
        watch = watching(running, Counts())
        watch.start()
        try:
            first = watch.turned_at()
            await wait_until(lambda: not failures and watch.turned_at() > first)
        finally:
            watch.stop()
        assert not watches()

    run(main())
    assert len(caplog.records) == 1, "said once"


def test_a_loop_that_is_closed_ends_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    watch = watching(lambda: "always", Counts())

    async def main() -> None:
        watch.start()

    asyncio.run(main())
    try:
        stand_in_the_way(lambda: not watches())
    finally:
        watch.stop()
    assert not caplog.records


def test_one_that_was_never_started_can_be_stopped() -> None:
    watching(lambda: None, Counts()).stop()
