"""Says on a terminal that a store lets a command wait.

Used by the commands that read a store. It changes no answer, and says nothing to a pipe or a file.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Generator
from contextlib import contextmanager

import typer

from domicile.backends.registry import shown_url

SLOW_S = 1.0
"""Seconds after which somebody at a terminal wants to know what is going on."""


@contextmanager
def told_if_slow(url: str) -> Generator[None]:
    """Around calls of a store: a line on standard error if they take longer than a moment."""

    def tell() -> None:
        if _at_terminal():
            typer.echo(f"waiting for an answer of {shown_url(url)}", err=True)

    timer = asyncio.get_running_loop().call_later(SLOW_S, tell)
    try:
        yield
    finally:
        timer.cancel()


def _at_terminal() -> bool:
    return sys.stderr.isatty()
