"""How long shards are without a home when their node is killed, on the embedded store.

    python -m benchmarks.recovery                 40 kills, in about two minutes
    python -m benchmarks.recovery --kills 5       fewer

Three real node processes and a client share a store in a temporary directory. Again and again one
node is killed by SIGKILL and, once everything is served again, started anew; every other time it
is the coordinator's. `answered` is the time from the kill until an entity whose home was there
answers the client; `served` until the store names a living home for every shard. The leases have
their default ttl of 6 s, which nobody waits for.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from statistics import median
from typing import Literal, cast

from domicile import DomicileError, Settings
from domicile.core.ids import ShardKey
from domicile.testing import Processes
from domicile.testing.workload import Room

SHARDS = 64
NODES = 3
TRY_S = 0.25


def quantile(values: list[float], share: float) -> float:
    """The value that a share of all does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def answered(cluster: Processes, id: str) -> float:
    """When an entity answers again, whatever the first tries meet."""
    while True:
        with contextlib.suppress(DomicileError):
            await cluster.ref(Room, id).options(timeout_s=TRY_S).ask(Room.note, 1)
            return time.monotonic()


async def served(cluster: Processes) -> float:
    """When the store names a living home for every shard."""
    shards = [ShardKey("default", number) for number in range(SHARDS)]
    while True:
        living = [cluster.incarnation(node) for node in range(NODES)]
        entries = [cluster.entry(shard) for shard in shards]
        if all(entry.state == "serving" and entry.owner in living for entry in entries):
            return time.monotonic()
        await asyncio.sleep(0.002)


def loads(cluster: Processes) -> list[int]:
    """How many shards each node is home to."""
    owners = [cluster.entry(ShardKey("default", number)).owner for number in range(SHARDS)]
    return [owners.count(cluster.incarnation(node) or "-") for node in range(NODES)]  # type: ignore[arg-type]


def victim_of(cluster: Processes, leading: bool) -> int | None:
    """A node to kill: the coordinator's, or another one."""
    leader = cluster.leader()
    if leader is None or leading:
        return leader
    return next(node for node in range(NODES) if node != leader)


async def measure(kills: int, loop: str = "asyncio") -> tuple[list[float], list[float]]:
    """Seconds until answered and until served, of every kill."""
    answers: list[float] = []
    serves: list[float] = []
    settings = Settings(shards=SHARDS, balance_limit=1.0)
    async with Processes(
        [Room], nodes=NODES, settings=settings, record=False,
        loop=cast("Literal['asyncio', 'uvloop']", loop),
    ) as cluster:  # fmt: skip
        for number in range(kills):
            await cluster.wait_until(
                lambda: max(loads(cluster)) - min(loads(cluster)) <= 2 and cluster.settled(),
                timeout_s=60,
            )
            victim = victim_of(cluster, number % 2 == 0)
            assert victim is not None
            id = next(id for n in range(10_000) if cluster.owner(Room, id := f"room-{n}") == victim)
            await cluster.ref(Room, id).ask(Room.note, 0)
            killed_at = time.monotonic()
            cluster.crash(victim)
            first, all_of_it = await asyncio.gather(answered(cluster, id), served(cluster))
            answers.append(first - killed_at)
            serves.append(all_of_it - killed_at)
            print(
                f"{number + 1:>3}  answered {answers[-1]:.3f} s  served {serves[-1]:.3f} s",
                file=sys.stderr,
            )
            cluster.start(victim)
    return answers, serves


def main() -> None:
    """Kill, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--kills", type=int, default=40, help="how many nodes to kill, one by one")
    kills: int = parser.parse_args().kills
    if kills < 1:
        parser.error("--kills must be at least 1")
    answers, serves = asyncio.run(measure(kills))
    print(f"{kills} kills, {NODES} nodes, {SHARDS} shards: seconds after SIGKILL")
    print("| until | median | p90 | max |\n| --- | --- | --- | --- |")
    for name, values in (("answered", answers), ("served", serves)):
        row = (median(values), quantile(values, 0.9), max(values))
        print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in row) + " |")


if __name__ == "__main__":
    main()
