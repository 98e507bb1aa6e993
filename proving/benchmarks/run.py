"""Benchmarks: asks and tells between two processes and within one, beside what others would take.

    python -m proving.benchmarks.run                     all of it, in about 25 minutes python -m
    proving.benchmarks.run --quick             a smoke test; its figures mean nothing python -m
    proving.benchmarks.run --only messages --peers none --rounds 3   while working on something
    python -m proving.benchmarks.run --write-docs        also into docs/explanation/performance.md
    python -m proving.benchmarks.run --from FILE         the tables of an earlier run

Every system has two processes of its own on loopback, not pinned to cores. Round after round each
system is started, measured and stopped, so that nothing else runs beside it; a figure is the median
of the rounds. Peers live in environments that are made on first use. Tables go to stdout, progress
to stderr, everything to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from proving.benchmarks import chart
from proving.benchmarks.bench import QUICK, STAGES, Bench, Scale, own, peers
from proving.benchmarks.environments import CACHE, PEERS
from proving.benchmarks.processes import ROOT
from proving.benchmarks.report import Report, fill, page

PAGE = ROOT / "docs" / "explanation" / "performance.md"
PICTURE = ROOT / "docs" / "pictures" / "bench.svg"


def write_docs(report: Report) -> None:
    """The page and its picture."""
    PICTURE.write_text(chart.draw(report), encoding="utf-8")
    body = f"![{chart.alt(report)}](../pictures/{PICTURE.name})\n\n{page(report)}"
    text = fill(PAGE.read_text(encoding="utf-8"), "bench", body)
    PAGE.write_text(text, encoding="utf-8")


def _names(known: Sequence[str], what: str) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        names = list(known) if text == "all" else [] if text == "none" else text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"{unknown[0]!r} is no {what}: they are {', '.join(known)}, all, none"
            )
        return names

    return read


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m proving.benchmarks.run", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="a smoke test, in seconds")
    parser.add_argument("--rounds", type=int, metavar="N")
    parser.add_argument("--seconds", type=float, metavar="S", help="per figure and round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: report.json in --cache")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where environments are kept")
    names = [peer.name for peer in PEERS]
    parser.add_argument("--peers", type=_names(names, "peer"), default=names, metavar="A,B")
    parser.add_argument(
        "--peer-loops", type=_names(["uvloop", "asyncio"], "loop"), default=["uvloop"],
        metavar="A,B", help="default: uvloop, as Domicile",
    )  # fmt: skip
    parser.add_argument("--only", type=_names(STAGES, "stage"), default=STAGES, metavar="A,B")
    parser.add_argument("--from", type=Path, dest="earlier", metavar="FILE")
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args(given)
    if options.quick and options.write_docs:
        parser.error("--write-docs wants figures that mean something, not those of --quick")
    return options


def measured(options: argparse.Namespace) -> Report:
    """A run."""
    scale = QUICK if options.quick else Scale()
    scale = replace(
        scale, rounds=options.rounds or scale.rounds, seconds=options.seconds or scale.seconds
    )
    began, load = time.monotonic(), os.getloadavg()[0]

    def tell(line: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {line}", file=sys.stderr, flush=True)

    bench = Bench(scale, tell)
    bench.systems = own(scale, bench.missing)
    wanted = [peer for peer in PEERS if peer.name in options.peers]
    if options.quick:
        wanted = [replace(peer, idle=min(peer.idle, scale.idle)) for peer in wanted]
    bench.systems += peers(wanted, options.peer_loops, options.cache, bench.missing, tell)
    for peer in PEERS:
        if peer.name not in options.peers:
            bench.missing.update(dict.fromkeys(peer.systems.values(), "left out by --peers"))
    for stage in STAGES:
        if stage in options.only:
            bench.attempt(stage)
    return bench.report(time.monotonic() - began, load, options.quick)


def main(given: Sequence[str] | None = None) -> int:
    """The command; 1 if something of Domicile's own could not be measured."""
    options = arguments(given)
    if options.earlier is not None:
        report: Report = json.loads(options.earlier.read_text(encoding="utf-8"))
    else:
        report = measured(options)
        name = "report-quick.json" if options.quick else "report.json"
        file: Path = options.json or options.cache / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(page(report), end="")
    if options.write_docs:
        write_docs(report)
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
