"""Work that can pause, so that nothing else waits long for it (I8)."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

PAUSE = 2_048
"""Shards, or as many other small things, that are handled between two pauses."""

T = TypeVar("T")
Slices = Generator[int, None, T]
"""Work that can pause. Each number says about how many shards it has handled since the last."""


def at_once(work: Slices[T]) -> T:
    """The result of work, without pauses."""
    while True:
        try:
            next(work)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
