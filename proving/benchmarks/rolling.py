"""What callers feel while nodes are replaced, emptied, added and taken away.

    python -m proving.benchmarks.rolling                 all three, in about two minutes
    python -m proving.benchmarks.rolling --only rolling  one of rolling, drain, scale
    python -m proving.benchmarks.rolling --quick         a smoke test; its figures mean nothing
    python -m proving.benchmarks.rolling --write-docs    also into docs/explanation/performance.md
    python -m proving.benchmarks.rolling --from FILE     the table of an earlier run

Real node processes on one store (`--store NAME`, else the embedded one), and a load in a process of
its own. The capacity of the cluster is what a closed loop reaches in the same run; then a quarter
of it is asked for at a fixed rate, whatever becomes of the answers, and an ask's time counts from
the moment at which it was due.

- **rolling**: five nodes are replaced one by one: a process of the next version joins, then an old
  one is asked to leave by SIGTERM. Each shard should move once (SM-14).
- **drain**: a node with 300 shards and 10,000 resident entities is wished empty.
- **scale**: three nodes become six and three again.

Starting a Python process takes half a second of a processor, which on few processors is felt by
whoever runs beside it. So before nodes start, as many processes start that import the same modules
and end: the phase `decoys` says what that alone does to the answers, and what is added to the p99
counts against it, or against the quiet phase before if that was slower or nothing starts (drain).
The report says against which, and what was added to the quiet phase, too. The load must not be the
bottleneck: handlers compute for a millisecond, so that the load's process is mostly idle; the
report says how busy it was and how late it sent. Exits with 1 if an ask failed, shards moved more
often than they may (once each way), or what is added to the p99 is not under 100 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from domicile import Settings
from proving.benchmarks import command, plot
from proving.benchmarks.fleet import Driver, Fleet, Stopwatch, moves
from proving.benchmarks.openloop import Clerk
from proving.benchmarks.processes import ROOT
from proving.benchmarks.report import fill, grid, number
from proving.benchmarks.store_servers import ABSENT, STORES, TITLES, store_place

PAGE = ROOT / "docs" / "explanation" / "performance.md"
PICTURE = ROOT / "docs" / "pictures" / "rolling.svg"
SHARE = 0.25
GOAL_S = 0.1
"""What a planned change may add to the p99 of asks."""

IMPORTS = (
    "import domicile.node, domicile.stores.{}.store, domicile.transports.tcp, "
    "proving.benchmarks.openloop"
)
PACKAGES = {"postgresql": "postgres"}
"""Where the package of a store is not called as the store is."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything."""

    nodes: int = 5
    shards: int = 300
    entities: int = 3_000
    drain_nodes: int = 3
    drain_shards: int = 900
    drain_entities: int = 30_000
    work_s: float = 0.001
    depth: int = 64
    capacity_s: float = 4.0
    quiet_s: float = 8.0
    loop: str = "asyncio"
    goal_s: float = GOAL_S
    store: str = "sqlite"


QUICK = Scale(
    nodes=2, shards=16, entities=50, drain_nodes=2, drain_shards=32, drain_entities=100,
    capacity_s=0.5, quiet_s=0.5, goal_s=10.0,
)  # fmt: skip


