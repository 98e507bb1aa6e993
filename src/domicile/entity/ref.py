"""Typed addresses of entities: a method and its arguments in, a call for the runtime out.

Made by clients, nodes and entities. A ref checks everything it can before anything is sent; it
holds no connection and keeps no state of the entity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from domicile.core.hashing import Place, shard_of
from domicile.core.ids import EntityKey
from domicile.entity.define import Entity, EntityType, Handler
from domicile.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=Entity)

_KEEP: Any = object()


@dataclass(slots=True)
class Call:
    """One tell or ask on its way out. `timeout_s` None: the sender's setting."""

    entity: EntityKey
    role: str
    method: str
    body: bytes
    shared: bool
    timeout_s: float | None
    key: str
    durable: bool
    shard_id: str = "xxh3"
    """The name of what `place` stands for: all processes must mean the same (RG-24)."""
    place: Place = shard_of


class Outbound(Protocol):
    """Where calls go. Both take their place in the order (I5) before they first suspend."""

    async def ask(self, call: Call) -> bytes:
        """The encoded reply, or the error that says whether it ran (I9)."""
        ...

    async def tell(self, call: Call) -> None:
        """Return once the call is queued."""
        ...


class Ref(Generic[E]):
    """The address of one entity. Cheap to make; equal to every ref of the same type and id."""

    __slots__ = ("_entity", "_key", "_outbound", "_timeout_s", "_type")

    def __init__(
        self,
        kind: EntityType,
        id: str,
        outbound: Outbound,
        *,
        timeout_s: float | None = None,
        key: str = "",
    ) -> None:
        if not isinstance(id, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"the id of a {kind.name!r} must be text, not {id!r}; use str(...)")
        self._type = kind
        self._entity = EntityKey(kind.name, id)
        self._outbound = outbound
        self._timeout_s = timeout_s
        self._key = key

    @property
    def id(self) -> str:
        """The entity's id."""
        return self._entity.id

    async def ask(
        self,
        method: Callable[Concatenate[E, P], Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run a handler at the entity's home and return its value: at most once, in order.

        Raises `NotExecuted`, `MaybeExecuted`, `HandlerFailed`, or the handler's `Rejection`.
        """
        handler = self._type.find(method)
        call = self._call(handler, handler.encode_args(args, kwargs))
        reply: R = handler.decode_reply(await self._outbound.ask(call))
        return reply

    async def tell(
        self,
        method: Callable[Concatenate[E, P], Coroutine[Any, Any, Any]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Have a handler run at the entity's home; return once queued. At most once, in order."""
        handler = self._type.find(method)
        await self._outbound.tell(self._call(handler, handler.encode_args(args, kwargs)))

    def options(self, *, timeout_s: float = _KEEP, key: str = _KEEP) -> Self:
        """The same address with other terms: how long an ask waits, and a key that makes it
        safe to repeat (durable entities: same key, same effect, stored reply)."""
        wait_s, name = self._timeout_s, self._key
        if timeout_s is not _KEEP:
            if not (timeout_s > 0 and math.isfinite(timeout_s)):
                raise ConfigError(f"options(timeout_s={timeout_s!r}) must be positive and finite")
            wait_s = timeout_s
        if key is not _KEEP:
            if not isinstance(key, str) or not key:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(f"options(key={key!r}) must be non-empty text")
            if not self._type.durable:
                raise ConfigError(
                    f"options(key=…) needs an EventSourced entity, and {self._type.name!r} is not "
                    "one: without a journal nobody can know that a key was used before"
                )
            name = key
        return type(self)(self._type, self.id, self._outbound, timeout_s=wait_s, key=name)

    def _call(self, handler: Handler, body: bytes) -> Call:
        kind = self._type
        return Call(
            self._entity,
            kind.role,
            handler.name,
            body,
            handler.shared,
            self._timeout_s,
            self._key,
            kind.durable,
            kind.shard_id,
            kind.place,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ref):
            return NotImplemented
        return self._entity == other._entity

    def __hash__(self) -> int:
        return hash(self._entity)

    def __repr__(self) -> str:
        return f"Ref({self._type.cls.__qualname__}, {self.id!r})"
