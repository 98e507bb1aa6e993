"""Hours of load with a fault every few seconds: nothing may grow.

    python -m benchmarks.soak --hours 2
    python -m benchmarks.soak --minutes 5 --seed 7 --every-s 3
    python -m benchmarks.soak --quick                a smoke test; its figures mean nothing

Five real nodes, a load in a process of its own, and clients that come and go. Two nodes stay for
the whole time and are only frozen and thawed, now and then for longer than their lease, so that
they end an incarnation and begin another; the other three are killed, stopped and started again.
Operators drain nodes and move shards meanwhile. Every few seconds the memory, file descriptors,
tasks, threads and blocks of memory of every process are noted, and the size of the store, whose log
is filled beforehand up to what it keeps. Of the lock files in the store's directory those of dead
incarnations do not count: they are kept for a day as proofs.

After a warm-up each figure of each process that lived long enough is judged by the median of the
slopes between its samples (Theil and Sen), with a bound below it that noise alone would not reach
(95 %): a figure whose growth over the time observed is surely larger than its allowance is a
failure, exit code 1, and the table says whose it is. Ends early by SIGINT, and judges what it has;
what was not seen for long enough to be judged is a failure, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import apsw

from benchmarks import command, plot
from benchmarks.fleet import Fleet
from benchmarks.processes import ROOT, Part
from benchmarks.report import fill, grid
from benchmarks.soak_load import Guest, Probe
from domicile import DomicileError, Settings
from domicile.core.ids import ShardKey
from domicile.core.txn import Put
from domicile.stores.namespace import Namespace
from domicile.stores.sqlite import KEPT_COMMITS, SqliteStore
from domicile.testing.processes import HarnessError

PAGE = ROOT / "docs" / "explanation" / "performance.md"
PICTURE = ROOT / "docs" / "pictures" / "soak.svg"
STAYERS, COMERS = (0, 1), (2, 3, 4)
SHARDS = 64
SAMPLE_S = 4.0
TOLD_S = 30.0
"""How often a sample is taken, and a line on stderr tells how it goes."""

AT_ONCE_S = 0.001
"""How close deaths must be to make a shard suspect: never so close, for they say nothing here."""

SETTLE_S = 90.0
ALLOWED: dict[str, tuple[float, float]] = {
    "rss_kb": (4_096, 0.05), "fds": (4, 0.05), "tasks": (8, 0.1), "threads": (2, 0.0),
    "blocks": (5_000, 0.02), "store_kb": (1_024, 0.15), "rows": (64, 0.0), "locks": (6, 0.0),
}  # fmt: skip
"""How much a figure may grow over the whole time and still be flat: so much, or that share. A store
of as many rows takes more room as time goes by: the numbers of each shard, in each commit that it
keeps, get longer, by up to four bytes in all."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """How long, and how hard."""

    minutes: float
    seed: int
    every_s: float
    rate: float
    warm_s: float


class Series:
    """The figures of all processes over time."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, list[tuple[float, float]]]] = {}

    def note(self, process: str, at: float, figures: dict[str, float]) -> None:
        """One look at one process."""
        for name, value in figures.items():
            self.found.setdefault(process, {}).setdefault(name, []).append((at, value))


def outside(pid: int) -> dict[str, float]:
    """What the kernel knows of a process; nothing if it is gone."""
    place = Path(f"/proc/{pid}")
    try:
        pages = int((place / "statm").read_text(encoding="ascii").split()[1])
        return {
            "rss_kb": pages * os.sysconf("SC_PAGE_SIZE") / 1_024,
            "fds": float(len(list((place / "fd").iterdir()))),
        }
    except OSError:
        return {}


