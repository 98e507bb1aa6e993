"""What one process shows by itself: starting entities, keeping them, simulating clusters.

Called by `run.py`. Nodes here are on the memory backend; nothing crosses a socket.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

from parts import PAYLOAD, SETTINGS, Echo

from domicile import Node
from domicile.testing.campaign import run_seed

DEPTH = 100
"""First asks in flight."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured thing."""

    name: str
    unit: str
    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The figure to quote."""
        return median(self.rounds)


def figures(
    rounds: int, activations: int, idle: int, seeds: int, tell: Callable[[str], None]
) -> list[Figure]:
    """All of them, each in fresh processes: freed memory of earlier rounds would hide some."""
    made = (
        (f"first ask of an entity, {DEPTH} in flight", "/s", activation, activations),
        (f"idle entity, of {idle:,}", "bytes", idle_bytes, idle),
        (f"seed of the campaign, median of {seeds}", "CPU s", seed_cpu_s, seeds),
    )
    results: list[Figure] = []
    for name, unit, measure, number in made:
        took: list[float] = []
        for turn in range(rounds):
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                took.append(pool.submit(measure, number).result())
            tell(f"round {turn + 1} of {rounds}: {name}")
        results.append(Figure(name, unit, tuple(took)))
    return results


def activation(number: int) -> float:
    """First asks per second, each to an entity that did not exist before."""

    async def measured() -> float:
        async with _node() as node:
            ids = count()
            await _activate(node, ids, DEPTH)
            began = time.perf_counter()
            await _activate(node, ids, number)
            return number / (time.perf_counter() - began)

    return asyncio.run(measured())


def idle_bytes(number: int) -> float:
    """Bytes that one more idle entity costs, its id and the entity object included."""

    async def measured() -> float:
        async with _node() as node:
            ids = count()
            await _activate(node, ids, 2 * DEPTH)
            before = _resident_bytes()
            await _activate(node, ids, number)
            return (_resident_bytes() - before) / number

    if sys.platform != "linux":
        tracemalloc.start()
    return asyncio.run(measured())


def seed_cpu_s(number: int) -> float:
    """CPU seconds of the median seed."""
    return median(run_seed(seed).cpu_s for seed in range(number))


def _node() -> Node:
    return Node("memory://single", entities=[Echo], settings=SETTINGS)


async def _activate(node: Node, ids: Iterator[int], number: int) -> None:
    left = iter(range(number))

    async def work() -> None:
        for _ in left:
            await node.ref(Echo, f"fresh-{next(ids)}").ask(Echo.echo, PAYLOAD)

    async with asyncio.TaskGroup() as group:
        for _ in range(DEPTH):
            group.create_task(work())


def _resident_bytes() -> int:
    """What this process holds: of real memory on Linux, of traced memory elsewhere."""
    gc.collect()
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return tracemalloc.get_traced_memory()[0]
