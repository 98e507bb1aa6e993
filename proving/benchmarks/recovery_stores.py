"""How long shards are without a home when something is lost, on each store that has a server.

    python -m proving.benchmarks.recovery_stores                     all runs that are missing
    python -m proving.benchmarks.recovery_stores --next              the missing runs of one cell
    python -m proving.benchmarks.recovery_stores --only etcd-killed  cells with that in their names
    python -m proving.benchmarks.recovery_stores --list              the names of the cells

A cell is a store, a loss and a ttl; one cluster of four nodes serves its runs. Each run is kept in
a JSON file at once, and the same command goes on where it ended. Nodes ask the store's server
through a proxy each, and each other through gates. The losses:

- **killed**: SIGKILL of a node that does not coordinate. Its lease has to run out.
- **leader**: SIGKILL of the one that does.
- **frozen**: SIGSTOP of a node.
- **cut**: a network that loses all that a node sends and gets, to the store as well.
- **server**: SIGKILL of the store's server, which starts again at once. Homes keep serving.

`answered` and `served` are those of `proving.benchmarks.recovery`. After the loss of a server,
`served` also waits until it takes a commit, and `failed` counts the asks that failed until then, of
one every 20 ms. Floors: under 10 s with the default ttl of 6 s, under 3 s with a ttl of 2 s.

casty is measured beside it with its defaults (`casty-killed`, `casty-frozen`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from domicile import DomicileError, Settings
from domicile.backends.wiring import open_whole_store
from domicile.core.state.txn import Committed, Put
from domicile.errors import StoreError
from domicile.testing.processes.node_process import HarnessError
from domicile.testing.suites.byte_proxy import ByteProxy
from proving.benchmarks import recovery_peer
from proving.benchmarks.command import count, run
from proving.benchmarks.fleet import Fleet
from proving.benchmarks.kept import CACHE, Kept, Measured, tell
from proving.benchmarks.processes import ROOT
from proving.benchmarks.recovery import (
    AT_ONCE_S,
    NODES,
    SHARDS,
    TRY_S,
    answered,
    even,
    one_run,
    quantile,
    served,
)
from proving.benchmarks.recovery import FAULTS as EMBEDDED
from proving.benchmarks.recovery import Fault as Lost
from proving.benchmarks.report import fill, grid
from proving.benchmarks.store_servers import ABSENT, TITLES, StorePlace, store_place
from proving.benchmarks.stores_report import busy
from proving.chaos.server import SERVERS
from proving.workload import Room

PAGE = ROOT / "docs" / "explanation" / "performance.md"
FLOORS_S = {2.0: 3.0, Settings().ttl_s: 10.0}
RUNS = {2.0: 10, Settings().ttl_s: 30}
LIMIT_S = 120.0
EVERY_S = 0.02
PEER_RUNS = 10
LOSSES = {
    "killed": "SIGKILL of a node", "leader": "SIGKILL of the coordinator",
    "frozen": "SIGSTOP of a node", "cut": "cut network of a node",
    "server": "SIGKILL and restart of the store's server",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """A store, a loss and a ttl; casty has a ttl of its own."""

    store: str
    loss: str
    ttl_s: float | None = None

    @property
    def key(self) -> str:
        """Its name for the command line and in the file."""
        return f"{self.store}-{self.loss}" + ("" if self.ttl_s is None else f"-{self.ttl_s:g}")

    @property
    def runs(self) -> int:
        """How often it is measured."""
        return PEER_RUNS if self.ttl_s is None else RUNS[self.ttl_s]


def _cells() -> list[Cell]:
    found: list[Cell] = []
    for store in SERVERS:
        found.append(Cell(store, "killed", Settings().ttl_s))
        found += [Cell(store, loss, 2.0) for loss in LOSSES]
    return found + [Cell("casty", loss) for loss in recovery_peer.FAULTS]


CELLS: dict[str, Cell] = {cell.key: cell for cell in _cells()}


# measuring


class Struck:
    """A cluster on a store behind proxies, and what can be lost of it."""

    def __init__(self, fleet: Fleet, place: StorePlace, proxies: Sequence[ByteProxy]) -> None:
        self.fleet, self.place, self.proxies = fleet, place, proxies

    async def run(self, loss: str) -> Measured:
        """Lose something once."""
        if loss == "server":
            return await self._restarted()
        if loss == "cut":
            return await self._lost(Lost(LOSSES[loss], False, 1, self._cut, self._heal))
        return await self._lost(EMBEDDED["coordinator" if loss == "leader" else loss])

    async def _lost(self, fault: Lost) -> Measured:
        answer_s, served_s = await one_run(self.fleet, fault)
        return {"answered": answer_s, "served": served_s}

    def _cut(self, fleet: Fleet, victims: Sequence[int]) -> None:
        fleet.isolate(victims)
        for victim in victims:
            self.proxies[victim].hold_at_once()

    async def _heal(self, fleet: Fleet, victims: Sequence[int]) -> None:
        for victim in victims:
            await self.proxies[victim].release()
        fleet.reconnect()
        for victim in victims:
            await fleet.joined(victim)

    async def _restarted(self) -> Measured:
        fleet, server = self.fleet, self.place.server
        assert server is not None
        await fleet.wait_until(lambda: even(fleet), timeout_s=LIMIT_S)
        id = "room-0"
        # The client may have lost its lease to the restart before, too.
        await answered(fleet, id)
        over = asyncio.Event()
        store = open_whole_store(fleet.store, by="prober").store
        try:
            struck_at = time.monotonic()
            await asyncio.to_thread(server.kill)
            async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
                group.create_task(asyncio.to_thread(server.start))
                asking = group.create_task(self._asks(over))
                answer_at = await answered(fleet, id)
                while True:
                    with contextlib.suppress(StoreError):
                        outcome = await store.commit([], [Put(b"bench/probe", b"")])
                        if isinstance(outcome, Committed):
                            break
                    await asyncio.sleep(EVERY_S / 4)
                # Its own view of the store may be broken for a moment, too.
                served_at = await served(fleet, [])
                over.set()
        finally:
            await store.close()
        asks, failed = asking.result()
        return {
            "answered": answer_at - struck_at, "served": served_at - struck_at, "asks": asks,
            "failed": failed,
        }  # fmt: skip

    async def _asks(self, over: asyncio.Event) -> tuple[int, int]:
        asks = failed = 0
        while not over.is_set():
            asks += 1
            try:
                ref = self.fleet.ref(Room, f"room-{asks % SHARDS}")
                await ref.options(timeout_s=4 * TRY_S).ask(Room.note, 1)
            except DomicileError:
                failed += 1
            await asyncio.sleep(EVERY_S)
        return asks, failed


@asynccontextmanager
async def cluster(store: str, ttl_s: float) -> AsyncGenerator[Struck]:
    """Four nodes on a new store of that name."""
    settings = Settings(
        shards=SHARDS, ttl_s=ttl_s, balance_limit=1.0, balance_receiver=1.0,
        poison_window_s=AT_ONCE_S,
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        place = stack.enter_context(store_place(store))
        server = place.server
        assert server is not None
        proxies: list[ByteProxy] = []
        for _ in range(NODES):
            proxy = ByteProxy("127.0.0.1", server.port)
            proxies.append(await stack.enter_async_context(proxy))

        def store_at(node: int) -> str:
            return place.url.replace(f":{server.port}/", f":{proxies[node].port}/")

        fleet = Fleet(
            [Room], nodes=NODES, settings=settings, network=True, store=place.url,
            store_at=store_at,
        )  # fmt: skip
        await stack.enter_async_context(fleet)
        yield Struck(fleet, place, proxies)


async def measured(cell: Cell, runs: int, keep: Callable[[Measured], None]) -> None:
    """So many runs, each kept as soon as it is over."""
    assert cell.ttl_s is not None
    async with cluster(cell.store, cell.ttl_s) as struck:
        for _ in range(runs):
            load = os.getloadavg()[0]
            told = await struck.run(cell.loss)
            keep({**told, "load": load, "cpus": os.cpu_count() or 1})


def peer(cell: Cell, runs: int, keep: Callable[[Measured], None]) -> None:
    """The same of casty, which has no store and no coordinator."""
    for _ in range(runs):
        load = os.getloadavg()[0]
        answer_s = recovery_peer.one(cell.loss)
        keep({"answered": answer_s, "load": load, "cpus": os.cpu_count() or 1})


# telling


def page(found: dict[str, list[Measured]]) -> str:
    """A row per cell and what it waits for, with its floor."""
    rows: list[list[str]] = []
    for key, cell in CELLS.items():
        rounds = found.get(key) or []
        for until in ("answered", "served"):
            values = [one[until] for one in rounds if until in one]
            if values:
                rows.append(_row(cell, until, values, rounds))
    head = ["lost", "store", "ttl", "until", "runs", "min s", "p50 s", "p90 s", "max s", "floor s",
            "", "load"]  # fmt: skip
    return grid(head, rows)


def _row(cell: Cell, until: str, values: Sequence[float], rounds: Sequence[Measured]) -> list[str]:
    floor_s = None if cell.ttl_s is None else FLOORS_S[cell.ttl_s]
    told = "" if floor_s is None else "met" if max(values) < floor_s else "MISSED"
    failed = sum(one.get("failed", 0) for one in rounds)
    if cell.loss == "server":
        told += f", {failed} of {sum(one['asks'] for one in rounds):,} asks failed"
    most = max(one["load"] for one in rounds)
    figures = (min(values), median(values), quantile(values, 0.9), max(values))
    return [
        LOSSES[cell.loss], TITLES.get(cell.store, cell.store),
        "" if cell.ttl_s is None else f"{cell.ttl_s:g} s", until,
        f"{len(values)} of {cell.runs}", *(f"{figure:.3f}" for figure in figures),
        "" if floor_s is None else f"{floor_s:g}", told,
        f"{most:.1f}{' (busy)' if busy(rounds) else ''}",
    ]  # fmt: skip


def chosen(texts: Sequence[str]) -> list[str]:
    """The cells whose names have one of these words in them, or are one; all without any."""
    exact = [text for text in texts if text in CELLS]
    words = [text for text in texts if text not in CELLS]
    return [key for key in CELLS if not texts or key in exact or any(one in key for one in words)]


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m proving.benchmarks.recovery_stores", description=__doc__,
        allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--only", action="append", default=[], metavar="WORD", help="cells with it in their names")
    add("--next", action="store_true", help="the missing runs of one cell, and end")
    add("--runs", type=count, metavar="N", help="at most so many of each cell, kept ones included")
    add("--again", action="store_true", help="measure the chosen cells anew")
    add("--list", action="store_true", help="the names of the cells")
    add("--table", action="store_true", help="the table of what is kept; measure nothing")
    add("--write-docs", action="store_true", help="the table also goes to the page of figures")
    add("--cache", type=Path, default=CACHE, help="where results are kept")
    options = parser.parse_args(given)
    if not chosen(options.only):
        parser.error(f"no cell has {options.only} in its name: see --list")
    return options


def _facts() -> str:
    return (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, Python "
        f"{platform.python_version()}; {NODES} nodes, {SHARDS} shards. Seconds after the loss. "
        "Load: the highest before a run; where it says busy, other programs had the machine, too."
    )


def main(given: Sequence[str] | None = None) -> int:
    """The command; 1 if a chosen cell of Domicile's could not be measured."""
    options = arguments(given)
    keys = chosen(options.only)
    if options.list:
        print("\n".join(keys))
        return 0
    kept = Kept(options.cache / "recovery-stores.json", {"nodes": NODES, "shards": SHARDS})
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

        cell = CELLS[key]
        try:
            if cell.ttl_s is None:
                peer(cell, left[key], keep)
            else:
                asyncio.run(measured(cell, left[key], keep))
        except (*ABSENT, *recovery_peer.FAILURES, HarnessError, AssertionError) as error:
            absent[key] = str(error)
            tell(f"{key}: {error}")
    found = {key: kept.cells.get(key, []) for key in keys}
    text = f"{page(found)}\n\n{_facts()}"
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
        text = f"{page(found)}\n\n{_facts()}"
        filled = fill(PAGE.read_text(encoding="utf-8"), "recovery-stores", f"{text}\n")
        PAGE.write_text(filled, encoding="utf-8")
    return 1 if any(CELLS[key].ttl_s is not None for key in absent) else 0


if __name__ == "__main__":
    run(main)