# slopes


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The median slope between any two points, and a lower bound of it (95 %, one-sided)."""
    if len(points) < 3:
        return 0.0, 0.0
    step = max(1, len(points) // 300)
    kept = list(points)[::step]
    slopes = sorted(
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for index, earlier in enumerate(kept)
        for later in kept[index + 1 :]
        if later[0] > earlier[0]
    )
    count = len(kept)
    spread = 1.645 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    rank = max(0, int((len(slopes) - spread) / 2))
    return median(slopes), slopes[rank]


def judged(series: Series, wanted: Wanted, until: float) -> list[dict[str, Any]]:
    """Every figure of every process that lived long enough after the warm-up."""
    rows: list[dict[str, Any]] = []
    for process, figures in sorted(series.found.items()):
        for name, points in figures.items():
            kept = [point for point in points if point[0] >= wanted.warm_s]
            long = kept and kept[-1][0] - kept[0][0] >= 0.6 * (until - wanted.warm_s)
            if not long or len(kept) < 8:
                continue
            span = kept[-1][0] - kept[0][0]
            rising, surely = slope(kept)
            level = median(value for _, value in kept)
            least, share = ALLOWED[name]
            rows.append({
                "process": process, "figure": name, "level": level, "first": kept[0][1],
                "last": kept[-1][1], "per_hour": 3_600 * rising, "surely": surely * span,
                "allowed": max(least, share * level), "grew": surely * span > max(
                    least, share * level
                ),
            })  # fmt: skip
    return rows


# faults


class Mischief:
    """A fault every few seconds, until told to stop."""

    def __init__(self, fleet: Fleet, wanted: Wanted) -> None:
        self._fleet, self._wanted = fleet, wanted
        self._random = Random(wanted.seed)
        self.done: Counter[str] = Counter()
        self._over = asyncio.Event()

    async def run(self) -> None:
        """One after the other; each is over before the next begins."""
        kinds = [self.kill, self.stop, self.nap, self.coma, self.drain, self.wish]
        while not self._over.is_set():
            one = self._random.choice(kinds)
            await one()
            self.done[one.__name__] += 1
            await self._fleet.wait_until(self._fleet.served, timeout_s=SETTLE_S)
            with contextlib.suppress(TimeoutError):
                pause_s = self._wanted.every_s * (0.5 + self._random.random())
                await asyncio.wait_for(self._over.wait(), pause_s)

    @property
    def deaths(self) -> int:
        """How many incarnations ended without letting go of their locks; who wakes up late does."""
        return self.done["kill"]

    def end(self) -> None:
        """After the present one."""
        self._over.set()

    async def kill(self) -> None:
        """SIGKILL, then a new process."""
        victim = self._random.choice(COMERS)
        self._fleet.crash(victim)
        self._fleet.start(victim)
        await self._fleet.joined(victim)

    async def stop(self) -> None:
        """SIGTERM, then a new process."""
        victim = self._random.choice(COMERS)
        await self._fleet.stop(victim)
        self._fleet.start(victim)
        await self._fleet.joined(victim)

    async def nap(self) -> None:
        """SIGSTOP for less than a lease."""
        await self._frozen(0.5 * self._random.random())

    async def coma(self) -> None:
        """SIGSTOP for longer than a lease: its incarnation ends."""
        await self._frozen(self._fleet.settings.ttl_s + 1.0)

    async def drain(self) -> None:
        """An operator empties a node and changes their mind."""
        node = self._random.choice([*STAYERS, *COMERS])
        await self._fleet.drain(node)
        await asyncio.sleep(self._random.random())
        await self._fleet.undrain(node)

    async def wish(self) -> None:
        """An operator moves some shards."""
        for _ in range(8):
            shard = ShardKey("default", self._random.randrange(SHARDS))
            await self._fleet.wish(shard, self._random.choice([*STAYERS, *COMERS]))
            await asyncio.sleep(0.05)
            await self._fleet.wish(shard, None)

    async def _frozen(self, seconds: float) -> None:
        victim = self._random.choice([*STAYERS, *COMERS])
        before = self._fleet.incarnation(victim)
        self._fleet.freeze(victim)
        await asyncio.sleep(seconds)
        self._fleet.thaw(victim)
        if seconds > self._fleet.settings.ttl_s:
            await self._fleet.wait_until(
                lambda: self._fleet.incarnation(victim) not in (None, before), timeout_s=SETTLE_S
            )


# the run


class Soak:
    """One cluster, its load, its faults and what is seen of them."""

    def __init__(self, fleet: Fleet, load: Part, mischief: Mischief) -> None:
        self._fleet, self._load, self._mischief = fleet, load, mischief
        self.series = Series()
        self.outcomes: dict[str, int] = {}
        self._began = time.monotonic()

    async def look(self) -> None:
        """Again and again, until cancelled; now and then say how it goes."""
        told_at = 0.0
        while True:
            await self.sample()
            if self.seconds >= told_at + TOLD_S:
                told_at = self.seconds
                print(self.line(), file=sys.stderr, flush=True)
            await asyncio.sleep(SAMPLE_S)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    def line(self) -> str:
        """How it goes, in a line."""
        [*_, (_, store_kb)] = self.series.found["store"]["store_kb"]
        done = ", ".join(f"{kind} {count}" for kind, count in sorted(self._mischief.done.items()))
        outcomes = ", ".join(f"{kind} {count:,}" for kind, count in sorted(self.outcomes.items()))
        done = done or "no faults yet"
        return f"[{self.seconds:6.0f} s] {done}; {outcomes}; store {store_kb:,.0f} KiB"

    async def sample(self) -> None:
        """Once."""
        now = self.seconds
        for node in self._fleet.nodes:
            if node.process is None or not node.up or node.frozen:
                continue
            figures = outside(node.process.pid) | await self._inside(node.index)
            self.series.note(f"{node.name}.{node.runs}", now, figures)
        told = await asyncio.to_thread(self._load.run, system="soak")
        self.outcomes = told["outcomes"]
        self.series.note("load", now, outside(self._load.pid) | told["figures"])
        self.series.note("store", now, self._store())

    async def _inside(self, node: int) -> dict[str, float]:
        """A probe that lives there; nothing while nobody can tell."""
        try:
            id = next(id for n in range(4_096) if self._fleet.owner(Probe, id := f"{n}") == node)
            probe = self._fleet.ref(Probe, id).options(timeout_s=1.0)
            found = await probe.ask(Probe.figures)
        except (DomicileError, HarnessError, StopIteration):
            return {}
        return {name: float(value) for name, value in found.items()}

    def _store(self) -> dict[str, float]:
        database = self._fleet.directory / "store.db"
        files = [database, *database.parent.glob("store.db-*")]
        size = sum(file.stat().st_size for file in files if file.exists())
        locks = sum(1 for _ in (database.parent / "store.db.d").iterdir())
        return {
            "store_kb": size / 1_024, "rows": count_rows(database),
            "locks": float(locks - self._mischief.deaths),
        }  # fmt: skip


def count_rows(database: Path) -> float:
    """Of all tables, by the library that the store uses: another would break its locks."""
    connection = apsw.Connection(str(database), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        connection.set_busy_timeout(1_000)
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        counts = [
            connection.execute(f'SELECT count(*) FROM "{name}"').fetchone() for (name,) in tables
        ]
        return float(sum(count for (count,) in filter(None, counts)))
    finally:
        connection.close()


async def fill_log(database: Path) -> None:
    """As many commits as a store keeps: from here on its log should not grow."""
    store = Namespace(SqliteStore(database, by="soak"), "domicile")
    for number in range(KEPT_COMMITS + 100):
        await store.commit((), (Put(b"soak", f"{number:0200}".encode()),))
    await store.close()


async def measure(wanted: Wanted, directory: Path) -> dict[str, Any]:
    """Start everything, let it run, judge."""
    await fill_log(directory / "store.db")
    settings = Settings(
        shards=SHARDS, ttl_s=3.0, balance_limit=0.5, poison_window_s=AT_ONCE_S
    )  # fmt: skip
    nodes = len(STAYERS) + len(COMERS)
    async with Fleet(
        [Guest, Probe], nodes=nodes, settings=settings, directory=directory
    ) as fleet:  # fmt: skip
        options: dict[str, Any] = {
            "where": fleet.store, "loop": "asyncio", "settings": asdict(settings),
            "rate": wanted.rate, "most": 500, "guests": 300, "seed": wanted.seed,
        }  # fmt: skip
        load = Part(sys.executable, "benchmarks.soak_load", "load", options, fleet.directory)
        try:
            await asyncio.to_thread(load.ready)
            mischief = Mischief(fleet, wanted)
            soak = Soak(fleet, load, mischief)
            looking = asyncio.create_task(soak.look())
            breaking = asyncio.create_task(mischief.run())
            try:
                await asyncio.wait(
                    [looking, breaking], timeout=60 * wanted.minutes,
                    return_when=asyncio.FIRST_COMPLETED,
                )  # fmt: skip
            except asyncio.CancelledError:
                print("ends early", file=sys.stderr)
            try:
                mischief.end()
                await breaking
            finally:
                looking.cancel()
                breaking.cancel()
                await asyncio.wait([looking, breaking])
            if not looking.cancelled():
                looking.result()
            looks = soak.series.found.get("store", {}).get("store_kb", [])
            until = max((at for at, _ in looks), default=0.0)
        finally:
            await asyncio.to_thread(load.close)
    return {
        "wanted": asdict(wanted), "seconds": until, "faults": dict(mischief.done),
        "outcomes": soak.outcomes, "rows": judged(soak.series, wanted, until),
        "series": soak.series.found,
    }  # fmt: skip


def unjudged(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Those that were there all the time and were not seen for long enough to say anything."""
    seen = {row["process"] for row in rows}
    return [one for one in (*(f"node-{node}.1" for node in STAYERS), "load", "store")
            if one not in seen]  # fmt: skip


