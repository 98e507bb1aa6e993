"""How can a program built on Domicile be tested? Whole clusters in virtual time, and real ones.

`given` says what one durable entity does. `@simulated` turns an async test into one that runs in a
cluster, once for every seed. `Sim` is the cluster that the test gets. `Processes` is a cluster of
real processes. `check` judges the history of a run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from domicile.testing.checkers import Violation, check
    from domicile.testing.history import Event, History
    from domicile.testing.processes.cluster import Processes
    from domicile.testing.processes.node_process import HarnessError
    from domicile.testing.projections import MemoryProjection
    from domicile.testing.sim.cluster import Sim
    from domicile.testing.sim.loop import Deadlock
    from domicile.testing.sim.sandbox import SimulationError
    from domicile.testing.sim.simulated import InvariantBroken, simulated
    from domicile.testing.single_entity import Given, Outcome, given

__all__ = [
    "Deadlock",
    "Event",
    "Given",
    "HarnessError",
    "History",
    "InvariantBroken",
    "MemoryProjection",
    "Outcome",
    "Processes",
    "Sim",
    "SimulationError",
    "Violation",
    "check",
    "given",
    "simulated",
]

_MODULES = {
    "Deadlock": "domicile.testing.sim.loop",
    "Event": "domicile.testing.history",
    "Given": "domicile.testing.single_entity",
    "HarnessError": "domicile.testing.processes.node_process",
    "History": "domicile.testing.history",
    "InvariantBroken": "domicile.testing.sim.simulated",
    "MemoryProjection": "domicile.testing.projections",
    "Outcome": "domicile.testing.single_entity",
    "Processes": "domicile.testing.processes.cluster",
    "Sim": "domicile.testing.sim.cluster",
    "SimulationError": "domicile.testing.sim.sandbox",
    "Violation": "domicile.testing.checkers",
    "check": "domicile.testing.checkers",
    "given": "domicile.testing.single_entity",
    "simulated": "domicile.testing.sim.simulated",
}
"""Where each name is defined. Its module is imported when the name is first used: a process of a
cluster needs no simulator, and no checkers."""

if not TYPE_CHECKING:  # A type checker would take any name as known.

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(_MODULES[name]), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted([*globals(), *__all__])
