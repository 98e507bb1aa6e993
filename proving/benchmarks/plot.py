"""Curves over time and distributions as plain SVG, in the looks of `proving.benchmarks.chart`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from xml.sax.saxutils import escape

from proving.benchmarks.chart import STYLE, WIDTH

LEFT, RIGHT, TOP, PLOT, GAP = 64, 16, 34, 130, 40
ROW, LABEL = 26, 300
STRIP, LEGEND = 15, 18
"""The heights of a row of names of phases, and of the legend."""

LONG_S = 600.0
"""What takes longer is told in minutes."""

LETTER = 6.4
"""About how wide a letter of the small size is."""

MARKS, TIMES = 4, 8
"""At most so many steps between the marks of an axis."""

KINDS = ("line", "line other", "line third", "line fourth")
CLOCK = (1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600)
"""Steps of time that are round, in seconds as in minutes."""

MORE_STYLE = """\
.axis { stroke: #afb8c1; stroke-width: 1 }
.grid { stroke: #afb8c1; stroke-width: 1; opacity: 0.35 }
.shade { fill: #0f766e; opacity: 0.14 }
.shade.next { opacity: 0.06 }
.edge { stroke: #0f766e; stroke-width: 1; opacity: 0.45 }
.line { fill: none; stroke: #0f766e; stroke-width: 1.6 }
.line.other { stroke: #8c959f }
.line.third { stroke: #bc4c00; stroke-dasharray: 5 3 }
.line.fourth { stroke: #6639ba; stroke-dasharray: 2 2 }
.range { stroke: #6cb6a6; stroke-width: 2 }
.range.theirs { stroke: #afb8c1 }
.small { font-size: 11px }
@media (prefers-color-scheme: dark) {
  .axis, .grid { stroke: #4b535d }
  .shade { fill: #2dd4bf }
  .edge { stroke: #2dd4bf }
  .line { stroke: #2dd4bf }
  .line.other { stroke: #9198a1 }
  .line.third { stroke: #f0883e }
  .line.fourth { stroke: #a371f7 }
  .range.theirs { stroke: #4b535d }
}"""

Point = tuple[float, float]
Span = tuple[float, float, str]


@dataclass(frozen=True, slots=True)
class Curves:
    """One picture over time: lines (the first is the important one), and spans that are shaded.

    With `names`, one for each line, there is a legend.
    """

    title: str
    note: str
    unit: str
    lines: Sequence[Sequence[Point]]
    shaded: Sequence[Span] = field(default_factory=tuple)
    names: Sequence[str] = field(default_factory=tuple)


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
        drawn, bottom = _curves(one, y + TOP)
        parts += drawn
        y = bottom + GAP
    return _page(parts, y, alt)


def rows(title: str, note: str, unit: str, found: Sequence[Row], alt: str) -> str:
    """A line from least to most per row, a dot per value, a bar at the median and what it says."""
    marks = _marks(max(max(row.values) for row in found))
    most, end = marks[-1], WIDTH - RIGHT - 8
    parts = [_title(title, note, TOP - 14)]
    bottom = TOP + 6 + ROW * len(found)

    def x(value: float) -> float:
        return LABEL + value / most * (end - LABEL)

    for value in marks:
        parts.append(_line("grid", x(value), TOP - 8, x(value), bottom - 8))
        parts.append(_small(x(value), bottom + 8, f"{value:g} {unit}", "middle"))
    for number, row in enumerate(found):
        y = TOP + 6 + ROW * number
        kind, theirs = ("ours", "") if row.ours else ("peer", " theirs")
        parts.append(
            f'<text x="{LABEL - 12}" y="{y + 4}" text-anchor="end">{escape(row.label)}</text>'
        )
        low, high, middle = x(min(row.values)), x(max(row.values)), median(row.values)
        parts.append(_line(f"range{theirs}", low, y, high, y))
        parts += [
            f'<circle class="{kind}" cx="{x(value):.1f}" cy="{y}" r="2.2" opacity="0.55"/>'
            for value in row.values
        ]
        at = x(middle)
        parts.append(f'<rect class="{kind}" x="{at - 1.5:.1f}" y="{y - 8}" width="3" height="16"/>')
        said = f"{middle:.{3 if middle < 1 else 2}f} {unit}"
        if high + 8 + len(said) * LETTER < end:
            parts.append(_small(high + 8, y + 4, said))
        else:
            parts.append(_small(low - 8, y + 4, said, "end"))
    parts.append(_small(LABEL, bottom + 26, "a dot per run; the bar and its figure are the median"))
    return _page(parts, bottom + 36, alt)


def _curves(one: Curves, above: int) -> tuple[list[str], int]:
    """What to draw below that height, and where it ends."""
    points = [point for line in one.lines for point in line]
    # A short phase at the end may have no point of its own.
    first = min(at for at, _ in points)
    last = max([at for at, _ in points] + [until for _, until, _ in one.shaded])
    spans = [(max(since, first), until, name) for since, until, name in one.shaded if until > first]
    marks = _marks(max(value for _, value in points))

    def x(value: float) -> float:
        return LEFT + (value - first) / max(last - first, 1e-9) * (WIDTH - LEFT - RIGHT)

    names, strips = _phases([(x(since), name) for since, _, name in spans], above)
    top = above + strips * STRIP
    bottom = top + PLOT

    def y(value: float) -> float:
        return bottom - value / marks[-1] * PLOT

    parts = [_title(one.title, one.note, above - 14)]
    for number, (since, until, _) in enumerate(spans):
        parts.append(
            f'<rect class="shade{" next" * (number % 2)}" x="{x(since):.1f}" y="{top}" '
            f'width="{x(until) - x(since):.1f}" height="{PLOT}"/>'
        )
    for at in dict.fromkeys(round(x(at), 1) for since, until, _ in spans for at in (since, until)):
        parts.append(_line("edge", at, top, at, bottom))
    parts += names
    for value in marks:
        parts.append(_line("grid" if value else "axis", LEFT, y(value), WIDTH - RIGHT, y(value)))
        parts.append(_small(LEFT - 8, y(value) + 4, f"{value:,g} {one.unit}".rstrip(), "end"))
    for at in _times(last - first):
        # One near the edge would not fit if it stood in the middle.
        told = _duration(at, last - first)
        anchor = "end" if x(first + at) + len(told) * LETTER / 2 > WIDTH else "middle"
        parts.append(_small(x(first + at), bottom + 16, told, anchor))
    for number in reversed(range(len(one.lines))):
        path = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in one.lines[number])
        parts.append(f'<polyline class="{KINDS[number % len(KINDS)]}" points="{path}"/>')
    parts += _legend(one.names, bottom + 16 + LEGEND)
    return parts, bottom + (LEGEND if one.names else 0)


def _phases(names: Sequence[tuple[float, str]], above: int) -> tuple[list[str], int]:
    """Names above the plot, each where its phase begins, in as many rows as keep them apart."""
    ends: list[float] = []
    placed: list[tuple[float, int, str]] = []
    for at, name in names:
        width = len(name) * LETTER
        at = min(at, WIDTH - RIGHT - width)
        row = next((row for row, end in enumerate(ends) if end < at), len(ends))
        ends[row:] = [at + width + LETTER, *ends[row + 1 :]]
        placed.append((at, row, name))
    return [_small(at, above + 9 + row * STRIP, name) for at, row, name in placed], len(ends)


def _legend(names: Sequence[str], y: int) -> Iterator[str]:
    at = float(LEFT)
    for number, name in enumerate(names):
        yield _line(KINDS[number % len(KINDS)], at, y - 4, at + 22, y - 4)
        yield _small(at + 28, y, name)
        at += 28 + len(name) * LETTER + 20


def _duration(seconds: float, of_s: float) -> str:
    """A point in time, in the unit that suits the whole."""
    return f"{seconds / 60:g} min" if of_s >= LONG_S else f"{seconds:g} s"


def _times(span_s: float) -> list[float]:
    """Round times from none to the whole."""
    unit = 60.0 if span_s >= LONG_S else 1.0
    step = next((one * unit for one in CLOCK if span_s <= TIMES * one * unit), 0.0)
    step = step or _step(span_s / unit, TIMES) * unit
    return [number * step for number in range(math.floor(span_s / step + 1e-9) + 1)]


def _marks(most: float) -> list[float]:
    """Round numbers in even steps, from zero to one that is not less."""
    step = _step(most, MARKS)
    return [number * step for number in range(max(1, math.ceil(most / step - 1e-9)) + 1)]


def _step(whole: float, parts: int) -> float:
    """A round number of which at most so many make up the whole."""
    if whole <= 0:
        return 1.0
    digit = 10.0 ** math.floor(math.log10(whole / parts))
    return next(
        times * digit for times in (1, 2, 5, 10) if whole <= parts * times * digit * 1.000001
    )


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _small(x: float, y: float, text: str, anchor: str = "start") -> str:
    return (
        f'<text class="faint small" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


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
