"""What overload does to a node: open-loop load at parts and multiples of its own capacity.

    python -m proving.benchmarks.overload                      0.5, 1, 3 and again 0.5 times the
    capacity python -m proving.benchmarks.overload --work-us 1000       handlers that take a
    millisecond each python -m proving.benchmarks.overload --clients 6 --seconds 10 --timeout-s 2
    python -m proving.benchmarks.overload --quick              a smoke test; its figures mean
    nothing

One node on SQLite and some client processes. The capacity is what closed loops of all clients reach
in the same run. Then asks are sent at a rate that does not wait for answers, one stage right behind
the other: what is served, what is refused and how soon, how long the served ones took, and what the
node holds in memory and uses of a processor. A node that stands 3 times its capacity serves as much
as before, refuses the rest at once, and is itself again in the next stage. On few processors the
clients take from the node what they need for sending: compare what is served per second of its CPU
time. The table goes to stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from domicile import (
    Client,
    DomicileError,
    Entity,
    MaybeExecuted,
    Node,
    NotExecuted,
    Overloaded,
    Ref,
    Settings,
    connect,
    handler,
)
from domicile.observe import Metrics
from proving.benchmarks import part as parts
from proving.benchmarks.caller import closed_loop, summary
from proving.benchmarks.processes import Part, cpu_of_all_s

STAGES = (0.5, 1.0, 3.0, 0.5)
ENTITIES = 1_000
TICK_S = 0.002
DEPTH = 64
"""Asks that each client keeps in flight while the capacity is measured."""


class Worker(Entity, name="worker"):
    """Computes for as long as it is told to."""

    @handler
    async def work(self, work_s: float) -> None:
        """Hold the processor."""
        ends = time.perf_counter() + work_s
        while time.perf_counter() < ends:
            pass


def outcome_of(error: DomicileError) -> str:
    """The kind of answer that a caller got."""
    kinds = {Overloaded: "refused", NotExecuted: "not executed", MaybeExecuted: "unknown"}
    return next((name for kind, name in kinds.items() if isinstance(error, kind)), "failed")


class Load:
    """Asks of one client."""

    def __init__(self, client: Client, work_s: float, timeout_s: float) -> None:
        self._refs: list[Ref[Worker]] = [
            client.ref(Worker, str(number)).options(timeout_s=timeout_s)
            for number in range(ENTITIES)
        ]
        self._work_s = work_s
        self._next = os.getpid()

    async def run(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """One stage; without a rate as many as there are answers."""
        if wanted["rate"] is None:
            return await closed_loop(self._ask, DEPTH, wanted["seconds"])
        return await self.open_loop(wanted["rate"], wanted["seconds"])

    async def open_loop(self, rate: float, seconds: float) -> dict[str, Any]:
        """So many asks a second, whatever becomes of them."""
        outcomes: Counter[str] = Counter()
        served_s: list[float] = []
        refused_s: list[float] = []
        began = time.perf_counter()
        in_time = 0

        async def one(number: int) -> None:
            nonlocal in_time
            since = time.perf_counter()
            try:
                await self._ask(number)
            except DomicileError as error:
                outcomes[kind := outcome_of(error)] += 1
                if kind == "refused":
                    refused_s.append(time.perf_counter() - since)
            else:
                now = time.perf_counter()
                served_s.append(now - since)
                in_time += now < began + seconds

        sent = 0
        async with asyncio.TaskGroup() as group:
            while (now := time.perf_counter()) < began + seconds:
                due = int((now - began) * rate)
                for _ in range(due - sent):
                    self._next += 1
                    group.create_task(one(self._next))
                sent = due
                await asyncio.sleep(TICK_S)
            sending_s = time.perf_counter() - began
        return {
            "sent": sent, "sending_s": sending_s, "in_time": in_time, "outcomes": dict(outcomes),
            "served": summary(len(served_s), sending_s, served_s or [0.0]),
            "refused": summary(len(refused_s), sending_s, refused_s or [0.0]),
            "took_s": time.perf_counter() - began,
        }  # fmt: skip

    async def _ask(self, number: int) -> None:
        await self._refs[number % ENTITIES].ask(Worker.work, self._work_s)


def settings() -> Settings:
    """Nobody is passivated while it is measured; a lone node need not wait for others."""
    return Settings(idle_s=3_600.0, settle_s=0.05)


@asynccontextmanager
async def home(options: parts.Options) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """The node."""
    node = Node(
        options["where"], entities=[Worker], node_id="home", listen="127.0.0.1:0",
        settings=settings(), meter=Metrics(),
    )  # fmt: skip
    async with node:
        yield options["where"], {}


@asynccontextmanager
async def client(options: parts.Options) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """One of the clients."""
    async with connect(options["where"], settings=settings(), meter=Metrics()) as connected:
        load = Load(connected, options["work_s"], options["timeout_s"])
        yield options["where"], {"load": load}


PARTS = {"home": home, "client": client}


class Memory:
    """The largest resident size of a process while this is entered; Linux only."""

    def __init__(self, pid: int) -> None:
        self._file = Path(f"/proc/{pid}/statm")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.most_bytes = 0

    def _watch(self) -> None:
        while True:
            pages = int(self._file.read_text(encoding="ascii").split()[1])
            self.most_bytes = max(self.most_bytes, pages * os.sysconf("SC_PAGE_SIZE"))
            if self._over.wait(0.05):
                return

    def __enter__(self) -> Memory:
        if sys.platform == "linux":
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        if sys.platform == "linux":
            self._thread.join()


def node_cpu_s(node: Part) -> float:
    """CPU time of the node so far; 0 where nobody knows."""
    return cpu_of_all_s(node) or 0.0


def everywhere(clients: Sequence[Part], pool: ThreadPoolExecutor, **wanted: Any) -> list[Any]:
    """The same stage at all clients at once."""
    return list(pool.map(lambda one: one.run(system="load", **wanted), clients))


def stage(
    times: float, capacity: float, told: list[Any], rss_bytes: int, cpu: float
) -> dict[str, Any]:
    """What the clients saw together."""
    seconds = max(one["sending_s"] for one in told)
    outcomes: Counter[str] = Counter()
    for one in told:
        outcomes.update(one["outcomes"])

    def worst(kind: str, share: str) -> float:
        return max((one[kind][share] for one in told if one[kind]["count"]), default=0.0)

    return {
        "times": times,
        "wanted_per_s": times * capacity,
        "sent_per_s": sum(one["sent"] for one in told) / seconds,
        "served_per_s": sum(one["in_time"] for one in told) / seconds,
        "refused_per_s": outcomes["refused"] / seconds,
        "other": {name: n for name, n in sorted(outcomes.items()) if name != "refused"},
        "p50_s": worst("served", "p50_s"),
        "p99_s": worst("served", "p99_s"),
        "max_s": worst("served", "max_s"),
        "refused_p99_s": worst("refused", "p99_s"),
        "tail_s": max(one["took_s"] - one["sending_s"] for one in told),
        "rss_mib": rss_bytes / 2**20,
        "cpu": cpu,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A run."""
    with TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        wanted = {
            "where": f"sqlite:///{directory}/overload.db", "loop": options.loop,
            "work_s": options.work_us / 1e6, "timeout_s": options.timeout_s,
        }  # fmt: skip

        def start(kind: str) -> Part:
            made = Part(sys.executable, "proving.benchmarks.overload", kind, wanted, directory)
            stack.callback(made.close)
            made.ready()
            return made

        node = start("home")
        clients = [start("client") for _ in range(options.clients)]
        pool = stack.enter_context(ThreadPoolExecutor(options.clients))
        everywhere(clients, pool, rate=None, seconds=options.seconds / 4)
        used_s, began = node_cpu_s(node), time.monotonic()
        told = everywhere(clients, pool, rate=None, seconds=options.seconds)
        cpu = (node_cpu_s(node) - used_s) / (time.monotonic() - began)
        capacity = sum(one["count"] / one["took_s"] for one in told)
        stages: list[dict[str, Any]] = []
        for times in options.stages:
            rate = times * capacity / options.clients
            used_s, began = node_cpu_s(node), time.monotonic()
            with Memory(node.pid) as memory:
                told = everywhere(clients, pool, rate=rate, seconds=options.seconds)
            used = (node_cpu_s(node) - used_s) / (time.monotonic() - began)
            stages.append(stage(times, capacity, told, memory.most_bytes, used))
            print(f"{times:g} times is done", file=sys.stderr)
    return {"capacity_per_s": capacity, "cpu": cpu, "clients": options.clients, "stages": stages}


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [
        f"capacity {report['capacity_per_s']:,.0f} asks/s at {report['cpu']:.0%} of a processor, "
        f"{report['clients']} clients",
        "",
        "| load | sent/s | served/s | refused/s | p50 ms | p99 ms | max ms "
        "| refused p99 | tail s | other | node CPU | served/CPU s | node MiB |",
        "|" + " ---: |" * 9 + " --- |" + " ---: |" * 3,
    ]
    short: list[str] = []
    for one in report["stages"]:
        other = ", ".join(f"{n:,} {name}" for name, n in one["other"].items()) or "none"
        lines.append(
            f"| {one['times']:g}× | {one['sent_per_s']:,.0f} | {one['served_per_s']:,.0f} "
            f"| {one['refused_per_s']:,.0f} | {one['p50_s'] * 1e3:,.1f} "
            f"| {one['p99_s'] * 1e3:,.1f} "
            f"| {one['max_s'] * 1e3:,.1f} | {one['refused_p99_s'] * 1e3:,.1f} "
            f"| {one['tail_s']:.1f} | {other} | {one['cpu']:.0%} "
            f"| {one['served_per_s'] / max(one['cpu'], 0.01):,.0f} | {one['rss_mib']:,.0f} |"
        )
        if one["sent_per_s"] < 0.9 * one["wanted_per_s"]:
            short.append(
                f"At {one['times']:g} times the clients sent {one['sent_per_s']:,.0f}/s of "
                f"{one['wanted_per_s']:,.0f}/s: they were the bottleneck, not the node."
            )
    return "\n".join([*lines, *([""] if short else []), *short]) + "\n"


def main(given: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m proving.benchmarks.overload", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--work-us", type=float, default=500.0, help="CPU time of one ask")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each stage")
    parser.add_argument("--timeout-s", type=float, default=10.0, help="of each ask")
    parser.add_argument("--stages", type=float, nargs="+", default=list(STAGES), metavar="TIMES")
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="a smoke test, in seconds")
    options = parser.parse_args(given)
    if options.quick:
        options.seconds, options.stages = min(options.seconds, 0.3), [0.5, 3.0]
    report = measure(options)
    print(table(report), end="")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
