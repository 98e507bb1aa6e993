"""Envelope style: the message itself names its entity, and its type selects the handler.

Made by `Client.region`. A region calls the user's functions and checks their answers before
anything is sent (I9). Then it sends as a ref does. It holds no connection and knows no home.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from types import NoneType, SimpleNamespace
from typing import Any, Generic, TypeVar

from domicile.core.hashing import place_by
from domicile.core.ids import EntityKey
from domicile.entity.model.entity import Entity, EntityType
from domicile.entity.model.handlers import Handler
from domicile.entity.model.ref import Call, Outbound, check_encodable
from domicile.errors import ConfigError, NotExecuted

E = TypeVar("E", bound=Entity)

BY_MESSAGE = "message"


class Region(Generic[E]):
    """All entities of one type, for messages that name their entity."""

    __slots__ = ("_entity_id", "_handlers", "_outbound", "_shard_id", "_type")

    def __init__(
        self,
        kind: EntityType,
        outbound: Outbound,
        *,
        entity_id: Callable[[Any], str | None],
        shard_id: Callable[[Any, int], int] | None = None,
    ) -> None:
        by_message = kind.shard_id == BY_MESSAGE
        name = kind.cls.__qualname__
        # I1: one entity with two ways to find its shard would have two homes.
        if shard_id is not None and not by_message:
            raise ConfigError(
                f"region({name}, shard_id=...): refs find the shards of {kind.name!r} by "
                f"{kind.shard_id!r}, so one entity could get two homes. Give the class a shard_id "
                f"that works on the id, or write class {name}(Entity, shard_id=by_message): then "
                "only regions with a shard_id reach it"
            )
        if shard_id is None and by_message:
            raise ConfigError(
                f"region({name}): its class says shard_id=by_message, so say which shard a "
                "message belongs to: region(..., shard_id=lambda message, shards: ...)"
            )
        self._type = kind
        self._outbound = outbound
        self._entity_id = entity_id
        self._shard_id = shard_id
        self._handlers: dict[type[Any], Handler] = {}

    async def send(self, message: object) -> None:
        """Have the message's handler run at the home of its entity; return once it is queued.

        At most once, in order. `NotExecuted` if the message is for no entity or no handler.
        """
        await self._outbound.tell(self._call(message))

    async def ask(self, message: object) -> Any:
        """Have the message's handler run, and return its value: at most once, in order.

        Raises `NotExecuted`, `MaybeExecuted`, `HandlerFailed`, or the handler's `Rejection`.
        """
        return await self._outbound.ask(self._call(message))

    def _call(self, message: object) -> Call:
        kind = self._type
        handler = self._handlers.get(type(message))
        if handler is None:
            handler = self._handlers[type(message)] = self._find(type(message))
        entity = EntityKey(kind.name, self._id(message))
        call = Call(entity, kind, handler, (message,), {}, None, "", kind.place)
        shard_id = self._shard_id
        if shard_id is not None:
            name = f"{_name(shard_id)} of a {type(message).__qualname__}"
            call.place = place_by(lambda _, shards: shard_id(message, shards), name)
        return call

    def _id(self, message: object) -> str:
        kind, name = type(message).__qualname__, self._type.name
        try:
            id = self._entity_id(message)
        except Exception as error:
            raise NotExecuted(
                f"entity_id failed for a {kind} to {name!r}, so nothing was sent: "
                f"{type(error).__name__}: {error}"
            ) from error
        if isinstance(id, str) and id:
            try:
                check_encodable(id, f"the id of a {name!r}")
            except ConfigError as error:
                raise NotExecuted(str(error)) from error
            return id
        raise NotExecuted(
            f"a {kind} names no {name!r}: entity_id gave {id!r} and not the text of an id, so "
            "nothing was sent"
        )

    def _find(self, kind: type[Any]) -> Handler:
        """The one handler for a type of messages."""
        found: list[Handler] = []
        taken: dict[str, None] = {}
        for handler in self._type.handlers.values():
            accepted = message_types(handler)
            taken.update((one.__qualname__, None) for one in accepted)
            if kind in accepted:
                found.append(handler)
        if len(found) == 1:
            return found[0]
        owner = self._type.cls.__qualname__
        if found:
            names = " and ".join(f"{owner}.{one.fn.__name__}" for one in found)
            raise NotExecuted(
                f"{names} all take a {kind.__qualname__}, so nothing was sent: leave one of them, "
                f"or send through ref({owner}, id)"
            )
        raise NotExecuted(
            f"no handler of {owner} takes a {kind.__qualname__} as its only parameter, so nothing "
            f"was sent; they take: {', '.join(sorted(taken)) or 'none'}"
        )

    def __repr__(self) -> str:
        return f"Region({self._type.cls.__qualname__})"


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", function))


def message_types(handler: Handler) -> tuple[type[Any], ...]:
    """The types that a handler's only parameter is annotated with; empty if it has none or
    several."""
    parameters = list(inspect.signature(handler.fn).parameters.values())[1:]
    if len(parameters) != 1 or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        return ()
    if parameters[0].annotation is inspect.Parameter.empty:
        return ()
    handler.check()
    holder = SimpleNamespace(__annotations__={"it": parameters[0].annotation})
    names = inspect.unwrap(handler.fn).__globals__
    hint = typing.get_type_hints(holder, names, handler.names)["it"]
    hint = getattr(hint, "__value__", hint)
    alternatives: tuple[Any, ...] = (hint,)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        alternatives = typing.get_args(hint)
    return tuple(one for one in alternatives if isinstance(one, type) and one is not NoneType)
