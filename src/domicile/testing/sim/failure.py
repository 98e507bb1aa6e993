"""What a failing seed of a `@simulated` test leaves: how to repeat it, and its timeline.

Used by `simulated` alone. It adds a note to the error and writes two files. Whatever goes wrong
here must not hide the error of the test.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from domicile.testing.checkers.verdict import Violation
from domicile.testing.history import History
from domicile.testing.timeline.picture import draw
from domicile.testing.timeline.trace import trace
from domicile.testing.timeline.words import text

FOLDER = Path(".domicile", "failed")
"""Where timelines are written, below the directory in which the tests are run."""

_LONGEST_NAME = 120
_NO_FAILURES = ("Skipped", "SkipTest", "XFailed")
"""Exceptions by which pytest and unittest end a test that did not fail."""


class Repeat:
    """A test as it is known to those who run it: where it is written, and by which command."""

    def __init__(self, test: Callable[..., Any]) -> None:
        self._directory = Path.cwd()
        self._file = test.__code__.co_filename
        self._name = f"{test.__module__}.{test.__qualname__}"

    def explain(
        self,
        error: BaseException,
        seed: int,
        history: History,
        violations: Sequence[Violation],
    ) -> None:
        """Add to an error its seed, the command that repeats it and the files with its timeline."""
        stopped = isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
        if stopped or type(error).__name__ in _NO_FAILURES:
            return
        running = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        error.add_note(f"seed {seed}: run it alone with {self._command(seed, running)}")
        title = f"seed {seed} of {running or self._name}: {type(error).__name__}"
        try:
            written = self._write(seed, running, title, history, violations)
        except Exception as problem:
            error.add_note(f"no timeline: {type(problem).__name__}: {problem}")
        else:
            error.add_note(f"timeline: {written.as_posix()}.txt and .svg")

    def _command(self, seed: int, running: str) -> str:
        alone = f"DOMICILE_SEED={seed}"
        file, _, names = running.partition("::")
        if not names:
            return alone
        if not (self._directory / file).exists():
            # Pytest names files from its root directory, which need not be the present one.
            file = os.path.relpath(self._file, self._directory)
        return f"{alone} python -m pytest {shlex.quote(f'{file}::{names}')}"

    def _write(
        self,
        seed: int,
        running: str,
        title: str,
        history: History,
        violations: Sequence[Violation],
    ) -> Path:
        """Write both files; their path without the ending."""
        traced = trace(history, violations, title=title)
        called = re.sub(r"[^\w.]+", "-", running.rpartition("/")[2] or self._name).strip("-")
        path = FOLDER / f"{called[-_LONGEST_NAME:]}-seed-{seed}"
        folder = self._directory / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        (self._directory / f"{path}.txt").write_text(text(traced), encoding="utf-8")
        (self._directory / f"{path}.svg").write_text(draw(traced), encoding="utf-8")
        return path
