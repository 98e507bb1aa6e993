"""Benchmarks: asks and tells between two processes, beside grpc.aio, and within one process.

    python benchmarks/run.py               all of it, in about five minutes
    python benchmarks/run.py --quick       a smoke test; its figures mean nothing
    python benchmarks/run.py --json FILE   the figures and every single round, for comparison

Domicile's two processes share an embedded store in a temporary directory: one is home to all
entities, the other a client. gRPC's two are a grpc.aio server and one channel. All are on loopback,
without TLS, not pinned to cores, and alive together, on asyncio and on uvloop, but only one pair is
measured at a time: round after round, each round measuring everything once. A figure is the median
of the rounds. CPU time is that of both processes, and of all their threads. Tables go to stdout,
progress to stderr.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import parts
import single

DEPTHS = (1, 100, 1_000)
LATENCIES_AT = (1, 100)
ANSWER_S = 120.0
LEAVE_S = 30.0
HERE = Path(__file__).parent

SYSTEMS = {"domicile": "Domicile", "unary": "grpc.aio unary", "stream": "grpc.aio stream"}

NOTES = """\
Domicile's messages take its whole path: typed encoding, routing by shard, a link that numbers,
acknowledges and survives reconnects, the owner's checks of epoch and lease, a mailbox per entity;
at most once and in order. gRPC hands bytes to one function: no entities, no order among unary
calls, no homes. Its stream carries one message per payload, and replies find their callers by
position. A tell's round of N ends once the receiver confirms that all N ran, by one more message;
a unary call stands for a tell by an empty reply."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything."""

    rounds: int = 5
    seconds: float = 0.4
    entities: int = 1_000
    activations: int = 10_000
    idle: int = 100_000
    seeds: int = 5


QUICK = Scale(rounds=1, seconds=0.01, entities=20, activations=100, idle=300, seeds=1)


@dataclass(slots=True)
class Figure:
    """One kind of message, at one depth, through one system, on one loop."""

    loop: str
    where: str
    what: str
    depth: int
    system: str
    rounds: list[dict[str, float]] = field(default_factory=list[dict[str, float]])

    def median(self, name: str) -> float | None:
        """Of the rounds; None if that was not measured."""
        known = [one[name] for one in self.rounds if name in one]
        return median(known) if known else None

    def report(self) -> dict[str, Any]:
        """For comparison by machines."""
        timed = self.what == "ask" and self.depth in LATENCIES_AT
        return {
            "loop": self.loop,
            "where": self.where,
            "what": self.what,
            "in_flight": self.depth,
            "system": self.system,
            "per_s": self.median("rate"),
            "cpu_s": self.median("cpu_s"),
            "p50_s": self.median("p50_s") if timed else None,
            "p99_s": self.median("p99_s") if timed else None,
            "rounds": self.rounds,
        }


