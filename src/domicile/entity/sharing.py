"""Which values a local call may hand over as they are, and which it copies as if they travelled.

Used by the codec. A value is shared only if nobody can change it, if it is of the very type that is
declared, and if the codec would let it travel; asked before every local ask, so each answer is one
small function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

MOST = 65_536
"""Longer ones go through the codec, which knows the limit of a message."""

_LEAST_INT, _MOST_INT = -(1 << 63), (1 << 64) - 1

SHARED: dict[Any, Callable[[Any], bool]] = {
    int: lambda value: type(value) is int and _LEAST_INT <= value <= _MOST_INT,
    str: lambda value: type(value) is str and len(value) <= MOST and value.isascii(),
    bytes: lambda value: type(value) is bytes and len(value) <= MOST,
    float: lambda value: type(value) is float,
    bool: lambda value: type(value) is bool,
    type(None): lambda value: value is None,
}

_ONE: dict[Any, Callable[[tuple[Any, ...]], bool]] = {
    int: lambda a: len(a) == 1 and type(a[0]) is int and _LEAST_INT <= a[0] <= _MOST_INT,
    str: lambda a: len(a) == 1 and type(a[0]) is str and len(a[0]) <= MOST and a[0].isascii(),
    bytes: lambda a: len(a) == 1 and type(a[0]) is bytes and len(a[0]) <= MOST,
}


def nothing_shared(_values: Any) -> bool:
    """The codec copies."""
    return False


def sharing_of(kinds: Sequence[Any]) -> Callable[[tuple[Any, ...]], bool]:
    """Whether the arguments of one function may be shared, as a function of them."""
    if not kinds:
        return lambda args: not args
    if not all(isinstance(kind, type) and kind in SHARED for kind in kinds):
        return nothing_shared
    if len(kinds) == 1 and kinds[0] in _ONE:
        return _ONE[kinds[0]]
    fits = [SHARED[kind] for kind in kinds]
    count = len(fits)
    return lambda args: (
        len(args) == count and all(fit(value) for fit, value in zip(fits, args, strict=True))
    )
