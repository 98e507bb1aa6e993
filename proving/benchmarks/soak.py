"""Hours of load with a fault every few seconds: nothing may grow.

    python -m proving.benchmarks.soak --hours 2
    python -m proving.benchmarks.soak --minutes 5 --seed 7 --every-s 3
    python -m proving.benchmarks.soak --quick                a smoke test; its figures mean nothing

Five real nodes, a load in a process of its own, and clients that come and go. Two nodes stay for
the whole time and are only frozen and thawed, now and then for longer than their lease, so that
they end an incarnation and begin another; the other three are killed, stopped and started again.
Operators drain nodes and move shards meanwhile. Every few seconds the memory, file descriptors,
tasks, threads and blocks of memory of every process are noted, and the size of the store, which is
filled beforehand with what an old cluster left: as many commits as it keeps, as wide as those of a
soak. Of the lock files in the store's directory those of dead incarnations do not count: they are
kept for a day as proofs.

After a warm-up each figure of each process that lived long enough is judged by the median of the
slopes between its samples (Theil and Sen), with a bound below it that noise alone would not reach
(95 %): a figure whose growth over the time observed is surely larger than its allowance is a
failure, exit code 1, and the table says whose it is. So is a soak in which messages were not
answered, a kind of fault never happened, or something was not seen for long enough to be judged. It
ends early by SIGINT and judges what it has, but has missed its hours then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import apsw

from domicile import DomicileError, Settings
from domicile.core.ids import NOBODY, Incarnation, ShardKey
from domicile.core.state.keys import block_key
from domicile.core.state.shardmap import Block, Entry, encode_block
from domicile.core.state.txn import Delete, Put, Write
from domicile.stores.namespace import Namespace
from domicile.stores.sqlite.store import KEPT_COMMITS, SqliteStore
from domicile.testing.processes.node_process import HarnessError
from proving.benchmarks import command
from proving.benchmarks.fleet import ROLE, Fleet
from proving.benchmarks.processes import ROOT, Part
from proving.benchmarks.report import fill
from proving.benchmarks.soak_load import Guest, Probe
from proving.benchmarks.soak_verdict import (
    COMERS,
    KINDS,
    STAYERS,
    Series,
    Wanted,
    alt,
    draw,
    judged,
    met,
    page,
)

PAGE = ROOT / "docs" / "explanation" / "performance.md"
PICTURE = ROOT / "docs" / "pictures" / "soak.svg"
SHARDS = 64
SAMPLE_S = 4.0
TOLD_S = 30.0
"""How often a sample is taken, and a line on stderr tells how it goes."""

AT_ONCE_S = 0.001
"""How close deaths must be to make a shard suspect: never so close, for they say nothing here."""

SETTLE_S = 90.0
AGED = 1_000
"""How often each shard of the old map changed, and its home. Up to 65,535 such numbers take the
same room, which is hundreds of hours of soaking."""

OLD = 2**15 + KEPT_COMMITS
"""How many commits came before: of those that are kept none has a revision of two bytes."""

TURN, BATCH = 10, 100
NODE_BYTES, CLIENT_BYTES = 194, 50
"""Of records, as seen in a soak; a map of so many shards takes about 800."""


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
        while not self._over.is_set():
            kind = self._random.choice(KINDS)
            await getattr(self, kind)()
            self.done[kind] += 1
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


def old_map(count: int) -> bytes:
    """All shards as a cluster leaves them that has seen so much, and was stopped."""
    nodes = len(STAYERS) + len(COMERS)
    owners = [Incarnation(f"{node + 1:032x}") for node in range(nodes)]
    entries = [
        Entry(owners[shard % nodes], count, "moving", NOBODY, count, f"node-{shard % nodes}")
        for shard in range(SHARDS)
    ]
    return encode_block(Block(f"{1:032x}-{OLD}-{AGED}", tuple(entries)))


def old_commit(number: int) -> Write:
    """One of an endless series, of the widths of a soak's commits and about as often: of ten, three
    are of clients that come and three of clients that go, one each of nodes, and two of the map."""
    turn, step = divmod(number, TURN)
    if step < 2:
        return Put(block_key(ROLE, 0), old_map(AGED))
    # Nobody reads these keys; they are as long as those of clients and nodes.
    key = f"soaked/{turn:030x}{step // 2:02x}".encode()
    if step % 2:
        return Delete(key)
    return Put(key, b"x" * (NODE_BYTES if step == 2 else CLIENT_BYTES))


async def fill_log(database: Path, commits: int = OLD) -> None:
    """What an old cluster left: from here on neither its log nor its numbers should get longer."""
    store = Namespace(SqliteStore(database, by="soak"), "domicile")
    for first in range(0, commits, BATCH):
        # Side by side, so that the disk is waited for once.
        await asyncio.gather(
            *(store.commit((), (old_commit(first + n),)) for n in range(BATCH))
        )  # fmt: skip
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
        load = Part(
            sys.executable, "proving.benchmarks.soak_load", "load", options, fleet.directory
        )
        try:
            await asyncio.to_thread(load.ready)
            mischief = Mischief(fleet, wanted)
            soak = Soak(fleet, load, mischief)
            looking = asyncio.create_task(soak.look())
            breaking = asyncio.create_task(mischief.run())
            early = False
            try:
                await asyncio.wait(
                    [looking, breaking], timeout=60 * wanted.minutes,
                    return_when=asyncio.FIRST_COMPLETED,
                )  # fmt: skip
            except asyncio.CancelledError:
                early = True
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
        "series": soak.series.found, "wide": True, "early": early,
    }  # fmt: skip


def write_docs(report: dict[str, Any]) -> None:
    """The page's part and its picture."""
    PICTURE.write_text(draw(report), encoding="utf-8")
    body = f"![{alt(report)}](../pictures/{PICTURE.name})\n\n{page(report)}"
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), "soak", body), encoding="utf-8")


def main(given: Sequence[str] | None = None) -> int:
    """Run and judge; 1 if it was not met."""
    parser = argparse.ArgumentParser(
        prog="python -m proving.benchmarks.soak", description=(__doc__ or "").splitlines()[0]
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
