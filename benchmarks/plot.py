"""Curves over time and distributions as plain SVG, in the looks of `benchmarks.chart`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from benchmarks.chart import STYLE, WIDTH

LEFT, RIGHT, TOP, PLOT, GAP = 64, 16, 34, 130, 40
ROW, LABEL = 26, 300
LONG_S = 600.0
"""What takes longer is told in minutes."""

MORE_STYLE = """\
.axis { stroke: #afb8c1; stroke-width: 1 }
.shade { fill: #0f766e; opacity: 0.12 }
.line { fill: none; stroke: #0f766e; stroke-width: 1.6 }
.line.other { stroke: #afb8c1 }
.range { stroke: #6cb6a6; stroke-width: 2 }
.small { font-size: 11px }
@media (prefers-color-scheme: dark) {
  .axis { stroke: #4b535d }
  .shade { fill: #2dd4bf }
  .line { stroke: #2dd4bf }
  .line.other { stroke: #6e7681 }
}"""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curves:
    """One picture over time: lines (the first is the important one), and spans that are shaded."""

    title: str
    note: str
    unit: str
    lines: Sequence[Sequence[Point]]
    shaded: Sequence[tuple[float, float, str]] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class Row:
    """One distribution, or single figures of somebody else."""

    label: str
    values: Sequence[float]
    ours: bool = True


def curves(pictures: Sequence[Curves], alt: str) -> str:
    """All of them, one below the other."""
    parts: list[str] = []
    y = 0
    for one in pictures:
        parts += _curves(one, y + TOP)
        y += TOP + PLOT + GAP
    return _page(parts, y, alt)


def rows(title: str, note: str, unit: str, found: Sequence[Row], alt: str) -> str:
    """A line from least to most per row, a dot per value, a bar at the median."""
    most = _round_up(max(max(row.values) for row in found))
    parts = [_title(title, note, TOP - 14)]

    def x(value: float) -> float:
        return LABEL + value / most * (WIDTH - LABEL - RIGHT - 8)

    y = TOP + 6
    for row in found:
        kind = "ours" if row.ours else "peer"
        parts.append(
            f'<text x="{LABEL - 12}" y="{y + 4}" text-anchor="end">{escape(row.label)}</text>'
        )
        low, high, middle = min(row.values), max(row.values), sorted(row.values)
        parts.append(
            f'<line class="range" x1="{x(low):.1f}" x2="{x(high):.1f}" y1="{y}" y2="{y}"/>'
        )
        parts += [
            f'<circle class="{kind}" cx="{x(value):.1f}" cy="{y}" r="2.2" opacity="0.55"/>'
            for value in row.values
        ]
        at = x(middle[len(middle) // 2])
        parts.append(f'<rect class="{kind}" x="{at - 1.5:.1f}" y="{y - 8}" width="3" height="16"/>')
        y += ROW
    for step in range(5):
        value = most * step / 4
        parts.append(
            f'<text class="faint small" x="{x(value):.1f}" y="{y + 8}" text-anchor="middle">'
            f"{value:g} {unit}</text>"
        )
    return _page(parts, y + 18, alt)


def _curves(one: Curves, top: int) -> list[str]:
    points = [point for line in one.lines for point in line]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    most = _round_up(max(y for _, y in points))
    bottom = top + PLOT

    def x(value: float) -> float:
        span = max(last - first, 1e-9)
        return LEFT + (value - first) / span * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return bottom - value / most * PLOT

    parts = [_title(one.title, one.note, top - 14)]
    for since, until, name in one.shaded:
        since, until = max(since, first), min(until, last)
        if since >= until:
            continue
        parts.append(
            f'<rect class="shade" x="{x(since):.1f}" y="{top}" '
            f'width="{x(until) - x(since):.1f}" height="{PLOT}"/>'
        )
        parts.append(
            f'<text class="faint small" x="{x(since) + 4:.1f}" y="{top + 13}">{escape(name)}</text>'
        )
    for number in reversed(range(len(one.lines))):
        kind = "line other" if number else "line"
        path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in one.lines[number])
        parts.append(f'<polyline class="{kind}" points="{path}"/>')
    parts.append(
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>'
    )
    for value in (0.0, most / 2, most):
        parts.append(
            f'<text class="faint small" x="{LEFT - 8}" y="{y(value) + 4:.1f}" '
            f'text-anchor="end">{value:g} {escape(one.unit)}</text>'
        )
    for step in range(5):
        at = first + (last - first) * step / 4
        # The last one would not fit if it stood in the middle.
        anchor = "end" if step == 4 else "middle"
        parts.append(
            f'<text class="faint small" x="{x(at):.1f}" y="{bottom + 16}" text-anchor="{anchor}">'
            f"{_duration(at - first, last - first)}</text>"
        )
    return parts


def _duration(seconds: float, of_s: float) -> str:
    """A point in time, in the unit that suits the whole."""
    return f"{seconds / 60:.0f} min" if of_s >= LONG_S else f"{seconds:.0f} s"


def _title(title: str, note: str, y: int) -> str:
    return (
        f'<text x="8" y="{y}"><tspan class="title">{escape(title)}</tspan>'
        f'<tspan class="faint" dx="8">{escape(note)}</tspan></text>'
    )


def _page(parts: Sequence[str], height: int, alt: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{escape(alt)}">'
    )
    return "\n".join([head, f"<style>\n{STYLE}\n{MORE_STYLE}\n</style>", *parts, "</svg>"]) + "\n"


def _round_up(value: float) -> float:
    """A round number that is not less."""
    if value <= 0:
        return 1.0
    digit = 10.0 ** math.floor(math.log10(value))
    return next(times * digit for times in (1, 2, 3, 4, 5, 6, 8, 10) if times * digit >= value)