class Part:
    """A process of the benchmark, from here."""

    def __init__(self, name: str, loop: str, where: str, entities: int, directory: Path) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [
                sys.executable, str(HERE / "parts.py"), name, "--loop", loop, "--where", where,
                "--entities", str(entities),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=directory, text=True, bufsize=1,
            start_new_session=True,
        )  # fmt: skip

    def ready(self) -> str:
        """Where it is, once it can be used."""
        return str(self._answer()["ready"])

    def measure(self, system: str, what: str, depth: int, seconds: float) -> dict[str, float]:
        """One round of one figure."""
        return self._ask({"system": system, "what": what, "depth": depth, "seconds": seconds})

    def cpu_s(self) -> float:
        """What it has used of a processor so far, all threads together."""
        return self._ask({"what": "cpu"})["cpu_s"]

    def close(self) -> None:
        """Have it leave; kill it if it does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(LEAVE_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        finally:
            self._process.stdout.close()

    def _ask(self, wanted: dict[str, Any]) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            raise RuntimeError(f"{self.name} has not answered for {ANSWER_S:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended early; its messages are above")
        return json.loads(line)


class Pair(NamedTuple):
    """Who calls, and who is called if that is another process."""

    caller: Part
    called: Part | None

    def measure(self, figure: Figure, seconds: float) -> dict[str, float]:
        """One round: per second, latencies, and processor time of both ends per message."""
        before_s = self.called.cpu_s() if self.called else 0.0
        told = self.caller.measure(figure.system, figure.what, figure.depth, seconds)
        after_s = self.called.cpu_s() if self.called else 0.0
        cpu_s = told.pop("cpu_s") + after_s - before_s
        count, took_s = told.pop("count"), told.pop("took_s")
        return {"rate": count / took_s, "cpu_s": cpu_s / count, **told}


@contextmanager
def processes(loop: str, entities: int) -> Generator[dict[tuple[str, str], Pair]]:
    """The processes of one loop: who measures which system from where."""
    with tempfile.TemporaryDirectory(prefix="domicile-bench-") as name, ExitStack() as stack:
        directory = Path(name)

        def part(kind: str, where: str) -> Part:
            made = Part(kind, loop, where, entities, directory)
            stack.callback(made.close)
            return made

        store = "sqlite:///bench.db"
        home = part("home", store)
        server = part("grpc_server", "") if has_grpc() else None
        home.ready()
        client = part("client", store)
        pairs = {
            ("remote", "domicile"): Pair(client, home),
            ("local", "domicile"): Pair(home, None),
        }
        if server is not None:
            grpc = part("grpc_client", server.ready())
            grpc.ready()
            for system in ("unary", "stream"):
                pairs["remote", system] = Pair(grpc, server)
        client.ready()
        yield pairs


def messages(scale: Scale, tell: Callable[[str], None]) -> list[Figure]:
    """Asks and tells, on every loop there is."""
    with ExitStack() as stack:
        figures: list[Figure] = []
        pairs: dict[str, dict[tuple[str, str], Pair]] = {}
        for loop in parts.loops():
            tell(f"starting the processes on {loop}")
            pairs[loop] = stack.enter_context(processes(loop, scale.entities))
            figures += [
                Figure(loop, where, what, depth, system)
                for where, systems in (("remote", list(SYSTEMS)), ("local", ["domicile"]))
                for what in ("ask", "tell")
                for depth in DEPTHS
                for system in systems
                if (where, system) in pairs[loop]
            ]
        for turn in range(scale.rounds):
            for figure in figures:
                pair = pairs[figure.loop][figure.where, figure.system]
                figure.rounds.append(pair.measure(figure, scale.seconds))
            tell(f"round {turn + 1} of {scale.rounds}: asks and tells on {', '.join(pairs)}")
    return figures


def has_grpc() -> bool:
    """Whether there is something to compare with."""
    return importlib.util.find_spec("grpc") is not None


# showing


def number(value: float | None) -> str:
    """With as many digits as it deserves."""
    if value is None:
        return ""
    return f"{value:,.2f}" if value < 100 else f"{round(value, -1):,.0f}"


def ratio(figure: Figure | None, other: Figure | None) -> str:
    """How many times as many per second."""
    mine, theirs = (None if one is None else one.median("rate") for one in (figure, other))
    return f"{mine / theirs:.2g}×" if mine and theirs else ""


def rates(figures: Sequence[Figure], loop: str) -> str:
    """Messages per second: a row per kind and depth, the systems side by side."""
    names = [SYSTEMS[system] for system in _peers(figures)]
    head = [f"{loop}: per second", "in flight", *names, *(f"to {name}" for name in names[1:])]
    rows: list[list[str]] = []
    for what, depth, cells in _side_by_side(figures):
        numbers = [number(cell and cell.median("rate")) for cell in cells]
        rows.append([what, depth, *numbers, *(ratio(cells[0], cell) for cell in cells[1:])])
    return grid(head, rows)


def costs(figures: Sequence[Figure], loop: str) -> str:
    """Processor time per message, of caller and called together."""
    names = [SYSTEMS[system] for system in _peers(figures)]
    rows: list[list[str]] = []
    for what, depth, cells in _side_by_side(figures):
        found = [cell and cell.median("cpu_s") for cell in cells]
        rows.append(
            [what, depth, *("" if cpu_s is None else f"{cpu_s * 1e6:.0f}" for cpu_s in found)]
        )
    return grid([f"{loop}: CPU µs per message", "in flight", *names], rows)


def _side_by_side(figures: Sequence[Figure]) -> Iterator[tuple[str, str, list[Figure | None]]]:
    known = {(one.where, one.what, one.depth, one.system): one for one in figures}
    peers = _peers(figures)
    for where, what, depth in dict.fromkeys(key[:3] for key in known):
        cells = [known.get((where, what, depth, system)) for system in peers]
        yield f"{where} {what}", f"{depth:,}", cells


def latencies(figures: Sequence[Figure], loop: str) -> str:
    """How long an ask takes, where the number in flight does not drown it."""
    timed = {
        (one.where, one.depth, one.system): one.report()
        for one in figures
        if one.what == "ask" and one.depth in LATENCIES_AT
    }
    peers = _peers(figures)
    head = [f"{loop}: p50 / p99 ms", "in flight", *(SYSTEMS[system] for system in peers)]
    rows = [
        [
            f"{where} ask",
            f"{depth:,}",
            *(
                f"{told['p50_s'] * 1e3:.2f} / {told['p99_s'] * 1e3:.2f}" if told else ""
                for told in (timed.get((where, depth, system)) for system in peers)
            ),
        ]
        for where, depth in dict.fromkeys(key[:2] for key in timed)
    ]
    return grid(head, rows)


def _peers(figures: Sequence[Figure]) -> list[str]:
    return [system for system in SYSTEMS if any(one.system == system for one in figures)]


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; numbers to the right."""
    ruler = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ruler, *rows))


