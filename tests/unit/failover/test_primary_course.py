"""Which primary connections belong to, without a store: what ends, and what its users are told."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import cast

import pytest

from domicile import Unavailable
from domicile.failover.clients.primary_course import Lifeline, PrimaryCourse, SyncPrimaryCourse
from domicile.failover.following import Group, Primary


def of_epoch(epoch: int) -> Primary:
    return Primary("orders", "s1", "127.0.0.1:1", epoch, datetime.now(UTC))


class Told:
    """A group that says what the test says."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[Primary] = asyncio.Queue()
        self.closed = False

    async def primary(self) -> Primary:
        return of_epoch(1)

    async def primaries(self) -> AsyncGenerator[Primary]:
        try:
            while True:
                yield await self.news.get()
        finally:
            for _ in range(10):  # as the real one, which waits for its tasks
                await asyncio.sleep(0)
            self.closed = True


def test_after_its_block_a_client_says_that_it_is_closed() -> None:
    """A `CancelledError` would look as if the caller's own task had been cancelled."""

    async def scenario() -> None:
        async def ended() -> None:
            pass

        course = PrimaryCourse(cast("Group", Told()), ended)
        async with course.followed():
            await course.primary()
        with pytest.raises(Unavailable, match="was closed"):
            await course.primary()

    asyncio.run(scenario())


def test_the_news_of_a_group_ends_with_the_block() -> None:
    """Also while connections of a former primary may still answer."""

    async def scenario() -> None:
        async def ended() -> None:
            pass

        group = Told()
        course = PrimaryCourse(cast("Group", group), ended)
        async with course.followed():
            group.news.put_nowait(of_epoch(1))
            group.news.put_nowait(of_epoch(2))
            while course.epoch < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert group.closed

    asyncio.run(scenario())


class BlockingTold:
    """As `Told`, for threads."""

    def __init__(self) -> None:
        self.tell: Callable[[Primary], None] = lambda _: None

    def primary(self, *, wait_s: float | None = None) -> Primary:
        return of_epoch(1)

    @contextmanager
    def followed(self, told: Callable[[Primary], None]) -> Generator[Callable[[], None]]:
        self.tell = told
        yield lambda: None


class Dropping(Lifeline):
    """When it ends, the garbage collector takes another connection, in this same thread."""

    def __init__(self, number: int, drop: Callable[[], None]) -> None:
        super().__init__(number)
        self._drop = drop

    def end(self) -> None:
        self._drop()
        super().end()


def test_a_connection_may_be_collected_while_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """redis-py's connections close when they are collected, which may be at any moment."""
    monkeypatch.setattr("domicile.failover.clients.primary_course.LATE_S", 0.0)
    group = BlockingTold()
    course = SyncPrimaryCourse(group)
    ours, theirs = socket.socketpair()
    with ours, theirs, course.followed():
        course.primary()
        lost = Lifeline(ours.fileno())
        course.opened(Dropping(ours.fileno(), lambda: course.closed(lost)), 1)
        course.opened(lost, 1)
        group.tell(of_epoch(2))
        theirs.settimeout(60)
        assert theirs.recv(1) == b""
        # The other thread lets go of the course.
        free = threading.Event()
        threading.Thread(
            target=lambda: (course.opened(Lifeline(ours.fileno()), 2), free.set()), daemon=True
        ).start()
        assert free.wait(60)


def test_a_lifeline_ends_its_own_connection_and_no_other() -> None:
    ours, theirs = socket.socketpair()
    other, others = socket.socketpair()
    with theirs, other, others:
        number = ours.fileno()
        lifeline = Lifeline(number)
        ours.close()
        # The number is another connection's now.
        os.dup2(other.fileno(), number)
        lifeline.end()
        other.send(b"x")
        assert others.recv(1) == b"x"
        assert theirs.recv(1) == b""
        lifeline.close()
        lifeline.end()
        os.close(number)
