"""From measured cells of the stores' benchmark to tables with floors. Pure.

A cell is one figure of one store. Its rounds come in as dictionaries, as
`proving.benchmarks.stores` keeps them in its JSON file; text goes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from proving.benchmarks.report import grid, number

Round = Mapping[str, Any]
Found = Mapping[str, Sequence[Round]]

TITLES = {"sqlite": "SQLite", "postgresql": "PostgreSQL", "etcd": "etcd", "redis": "Redis/Valkey"}
NODES = (1, 10, 50)
SHARDS = (16, 256, 1_024, 4_096)
WRITERS = ((1, 1), (1, 64), (4, 16))
"""Processes that write, and how many commits each has under way."""

PER_NODE, PER_CLUSTER = 1.0, 5.0
"""How many requests a second an idle node may make, and a cluster besides (I8)."""

COMMITS = {"postgresql": 1_000.0}
"""Batched commits a second that a store must reach: those of one process, 64 at a time."""

WATCH_P99_S = 0.05
FLAT, FLAT_SLACK = 1.5, 1.0
"""How many times as much the dearest number of shards may cost as the cheapest, and how many
requests a second besides that count for nothing."""

BUSY_SHARE = 0.5
"""A load average above this share of the processors, before a round, makes it one of a busy
machine."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure: what is measured on which store, and with which numbers."""

    kind: str
    store: str
    numbers: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """Its name for the command line and in the file."""
        match self.kind:
            case "idle":
                return f"idle-{self.store}-{self.numbers[0]}-{self.numbers[1]}"
            case "commits":
                return f"commits-{self.store}-{self.numbers[0]}x{self.numbers[1]}"
            case _:
                return f"{self.kind}-{self.store}"


def _cells() -> list[Cell]:
    found: list[Cell] = []
    for store in TITLES:
        found += [Cell("commits", store, pair) for pair in WRITERS]
        found.append(Cell("watch", store))
        found += [Cell("idle", store, (nodes, shards)) for nodes in NODES for shards in SHARDS]
    return found


CELLS: dict[str, Cell] = {cell.key: cell for cell in _cells()}
"""All figures, by name."""


def chosen(texts: Sequence[str]) -> list[str]:
    """The cells whose names have one of these words in them, or are one; all without any."""
    exact = [text for text in texts if text in CELLS]
    words = [text for text in texts if text not in CELLS]
    return [key for key in CELLS if not texts or key in exact or any(one in key for one in words)]


def value(rounds: Sequence[Round], name: str = "value") -> float:
    """The figure of a cell."""
    return median(float(one[name]) for one in rounds)


def allowed(nodes: int) -> float:
    """Requests a second that an idle cluster may make of its store (I8)."""
    return nodes * PER_NODE + PER_CLUSTER


def flat(rates: Sequence[float]) -> bool:
    """Whether the number of shards makes no difference."""
    return max(rates) <= FLAT * min(rates) + FLAT_SLACK


def busy(rounds: Sequence[Round]) -> bool:
    """Whether the machine had other work when these began."""
    return any(one["load"] > BUSY_SHARE * one["cpus"] for one in rounds)


def _rounds(found: Found, kind: str, store: str, *numbers: int) -> Sequence[Round]:
    return found.get(Cell(kind, store, numbers).key, ())


def idle_table(found: Found) -> str:
    """Requests of an idle cluster: a row per store and number of nodes, a column per shards."""
    head = [
        "idle cluster: requests/s in all (per node)", "nodes",
        *(f"{shards:,} shards" for shards in SHARDS), "at most", "", "CPU per node",
        "CPU of the server", "load",
    ]  # fmt: skip
    rows: list[list[str]] = []
    for store, title in TITLES.items():
        for nodes in NODES:
            cells = [_rounds(found, "idle", store, nodes, shards) for shards in SHARDS]
            there = [rounds for rounds in cells if rounds]
            if there:
                rows.append(_idle_row(title, nodes, cells, there))
    return grid(head, rows) if rows else ""


def _idle_row(
    title: str, nodes: int, cells: Sequence[Sequence[Round]], there: Sequence[Sequence[Round]]
) -> list[str]:
    rates = [value(rounds) for rounds in there]
    said = "met" if max(rates) <= allowed(nodes) else "MISSED"
    if len(there) > 1:
        said += ", flat" if flat(rates) else ", NOT flat"
    every = [one for rounds in there for one in rounds]
    servers = [one["server_share"] for one in every if one["server_share"] is not None]
    return [
        title, str(nodes),
        *(_rate(rounds, nodes) if rounds else "" for rounds in cells),
        f"{allowed(nodes):g}", said,
        _share(max(one["node_share"] for one in every)),
        _share(max(servers)) if servers else "",
        _load(every),
    ]  # fmt: skip


def _rate(rounds: Sequence[Round], nodes: int) -> str:
    rate = value(rounds)
    return f"{rate:.1f} ({rate / nodes:.2f})"


def _share(share: float) -> str:
    return f"{100 * share:.2f} %"


def _load(rounds: Sequence[Round]) -> str:
    most = max(one["load"] for one in rounds)
    return f"{most:.1f}{' (busy)' if busy(rounds) else ''}"


def commits_table(found: Found) -> str:
    """How many commits a second, by processes and commits under way."""
    head = ["commits of 100 bytes", "processes × under way", "commits/s", "floor", "", "p50 ms",
            "p99 ms", "fdatasync p50 ms", "load"]  # fmt: skip
    rows: list[list[str]] = []
    for store, title in TITLES.items():
        for processes, depth in WRITERS:
            rounds = _rounds(found, "commits", store, processes, depth)
            if rounds:
                floor = COMMITS.get(store) if (processes, depth) == (1, 64) else None
                rows.append([
                    title, f"{processes} × {depth}", number(value(rounds)),
                    "" if floor is None else number(floor),
                    _verdict(floor, value(rounds), less=False),
                    _ms(rounds, "p50_s"), _ms(rounds, "p99_s"), _ms(rounds, "fsync_s"),
                    _load(rounds),
                ])  # fmt: skip
    return grid(head, rows) if rows else ""


def watch_table(found: Found) -> str:
    """How old a change is when another process's watch has it."""
    head = ["from a call of commit to a watch", "changes", "p50 ms", "p99 ms", "floor ms", "",
            "max ms", "load"]  # fmt: skip
    rows: list[list[str]] = []
    for store, title in TITLES.items():
        rounds = _rounds(found, "watch", store)
        if rounds:
            rows.append([
                title, str(sum(one["count"] for one in rounds)), _ms(rounds, "p50_s"),
                _ms(rounds, "p99_s"), f"{1_000 * WATCH_P99_S:g}",
                _verdict(WATCH_P99_S, value(rounds, "p99_s"), less=True), _ms(rounds, "max_s"),
                _load(rounds),
            ])  # fmt: skip
    return grid(head, rows) if rows else ""


def _verdict(wanted: float | None, figure: float, *, less: bool) -> str:
    if wanted is None:
        return ""
    return "met" if (figure <= wanted if less else figure >= wanted) else "MISSED"


def _ms(rounds: Sequence[Round], name: str) -> str:
    return f"{1_000 * value(rounds, name):.2f}"


def page(found: Found) -> str:
    """All tables that have rows."""
    tables = [idle_table(found), commits_table(found), watch_table(found)]
    return "\n\n".join(table for table in tables if table)
