"""Proof of death in a simulated cluster: what a kernel's file locks show on one machine (L6).

The simulator gives a `SimHealth` to each process. It must never call a live process dead.
"""

from __future__ import annotations

from domicile.core.ids import Incarnation
from domicile.ports.health import Verdict
from domicile.testing.sim.loop import SimLoop


class SimLocks:
    """Which process holds which incarnation's lock, for all processes of a world."""

    def __init__(self) -> None:
        self._held: dict[Incarnation, SimLoop | None] = {}

    def of(self, loop: SimLoop) -> SimHealth:
        """The view of one process."""
        return SimHealth(self._held, loop)


class SimHealth:
    """Implements `Health` for one simulated process."""

    def __init__(self, held: dict[Incarnation, SimLoop | None], loop: SimLoop) -> None:
        self._held = held
        self._loop = loop

    def hold(self, incarnation: Incarnation) -> None:
        """As `Health.hold`."""
        self._held[incarnation] = self._loop

    def let_go(self, incarnation: Incarnation, *, gone: bool = True) -> None:
        """As `Health.let_go`: a lock that exists and that no process holds is proof."""
        if gone:
            self._held.pop(incarnation, None)
        elif incarnation in self._held:
            self._held[incarnation] = None

    def verdict(self, incarnation: Incarnation) -> Verdict:
        """As `Health.verdict`: a dead process holds no lock, a frozen one does."""
        if incarnation not in self._held:
            return Verdict.UNKNOWN
        holder = self._held[incarnation]
        return Verdict.DEAD if holder is None or holder.dead else Verdict.ALIVE

    def evidence(self, incarnation: Incarnation) -> str:
        """As `Health.evidence`."""
        return f"nobody holds the lock of {incarnation}"
