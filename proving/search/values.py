"""Machines as values: copied before they change, compared by all that their future depends on.

Used by the search only. Both functions walk whatever a machine is made of, so that a field added
to a machine tomorrow is copied and compared without a word here; both must know every kind of
thing they meet, and raise for one they do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from copy import copy
from enum import Enum
from random import Random
from types import FunctionType, MethodType
from typing import Any

import msgspec

from domicile.settings import Settings

Value = Any

EPOCH_S = 1e6
"""When time begins for a machine: anything larger than half of this is a time, not a duration."""

_ATOMS = (str, bytes, int, float, type(None), Enum, Settings, Random, FunctionType, type)
_CONSTANT = (Settings, Random, FunctionType, MethodType)
_CONTAINERS = (dict, list, deque)
SOON_S = 0.6
"""Longer than a coordinator batches, listens, settles or holds; shorter than it does by routine."""
_AHEAD_S = (0.006, SOON_S, 2.0)


class Steady(Random):
    """A source of chance without chance: a search tries what matters, jitter does not."""

    def random(self) -> float:
        """The middle."""
        return 0.5


def clone(value: Value, done: dict[int, Value] | None = None) -> Value:
    """A copy that shares everything frozen; what is shared within stays shared."""
    if _is(value, _ATOMS):
        return value
    done = {} if done is None else done
    if id(value) in done:
        return done[id(value)]
    if _is(value, (MethodType,)):
        return MethodType(value.__func__, clone(value.__self__, done))
    if _frozen(value):
        return value
    if _is(value, (tuple,)):
        items = [clone(item, done) for item in value]
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    new = done[id(value)] = _empty(value)
    if _is(value, (dict,)):
        for key, item in value.items():
            new[key] = clone(item, done)
    elif _is(value, _CONTAINERS):
        new.extend(clone(item, done) for item in value)
    else:
        setter = setattr if _is(value, (msgspec.Struct,)) else object.__setattr__
        for name in _names(value):
            setter(new, name, clone(getattr(value, name), done))
    return new


def freeze(value: Value, now: float, ordered: bool = True) -> Value:
    """A hashable value, equal for machines that will do the same from now on.

    Times become distances from `now`, in a few classes. `ordered`: whether the order of a
    dict's keys may matter.
    """
    if _is(value, (float,)):
        return _moment(value, now)
    if _is(value, _CONSTANT):
        return None
    if _is(value, _ATOMS) or (_is(value, (msgspec.Struct,)) and _hashable(value)):
        return value
    if _is(value, (dict,)):
        pairs = [(key, freeze(item, now, ordered)) for key, item in value.items()]
        return tuple(pairs if ordered else sorted(pairs, key=_first))
    if _is(value, (tuple, *_CONTAINERS)):
        return tuple([freeze(item, now, ordered) for item in value])
    return tuple([freeze(getattr(value, name), now, ordered) for name in _names(value)])


def _first(pair: tuple[Value, Value]) -> Value:
    return pair[0]


def _moment(value: float, now: float) -> float:
    if value < EPOCH_S / 2 or value == float("inf"):
        return value
    ahead_s = round(value - now, 6)
    if ahead_s <= 0:
        return 0.0 if -ahead_s <= SOON_S else float("-inf")
    return next((most_s for most_s in _AHEAD_S if ahead_s <= most_s), float("inf"))


def _is(value: Value, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds)


def _empty(value: Value) -> Value:
    if _is(value, (msgspec.Struct,)):
        return copy(value)
    return value.__class__() if _is(value, _CONTAINERS) else object.__new__(value.__class__)


def _hashable(value: Value) -> bool:
    """Frozen, and nothing in it is not."""
    try:
        hash(value)
    except TypeError:
        return False
    return _frozen(value)


def _frozen(value: Value) -> bool:
    if _is(value, (tuple,)):
        return all(_is(item, _ATOMS) or _frozen(item) for item in value)
    if _is(value, (msgspec.Struct,)):
        return bool(value.__struct_config__.frozen)
    how = getattr(value, "__dataclass_params__", None)
    return how is not None and how.frozen


def _names(value: Value) -> list[str]:
    """The attributes of an object, in a fixed order."""
    if _is(value, (msgspec.Struct,)):
        return list(value.__struct_fields__)
    names: dict[str, None] = {}
    for kind in reversed(type(value).__mro__):
        slots: str | Iterable[str] = getattr(kind, "__slots__", ())
        names.update(dict.fromkeys((slots,) if isinstance(slots, str) else slots))
    names.update(dict.fromkeys(getattr(value, "__dict__", ())))
    found = [name for name in names if hasattr(value, name) and not name.startswith("__")]
    if not found:
        raise TypeError(f"a search can not copy a {type(value).__name__}; teach `values` about it")
    return found
