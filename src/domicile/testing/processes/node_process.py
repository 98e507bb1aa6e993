"""One place of a cluster of real processes, and what the harness says when something can't be done.

Used by `domicile.testing.processes.cluster` and its faults. Nothing here starts or ends a process.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from domicile.core.ids import Incarnation
from domicile.links.machine import PROTOCOLS
from domicile.testing.processes.recorder import RecordReader

LOG_LINES = 30


class HarnessError(Exception):
    """Something cannot be done to a process, or one did what it must not."""


class NodeProcess:
    """One node or manager of a cluster: a place that processes come and go in."""

    def __init__(self, index: int, candidate: bool, *, manager: bool = False) -> None:
        self.index = index
        self.name = f"manager-{index}" if manager else f"node-{index}"
        self.candidate = candidate
        self.manager = manager
        self.protocols = PROTOCOLS
        """The wire protocols that its next process speaks (DX-19)."""
        self.version = ""
        """The version that its next process says it has."""
        self.runs = 0
        self.frozen = False
        self.process: subprocess.Popen[bytes] | None = None
        self.log: Path | None = None
        self.reader: RecordReader | None = None
        self.incarnation: Incarnation | None = None
        """The newest incarnation that its records tell of."""
        self.earlier: frozenset[Incarnation] = frozenset()
        """Incarnations of that name whose records stood when its newest process was started."""

    @property
    def up(self) -> bool:
        """Whether its process lives, frozen or not."""
        return self.process is not None and self.process.poll() is None

    def log_tail(self) -> str:
        """The last lines that it wrote to its log."""
        if self.log is None or not self.log.exists():
            return "(no log)"
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-LOG_LINES:]) or "(its log is empty)"
