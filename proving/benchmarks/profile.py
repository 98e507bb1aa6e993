"""Where the time of a message goes: `python -m proving.benchmarks.profile [--depth N] [--what
ask|tell]`.

Two tables. The first divides the CPU time of caller and home among the stages of a message: both
are sampled while they run at full speed, as often as the kernel allows and at most once per
millisecond of CPU time, and every sample counts for the stage of the function that is running. What
C code does counts for the Python function that called it; what the loop itself does counts for
`loop` on asyncio, and on uvloop, which has no Python frames, for the callback that it enters next.
The second table times the same functions alone. `--calls` adds how often each function is called
per message, which slows everything down: believe its counts and not its times.

Run it as a module: as a script it would hide the standard library's module of the same name.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from proving.benchmarks import alone, home
from proving.benchmarks.part import Options
from proving.benchmarks.part import Part as PartOf
from proving.benchmarks.processes import ROOT, Part, cpu_of_all_s
from proving.benchmarks.report import fill, grid

EVERY_S = 0.001
TOP = 15
PAGE = ROOT / "docs" / "explanation" / "performance.md"

STAGES = {
    "codec": ("entity/model/codec", "entity/model/entity", "entity/model/handlers"),
    "route": ("entity/model/", "entity/sending/", "core/handoff/sender", "core/handoff/pending",
              "core/handoff/admission", "core/state/", "core/hashing", "core/ids"),
    "frame": ("core/wire", "transports/framing"),
    "link": ("links/",),
    "socket": ("transports/",),
    "dispatch": ("entity/", "core/handoff/", "incarnation/dispatch", "concurrency/"),
    "guard": ("membership/", "control/", "incarnation/", "core/", "stores/", "ports/"),
    "metrics": ("observe/", "ops/"),
}  # fmt: skip
"""By the first prefix that fits, in this order; longer names first where one begins another."""

MEANS = {
    "codec": "arguments and replies to bytes and back",
    "route": "ref, shard of an id, home of a shard, order, waiting asks",
    "frame": "many messages into one frame and back",
    "link": "numbers, acknowledgements, what is kept for resending",
    "socket": "system calls, readiness, TLS",
    "dispatch": "ownership, epoch, mailbox, turn, workers",
    "handler": "the user's handler",
    "guard": "lease and deadline, membership",
    "metrics": "counting",
    "caller": "the benchmark's own loop",
    "loop": "event loop, futures, tasks, the rest",
}


def stage_of(file: str, function: str) -> str:
    """The stage that a function belongs to."""
    for marker, owner in (("/domicile/", None), ("/benchmarks/", "caller")):
        at = file.rfind(marker)
        if at < 0:
            continue
        module = file[at + len(marker) :].removesuffix(".py")
        if owner is not None:
            return "handler" if function.startswith(("Echo.", "Tally.")) else owner
        for stage, prefixes in STAGES.items():
            if any(module == one or module.startswith(one) for one in prefixes):
                return stage
    return "loop"


# in the measured processes


class Watched:
    """Samples or counts what this process runs, on demand."""

    def __init__(self) -> None:
        self._samples: Counter[tuple[str, str]] = Counter()
        self._calls = cProfile.Profile()

    async def run(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Start or stop one of the two."""
        return {
            "sample": self._sample, "sampled": self._sampled,
            "call": self._call, "called": self._called,
        }[wanted["what"]]()  # fmt: skip

    def _sample(self) -> dict[str, Any]:
        self._samples.clear()
        signal.signal(signal.SIGPROF, self._note)
        signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)
        return {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        # What dataclasses and named tuples generate belongs to whoever calls it.
        while frame is not None and frame.f_code.co_filename.startswith("<"):
            frame = frame.f_back
        if frame is not None:
            self._samples[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    def _sampled(self) -> dict[str, Any]:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        return {"samples": [[*where, count] for where, count in self._samples.items()]}

    def _call(self) -> dict[str, Any]:
        self._calls = cProfile.Profile()
        self._calls.enable()
        return {}

    def _called(self) -> dict[str, Any]:
        self._calls.disable()
        stats: Any = pstats.Stats(self._calls)
        found = [
            [file, line, name, calls, own_s]
            for (file, line, name), (_, calls, own_s, _, _) in stats.stats.items()
        ]
        return {"functions": sorted(found, key=lambda one: -one[4])[: 3 * TOP]}


@asynccontextmanager
async def server(options: Options) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """The home of `proving.benchmarks.home`, watched."""
    async with home.home(options) as (where, measures):
        yield where, {**measures, "profile": Watched()}


@asynccontextmanager
async def client(options: Options) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """The client of `proving.benchmarks.home`, watched."""
    async with home.client(options) as (where, measures):
        yield where, {**measures, "profile": Watched()}


PARTS: dict[str, PartOf] = {"server": server, "client": client}


# outside of them


def shares(samples: Sequence[Sequence[Any]]) -> dict[str, float]:
    """How a process's samples fall upon the stages."""
    counts: Counter[str] = Counter()
    for file, function, count in samples:
        counts[stage_of(file, function)] += count
    total = sum(counts.values()) or 1
    return {stage: counts[stage] / total for stage in MEANS}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Sample both sides; per message, each side's CPU time and its shares."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="domicile-profile-")))
        given: dict[str, Any] = {
            "loop": options.loop, "entities": options.entities, "where": "sqlite:///bench.db",
        }  # fmt: skip

        def part(name: str) -> Part:
            made = Part(sys.executable, "proving.benchmarks.profile", name, given, place)
            stack.callback(made.close)
            made.ready()
            return made

        sides = {"home": part("server")}
        if options.where == "remote":
            sides = {"caller": part("client"), **sides}
        calling = next(iter(sides.values()))

        def run(seconds: float) -> dict[str, Any]:
            return calling.run(
                system="domicile", what=options.what, depth=options.depth, seconds=seconds,
                warm_s=0.0,
            )  # fmt: skip

        run(0.5)
        found: dict[str, Any] = {"sides": {}}
        for one in sides.values():
            one.run(system="profile", what="sample")
        before = {name: cpu_of_all_s(one) or 0.0 for name, one in sides.items()}
        told = run(options.seconds)
        found["per_s"] = told["count"] / told["took_s"]
        for name, one in sides.items():
            cpu_s = (cpu_of_all_s(one) or 0.0) - before[name]
            samples = one.run(system="profile", what="sampled")["samples"]
            found["sides"][name] = {
                "cpu_s": cpu_s / told["count"], "shares": shares(samples),
                "top": sorted(samples, key=lambda each: -each[2])[:TOP],
                "samples": sum(each[2] for each in samples),
            }  # fmt: skip
        if options.calls:
            for one in sides.values():
                one.run(system="profile", what="call")
            told = run(options.seconds)
            for name, one in sides.items():
                found["sides"][name]["functions"] = [
                    [file, line, function, calls / told["count"], own_s / told["count"]]
                    for file, line, function, calls, own_s in one.run(
                        system="profile", what="called"
                    )["functions"]
                ]
        return found


def budget(found: dict[str, Any]) -> str:
    """The CPU time of a message, divided."""
    sides = found["sides"]
    rows: list[list[str]] = []
    for stage, means in MEANS.items():
        cells = [side["cpu_s"] * side["shares"][stage] for side in sides.values()]
        rows.append(
            [f"{stage}: {means}", *(f"{cell * 1e6:.2f}" for cell in cells),
             f"{sum(cells) * 1e6:.2f}"]
        )  # fmt: skip
    totals = [side["cpu_s"] for side in sides.values()]
    rows.append(["all", *(f"{one * 1e6:.2f}" for one in totals), f"{sum(totals) * 1e6:.2f}"])
    return grid(["CPU µs per message", *sides, "together"], rows)


def busiest(found: dict[str, Any]) -> str:
    """The functions that are met most often."""
    rows: list[list[str]] = []
    for name, side in found["sides"].items():
        for file, function, count in side["top"]:
            share = count / max(1, side["samples"])
            rows.append(
                [name, f"{100 * share:.1f} %", f"{share * side['cpu_s'] * 1e6:.2f}",
                 f"{short(file)} {function}"]
            )  # fmt: skip
    return grid(["side", "samples", "µs", "function"], rows)


def calls(found: dict[str, Any]) -> str:
    """How often functions are called per message."""
    rows: list[list[str]] = []
    for name, side in found["sides"].items():
        for file, line, function, number, own_s in side["functions"][:TOP]:
            rows.append(
                [name, f"{number:.2f}", f"{own_s * 1e6:.2f}", f"{short(file)}:{line} {function}"]
            )
    return grid(["side", "calls per message", "slowed µs", "function"], rows)


def short(file: str) -> str:
    """The end of a path that says enough."""
    for marker in ("/domicile/", "/benchmarks/"):
        at = file.rfind(marker)
        if at >= 0:
            return file[at + 1 :]
    return "/".join(Path(file).parts[-2:])


def main(given: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m proving.benchmarks.profile", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--where", choices=["remote", "local"], default="remote")
    parser.add_argument("--what", choices=["ask", "tell", "new"], default="ask")
    parser.add_argument("--depth", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--entities", type=int, default=1_000)
    parser.add_argument("--loop", choices=["asyncio", "uvloop"], default="uvloop")
    parser.add_argument("--calls", action="store_true", help="also count calls, with cProfile")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args(given)
    found = measure(options)
    title = (
        f"{options.where} {options.what}, {options.depth:,} in flight, {options.loop}, load "
        f"{os.getloadavg()[0]:.1f}: {found['per_s']:,.0f} per second while sampled"
    )
    print(f"{title}\n\n{budget(found)}\n\n{busiest(found)}\n")
    if options.calls:
        print(calls(found), end="\n\n")
    by_itself = alone.table()
    print(by_itself)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if options.write_docs:
        text = fill(
            PAGE.read_text(encoding="utf-8"), "budget",
            f"{title[0].upper()}{title[1:]}.\n\n{budget(found)}\n\n{by_itself}\n",
        )  # fmt: skip
        PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
