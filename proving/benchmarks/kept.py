"""Results of benchmarks in a file, so that the same command goes on where it was stopped."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from proving.benchmarks.processes import ROOT

CACHE = ROOT / ".bench"
Measured = dict[str, Any]


class Kept:
    """The rounds that were measured so far, in a file that always holds all of them.

    `scale` is how much of everything a round takes; figures of another scale are not mixed in.
    """

    def __init__(self, path: Path, scale: Mapping[str, Any]) -> None:
        self._path, self._scale = path, dict(scale)
        self.cells: dict[str, list[Measured]] = {}
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            same = {**found["scale"], "rounds": 0} == {**self._scale, "rounds": 0}
            if same:
                self.cells = found["cells"]
            else:
                tell(f"{path} was measured at another scale and begins anew")

    def forget(self, key: str) -> None:
        """Have a cell measured anew."""
        self.cells.pop(key, None)

    def lacks(self, cells: Iterable[str], measured: Collection[str]) -> list[str]:
        """Cells beside those that were measured now of which nothing is kept."""
        return [key for key in cells if key not in measured and not self.cells.get(key)]

    def add(self, key: str, told: Measured) -> None:
        """Keep a round."""
        self.cells.setdefault(key, []).append(told)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"scale": self._scale, "cells": self.cells}, indent=2) + "\n"
        written = self._path.with_suffix(".new")
        written.write_text(text, encoding="utf-8")
        written.replace(self._path)


def tell(text: str) -> None:
    """Say something beside the table."""
    print(text, file=sys.stderr, flush=True)
