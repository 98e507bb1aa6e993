"""A load that does not wait for answers, and the entities that it asks.

The load is a process of its own, so that what it measures is not its own neighbour. An ask's time
counts from the moment at which it was due, not from when it was sent: a cluster that stands still
for a second is seen by every ask of that second (no coordinated omission). Times are those of the
machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from domicile import Client, DomicileError, Entity, Ref, Settings, connect, handler
from proving.benchmarks.caller import closed_loop
from proving.benchmarks.part import Options, Part

TICK_S = 0.001
WARM_IN_FLIGHT = 100
BIN_S = 0.5
"""Width of the bins of a curve."""


class Clerk(Entity, name="clerk"):
    """Computes for as long as it is told to, and counts what it did at this home."""

    done: int = 0

    @handler
    async def work(self, work_s: float) -> int:
        """Hold the processor."""
        ends = time.perf_counter() + work_s
        while time.perf_counter() < ends:
            pass
        self.done += 1
        return self.done


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value that a share of all does not exceed; of sorted values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class OpenLoop:
    """Asks at a rate, from `begin` to `end`, and knows what became of each."""

    def __init__(self, client: Client, entities: int, work_s: float) -> None:
        self._refs: list[Ref[Clerk]] = [client.ref(Clerk, str(n)) for n in range(entities)]
        self._work_s = work_s
        self._sending: asyncio.Task[None] | None = None
        self._stop = False
        self._asks: list[tuple[float, float]] = []
        self._late: list[tuple[float, float]] = []
        self._failed: Counter[str] = Counter()
        self._failed_at: list[float] = []

    async def run(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """One wish."""
        match wanted["what"]:
            case "warm":
                return await self._warm()
            case "closed":
                return await closed_loop(self._work, wanted["depth"], wanted["seconds"])
            case "begin":
                self._stop = False
                self._sending = asyncio.create_task(self._send(wanted["rate"]))
                return {}
            case "end":
                return await self._end()
            case "phase":
                return self._phase(wanted["since"], wanted["until"])
            case "curve":
                return {"bins": self._curve(wanted["since"], wanted["until"])}
            case what:
                raise NotImplementedError(f"a load can't do {what!r}")

    async def _warm(self) -> dict[str, Any]:
        """Have every entity resident."""
        left = iter(self._refs)

        async def each() -> None:
            for ref in left:
                await ref.ask(Clerk.work, 0.0)

        await asyncio.gather(*(each() for _ in range(WARM_IN_FLIGHT)))
        return {"entities": len(self._refs)}

    async def _work(self, number: int) -> None:
        await self._refs[number * 7919 % len(self._refs)].ask(Clerk.work, self._work_s)

    async def _send(self, rate: float) -> None:
        began, sent = time.monotonic(), 0
        async with asyncio.TaskGroup() as group:
            while not self._stop:
                while (due := began + sent / rate) <= time.monotonic():
                    group.create_task(self._one(sent, due))
                    sent += 1
                await asyncio.sleep(TICK_S)

    async def _one(self, number: int, due: float) -> None:
        self._late.append((due, time.monotonic() - due))
        try:
            await self._work(number)
        except DomicileError as error:
            self._failed[f"{type(error).__name__}: {error}"] += 1
            self._failed_at.append(due)
        else:
            self._asks.append((due, time.monotonic() - due))

    async def _end(self) -> dict[str, Any]:
        assert self._sending is not None, "begin first"
        self._stop = True
        await self._sending
        return {"asks": len(self._asks), "failed": dict(self._failed.most_common(5))}

    def _phase(self, since: float, until: float) -> dict[str, Any]:
        """Of the asks that were due in that time."""
        took = sorted(one for due, one in self._asks if since <= due < until) or [0.0]
        late = sorted(one for due, one in self._late if since <= due < until) or [0.0]
        return {
            "asks": len(took), "seconds": until - since,
            "failed": sum(since <= due < until for due in self._failed_at),
            "p50_s": quantile(took, 0.5), "p99_s": quantile(took, 0.99),
            "p999_s": quantile(took, 0.999), "max_s": took[-1],
            "sent_late_p99_s": quantile(late, 0.99),
        }  # fmt: skip

    def _curve(self, since: float, until: float) -> list[tuple[float, float, float]]:
        """Time, p50 and p99 of each half second."""
        bins: dict[int, list[float]] = {}
        for due, took in self._asks:
            if since <= due < until:
                bins.setdefault(int((due - since) / BIN_S), []).append(took)
        return [
            (number * BIN_S, quantile(found, 0.5), quantile(found, 0.99))
            for number, found in sorted((number, sorted(found)) for number, found in bins.items())
        ]


@asynccontextmanager
async def load(options: Options) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """A client that asks."""
    settings = Settings(**options["settings"])
    async with connect(options["where"], settings=settings) as client:
        yield (
            options["where"],
            {"load": OpenLoop(client, options["entities"], options["work_s"])},
        )


PARTS: dict[str, Part] = {"load": load}
