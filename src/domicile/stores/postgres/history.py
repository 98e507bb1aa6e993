"""What one process knows of a PostgreSQL store's past, to notice that the store went back (S5).

The store, on its event loop, and the client of its thread share one `KnownPast`. A rewind that one
of them notices ends what the other began before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple, NoReturn
from uuid import UUID

from domicile.errors import StoreRewound


class Mark(NamedTuple):
    """A revision that the process has seen; all None before the first."""

    history: str | None = None
    revision: int | None = None
    tag: UUID | None = None


class KnownPast:
    """The newest revision that was seen. `generation` counts the rewinds that were noticed."""

    def __init__(self, shown: str, rewound: Callable[[], None]) -> None:
        self.generation = 0
        self._shown, self._rewound = shown, rewound
        self._mark = Mark()
        self._lock = threading.Lock()

    def now(self, generation: int) -> Mark:
        """What a call shows to the store; `StoreRewound` if it began before the last rewind."""
        with self._lock:
            if generation == self.generation:
                return self._mark
        raise StoreRewound(
            f"the store {self._shown} went back to an older state; drop what was learned from it "
            "and list again"
        )

    def saw(self, generation: int, mark: Mark) -> None:
        """The store answered a call of that generation, so all that was known is still there."""
        with self._lock:
            known = self._mark.revision
            if generation == self.generation and mark.revision is not None:
                self._mark = mark if known is None or mark.revision > known else self._mark

    def rewind(self, generation: int, why: str) -> NoReturn:
        """The store refused what a call of that generation showed; raises `StoreRewound`."""
        with self._lock:
            first = generation == self.generation
            if first:
                self.generation += 1
                self._mark = Mark()
        if first:
            self._rewound()
        raise StoreRewound(
            f"the store {self._shown} went back: {why}. Commits that this process saw are lost; "
            "drop what was learned from it and list again"
        )
