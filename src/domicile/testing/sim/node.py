"""One node of a simulated cluster: a slot, on a machine of its own, for one process after another.

Made by the simulator; campaigns and tests read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from domicile.core.ids import Incarnation
from domicile.entity.model.entity import Entity
from domicile.links.machine import PROTOCOLS
from domicile.node import Node
from domicile.testing.sim.calls import Faults
from domicile.testing.sim.clock import Machine
from domicile.testing.sim.loop import SimLoop


class SimNode:
    """One node of a simulated cluster: a slot that has one process after another."""

    def __init__(self, index: int, candidate: bool, *, manager: bool = False) -> None:
        self.index = index
        self.name = f"manager-{index}" if manager else f"node-{index}"
        self.candidate = candidate
        self.manager = manager
        self.version = ""
        self.entities: Sequence[type[Entity]] | None = None
        """The entities of its next process; None: all of the cluster."""
        self.capacity = 1.0
        self.machine = Machine()
        self.protocols = PROTOCOLS
        self.runs = 0
        self.loop: SimLoop | None = None
        self.node: Node | None = None
        self.store: Faults | None = None
        self.journal: Faults | None = None
        self.stopping: asyncio.Event | None = None
        self.done = False

    @property
    def up(self) -> bool:
        """Whether its process is alive, frozen or not."""
        return self.loop is not None and not self.loop.dead and not self.done

    @property
    def incarnation(self) -> Incarnation | None:
        """The registered incarnation, if there is one."""
        life = None if self.node is None else self.node.life
        return None if life is None else life.me
