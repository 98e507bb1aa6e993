"""How can a program built on Domicile be tested? Whole clusters in virtual time, and real ones.

`given` says what one durable entity does. `@simulated` turns an async test into one that runs in a
cluster, once for every seed. `Sim` is the cluster that the test gets. `Processes` is a cluster of
real processes. `check` judges the history of a run.
"""

from __future__ import annotations

from domicile.testing.checkers import Violation, check
from domicile.testing.given import Given, Outcome, given
from domicile.testing.history import Event, History
from domicile.testing.processes.cluster import Processes
from domicile.testing.processes.node_process import HarnessError
from domicile.testing.projections import MemoryProjection
from domicile.testing.sim.cluster import Sim
from domicile.testing.sim.loop import Deadlock
from domicile.testing.sim.sandbox import SimulationError
from domicile.testing.sim.simulated import InvariantBroken, simulated

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
