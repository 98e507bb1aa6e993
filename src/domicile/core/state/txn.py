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


def singly(
    conditions: Sequence[Condition], writes: Sequence[Write]
) -> list[tuple[tuple[Condition, ...], tuple[Write, ...]]]:
    """The same as one commit for each write, for a store that writes one key at a time (S8).

    Each has the conditions on its own key, and those on keys that none of the writes touches. The
    caller makes them in an order that is safe wherever it breaks off.
    """
    keys = [write.key for write in writes]
    return [
        (tuple(one for one in conditions if one.key == write.key or one.key not in keys), (write,))
        for write in writes
    ]


def check_one_key(conditions: Sequence[Condition], writes: Sequence[Write]) -> None:
    """Raise `ValueError` for a commit that a store without transactions can't keep (S8).

    It writes one key. Of other keys it may demand that they are absent or present: that is looked
    up before the write and may be over when the write lands, so it proves only what is final.
    """
    if len(writes) > 1:
        raise ValueError(
            f"a commit writes {len(writes)} keys, this store commits one at a time (S8): make one "
            "commit for each, in an order that is safe wherever it breaks off"
        )
    written = {write.key: None for write in writes}
    for condition in conditions:
        if isinstance(condition, At) and condition.key not in written:
            raise ValueError(
                f"a commit to {next(iter(written), b'')!r} depends on the revision of "
                f"{condition.key!r}, this store compares that of the written key only (S8): seal "
                "the key instead"
            )


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
