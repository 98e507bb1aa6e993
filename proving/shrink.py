"""A failing seed made small: which of its strikes are needed for it to fail the same way.

Called by the campaign for seeds that break a rule. Delta debugging: leave out ever smaller parts
of what was done to the cluster, and keep leaving out what is not missed. It never changes what
the remaining strikes draw, so the result is repeated by naming them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOST_RUNS = 60
MOST_S = 60.0


@dataclass(frozen=True)
class Shrunk:
    """What is left, and how it was found."""

    keep: tuple[int, ...]
    runs: int
    complete: bool
    """Whether no single one of them can be left out; else runs or time ended first."""


def shrink(
    strikes: Sequence[int],
    fails: Callable[[tuple[int, ...]], bool],
    *,
    most_runs: int = MOST_RUNS,
    most_s: float = MOST_S,
    now: Callable[[], float] = time.monotonic,
) -> Shrunk:
    """The fewest strikes found that still fail; `fails` runs the seed with those alone."""
    attempt = _Attempts(fails, most_runs, now() + most_s, now)
    keep = tuple(strikes)
    try:
        if keep and attempt(()):
            return Shrunk((), attempt.runs, True)
        parts = 2
        while len(keep) > 1:
            smaller = _reduce(keep, parts, attempt)
            if smaller is not None:
                parts = max(2, min(parts - 1, len(smaller)))
                keep = smaller
            elif parts == len(keep):
                break
            else:
                parts = min(len(keep), 2 * parts)
    except _Enough:
        return Shrunk(attempt.best or keep, attempt.runs, False)
    return Shrunk(keep, attempt.runs, True)


def _reduce(
    keep: tuple[int, ...], parts: int, fails: Callable[[tuple[int, ...]], bool]
) -> tuple[int, ...] | None:
    """A part that fails by itself, or all but a part; None if every part is needed."""
    size, rest = divmod(len(keep), parts)
    chunks: list[tuple[int, ...]] = []
    start = 0
    for index in range(parts):
        end = start + size + (index < rest)
        chunks.append(keep[start:end])
        start = end
    candidates = list(chunks) if parts == 2 else []
    if parts > 2 or size > 1:
        candidates += [tuple(n for n in keep if n not in chunk) for chunk in chunks]
    for candidate in candidates:
        if len(candidate) < len(keep) and fails(candidate):
            return candidate
    return None


class _Enough(Exception):
    """Runs or time are used up."""


class _Attempts:
    """Runs of subsets, each once, within bounds (I6)."""

    def __init__(
        self,
        fails: Callable[[tuple[int, ...]], bool],
        most_runs: int,
        deadline: float,
        now: Callable[[], float],
    ) -> None:
        self._fails = fails
        self._most_runs = most_runs
        self._deadline = deadline
        self._now = now
        self._known: dict[tuple[int, ...], bool] = {}
        self.runs = 0
        self.best: tuple[int, ...] | None = None

    def __call__(self, subset: tuple[int, ...]) -> bool:
        """Whether a subset fails."""
        if subset not in self._known:
            if self.runs >= self._most_runs or self._now() >= self._deadline:
                raise _Enough
            self.runs += 1
            self._known[subset] = self._fails(subset)
            if self._known[subset]:
                self.best = subset
        return self._known[subset]
