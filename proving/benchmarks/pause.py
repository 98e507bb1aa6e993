"""How long a planned move interrupts its callers: `python -m proving.benchmarks.pause [--moves N]`.

Two real nodes and a client. The client asks one entity at a fixed rate, whatever the answers do (an
open loop: an ask that waits holds up no other), while the entity's shard is moved from one node to
the other and back. Per move: the longest gap between two answers, and the slowest ask. A gap
without a move, over as long a time, says what the machine itself adds. Any ask that fails is an
error: a planned move loses nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Literal, cast

from domicile import Settings
from domicile.testing import Processes
from proving.benchmarks.caller import PAYLOAD
from proving.benchmarks.home import Echo

EVERY_S = 0.001
LEAD_S = 0.1
"""How long the caller asks before and after each move."""

SHARDS = 16
ID = "busy"


@dataclass(slots=True)
class Pauses:
    """What was seen, one of each per move."""

    gaps_s: list[float] = field(default_factory=list[float])
    slowest_s: list[float] = field(default_factory=list[float])
    quiet_s: list[float] = field(default_factory=list[float])


class OpenLoop:
    """Asks on time, and remembers when answers came and how long they took."""

    def __init__(self, cluster: Processes) -> None:
        self._ref = cluster.ref(Echo, ID)
        self.answered: list[float] = []
        self.took_s: list[float] = []

    async def during(self, seconds: float, until: asyncio.Task[None] | None = None) -> None:
        """Ask for so long, and as long as something goes on."""
        async with asyncio.TaskGroup() as group:
            due = time.perf_counter()
            ends = due + seconds
            while due < ends or (until is not None and not until.done()):
                group.create_task(self._ask(due))
                due += EVERY_S
                await asyncio.sleep(max(0.0, due - time.perf_counter()))

    async def _ask(self, due: float) -> None:
        await self._ref.ask(Echo.echo, PAYLOAD)
        now = time.perf_counter()
        self.answered.append(now)
        self.took_s.append(now - due)

    def gap_s(self) -> float:
        """The longest time without an answer."""
        return max(later - earlier for earlier, later in pairwise(self.answered))


async def measure(moves: int, loop: str) -> Pauses:
    """Move a shard to and fro."""
    found = Pauses()
    settings = Settings(shards=SHARDS)
    async with Processes(
        [Echo], nodes=2, settings=settings, record=False,
        loop=cast("Literal['asyncio', 'uvloop']", loop),
    ) as cluster:  # fmt: skip
        shard = cluster.shard(Echo, ID)
        await cluster.ref(Echo, ID).ask(Echo.echo, PAYLOAD)
        for _ in range(moves):
            to = 1 - cluster.owner(Echo, ID)

            async def move(to: int = to) -> None:
                await asyncio.sleep(LEAD_S)
                await cluster.wish(shard, to)
                await cluster.wait_until(
                    lambda: (
                        (entry := cluster.entry(shard)).state == "serving"
                        and entry.owner == cluster.incarnation(to)
                    )
                )
                await asyncio.sleep(LEAD_S)

            moving, caller = asyncio.create_task(move()), OpenLoop(cluster)
            began = time.perf_counter()
            await caller.during(2 * LEAD_S, moving)
            await moving
            found.gaps_s.append(caller.gap_s())
            found.slowest_s.append(max(caller.took_s))
            quiet = OpenLoop(cluster)
            await quiet.during(time.perf_counter() - began)
            found.quiet_s.append(quiet.gap_s())
        await cluster.wish(shard, None)
    return found


def main() -> None:
    """Move, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--moves", type=int, default=40)
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="asyncio")
    given = parser.parse_args()
    if given.moves < 1:
        parser.error("--moves must be at least 1")
    found = asyncio.run(measure(given.moves, given.loop))
    print(f"{given.moves} moves of a shard whose entity is asked every {1e3 * EVERY_S:g} ms")
    print("| ms | median | max |\n| --- | ---: | ---: |")
    for name, values in (
        ("longest gap between answers", found.gaps_s),
        ("slowest ask", found.slowest_s),
        ("longest gap without a move", found.quiet_s),
    ):
        print(f"| {name} | {1e3 * median(values):.1f} | {1e3 * max(values):.1f} |")


if __name__ == "__main__":
    main()
