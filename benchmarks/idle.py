"""What an idle cluster costs: `python benchmarks/idle.py [--nodes N] [--seconds S]`.

Starts real node processes on one embedded store, sends nothing, and says how much of a core each
of them uses.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Literal

from domicile.testing import Processes
from domicile.testing.workload import Room

CALM_S = 3.0
"""How long the cluster settles before it is measured."""


def used_s(pid: int) -> float:
    """CPU seconds of all threads of a process so far, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text(encoding="ascii").split()[0]) for thread in threads) / 1e9


async def measure(
    nodes: int, seconds: float, loop: Literal["asyncio", "uvloop"]
) -> list[tuple[str, float]]:
    """The share of a core that each node used."""
    async with Processes([Room], nodes=nodes, loop=loop, record=False) as cluster:
        await asyncio.sleep(CALM_S)
        pids = [node.process.pid for node in cluster.nodes if node.process is not None]
        before = [used_s(pid) for pid in pids]
        await asyncio.sleep(seconds)
        leader = cluster.leader()
        return [
            (f"node {index}{', coordinator' if index == leader else ''}", used_s(pid) - was)
            for index, (pid, was) in enumerate(zip(pids, before, strict=True))
        ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="asyncio")
    given = parser.parse_args()
    print(f"{given.nodes} nodes, 256 shards, idle for {given.seconds:g} s", file=sys.stderr)
    for name, used in asyncio.run(measure(given.nodes, given.seconds, given.loop)):
        print(f"{name}: {100 * used / given.seconds:.2f} % of a core")


if __name__ == "__main__":
    main()
