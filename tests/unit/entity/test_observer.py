"""Which runs of handlers are looked at, and what is seen of them."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

from domicile.entity.running.observer import SAMPLED, Observer


class Eyes:
    """Takes notes as a tracer and as a sampler."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str]] = []
        self.times: list[tuple[str, str]] = []

    def inject(self) -> str:
        """Nothing."""
        return ""

    @contextmanager
    def span(self, trace: str, name: str) -> Generator[None]:
        """Note it."""
        self.spans.append((trace, name))
        yield

    def took(self, type: str, handler: str, seconds: float) -> None:
        """Note it."""
        assert seconds >= 0
        self.times.append((type, handler))


async def work(value: int) -> int:
    if value < 0:
        raise ValueError(value)
    await asyncio.sleep(0)
    return value


def serve(observer: Observer, value: int) -> Any:
    """As the host of a shard does."""
    run: Any = work(value)
    observer.left -= 1
    if observer.left < 0:
        run = observer.look_at(run, "cart", "add", "from there")
    return asyncio.run(run)


def test_one_run_in_many_is_timed_and_every_one_is_counted() -> None:
    eyes = Eyes()
    observer = Observer(None, eyes.took)
    for number in range(3 * SAMPLED - 1):
        assert observer.turns == number
        assert serve(observer, number) == number
    assert eyes.times == [("cart", "add")] * 2
    assert observer.turns == 3 * SAMPLED - 1


def test_with_a_tracer_every_run_has_a_span_and_some_are_timed() -> None:
    eyes = Eyes()
    observer = Observer(eyes, eyes.took)
    for number in range(2 * SAMPLED):
        assert serve(observer, number) == number
    assert eyes.spans == [("from there", "cart.add")] * 2 * SAMPLED
    assert eyes.times == [("cart", "add")] * 2
    assert observer.turns == 2 * SAMPLED


def test_what_a_handler_raises_is_raised_and_timed() -> None:
    eyes = Eyes()
    observer = Observer(eyes, eyes.took)
    for _ in range(SAMPLED):
        with pytest.raises(ValueError, match="-1"):
            serve(observer, -1)
    assert len(eyes.spans) == SAMPLED
    assert len(eyes.times) == 1


def test_with_nobody_looking_a_run_is_left_as_it_is() -> None:
    observer = Observer()
    run = work(1)
    for _ in range(SAMPLED):
        observer.left -= 1
    assert observer.left < 0
    assert observer.look_at(run, "cart", "add") is run
    assert observer.turns == SAMPLED
    run.close()
