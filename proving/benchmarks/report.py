"""From a report to tables and verdicts. Pure: what was measured comes in, text goes out.

A report is the dictionary that is written as JSON; `proving.benchmarks.run --from FILE` reads it
again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Report = dict[str, Any]
OURS = "domicile"
WHAT = {"ask": "ask", "tell": "tell", "new": "first ask of an entity"}

NOTES = """\
Domicile's messages take its whole path: typed encoding, routing by shard, a link that numbers,
acknowledges and survives reconnects, the owner's checks of epoch and lease, a mailbox per entity;
at most once and in order. gRPC, aiohttp and NATS hand bytes to one function: no entities, no homes,
no order among calls. A gRPC stream carries one message per payload, and replies find their callers
by position. NATS goes through its server, a third process. Ray's actor is a process, so all its
messages go to one. casty's actors keep no state here, so nothing is replicated. Tells: at most as
many as are in flight are not confirmed, and each quarter of them is confirmed by one more message;
gRPC's unary calls and HTTP have nothing one-way, an empty reply stands for it. Latencies of tells
are those of a quarter."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One floor, or one goal beyond it."""

    name: str
    wanted: str
    found: str
    met: bool | None

    @property
    def said(self) -> str:
        """In a word."""
        return "not measured" if self.met is None else "met" if self.met else "missed"


# reading


def row(report: Report, where: str, what: str, depth: int, system: str) -> Report | None:
    """One measured row."""
    wanted = (where, what, depth, system)
    for one in report["rows"]:
        if (one["where"], one["what"], one["in_flight"], one["system"]) == wanted:
            found: Report = one
            return found
    return None


def figure(report: Report, key: str) -> Report | None:
    """One thing that was measured outside the rows."""
    return next((one for one in report["single"] if one["key"] == key), None)


def is_ours(system: str) -> bool:
    """Whether a column is Domicile's."""
    return system.split("-")[0] == OURS


def full_title(system: Report) -> str:
    """A system's name where no column of Domicile's stands beside it."""
    variant = is_ours(system["key"]) and system["key"] != OURS
    return f"Domicile {system['title']}" if variant else str(system["title"])


def best_peer(report: Report, where: str, what: str, depth: int) -> Report | None:
    """The fastest row that is not Domicile's."""
    found = [
        one
        for one in report["rows"]
        if (one["where"], one["what"], one["in_flight"]) == (where, what, depth)
        and not is_ours(one["system"])
    ]
    return max(found, key=lambda one: one["per_s"], default=None)


def ratio(report: Report, where: str, what: str, depth: int) -> float | None:
    """How many times as many messages Domicile brings as the best peer."""
    ours, theirs = row(report, where, what, depth, OURS), best_peer(report, where, what, depth)
    return None if ours is None or theirs is None else ours["per_s"] / theirs["per_s"]


def kinds(report: Report) -> list[tuple[str, str, int]]:
    """The kinds of rows, in the order of their first measurement."""
    keys = ((one["where"], one["what"], one["in_flight"]) for one in report["rows"])
    order = list(dict.fromkeys(keys))
    return sorted(order, key=lambda kind: (kind[0] != "remote", list(WHAT).index(kind[1]), kind[2]))


# writing


