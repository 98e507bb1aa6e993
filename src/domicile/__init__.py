"""Domicile: every key has exactly one live home in a cluster.

Define entities, give them to a `Node`, and send messages through refs. `domicile.testing` runs
whole clusters in virtual time; `domicile.ports` holds the interfaces for other backends.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from domicile.client import connect
    from domicile.core.hashing import by_message, murmur2, shardcake, xxh3
    from domicile.core.placement.strategies import Seat, Situation
    from domicile.entity.model.client import Client
    from domicile.entity.model.entity import Entity
    from domicile.entity.model.handlers import blocking, handler
    from domicile.entity.model.ref import Ref
    from domicile.entity.model.region import Region
    from domicile.errors import (
        CallCycle,
        CallTooDeep,
        ConfigError,
        DomicileError,
        Fenced,
        HandlerFailed,
        MaybeExecuted,
        NotExecuted,
        Overloaded,
        Rejection,
        Unavailable,
    )
    from domicile.failover.following import Group, Primary
    from domicile.manager import Manager
    from domicile.node import Node
    from domicile.persist.durable import Durable
    from domicile.persist.durable_entity import DurableEntity
    from domicile.persist.eventsourced import EventSourced, upcast
    from domicile.persist.forgettable import Erasure, Forgettable, Forgotten
    from domicile.persist.projections import Deleted, JournalEvent, Projection
    from domicile.projector import Projector
    from domicile.settings import Settings
    from domicile.sync import SyncClient, SyncGroup, SyncRef, connect_sync

__all__ = [
    "CallCycle",
    "CallTooDeep",
    "Client",
    "ConfigError",
    "Deleted",
    "DomicileError",
    "Durable",
    "DurableEntity",
    "Entity",
    "Erasure",
    "EventSourced",
    "Fenced",
    "Forgettable",
    "Forgotten",
    "Group",
    "HandlerFailed",
    "JournalEvent",
    "Manager",
    "MaybeExecuted",
    "Node",
    "NotExecuted",
    "Overloaded",
    "Primary",
    "Projection",
    "Projector",
    "Ref",
    "Region",
    "Rejection",
    "Seat",
    "Settings",
    "Situation",
    "SyncClient",
    "SyncGroup",
    "SyncRef",
    "Unavailable",
    "blocking",
    "by_message",
    "connect",
    "connect_sync",
    "handler",
    "murmur2",
    "shardcake",
    "upcast",
    "xxh3",
]

_MODULES = {
    "CallCycle": "domicile.errors",
    "CallTooDeep": "domicile.errors",
    "Client": "domicile.entity.model.client",
    "ConfigError": "domicile.errors",
    "Deleted": "domicile.persist.projections",
    "DomicileError": "domicile.errors",
    "Durable": "domicile.persist.durable",
    "DurableEntity": "domicile.persist.durable_entity",
    "Entity": "domicile.entity.model.entity",
    "Erasure": "domicile.persist.forgettable",
    "EventSourced": "domicile.persist.eventsourced",
    "Fenced": "domicile.errors",
    "Forgettable": "domicile.persist.forgettable",
    "Forgotten": "domicile.persist.forgettable",
    "Group": "domicile.failover.following",
    "HandlerFailed": "domicile.errors",
    "JournalEvent": "domicile.persist.projections",
    "Manager": "domicile.manager",
    "MaybeExecuted": "domicile.errors",
    "Node": "domicile.node",
    "NotExecuted": "domicile.errors",
    "Overloaded": "domicile.errors",
    "Primary": "domicile.failover.following",
    "Projection": "domicile.persist.projections",
    "Projector": "domicile.projector",
    "Ref": "domicile.entity.model.ref",
    "Region": "domicile.entity.model.region",
    "Rejection": "domicile.errors",
    "Seat": "domicile.core.placement.strategies",
    "Settings": "domicile.settings",
    "Situation": "domicile.core.placement.strategies",
    "SyncClient": "domicile.sync",
    "SyncGroup": "domicile.sync",
    "SyncRef": "domicile.sync",
    "Unavailable": "domicile.errors",
    "blocking": "domicile.entity.model.handlers",
    "by_message": "domicile.core.hashing",
    "connect": "domicile.client",
    "connect_sync": "domicile.sync",
    "handler": "domicile.entity.model.handlers",
    "murmur2": "domicile.core.hashing",
    "shardcake": "domicile.core.hashing",
    "upcast": "domicile.persist.eventsourced",
    "xxh3": "domicile.core.hashing",
}
"""Where each name is defined. Its module is imported when the name is first used: a program that
only defines entities needs neither stores nor sockets, and most tools need even less."""

if not TYPE_CHECKING:  # A type checker would take any name as known.

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(_MODULES[name]), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted([*globals(), *__all__])