class Experiment:
    """One cluster under one load, from its start to its report."""

    def __init__(self, fleet: Fleet, driver: Driver, scale: Scale) -> None:
        self.fleet, self.driver, self.scale = fleet, driver, scale
        self.phases: list[Stopwatch] = []
        self._imports = IMPORTS.format(PACKAGES.get(scale.store, scale.store))

    def phase(self, name: str) -> Stopwatch:
        """The next one; use it as a context manager."""
        self.phases.append(Stopwatch(self.driver, name))
        return self.phases[-1]

    async def begin(self) -> float:
        """Measure the capacity and ask for a quarter of it; that rate."""
        await self.driver.run("warm")
        await self.driver.run("closed", depth=self.scale.depth, seconds=self.scale.capacity_s / 4)
        told = await self.driver.run(
            "closed", depth=self.scale.depth, seconds=self.scale.capacity_s
        )
        self.capacity = float(told["count"] / told["took_s"])
        rate = SHARE * self.capacity
        await self.driver.run("begin", rate=rate)
        # The first asks meet a load that still counts what it measured.
        await asyncio.sleep(min(1.0, self.scale.quiet_s))
        with self.phase("before"):
            await asyncio.sleep(self.scale.quiet_s)
        return rate

    async def decoys(self, count: int) -> None:
        """Processes that import what a node does, one after the other, and end."""
        with self.phase("decoys"):
            for _ in range(count):
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-c", self._imports, cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                )  # fmt: skip
                if await process.wait():
                    raise RuntimeError("a decoy ended with an error")
                await asyncio.sleep(min(1.0, self.scale.quiet_s / 4))

    async def end(self, name: str, during: Sequence[str]) -> dict[str, Any]:
        """Stop the load and say what it saw."""
        told = await self.driver.run("end")
        phases = [await phase.told() for phase in self.phases]
        since, until = phases[0]["since"], phases[-1]["until"]
        calm = max(one["p99_s"] for one in phases if one["name"] in ("before", "decoys"))
        curve = await self.driver.run("curve", since=since, until=until)
        return {
            "name": name, "capacity": self.capacity, "rate": SHARE * self.capacity,
            "asks": told["asks"], "failed": told["failed"], "phases": phases,
            "goal_s": self.scale.goal_s,
            "added_p99_s": max(
                one["p99_s"] - calm for one in phases if one["name"] in during
            ),
            "curve": curve["bins"],
        }  # fmt: skip


def settings(shards: int) -> Settings:
    """Nobody is passivated meanwhile."""
    return Settings(shards=shards, idle_s=3_600.0)


async def under_load(
    scale: Scale, *, nodes: int, shards: int, entities: int, version: str,
    body: Callable[[Experiment], Awaitable[dict[str, Any]]],
) -> dict[str, Any]:  # fmt: skip
    """A cluster and its load around one experiment."""
    async with AsyncExitStack() as stack:
        place = stack.enter_context(store_place(scale.store))
        fleet = await stack.enter_async_context(
            Fleet(
                [Clerk], nodes=nodes, settings=settings(shards), version=version, loop=scale.loop,
                store=None if place.server is None else place.url,
            )
        )  # fmt: skip
        await fleet.wait_until(fleet.balanced, timeout_s=60)
        driver = Driver(fleet, entities=entities, work_s=scale.work_s, loop=scale.loop)
        return await body(Experiment(fleet, await stack.enter_async_context(driver), scale))


async def rolling(scale: Scale) -> dict[str, Any]:
    """Every node is replaced by one of the next version."""

    async def body(test: Experiment) -> dict[str, Any]:
        fleet = test.fleet
        await test.begin()
        await test.decoys(scale.nodes)
        epochs = fleet.epochs()
        with test.phase("rolling"):
            for old in range(scale.nodes):
                await fleet.joined(fleet.add("2"))
                await fleet.stop(old)
                await fleet.wait_until(fleet.served)
        found = await test.end("rolling update", ["rolling"])
        await fleet.wait_until(fleet.balanced)
        return {
            **found, "what": f"{scale.nodes} nodes replaced one by one, {scale.shards} shards",
            "moves": moves(epochs, fleet.epochs()), "most_moves": 1,
        }  # fmt: skip

    return await under_load(
        scale, nodes=scale.nodes, shards=scale.shards, entities=scale.entities, version="1",
        body=body,
    )  # fmt: skip


async def drain(scale: Scale) -> dict[str, Any]:
    """One node is wished empty."""

    async def body(test: Experiment) -> dict[str, Any]:
        fleet = test.fleet
        victim = scale.drain_nodes - 1
        await test.begin()
        epochs, had = fleet.epochs(), fleet.homes()[victim]
        with test.phase("draining"):
            await fleet.drain(victim)
            # In this order: it costs less to see that something is still on its way.
            await fleet.wait_until(lambda: fleet.served() and fleet.homes()[victim] == 0)
        with test.phase("after"):
            await asyncio.sleep(scale.quiet_s / 4)
        # The move itself takes less than a second: what it did is also seen behind it.
        found = await test.end("drain", ["draining", "after"])
        resident = scale.drain_entities // scale.drain_nodes
        return {
            **found, "what": f"a node with {had} shards and about {resident:,} resident entities",
            "moves": moves(epochs, fleet.epochs()), "most_moves": 1, "expected_moves": had,
        }  # fmt: skip

    return await under_load(
        scale, nodes=scale.drain_nodes, shards=scale.drain_shards, entities=scale.drain_entities,
        version="", body=body,
    )  # fmt: skip


