"""What a ring of controllers costs on a real kube-apiserver, and how fast objects move.

    python -m proving.benchmarks.rings                    all runs that are missing
    python -m proving.benchmarks.rings --next             the missing runs of one cell
    python -m proving.benchmarks.rings --only objects     cells with that in their names
    python -m proving.benchmarks.rings --runs 2           at most so many runs of each cell
    python -m proving.benchmarks.rings --list             the names of the cells

Each run is kept in a JSON file at once, and the same command goes on where it ended. The cells:

- **objects-N**: memory and processor time of a sharder with so many objects. When it starts, up to
  3,333 of them have no instance, and as many name one that has left. When all are at their
  instances, it walks over them once more, for 50 new ones.
- **webhook**: the time that a create takes with the webhook and without it, in turns.
- **moves**: 3,000 objects of two instances; a third one joins and, when all is balanced, is
  killed. A Lease lasts 10 s, as when the upstream sharder was measured.

The API server comes from the cache of built servers: `make kube-apiserver` puts it there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter
from typing import Any

from domicile.kubeapi.errors import KubeError
from domicile.kubeapi.kinds import CONFIG_MAPS, LEASES, RINGS
from proving.benchmarks.command import count, run
from proving.benchmarks.kept import CACHE, Kept, Measured, tell
from proving.benchmarks.processes import ROOT
from proving.benchmarks.recovery import quantile
from proving.benchmarks.report import fill, grid
from proving.benchmarks.rings_parts import (
    DRAIN,
    PLAIN,
    RING,
    SHARD,
    SHARED,
    InstanceProcess,
    RingBench,
    SharderProcess,
    Unable,
    forget_most,
    ring_bench,
    status_bytes,
    until,
    wanted,
)
from proving.benchmarks.stores_report import busy
from proving.kube_server import KubernetesServer, NoKubernetes

PAGE = ROOT / "docs" / "explanation" / "controller-rings.md"
LEASE_S = 10
CHANGED = 3_333
LATE = 50
PAIRS = 500
WARM = 20
MOVED = 3_000
GONE = "gone"
THREE = ("a", "b", "c")
MIB = 1024 * 1024
GROWTH_MIB, MOST_MIB = 5, 90
UPSTREAM = (
    "The upstream sharder against the same API server, on another day: 57 MB with 10,000 objects, "
    "84 MB while it moved them; 0.38 ms of processor time for an assignment; with a Lease of 10 s, "
    "the first object of a dead instance moved after 21.8 s, all 3,580 after 26.9 s; the busiest "
    "of three instances 7 % over its part."
)


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured, with how many objects, how often."""

    kind: str
    objects: int
    runs: int

    @property
    def key(self) -> str:
        """Its name for the command line and in the file."""
        return f"{self.kind}-{self.objects}" if self.kind == "objects" else self.kind


CELLS = {
    cell.key: cell
    for cell in (
        Cell("objects", 1_000, 3), Cell("objects", 10_000, 3), Cell("objects", 100_000, 3),
        Cell("webhook", 0, 3), Cell("moves", MOVED, 10),
    )
}  # fmt: skip


# measuring


async def _at_rest(sharder: SharderProcess) -> None:
    """Return once the sharder does next to nothing."""
    calm, before = 0, sharder.cpu_s()
    while calm < 4:
        await asyncio.sleep(0.5)
        now = sharder.cpu_s()
        calm = calm + 1 if now - before < 0.03 else 0
        before = now


async def _idle_instances(bench: RingBench, stack: AsyncExitStack) -> None:
    """Three that hold their Leases; a sharder that starts afterwards sees all of them at once."""
    for name in THREE:
        one = InstanceProcess(bench.server, name, LEASE_S, "idle")
        stack.callback(one.end, signal.SIGTERM)

    async def there() -> bool:
        found = await bench.client.list(LEASES, "default")
        return {one.metadata.name for one in found.items} >= set(THREE)

    await until(there, "three instances hold their Leases")