def met(report: dict[str, Any]) -> bool:
    """Whether everything was judged and nothing grew."""
    rows = report["found"]["rows"]
    return not unjudged(rows) and not any(row["grew"] for row in rows)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Each figure, those that grew first."""
    cells = [
        [
            f"{row['process']} {row['figure']}", f"{row['first']:,.0f}", f"{row['last']:,.0f}",
            f"{row['level']:,.0f}", f"{row['per_hour']:+,.0f}", f"{row['surely']:+,.0f}",
            f"{row['allowed']:,.0f}", "GREW" if row["grew"] else "flat",
        ]
        for row in sorted(rows, key=lambda row: (not row["grew"], row["process"]))
    ]  # fmt: skip
    head = ["figure", "first", "last", "median", "per hour", "surely grew", "allowed", ""]
    return grid(head, cells)


def page(report: dict[str, Any]) -> str:
    """The table and what happened."""
    found = report["found"]
    faults = ", ".join(f"{count}× {name}" for name, count in sorted(found["faults"].items()))
    told = ", ".join(f"{count:,} {name}" for name, count in sorted(found["outcomes"].items()))
    grew = [f"{row['process']} {row['figure']}" for row in found["rows"] if row["grew"]]
    wrong = [f"grew: {', '.join(grew)}"] if grew else []
    if missing := unjudged(found["rows"]):
        wrong.append(f"not seen for long enough to be judged: {', '.join(missing)}")
    lines = [
        table(found["rows"]),
        f"{found['seconds'] / 60:.1f} minutes, seed {found['wanted']['seed']}, warm-up "
        f"{found['wanted']['warm_s']:.0f} s. Faults: {faults}. Messages: {told}.",
        f"{'; '.join(wrong) or 'met: nothing grew'}. {report['system']}, "
        f"{report['cpus']} CPUs, Python {report['python']}.",
    ]
    if report["quick"]:
        lines.append("This was a smoke test: none of its figures means anything.")
    return "\n\n".join(lines) + "\n"


def draw(report: dict[str, Any]) -> str:
    """Memory, descriptors and tasks of those that stayed, and the store."""
    series = report["found"]["series"]
    stayers = [f"node-{node}.1" for node in STAYERS]
    pictures: list[plot.Curves] = []
    for title, unit, name, scale, whose in (
        ("Memory", "MB", "rss_kb", 1 / 1_024, [*stayers, "load"]),
        ("File descriptors", "", "fds", 1.0, [*stayers, "load"]),
        ("Tasks", "", "tasks", 1.0, [*stayers, "load"]),
        ("Blocks of memory", "k", "blocks", 1e-3, [*stayers, "load"]),
        ("Store", "kB", "store_kb", 1.0, ["store"]),
    ):
        lines = [
            [(at, value * scale) for at, value in series[one][name]]
            for one in whose
            if one in series and len(series[one].get(name, ())) > 1
        ]
        if lines:
            pictures.append(plot.Curves(title, ", ".join(whose), unit, lines))
    return plot.curves(pictures, alt(report))


def alt(report: dict[str, Any]) -> str:
    """In words."""
    grew = sum(row["grew"] for row in report["found"]["rows"])
    minutes = report["found"]["seconds"] / 60
    return f"Figures of processes over {minutes:.0f} minutes of faults: {grew or 'none'} grew"


def write_docs(report: dict[str, Any]) -> None:
    """The page's part and its picture."""
    PICTURE.write_text(draw(report), encoding="utf-8")
    body = f"![{alt(report)}](../pictures/{PICTURE.name})\n\n{page(report)}"
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), "soak", body), encoding="utf-8")


