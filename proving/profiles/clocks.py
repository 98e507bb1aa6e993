"""Clocks that run at different rates, and wall clocks that are stepped (A1, A2, S4)."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from domicile.settings import CLOCK_DRIFT
from domicile.testing.sim.clock import Machine
from proving.fault_plan import Mischief

if TYPE_CHECKING:
    from proving.profile import Profile

HOUR_S = 3600.0


def prepare(load: Profile) -> None:
    """Every machine has clocks of its own."""
    random = load.sim.world.stream("clocks")
    for process in load.sim.nodes:
        process.machine = machine(random)
    load.sim.machine = machine(random)


def machine(random: Random) -> Machine:
    """Booted at another time, fast or slow within what is assumed of clocks."""
    rate = 1.0 + random.choice(
        (-CLOCK_DRIFT, random.uniform(-CLOCK_DRIFT, CLOCK_DRIFT), CLOCK_DRIFT)
    )
    return Machine(random.uniform(-900.0, 9_000.0), rate, random.uniform(-HOUR_S, HOUR_S))


def step_store(m: Mischief, random: Random) -> None:
    """The store's wall clock is set, by little or by an hour; sometimes twice."""
    by_s = _step(random)
    m.note("store clock", f"stepped by {by_s:+.1f} s")
    m.sim.step_store_clock(by_s)
    if random.random() < 0.4:
        m.later(random.uniform(0.0, 3.0), lambda: m.sim.step_store_clock(-by_s))


def step_node(m: Mischief, random: Random) -> None:
    """The wall clock of a node's machine is set."""
    process = random.choice(m.sim.nodes)
    by_s = _step(random)
    m.note("wall clock", f"of node {process.index} stepped by {by_s:+.1f} s")
    m.sim.step_clock(process.index, by_s)


def replace(m: Mischief, random: Random) -> None:
    """A process dies, and its successor runs on another machine."""
    victim = m.victim(random)
    if victim is None:
        return
    m.note("new machine", f"for node {victim.index}")
    m.sim.crash(victim.index)

    def restart() -> None:
        if not victim.up:
            victim.machine = machine(random)
            m.restart(victim.index)

    m.later(random.uniform(0.5, 9.0), restart)


def _step(random: Random) -> float:
    size_s = random.choice((HOUR_S, HOUR_S, random.uniform(0.05, 10.0)))
    return random.choice((-1.0, 1.0)) * size_s
