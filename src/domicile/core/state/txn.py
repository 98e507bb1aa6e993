"""What one commit can ask of a store, and which outcomes it can have (S1, S7).

Every store and every caller of a store uses these types. Data only: nothing here talks to a store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_OPERATIONS = 64
MAX_VALUE_BYTES = 512 * 1024
MAX_COMMIT_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class At:
    """Condition: the key exists and was last written at this revision."""

    key: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Absent:
    """Condition: the key does not exist."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Present:
    """Condition: the key exists, at any revision."""

    key: bytes


Condition = At | Absent | Present


@dataclass(frozen=True, slots=True)
class Put:
    """Write a value. With a lease, the key disappears with that lease; a value with an epoch is
    never leased (S6)."""

    key: bytes
    value: bytes
    lease: str | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a key; removing an absent key is not an error."""

    key: bytes


Write = Put | Delete


@dataclass(frozen=True, slots=True)
class Committed:
    """All writes happened, at this revision."""

    revision: int


@dataclass(frozen=True, slots=True)
class Conflict:
    """A condition did not hold; nothing happened."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Unknown:
    """The writes may have happened. The caller reads again and looks for its transaction id."""


Outcome = Committed | Conflict | Unknown


@dataclass(frozen=True, slots=True)
class Item:
    """A stored value with the revisions of its creation and last write."""

    key: bytes
    value: bytes
    created: int
    revision: int


@dataclass(frozen=True, slots=True)
class Listing:
    """All items under a prefix, in key order, as of one store revision."""

    revision: int
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """One key's change as a watch delivers it; `item` is None for a deletion."""

    key: bytes
    item: Item | None


@dataclass(frozen=True, slots=True)
class Changes:
    """Everything one commit changed under a watched prefix."""

    revision: int
    changes: tuple[Change, ...]


def check_limits(conditions: Sequence[Condition], writes: Sequence[Write]) -> None:
    """Raise `ValueError` for a commit that is too big for some store (S7)."""
    operations = len(conditions) + len(writes)
    if operations > MAX_OPERATIONS:
        raise ValueError(
            f"a commit of {operations} operations is over MAX_OPERATIONS = {MAX_OPERATIONS} "
            "(S7, conditions and writes together); split it"
        )
    keys: dict[bytes, None] = {}
    total = sum([len(condition.key) for condition in conditions])
    for write in writes:
        if write.key in keys:
            raise ValueError(f"a commit writes {write.key!r} twice; write each key once")
        keys[write.key] = None
        total += len(write.key)
        if isinstance(write, Delete):
            continue
        total += len(write.value)
        if len(write.value) > MAX_VALUE_BYTES:
            raise ValueError(
                f"the value for {write.key!r} has {len(write.value)} bytes, over "
                f"MAX_VALUE_BYTES = {MAX_VALUE_BYTES} (S7); store less under one key"
            )
    if total > MAX_COMMIT_BYTES:
        raise ValueError(
            f"a commit of {total} bytes is over MAX_COMMIT_BYTES = {MAX_COMMIT_BYTES} (S7, keys "
            "and values together); split it"
        )
