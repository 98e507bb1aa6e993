"""How status and places look on a terminal; plain text if there is none.

Called by the commands of `ops`. It draws what `ops.status` computed and must read nothing itself.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from domicile.errors import StoreError
from domicile.ops.operator_commits import AuditRecord
from domicile.ops.status import (
    ClusterStatus,
    EntityPlace,
    NoCluster,
    NodeSeen,
    OwnersLostSeen,
    QuarantineSeen,
    TypeGapSeen,
)
from domicile.ops.stuck_seen import StuckSeen

WIDE = 160
"""Columns without a terminal: lines of a file or pipe are not folded."""

MOST_LOSING = 8
"""I6: shards that lose owners and are named in text. JSON has all."""

GAP = 2
"""Columns between two cells of a table."""

PART = "part"
"""The column, without a title, that says which part a node takes in coordinating."""

_NODE_COLUMNS = (
    "node", "address", "status", "version", "shards", "residents", "turns/s", "queued", "lag",
    "lease", "age", PART,
)  # fmt: skip
_MOST_USEFUL = (
    "node", "status", "shards", "residents", "turns/s", "lag", "lease", "address", PART,
    "version", "age", "queued",
)  # fmt: skip
"""The same columns: those at the end are left out first where the terminal is narrow."""

_NUMBERED = re.compile(r".+?:\d+ ")
_KINDS = {"waits": "waits", "runs": "holds the loop", "blocking": "in a thread"}
_STANDING = {"up": "green", "leaving": "yellow", "draining": "yellow"}


class ViewPrinter:
    """Prints views; each replaces the last one if `live` and there is a terminal."""

    def __init__(self, live: bool) -> None:
        self._console = Console(highlight=False)
        if not self._console.is_terminal:
            self._console.width = WIDE
        self._live = Live(console=self._console, auto_refresh=False) if live else None
        if self._live is not None and not self._console.is_terminal:
            self._live = None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, view: RenderableType) -> None:
        """Show a view now."""
        if self._live is not None:
            self._live.update(view, refresh=True)
        else:
            self._console.print(view)


async def keep_showing(
    look: Callable[[], Awaitable[RenderableType]],
    shown: ViewPrinter,
    every_s: float,
    away: Callable[[], None],
) -> None:
    """Show what `look` sees, again and again.

    While the store does not answer, what was seen last stays, with a line that says so: a watch is
    for the time in which something fails. `away` is called then. The first look must succeed.
    """
    seen: RenderableType | None = None
    seen_at, said = datetime.now(), ""
    while True:
        asking = asyncio.ensure_future(look())
        try:
            while not asking.done():
                await asyncio.wait((asking,), timeout=every_s)
                if not asking.done() and seen is not None:
                    away()
                    shown.show(_stale(seen, seen_at, said or "the store does not answer"))
            try:
                seen, seen_at, said = asking.result(), datetime.now(), ""
                shown.show(seen)
            except (StoreError, NoCluster) as error:
                if seen is None:
                    raise
                said = str(error)
                away()
                shown.show(_stale(seen, seen_at, said))
        finally:
            asking.cancel()
        await asyncio.sleep(every_s)


def _stale(seen: RenderableType, at: datetime, why: str) -> RenderableType:
    age = age_text((datetime.now() - at).total_seconds())
    text = f"NOT CURRENT: all of this was so at {at:%H:%M:%S}, {age} ago: {why}"
    return Group(seen, Text(""), Text(text, style="bold red", overflow="fold"))


def status_view(status: ClusterStatus) -> RenderableType:
    """The whole status: a line, then the tables that are not empty."""
    parts: list[RenderableType] = [_headline(status)]
    if status.moved:
        parts.append(Text(f"moved    {status.moved}", style="bold red", overflow="fold"))
    if status.nodes or not status.moved:
        parts.append(_nodes(status))
    parts.append(_roles(status))
    if status.clients:
        ages = ", ".join(
            f"{client.incarnation[:8]} ({client.status}{_after_comma(client.age_s)})"
            for client in status.clients
        )
        parts.append(Text(f"clients  {ages}"))
    if status.drains:
        parts.append(Text(f"drains   {', '.join(status.drains)}"))
    if status.wishes:
        wished = ", ".join(f"{one.role}/{one.shard} to {one.node}" for one in status.wishes)
        parts.append(Text(f"wishes   {wished}"))
    if status.quarantined:
        parts.append(_quarantined(status.quarantined))
    if status.losing_owners:
        parts.append(_losing_owners(status.losing_owners))
    parts += [_type_gap(gap) for gap in status.type_gaps]
    if status.stuck:
        parts.append(stuck_view(status.stuck, status.more_stuck))
    if status.target is not None:
        parts.append(Text(f"target   {status.target}"))
    if status.audit is not None:
        parts.append(Text(f"last command  {_audit(status.audit)}"))
    return Group(*parts)


def _type_gap(gap: TypeGapSeen) -> Text:
    text = f"types    {gap.type} (role {gap.role}) is missing at {', '.join(gap.missing_at)}"
    if not gap.present_at:
        text += ": no node has it"
    if gap.waiting:
        verb = "waits" if gap.waiting == 1 else "wait"
        text += f"; {count(gap.waiting, 'shard')} {verb} for a node that has it"
    return Text(text, style="bold red" if gap.waiting else "yellow", overflow="fold")


def _quarantined(quarantined: Sequence[QuarantineSeen]) -> RenderableType:
    """What is put away, a line for each, and what an operator can do."""
    lines: list[Text] = []
    for one in quarantined:
        line = Text("quarantined  " if not lines else " " * 13, style="bold red", overflow="fold")
        shard = f"{one.role}/{one.shard}"
        line.append(shard if one.type is None else f"{one.type}/{one.id}")
        where = "" if one.type is None else f" ({shard})"
        line.append(
            f"{where}: {one.deaths} owners died, tried again after {one.pause_s:g} s; "
            f"to serve it now: domicile unquarantine {shard}",
            style="not bold red",
        )
        lines.append(line)
    return Group(*lines)


def _losing_owners(losing: Sequence[OwnersLostSeen]) -> RenderableType:
    """The shards that lose owner after owner, the worst first."""
    worst = sorted(losing, key=lambda one: (-one.deaths, one.role, one.shard))[:MOST_LOSING]
    named = ", ".join(f"{one.role}/{one.shard} ({one.deaths})" for one in worst)
    more = f" and {len(losing) - len(worst)} more" if len(losing) > len(worst) else ""
    text = Text("losing owners  ", style="bold red", overflow="fold")
    return text.append(
        f"{named}{more}: these died in a row, and no entity can be blamed yet; see their logs",
        style="not bold red",
    )


def _audit(record: AuditRecord) -> str:
    why = f" ({record.why})" if record.why else ""
    return f"{record.at} {record.by}, {record.command}: {record.what}{why}"


def stuck_view(stuck: Sequence[StuckSeen], more: int = 0, *, whole: bool = False) -> RenderableType:
    """Late handlers: a line for each, with its current place or its whole stack."""
    lines: list[Text] = []
    for one in stuck:
        line = Text("stuck    " if not lines else "         ", style="bold red", overflow="fold")
        line.append(f"{one.type}/{one.id} {one.handler}")
        line.append(
            f" at {one.node} ({one.role}/{one.shard}): {_KINDS.get(one.kind, one.kind)} for "
            f"{age_text(one.age_s)}, {one.queue} queued",
            style="not bold red",
        )
        if not whole and one.stack:
            line.append(f", {_own_line(one.stack)}", style="not bold red")
        lines.append(line)
        if whole:
            lines += [
                Text(f"           {step}", style="dim", overflow="fold") for step in one.stack
            ]
    if more:
        lines.append(Text(f"         and {more} more", style="bold red"))
    return Group(*lines)


def _own_line(stack: Sequence[str]) -> str:
    """The innermost line of the user's own code, as far as the stored lines show it.

    Lines of the standard library have no number. The first of the others is the handler's own.
    Lines of its package, or of a module next to it, are not those of an installed package.
    """
    numbered = [line for line in stack if _NUMBERED.match(line)]
    if not numbered:
        return stack[-1]
    home = numbered[0].partition("/")[0]
    return [line for line in numbered if line.partition("/")[0] in (home, line)][-1]


def place_view(place: EntityPlace) -> RenderableType:
    """The home of one entity."""
    state = Text(place.state, style="green" if place.served else "bold red")
    if place.to is not None:
        state.append(f" to {place.to}")
    owner = "nobody"
    if place.incarnation is not None:
        owner = f"{place.node or 'unknown'} ({place.incarnation[:8]})"
    table = Table.grid(padding=(0, 2))
    table.add_row("entity", f"{place.type}/{place.id}")
    table.add_row("shard", f"{place.role}/{place.shard} of {place.shards}")
    table.add_row("state", state)
    table.add_row("epoch", str(place.epoch))
    table.add_row("owner", owner)
    table.add_row("address", place.address or "none: the owner's record is gone")
    return table


def age_text(seconds: float | None) -> str:
    """An age for people: `42 s`, `17 min`, `3.5 h`, `12 d`."""
    if seconds is None:
        return "age unknown"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6_000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 360_000 else f"{seconds / 86400:.0f} d"


def _after_comma(seconds: float | None) -> str:
    """An age at the end of a list, if it is known: only processes of one machine show theirs."""
    return "" if seconds is None else f", {age_text(seconds)}"


def count(number: int, one: str, many: str = "") -> str:
    """A number of things: `1 shard`, `2 shards`, `1,000 entities`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _headline(status: ClusterStatus) -> Text:
    line = Text(f"{status.cluster} in {status.store}, revision {status.revision}: ")
    if status.served:
        return line.append("every shard is served", style="green")
    if not status.roles:
        return line.append("no shards yet: no node has joined", style="yellow")
    missing = sum(role.shards - role.serving for role in status.roles)
    verb = "is" if missing == 1 else "are"
    return line.append(f"{count(missing, 'shard')} {verb} not served", style="bold red")