async def objects(bench: RingBench, stack: AsyncExitStack, cell: Cell) -> Measured:
    """One start of a sharder with so many objects, and a walk over them."""
    names = [f"o-{number}" for number in range(cell.objects)]
    labels = wanted(names, THREE)
    part = min(CHANGED, cell.objects // 3)
    new = range(0, 2 * part, 2)
    for number in new:
        labels[number], labels[number + 1] = "", GONE
    await asyncio.to_thread(bench.fill, names, labels)
    await _idle_instances(bench, stack)
    await bench.left(GONE)
    sharder = SharderProcess(bench.server)
    stack.callback(sharder.stop)

    async def changed() -> int:
        return sum([await sharder.counted(one) for one in ("assignments", "movements")])

    async def placed() -> bool:
        return await changed() >= 2 * part

    await until(placed, "each object has its instance", 1.0)
    await _at_rest(sharder)
    changes = await changed()
    changing_s = sharder.cpu_s()
    told = {
        "changes": changes, "change_cpu": changing_s / changes,
        "most_changing": status_bytes(sharder.pid, "VmHWM"),
        "at_rest": status_bytes(sharder.pid, "VmRSS"),
    }  # fmt: skip
    forget_most(sharder.pid)
    # Those that are new, at the end of the list, show that a walk has gone over all others.
    late = [f"z-{number}" for number in range(LATE)]
    await asyncio.to_thread(bench.fill, late, [""] * LATE)
    again = {"metadata": {"annotations": {"example.com/walk": "again"}}}
    await bench.client.patch(RINGS, RING, merge=again)

    async def walked() -> bool:
        return await changed() >= 2 * part + LATE

    await until(walked, "a walk has found those that are new", 1.0)
    shares = await bench.spread()
    if shares.keys() != set(THREE):
        raise Unable(f"objects are not where they belong: {shares}")
    told |= {
        "most_walking": status_bytes(sharder.pid, "VmHWM"),
        "share": max(shares.values()) / sum(shares.values()), "shares": shares,
    }  # fmt: skip
    return told


async def webhook(bench: RingBench, stack: AsyncExitStack, cell: Cell) -> Measured:
    """Creates with the webhook and without it, in turns, one at a time."""
    del cell
    await _idle_instances(bench, stack)
    sharder = SharderProcess(bench.server)
    stack.callback(sharder.stop)
    number = 0

    async def create(space: str) -> tuple[float, bool]:
        nonlocal number
        number += 1
        body = {"metadata": {"name": f"w-{number}"}, "data": {"text": "x" * 200}}
        began = perf_counter()
        made = await bench.client.create(CONFIG_MAPS, body, space)
        return perf_counter() - began, bool(made.metadata.label(SHARD))

    async def answers() -> bool:
        return await bench.available(len(THREE)) and (await create(SHARED))[1]

    await until(answers, "the webhook names instances")
    for _ in range(WARM):
        await create(SHARED)
    await _at_rest(sharder)
    times: dict[str, list[float]] = {SHARED: [], PLAIN: []}
    missed, cpu_before = 0, sharder.cpu_s()
    for turn in range(PAIRS):
        for space in (SHARED, PLAIN) if turn % 2 else (PLAIN, SHARED):
            took_s, named = await create(space)
            times[space].append(took_s)
            missed += space == SHARED and not named
    used_s = sharder.cpu_s() - cpu_before
    return {
        **{f"{space}_{name}": quantile(found, share)
           for space, found in times.items() for name, share in (("p50", 0.5), ("p99", 0.99))},
        "missed": missed, "create_cpu": used_s / PAIRS,
    }  # fmt: skip


class Moves:
    """The third instance of a ring comes and is killed, again and again."""

    def __init__(self, bench: RingBench, sharder: SharderProcess, names: list[str]) -> None:
        self._bench, self._sharder = bench, sharder
        self._part = wanted(names, THREE).count("c")

    async def once(self) -> Measured:
        """Join, balance, kill, reassign."""
        began = monotonic()
        third = InstanceProcess(self._bench.server, "c", LEASE_S)
        try:
            joined = await until(lambda: self._bench.available(3), "the third one has joined")
            await until(self._has_its_part, "the third one has its part", 0.25)
            balanced = await until(self._none_draining, "nothing drains")
            before = await self._sharder.counted("movements")
        finally:
            third.end(signal.SIGKILL)
        killed = monotonic()

        async def moves() -> bool:
            return await self._sharder.counted("movements") > before

        first = await until(moves, "the first one has moved", 0.05)
        # Not from the kill on: each look at the metrics costs the sharder processor time, too.
        cpu_before, counted = self._sharder.cpu_s(), await self._sharder.counted("movements")

        async def all_moved() -> bool:
            return not await self._bench.some(f"{SHARD}=c")

        last = await until(all_moved, "all have moved", 0.2)
        used_s = self._sharder.cpu_s() - cpu_before
        moved = await self._sharder.counted("movements") - before
        # Its Lease has to be given back first, or the next one waits for it.
        await until(lambda: self._bench.available(2), "it counts as gone")
        return {
            "joined": joined - began, "balanced": balanced - began, "first": first - killed,
            "reassigned": last - killed, "moved": moved,
            "move_cpu": used_s / max(moved - (counted - before), 1),
        }  # fmt: skip

    async def _has_its_part(self) -> bool:
        return (await self._bench.spread()).get("c", 0) >= self._part

    async def _none_draining(self) -> bool:
        return not await self._bench.some(DRAIN)


Keep = Callable[[Measured], None]


async def measured(cell: Cell, runs: int, keep: Keep) -> None:
    """So many runs, each kept as soon as it is over."""
    if cell.kind == "moves":
        await _on_a_server(lambda bench, stack: _all_moves(bench, stack, cell, runs, keep))
        return
    kinds: dict[str, Callable[[RingBench, AsyncExitStack, Cell], Awaitable[Measured]]] = {
        "objects": objects, "webhook": webhook
    }  # fmt: skip
    for _ in range(runs):
        load = os.getloadavg()[0]

        async def one(bench: RingBench, stack: AsyncExitStack, load: float = load) -> None:
            keep(_with_load(await kinds[cell.kind](bench, stack, cell), load))

        await _on_a_server(one)


async def _on_a_server(work: Callable[[RingBench, AsyncExitStack], Awaitable[None]]) -> None:
    server = KubernetesServer()
    try:
        await asyncio.to_thread(server.start)
        async with ring_bench(server) as bench, AsyncExitStack() as stack:
            await work(bench, stack)
    finally:
        server.stop()


async def _all_moves(
    bench: RingBench, stack: AsyncExitStack, cell: Cell, runs: int, keep: Keep
) -> None:
    names = [f"o-{number}" for number in range(cell.objects)]
    await asyncio.to_thread(bench.fill, names, wanted(names, THREE[:2]))
    for name in THREE[:2]:
        one = InstanceProcess(bench.server, name, LEASE_S)
        stack.callback(one.end, signal.SIGTERM)
    sharder = SharderProcess(bench.server)
    stack.callback(sharder.stop)
    await until(lambda: bench.available(2), "two instances are there")
    await _at_rest(sharder)
    moves = Moves(bench, sharder, names)
    for _ in range(runs):
        load = os.getloadavg()[0]
        keep(_with_load(await moves.once(), load))


def _with_load(told: Measured, load: float) -> Measured:
    return {**told, "load": load, "cpus": os.cpu_count() or 1}


# telling


def page(found: dict[str, list[Measured]]) -> str:
    """All tables that have rows."""
    tables = [_objects_table(found), _webhook_table(found), _moves_table(found)]
    return "\n\n".join(table for table in tables if table)


def _mib(rounds: Sequence[Measured], *names: str) -> float:
    return max(one[name] for one in rounds for name in names) / MIB


def _load(rounds: Sequence[Measured]) -> str:
    most = max(one["load"] for one in rounds)
    return f"{most:.1f}{' (busy)' if busy(rounds) else ''}"


def _objects_table(found: dict[str, list[Measured]]) -> str:
    head = ["objects", "runs", "at rest MiB", "at most MiB", "over the fewest MiB", "goal", "",
            "CPU ms per change", "largest share", "load"]  # fmt: skip
    rows: list[list[str]] = []
    least: float | None = None
    for cell in CELLS.values():
        rounds = found.get(cell.key) or []
        if cell.kind != "objects" or not rounds:
            continue
        most = _mib(rounds, "most_changing", "most_walking")
        first, least = least is None, most if least is None else least
        met = most <= MOST_MIB and most - least <= GROWTH_MIB
        rows.append([
            f"{cell.objects:,}", f"{len(rounds)} of {cell.runs}",
            f"{_mib(rounds, 'at_rest'):.1f}", f"{most:.1f}",
            "" if first else f"{most - least:+.1f}",
            f"at most {MOST_MIB}{'' if first else f', +{GROWTH_MIB}'}", "met" if met else "MISSED",
            f"{1e3 * median(one['change_cpu'] for one in rounds):.2f}",
            f"{100 * max(one['share'] for one in rounds):.1f} %", _load(rounds),
        ])  # fmt: skip
    return grid(head, rows) if rows else ""


def _webhook_table(found: dict[str, list[Measured]]) -> str:
    rounds = found.get("webhook") or []
    if not rounds:
        return ""

    def ms(name: str) -> float:
        return 1e3 * median(one[name] for one in rounds)

    head = ["a create", "runs", "p50 ms", "p99 ms", "CPU ms of the sharder", "without an instance",
            "load"]  # fmt: skip
    runs = f"{len(rounds)} of {CELLS['webhook'].runs}"
    with_it, without = ([ms(f"{one}_p50"), ms(f"{one}_p99")] for one in (SHARED, PLAIN))
    missed = sum(one["missed"] for one in rounds)
    added = [a - b for a, b in zip(with_it, without, strict=True)]
    return grid(head, [
        ["without the webhook", runs, *(f"{one:.2f}" for one in without), "", "", _load(rounds)],
        ["with the webhook", runs, *(f"{one:.2f}" for one in with_it), f"{ms('create_cpu'):.2f}",
         f"{missed:,} of {len(rounds) * PAIRS:,}", _load(rounds)],
        ["difference", "", *(f"{one:+.2f}" for one in added), "", "", ""],
    ])  # fmt: skip


def _moves_table(found: dict[str, list[Measured]]) -> str:
    rounds = found.get("moves") or []
    if not rounds:
        return ""
    shown = {
        "joined": "a third instance starts, until it counts",
        "balanced": "until a third of all objects are at it",
        "first": "it is killed, until the first object moves",
        "reassigned": "until the last one has moved",
    }
    rows: list[list[str]] = []
    for name, title in shown.items():
        times = [one[name] for one in rounds]
        rows.append([title, f"{len(rounds)} of {CELLS['moves'].runs}",
                     *(f"{one:.1f}" for one in (min(times), median(times), max(times))),
                     _load(rounds)])  # fmt: skip
    moved = median(one["moved"] for one in rounds)
    cpu_ms = 1e3 * median(one["move_cpu"] for one in rounds)
    return (
        grid(["seconds", "runs", "min", "median", "max", "load"], rows)
        + f"\n\n{MOVED:,} objects, of which {moved:,.0f} moved after the kill, with {cpu_ms:.2f} "
        f"ms of processor time of the sharder for each; Leases of {LEASE_S} s."
    )


def _facts() -> str:
    return (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, Python "
        f"{platform.python_version()}, kube-apiserver 1.36.3, all on one machine. A change is an "
        "assignment or a move by the sharder's own patch; its share of the start of the process is "
        "in it. Load: the highest before a run; where it says busy, other programs had the "
        f"machine, too: memory and processor time hold, other times are upper bounds. {UPSTREAM}"
    )


def chosen(texts: Sequence[str]) -> list[str]:
    """The cells whose names have one of these words in them, or are one; all without any."""
    exact = [text for text in texts if text in CELLS]
    words = [text for text in texts if text not in CELLS]
    return [key for key in CELLS if not texts or key in exact or any(one in key for one in words)]


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m proving.benchmarks.rings", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--only", action="append", default=[], metavar="WORD", help="cells with it in their names")
    add("--next", action="store_true", help="the missing runs of one cell, and end")
    add("--runs", type=count, metavar="N", help="at most so many of each cell, kept ones included")
    add("--again", action="store_true", help="measure the chosen cells anew")
    add("--list", action="store_true", help="the names of the cells")
    add("--table", action="store_true", help="the tables of what is kept; measure nothing")
    add("--write-docs", action="store_true", help="the tables also go to the page of rings")
    add("--cache", type=Path, default=CACHE, help="where results are kept")
    options = parser.parse_args(given)
    if not chosen(options.only):
        parser.error(f"no cell has {options.only} in its name: see --list")
    return options


