"""Bounded exhaustive search: every order of events of small clusters, on the real machines.

`python -m domicile.testing.search` goes through the scenarios of this package. With `explore` a
test searches a scenario of its own, with `walk` it follows random ways through a larger one.
"""

from __future__ import annotations

from domicile.testing.search.explore import Explored, explore, walk
from domicile.testing.search.scenario import FAULTS, Msg, Scenario, Violation

__all__ = ["FAULTS", "Explored", "Msg", "Scenario", "Violation", "explore", "walk"]
