"""What a process is wired to and what it wants to be. Data only.

`process`, `client` and tests make it; an incarnation reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from domicile.core.placement.strategies import Strategy
from domicile.core.state.records import TypeRecord
from domicile.entity.model.entity import EntityType
from domicile.links.machine import PROTOCOLS
from domicile.ports.clock import Clock
from domicile.ports.health import Health, JudgesByPlace
from domicile.ports.journal import Journal
from domicile.ports.meter import Meter
from domicile.ports.store import Store
from domicile.ports.threads import Threads
from domicile.ports.trace import Tracer
from domicile.ports.transport import Transport
from domicile.ports.watchdog import Watchdog
from domicile.settings import Settings


@dataclass(frozen=True, slots=True)
class Backends:
    """What a process is wired to. `transport` makes a fresh one for each incarnation.

    `health` can prove deaths, where that is possible; `watchdog` ends a process that hangs, where
    the process is Domicile's own; `threads` run users' strategies,
    `blocking` their `@blocking` methods, or `threads` do that, too; `tracer` takes trace
    context along with messages.
    """

    store: Store
    transport: Callable[[], Transport]
    journal: Journal | None
    clock: Clock
    meter: Meter
    random: Random
    health: Health | None = None
    watchdog: Watchdog | None = None
    threads: Threads | None = None
    blocking: Threads | None = None
    tracer: Tracer | None = None

    async def close(self) -> None:
        """Let go of store, journal and health port: this process uses them no more."""
        try:
            await self.store.close()
        finally:
            try:
                await self._close_health()
            finally:
                if self.journal is not None:
                    await self.journal.close()

    async def _close_health(self) -> None:
        health: object = self.health
        if isinstance(health, JudgesByPlace):
            await health.close()


@dataclass(frozen=True, slots=True)
class Identity:
    """What a process wants to be: a node if it has an id, else a client."""

    cluster: str
    node_id: str
    catalogue: Mapping[str, EntityType]
    resources: Mapping[type[Any], Any]
    settings: Settings
    candidate: bool
    version: str = ""
    capacity: float = 1.0
    strategy: str | Strategy = "least_shards"
    control: str = "elected"
    """The control plane of the cluster, by its name in `control.planes`."""
    protocols: tuple[int, int] = PROTOCOLS
    """The oldest and newest wire protocol that this process speaks."""
    shards: Mapping[str, int] = field(default_factory=dict[str, int])
    """Shards of the roles that have another number than the settings say."""
    token: str = field(default="", repr=False)
    """What proves that this process belongs to the cluster; several with commas (DX-07)."""

    def role_shards(self) -> dict[str, int]:
        """How many shards each role has that this process can be home to."""
        roles = sorted({kind.role: None for kind in self.catalogue.values()})
        return {role: self.shards.get(role, self.settings.shards) for role in roles}

    def types(self) -> dict[str, TypeRecord]:
        """What this process says of its entity types (RG-24)."""
        return {name: kind.record for name, kind in self.catalogue.items()}
