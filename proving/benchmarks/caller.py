"""How everything here is measured: closed loops of asks, windows of tells, entities that are new.

Shared by every measured process, Domicile's and the peers', so that all are measured by the same
lines. Peers run it in environments of their own: nothing but the standard library may be imported.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

PAYLOAD_BYTES = 100
PAYLOAD = b"x" * PAYLOAD_BYTES
NEW_IN_FLIGHT = 100
"""First asks in flight while idle entities are made."""


class Arrivals:
    """Counts the one-way messages that ran, and wakes who waits for a number of them."""

    def __init__(self) -> None:
        self.count = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def note(self) -> None:
        """One more."""
        self.count += 1
        if self._waiting and self.count >= self._waiting[0][0]:
            _, reached = self._waiting.popleft()
            if not reached.done():
                reached.set_result(None)

    async def reach(self, wanted: int) -> None:
        """Wait until that many have run. Numbers rise from one call to the next."""
        if self.count < wanted:
            reached = asyncio.get_running_loop().create_future()
            self._waiting.append((wanted, reached))
            await reached


class Caller(ABC):
    """One way to send, and how it is measured."""

    @abstractmethod
    async def ask(self, number: int) -> None:
        """Send the payload and take it back."""

    async def new(self, number: int) -> None:
        """The same to an entity that does not exist yet."""
        raise NotImplementedError(f"{type(self).__name__} has no entities")

    async def begin(self, part: int) -> int:
        """Get ready for one-way messages that are confirmed in parts; how many ran before."""
        return 0

    async def send(self, first: int, count: int) -> None:
        """Send so many one-way messages."""
        raise NotImplementedError(f"{type(self).__name__} has no one-way messages")

    async def confirm(self, total: int) -> None:
        """Return once the receiver has said that it ran so many in all."""
        raise NotImplementedError(f"{type(self).__name__} has no one-way messages")

    async def run(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """One measurement after its warm-up. `all` counts the warm-up too, for the CPU time."""
        if wanted["what"] == "idle":
            return await self.idle(wanted["count"])
        measure = {"ask": self.asks, "tell": self.tells, "new": self.news}[wanted["what"]]
        warmed = 0
        if wanted["warm_s"] > 0:
            warmed = (await measure(wanted["depth"], wanted["warm_s"]))["count"]
        gc.collect()
        told = await measure(wanted["depth"], wanted["seconds"])
        return {**told, "all": told["count"] + warmed}

    async def asks(self, depth: int, seconds: float) -> dict[str, Any]:
        """Asks of existing entities."""
        return await closed_loop(self.ask, depth, seconds)

    async def news(self, depth: int, seconds: float) -> dict[str, Any]:
        """First asks: every one makes an entity."""
        return await closed_loop(self.new, depth, seconds)

    async def tells(self, depth: int, seconds: float) -> dict[str, Any]:
        """One-way messages, at most `depth` of them not confirmed.

        They go out in quarters of the window; one leaves while those before it are confirmed.
        Latency is that of a quarter: from its first message until the confirmation is here.
        """
        part = max(1, depth // 4)
        base, sent = await self.begin(part), 0
        took: list[float] = []
        waiting: deque[asyncio.Task[None]] = deque()

        async def confirmed(total: int, since: float) -> None:
            await self.confirm(base + total)
            took.append(time.perf_counter() - since)

        began = now = time.perf_counter()
        while not sent or now < began + seconds:
            await self.send(sent, part)
            sent += part
            waiting.append(asyncio.create_task(confirmed(sent, now)))
            if len(waiting) * part >= depth:
                await waiting.popleft()
            else:
                await asyncio.sleep(0)
            now = time.perf_counter()
        await asyncio.gather(*waiting)
        return summary(sent, time.perf_counter() - began, took)

    async def idle(self, count: int) -> dict[str, Any]:
        """What one more idle entity costs in resident memory, its id included."""
        await _each(self.new, range(2 * NEW_IN_FLIGHT))
        before = resident_bytes()
        began = time.perf_counter()
        await _each(self.new, range(2 * NEW_IN_FLIGHT, 2 * NEW_IN_FLIGHT + count))
        took_s = time.perf_counter() - began
        return {"bytes": (resident_bytes() - before) / count, "count": count, "took_s": took_s}


async def closed_loop(
    one: Callable[[int], Awaitable[None]], depth: int, seconds: float
) -> dict[str, Any]:
    """`depth` workers, each with one in flight, for so long; each does at least one."""
    took: list[float] = []
    began = time.perf_counter()
    ends = began + seconds

    async def work(number: int) -> None:
        now = time.perf_counter()
        while True:
            await one(number)
            number += depth
            took.append(-now + (now := time.perf_counter()))
            if now >= ends:
                return

    await asyncio.gather(*map(work, range(depth)))
    return summary(len(took), time.perf_counter() - began, took)


async def _each(one: Callable[[int], Awaitable[None]], numbers: Sequence[int]) -> None:
    left = iter(numbers)

    async def work() -> None:
        for number in left:
            await one(number)

    await asyncio.gather(*(work() for _ in range(NEW_IN_FLIGHT)))


def summary(count: int, took_s: float, latencies_s: list[float]) -> dict[str, Any]:
    """What is told of a measurement."""
    ordered = sorted(latencies_s)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {
        "count": count, "took_s": took_s,
        "p50_s": at(0.5), "p99_s": at(0.99), "max_s": ordered[-1],
    }  # fmt: skip


def resident_bytes() -> int:
    """What this process holds of real memory; on Linux only."""
    if sys.platform != "linux":
        raise NotImplementedError("resident memory is read from /proc, which only Linux has")
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
