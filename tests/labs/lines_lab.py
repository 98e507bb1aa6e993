"""Reading of files to which other processes append lines at the same time."""

from __future__ import annotations

from pathlib import Path


def whole_lines(path: Path) -> list[str]:
    """The lines that are complete; a reader may see the beginning of one that is being written."""
    return path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
