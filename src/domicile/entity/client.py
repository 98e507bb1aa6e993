"""What every way into a cluster has in common: making refs, and a lifetime.

Nodes and simulated clusters derive from `Client`. It never connects by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self, TypeVar

from domicile.entity.define import Entity, entity_type
from domicile.entity.ref import Outbound, Ref

E = TypeVar("E", bound=Entity)


class Client(ABC):
    """Makes refs to entities, wherever their homes are. Use it as an async context manager."""

    def ref(self, kind: type[E], id: str, /) -> Ref[E]:
        """The address of an entity. Nothing is sent, and the entity need not exist yet."""
        return Ref(entity_type(kind), id, self._outbound())

    @abstractmethod
    async def __aenter__(self) -> Self:
        """Join, and return once messages can be sent."""

    @abstractmethod
    async def __aexit__(self, *exc: object) -> None:
        """Leave in an orderly way."""

    @abstractmethod
    def _outbound(self) -> Outbound:
        """Where the calls of this client's refs go; also before it has started."""
