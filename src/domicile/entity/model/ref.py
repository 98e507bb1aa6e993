"""Typed addresses of entities: a method and its arguments in, a call for the runtime out.

Made by clients, nodes and entities. A ref checks all it can before anything is sent. It holds no
connection and keeps no state of the entity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

import msgspec

from domicile.core.hashing import FindShard
from domicile.core.ids import EntityKey
from domicile.entity.model.entity import Entity, EntityType
from domicile.entity.model.handlers import Handler
from domicile.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=Entity)

_KEEP: Any = object()

MOST_KEY = 512
"""Characters of a key: with four bytes each they still fit into an index of PostgreSQL."""


class Route:
    """Where a ref's calls go, once that is known; found again for each process and incarnation."""

    __slots__ = ("cell", "host", "sender", "sending", "weight_bytes")

    def __init__(self) -> None:
        self.sending: Any = None
        self.sender: Any = None
        self.weight_bytes = 0
        self.host: Any = None
        self.cell: Any = None
        """The shard's host and the entity, if both are in this process."""

    def lead(self, sending: Any, sender: Any, weight_bytes: int) -> None:
        """Use this sender for calls from now on; each message has `weight_bytes` besides its
        arguments."""
        self.sending = sending
        self.sender = sender
        self.weight_bytes = weight_bytes
        self.host = self.cell = None


class Call(msgspec.Struct):
    """One tell or ask on its way out. `timeout_s` None: the sender's setting."""

    entity: EntityKey
    kind: EntityType
    handler: Handler
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    timeout_s: float | None
    key: str
    place: FindShard
    """Finds the entity's shard among a number of shards: by the type's function, or by the
    message's."""
    route: Route | None = None
    seen: int | None = None
    """For histories: as `Turn.seen` of the turn that makes it, when it was made."""
    made: int | None = None
    """For histories: its number among the calls of its process that may have waited."""

    def encoded(self) -> bytes:
        """The arguments as bytes; `TypeError` if the handler cannot be called with them."""
        return self.handler.encode_args(self.args, self.kwargs)


class Outbound(Protocol):
    """Where calls go.

    Both methods take their place in the order (I5) before they first suspend. If a durable entity
    calls, that is its place among the calls of that entity.
    """

    def ask(self, call: Call) -> Coroutine[Any, Any, Any]:
        """The handler's value, or the error that says whether it ran (I9)."""
        ...

    def tell(self, call: Call) -> Coroutine[Any, Any, None]:
        """Return once the call is queued."""
        ...


class Ref(Generic[E]):
    """The address of one entity. Cheap to make; equal to every ref of the same type and id."""

    __slots__ = ("_entity", "_key", "_outbound", "_route", "_timeout_s", "_type")

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
        if not id.isascii():
            check_encodable(id, f"the id of a {kind.name!r}")
        if kind.durable:
            check_storable(id, f"the id of a {kind.name!r}")
        self._type = kind
        self._entity = EntityKey(kind.name, id)
        self._outbound = outbound
        self._timeout_s = timeout_s
        self._key = key
        self._route = Route()

    @property
    def id(self) -> str:
        """The entity's id."""
        return self._entity.id

    def ask(
        self,
        method: Callable[Concatenate[E, P], Coroutine[Any, Any, R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Coroutine[Any, Any, R]:
        """Run a handler at the entity's home and return its value: at most once, in order.

        Raises `NotExecuted`, `MaybeExecuted`, `HandlerFailed`, or the handler's `Rejection`.
        """
        kind = self._type
        call = Call(
            self._entity, kind, kind.find(method), args, kwargs, self._timeout_s, self._key,
            kind.place, self._route,
        )  # fmt: skip
        return self._outbound.ask(call)

    def tell(
        self,
        method: Callable[Concatenate[E, P], Coroutine[Any, Any, Any]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Coroutine[Any, Any, None]:
        """Have a handler run at the entity's home; return once queued. At most once, in order."""
        kind = self._type
        call = Call(
            self._entity, kind, kind.find(method), args, kwargs, self._timeout_s, self._key,
            kind.place, self._route,
        )  # fmt: skip
        return self._outbound.tell(call)

    def options(self, *, timeout_s: float = _KEEP, key: str = _KEEP) -> Self:
        """The same address with other terms: how long an ask waits, and a key that makes it
        safe to repeat (durable entities: same key, same effect, stored reply)."""
        wait_s, name = self._timeout_s, self._key
        if timeout_s is not _KEEP:
            if not _is_span(timeout_s):
                raise ConfigError(
                    f"options(timeout_s={timeout_s!r}) must be a positive, finite number of "
                    "seconds; leave it out for that of the settings (ask_timeout_s)"
                )
            wait_s = timeout_s
        if key is not _KEEP:
            if not isinstance(key, str) or not key:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(f"options(key={key!r}) must be non-empty text")
            check_encodable(key, "options(key=…)")
            check_storable(key, "options(key=…)")
            if len(key) > MOST_KEY:
                raise ConfigError(
                    f"options(key=…) has {len(key):,} characters; the limit is {MOST_KEY}, for a "
                    "journal keeps an index of all keys. Use a short name, as a UUID or a hash"
                )
            if not self._type.durable:
                raise ConfigError(
                    f"options(key=…) needs an EventSourced entity, and {self._type.name!r} is not "
                    "one: without a journal nobody can know that a key was used before"
                )
            name = key
        return type(self)(self._type, self.id, self._outbound, timeout_s=wait_s, key=name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ref):
            return NotImplemented
        return self._entity == other._entity

    def __hash__(self) -> int:
        return hash(self._entity)

    def __repr__(self) -> str:
        return f"Ref({self._type.cls.__qualname__}, {self.id!r})"


def check_encodable(text: str, what: str) -> None:
    """Raise `ConfigError` unless a text can be encoded as UTF-8.

    An error here fails one call; an error in a frame would cost the whole link.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{what} can't travel: {text!r} has half of a surrogate pair at position "
            f"{error.start}, which UTF-8 has no form for; nothing was sent. Such texts come from "
            "bytes that were decoded with errors='surrogateescape', or from broken JSON: remove it"
        ) from error


def check_storable(text: str, what: str) -> None:
    """Raise `ConfigError` if a text has a NUL character: PostgreSQL can't store it."""
    if "\0" in text:
        raise ConfigError(
            f"{what} can't be stored: {text!r} has a NUL character, which not every journal has a "
            "form for; nothing was sent. Leave it out, or encode the text"
        )


def _is_span(seconds: object) -> bool:
    return (
        isinstance(seconds, int | float)
        and not isinstance(seconds, bool)
        and seconds > 0
        and math.isfinite(seconds)
    )
