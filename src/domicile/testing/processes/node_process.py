"""One place of a cluster of real processes, and the error that the harness raises.

Used by `domicile.testing.processes.cluster` and its faults. Nothing here starts or ends a process.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from domicile.core.ids import Incarnation
from domicile.entity.model.entity import Entity
from domicile.links.machine import PROTOCOLS
from domicile.testing.processes.recorder import RecordReader

LOG_LINES = 30


class HarnessError(Exception):
    """A verb cannot be carried out on a process, or a process did what it must not."""


class NodeProcess:
    """One node or manager of a cluster: a place that has one process after another."""

    def __init__(self, index: int, candidate: bool, *, manager: bool = False) -> None:
        self.index = index
        self.name = f"manager-{index}" if manager else f"node-{index}"
        self.candidate = candidate
        self.manager = manager
        self.protocols = PROTOCOLS
        """The wire protocols of its next process (DX-19)."""
        self.version = ""
        """The version that its next process announces."""
        self.entities: Sequence[type[Entity]] | None = None
        """The entities of its next process; None: all of the cluster."""
        self.runs = 0
        self.frozen = False
        self.process: subprocess.Popen[bytes] | None = None
        self.log: Path | None = None
        self.reader: RecordReader | None = None
        self.incarnation: Incarnation | None = None
        """The newest incarnation in its records."""
        self.earlier: frozenset[Incarnation] = frozenset()
        """Incarnations of that name with a record in the store when its newest process was
        started."""

    @property
    def up(self) -> bool:
        """Whether its process is alive, frozen or not."""
        return self.process is not None and self.process.poll() is None

    def log_tail(self) -> str:
        """The last lines that it wrote to its log."""
        if self.log is None or not self.log.exists():
            return "(no log)"
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-LOG_LINES:]) or "(its log is empty)"