def main(given: Sequence[str] | None = None) -> int:
    """Run and judge; 1 if something grew."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--hours", type=command.positive, default=2.0)
    parser.add_argument("--minutes", type=command.positive, help="instead of hours")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--every-s", type=command.positive, default=3.0, help="between faults, about"
    )
    parser.add_argument("--rate", type=command.positive, default=200.0, help="messages per second")
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
        minutes = 0.2 if options.quick else options.minutes or 60 * options.hours
        wanted = Wanted(
            minutes, options.seed, options.every_s, options.rate, min(600.0, 60 * minutes / 3)
        )
        place = Path(tempfile.mkdtemp(prefix="domicile-soak-"))
        try:
            found = asyncio.run(measure(wanted, place))
        except KeyboardInterrupt:
            # It had not begun.
            shutil.rmtree(place, ignore_errors=True)
            raise
        # A soak that failed leaves the logs and the store of its processes there.
        shutil.rmtree(place)
        report = {
            "system": f"{platform.system()} {platform.machine()}", "cpus": os.cpu_count(),
            "python": platform.python_version(), "quick": options.quick, "found": found,
        }  # fmt: skip
    print(page(report), end="")
    if options.json is not None:
        options.json.write_text(json.dumps(report) + "\n", encoding="utf-8")
    if options.write_docs:
        write_docs(report)
    return 0 if met(report) or report["quick"] else 1


if __name__ == "__main__":
    command.run(main)