def _nodes(status: ClusterStatus) -> RenderableType:
    if not status.nodes:
        return Text("no node is registered: start one with `domicile run`", style="yellow")
    parts: list[RenderableType] = [_NodeTable(status)]
    silent: dict[str, list[str]] = {}
    for node in status.nodes:
        if node.unanswered:
            silent.setdefault(node.unanswered, []).append(node.node)
    for reason, names in silent.items():
        why = (
            "no answer: it hangs, or can't be reached from here"
            if reason == "no answer"
            else reason
        )
        parts.append(Text(f"no figures of {', '.join(names)}: {why}", style="yellow"))
    return Group(*parts)


class _NodeTable:
    """The nodes in as many columns as the terminal has room for; no cell is ever broken."""

    def __init__(self, status: ClusterStatus) -> None:
        self._status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        nodes = self._status.nodes
        cells = {name: [_cell(node, name) for node in nodes] for name in _NODE_COLUMNS}
        # A column that is empty in all rows would only take room from the others.
        used = [name for name in _NODE_COLUMNS if any(cell.plain for cell in cells[name])]
        room = options.max_width
        shown: list[str] = []
        for name in sorted(used, key=_MOST_USEFUL.index):
            room -= GAP + max(len(name), *(cell.cell_len for cell in cells[name]))
            # Whatever the width, a row says which node it is and how it stands.
            if room >= 0 or name in _MOST_USEFUL[:2]:
                shown.append(name)
        columns = [name for name in used if name in shown]
        table = _table(*("" if name == PART else name for name in columns))
        for column in table.columns[1:]:
            column.no_wrap = True
        for row in zip(*(cells[name] for name in columns), strict=True):
            table.add_row(*row)
        yield table
        if PART in used and PART not in shown:
            for part in dict.fromkeys(_part(node) for node in nodes if _part(node)):
                names = ", ".join(node.node for node in nodes if _part(node) == part)
                yield Text(f"{part}  {names}")


