"""The base of every client of a cluster: it makes refs and regions, and has a lifetime.

Nodes and simulated clusters derive from `Client`. This module never connects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self, TypeVar

from domicile.entity.model.entity import Entity, entity_type
from domicile.entity.model.ref import Outbound, Ref
from domicile.entity.model.region import Region

E = TypeVar("E", bound=Entity)


class Client(ABC):
    """Makes refs to entities, wherever their homes are. Use it as an async context manager."""

    def ref(self, kind: type[E], id: str, /) -> Ref[E]:
        """The address of an entity. Nothing is sent, and the entity need not exist yet."""
        return Ref(entity_type(kind), id, self._outbound())

    def region(
        self,
        kind: type[E],
        /,
        *,
        entity_id: Callable[[Any], str | None],
        shard_id: Callable[[Any, int], int] | None = None,
    ) -> Region[E]:
        """All entities of a type, for messages that name their entity themselves.

        `entity_id` finds the id in a message; the handler is the one whose only parameter has the
        message's type. `shard_id` gives the shard for a message and a number of shards, for types
        whose class says `shard_id=by_message`.
        """
        return Region(entity_type(kind), self._outbound(), entity_id=entity_id, shard_id=shard_id)

    @abstractmethod
    async def __aenter__(self) -> Self:
        """Join, and return once messages can be sent."""

    @abstractmethod
    async def __aexit__(self, *exc: object) -> None:
        """Leave in an orderly way."""

    @abstractmethod
    def _outbound(self) -> Outbound:
        """Where the calls of this client's refs go. Must work before the client has started,
        too."""
