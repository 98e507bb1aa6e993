"""The machine's clock: counts suspended time, never calls back early."""

from __future__ import annotations

import asyncio
import sys
import time
from datetime import UTC, timedelta

import pytest

from domicile.membership.clock import SystemClock
from domicile.ports.clock import Clock


def test_it_is_a_clock_that_rises() -> None:
    clock: Clock = SystemClock()
    before = clock.now()
    assert clock.now() >= before
    assert clock.wall().tzinfo is UTC
    assert clock.wall().utcoffset() == timedelta(0)


@pytest.mark.skipif(sys.platform != "linux", reason="CLOCK_BOOTTIME is Linux only")
def test_on_linux_it_counts_suspended_time() -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    now = SystemClock().now()
    assert before <= now <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_timers_come_in_order_and_not_before_their_time() -> None:
    clock = SystemClock()
    fired: list[tuple[str, bool]] = []

    async def main() -> None:
        done = asyncio.get_running_loop().create_future()
        start = clock.now()

        def last() -> None:
            fired.append(("late", clock.now() >= start + 0.02))
            done.set_result(None)

        clock.call_at(start + 0.02, last)
        clock.call_at(start + 0.01, lambda: fired.append(("soon", clock.now() >= start + 0.01)))
        clock.call_at(start - 5, lambda: fired.append(("past", True)))
        clock.call_at(start + 0.001, lambda: fired.append(("cancelled", True))).cancel()
        await done

    asyncio.run(main())
    assert fired == [("past", True), ("soon", True), ("late", True)]


def test_a_timer_waits_again_while_its_clock_is_behind_the_loop() -> None:
    elapsed_s = 0.0
    looks = 0

    def slow() -> float:
        nonlocal elapsed_s, looks
        looks += 1
        elapsed_s += 0.001
        return elapsed_s

    clock = SystemClock(slow)

    async def main() -> float:
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        clock.call_at(0.0055, lambda: done.set_result(elapsed_s))
        return await done

    assert asyncio.run(main()) >= 0.0055
    assert looks > 4


def test_a_timer_that_waits_again_can_still_be_cancelled() -> None:
    now_s = 0.0
    clock = SystemClock(lambda: now_s)

    async def main() -> bool:
        loop = asyncio.get_running_loop()
        fired = False

        def fire() -> None:
            nonlocal fired
            fired = True

        timer = clock.call_at(0.001, fire)
        done = loop.create_future()

        def cancel() -> None:
            nonlocal now_s
            timer.cancel()
            now_s = 1.0
            loop.call_later(0.005, done.set_result, None)

        loop.call_later(0.005, cancel)
        await done
        return fired

    assert asyncio.run(main()) is False