def _cell(node: NodeSeen, name: str) -> Text:
    """What a column shows of a node; empty if that is not known."""
    if name == "status":
        return Text(node.status, style=_STANDING.get(node.status, "bold red"))
    if name in ("residents", "turns/s", "queued") and node.manager:
        return Text("")
    return Text(
        {
            "node": node.node,
            "address": node.address,
            "version": node.version,
            "shards": "" if node.manager else _shards(node),
            "residents": _number(node.residents),
            "turns/s": _number(node.turns_per_s),
            "queued": _number(node.queued),
            "lag": "" if node.loop_lag_s is None else f"{node.loop_lag_s * 1000:,.0f} ms",
            "lease": "" if node.lease_left_s is None else f"{node.lease_left_s:.1f} s",
            "age": "" if node.age_s is None else age_text(node.age_s),
            PART: _part(node),
        }[name]
    )


def _number(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}"


def _part(node: NodeSeen) -> str:
    """A node's part in coordinating."""
    if node.manager:
        return "manager, coordinator" if node.coordinator else "manager, standby"
    return "coordinator" if node.coordinator else "" if node.candidate else "no candidate"


def _shards(node: NodeSeen) -> str:
    return f"{node.serving} + {node.moving}" if node.moving else str(node.serving)


def _roles(status: ClusterStatus) -> RenderableType:
    poisoned = ["quarantined"] if status.quarantined else []
    table = _table("role", "shards", "serving", "moving", "owner gone", "free", *poisoned)
    for role in status.roles:
        numbers = [role.shards, role.serving, role.moving, role.lost, role.free]
        numbers += [role.quarantined] if poisoned else []
        table.add_row(role.role, *map(str, numbers))
    return table


def _table(*names: str) -> Table:
    padding = (0, GAP - 1, 0, 0)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=padding, header_style="bold")
    for name in names:
        right = name not in ("node", "address", "status", "version", "role", "")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    return table
