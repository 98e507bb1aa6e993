"""What the stores cost: requests of idle clusters (I8), commits a second, latency of watches.

    python -m proving.benchmarks.stores                    what is missing of all cells
    python -m proving.benchmarks.stores --next             one missing cell, then the table
    python -m proving.benchmarks.stores --only etcd        cells with that word in their names
    python -m proving.benchmarks.stores --list             the names of the cells
    python -m proving.benchmarks.stores --quick            a smoke test; its figures mean nothing

Every cell has a server of its own and real processes on loopback. A server counts its requests
itself: transactions of PostgreSQL, messages of etcd, scripts and waits for the log of Redis. The
embedded store has no server: its nodes count their calls. A round is kept in a JSON file at once,
and the same command goes on where it ended. `--again` measures chosen cells anew. The tables go to
stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from domicile.backends.wiring import open_whole_store
from domicile.core.state.keys import NODES as NODE_KEYS
from proving.benchmarks.command import count, positive, run
from proving.benchmarks.durable import fdatasync_s
from proving.benchmarks.kept import CACHE, Kept, Measured, tell
from proving.benchmarks.processes import ROOT, Part, PartFailed, cpu_s
from proving.benchmarks.report import fill
from proving.benchmarks.store_servers import ABSENT, StorePlace, store_place
from proving.benchmarks.stores_report import CELLS, Cell, chosen, page

PARTS = "proving.benchmarks.stores_parts"
CLUSTER = b"domicile/"
PAGE = ROOT / "docs" / "explanation" / "performance.md"
SETTLE_S = 240.0
AT_ONCE = 10
"""Nodes that start at a time."""

WARM_S = 1.0


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything."""

    rounds: int = 3
    """Of commits and watches; an idle cluster is looked at once, for longer."""
    seconds: float = 5.0
    idle_s: float = 30.0
    calm_s: float = 5.0
    """So long nothing may have been committed before a cluster counts as idle."""
    late_s: float = 11.0
    """Sessions of PostgreSQL tell what they did up to 10 s late."""
    stamps: int = 500
    gap_s: float = 0.02
    probes: int = 100


QUICK = Scale(
    rounds=1, seconds=0.2, idle_s=1.0, calm_s=0.5, late_s=0.0, stamps=5, gap_s=0.001, probes=3
)  # fmt: skip


class Measuring:
    """What one round of one cell is measured with: a store, and processes that are ended."""

    def __init__(self, place: StorePlace, scale: Scale, stack: ExitStack) -> None:
        self.place, self.scale, self._stack = place, scale, stack

    def part(self, name: str, id: str, **options: Any) -> Part:
        """Start a process."""
        given = {"where": self.place.url, "loop": "asyncio", "id": id, **options}
        made = Part(sys.executable, PARTS, name, given, self.place.home)
        self._stack.callback(made.close)
        return made

    def idle(self, nodes: int, shards: int) -> Measured:
        """Requests a second of nodes that do nothing."""
        counts = self.place.server is None
        parts: list[Part] = []
        for first in range(0, nodes, AT_ONCE):
            more = range(first, min(nodes, first + AT_ONCE))
            started = [self.part("node", f"n{n}", shards=shards, counts=counts) for n in more]
            for one in started:
                one.ready()
            parts += started
        asyncio.run(self._calm(nodes))
        time.sleep(self.scale.late_s)

        def asked() -> int:
            told = self.place.asked()
            if told is not None:
                return told
            return sum(one.run(system="node", what="calls")["calls"] for one in parts)

        before, server_s, began = asked(), self.place.cpu_s(), time.monotonic()
        used = [cpu_s(one.pid) for one in parts]
        time.sleep(self.scale.idle_s)
        took_s = time.monotonic() - began
        node_s = mean(cpu_s(one.pid) - before_s for one, before_s in zip(parts, used, strict=True))
        server_now = self.place.cpu_s()
        rate = (asked() - before) / (time.monotonic() - began)
        share = None if server_s is None or server_now is None else (server_now - server_s) / took_s
        return {
            "value": rate, "per_node": rate / nodes, "node_share": node_s / took_s,
            "server_share": share,
        }  # fmt: skip

    async def _calm(self, nodes: int) -> None:
        """Return once all nodes are there and nothing has been committed for a while."""
        store = open_whole_store(self.place.url, by="observer").store
        try:
            async with asyncio.timeout(SETTLE_S):
                known, since = -1, 0.0
                while True:
                    listed = await store.list(CLUSTER + NODE_KEYS)
                    if listed.revision != known or len(listed.items) < nodes:
                        known, since = listed.revision, time.monotonic()
                    elif time.monotonic() - since >= self.scale.calm_s:
                        return
                    await asyncio.sleep(min(0.5, self.scale.calm_s / 4))
        finally:
            await store.close()

    def commits(self, processes: int, depth: int) -> Measured:
        """Commits a second of so many processes with so many under way each."""
        parts = [self.part("writer", f"w{n}") for n in range(processes)]
        for one in parts:
            one.ready()
        wanted = {
            "system": "writer", "what": "commits", "depth": depth, "seconds": self.scale.seconds,
            "warm_s": min(WARM_S, self.scale.seconds),
        }  # fmt: skip
        with ThreadPoolExecutor(processes) as pool:
            told = list(pool.map(lambda one: one.run(**wanted), parts))
        return {
            "value": sum(one["count"] / one["took_s"] for one in told),
            **{name: max(one[name] for one in told) for name in ("p50_s", "p99_s", "max_s")},
        }

    def watch(self) -> Measured:
        """From the call of a commit until the watch of another process has it."""
        writer, follower = self.part("writer", "w0"), self.part("follower", "f0")
        writer.ready()
        follower.ready()
        scale = self.scale
        follower.run(system="follower", what="begin", count=scale.stamps)
        writer.run(system="writer", what="stamps", count=scale.stamps, gap_s=scale.gap_s)
        told = follower.run(system="follower", what="end")
        return {**told, "value": told["p99_s"]}