def number(value: float | None) -> str:
    """With as many digits as it deserves."""
    if value is None:
        return ""
    if value < 10:
        return f"{value:.2f}"
    return f"{value:,.0f}" if value < 1_000 else f"{round(value, -1):,.0f}"


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; numbers to the right."""
    ruler = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(one) + " |" for one in (head, ruler, *rows))


def rates(report: Report) -> str:
    """Messages per second: a row per kind, the systems side by side."""
    head = ["per second", "in flight", *_titles(report), "to the best peer"]
    rows: list[list[str]] = []
    for kind in kinds(report):
        cells = [number(_of(cell, "per_s")) for cell in _cells(report, kind)]
        times = ratio(report, *kind)
        rows.append([*_named(kind), *cells, "" if times is None else f"{times:.1f}×"])
    return grid(head, rows)


def latencies(report: Report) -> str:
    """How long they took."""
    rows: list[list[str]] = []
    for kind in kinds(report):
        cells = [
            "" if cell is None
            else " / ".join(_ms(cell[name]) for name in ("p50_s", "p99_s", "max_s"))
            for cell in _cells(report, kind)
        ]  # fmt: skip
        rows.append([*_named(kind), *cells])
    return grid(["p50 / p99 / max ms", "in flight", *_titles(report)], rows)


def costs(report: Report) -> str:
    """Processor time per message, of all processes of a system together."""
    rows: list[list[str]] = []
    for kind in kinds(report):
        cells = [_of(cell, "cpu_s") for cell in _cells(report, kind)]
        rows.append([*_named(kind), *("" if not one else f"{one * 1e6:.1f}" for one in cells)])
    return grid(["CPU µs per message", "in flight", *_titles(report)], rows)


def limits(report: Report) -> str:
    """What the busiest process of a system allows: the rate at which it fills one processor.

    It says what a machine with more processors would show, where processes do not share them.
    """
    rows: list[list[str]] = []
    for kind in kinds(report):
        cells = _cells(report, kind)
        known = [None if cell is None else cell.get("busiest_s") for cell in cells]
        if not any(known):
            continue
        peers = [
            one for one, system in zip(known, report["systems"], strict=True)
            if one and not is_ours(system["key"])
        ]  # fmt: skip
        ours = row(report, *kind, OURS)
        mine = None if ours is None else ours.get("busiest_s")
        times = f"{min(peers) / mine:.1f}×" if peers and mine else ""
        rows.append([*_named(kind), *(number(1 / one) if one else "" for one in known), times])
    head = ["per second of the busiest process", "in flight", *_titles(report), "to the best peer"]
    return grid(head, rows) if rows else ""


def singles(report: Report) -> str:
    """What is not a rate of messages."""
    rows = [
        [one["name"], f"{number(one['median'])} {one['unit']}",
         f"{number(min(one['rounds']))} to {number(max(one['rounds']))}"]
        for one in report["single"]
    ]  # fmt: skip
    return grid(["also", "median", "range"], rows)


def missing(report: Report) -> str:
    """What is absent, and why."""
    return "\n".join(f"{name}: not measured: {why}" for name, why in report["missing"].items())


def verdicts(report: Report) -> Iterator[Verdict]:
    """The floors, then the goals beyond them."""
    at_100 = row(report, "remote", "ask", 100, OURS)
    alone = row(report, "remote", "ask", 1, OURS)
    tell = row(report, "remote", "tell", 1_000, OURS)
    local = row(report, "local", "ask", 100, OURS)
    new = row(report, "local", "new", 100, OURS)
    idle = figure(report, "idle")
    times = ratio(report, "remote", "ask", 100)
    yield _rate("remote ask, 100 in flight", at_100, 120_000)
    yield _time("its p99", _of(at_100, "p99_s"), 0.003)
    yield _time("ping-pong p50: remote ask, 1 in flight", _of(alone, "p50_s"), 0.000_150)
    yield _rate("remote tell, 1,000 in flight", tell, 400_000)
    yield _rate("local ask, 100 in flight", local, 250_000)
    yield _rate("activation: first asks, local, 100 in flight", new, 100_000)
    yield Verdict(
        "bytes per idle entity", "at most 1,000",
        "" if idle is None else number(idle["median"]),
        None if idle is None else idle["median"] <= 1_000,
    )  # fmt: skip
    yield _times("to the best peer: remote ask, 100 in flight", times, 3)
    yield _rate("goal: remote ask, 100 in flight", at_100, 150_000)
    yield _times("goal: to the best peer", times, 4)
    yield _rate("goal: local ask, 100 in flight", local, 400_000)


def floors(report: Report) -> str:
    """Each with its figure, met or missed."""
    rows = [[one.name, one.wanted, one.found, one.said] for one in verdicts(report)]
    return grid(["floor", "wanted", "found", ""], rows)


def lowest(report: Report) -> str:
    """The row in which the best peer comes closest."""
    found = [(times, kind) for kind in kinds(report) if (times := ratio(report, *kind)) is not None]
    if not found:
        return ""
    times, kind = min(found)
    theirs = best_peer(report, *kind)
    assert theirs is not None
    return (
        f"The best peer comes closest in: {' at '.join(_named(kind))} in flight, where Domicile is "
        f"{times:.1f}× {_title(report, theirs['system'])}."
    )


def facts(report: Report) -> Iterator[str]:
    """How to read the tables."""
    versions = ", ".join(
        f"{full_title(one)} {one['version']} (CPython {one['python']}, {one['loop']})"
        for one in report["systems"]
    )
    yield f"Measured: {versions}."
    if "build" in report:
        yield f"The Python of Domicile was built by {report['build']}."
    yield (
        f"{report['system']}, {report['cpus']} CPUs, load {report['load']:.1f} at the start. Two "
        f"processes on loopback, not pinned; {report['payload_bytes']}-byte payloads, "
        f"{report['entities']:,} entities; closed loop for {report['round_s']:g} s after "
        f"{report['warm_s']:g} s of warm-up; medians of {report['rounds']} interleaved rounds, "
        f"each with fresh processes; {report['took_s']:.0f} s in all. Domicile counts its metrics."
    )
    if report["quick"]:
        yield "This was a smoke test: none of its figures means anything."


def page(report: Report) -> str:
    """All of it."""
    parts = [floors(report), lowest(report)]
    if report["rows"]:
        parts += [rates(report), latencies(report), costs(report), limits(report)]
    if report["single"]:
        parts.append(singles(report))
    parts += [missing(report), "\n".join(facts(report)), NOTES]
    return "\n\n".join(part for part in parts if part) + "\n"


def fill(text: str, name: str, body: str) -> str:
    """A page with its part of that name replaced; `ValueError` if it has no such part."""
    begin, end = f"<!-- measured:{name} -->\n", f"<!-- /measured:{name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the page has no place for {name}: it needs {begin.strip()} and {end}")
    return text[: text.index(begin) + len(begin)] + body + text[text.index(end) :]


def _titles(report: Report) -> list[str]:
    return [one["title"] for one in report["systems"]]


def _title(report: Report, system: str) -> str:
    return next(full_title(one) for one in report["systems"] if one["key"] == system)


def _cells(report: Report, kind: tuple[str, str, int]) -> list[Report | None]:
    return [row(report, *kind, one["key"]) for one in report["systems"]]


def _named(kind: tuple[str, str, int]) -> tuple[str, str]:
    where, what, depth = kind
    return f"{where} {WHAT[what]}", f"{depth:,}"


def _of(found: Report | None, name: str) -> float | None:
    return None if found is None else found[name]


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _rate(name: str, found: Report | None, wanted: int) -> Verdict:
    if found is None:
        return Verdict(name, f"{wanted:,}/s", "", None)
    return Verdict(name, f"{wanted:,}/s", f"{number(found['per_s'])}/s", found["per_s"] >= wanted)


def _time(name: str, found: float | None, limit_s: float) -> Verdict:
    wanted = f"at most {limit_s * 1e3:g} ms"
    if found is None:
        return Verdict(name, wanted, "", None)
    return Verdict(name, wanted, f"{found * 1e3:.3f} ms", found <= limit_s)


def _times(name: str, found: float | None, wanted: int) -> Verdict:
    if found is None:
        return Verdict(name, f"{wanted}×", "", None)
    return Verdict(name, f"{wanted}×", f"{found:.1f}×", found >= wanted)
