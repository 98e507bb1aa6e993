"""How values become bytes. One implementation today (msgspec); nothing is ever unpickled."""

from __future__ import annotations

from typing import Any, Protocol


class Codec(Protocol):
    """Typed encoding: decoding needs the type that the receiver declared."""

    def encode(self, value: Any) -> bytes:
        """The bytes of a value."""
        ...

    def decode(self, data: bytes, kind: Any) -> Any:
        """A value of the declared kind, or an error that names what does not fit."""
        ...