def measure(cell: Cell, scale: Scale, parent: Path | None) -> Measured:
    """One round of one cell, with the probe of the disk."""
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        place = stack.enter_context(store_place(cell.store, parent))
        probed = fdatasync_s(place.home, scale.probes)
        # Ended before their server.
        with ExitStack() as parts:
            kinds: dict[str, Callable[..., Measured]] = {
                name: getattr(Measuring(place, scale, parts), name)
                for name in ("idle", "commits", "watch")
            }
            told = kinds[cell.kind](*cell.numbers)
        probes = [probed, fdatasync_s(place.home, scale.probes)]
    return {
        **told, "fsync_s": median(probes), "load": load, "cpus": os.cpu_count() or 1,
        "at": time.time(),
    }  # fmt: skip


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m proving.benchmarks.stores", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--only", action="append", default=[], metavar="WORD", help="cells with it in their names")
    add("--next", action="store_true", help="measure one round that is missing, and end")
    add("--rounds", type=count, metavar="N")
    add("--seconds", type=positive, metavar="S", help="of commits, per round")
    add("--quick", action="store_true", help="a smoke test")
    add("--again", action="store_true", help="measure the chosen cells anew")
    add("--list", action="store_true", help="the names of the cells")
    add("--table", action="store_true", help="the tables of what is kept; measure nothing")
    add("--write-docs", action="store_true", help="the tables also go to the page of figures")
    add("--cache", type=Path, default=CACHE, help="where results are kept")
    add("--directory", type=Path, help="on which disk SQLite writes; default: that of temporary "
        "files, where servers write, too")  # fmt: skip
    options = parser.parse_args(given)
    if not chosen(options.only):
        parser.error(f"no cell has {options.only} in its name: see --list")
    if options.quick and options.write_docs:
        parser.error("--write-docs wants figures that mean something, not those of --quick")
    return options


def wanted_rounds(cell: Cell, scale: Scale) -> int:
    """How many rounds a cell has."""
    return 1 if cell.kind == "idle" else scale.rounds


def _facts(found: Mapping[str, Sequence[Measured]], scale: Scale) -> str:
    left = sum(max(0, wanted_rounds(CELLS[key], scale) - len(found[key])) for key in found)
    missing = f"{left} rounds are missing. " if left else ""
    return (
        f"{missing}{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, Python "
        f"{platform.python_version()}. Load: the highest before a round; where it says busy, other "
        "programs had the machine, too."
    )


def main(given: Sequence[str] | None = None) -> int:
    """The command; 1 if a chosen cell could not be measured."""
    options = arguments(given)
    keys = chosen(options.only)
    if options.list:
        print("\n".join(keys))
        return 0
    scale = QUICK if options.quick else Scale()
    scale = replace(
        scale, rounds=options.rounds or scale.rounds, seconds=options.seconds or scale.seconds
    )
    name = "stores-quick.json" if options.quick else "stores.json"
    kept, absent = Kept(options.cache / name, asdict(scale)), dict[str, str]()
    if options.again:
        for key in keys:
            kept.forget(key)
    todo = [
        key
        for turn in range(scale.rounds)
        for key in keys
        if wanted_rounds(CELLS[key], scale) > turn and len(kept.cells.get(key, [])) <= turn
    ]
    for number, key in enumerate([] if options.table else todo[:1] if options.next else todo):
        if key in absent:
            continue
        try:
            kept.add(key, measure(CELLS[key], scale, options.directory))
        except (*ABSENT, PartFailed, TimeoutError) as error:
            absent[key] = str(error) or "the cluster did not come to rest"
        tell(f"{number + 1} of {len(todo)}: {key} {absent.get(key, '')}".rstrip())
    found = {key: kept.cells.get(key, []) for key in keys}
    text = f"{page(found)}\n\n{_facts(found, scale)}"
    print(text)
    for key, why in absent.items():
        print(f"\n{key}: not measured: {why}")
    if options.write_docs:
        # Also the cells that were not chosen now: the page shows all of them.
        lost = kept.lacks(CELLS, keys)
        if lost:
            tell(f"{PAGE} stays as it is: nothing is kept of {', '.join(lost)}, say no --only")
            return 1
        found = {key: kept.cells.get(key, []) for key in CELLS}
        text = f"{page(found)}\n\n{_facts(found, scale)}"
        filled = fill(PAGE.read_text(encoding="utf-8"), "stores", f"{text}\n")
        PAGE.write_text(filled, encoding="utf-8")
    if options.quick:
        print("These are figures of a smoke test: they mean nothing.")
    return 1 if absent else 0


if __name__ == "__main__":
    run(main)
