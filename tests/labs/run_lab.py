"""`domicile` as a process of its own, and an app for it to run."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from domicile import Client, Entity, Settings, connect, handler

T = TypeVar("T")

WAIT_S = 120.0

APP = """
import asyncio
import time
from domicile import Entity, Node, Settings, handler


class Clerk(Entity, name="clerk"):
    count: int = 0

    @handler
    async def add(self) -> int:
        self.count += 1
        return self.count

    @handler
    async def block(self, seconds: float) -> None:
        time.sleep(seconds)

    @handler
    async def linger(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @handler
    async def ignore(self) -> None:
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass


SHORT = Settings(ttl_s=2, shards=4)
HASTY = Settings(ttl_s=2, shards=4, stall_limit_s=0.5)
STEADY = Settings(ttl_s=20, shards=4)
node = Node("sqlite:///clerk.db", entities=[Clerk], settings=SHORT, node_id="desk")
hasty = Node("sqlite:///clerk.db", entities=[Clerk], settings=HASTY, node_id="desk")
patient = Node("sqlite:///clerk.db", entities=[Clerk], settings=Settings(shards=4), node_id="desk")

follower = Node(
    "sqlite:///clerk.db", entities=[Clerk], settings=STEADY, node_id="aide", candidate=False
)


def make():
    return Node("sqlite:///clerk.db", entities=[Clerk], node_id="made")
"""


class Clerk(Entity, name="clerk"):
    """The app's entity, as a sender knows it."""

    @handler
    async def add(self) -> int:
        """One more."""
        raise NotImplementedError

    @handler
    async def block(self, seconds: float) -> None:
        """Holds the loop."""

    @handler
    async def linger(self, seconds: float) -> None:
        """Suspends."""

    @handler
    async def ignore(self) -> None:
        """Suspends and does not go."""


class Running:
    """A `domicile` process whose standard error is read line by line."""

    def __init__(self, place: Path, *arguments: str, module: str = "domicile") -> None:
        # A shell starts background jobs with SIGINT ignored, which children would inherit.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        path = os.pathsep.join(filter(None, sys.path))
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=place,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "NO_COLOR": "1",
                    "PYTHONPATH": path,
                },
            )
        finally:
            signal.signal(signal.SIGINT, before)
        self.said: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def hear(self, *words: str) -> str:
        """Wait for a line with any of these words, after those heard before."""
        while True:
            line = self._lines.get(timeout=WAIT_S)
            if line is None:
                raise AssertionError(f"it ended without saying {words!r}: {self.said}")
            self.said.append(line)
            if any(word in line for word in words):
                return line

    def signal(self, kind: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(kind)

    def ended(self) -> int:
        """Wait for its end; the exit code."""
        code = self.process.wait(WAIT_S)
        self._reading.join(WAIT_S)
        while (line := self._lines.get(timeout=WAIT_S)) is not None:
            self.said.append(line)
        return code

    def end(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)
        self._reading.join(WAIT_S)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)


@contextmanager
def running(place: Path, *arguments: str, module: str = "domicile") -> Iterator[Running]:
    """A `domicile` process that does not outlive the test."""
    process = Running(place, *arguments, module=module)
    try:
        yield process
    finally:
        process.end()


def as_client(place: Path, work: Callable[[Client], Coroutine[Any, Any, T]]) -> T:
    """Do something as a client of the app's cluster."""

    async def connected() -> T:
        store = f"sqlite:///{place / 'clerk.db'}"
        settings = Settings(drain_deadline_s=0.1, linger_s=0.1, ask_timeout_s=60)
        async with connect(store, settings=settings) as client:
            return await work(client)

    return asyncio.run(connected())
