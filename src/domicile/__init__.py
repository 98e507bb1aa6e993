"""Domicile: every key has exactly one live home in a cluster.

Define entities, give them to a `Node`, and send messages through refs. `domicile.testing` runs
whole clusters in virtual time; `domicile.ports` holds the interfaces for other backends.
"""

from __future__ import annotations

from domicile.client import connect
from domicile.config import Settings
from domicile.entity.client import Client
from domicile.entity.define import Entity, handler
from domicile.entity.ref import Ref
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
from domicile.node import Node
from domicile.persist.eventsourced import EventSourced

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
    "MaybeExecuted",
    "Node",
    "NotExecuted",
    "Overloaded",
    "Ref",
    "Rejection",
    "Settings",
    "Unavailable",
    "connect",
    "handler",
]
