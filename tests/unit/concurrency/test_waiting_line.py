"""A line: tasks go on in the order in which they came, however late each of them runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from domicile.concurrency.waiting_line import TURNS, WaitingLine

Main = Callable[["Row"], Coroutine[Any, Any, None]]


class Row:
    """A line, and who has gone on."""

    def __init__(self) -> None:
        self.line = WaitingLine()
        self.gone: list[int] = []
        self.open = asyncio.Event()

    async def go(self, number: int, until: Awaitable[Any]) -> None:
        await self.line.wait(until)
        self.gone.append(number)

    async def late(self, turns: int) -> None:
        await self.open.wait()
        for _ in range(turns):
            await asyncio.sleep(0)


def run(main: Main) -> Row:
    async def whole() -> Row:
        row = Row()
        await main(row)
        return row

    return asyncio.run(whole())


def test_one_that_need_not_wait_does_not_overtake_one_that_is_woken() -> None:
    async def main(row: Row) -> None:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(row.go(1, row.late(2)))
            await asyncio.sleep(0)
            row.open.set()
            await row.go(2, asyncio.sleep(0))
            assert first.done() or row.gone == [1, 2]

    assert run(main).gone == [1, 2]


def test_all_that_are_woken_together_go_on_in_order() -> None:
    async def main(row: Row) -> None:
        async with asyncio.TaskGroup() as group:
            for number, turns in enumerate((2, 0, 1, 2, 0)):
                group.create_task(row.go(number, row.late(turns)))
            await asyncio.sleep(0)
            assert len(row.line) == 5
            row.open.set()
        assert len(row.line) == 0

    assert run(main).gone == [0, 1, 2, 3, 4]


def test_one_that_is_cancelled_or_fails_holds_up_nobody() -> None:
    async def fail() -> None:
        await row_opens.wait()
        raise KeyError("a wait that fails")

    row_opens = asyncio.Event()

    async def main(row: Row) -> None:
        tasks = [
            asyncio.ensure_future(row.go(1, row.late(0))),
            asyncio.ensure_future(row.go(2, fail())),
            asyncio.ensure_future(row.go(3, row.late(0))),
        ]
        await asyncio.sleep(0)
        tasks[0].cancel()
        row_opens.set()
        row.open.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [
            asyncio.CancelledError, KeyError, type(None),
        ]  # fmt: skip

    assert run(main).gone == [3]


def test_one_that_is_never_resumed_holds_up_nobody_for_long() -> None:
    """L4: its coroutine is kept, so its place is not given up."""

    async def main(row: Row) -> None:
        abandoned = row.go(1, asyncio.sleep(0))
        abandoned.send(None)
        async with asyncio.TaskGroup() as group:
            for number in (2, 3):
                group.create_task(row.go(number, asyncio.sleep(0)))
            for _ in range(TURNS + 3):
                await asyncio.sleep(0)
            assert row.gone == [2, 3]
        assert len(row.line) == 0
        abandoned.close()

    assert run(main).gone == [2, 3]
