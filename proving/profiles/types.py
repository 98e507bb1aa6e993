"""Nodes of one role with different entity types, and nodes that come back with others (DX-26)."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING

from proving.fault_plan import Mischief
from proving.profiles.nodes import ask_to_stop
from proving.workload import Clerk, Room

if TYPE_CHECKING:
    from proving.profile import Profile

LIGHT = (Room, Clerk)
"""What the others know."""

LEAST_FULL = 2
"""Nodes that keep all types, as far as other faults let them."""


def prepare(load: Profile) -> None:
    """Most nodes know rooms only."""
    for process in load.sim.nodes[LEAST_FULL:]:
        process.entities = list(LIGHT)


def other_types(m: Mischief, random: Random) -> None:
    """A node leaves and comes back with more types, or with fewer."""
    victim = m.victim(random)
    full = sum(process.entities is None for process in m.up())
    if victim is None or (victim.entities is None and full <= LEAST_FULL):
        return
    if ask_to_stop(m, victim):
        victim.entities = list(LIGHT) if victim.entities is None else None
        m.note("other types", f"for node {victim.index}")
        m.later(random.uniform(4.0, 12.0), partial(m.restart, victim.index))
