"""Durable entities measured: keyed asks on SQLite and PostgreSQL journals, recovery, sizes, peers.

    python -m proving.benchmarks.durable                  all cells, three rounds of 5 s each
    python -m proving.benchmarks.durable --only lone      cells with that word in their names
    python -m proving.benchmarks.durable --quick          a smoke test; its figures mean nothing
    python -m proving.benchmarks.durable --list           the names of the cells

Every cell has processes of its own on loopback, not pinned to cores. What a write to the disk takes
is measured before and after each cell, in the same directory: p50 of fdatasync after 4 KiB were
appended. Each round is kept in a JSON file at once, and the same command goes on where it ended.
`--again` measures chosen cells anew. The table goes to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import asyncpg

from proving.benchmarks.command import count, positive, run
from proving.benchmarks.durable_peers import restate
from proving.benchmarks.durable_report import CELLS, chosen, missing, table
from proving.benchmarks.environments import Missing
from proving.benchmarks.kept import CACHE, Kept, Measured, tell
from proving.benchmarks.processes import Part, PartFailed, cpu_s
from proving.postgres_server import NoPostgres, PostgresServer, family

PARTS = "proving.benchmarks.durable_parts"
PEERS = "proving.benchmarks.durable_peers"
PROBE_BYTES = 4_096
SIZED_AT_ONCE = 10_000
SIZE_OF = """SELECT sum(pg_total_relation_size(c.oid))::bigint
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind = 'r' AND n.nspname LIKE '%\\_journal'"""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything."""

    rounds: int = 3
    seconds: float = 5.0
    warm_s: float = 1.0
    entities: int = 1_000
    depth: int = 1_000
    callers: int = 100
    """Of the hot entity."""
    long: int = 1_000
    """Entities with many events, for the replay."""
    short: int = 10_000
    """Entities with one event, for cold starts."""
    known: int = 2_000
    """Other entities that are asked before a recovery is timed: their shards are claimed then."""
    sized: int = 100_000
    """Events by which the size is taken."""
    probes: int = 100


QUICK = Scale(
    rounds=1, seconds=0.2, warm_s=0.0, entities=20, depth=20, callers=5, long=4, short=20,
    known=20, sized=100, probes=5,
)  # fmt: skip


def fdatasync_s(directory: Path, times: int) -> float:
    """What it takes to append 4 KiB and have them on the disk: the median of so many."""
    took: list[float] = []
    with tempfile.NamedTemporaryFile(dir=directory, prefix="probe-") as file:
        for _ in range(times):
            began = time.perf_counter()
            os.write(file.fileno(), bytes(PROBE_BYTES))
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began)
    return median(took)


class Place:
    """What one cell is measured with: a directory, a journal, and the processes that it started."""

    def __init__(self, scale: Scale, journal: str, stack: ExitStack, parent: Path | None) -> None:
        made = tempfile.TemporaryDirectory(prefix="domicile-durable-", dir=parent)
        self.scale, self.journal, self._stack = scale, journal, stack
        self.directory = Path(stack.enter_context(made))
        self.server: PostgresServer | None = None
        self.url: str | None = None
        self._watched: dict[str, list[Callable[[], list[int]]]] = {}
        if journal == "postgresql":
            server = self.server = PostgresServer()
            stack.callback(server.stop)
            server.start()
            self.url = server.new_database()
            self.watch("server", server.pids)
        self.disk = self.directory if self.server is None else self.server.home

    def watch(self, name: str, pids: Callable[[], list[int]]) -> None:
        """Count the CPU time of these processes under that name."""
        self._watched.setdefault(name, []).append(pids)

    def part(self, module: str, name: str, shown: str, where: str = "sqlite:///bench.db") -> Part:
        """Start a process and wait until it is ready."""
        options: dict[str, Any] = {
            "loop": "uvloop" if importlib.util.find_spec("uvloop") else "asyncio",
            "entities": self.scale.entities, "where": where,
        }  # fmt: skip
        if self.url is not None:
            options["journal"] = self.url
        made = Part(sys.executable, module, name, options, self.directory)
        self._stack.callback(made.close)
        made.ready()
        self._watched[shown] = [lambda: family(made.pid)]
        return made

    def home(self) -> Part:
        """The home of all entities."""
        return self.part(PARTS, "server", "home")

    def client(self) -> Part:
        """A client of that home."""
        return self.part(PARTS, "client", "client")

    def run(self, part: Part, **wanted: Any) -> Measured:
        """Have something measured, with what it took of each process."""
        scale = self.scale
        before = self._cpu_s()
        told = part.run(warm_s=scale.warm_s, seconds=scale.seconds, **wanted)
        after = self._cpu_s()
        used = {name: after[name] - before[name] for name in before}
        told["cpu_us"] = {name: 1e6 * took / told["all"] for name, took in used.items()}
        return told

    def _cpu_s(self) -> dict[str, float]:
        return {
            name: sum(cpu_s(pid) for pids in known for pid in pids())
            for name, known in self._watched.items()
        }


