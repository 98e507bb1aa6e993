"""Domicile: every key has exactly one live home in a cluster.

Define entities, give them to a `Node`, and send messages through refs. `domicile.testing` runs
whole clusters in virtual time; `domicile.ports` holds the interfaces for other backends.
"""

from __future__ import annotations

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
from domicile.manager import Manager
from domicile.node import Node
from domicile.persist.eventsourced import EventSourced
from domicile.settings import Settings
from domicile.sync import SyncClient, SyncRef, connect_sync

__all__ = [
    "CallCycle",
    "CallTooDeep",
    "Client",
    "ConfigError",
    "DomicileError",
    "Entity",
    "EventSourced",
    "Fenced",
    "HandlerFailed",
    "Manager",
    "MaybeExecuted",
    "Node",
    "NotExecuted",
    "Overloaded",
    "Ref",
    "Region",
    "Rejection",
    "Seat",
    "Settings",
    "Situation",
    "SyncClient",
    "SyncRef",
    "Unavailable",
    "blocking",
    "by_message",
    "connect",
    "connect_sync",
    "handler",
    "murmur2",
    "shardcake",
    "xxh3",
]
