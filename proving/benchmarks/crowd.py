"""Many processes at once: do they find their places without running the store over?

    python -m proving.benchmarks.crowd                            50 nodes, 200 clients, about a
    minute python -m proving.benchmarks.crowd --rate 3                   3 clients a second come
    python -m proving.benchmarks.crowd --at-once                  all clients come at the same
    moment python -m proving.benchmarks.crowd --nodes 12 --clients 40 python -m
    proving.benchmarks.crowd --quick                    a smoke test; its figures mean nothing
    python -m proving.benchmarks.crowd --write-docs               also into
    docs/explanation/performance.md

All nodes start at the same moment on one embedded store and are left alone for a while; then
clients come, ask and go, in random order; then all nodes are asked to leave at the same moment.
What each process asks of the store is counted where it calls it, as in `proving.benchmarks.idle`.
Exits with 1 if an ask or a process failed, if shards are not spread evenly at the end, if something
is left in the store, or if there was a herd (`proving.benchmarks.crowd_verdict`): a node, the
coordinator or all together ask for more than they may to get in and out, while nothing happens or
while clients come. Importing Python's modules for 50 processes takes two processors a while; times
count from the first start. A client connects to the homes of what it asks, and all nodes learn that
it came and went. All clients at once are for a run by hand: on few processors that is slow, and
leases may be lost; the report says how long asks took and how many visits failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Self

from domicile import Client, DomicileError, Node, Settings
from domicile.backends.wiring import open_backends
from domicile.config import token_of
from domicile.entity.model.ref import Outbound
from domicile.incarnation.context import Backends, Identity
from domicile.incarnation.supervisor import Supervisor
from domicile.observe import Metrics
from domicile.stores.namespace import Namespace
from domicile.stores.sqlite.store import SqliteStore
from domicile.testing.processes.store_view import StoreView
from proving.benchmarks import command
from proving.benchmarks.crowd_verdict import SHARDS, page, told_first, verdict
from proving.benchmarks.home import Echo
from proving.benchmarks.idle import Counting
from proving.benchmarks.openloop import quantile
from proving.benchmarks.part import Options
from proving.benchmarks.part import Part as PartOf
from proving.benchmarks.processes import ROOT, Part
from proving.benchmarks.report import fill

PAGE = ROOT / "docs" / "explanation" / "performance.md"
CLUSTER = "domicile"
SAMPLE_S = 0.25
PEAK_S = 1.0
RATE = 5.0
"""How many clients come in a second."""

WAIT_S = 300.0


def settings() -> Settings:
    """Defaults, but for balance: all of it in as few rounds as possible."""
    return Settings(shards=SHARDS, balance_limit=1.0, balance_receiver=1.0)


# in the processes


class Samples:
    """How much was asked of a store by when, and what the process worked until then."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._seen: list[tuple[float, int]] = []
        self._worked: list[tuple[float, float]] = []

    async def take(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            self._look()
            await asyncio.sleep(SAMPLE_S)

    async def run(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """All kinds of requests, and all looks."""
        self._look()
        return {"kinds": dict(self._counts), "samples": self._seen, "worked": self._worked}

    def _look(self) -> None:
        now = time.monotonic()
        self._seen.append((now, self._counts.total()))
        self._worked.append((now, time.process_time()))


@asynccontextmanager
async def sampled(counts: Counter[str]) -> AsyncGenerator[Samples]:
    """Looks for as long as the body runs."""
    samples = Samples(counts)
    looking = asyncio.create_task(samples.take())
    try:
        yield samples
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking


def counted(where: str, by: str, counts: Counter[str]) -> Callable[[], Backends]:
    """What makes backends whose store counts."""

    def wired() -> Backends:
        made = open_backends(where, cluster=CLUSTER, settings=settings(), by=by, meter=Metrics())
        return replace(made, store=Counting(made.store, counts))

    return wired


@asynccontextmanager
async def node(options: Options) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """One node; once it has left it writes down how much it asked for in all."""
    counts: Counter[str] = Counter()
    where, id = options["where"], options["id"]
    async with sampled(counts) as samples:
        async with Node(
            where, entities=[Echo], node_id=id, settings=settings(),
            backends=counted(where, id, counts),
        ):  # fmt: skip
            yield where, {"crowd": samples}
        total = Path(f"{id}.total")
        await asyncio.to_thread(total.write_text, str(counts.total()), encoding="ascii")


class Visitor(Client):
    """A client whose store counts."""

    def __init__(self, wired: Backends) -> None:
        self._wired, self._lives = wired, Supervisor()

    async def __aenter__(self) -> Self:
        """Join."""
        plan = Identity(CLUSTER, "", {}, {}, settings(), False, token=token_of(None))
        await self._lives.start(self._wired, plan)
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Leave."""
        await self._lives.stop()

    def _outbound(self) -> Outbound:
        return self._lives


class Visitors:
    """Clients that come, ask and go."""

    def __init__(self, options: Options, counts: Counter[str]) -> None:
        self._options, self._counts = options, counts
        self._random = Random(options["id"])
        self._errors: Counter[str] = Counter()
        self._took_s: list[float] = []

    async def run(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """All visits of all of them."""
        self._counts.clear()
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(wanted["clients"]):
                group.create_task(self._visits(wanted))
        return {
            "errors": dict(self._errors), "asks": len(self._took_s),
            "p50_s": quantile(sorted(self._took_s) or [0.0], 0.5),
            "p99_s": quantile(sorted(self._took_s) or [0.0], 0.99),
            "seconds": time.monotonic() - began, "kinds": dict(self._counts),
        }  # fmt: skip

    async def _visits(self, wanted: dict[str, Any]) -> None:
        wired = counted(self._options["where"], self._options["id"], self._counts)
        for _ in range(wanted["visits"]):
            await asyncio.sleep(self._random.random() * wanted["spread_s"])
            try:
                async with Visitor(wired()) as visitor:
                    for _ in range(wanted["asks"]):
                        await self._ask(visitor)
                        await asyncio.sleep(2 * self._random.random() * wanted["pause_s"])
            except (DomicileError, OSError) as error:
                self._errors[f"{type(error).__name__}: {error}"] += 1

    async def _ask(self, visitor: Visitor) -> None:
        ref = visitor.ref(Echo, str(self._random.randrange(10_000)))
        since = time.monotonic()
        assert await ref.ask(Echo.echo, b"hello") == b"hello"
        self._took_s.append(time.monotonic() - since)


@asynccontextmanager
async def clients(options: Options) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """A process of many clients."""
    yield options["where"], {"crowd": Visitors(options, Counter())}


PARTS: dict[str, PartOf] = {"node": node, "clients": clients}


# the parent


class Member(Part):
    """A process that can be asked to leave together with others."""

    def ask_to_leave(self) -> None:
        """Return at once."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def left(self, deadline: float) -> int | None:
        """Its exit code, once it is gone; None if it does not go in time."""
        with suppress(Exception):
            return self._process.wait(max(0.1, deadline - time.monotonic()))
        return None

    def complaints(self) -> list[str]:
        """What it logged: warnings and worse."""
        self._stderr.seek(0)
        return [line.strip() for line in self._stderr.read().splitlines() if line.strip()]


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many of everything."""

    nodes: int = 50
    clients: int = 200
    processes: int = 8
    visits: int = 1
    asks: int = 20
    stay_s: float = 5.0
    per_s: float = RATE
    """0: all at once."""
    idle_s: float = 10.0

    @property
    def spread_s(self) -> float:
        """Within which time all of them come."""
        return self.clients / self.per_s if self.per_s else 0.0

    def shares(self) -> list[int]:
        """How many clients are in each of their processes: all of them, and none has none."""
        count = min(self.processes, self.clients)
        return [self.clients // count + (n < self.clients % count) for n in range(count)]


QUICK = Wanted(nodes=3, clients=8, processes=2, asks=3, stay_s=0.2, per_s=16.0, idle_s=1.0)


class Watched:
    """The store as an operator sees it."""

    def __init__(self, database: Path) -> None:
        self._store = Namespace(SqliteStore(database, by="operator"), CLUSTER)
        self.view = StoreView(self._store, time.monotonic)

    async def __aenter__(self) -> Watched:
        await self.view.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.view.close()
        await self._store.close()

    def loads(self) -> Counter[str]:
        """How many shards each registered node serves."""
        members = self.view.members
        found: Counter[str] = Counter(dict.fromkeys(members.nodes, 0))
        for _, entry in members.map:
            if entry.state == "serving" and entry.owner in members.nodes:
                found[entry.owner] += 1
        return found

    def served(self) -> bool:
        """Whether every shard has a home that is registered."""
        return self.loads().total() == SHARDS

    def balanced(self, nodes: int) -> bool:
        """Whether so many nodes share everything evenly."""
        loads = self.loads()
        even = len(loads) == nodes and max(loads.values()) - min(loads.values()) <= 1
        return even and loads.total() == SHARDS

    def leader(self) -> str:
        """The coordinator's node id."""
        members = self.view.members
        record = None if members.leader is None else members.nodes.get(members.leader.incarnation)
        return "" if record is None else record.node

    async def note_leaders(self, found: list[str]) -> None:
        """Whoever leads from here on, until cancelled: nodes that leave hand that over, too."""
        while True:
            if self.leader() not in found:
                found.append(self.leader())
            await asyncio.sleep(0.002)

    async def until(self, condition: Callable[[], bool]) -> float:
        """When it held."""
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return time.monotonic()


def peak(samples: Sequence[Sequence[float]], since: float, until: float) -> float:
    """The most requests within a second of that time."""
    seen = [(at, total) for at, total in samples if since <= at <= until]
    most = 0.0
    first = 0
    for at, total in seen:
        while seen[first][0] < at - PEAK_S:
            first += 1
        most = max(most, total - seen[first][1])
    return most


def between(samples: Sequence[Sequence[float]], since: float, until: float) -> float:
    """How many requests there were in that time, as far as looks tell."""
    before = max((total for at, total in samples if at <= since), default=0)
    return max((total for at, total in samples if at <= until), default=0) - before


async def measure(wanted: Wanted) -> dict[str, Any]:
    """All start, clients come and go, all leave."""
    waiting = ThreadPoolExecutor(wanted.nodes + wanted.processes)
    asyncio.get_running_loop().set_default_executor(waiting)
    async with AsyncExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="domicile-crowd-")))
        where = "sqlite:///crowd.db"

        def member(part: str, id: str) -> Member:
            options = {"where": where, "id": id, "loop": "asyncio"}
            made = Member(sys.executable, "proving.benchmarks.crowd", part, options, place)
            stack.push_async_callback(asyncio.to_thread, made.close)
            return made

        began = time.monotonic()
        nodes = [member("node", f"node-{number}") for number in range(wanted.nodes)]
        for one in nodes:
            await asyncio.to_thread(one.ready)
        ready = time.monotonic()
        watched = await stack.enter_async_context(Watched(place / "crowd.db"))
        served = await watched.until(watched.served)
        balanced = await watched.until(lambda: watched.balanced(wanted.nodes))
        leaders = [watched.leader()]
        shares = wanted.shares()
        visitors = [member("clients", f"clients-{n}") for n in range(len(shares))]
        for one in visitors:
            await asyncio.to_thread(one.ready)
        idle_since = time.monotonic()
        await asyncio.sleep(wanted.idle_s)
        idle_until = time.monotonic()
        told = await asyncio.gather(
            *(
                asyncio.to_thread(
                    one.run, system="crowd", clients=share,
                    visits=wanted.visits, asks=wanted.asks,
                    spread_s=wanted.spread_s,
                    pause_s=wanted.stay_s / wanted.asks,
                )
                for one, share in zip(visitors, shares, strict=True)
            )
        )  # fmt: skip
        gone = time.monotonic()
        leaders.append(watched.leader())
        loads = dict(watched.loads())
        in_order = watched.balanced(wanted.nodes)
        asked = [await asyncio.to_thread(one.run, system="crowd") for one in nodes]
        heirs = list(leaders)
        noting = asyncio.create_task(watched.note_leaders(heirs))
        everyone = [*visitors, *nodes]
        try:
            for one in everyone:
                one.ask_to_leave()
            leaving = time.monotonic()
            codes = [await asyncio.to_thread(one.left, leaving + WAIT_S) for one in everyone]
            left = time.monotonic()
        finally:
            noting.cancel()
            with suppress(asyncio.CancelledError):
                await noting
        await watched.until(lambda: not watched.view.members.nodes)
        remaining = len(watched.view.members.nodes) + len(watched.view.members.clients)
        totals = [int((place / f"node-{n}.total").read_text("ascii")) for n in range(wanted.nodes)]
        complaints = told_first(line for one in [*visitors, *nodes] for line in one.complaints())
    spans = {"in": (0.0, balanced), "idle": (idle_since, idle_until), "clients": (idle_until, gone)}
    rates: dict[str, list[dict[str, float]]] = {
        name: [
            {
                "requests": between(one["samples"], *span),
                "peak_per_s": peak(one["samples"], *span),
                "leads": float(f"node-{number}" in leaders),
                "worked_s": between(one["worked"], *span),
            }
            for number, one in enumerate(asked)
        ]
        for name, span in spans.items()
    }
    rates["out"] = [
        {
            "requests": total - one["samples"][-1][1], "peak_per_s": 0.0,
            "leads": float(f"node-{number}" in heirs),
        }
        for number, (total, one) in enumerate(zip(totals, asked, strict=True))
    ]  # fmt: skip
    return {
        "nodes": wanted.nodes, "clients": wanted.clients, "visits": wanted.visits,
        "per_s": wanted.per_s,
        "ready_s": ready - began, "served_s": served - began, "balanced_s": balanced - began,
        "idle_s": idle_until - idle_since, "visits_s": gone - idle_until, "left_s": left - leaving,
        "balanced": in_order, "loads": sorted(loads.values()), "remaining": remaining,
        "codes": codes, "complaints": complaints, "rates": rates, "visitors": told,
        "kinds": [one["kinds"] for one in asked], "leaders": heirs,
    }  # fmt: skip