def _rate(told: Measured) -> Measured:
    return {**told, "value": told["count"] / told["took_s"]}


def _p50(told: Measured) -> Measured:
    return {**told, "value": 1_000 * told["p50_s"]}


def _without_times(told: Measured) -> Measured:
    return {name: told[name] for name in told if name not in ("p50_s", "p99_s", "max_s")}


def wire(place: Place) -> Measured:
    """Keyed asks of many entities, by another process."""
    place.home()
    scale = place.scale
    wanted = {"what": "asks", "depth": scale.depth, "entities": scale.entities}
    return _rate(place.run(place.client(), system="durable", **wanted))


def home(place: Place) -> Measured:
    """Keyed asks of many entities, by their home itself: what it spends on each."""
    scale = place.scale
    wanted = {"what": "asks", "depth": scale.depth, "entities": scale.entities}
    told = place.run(place.home(), system="durable", **wanted)
    return {**told, "value": told["cpu_us"]["home"]}


def hot(place: Place) -> Measured:
    """Many callers of one entity."""
    place.home()
    wanted = {"what": "asks", "depth": place.scale.callers, "entities": 1}
    return _rate(place.run(place.client(), system="durable", **wanted))


def lone(place: Place) -> Measured:
    """One ask at a time."""
    place.home()
    wanted = {"what": "asks", "depth": 1, "entities": place.scale.entities}
    return _p50(place.run(place.client(), system="durable", **wanted))


def _recovered(place: Place, what: str, depth: int) -> Measured:
    """Fill a journal, end the home, and ask the entities in a new one."""
    scale = place.scale
    amounts = {
        "long": scale.long if what == "replay" else 0, "short": scale.short if what == "cold" else 0
    }  # fmt: skip
    first = place.home()
    first.run(system="durable", what="fill", depth=scale.depth, **amounts)
    first.close()
    second = place.home()
    second.run(system="durable", what="know", count=scale.known, depth=scale.depth)
    told = place.run(second, system="durable", what=what, depth=depth, **amounts)
    return _without_times(_rate(told))


def replay(place: Place) -> Measured:
    """Entities with 200 events each, from the journal to the answer."""
    return _recovered(place, "replay", place.scale.callers)


def cold(place: Place) -> Measured:
    """Entities with one event each, from the journal to the answer."""
    return _recovered(place, "cold", place.scale.depth)


def size(place: Place) -> Measured:
    """What the journal takes on the disk, by the number of events."""
    first, told, left = place.home(), dict[str, Any](), place.scale.sized
    while left > 0:
        # In pieces: a process must answer now and then.
        piece = min(left, SIZED_AT_ONCE)
        wanted = {"what": "many", "count": piece, "depth": place.scale.depth}
        told = place.run(first, system="durable", **wanted)
        left -= piece
    first.close()
    if place.url is None:
        files = place.directory.glob("bench.db.journal*")
        taken = sum(file.stat().st_size for file in files if not file.name.endswith("-shm"))
    else:
        taken = asyncio.run(_relations_bytes(place.url))
    return {**_without_times(told), "value": taken / place.scale.sized}


async def _relations_bytes(url: str) -> int:
    connection = await asyncpg.connect(url)
    try:
        return int(await connection.fetchval(SIZE_OF))
    finally:
        await connection.close()


def _inserts(place: Place, depth: int) -> Measured:
    assert place.url is not None
    part = place.part(PEERS, "inserts", "client", place.url)
    return place.run(part, system="inserts", what="ask", depth=depth)


def asyncpg_wire(place: Place) -> Measured:
    """A plain program, with many requests at a time."""
    return _rate(_inserts(place, place.scale.depth))


