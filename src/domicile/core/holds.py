"""Blocks whose commit was refused: not tried again until the watch brings the reason.

Called by the coordinator only. Without it a refused commit would be repeated at once, and
refused again for the same reason.
"""

from __future__ import annotations

from typing import NamedTuple

from domicile.core.txn import Condition
from domicile.core.view import BlockKey, Draft, StoreView


class _Hold(NamedTuple):
    until: float
    refused: tuple[Condition, ...]


class Holds:
    """What is held back, and until when at the latest."""

    def __init__(self) -> None:
        self._holds: dict[BlockKey, _Hold] = {}

    @property
    def times(self) -> list[float]:
        """When holds run out."""
        return [hold.until for hold in self._holds.values()]

    def refused(self, made: Draft, key: bytes, until: float) -> None:
        """A commit met a key that was not as expected."""
        refused = tuple(one for one in made.conditions if one.key == key)
        self._holds[made.block] = _Hold(until, refused)

    def expire(self, now: float) -> None:
        """Forget those whose time is over."""
        self._holds = {block: hold for block, hold in self._holds.items() if now < hold.until}

    def held(self, block: BlockKey, view: StoreView, now: float) -> bool:
        """Whether a block waits: the picture still shows what the refused commit rested on."""
        hold = self._holds.get(block)
        if hold is None:
            return False
        if now < hold.until and all(map(view.satisfies, hold.refused)):
            return True
        del self._holds[block]
        return False