def main(given: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if something was not as it should be."""
    parser = argparse.ArgumentParser(
        prog="python -m proving.benchmarks.crowd", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--nodes", type=command.count, default=Wanted().nodes)
    parser.add_argument("--clients", type=command.count, default=Wanted().clients)
    parser.add_argument("--rate", type=command.positive, default=RATE, metavar="PER_S")
    parser.add_argument("--at-once", action="store_true", help="all clients come at once")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--from", type=command.report, dest="earlier", metavar="FILE")
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args(given)
    if options.quick and options.write_docs:
        parser.error("--write-docs wants figures that mean something, not those of --quick")
    if options.earlier is not None:
        report: dict[str, Any] = json.loads(options.earlier.read_text(encoding="utf-8"))
    else:
        wanted = Wanted(nodes=options.nodes, clients=options.clients, per_s=options.rate)
        if options.quick:
            wanted = QUICK
        if options.at_once:
            wanted = replace(wanted, per_s=0.0)
        report = {
            "system": f"{platform.system()} {platform.machine()}", "cpus": os.cpu_count(),
            "python": platform.python_version(), "quick": options.quick,
            "found": asyncio.run(measure(wanted)),
        }  # fmt: skip
    print(page(report), end="")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if options.write_docs:
        PAGE.write_text(
            fill(PAGE.read_text(encoding="utf-8"), "crowd", page(report)), encoding="utf-8"
        )
    return 0 if verdict(report["found"])[0] else 1


if __name__ == "__main__":
    command.run(main)
