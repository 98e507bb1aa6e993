"""How replica groups look on a terminal. Called by `ops.replica`; it draws, and reads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from domicile.failover.view import GroupView, ServerView, bytes_text
from domicile.ops.group_commits import GroupHistory, loss_text

GAP = 2
"""Columns between two cells of a table."""

LEAST_WHY = 24
"""Columns that a reason gets at least, before other columns are left out."""

_COLUMNS = ("server", "role", "state", "position", "lag", "would lose", "lease", "address")
_MOST_USEFUL = ("server", "role", "state", "would lose", "lag", "lease", "position", "address")
"""The same columns: those at the end are left out first where the terminal is narrow."""

_LEFT = ("server", "role", "state", "address")


def groups_view(groups: Sequence[GroupView]) -> RenderableType:
    """All groups, one below the other."""
    parts: list[RenderableType] = []
    for group in groups:
        if parts:
            parts.append(Text(""))
        parts.append(group_panel(group))
    return Group(*parts)


def group_panel(view: GroupView) -> RenderableType:
    """One group: a line, the table of its servers, and what is to be said about it."""
    parts: list[RenderableType] = [_headline(view)]
    if view.moved:
        # Nothing else of it is true any more.
        return Group(*parts, _line("moved", view.moved, "bold red"))
    if view.servers:
        parts.append(_ServerTable(view.servers))
    for one in view.servers:
        if one.why:
            parts.append(_line("", f"{one.server}: {one.why}", "yellow"))
    parts += [_line("unreadable", one, "bold red") for one in view.unreadable]
    if view.waits:
        parts.append(_line("waits", view.waits, "yellow" if view.primary else "bold red"))
    if view.next_step:
        parts.append(_line("next", view.next_step, "bold"))
    if view.loss:
        parts.append(_line("loss", view.loss, "" if view.loss_bytes == 0 else "yellow"))
    for number, quorum in enumerate(view.quorums):
        parts.append(_line("" if number else "quorum", quorum))
    if view.since:
        parts.append(_line("since", f"{when(view.since)} UTC: {view.began_by}"))
    if view.why and view.why != view.began_by:
        parts.append(_line("last" if view.since else "why", view.why))
    return Group(*parts)


def _headline(view: GroupView) -> Text:
    line = Text(view.group, style="bold", overflow="fold")
    kind = ", ".join(one for one in (view.driver, view.mode) if one)
    line.append(f"  {kind}, " if kind else "  ", style="not bold")
    if view.served:
        line.append(f"serving epoch {view.epoch}: {view.primary}", style="not bold green")
        line.append(f" at {view.address}", style="not bold")
    else:
        phase = f"{view.phase} epoch {view.epoch}" if view.epoch else "not founded"
        line.append(f"{phase}: no primary accepts writes", style="bold red")
    if view.paused:
        line.append("  PAUSED", style="bold yellow")
    return line


def _line(name: str, text: str, style: str = "") -> RenderableType:
    grid = Table.grid(padding=(0, GAP, 0, 0))
    grid.add_column(width=max(6, len(name)))
    grid.add_column(overflow="fold")
    grid.add_row(Text(name), Text(text, style=style))
    return grid


class _ServerTable:
    """The servers in as many columns as the terminal has room for; no cell is ever broken."""

    def __init__(self, servers: Sequence[ServerView]) -> None:
        self._servers = servers

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = {name: [_cell(one, name) for one in self._servers] for name in _COLUMNS}
        room = options.max_width
        shown: list[str] = []
        for name in _MOST_USEFUL:
            room -= GAP + max(len(name), *(cell.cell_len for cell in cells[name]))
            if room >= 0 or name in _MOST_USEFUL[:3]:
                shown.append(name)
        columns = [name for name in _COLUMNS if name in shown]
        table = Table(
            box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, GAP - 1, 0, 0), header_style="bold"
        )
        for name in columns:
            justify = "left" if name in _LEFT else "right"
            table.add_column(name, justify=justify, no_wrap=name != "server", overflow="fold")  # type: ignore[arg-type]
        for row in zip(*(cells[name] for name in columns), strict=True):
            table.add_row(*row)
        yield table


def _cell(one: ServerView, name: str) -> Text:
    if name == "state":
        return Text(one.state, style="green" if one.healthy else "bold red")
    if name == "would lose" and one.would_lose:
        return Text(f"{one.would_lose:,}", style="yellow")
    return Text(
        {
            "server": one.server,
            "role": "" if one.role == "none" else one.role,
            # Of a server that is down its agent knows no position.
            "position": f"{one.epoch}:{one.offset:,}" if one.seen_up else "",
            "lag": _lag(one),
            "would lose": "" if one.would_lose is None else "0",
            "lease": "" if one.ttl_s is None else f"≤ {one.ttl_s:g} s",
            "address": one.address,
        }[name]
    )


def _lag(one: ServerView) -> str:
    if one.lag is None or one.role == "primary":
        return ""
    seconds = "" if one.lag_s is None or not one.lag else f", {one.lag_s:.1f} s"
    return f"{one.lag:,}{seconds}"


def when(at: str) -> str:
    """A stored wall time for people, without its offset: it is UTC."""
    try:
        return f"{datetime.fromisoformat(at).astimezone(UTC):%Y-%m-%d %H:%M:%S}"
    except ValueError:
        return at


class _EpochTable:
    """The epochs of a group; where the terminal is narrow, without the offsets."""

    def __init__(self, history: GroupHistory) -> None:
        self._epochs = history.epochs

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [
            (str(one.epoch), when(one.at), one.server,
             "" if one.begin is None else f"{one.begin:,}")
            for one in self._epochs
        ]  # fmt: skip
        names = ("epoch", "since (UTC)", "primary", "began at")
        widths = [max(map(len, (name, *cells))) for name, *cells in zip(names, *rows, strict=True)]
        shown = 4 if options.max_width - sum(widths) - GAP * len(names) >= LEAST_WHY else 3
        table = Table(
            box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, GAP - 1, 0, 0), header_style="bold"
        )
        for name in names[:shown]:
            justify = "right" if name in ("epoch", "began at") else "left"
            table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        table.add_column("why", overflow="fold")
        for row, one in zip(rows, self._epochs, strict=True):
            why = Text(one.why)
            for receipt in one.lost:
                why.append(("\n" if why else "") + f"lost {loss_text(receipt)}", style="yellow")
            table.add_row(*row[:shown], why)
        yield table


def history_view(history: GroupHistory) -> RenderableType:
    """The epochs of a group, then the operators' commands."""
    parts: list[RenderableType] = [Text(history.group, style="bold"), _EpochTable(history)]
    before = history.lost_before
    if before is not None:
        unknown = f", and {before.uncounted:,} that count no writes" if before.uncounted else ""
        parts.append(
            Text(
                f"lost before, up to epoch {before.until}: {before.receipts:,} receipts, "
                f"{bytes_text(before.size)}, {before.writes:,} writes{unknown}", style="yellow",
            )
        )  # fmt: skip
    for record in history.commands:
        reason = f" ({record.why})" if record.why else ""
        parts.append(Text(f"{record.at} {record.by}, {record.command}: {record.what}{reason}"))
    return Group(*parts)