async def scaling(scale: Scale) -> dict[str, Any]:
    """Three nodes more, then three fewer."""

    async def body(test: Experiment) -> dict[str, Any]:
        fleet = test.fleet
        await test.begin()
        await test.decoys(3)
        epochs = fleet.epochs()
        with test.phase("3 to 6"):
            for new in [fleet.add() for _ in range(3)]:
                await fleet.joined(new)
            await fleet.wait_until(fleet.balanced, timeout_s=120)
        half = fleet.epochs()
        with test.phase("6 to 3"):
            await asyncio.gather(*(fleet.stop(node) for node in fleet.living()[3:]))
            await fleet.wait_until(fleet.balanced, timeout_s=120)
        found = await test.end("scale", ["3 to 6", "6 to 3"])
        out, back = moves(epochs, half), moves(half, fleet.epochs())
        return {
            **found, "what": f"3 to 6 to 3 nodes, {scale.shards} shards",
            "moves": moves(epochs, fleet.epochs()), "most_moves": 2,
            "moves_out": out, "moves_back": back, "expected_moves": 2 * (scale.shards // 2),
        }  # fmt: skip

    return await under_load(
        scale, nodes=3, shards=scale.shards, entities=scale.entities, version="", body=body
    )


EXPERIMENTS: dict[str, Callable[[Scale], Coroutine[Any, Any, dict[str, Any]]]] = {
    "rolling": rolling, "drain": drain, "scale": scaling,
}  # fmt: skip


def felt(found: dict[str, Any], goal: str) -> str:
    """What was added to the p99: to that of which phase, which the goal is about, and to quiet."""
    p99_s = {phase["name"]: phase["p99_s"] for phase in found["phases"]}
    before_s, decoys_s = p99_s.pop("before", 0.0), p99_s.pop("decoys", 0.0)
    text = f"added p99 {1e3 * found['added_p99_s']:.0f} ms"
    if decoys_s <= before_s:
        return f"{text} to that of the quiet phase ({goal})"
    quiet_ms = 1e3 * (max(p99_s.values()) - before_s)
    return f"{text} to that of the decoys ({goal}), {quiet_ms:.0f} ms to that of the quiet phase"


def wandered(found: dict[str, Any]) -> list[str]:
    """Where shards moved more often than they may: over all, on the way out, on the way back."""
    ways = {"": found["most_moves"], " out": 1, " back": 1}
    counted = {way: found.get("moves" + way.replace(" ", "_"), {}) for way in ways}
    return [
        f"{count} shards moved {times}×{way} (at most {ways[way]})"
        for way, moves in counted.items()
        for times, count in moves.items()
        if int(times) > ways[way]
    ]


def verdict(found: dict[str, Any]) -> tuple[bool, str]:
    """Whether nothing failed, nothing moved too often and callers hardly felt it."""
    failed = sum(found["failed"].values()) if found["failed"] else 0
    counted = {int(times): count for times, count in found["moves"].items()}
    often = wandered(found)
    total = sum(times * count for times, count in counted.items())
    goal_s = found.get("goal_s", GOAL_S)
    under = found["added_p99_s"] < goal_s
    kept = not failed and not often and total <= found.get("expected_moves", total) and under
    told = ", ".join(f"{count} shards {times}×" for times, count in counted.items() if times)
    goal = f"{'under' if under else 'over'} the goal of {1e3 * goal_s:.0f} ms"
    text = (
        f"{found['name']}: {'met' if kept else 'MISSED'}: {failed} of {found['asks']:,} asks "
        f"failed; {total} moves ({'; '.join([told or 'none', *often])}); {felt(found, goal)}"
    )
    for error, count in found["failed"].items():
        text += f"\n  {count}× {error}"
    return kept, text


def table(found: Sequence[dict[str, Any]]) -> str:
    """A row per phase."""
    rows: list[list[str]] = []
    for one in found:
        for phase in one["phases"]:
            rows.append([
                f"{one['name']}: {phase['name']}", f"{phase['seconds']:.1f}",
                f"{phase['asks']:,}", str(phase["failed"]),
                *(number(1e3 * phase[f"{name}_s"]) for name in ("p50", "p99", "p999", "max")),
                number(1e3 * phase["sent_late_p99_s"]), f"{100 * phase['load_cpu_share']:.0f} %",
            ])  # fmt: skip
    head = ["phase", "s", "asks", "failed", "p50 ms", "p99 ms", "p99.9 ms", "max ms",
            "sent late p99 ms", "load of a core"]  # fmt: skip
    return grid(head, rows)


def page(report: dict[str, Any]) -> str:
    """The table and what to make of it."""
    lines = [verdict(one)[1] for one in report["found"]]
    asked = "; ".join(
        f"{one['name']}: {one['what']}, {number(one['rate'])} asks/s, a quarter of "
        f"{number(one['capacity'])}/s"
        for one in report["found"]
    )
    facts = (
        f"{report['system']}, {report['cpus']} CPUs, Python {report['python']}, {report['loop']}, "
        f"load {report['load']:.1f} at the start, on {TITLES[report.get('store', 'sqlite')]}. "
        f"{asked}. Each ask computes for "
        f"{1e3 * report['work_s']:g} ms; latency counts from when an ask was due."
    )
    listed = "\n".join(f"- {line}" for line in lines)
    if report["quick"]:
        facts += " This was a smoke test: none of its figures means anything."
    return f"{table(report['found'])}\n\n{listed}\n\n{facts}\n"


def draw(report: dict[str, Any]) -> str:
    """The latency over time of each experiment."""
    pictures: list[plot.Curves] = []
    for one in report["found"]:
        since = one["phases"][0]["since"]
        pictures.append(
            plot.Curves(
                one["name"], f"{one['what']}: asks per half second", "ms",
                [
                    [(at, 1e3 * p99) for at, _, p99 in one["curve"]],
                    [(at, 1e3 * p50) for at, p50, _ in one["curve"]],
                ],
                [
                    (phase["since"] - since, phase["until"] - since, phase["name"])
                    for phase in one["phases"] if phase["name"] not in ("before", "after")
                ],
                ("p99", "p50"),
            )
        )  # fmt: skip
    return plot.curves(pictures, alt(report))


def alt(report: dict[str, Any]) -> str:
    """In words."""
    return "; ".join(verdict(one)[1].splitlines()[0] for one in report["found"])


def write_docs(report: dict[str, Any]) -> None:
    """The page's part and its picture."""
    PICTURE.write_text(draw(report), encoding="utf-8")
    body = f"![{alt(report)}](../pictures/{PICTURE.name})\n\n{page(report)}"
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), "rolling", body), encoding="utf-8")


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m proving.benchmarks.rolling", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--only", choices=list(EXPERIMENTS), action="append")
    parser.add_argument("--store", choices=STORES, default="sqlite", help="its server is started")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--work-us", type=command.positive, default=1e6 * Scale().work_s)
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="asyncio")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--from", type=command.report, dest="earlier", metavar="FILE")
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args(given)
    if options.quick and options.write_docs:
        parser.error("--write-docs wants figures that mean something, not those of --quick")
    if options.store != "sqlite" and options.write_docs:
        parser.error("--write-docs is for the embedded store")
    return options


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All that is wanted."""
    scale = replace(
        QUICK if options.quick else Scale(), work_s=options.work_us / 1e6, loop=options.loop,
        store=options.store,
    )  # fmt: skip
    began = time.monotonic()
    report: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}", "cpus": os.cpu_count(),
        "python": platform.python_version(), "load": os.getloadavg()[0], "quick": options.quick,
        "work_s": scale.work_s, "loop": scale.loop, "store": scale.store, "found": [],
    }  # fmt: skip
    for name in options.only or EXPERIMENTS:
        found = asyncio.run(EXPERIMENTS[name](scale))
        report["found"].append(found)
        print(f"[{time.monotonic() - began:5.1f} s] {verdict(found)[1]}", file=sys.stderr)
    return report


def main(given: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if an ask failed, shards moved too often or callers felt it."""
    options = arguments(given)
    if options.earlier is not None:
        report: dict[str, Any] = json.loads(options.earlier.read_text(encoding="utf-8"))
    else:
        try:
            report = run(options)
        except ABSENT as error:
            print(error, file=sys.stderr)
            return 2
    print(page(report), end="")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.write_docs:
        write_docs(report)
    return 0 if all(verdict(one)[0] for one in report["found"]) else 1


if __name__ == "__main__":
    command.run(main)
