"""The chart of a report: bars as plain SVG, readable on light and on dark pages."""

from __future__ import annotations

from typing import NamedTuple
from xml.sax.saxutils import escape

from proving.benchmarks.report import OURS, Report, full_title, number, row

WIDTH, LEFT, LABEL, VALUE = 760, 8, 164, 92
LINE, BAR, GAP, HEAD = 24, 15, 20, 34

STYLE = """\
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f }
.paper { fill: #fff }
.title { font-weight: 600 }
.faint { fill: #57606a }
.peer { fill: #afb8c1 }
.kin { fill: #6cb6a6 }
.ours { fill: #0f766e }
@media (prefers-color-scheme: dark) {
  .paper { fill: #16181c }
  text { fill: #e6edf3 }
  .faint { fill: #9198a1 }
  .peer { fill: #4b535d }
  .kin { fill: #2f7f73 }
  .ours { fill: #2dd4bf }
}"""


class Panel(NamedTuple):
    """One question, answered by every system."""

    title: str
    note: str
    what: str
    depth: int
    name: str
    scale: float
    less: bool
    """Whether less is better."""


PANELS = (
    Panel("Remote asks per second", "100 in flight", "ask", 100, "per_s", 1.0, False),
    Panel("Remote tells per second", "1,000 in flight", "tell", 1_000, "per_s", 1.0, False),
    Panel("Round trip of a remote ask, µs", "alone, median; shorter is better", "ask", 1, "p50_s",
          1e6, True),
)  # fmt: skip


def draw(report: Report) -> str:
    """The whole picture."""
    parts: list[str] = []
    y = 8
    for panel in PANELS:
        found = values(report, panel)
        if not found:
            continue
        y += HEAD
        parts.append(
            f'<text x="{LEFT}" y="{y - 11}"><tspan class="title">{escape(panel.title)}</tspan>'
            f'<tspan class="faint" dx="8">{escape(panel.note)}</tspan></text>'
        )
        longest = max(value for _, _, value in found)
        for system, title, value in found:
            parts += _bar(y, system, title, value, value / longest)
            y += LINE
        y += GAP
    height = y - GAP + 8
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{escape(alt(report))}">'
    )
    paper = f'<rect class="paper" width="{WIDTH}" height="{height}" rx="6"/>'
    return "\n".join([head, f"<style>\n{STYLE}\n</style>", paper, *parts, "</svg>"]) + "\n"


def values(report: Report, panel: Panel) -> list[tuple[str, str, float]]:
    """Key, title and value of every system that has one, the best first."""
    found: list[tuple[str, str, float]] = []
    for one in report["systems"]:
        cell = row(report, "remote", panel.what, panel.depth, one["key"])
        if cell is not None:
            found.append((one["key"], full_title(one), cell[panel.name] * panel.scale))
    return sorted(found, key=lambda each: each[2], reverse=not panel.less)


def alt(report: Report) -> str:
    """In words."""
    told = values(report, PANELS[0])
    rates = ", ".join(f"{title} {number(value)}" for _, title, value in told)
    return f"Remote asks per second at 100 in flight: {rates}"


def _bar(y: int, system: str, title: str, value: float, share: float) -> list[str]:
    kind = "ours" if system == OURS else "kin" if system.startswith(f"{OURS}-") else "peer"
    width = max(1.0, share * (WIDTH - LABEL - VALUE))
    base = y + BAR - 3
    weight = ' class="title"' if system == OURS else ""
    return [
        f'<text x="{LABEL - 10}" y="{base}" text-anchor="end"{weight}>{escape(title)}</text>',
        f'<rect class="{kind}" x="{LABEL}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2"/>',
        f'<text x="{LABEL + width + 8:.1f}" y="{base}"{weight}>{number(value)}</text>',
    ]
