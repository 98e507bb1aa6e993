"""What the demo found, whether it keeps the promises, and how it looks on a terminal and in a file.

`ops.demo` calls it. It takes numbers and draws; it runs nothing.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

WIDTH = 80
"""Columns of the picture."""

_FONTS = "'DejaVu Sans Mono', Menlo, Consolas, 'Liberation Mono', monospace"


class Recovery(NamedTuple):
    """One act, what was done, and how long until the cluster served everything again."""

    act: str
    what: str
    seconds: float


class Line(NamedTuple):
    """One number of the report; `promise` is the required value, if there is one."""

    what: str
    value: int
    promise: str = ""
    kept: bool = True


MAYBE = (
    "Maybe executed: a node was killed or frozen while it had the message. Its answer is lost, so "
    "nobody can know whether the handler ran. The sender is told just that (I9): it looks whether "
    "the effect is there, or sends again with a key, which makes a repetition safe."
)


@dataclass(frozen=True)
class Report:
    """All numbers of one run."""

    seed: int
    nodes: int
    senders: int
    seconds: float
    asks: int
    outcomes: Counter[str]
    tells: int
    out_of_order: int
    restarted: int
    refusals: int
    late_replies: int
    violations: list[str]
    events: int
    recoveries: list[Recovery] = field(default_factory=list[Recovery])

    def lines(self) -> list[Line]:
        """The numbers with their promises, in reading order."""
        got = self.outcomes
        open_asks = self.asks - sum(got.values())
        lines = [
            Line("asks sent", self.asks),
            Line("answered", got["answered"], "> 0", got["answered"] > 0),
            Line("not executed: safe to send again", got["not executed"]),
            Line("maybe executed: nobody can know", got["maybe executed"]),
            Line("failed in the handler", got["failed"], "0", not got["failed"]),
            Line("asks without any outcome", open_asks, "0", not open_asks),
            Line("tells sent", self.tells),
            Line("messages out of order or doubled", self.out_of_order, "0", not self.out_of_order),
            Line("entities restarted empty: they keep no journal", self.restarted),
            Line(
                "replies handed to the kernel past the deadline", self.late_replies, "0",
                not self.late_replies,
            ),
            Line("fences and refusals after the thaw", self.refusals, "> 0", self.refusals > 0),
            Line(
                f"violations found in {self.events:,} events", len(self.violations), "0",
                not self.violations,
            ),
        ]  # fmt: skip
        return lines

    def broken(self) -> list[str]:
        """The promises that were not kept; empty if all were."""
        return [
            f"{line.what}: {line.value:,}, must be {line.promise}"
            for line in self.lines()
            if not line.kept
        ]


def report_view(report: Report) -> RenderableType:
    """The report for people."""
    numbers = _table()
    numbers.add_column("what happened")
    numbers.add_column("number", justify="right")
    numbers.add_column("must be", justify="right")
    numbers.add_column("")
    for line in report.lines():
        mark = Text("kept" if line.kept else "BROKEN", style="green" if line.kept else "bold red")
        numbers.add_row(line.what, f"{line.value:,}", line.promise, mark if line.promise else "")
    acts = _table()
    acts.add_column("act")
    acts.add_column("what was done")
    acts.add_column("all well after", justify="right")
    for recovery in report.recoveries:
        acts.add_row(recovery.act, recovery.what, f"{recovery.seconds:.2f} s")
    broken = report.broken()
    verdict = Text("Every promise was kept.", style="bold green")
    if broken:
        verdict = Text(f"{len(broken)} promises were broken.", style="bold red")
    head = Text(
        f"{report.nodes} nodes, {report.senders} senders, {report.seconds:.0f} s of load, "
        f"seed {report.seed}"
    )
    parts: list[RenderableType] = [head, "", acts, "", numbers, ""]
    if report.outcomes["maybe executed"]:
        parts += [Text(MAYBE, style="dim"), ""]
    return Padding(Group(*parts, verdict), (0, 1))


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")


def write_svg(view: RenderableType, path: Path, title: str) -> None:
    """Draw a view as it looks on a terminal; the file needs no other file or network."""
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor",
        legacy_windows=False, no_color=False,
    )  # fmt: skip
    console.print(view)
    drawn = console.export_svg(title=title, theme=SVG_EXPORT_THEME, unique_id="domicile")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(own_fonts(drawn), encoding="utf-8")


def own_fonts(svg: str) -> str:
    """The SVG without fonts from the network, which image viewers do not fetch."""
    svg = re.sub(r"@font-face\s*\{.*?\}\s*", "", svg, flags=re.DOTALL)
    return re.sub(r"font-family:\s*(?:Fira Code|arial)[^;]*;", f"font-family: {_FONTS};", svg)
