"""A store's own time, made from a wall clock that may be stepped (S4).

For stores whose machine has no clock that all their processes share: every transaction, and a
tick while nothing happens, advances it. Leases are counted in it. It must never go back, and
never take a step of the wall clock for time that passed: a jump or an outage adds one tick at
most, so it ends no lease early by more than the margin allows (L2).
"""

from __future__ import annotations

from typing import NamedTuple

from domicile.settings import MAX_TICK_S


class StoreTime(NamedTuple):
    """What a store keeps of its time: the last look at the wall, and what was not time."""

    wall_s: float
    skipped_s: float = 0.0

    @property
    def now_s(self) -> float:
        """Seconds since some fixed point."""
        # Not a sum of many small steps: as long as nothing is skipped it is the wall's own time.
        return self.wall_s - self.skipped_s

    def advanced(self, wall_s: float, max_tick_s: float = MAX_TICK_S) -> StoreTime:
        """After another look at the wall: on by clamp(wall - last wall, 0, one tick)."""
        passed_s = wall_s - self.wall_s
        if 0.0 <= passed_s <= max_tick_s:
            return StoreTime(wall_s, self.skipped_s)
        counted_s = max_tick_s if passed_s > max_tick_s else 0.0
        return StoreTime(wall_s, self.skipped_s + passed_s - counted_s)
