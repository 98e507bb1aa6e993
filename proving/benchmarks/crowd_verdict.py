"""What the figures of a crowd mean: what failed, what was a herd, what is told of it.

Used by `proving.benchmarks.crowd`, whose reports it also reads again later. Measures nothing.

A herd is many processes that each ask the store for something because of what one of them did. So
all bounds here are on counts of requests, which hardly depend on how fast a machine is: for each
node, for the coordinator, which also decides, for all together, and for any one within a second.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from proving.benchmarks.report import grid

_FOLDERS = re.compile(r"(?<![\w.])/(?:[^/\s]+/)+")
"""What stands before the name of a file."""

SHARDS = 256
MOST = 20
"""What a node that does not coordinate may ask to get in, and to get out, whatever the others do.
With 50 nodes 9 and 8 were seen; one that asks again whenever another comes would ask 50 times."""

MEAN = 10
"""What such nodes may ask on average, which bounds what all of them ask: 5.5 and 6.1 were seen."""

IDLE_PER_S = 2.0
"""What such a node may ask of the store in a second while nothing happens (I8), or while clients
come and go, which are none of its business: 1.4 and 1.3 were seen."""

LEADS_PER_S = 3.0
"""What the coordinator may: 1.8 and 2.0 were seen. To get all nodes in or out it may ask for one
thing more than the others for each node; 15 and 25 were seen with 50."""

PEAK_PER_S = 15
"""What any node may ask within a second: 8 were seen, of the coordinator of three nodes."""

EDGE = 2
"""How much more a phase without changes may count, which begins and ends between two looks."""

TOLD = 5


def is_error(line: str) -> bool:
    """Whether a logged line is more than a warning, or says that a lease was lost."""
    return "ERROR" in line or "CRITICAL" in line or "Traceback" in line or "fenced" in line


def told_first(lines: Iterable[str]) -> list[tuple[str, int]]:
    """Some of the lines and how often they came: errors before what came most often."""
    counted = Counter(lines).most_common()
    return sorted(counted, key=lambda one: not is_error(one[0]))[:TOLD]


def verdict(found: dict[str, Any]) -> tuple[bool, list[str]]:
    """What went wrong."""
    wrong: list[str] = []
    errors = Counter[str]()
    for one in found["visitors"]:
        errors.update(one["errors"])
    if errors:
        wrong.append(f"{errors.total()} visits failed: {errors.most_common(1)[0][0]}")
    if not found["balanced"]:
        wrong.append(f"shards are not spread evenly: {found['loads']}")
    if found["remaining"]:
        wrong.append(f"{found['remaining']} records are left in the store")
    if any(code != 0 for code in found["codes"]):
        wrong.append(f"exit codes {found['codes']} (None: it did not leave in time)")
    errors_logged = [line for line, _ in found["complaints"] if is_error(line)]
    if errors_logged:
        wrong.append(f"logged: {errors_logged[0]}")
    wrong += herds(found)
    return not wrong, wrong


def herds(found: dict[str, Any]) -> list[str]:
    """Where too much was asked of the store."""
    nodes = len(found["rates"]["in"])
    change = (float(MOST), float(MOST + nodes), float(MEAN * nodes + MOST + nodes))
    wrong = [*_herd(found, "in", "to get in", *change), *_herd(found, "out", "to get out", *change)]
    for name, title, seconds, some in (
        ("idle", "while nothing happens", found["idle_s"], EDGE),
        # Clients that come are a change, however many come at once.
        ("clients", "while clients come and go", found["visits_s"], MOST),
    ):
        each, leads = IDLE_PER_S * seconds + some, LEADS_PER_S * seconds + some
        wrong += _herd(found, name, title, each, leads, nodes * each + leads)
    return wrong


def _herd(
    found: dict[str, Any], name: str, title: str, each: float, leads: float, whole: float
) -> list[str]:
    """Where one phase was beyond bounds of a follower, of the coordinator and of all."""
    rates: list[dict[str, float]] = found["rates"][name]
    return [
        f"a herd: {whose} asked {max(asked):.0f} things {title} (at most {most:.0f})"
        for whose, most, asked in (
            ("a node", each, [one["requests"] for one in rates if not one["leads"]]),
            ("the coordinator", leads, [one["requests"] for one in rates if one["leads"]]),
            ("all nodes", whole, [sum(one["requests"] for one in rates)]),
            ("within a second a node", PEAK_PER_S, [one["peak_per_s"] for one in rates]),
        )
        if max(asked, default=0.0) > most
    ]


def worked_s(found: dict[str, Any], name: str) -> float:
    """How long a node worked in a phase, on average."""
    each = [one["worked_s"] for one in found["rates"][name]]
    return float(sum(each) / len(each))


def visit_cost_s(found: dict[str, Any]) -> float:
    """How much longer a node works because one client came, asked and went."""
    idle_s = worked_s(found, "idle") * found["visits_s"] / found["idle_s"]
    more_s = worked_s(found, "clients") - idle_s
    return float(more_s / (found["clients"] * found["visits"]))


def followers(found: dict[str, Any], name: str) -> list[dict[str, float]]:
    """Those that do not coordinate; those that do, if there are no others."""
    rates: list[dict[str, float]] = found["rates"][name]
    return [one for one in rates if not one["leads"]] or rates


def table(found: dict[str, Any]) -> str:
    """A row per phase."""
    took = {
        "in": found["balanced_s"], "idle": found["idle_s"], "clients": found["visits_s"],
        "out": found["left_s"],
    }  # fmt: skip
    titles = {
        "in": f"{found['nodes']} nodes start", "idle": "nothing happens",
        "clients": f"{found['clients'] * found['visits']} clients come, ask and go",
        "out": "all nodes leave",
    }  # fmt: skip
    rows: list[list[str]] = []
    for name, title in titles.items():
        rates = found["rates"][name]
        each = [one["requests"] for one in followers(found, name)]
        leads = [one["requests"] for one in rates if one["leads"]]
        total = sum(one["requests"] for one in rates)
        highest = max(one["peak_per_s"] for one in rates)
        rows.append([
            title, f"{took[name]:.1f}", f"{total:,.0f}", f"{total / took[name]:,.0f}",
            f"{sum(each) / len(each):.1f} ({max(each):.0f})",
            f"{sum(leads):.0f}" if leads else "", f"{highest:.0f}" if highest else "",
        ])  # fmt: skip
    head = ["phase", "s", "requests of nodes", "per s, all nodes", "per follower (most)",
            "the coordinator", "most per s, one node"]  # fmt: skip
    return grid(head, rows)


def page(report: dict[str, Any]) -> str:
    """The table and what to make of it."""
    found = report["found"]
    met, wrong = verdict(found)
    asks = sum(one["asks"] for one in found["visitors"])
    kinds: Counter[str] = Counter()
    for one in found["visitors"]:
        kinds.update(one["kinds"])
    visits = found["clients"] * found["visits"]
    failed = sum(sum(one["errors"].values()) for one in found["visitors"])
    came = f"{found['per_s']:g} clients came per second" if found["per_s"] else "All came at once"
    lines = [
        table(found),
        f"All registered after {found['ready_s']:.1f} s, every shard served after "
        f"{found['served_s']:.1f} s, spread evenly after {found['balanced_s']:.1f} s (from the "
        f"first start, imports included); all gone {found['left_s']:.1f} s after they were asked "
        f"to leave. {asks:,} asks in {visits} visits, of which {failed} failed; p50 "
        f"{1e3 * max(one['p50_s'] for one in found['visitors']):.0f} ms, p99 "
        f"{1e3 * max(one['p99_s'] for one in found['visitors']):.0f} ms; the clients asked "
        f"{kinds.total() / visits:.1f} things of the store per visit. {came}; "
        f"each of them cost each node {1e3 * visit_cost_s(found):.1f} ms of a "
        f"processor, the answers included; an idle node works "
        f"{1e3 * worked_s(found, 'idle') / found['idle_s']:.1f} ms per second.",
        f"{'met' if met else 'MISSED: ' + '; '.join(wrong)}. {report['system']}, "
        f"{report['cpus']} CPUs, Python {report['python']}, {SHARDS} shards, one SQLite store.",
    ]
    # Where the interpreter is on that machine is nobody's business.
    lines += [f"Logged {count}×: {_FOLDERS.sub('', line)}" for line, count in found["complaints"]]
    if report["quick"]:
        lines.append("This was a smoke test: none of its figures means anything.")
    return "\n\n".join(lines) + "\n"
