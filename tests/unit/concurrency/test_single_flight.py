"""Work that several need at once is done once; how it ends is told to the one that did it."""

from __future__ import annotations

import asyncio

import pytest

from domicile.concurrency.single_flight import SingleFlight


class Flights:
    """Work that ends when the test says so, and counts how often it was begun."""

    def __init__(self) -> None:
        self.flight = SingleFlight()
        self.begun = 0
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> bool:
        """True: this one did it."""
        landing = self.flight.join()
        if landing is not None:
            await landing
            return False
        self.begun += 1
        try:
            await self.end
        finally:
            self.flight.land()
        return True

    async def three(self) -> list[asyncio.Task[bool]]:
        tasks = [asyncio.ensure_future(self.run()) for _ in range(3)]
        await asyncio.sleep(0)
        return tasks


def test_the_first_does_it_and_the_others_wait() -> None:
    async def body() -> None:
        flights = Flights()
        tasks = await flights.three()
        assert flights.begun == 1
        assert not any(task.done() for task in tasks)
        flights.end.set_result(None)
        assert await asyncio.gather(*tasks) == [True, False, False]
        flights.end = asyncio.get_running_loop().create_future()
        flights.end.set_result(None)
        assert await flights.run(), "it is over, so the next one does it again"
        assert flights.begun == 2

    asyncio.run(body())


def test_a_failure_is_for_the_one_that_did_it() -> None:
    async def body() -> None:
        flights = Flights()
        first, *others = await flights.three()
        flights.end.set_exception(ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            await first
        assert await asyncio.gather(*others) == [False, False]

    asyncio.run(body())


def test_nobody_waits_for_one_that_was_cancelled() -> None:
    async def body() -> None:
        flights = Flights()
        first, *others = await flights.three()
        first.cancel()
        assert await asyncio.gather(*others) == [False, False]
        assert first.cancelled()

    asyncio.run(body())


def test_who_is_cancelled_while_it_waits_disturbs_nobody() -> None:
    async def body() -> None:
        flights = Flights()
        first, second, third = await flights.three()
        second.cancel()
        await asyncio.sleep(0)
        flights.end.set_result(None)
        assert (await first, await third) == (True, False)
        assert second.cancelled()

    asyncio.run(body())
