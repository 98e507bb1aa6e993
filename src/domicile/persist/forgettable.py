"""Values that can be erased although the events that mention them stay.

An event, a snapshot or a stored state holds only a reference to such a value. The values of an
entity lie in the journal as another entity's, its *vault*: of the same id and shard, under a type
name of its own. So every journal keeps, copies and restores them as it does everything, and erasing
them is a deletion: their rows go, and a mark with an offset tells projections.

`EntityLog` writes and reads vaults. Nothing here knows a journal.
"""

from __future__ import annotations

import typing
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from random import Random
from typing import Any, Final, Generic, TypeGuard, TypeVar

import msgspec

from domicile.core.ids import EntityKey
from domicile.errors import ConfigError

T_co = TypeVar("T_co", covariant=True)

VAULT = "~forgettable"
"""What the type name of a vault ends in."""

REFERENCE = 1
"""The code of a reference among the extensions of MessagePack."""

_GONE: Final[Any] = object()


class Forgettable(Generic[T_co]):
    """A value of an event or a state that can be erased: a name, an address, anything personal.

    `Forgettable("ada@example.org")` makes one. `value` is None once it is erased, in every event
    and state that mentions it. It shows nothing of its value in logs and tracebacks.
    """

    __slots__ = ("_reference", "_value", "_vault")

    def __init__(self, value: T_co, /) -> None:
        self._value = value
        self._vault: Vault | None = None
        self._reference = 0

    @classmethod
    def erased(cls) -> Forgettable[T_co]:
        """One whose value is gone, for tests."""
        return cls(_GONE)

    @property
    def value(self) -> T_co | None:
        """The value, or None if it was erased."""
        return None if self.is_erased else self._value

    @property
    def is_erased(self) -> bool:
        """Whether the value is gone; it tells an erased one from one that is None."""
        return self._value is _GONE or (self._vault is not None and self._vault.is_erased)

    def __eq__(self, other: object) -> bool:
        if not _is_one(other):
            return NotImplemented
        if self.is_erased or other.is_erased:
            return self.is_erased and other.is_erased
        return bool(self._value == other._value)

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return "Forgettable(<erased>)" if self.is_erased else "Forgettable(<hidden>)"

    def __domicile_reference__(self, vault: Vault) -> int:
        """What stands for the value in a vault; a new one if another vault has it."""
        if self._vault is None:
            self._vault, self._reference = vault, vault.new_reference()
        return self._reference if self._vault is vault else vault.new_reference()

    @classmethod
    def __domicile_found__(cls, value: Any, vault: Vault, reference: int) -> Forgettable[Any]:
        """A value that a vault has."""
        found: Forgettable[Any] = Forgettable(value)
        found._vault, found._reference = vault, reference
        return found


class Erasure(msgspec.Struct, frozen=True):
    """The receipt of an erasure: of which entity, how many values, and when."""

    type: str
    id: str
    values: int
    at: datetime


class Forgotten(msgspec.Struct, frozen=True):
    """Stands in a projection for an erasure: the values that the entity's earlier events had in
    `Forgettable` fields are gone. Remove the copies that you made of them."""


class Vault:
    """The forgettable values of one entity. `is_whole`: each write replaces all that came before.

    While it is at hand (`open`), what is encoded puts its values here and keeps references, and
    what is decoded finds them here.
    """

    __slots__ = ("_fresh", "_is_whole", "_random", "_values", "is_erased")

    def __init__(self, random: Random, *, is_whole: bool = False) -> None:
        self._random = random
        self._is_whole = is_whole
        self._values: dict[int, bytes] = {}
        self._fresh: dict[int, bytes] = {}
        """Values that no write has taken yet."""
        self.is_erased = False

    @contextmanager
    def open(self) -> Generator[None, None, None]:
        """Have it at hand for the encoding and decoding that follows, which must not suspend."""
        token = _at_hand.set(self)
        try:
            yield
        finally:
            _at_hand.reset(token)

    def begin(self) -> None:
        """A new whole state is encoded next: the values of the one before are not wanted."""
        if self._is_whole:
            self._fresh.clear()

    def keep(self, one: Forgettable[Any]) -> int:
        """The reference that stands for a value; 0 for an erased one."""
        if one.is_erased:
            return 0
        reference = one.__domicile_reference__(self)
        if reference not in self._values or self._is_whole:
            self._fresh[reference] = _encode(one.value)
        return reference

    def new_reference(self) -> int:
        """One that stands for nothing yet."""
        return self._random.getrandbits(63) or 1

    def find(self, reference: int, kind: Any) -> Forgettable[Any]:
        """The value that a reference stands for, read as a type."""
        data = self._values.get(reference) or self._fresh.get(reference)
        if data is None:
            return Forgettable[Any].erased()
        return Forgettable.__domicile_found__(_decoder(kind).decode(data), self, reference)

    # what is stored

    def take(self) -> bytes | None:
        """The values that the next write must store, as its event or whole state; None if none."""
        fresh, self._fresh = self._fresh, {}
        if self._is_whole:
            before, self._values = self._values, fresh
            return _encode(fresh) if fresh or before else None
        self._values |= fresh
        return _encode(fresh) if fresh else None

    def drop(self) -> None:
        """What no write has taken is not stored."""
        self._fresh.clear()

    def refill(self, stored: Iterable[bytes]) -> None:
        """These values are stored, and no others; what no write has taken stays."""
        self._values = {}
        for data in stored:
            self._values |= _stored.decode(data)

    def __len__(self) -> int:
        return len(self._values)


