"""What the log says of handlers that fail: one traceback, where the error began."""

from __future__ import annotations

import asyncio
import logging

import pytest

from domicile import Entity, HandlerFailed, Node, Settings, handler
from domicile.backends.memory import MEMORY

STORE = "memory://failure-logs"


class Step(Entity, name="failure-step"):
    @handler
    async def descend(self, depth: int) -> int:
        if depth == 0:
            raise RuntimeError("the ground is wet")
        return await self.ref(Step, f"s{depth}").ask(Step.descend, depth - 1)

    @handler
    async def blame(self) -> None:
        raise HandlerFailed("made here")


def logged(depth: int, caplog: pytest.LogCaptureFixture) -> tuple[str, list[logging.LogRecord]]:
    async def main() -> str:
        async with Node(STORE, entities=[Step], settings=Settings(shards=8)) as node:
            top = node.ref(Step, "top")
            with pytest.raises(HandlerFailed) as caught:
                await (top.ask(Step.descend, depth) if depth else top.ask(Step.blame))
            return str(caught.value)

    MEMORY.forget(STORE, "domicile")
    with caplog.at_level(logging.WARNING, logger="domicile"):
        said = asyncio.run(main())
    return said, [one for one in caplog.records if "failed on" in one.getMessage()]


def test_a_chain_that_is_too_deep_logs_one_traceback(caplog: pytest.LogCaptureFixture) -> None:
    said, records = logged(20, caplog)
    assert "CallTooDeep" in said
    assert len(records) == 17
    whole = [one for one in records if one.exc_info]
    assert len(whole) == 1, "where the error began"
    assert "CallTooDeep" in caplog.text
    for one in records:
        if one not in whole:
            assert "because what it called failed" in one.getMessage()
            assert "CallTooDeep" in one.getMessage()
            assert "\n" not in one.getMessage()


def test_an_error_that_passes_through_is_logged_whole_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said, records = logged(3, caplog)
    assert "the ground is wet" in said
    assert [bool(one.exc_info) for one in records] == [True, False, False, False]
    assert records[0].exc_info is not None
    assert isinstance(records[0].exc_info[1], RuntimeError)


def test_a_failure_that_a_handler_made_itself_is_logged_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, (only,) = logged(0, caplog)
    assert only.exc_info
