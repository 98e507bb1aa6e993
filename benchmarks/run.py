"""Benchmarks of what exists: nodes of one process on the memory backend, and the simulator.

    python benchmarks/run.py               all of it, in about a minute
    python benchmarks/run.py --quick       a smoke test; its figures mean nothing
    python benchmarks/run.py --json FILE   the figures and every single run, for comparison

Each figure is the median of several runs. Memory is measured in fresh processes, everything else
in this one, one benchmark after the other. uvloop is used if it is installed. The table goes to
stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import platform
import sys
import time
import tracemalloc
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from domicile import Entity, Node, Ref, Settings, handler
from domicile.testing.campaign import run_seed

try:
    from uvloop import new_event_loop
except ImportError:
    new_event_loop = None

PAYLOAD = b"x" * 100
DEPTHS = (1, 100, 1_000)
ACTIVATION_DEPTH = 100
SETTINGS = Settings(idle_s=3_600.0)
PAIR = Settings(idle_s=3_600.0, min_nodes=2)
"""The pair's first allocation waits for both, so that no shard moves while it is measured."""

_names = count()


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything."""

    runs: int = 3
    seconds: float = 0.5
    entities: int = 1_000
    activations: int = 10_000
    idle: int = 100_000
    seeds: int = 5


QUICK = Scale(runs=1, seconds=0.01, entities=40, activations=200, idle=500, seeds=1)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured thing."""

    name: str
    unit: str
    runs: tuple[float, ...] = field(default=())

    @property
    def median(self) -> float:
        """The figure to quote."""
        return median(self.runs)


class Arrivals:
    """Counts the tells that ran, and wakes who waits for a number of them."""

    def __init__(self) -> None:
        self.count = 0
        self._wanted = 0
        self._reached = asyncio.Event()

    def note(self) -> None:
        """One more."""
        self.count += 1
        if self.count == self._wanted:
            self._reached.set()

    async def reach(self, wanted: int) -> None:
        """Wait until that many have run."""
        if self.count < wanted:
            self._wanted = wanted
            self._reached.clear()
            await self._reached.wait()


@dataclass(frozen=True)
class Home:
    """Which node an entity finds itself in."""

    name: str


class Echo(Entity, name="echo"):
    """Does as little as an entity can."""

    @handler
    async def echo(self, data: bytes) -> bytes:
        """Give it back."""
        return data

    @handler
    async def note(self, data: bytes) -> None:
        """Be told."""
        self.resource(Arrivals).note()

    @handler
    async def where(self) -> str:
        """The node that is home."""
        return self.resource(Home).name


def node(store: str, name: str, arrivals: Arrivals, settings: Settings) -> Node:
    """A node that knows its name and counts what it is told."""

    @asynccontextmanager
    async def resources() -> AsyncGenerator[dict[type[Any], Any]]:
        yield {Arrivals: arrivals, Home: Home(name)}

    return Node(store, entities=[Echo], resources=resources, node_id=name, settings=settings)


@asynccontextmanager
async def alone() -> AsyncGenerator[tuple[Node, Arrivals]]:
    """One node in a cluster of its own."""
    arrivals = Arrivals()
    async with node(f"memory://bench-{next(_names)}", "a", arrivals, SETTINGS) as a:
        yield a, arrivals


# rates


async def asks(refs: Sequence[Ref[Echo]], depth: int, seconds: float) -> float:
    """Asks per second with `depth` of them in flight, each worker on entities of its own."""
    ends = time.perf_counter() + seconds

    async def work(first: int) -> int:
        done = 0
        while time.perf_counter() < ends:
            await refs[(first + done * depth) % len(refs)].ask(Echo.echo, PAYLOAD)
            done += 1
        return done

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        workers = [group.create_task(work(first)) for first in range(depth)]
    return sum(worker.result() for worker in workers) / (time.perf_counter() - began)


async def tells(refs: Sequence[Ref[Echo]], arrivals: Arrivals, depth: int, seconds: float) -> float:
    """Tells per second, in rounds of `depth`; a round ends when all of them have run."""
    sent = began_at = arrivals.count
    began = time.perf_counter()
    while time.perf_counter() < began + seconds:
        for _ in range(depth):
            await refs[sent % len(refs)].tell(Echo.note, PAYLOAD)
            sent += 1
        await arrivals.reach(sent)
    return (sent - began_at) / (time.perf_counter() - began)


async def activate(node: Node, ids: Iterator[int], number: int) -> float:
    """First asks per second, each to an entity that did not exist before."""
    left = iter(range(number))

    async def work() -> None:
        for _ in left:
            await node.ref(Echo, f"fresh-{next(ids)}").ask(Echo.echo, PAYLOAD)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(ACTIVATION_DEPTH):
            group.create_task(work())
    return number / (time.perf_counter() - began)


async def repeat(runs: int, measure: Callable[[], Awaitable[float]]) -> tuple[float, ...]:
    """Several runs of one measurement, with the garbage of the last one gone."""
    results: list[float] = []
    for _ in range(runs):
        gc.collect()
        results.append(await measure())
    return tuple(results)