def single_table(figures: Sequence[single.Figure]) -> str:
    """What one process shows by itself."""
    rows = [[one.name, f"{number(one.median)} {one.unit}"] for one in figures]
    return grid(["one process", "median"], rows)


def surroundings() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "domicile": version("domicile"),
        "python": platform.python_version(),
        "uvloop": version("uvloop") if "uvloop" in parts.loops() else None,
        "grpcio": version("grpcio") if has_grpc() else None,
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
    }


def facts(around: dict[str, Any], scale: Scale, took_s: float) -> Iterator[str]:
    """How to read the tables."""
    yield (
        f"Domicile {around['domicile']}, CPython {around['python']}, "
        f"uvloop {around['uvloop'] or 'absent'}, grpcio {around['grpcio'] or 'absent'}, "
        f"{around['system']}, {around['cpus']} CPUs."
    )
    yield (
        f"Two processes on loopback, {parts.PAYLOAD_BYTES}-byte payloads, {scale.entities:,} "
        f"entities; medians of {scale.rounds} rounds of {scale.seconds:g} s; {took_s:.0f} s in all."
    )
    yield NOTES
    if not around["grpcio"]:
        yield "There is nothing to compare with: pip install grpcio."


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test, in seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round there")
    options = parser.parse_args(arguments)
    scale = QUICK if options.quick else Scale()
    began = time.monotonic()

    def tell(line: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {line}", file=sys.stderr, flush=True)

    figures = messages(scale, tell)
    alone = single.figures(scale.rounds, scale.activations, scale.idle, scale.seeds, tell)
    around, took_s = surroundings(), time.monotonic() - began
    for loop in parts.loops():
        ours = [figure for figure in figures if figure.loop == loop]
        print(rates(ours, loop), costs(ours, loop), latencies(ours, loop), sep="\n\n", end="\n\n")
    print(single_table(alone), end="\n\n")
    print("\n".join(facts(around, scale, took_s)))
    if options.json is not None:
        report = {
            **around,
            "quick": options.quick,
            "payload_bytes": parts.PAYLOAD_BYTES,
            "entities": scale.entities,
            "rounds": scale.rounds,
            "round_s": scale.seconds,
            "messages": [figure.report() for figure in figures],
            "single": [
                {"name": one.name, "unit": one.unit, "median": one.median, "rounds": one.rounds}
                for one in alone
            ],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
