"""Durable, fenced record of entities' events (J1, J2, J4).

Every write locks and advances the shard's fence row in the same transaction, so a stale owner
can commit nothing (I2), and offsets follow commit order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from domicile.core.ids import EntityKey, Incarnation, ShardKey


@dataclass(frozen=True, slots=True)
class Claim:
    """Who writes: the right to a shard under an epoch."""

    shard: ShardKey
    epoch: int
    owner: Incarnation


@dataclass(frozen=True, slots=True)
class Append:
    """One atomic write for one entity. `append_id` finds a write of unknown outcome (J4).

    `expected_seq` is the number of events the entity has before this one. `key` is the inbox
    key of the ask that caused it, stored with `reply` in the same transaction; a key without a
    reply yet has `reply` None. A write of a key that exists replaces its reply, never adds events.
    """

    append_id: str
    entity: EntityKey
    expected_seq: int
    events: tuple[bytes, ...]
    key: str = ""
    reply: bytes | None = None


@dataclass(frozen=True, slots=True)
class Appended:
    """It committed; the entity now has `seq` events."""

    seq: int
    offset: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """It did not commit. `epoch` is the fence's newest epoch; `fenced` False: seq or key clash."""

    epoch: int
    fenced: bool


@dataclass(frozen=True, slots=True)
class StoredEvents:
    """An inbox key that was seen before, and the reply if there is one."""

    reply: bytes | None


class JournalUnknown(Exception):
    """The journal's answer was lost; the write may have happened. Look it up by its append id."""


class Journal(Protocol):
    """What durable entities need. Calls may raise `JournalUnknown`."""

    async def claim(self, claim: Claim) -> Refusal | None:
        """Raise the fence to this epoch and owner (J1). None if it was granted."""
        ...

    async def append(self, claim: Claim, append: Append) -> Appended | Refusal:
        """Lock and advance the fence, then write, in one transaction (J2)."""
        ...

    async def appended(self, claim: Claim, append_id: str) -> Appended | None:
        """After an unknown outcome: lock the fence row, then look for the write (J4)."""
        ...

    async def read(self, entity: EntityKey) -> tuple[bytes, ...]:
        """All events of an entity in order."""
        ...

    async def inbox(self, entity: EntityKey, key: str) -> StoredEvents | None:
        """What became of a keyed ask, if it was ever recorded."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...
