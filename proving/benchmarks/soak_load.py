"""What runs in the processes of a soak: entities that come and go, a load that keeps nothing.

The load asks, tells and lets entities ask each other, on ids that are new all the time, so that
whatever is kept per entity, per message or per peer shows as growth. It remembers counts only.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from domicile import Client, DomicileError, Entity, Settings, connect, handler
from proving.benchmarks.part import Options, Part

TICK_S = 0.005
ERA_S = 10.0
"""How long the load keeps to the same ids."""

TIMEOUT_S = 5.0


def inside() -> dict[str, int]:
    """What only a process itself can count."""
    gc.collect()
    return {
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        # Not gc.get_objects(): a tuple that another thread is filling would break.
        "blocks": sys.getallocatedblocks(),
    }


class Guest(Entity, name="guest", idle_s=3.0):
    """Stays for a while and knows other guests."""

    talks: int = 0

    @handler
    async def talk(self, words: bytes) -> int:
        """Answers at once."""
        self.talks += 1
        return len(words)

    @handler
    async def ponder(self, seconds: float) -> int:
        """Answers later."""
        await asyncio.sleep(seconds)
        return self.talks

    @handler
    async def gossip(self, other: str, words: bytes) -> int:
        """Asks somebody else first."""
        return await self.ref(Guest, other).ask(Guest.talk, words)


class Probe(Entity, name="probe"):
    """Tells of the process that it lives in."""

    @handler
    async def figures(self) -> dict[str, int]:
        """Now."""
        return inside()


class Steady:
    """A rate of messages, for as long as the process lives."""

    def __init__(self, client: Client, options: Options) -> None:
        self._client, self._options = client, options
        self._random = Random(options["seed"])
        self._outcomes: Counter[str] = Counter()
        self._flying = 0

    async def run(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """What became of messages so far, and what this process holds."""
        return {"outcomes": dict(self._outcomes), "figures": inside()}

    async def send(self) -> None:
        """Until cancelled."""
        rate: float = self._options["rate"]
        began, sent = time.monotonic(), 0
        async with asyncio.TaskGroup() as group:
            while True:
                due = int((time.monotonic() - began) * rate)
                for _ in range(due - sent):
                    if self._flying < self._options["most"]:
                        group.create_task(self._one())
                    else:
                        self._outcomes["held back"] += 1
                sent = due
                await asyncio.sleep(TICK_S)

    async def _one(self) -> None:
        self._flying += 1
        try:
            await self._message()
            self._outcomes["ok"] += 1
        except DomicileError as error:
            self._outcomes[type(error).__name__] += 1
        finally:
            self._flying -= 1

    async def _message(self) -> None:
        random, words = self._random, b"x" * self._random.randrange(10, 500)
        guest = self._client.ref(Guest, self._name()).options(timeout_s=TIMEOUT_S)
        kind = random.random()
        if kind < 0.4:
            await guest.ask(Guest.talk, words)
        elif kind < 0.6:
            await guest.tell(Guest.talk, words)
        elif kind < 0.8:
            await guest.ask(Guest.gossip, self._name(), words)
        else:
            await guest.ask(Guest.ponder, 0.05 * random.random())

    def _name(self) -> str:
        return f"{int(time.monotonic() / ERA_S)}-{self._random.randrange(self._options['guests'])}"

    async def visit(self) -> None:
        """Other clients come, ask and go, until cancelled."""
        while True:
            try:
                async with connect(
                    self._options["where"], settings=Settings(**self._options["settings"])
                ) as visitor:
                    guest = visitor.ref(Guest, self._name()).options(timeout_s=TIMEOUT_S)
                    await guest.ask(Guest.talk, b"hello")
                self._outcomes["visit"] += 1
            except DomicileError as error:
                self._outcomes[f"visit: {type(error).__name__}"] += 1
            await asyncio.sleep(self._random.random())


@asynccontextmanager
async def load(options: Options) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """A client that never stops."""
    async with connect(options["where"], settings=Settings(**options["settings"])) as client:
        steady = Steady(client, options)
        tasks = [asyncio.create_task(steady.send()), asyncio.create_task(steady.visit())]
        try:
            yield options["where"], {"soak": steady}
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


PARTS: dict[str, Part] = {"load": load}
