"""What the figures of a soak mean: what grew, what failed, what is told of it.

Used by `proving.benchmarks.soak`, whose reports it also reads again later. Measures nothing.

A soak is met if every figure was seen for long enough and none grew, if nearly all messages were
answered, if every kind of fault happened, and if it took as long as it should. Messages that fail
are no misses by themselves: whoever kills and freezes nodes makes messages of unknown outcome
(`MaybeExecuted`) and handlers that lost those whom they asked (`HandlerFailed`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from proving.benchmarks import plot
from proving.benchmarks.report import grid

STAYERS, COMERS = (0, 1), (2, 3, 4)
KINDS = ("kill", "stop", "nap", "coma", "drain", "wish")
"""The kinds of faults: methods of `proving.benchmarks.soak.Mischief`."""

LEAST_OK = 0.95
"""Which share of the messages that were due must be answered, and which of the visits. Soaks of
hours saw 98.3 and 98.4 %, one of them beside another soak, chaos and the test suite."""

LAST_LOOK_S = 15.0
"""How long before the end the last look may have been: one every four seconds, and each asks five
nodes that may not answer for a second."""

ALLOWED: dict[str, tuple[float, float]] = {
    "rss_kb": (4_096, 0.05), "fds": (4, 0.05), "tasks": (8, 0.1), "threads": (2, 0.0),
    "blocks": (5_000, 0.02), "store_kb": (256, 0.05), "rows": (64, 0.0), "locks": (6, 0.0),
}  # fmt: skip
"""How much a figure may grow over the whole time and still be flat: so much, or that share.

`rows` sees a log or a record that is not forgotten, `store_kb` one that gets longer. The numbers of
a young map do get longer, by up to four bytes for each shard in each commit that the store keeps:
so a soak begins with a map and a log of an old cluster, and its report says so (`wide`). Reports
from before that allowed the store 1,024 KiB or 15 %, and keep what they were judged by."""


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


def unjudged(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Those that were there all the time and were not seen for long enough to say anything."""
    seen = {row["process"] for row in rows}
    return [one for one in (*(f"node-{node}.1" for node in STAYERS), "load", "store")
            if one not in seen]  # fmt: skip


def answered(found: dict[str, Any]) -> tuple[float, float]:
    """Which share of the messages that were due was answered, and which of the visits."""
    outcomes: dict[str, int] = found["outcomes"]
    came = {kind: n for kind, n in outcomes.items() if kind.split(":")[0] == "visit"}
    sent = sum(outcomes.values()) - sum(came.values())
    # A load that stopped sending has failed, however well it began.
    due = max(sent, found["wanted"]["rate"] * found["seconds"], 1)
    return outcomes.get("ok", 0) / due, came.get("visit", 0) / max(sum(came.values()), 1)


def early(found: dict[str, Any]) -> bool:
    """Whether it took less time than wanted."""
    short = found["seconds"] + LAST_LOOK_S < 60 * found["wanted"]["minutes"]
    return bool(found.get("early", False)) or short


def misses(found: dict[str, Any]) -> list[str]:
    """What was not as it should be."""
    wrong: list[str] = []
    if early(found):
        minutes = math.floor(found["seconds"] / 6) / 10
        wrong.append(f"ended early after {minutes:g} of {found['wanted']['minutes']:g} minutes")
    if grew := [f"{row['process']} {row['figure']}" for row in found["rows"] if row["grew"]]:
        wrong.append(f"grew: {', '.join(grew)}")
    if missing := unjudged(found["rows"]):
        wrong.append(f"not seen for long enough to be judged: {', '.join(missing)}")
    for share, what in zip(answered(found), ("messages", "visits"), strict=True):
        if share < LEAST_OK:
            wrong.append(f"only {100 * share:.1f} % of the {what} were answered")
    if never := [kind for kind in KINDS if not found["faults"].get(kind)]:
        wrong.append(f"never happened: {', '.join(never)}")
    return wrong


def met(report: dict[str, Any]) -> bool:
    """Whether it took its time, everything was judged, nothing grew and messages were answered."""
    return not misses(report["found"])


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
    wrong = misses(found)
    messages, visits = answered(found)
    lines = [
        table(found["rows"]),
        f"{found['seconds'] / 60:.1f} minutes, seed {found['wanted']['seed']}, warm-up "
        f"{found['wanted']['warm_s']:.0f} s. Faults: {faults}. Messages: {told}; "
        f"answered: {100 * messages:.1f} % of those due, {100 * visits:.1f} % of the visits.",
        f"{'MISSED: ' + '; '.join(wrong) if wrong else 'met: nothing grew'}. {report['system']}, "
        f"{report['cpus']} CPUs, Python {report['python']}.",
    ]
    if not found.get("wide"):
        lines.append(
            "Its store began with the short numbers of a new cluster, and was allowed to grow by "
            "as much as they do."
        )
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
        seen = [one for one in whose if len(series.get(one, {}).get(name, ())) > 1]
        lines = [[(at, value * scale) for at, value in series[one][name]] for one in seen]
        if lines:
            pictures.append(plot.Curves(title, "", unit, lines, (), seen))
    return plot.curves(pictures, alt(report))


def alt(report: dict[str, Any]) -> str:
    """In words."""
    grew = sum(row["grew"] for row in report["found"]["rows"])
    minutes = report["found"]["seconds"] / 60
    return f"Figures of processes over {minutes:.0f} minutes of faults: {grew or 'none'} grew"
