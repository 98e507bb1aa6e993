"""From measured cells of the durable benchmarks to a table with floors and goals. Pure.

A cell is one figure. Its rounds come in as dictionaries, as `proving.benchmarks.durable` keeps them
in its JSON file; text goes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from proving.benchmarks.report import grid, number

Round = Mapping[str, Any]
PARTS = ("home", "client", "server")
QUIET_S = 0.000_2
"""What a write to the disk takes at most where floors and goals of rates and times apply."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure: how it is called, and what is wanted of it."""

    key: str
    title: str
    unit: str
    floor: float | None = None
    goal: float | None = None
    less: bool = False
    """Whether less is better."""
    peer: bool = False

    def meets(self, found: float, wanted: float) -> bool:
        """Whether a figure is as good as what is wanted."""
        return found <= wanted if self.less else found >= wanted


def _both(key: str, title: str, unit: str, *wanted: Any, less: bool = False) -> list[Cell]:
    """The same figure on both journals; `wanted` are floor and goal of each."""
    names = (("sqlite", "SQLite"), ("postgresql", "PostgreSQL"))
    return [
        Cell(f"{key}-{journal}", f"{title}, {name}", unit, floor, goal, less)
        for (journal, name), (floor, goal) in zip(names, wanted, strict=True)
    ]


CELLS: dict[str, Cell] = {
    cell.key: cell
    for cell in [
        *_both("wire", "keyed ask over the wire, 1,000 entities, 1,000 in flight", "/s",
               (20_000.0, 30_000.0), (18_000.0, 25_000.0)),
        *_both("home", "CPU of a keyed ask in its home process, 1,000 in flight", "µs",
               (35.0, 25.0), (None, None), less=True),
        *_both("hot", "one hot entity, 100 callers", "/s",
               (10_000.0, 25_000.0), (10_000.0, 25_000.0)),
        *_both("lone", "lone keyed ask, p50", "ms", (1.0, 0.5), (1.5, 0.8), less=True),
        *_both("replay", "replay of entities with 200 events, events", "/s",
               (400_000.0, 800_000.0), (400_000.0, 800_000.0)),
        *_both("cold", "cold starts of entities with one event, 1,000 in flight", "/s",
               (5_000.0, 15_000.0), (5_000.0, 15_000.0)),
        *_both("size", "size of a 100-byte event with key and reply", "bytes",
               (250.0, 215.0), (520.0, 470.0), less=True),
        Cell("asyncpg-wire", "peer: one INSERT per request, 100 connections, 1,000 in flight",
             "/s", peer=True),
        Cell("asyncpg-lone", "peer: one INSERT per request, one at a time, p50", "ms", less=True,
             peer=True),
        Cell("restate-wire", "peer: Restate, 1,000 objects, 100 connections, 1,000 in flight",
             "/s", peer=True),
        Cell("restate-lone", "peer: Restate, one at a time, p50", "ms", less=True,
             peer=True),
    ]
}  # fmt: skip
"""All figures, in the order of the table."""


def chosen(texts: Sequence[str]) -> list[str]:
    """The cells whose keys have one of these words in them; all without any."""
    return [key for key in CELLS if not texts or any(text in key for text in texts)]


def value(rounds: Sequence[Round]) -> float:
    """The figure of a cell."""
    return median(float(one["value"]) for one in rounds)


def table(found: Mapping[str, Sequence[Round]]) -> str:
    """A row per cell that was measured."""
    head = [
        "what", "found", "floor", "goal", "", "p50 / p99 ms", "CPU µs: home", "client", "server",
        "fdatasync p50 ms",
    ]  # fmt: skip
    rows = [_row(CELLS[key], found[key]) for key in CELLS if found.get(key)]
    return grid(head, rows)


def _row(cell: Cell, rounds: Sequence[Round]) -> list[str]:
    times = " / ".join(_ms(rounds, name) for name in ("p50_s", "p99_s"))
    return [
        cell.title,
        _with_unit(cell, value(rounds)),
        _with_unit(cell, cell.floor),
        _with_unit(cell, cell.goal),
        verdict(cell, rounds),
        "" if times == " / " else times,
        *(_cpu(rounds, part) for part in PARTS),
        _ms(rounds, "fsync_s"),
    ]


def verdict(cell: Cell, rounds: Sequence[Round]) -> str:
    """What a figure comes to; on a slow disk only CPU time and sizes are judged."""
    if cell.floor is None or cell.goal is None:
        return ""
    found = value(rounds)
    slow = median(float(one["fsync_s"]) for one in rounds) > QUIET_S
    if cell.meets(found, cell.goal):
        return "goal met"
    if cell.meets(found, cell.floor):
        return "floor met"
    if slow and cell.unit in ("/s", "ms"):
        return "missed, on a slow disk"
    return "missed"


def missing(reasons: Mapping[str, str]) -> str:
    """What is absent, and why."""
    return "\n".join(
        f"{CELLS[key].title}: not measured: {why}" for key, why in reasons.items() if key in CELLS
    )


def _with_unit(cell: Cell, figure: float | None) -> str:
    if figure is None:
        return ""
    return f"{number(figure)}{'' if cell.unit == '/s' else ' '}{cell.unit}"


def _ms(rounds: Sequence[Round], name: str) -> str:
    known = [float(one[name]) for one in rounds if one.get(name) is not None]
    return f"{1_000 * median(known):.2f}" if known else ""


def _cpu(rounds: Sequence[Round], part: str) -> str:
    known = [float(one["cpu_us"][part]) for one in rounds if part in one.get("cpu_us", {})]
    return f"{median(known):.1f}" if known else ""