def asyncpg_lone(place: Place) -> Measured:
    """A plain program, with one request at a time."""
    return _p50(_inserts(place, 1))


@contextmanager
def _restate_client(place: Place, cache: Path) -> Generator[Part]:
    with restate(cache, place.directory) as found:
        place.watch("server", lambda: [found.server])
        place.watch("home", lambda: [found.service])
        yield place.part(PEERS, "invocations", "client", str(found.port))


def _invoked(place: Place, cache: Path, depth: int) -> Measured:
    with _restate_client(place, cache) as part:
        return place.run(part, system="invocations", what="ask", depth=depth)


MEASURES: dict[str, Callable[[Place], Measured]] = {
    "wire": wire, "home": home, "hot": hot, "lone": lone, "replay": replay, "cold": cold,
    "size": size,
}  # fmt: skip


def measure(key: str, scale: Scale, cache: Path, parent: Path | None) -> Measured:
    """One round of one cell, with the probe of the disk."""
    name, _, journal = key.partition("-")
    with ExitStack() as stack:
        if name == "restate":
            place = Place(scale, "", stack, parent)
            depth = scale.depth if journal == "wire" else 1
            before = fdatasync_s(place.disk, scale.probes)
            told = _invoked(place, cache, depth)
            told = _rate(told) if journal == "wire" else _p50(told)
        else:
            peers = {"asyncpg-wire": asyncpg_wire, "asyncpg-lone": asyncpg_lone}
            place = Place(scale, "postgresql" if key in peers else journal, stack, parent)
            before = fdatasync_s(place.disk, scale.probes)
            told = peers[key](place) if key in peers else MEASURES[name](place)
        after = fdatasync_s(place.disk, scale.probes)
        told |= {"fsync_s": median([before, after]), "fsync_before_s": before}
        return {**told, "fsync_after_s": after, "load": os.getloadavg()[0], "at": time.time()}


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m proving.benchmarks.durable", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--only", action="append", default=[], metavar="WORD", help="cells with it in their names")
    add("--quick", action="store_true", help="a smoke test")
    add("--rounds", type=count, metavar="N")
    add("--seconds", type=positive, metavar="S", help="per cell and round, where time counts")
    add("--again", action="store_true", help="measure the chosen cells anew")
    add("--list", action="store_true", help="the names of the cells")
    add("--cache", type=Path, default=CACHE, help="where results and peers are kept")
    add("--directory", type=Path, help="on which disk SQLite and Restate write; default: that of "
        "temporary files, where PostgreSQL writes, too")  # fmt: skip
    options = parser.parse_args(given)
    if not chosen(options.only):
        parser.error(f"no cell has {options.only} in its name: they are {', '.join(CELLS)}")
    return options


def main(given: Sequence[str] | None = None) -> int:
    """The command; 1 if something of Domicile's own could not be measured."""
    options = arguments(given)
    keys = chosen(options.only)
    if options.list:
        print("\n".join(keys))
        return 0
    scale = QUICK if options.quick else Scale()
    scale = replace(
        scale, rounds=options.rounds or scale.rounds, seconds=options.seconds or scale.seconds
    )
    name = "durable-quick.json" if options.quick else "durable.json"
    kept, absent = Kept(options.cache / name, asdict(scale)), dict[str, str]()
    if options.again:
        for key in keys:
            kept.forget(key)
    for turn in range(scale.rounds):
        for key in keys:
            if key in absent or len(kept.cells.get(key, [])) > turn:
                continue
            try:
                kept.add(key, measure(key, scale, options.cache, options.directory))
            except (Missing, NoPostgres, PartFailed) as error:
                absent[key] = str(error)
            tell(f"round {turn + 1} of {scale.rounds}: {key} {absent.get(key, '')}".rstrip())
    print(table({key: kept.cells.get(key, []) for key in keys}))
    if absent:
        print(f"\n{missing(absent)}")
    print(
        f"\nMedians of up to {scale.rounds} rounds. {platform.system()} {platform.machine()}, "
        f"{os.cpu_count()} CPUs, Python {platform.python_version()}, load "
        f"{os.getloadavg()[0]:.1f} at the end. Floors and goals hold where fdatasync takes at most "
        "0.2 ms."
    )
    if options.quick:
        print("These are figures of a smoke test: they mean nothing.")
    return 1 if any(not CELLS[key].peer for key in absent) else 0


if __name__ == "__main__":
    run(main)
