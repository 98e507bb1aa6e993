"""Names of things: incarnations, entities, shards and incoming links.

Every other module may import it, and it imports none of them. An owner is always an incarnation,
never a node id or an address (A5).
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple, NewType

Incarnation = NewType("Incarnation", str)
"""One run of a node or client: 128 random bits as 32 hex digits."""

NOBODY = Incarnation("")


class EntityKey(NamedTuple):
    """The address of an entity."""

    type: str
    id: str


class ShardKey(NamedTuple):
    """A numbered partition of one role's entities: the unit that moves."""

    role: str
    shard: int


def new_incarnation(random: Random) -> Incarnation:
    """A fresh incarnation id."""
    return Incarnation(f"{random.getrandbits(128):032x}")


class LinkKey(NamedTuple):
    """An incoming link: the dialling incarnation and its link id. A new link is a new session."""

    sender: Incarnation
    link: str
