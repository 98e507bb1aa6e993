"""What a view does while it is shown again and again."""

from __future__ import annotations

import asyncio
import io

import pytest
from rich.console import Console, RenderableType
from rich.text import Text

from domicile.errors import StoreUnavailable
from domicile.ops.show import ViewPrinter, keep_showing

EVERY_S = 0.01


class Recorder(ViewPrinter):
    """Takes views instead of a terminal."""

    def __init__(self) -> None:
        self.views: list[str] = []
        self.came = asyncio.Event()

    def show(self, view: RenderableType) -> None:
        console = Console(file=io.StringIO(), width=160)
        with console.capture() as captured:
            console.print(view)
        self.views.append(" ".join(captured.get().split()))
        self.came.set()


class Over(Exception):
    """The end of a test."""


def test_a_watch_goes_on_while_the_store_is_away_and_says_so() -> None:
    """Whoever watches does so because something fails."""

    async def scenario() -> None:
        shown, away, looks = Recorder(), list[bool](), 0

        async def look() -> RenderableType:
            nonlocal looks
            looks += 1
            if looks == 2:
                # As a call that hangs: what was seen before stays, and is marked.
                shown.came.clear()
                await shown.came.wait()
                raise StoreUnavailable("the store is locked")
            if looks == 4:
                raise Over
            return Text(f"view {looks}")

        with pytest.raises(Over):
            async with asyncio.timeout(60):
                await keep_showing(look, shown, EVERY_S, lambda: away.append(True))
        first, *stale, again = shown.views
        assert (first, again) == ("view 1", "view 3")
        assert stale[0].startswith("view 1 NOT CURRENT: all of this was so at ")
        assert stale[0].endswith("ago: the store does not answer")
        assert stale[-1].endswith("ago: the store is locked")
        assert len(away) == len(stale) >= 2

    asyncio.run(scenario())


def test_a_store_that_is_away_from_the_start_is_an_error() -> None:
    async def look() -> RenderableType:
        raise StoreUnavailable("nobody is there")

    async def scenario() -> None:
        with pytest.raises(StoreUnavailable, match="nobody is there"):
            await keep_showing(look, Recorder(), EVERY_S, lambda: None)

    asyncio.run(scenario())