_at_hand: ContextVar[Vault | None] = ContextVar("domicile_vault", default=None)
_encode = msgspec.msgpack.Encoder().encode
_stored = msgspec.msgpack.Decoder(dict[int, bytes])


def vault_key(entity: EntityKey) -> EntityKey:
    """The key of an entity's vault."""
    return EntityKey(entity.type + VAULT, entity.id)


def owner_of(vault: EntityKey) -> EntityKey | None:
    """The entity whose vault this is; None if it is no vault."""
    type, id = vault
    return EntityKey(type.removesuffix(VAULT), id) if type.endswith(VAULT) else None


def is_forgetful(kind: Any) -> bool:
    """Whether a type that can be stored has `Forgettable` fields, however deep."""
    seen: set[int] = set()
    pending: list[Any] = [msgspec.inspect.type_info(kind)]
    while pending:
        one = pending.pop()
        if isinstance(one, msgspec.inspect.CustomType) and one.cls is Forgettable:
            return True
        if isinstance(one, tuple):
            pending += one
        elif isinstance(one, msgspec.Struct) and id(one) not in seen:
            seen.add(id(one))
            pending += [
                getattr(one, name)
                for name in one.__struct_fields__
                if isinstance(getattr(one, name), tuple | msgspec.Struct)
            ]
    return False


def read_stored(data: bytes) -> Any:
    """Something stored as built-in types, and `Forgettable` values whose types nobody names."""
    return msgspec.msgpack.decode(data, ext_hook=_untyped)


def hide(value: Any) -> Any:
    """What stands for a value that MessagePack does not know."""
    if not _is_one(value):
        # As if nobody had been asked.
        raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")
    vault = _at_hand.get()
    if vault is None:
        raise TypeError("a Forgettable can be stored as a field of an event or a state only")
    return msgspec.msgpack.Ext(REFERENCE, vault.keep(value).to_bytes(8, "big"))


def reveal(kind: Any, stored: Any) -> Any:
    """The value of a type that MessagePack does not know."""
    cls = typing.get_origin(kind) or kind
    if cls is not Forgettable:
        # As if nobody had been asked.
        if isinstance(stored, cls):
            return stored
        raise TypeError(f"Expected `{cls.__name__}`, got `{type(stored).__name__}`")
    [of] = typing.get_args(kind) or (Any,)
    if isinstance(stored, msgspec.msgpack.Ext) and stored.code == REFERENCE:
        return _found(bytes(stored.data), of)
    # It was stored before the field became forgettable: it is part of the event for ever.
    return Forgettable(msgspec.convert(stored, of))


def schema_of(kind: Any) -> dict[str, Any]:
    """What stands for such a type in a description of types."""
    return {"forgettable": repr(kind)}


def check_name(type: str) -> None:
    """`ConfigError` for the name of an entity that would be taken for a vault."""
    if type.endswith(VAULT):
        raise ConfigError(f"the name {type!r} ends in {VAULT!r}, which is kept for stored values")


def _is_one(value: object) -> TypeGuard[Forgettable[Any]]:
    return isinstance(value, Forgettable)


def _untyped(code: int, data: memoryview) -> Any:
    return _found(bytes(data), Any) if code == REFERENCE else msgspec.msgpack.Ext(code, bytes(data))


def _found(data: bytes, kind: Any) -> Forgettable[Any]:
    vault = _at_hand.get()
    reference = int.from_bytes(data, "big")
    return Forgettable[Any].erased() if vault is None else vault.find(reference, kind)


@lru_cache(maxsize=256)
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)