def main(given: Sequence[str] | None = None) -> int:
    """The command; 1 if a chosen cell could not be measured."""
    options = arguments(given)
    keys = chosen(options.only)
    if options.list:
        print("\n".join(keys))
        return 0
    scale: dict[str, Any] = {
        "lease_s": LEASE_S, "changed": CHANGED, "pairs": PAIRS, "moved": MOVED,
    }  # fmt: skip
    kept = Kept(options.cache / "rings.json", scale)
    if options.again:
        for key in keys:
            kept.forget(key)
    absent: dict[str, str] = {}
    left = {
        key: min(CELLS[key].runs, options.runs or CELLS[key].runs) - len(kept.cells.get(key, []))
        for key in keys
    }
    todo = [key for key in keys if left[key] > 0]
    for key in [] if options.table else todo[:1] if options.next else todo:

        def keep(told: Measured, key: str = key) -> None:
            kept.add(key, told)
            tell(f"{key} run {len(kept.cells[key])}: {told}")

        try:
            asyncio.run(measured(CELLS[key], left[key], keep))
        except (Unable, NoKubernetes, KubeError, OSError, TimeoutError, AssertionError) as error:
            absent[key] = f"{type(error).__name__}: {error}"
            tell(f"{key}: {absent[key]}")
    # The page has all that is kept, whatever was chosen now.
    text = f"{page(kept.cells)}\n\n{_facts()}"
    print(text)
    for key, why in absent.items():
        print(f"\n{key}: not measured: {why}")
    if options.write_docs:
        filled = fill(PAGE.read_text(encoding="utf-8"), "rings", f"{text}\n")
        PAGE.write_text(filled, encoding="utf-8")
    return 1 if absent else 0


if __name__ == "__main__":
    run(main)
