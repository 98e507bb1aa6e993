"""What a store reports about its own place, for `domicile doctor`.

Optional: a store without it is asked through its other ports only.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol, runtime_checkable


class Severity(Enum):
    """How bad a finding is. Only an error makes `domicile doctor` fail."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing must be done."""
    WARNING = "warning"
    """Something may fail or be lost later."""
    ERROR = "error"
    """Something fails, or what was acknowledged can be lost."""


class Finding(NamedTuple):
    """One thing that was looked at."""

    severity: Severity
    subject: str
    """What it is about, in one or two words."""
    said: str
    """What was found."""
    step: str = ""
    """What to do next; empty if nothing is needed."""


@runtime_checkable
class InspectableStore(Protocol):
    """A store that can look at its server, its disk or its file."""

    async def findings(self) -> Sequence[Finding]:
        """What is right and wrong there. It writes nothing; may raise `StoreUnavailable`."""
        ...
