"""Bounded exhaustive search: every order of events of small clusters, on the real machines.

`python -m proving.search` goes through the scenarios of this package. With `explore` a
test searches a scenario of its own, with `walk` it follows random ways through a larger one.
"""

from __future__ import annotations

from proving.search.explore import Explored, explore, walk
from proving.search.scenario import FAULTS, Msg, Scenario, Violation

__all__ = ["FAULTS", "Explored", "Msg", "Scenario", "Violation", "explore", "walk"]
