"""Small continuous faults, for programs that should not notice them: `rough=True`.

The simulator starts it. It injects faults only through the simulator's verbs.
"""

from __future__ import annotations

from domicile.testing.sim.faults import SimFaults
from domicile.testing.sim.loop import World


class Roughness:
    """Small seeded faults that a program should not notice, as long as a run lasts."""

    def __init__(self, sim: SimFaults, world: World) -> None:
        self._sim = sim
        self._world = world
        self._random = world.stream("roughness")

    def begin(self) -> None:
        """Start: uneven delays, lost replies of the store, broken connections."""
        sim, random = self._sim, self._random
        sim.network.jitter_s = random.choice((0.0, 0.005, 0.02))
        sim.network.skew_s = random.choice((0.0, 0.03))
        for process in sim.nodes:
            if process.store is not None:
                process.store.watch_delay_s = (0.0, random.choice((0.0, 0.01, 0.05)))
                process.store.lost_reply = random.choice((0.0, 0.02))
        self._next()

    def _next(self) -> None:
        delay_s = self._random.uniform(0.2, 2.0)
        self._world.call_at(self._world.now + delay_s, self._strike)

    def _strike(self) -> None:
        sim, random = self._sim, self._random
        node = random.choice(sim.nodes)
        kind = random.choice(("cut", "cut client", "watch"))
        if kind == "cut":
            sim.cut(node.index, random.choice(sim.nodes).index)
        elif kind == "cut client":
            sim.cut_client(node.index)
        elif node.store is not None:
            node.store.break_watch()
        self._next()
