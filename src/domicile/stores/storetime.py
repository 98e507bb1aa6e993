"""A store's own time, made from a wall clock that may be stepped (S4).

For stores whose processes share no clock that never jumps. Every transaction advances store time,
and so does a tick while nothing happens. Leases are counted in store time. It must never go back,
and a step of the wall clock must not count as elapsed time. A jump or an outage adds at most one
tick, so no lease ends earlier than the margin allows (L2).
"""

from __future__ import annotations

from typing import NamedTuple

from domicile.settings import MAX_TICK_S


class StoreTime(NamedTuple):
    """What a store keeps of its time: the last wall-clock reading, and the sum of jumps that did
    not count as elapsed time."""

    wall_s: float
    skipped_s: float = 0.0

    @property
    def now_s(self) -> float:
        """Seconds since a fixed point."""
        # Not a sum of many small steps: while nothing is skipped, it equals the wall clock.
        return self.wall_s - self.skipped_s

    def advanced(self, wall_s: float, max_tick_s: float = MAX_TICK_S) -> StoreTime:
        """The time after another wall-clock reading: now + clamp(wall - last wall, 0, one tick)."""
        passed_s = wall_s - self.wall_s
        if 0.0 <= passed_s <= max_tick_s:
            return StoreTime(wall_s, self.skipped_s)
        counted_s = max_tick_s if passed_s > max_tick_s else 0.0
        return StoreTime(wall_s, self.skipped_s + passed_s - counted_s)
