"""What the log of a node says of a journal that does not answer: why, and when it answers again.

The writer settles unknown outcomes, and callers learn only that nobody knows. The reason is known
here alone. Journals call this for each call that fails, and for each write that does not; it says
no more than a line in some seconds.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

log = logging.getLogger("domicile")

PAUSE_S = 10.0
"""The shortest time between two lines that say that a journal does not answer."""


class JournalTrouble:
    """Of one journal of one node, which texts call `shown`. A tool's journal is not `told`."""

    def __init__(
        self, shown: str, *, is_told: bool, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._shown, self._is_told, self._now = shown, is_told, now
        self._since = self._last = -math.inf
        self.is_open = False
        """Whether the log says that the journal does not answer, and not yet that it does."""

    def came(self, error: Exception) -> None:
        """A call failed."""
        now = self._now()
        if not self._is_told or now < self._last + PAUSE_S:
            return
        if not self.is_open:
            self._since = now
        self.is_open, self._last = True, now
        log.warning("durable entities wait until their journal answers: %s", error)

    def went(self) -> None:
        """A write or a claim did not fail, and the trouble was told."""
        self.is_open = False
        log.warning(
            "the journal %s answers again, after %.1f s", self._shown, self._now() - self._since
        )
