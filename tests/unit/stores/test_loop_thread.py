"""`LoopThread` runs coroutines beside a blocked loop, and ends with its owner."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, Future

import pytest

from domicile.stores.loop_thread import LoopThread


def test_work_runs_while_the_callers_loop_is_blocked() -> None:
    async def main() -> str:
        thread = LoopThread("beside")

        async def name() -> str:
            await asyncio.sleep(0)
            return threading.current_thread().name

        try:
            # `result` blocks this loop; the other one goes on.
            return thread.submit(name).result(10)
        finally:
            thread.close()

    assert asyncio.run(main()) == "beside"


def test_close_runs_the_last_work_then_cancels_the_rest_and_refuses_more() -> None:
    thread = LoopThread("beside")
    began = threading.Event()
    ended: Future[None] = Future()

    async def forever() -> None:
        began.set()
        await asyncio.Event().wait()

    async def last() -> None:
        ended.set_result(None)

    running = thread.submit(forever)
    assert began.wait(10)
    thread.close(last)
    assert ended.result(10) is None
    with pytest.raises(CancelledError):
        running.result(10)
    with pytest.raises(RuntimeError, match="closed"):
        thread.submit(forever)
    thread.close()