async def local(scale: Scale) -> AsyncGenerator[Figure]:
    """Within one node."""
    async with alone() as (a, arrivals):
        refs = [a.ref(Echo, str(number)) for number in range(scale.entities)]
        for ref in refs:
            await ref.ask(Echo.echo, PAYLOAD)
        for depth in DEPTHS:
            runs = await repeat(scale.runs, lambda depth=depth: asks(refs, depth, scale.seconds))
            yield Figure(f"local ask, {depth:,} in flight", "/s", runs)
        for depth in DEPTHS:
            runs = await repeat(
                scale.runs, lambda depth=depth: tells(refs, arrivals, depth, scale.seconds)
            )
            yield Figure(f"local tell, {depth:,} in flight", "/s", runs)


async def remote(scale: Scale) -> AsyncGenerator[Figure]:
    """From one node to entities of another, over a link."""
    store, arrivals = f"memory://bench-{next(_names)}", Arrivals()
    a, b = (node(store, name, arrivals, PAIR) for name in "ab")
    async with a, b:
        refs: list[Ref[Echo]] = []
        for number in count():
            ref = a.ref(Echo, str(number))
            if await ref.ask(Echo.where) == "b":
                refs.append(ref)
            if len(refs) == scale.entities:
                break
        for depth in DEPTHS:
            runs = await repeat(scale.runs, lambda depth=depth: asks(refs, depth, scale.seconds))
            yield Figure(f"ask between two nodes, {depth:,} in flight", "/s", runs)


async def activation(scale: Scale) -> AsyncGenerator[Figure]:
    """Entities that start with their first message."""
    async with alone() as (a, _):
        ids = count()
        await activate(a, ids, ACTIVATION_DEPTH)
        runs = await repeat(scale.runs, lambda: activate(a, ids, scale.activations))
        yield Figure("activation by a first ask", "/s", runs)


# memory


def resident_bytes() -> int:
    """What this process holds: of real memory on Linux, of traced memory elsewhere."""
    gc.collect()
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return tracemalloc.get_traced_memory()[0]


async def idle_bytes(number: int) -> float:
    """Bytes that one more idle entity costs, its id and the entity object included."""
    async with alone() as (a, _):
        ids = count()
        await activate(a, ids, 2 * ACTIVATION_DEPTH)
        before = resident_bytes()
        await activate(a, ids, number)
        return (resident_bytes() - before) / number


def measure_idle(number: int) -> float:
    """`idle_bytes` in a process that has done nothing else."""
    if sys.platform != "linux":
        tracemalloc.start()
    return run(idle_bytes(number))


async def memory(scale: Scale) -> AsyncGenerator[Figure]:
    """In fresh processes: freed memory of earlier runs would hide some of it."""
    context = multiprocessing.get_context("spawn")
    results: list[float] = []
    for _ in range(scale.runs):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            results.append(
                await asyncio.get_running_loop().run_in_executor(pool, measure_idle, scale.idle)
            )
    yield Figure(f"idle entity, of {scale.idle:,}", "bytes", tuple(results))


# the simulator


def seeds(scale: Scale) -> Figure:
    """CPU seconds of a seed of the campaign: the median seed of each run."""
    runs = tuple(
        median(run_seed(seed).cpu_s for seed in range(scale.seeds)) for _ in range(scale.runs)
    )
    return Figure(f"campaign seed, median of {scale.seeds}", "CPU s", runs)


# the command


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """On uvloop if there is one."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


async def measure(scale: Scale, tell: Callable[[str], None]) -> list[Figure]:
    """Everything that runs on a loop, in turn."""
    figures: list[Figure] = []
    for group in (local, remote, activation, memory):
        async for figure in group(scale):
            tell(f"{figure.name}: {show(figure)}")
            figures.append(figure)
    return figures


def show(figure: Figure) -> str:
    """A figure with as many digits as it deserves."""
    value = figure.median
    return (
        f"{value:,.2f} {figure.unit}" if value < 100 else f"{round(value, -1):,.0f} {figure.unit}"
    )


def spread(figure: Figure) -> str:
    """How far apart the runs were, relative to their median."""
    return f"{(max(figure.runs) - min(figure.runs)) / (figure.median or 1):.0%}"


def table(figures: Sequence[Figure]) -> str:
    """A Markdown table."""
    rows = [f"| {figure.name} | {show(figure)} | {spread(figure)} |" for figure in figures]
    return "\n".join(["| what | median | spread |", "| --- | ---: | ---: |", *rows])


def surroundings() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "domicile": version("domicile"),
        "python": platform.python_version(),
        "loop": "asyncio" if new_event_loop is None else "uvloop",
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test, in seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run there")
    options = parser.parse_args(arguments)
    scale = QUICK if options.quick else Scale()
    began = time.monotonic()

    def tell(line: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {line}", file=sys.stderr, flush=True)

    figures = [seeds(scale)]
    tell(f"{figures[0].name}: {show(figures[0])}")
    figures = [*run(measure(scale, tell)), *figures]
    around = surroundings()
    print(table(figures))
    print(
        f"\nCPython {around['python']}, {around['loop']}, {around['system']}, "
        f"{around['cpus']} CPUs; median of {scale.runs} runs, {time.monotonic() - began:.0f} s."
    )
    if options.json is not None:
        results = [{**asdict(figure), "median": figure.median} for figure in figures]
        text = json.dumps({**around, "quick": options.quick, "results": results}, indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
