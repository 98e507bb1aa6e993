"""The annotated fields of an entity class as bytes, for planned moves (`carry=True`).

`entity` makes one `Fields` per class; `carry` uses it. Nothing here sends or keeps fields.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable
from inspect import get_annotations
from types import MemberDescriptorType
from typing import Any, ClassVar

import msgspec

from domicile.entity.model.codec import parts_of
from domicile.errors import ConfigError

_OURS = ("_domicile", "__domicile")


_encode = msgspec.msgpack.Encoder().encode


class Fields:
    """The annotated fields of an entity class as bytes, by name, so that versions may differ."""

    __slots__ = ("_cls", "_decoder", "_names", "_namespace")

    def __init__(self, cls: type[Any], namespace: Callable[[type[Any]], dict[str, Any]]) -> None:
        self._cls = cls
        self._namespace = namespace
        self._names: tuple[str, ...] = ()
        self._decoder: msgspec.msgpack.Decoder[Any] | None = None
        try:
            self._resolve()
        except NameError:
            # The name is defined further down in the module; `resolve` runs before the first home.
            self._decoder = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the fields that are taken along."""
        self.resolve()
        return self._names

    def resolve(self) -> msgspec.msgpack.Decoder[Any]:
        """Resolve and check all fields now; `ConfigError` names the first that cannot travel."""
        if self._decoder is not None:
            return self._decoder
        try:
            return self._resolve()
        except NameError as error:
            raise ConfigError(
                f"{self._cls.__qualname__}: a field cannot be resolved: {error}. Define or import "
                "that name at module level, outside `if TYPE_CHECKING`."
            ) from error

    def encode(self, entity: Any) -> bytes:
        """The fields set on an entity, as bytes; TypeError if a value cannot travel."""
        self.resolve()
        held: dict[str, Any] = getattr(entity, "__dict__", {})
        values: dict[str, Any] = {}
        for name in self._names:
            if name in held:
                values[name] = held[name]
            elif isinstance(getattr(self._cls, name, None), MemberDescriptorType):
                value = getattr(entity, name, msgspec.UNSET)
                if value is not msgspec.UNSET:
                    values[name] = value
        try:
            return _encode(values)
        except (TypeError, ValueError, OverflowError, NotImplementedError, RecursionError) as error:
            raise TypeError(f"{self._cls.__qualname__}: a field cannot travel: {error}") from error

    def restore(self, entity: Any, body: bytes) -> None:
        """Set the fields that `encode` took; `msgspec.DecodeError` if they do not fit this
        version."""
        found = self.resolve().decode(body)
        for name in self._names:
            value = getattr(found, name)
            if value is not msgspec.UNSET:
                setattr(entity, name, value)

    def _resolve(self) -> msgspec.msgpack.Decoder[Any]:
        kinds: dict[str, Any] = {}
        for base in reversed(self._cls.__mro__):
            for name, annotation in get_annotations(base).items():
                if name.startswith(_OURS):
                    continue
                kind = self._kind(base, name, annotation)
                if typing.get_origin(kind) is ClassVar or kind is ClassVar:
                    kinds.pop(name, None)
                else:
                    kinds[name] = kind
        if not kinds:
            raise ConfigError(
                f"{self._cls.__qualname__}: carry=True, but no field is annotated; write "
                "`count: int = 0` in the class for everything that moves along"
            )
        optional = [
            (name, typing.Union[kind, msgspec.UnsetType], msgspec.UNSET)  # noqa: UP007
            for name, kind in kinds.items()
        ]
        self._names = tuple(kinds)
        made = msgspec.defstruct("Fields", optional, kw_only=True)
        self._decoder = msgspec.msgpack.Decoder(made)
        return self._decoder

    def _kind(self, base: type[Any], name: str, annotation: Any) -> Any:
        label = f"{self._cls.__qualname__}: carry=True, but the field {name!r}"
        holder = type("Holder", (), {"__annotations__": {name: annotation}})
        module = sys.modules.get(base.__module__)
        names = vars(module) if module is not None else {}
        try:
            hints = typing.get_type_hints(holder, names, self._namespace(base), include_extras=True)
        except (AttributeError, SyntaxError, TypeError) as error:
            raise ConfigError(f"{label} has no usable type: {error}") from error
        kind = hints[name]
        if typing.get_origin(kind) is ClassVar or kind is ClassVar:
            return kind
        try:
            for part in parts_of(kind):
                if isinstance(part, msgspec.inspect.CustomType):
                    raise TypeError(f"nothing is known about {part.cls.__qualname__}")
            msgspec.msgpack.Decoder(kind)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"{label} cannot travel: {error}. Use built-in types, dataclasses, enums or "
                "msgspec Structs; what must stay behind needs no annotation, or ClassVar"
            ) from error
        return kind
