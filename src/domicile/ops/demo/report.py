"""What the demo found, whether it keeps the promises, and how it looks on a terminal and in a file.

`ops.demo.run` calls it. It takes numbers and draws; it runs nothing.
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

from domicile.ops.demo.ledger import BankAudit

WIDTH = 80
"""Columns of the picture."""

FIGURE = 52
"""Columns for a figure's name and what it says: more would part it from its number."""

_FONTS = "'DejaVu Sans Mono', Menlo, Consolas, 'Liberation Mono', monospace"


class Recovery(NamedTuple):
    """One act, what was done, and how long until the cluster served everything again."""

    act: str
    what: str
    seconds: float


class Line(NamedTuple):
    """One number of the report and what it says; `promise` is the required value, if any."""

    what: str
    value: int
    promise: str = ""
    kept: bool = True
    why: str = ""


@dataclass(frozen=True)
class Report:
    """All numbers of one run."""

    seed: int
    nodes: int
    senders: int
    seconds: float
    asks: int
    reads: int
    repeats: Counter[str]
    had_run: int
    twice: int
    same: int
    failed: int
    unanswered: int
    refused: int
    stale: int
    audit: BankAudit
    refusals: int
    late_replies: int
    violations: list[str]
    events: int
    recoveries: list[Recovery] = field(default_factory=list[Recovery])

    def lines(self) -> list[Line]:
        """The numbers with their promises, in reading order."""
        return [line for _, lines in self.parts() for line in lines]

    def parts(self) -> list[tuple[str, list[Line]]]:
        """The numbers in parts, each with its title."""
        return [
            ("what the senders saw", self._load()),
            ("the senders' ledger beside accounts and journal", self._books()),
            ("the cluster", self._cluster()),
        ]

    def _load(self) -> list[Line]:
        answered = self.audit.answered
        return [
            Line(
                "transfers answered", answered, "> 0", answered > 0,
                "two asks, each with a key: take, then give coins",
            ),
            Line("transfers refused", self.refused, why="the account had too little"),
            Line("balance reads answered", self.reads),
            Line(
                "repeats after 'not executed'", self.repeats["not executed"],
                why="the ask did not run and never will",
            ),
            Line(
                "repeats after 'maybe executed'", self.repeats["maybe executed"],
                why="a node was killed or frozen with the ask: nobody can know whether the handler "
                "ran (I9); the key makes the repeat safe",
            ),
            Line(
                "had run, and did not run again", self.had_run,
                why="the repeat got the reply stored with its key",
            ),
            Line(
                "repeats after an answer, same reply", self.same, f"{self.twice:,}",
                self.same == self.twice, "sent on purpose, to try the key",
            ),
            _zero(f"asks never answered, of {self.asks:,}", self.unanswered),
            _zero("asks that failed in the handler", self.failed),
        ]  # fmt: skip

    def _books(self) -> list[Line]:
        audit = self.audit
        return [
            Line(
                "coins in all accounts", audit.told, f"{audit.coins:,}", audit.told == audit.coins,
                "as the accounts tell at the end",
            ),
            Line(
                "answered transfers in the journal, once", audit.answered - len(audit.lost),
                f"{audit.answered:,}", not audit.lost, "looked up one by one in its file",
            ),
            _zero(
                "bookings doubled, halved or not ordered", len(audit.wrong),
                "among all in the journal",
            ),
            _zero(
                "accounts that differ from their bookings", len(audit.differing),
                "the balance told, and the sum in the journal",
            ),
            _zero("balances below zero", len(audit.overdrawn), "after any booking"),
            _zero(
                "reads that missed an answered transfer", self.stale,
                "answered before the read was sent",
            ),
        ]  # fmt: skip

    def _cluster(self) -> list[Line]:
        return [
            _zero(
                "replies sent past the deadline", self.late_replies,
                "handed over when the lease could be over (L3)",
            ),
            Line(
                "fences and refusals after the thaw", self.refusals, "> 0", self.refusals > 0,
                "of the frozen node; else the freeze shows nothing",
            ),
            _zero(
                f"violations found in {self.events:,} events", len(self.violations),
                "by the checkers that judge simulated runs",
            ),
        ]  # fmt: skip

    def broken(self) -> list[str]:
        """The promises that were not kept; empty if all were."""
        return [
            f"{line.what}: {line.value:,}, must be {line.promise}"
            for line in self.lines()
            if not line.kept
        ]


def _zero(what: str, value: int, why: str = "") -> Line:
    return Line(what, value, "0", not value, why)


def report_view(report: Report) -> RenderableType:
    """The report for people."""
    numbers = _table()
    numbers.add_column("what happened", max_width=FIGURE)
    numbers.add_column("number", justify="right")
    numbers.add_column("must be", justify="right")
    numbers.add_column("")
    for title, lines in report.parts():
        if numbers.row_count:
            numbers.add_row("")
        numbers.add_row(Text(title, style="bold"))
        for line in lines:
            style = "green" if line.kept else "bold red"
            mark = Text("kept" if line.kept else "BROKEN", style=style)
            what = Group(line.what, *_explained(line))
            numbers.add_row(what, f"{line.value:,}", line.promise, mark if line.promise else "")
    acts = _table()
    acts.add_column("act")
    acts.add_column("what was done")
    acts.add_column("all well after", justify="right")
    for recovery in report.recoveries:
        acts.add_row(recovery.act, recovery.what, f"{recovery.seconds:.2f} s")
    head = Text(
        f"{report.nodes} nodes, {report.senders} senders, {report.seconds:.0f} s of load, "
        f"seed {report.seed}"
    )
    return Padding(Group(head, "", acts, "", numbers, "", *_verdict(report)), (0, 1))


def _explained(line: Line) -> list[RenderableType]:
    return [Padding(Text(line.why, style="dim"), (0, 0, 0, 2))] if line.why else []


def _verdict(report: Report) -> list[RenderableType]:
    broken = report.broken()
    if not broken:
        coins = f"All {report.audit.coins:,} coins are there, and every answered transfer, once."
        return [
            Text(coins, style="bold green"),
            Text("Every promise was kept.", style="bold green"),
        ]
    said: list[RenderableType] = [Text(f"{len(broken)} promises were broken.", style="bold red")]
    if report.audit.faults:
        said.insert(0, Text("THE BANK'S BOOKS ARE WRONG.", style="bold white on red"))
    return said


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
