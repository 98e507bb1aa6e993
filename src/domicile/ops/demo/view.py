"""The demo while it runs: lines, or a picture that changes in place.

`ops.demo.run` calls it. It shows what it is given and decides nothing. The bars count shards as the
store has them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

BAR = 32
RATE_EVERY_S = 2.0


@dataclass(frozen=True)
class DemoMoment:
    """One moment of the cluster."""

    shards: int
    nodes: list[tuple[str, str, int]] = field(default_factory=list[tuple[str, str, int]])
    """Name, condition (`up`, `frozen`, `gone`...) and number of shards at home."""
    rate: float = 0.0
    transfers: int = 0
    reads: int = 0
    repeats: int = 0


class Screen(Protocol):
    """Shows the demo. Entered once."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def say(self, text: str) -> None:
        """Show an event."""
        ...

    def show(self, shown: DemoMoment) -> None:
        """Show the current state."""
        ...


class Lines:
    """Prints one line after the other, for pipes and logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._rated = self._began

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def say(self, text: str) -> None:
        """Print the event."""
        self._rated = time.monotonic()
        self._line(text)

    def show(self, shown: DemoMoment) -> None:
        """Print the state, from time to time."""
        now = time.monotonic()
        if now - self._rated >= RATE_EVERY_S:
            self._rated = now
            homes = ", ".join(f"{name} {many}" for name, _, many in shown.nodes if many)
            self._line(f"  {shown.rate:.0f} asks/s; shards: {homes or 'none served'}")

    def _line(self, text: str) -> None:
        passed_s = time.monotonic() - self._began
        self._console.print(f"{passed_s:6.1f} s  {text}", soft_wrap=True)
        self._console.file.flush()


class DemoPicture:
    """Bars that change in place, and the acts so far below them."""

    def __init__(self, console: Console) -> None:
        self._began = time.monotonic()
        self._acts: list[tuple[float, str]] = []
        self._shown = DemoMoment(0)
        self._live = Live(self._view(), console=console, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """Add the event below the earlier ones."""
        self._acts.append((time.monotonic() - self._began, text))
        self._live.update(self._view())

    def show(self, shown: DemoMoment) -> None:
        """Replace the state shown before."""
        self._shown = shown
        self._live.update(self._view())

    def _view(self) -> RenderableType:
        acts = Table.grid(padding=(0, 2))
        acts.add_column(justify="right", style="dim")
        for at, text in self._acts:
            acts.add_row(f"{at:.1f} s", text)
        return Group(bars(self._shown), acts)


def bars(shown: DemoMoment) -> RenderableType:
    """Nodes and their shards."""
    table = Table.grid(padding=(0, 2))
    widest = max([shown.shards, 1])
    for name, state, many in shown.nodes:
        style = {"up": "green", "frozen": "cyan"}.get(state, "red")
        bar = Text("█" * round(BAR * many / widest), style=style)
        table.add_row(name, Text(state, style=style), Text(f"{many:3d}"), bar)
    foot = Text(
        f"{shown.rate:.0f} asks/s, {shown.transfers:,} transfers, {shown.reads:,} reads, "
        f"{shown.repeats:,} repeats"
    )
    return Panel(Group(table, foot), title="domicile demo", box=box.ROUNDED, expand=False)
