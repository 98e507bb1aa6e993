"""A signal that asks a node to leave, at every moment of its start (H14)."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import pytest

from domicile import Node, Settings
from domicile.ops import serve

LOOPS = ["asyncio", "uvloop"] if importlib.util.find_spec("uvloop") else ["asyncio"]
QUICK = Settings(shards=1, drain_deadline_s=0.2, linger_s=0.2)
LIMIT_S = 20.0
MORE_TURNS = 3
"""Turns of the loop after the start: the signal is noticed in a later turn than it comes."""


@pytest.fixture(autouse=True)
def kept() -> Iterator[list[int]]:
    """Signals that find no handler of ours: they would end the process, here they are noted."""
    early: list[int] = []
    before = {
        kind: signal.signal(kind, lambda number, _: early.append(number))
        for kind in (signal.SIGTERM, signal.SIGINT)
    }
    yield early
    for kind, handler in before.items():
        signal.signal(kind, handler)


def note_turns(turn: Callable[[int], bool]) -> None:
    """Call `turn` with the number of each turn of the running loop, until it returns False."""
    loop, numbers = asyncio.get_running_loop(), count()

    def next_turn() -> None:
        if turn(next(numbers)):
            loop.call_soon(next_turn)

    loop.call_soon(next_turn)


def run(loop: str, work: Any) -> Any:
    with asyncio.Runner(loop_factory=serve.loop_factory(loop)) as runner:  # type: ignore[arg-type]
        return runner.run(asyncio.wait_for(work, LIMIT_S))


@asynccontextmanager
async def resources() -> AsyncGenerator[Mapping[type[Any], Any]]:
    """Takes its time, so that the start has some turns before it joins."""
    for _ in range(5):
        await asyncio.sleep(0)
    yield {}


def new_node() -> Node:
    return Node("memory://", settings=QUICK, resources=resources)


def turns_of_a_start(loop: str) -> int:
    async def measured() -> int:
        turns: list[int] = []
        node = new_node()
        note_turns(lambda number: (turns.append(number), node.life is None)[1])
        async with node:
            pass
        return turns[-1]

    return int(run(loop, measured()))


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_signal_in_any_turn_of_the_start_makes_it_leave(
    loop: str, kind: signal.Signals, kept: list[int]
) -> None:
    turns = turns_of_a_start(loop)
    assert turns > 5
    for at in range(turns + MORE_TURNS):
        kept.clear()

        async def started(at: int = at) -> None:
            node = new_node()

            def turn(number: int) -> bool:
                if number == at:
                    signal.raise_signal(kind)
                return number < at

            note_turns(turn)
            serving = asyncio.ensure_future(serve._serve(node))  # pyright: ignore[reportPrivateUsage]
            while not (serving.done() or kept):  # noqa: ASYNC110 - a signal may end neither
                await asyncio.sleep(0.001)
            if kept:
                # The process would be over: nothing held the signals yet.
                serving.cancel()
                await asyncio.wait((serving,))
                assert node.life is None
                return
            await serving
            assert node.life is None, "it has left"

        run(loop, started())
    assert not kept, "the last ones were all taken"
