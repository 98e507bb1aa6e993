"""States as bytes, and what a durable class says about its types.

The kinds of durable entities use it. It knows neither journals nor entities at work.
"""

from __future__ import annotations

import typing
from hashlib import blake2b
from typing import Any

import msgspec

from domicile.errors import ConfigError
from domicile.persist.forgettable import hide, is_forgetful, read_stored, reveal, schema_of


def storable(owner: str, what: str, kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """What reads a type; `ConfigError` if it can't be stored."""
    try:
        return msgspec.msgpack.Decoder(kind, dec_hook=reveal)
    except (TypeError, NameError) as error:
        raise ConfigError(
            f"{owner}: {what} cannot be stored: {error}; use built-in types, dataclasses, enums or "
            "msgspec Structs, defined at module level"
        ) from None


class StateCodec:
    """A state as (mark of its type, fields). The mark tells states of other versions apart."""

    __slots__ = ("_decoder", "_encode", "_mark", "_owner", "is_forgetful")

    def __init__(self, owner: str, kind: Any) -> None:
        self._owner = owner
        self._decoder = storable(owner, f"state {getattr(kind, '__name__', kind)}", kind)
        self._encode = msgspec.msgpack.Encoder(enc_hook=hide).encode
        self.is_forgetful = is_forgetful(kind)
        """Whether a vault must be at hand."""
        self._mark = _mark(kind)

    def encode(self, state: Any) -> bytes:
        """The stored form of a state."""
        return self._encode((self._mark, state))

    def decode(self, data: bytes, *, unfit: Any) -> Any:
        """A state from its stored form; `unfit` if another version of its type stored it."""
        mark, raw = msgspec.msgpack.decode(data, type=tuple[bytes, msgspec.Raw])
        if mark != self._mark:
            return unfit
        try:
            return self._decoder.decode(raw)
        except msgspec.ValidationError:
            return unfit

    def read(self, data: bytes) -> Any:
        """A state from its stored form, whichever version stored it, as far as its fields fit."""
        _, raw = msgspec.msgpack.decode(data, type=tuple[bytes, msgspec.Raw])
        return self._decoder.decode(raw)

    def fields(self, data: bytes) -> Any:
        """What is stored of a state, as built-in types."""
        _, raw = msgspec.msgpack.decode(data, type=tuple[bytes, msgspec.Raw])
        return read_stored(bytes(raw))


def type_argument(cls: type[Any], root: type[Any], place: int) -> Any:
    """What a class gives for a type variable of its root: a type, a type variable of its own, or
    None."""
    for base in cls.__dict__.get("__orig_bases__", cls.__bases__):
        origin = typing.get_origin(base) or base
        if not (isinstance(origin, type) and issubclass(origin, root)):
            continue
        args = typing.get_args(base)
        if origin is root:
            return args[place] if args else None
        found = type_argument(origin, root, place)
        names: tuple[Any, ...] = getattr(origin, "__parameters__", ())
        return args[names.index(found)] if args and found in names else found
    return None


def _mark(kind: Any) -> bytes:
    try:
        text = msgspec.json.encode(
            msgspec.json.schema(kind, schema_hook=schema_of), order="deterministic"
        )
    except TypeError:
        # Not every type has a schema; then its name must do, and what does not fit is not used.
        text = repr(kind).encode()
    return blake2b(text, digest_size=8).digest()
