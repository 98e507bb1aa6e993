"""The methods of an entity class that a timer may call, by name: a moved timer finds its method
again at the next home (DX-25).

`entity` makes one `TimedMethods` per class; `hosting` uses it. Nothing here keeps or runs a timer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import msgspec

from domicile.entity.model.codec import Packing

_UNTYPED = b"\xc1"
"""First byte of arguments that were encoded without declared types; msgpack never begins so."""

_encode = msgspec.msgpack.Encoder().encode
_untyped = msgspec.msgpack.Decoder(tuple[tuple[Any, ...], dict[str, Any]])
_given: msgspec.msgpack.Decoder[tuple[Any, ...] | dict[str, Any]] = msgspec.msgpack.Decoder(
    tuple[Any, ...] | dict[str, Any]
)


class TimedMethod:
    """One `async def` method, with the coding of its arguments.

    Arguments travel as those of a message do. If the parameters cannot be listed, or their types
    not be resolved, they travel as plain values and come back as built-in types.
    """

    __slots__ = ("_packing", "fn", "name")

    def __init__(self, name: str, fn: FunctionType, label: str, names: dict[str, Any]) -> None:
        self.name = name
        self.fn = fn
        self._packing: Packing | None = None
        try:
            packing = Packing(label, fn, names)
            packing.resolve()
            self._packing = packing
        except Exception:
            # Nothing was promised about the parameters of a method that is no handler, and odd
            # annotations must not keep a shard from moving.
            pass

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        """The bytes of the arguments; TypeError if they cannot travel."""
        if self._packing is not None:
            return self._packing.encode_args(args, kwargs)
        try:
            return _UNTYPED + _encode((args, kwargs))
        except Exception as error:
            raise TypeError(f"an argument cannot travel: {error}") from error

    def decode(self, body: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments; `NotExecuted` or `msgspec.DecodeError` if they do not fit this version."""
        if body.startswith(_UNTYPED):
            return _untyped.decode(body[1:])
        if self._packing is not None:
            return self._packing.decode_args(body)
        given = _given.decode(body)
        return ((), given) if isinstance(given, dict) else (given, {})


class TimedMethods:
    """The `async def` methods of one entity class, found when they are first needed."""

    __slots__ = ("_cls", "_found", "_namespace")

    def __init__(
        self, cls: type[Any], namespace: Callable[[type[Any], str], dict[str, Any]]
    ) -> None:
        self._cls = cls
        self._namespace = namespace
        self._found: dict[str, TimedMethod] = {}

    def named(self, name: str) -> TimedMethod | None:
        """The method that the class has under this name."""
        found = self._found.get(name)
        if found is None:
            fn = inspect.getattr_static(self._cls, name, None)
            if not isinstance(fn, FunctionType) or not inspect.iscoroutinefunction(fn):
                return None
            label = f"{self._cls.__qualname__}.{name}"
            names = self._namespace(self._cls, name)
            found = self._found[name] = TimedMethod(name, fn, label, names)
        return found

    def of(self, fn: Callable[..., Any]) -> TimedMethod | None:
        """The method with this function; None if the class has it under no name."""
        name = getattr(fn, "__name__", "")
        found = self.named(name)
        if found is not None and found.fn is fn:
            return found
        # Its name in the class differs: a private name, or a decorator.
        for base in self._cls.__mro__:
            for attribute, value in vars(base).items():
                if value is fn:
                    found = self.named(attribute)
                    if found is not None and found.fn is fn:
                        return found
        return None
