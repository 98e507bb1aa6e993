"""Durable, fenced record of entities' events (J1-J4).

Journals implement this port; the writer in `domicile.persist` alone calls it. Every write locks and
advances the fence row of its shard in the same transaction, so a stale owner commits nothing (I2),
and offsets follow the order of commits. A journal must never check a fence without holding its row.

What later features need comes with them, and a journal that lacks it says so by lacking the method:
snapshots, the state of an entity without events, deliveries, reminders, remembered entities, and
reading by offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from domicile.core.ids import EntityKey, Incarnation, ShardKey

BLIND = -1
"""The `expected` of a write that does not know how many events its entity has."""


class Claim(msgspec.Struct, frozen=True, gc=False):
    """The right of an owner to write to a shard under an epoch. A fence row has one per layout."""

    shard: ShardKey
    layout: int
    epoch: int
    owner: Incarnation


class JournalWrite(msgspec.Struct, frozen=True, gc=False):
    """What one entity adds: all of it in one transaction. A batch has one write per entity.

    `expected` is the number of events that the entity has before, or `BLIND`. `inbox` holds keys
    of asks that the journal has not seen, each with its reply, or None while the reply is to come.
    `replies` holds the replies of keys that were stored before without one.
    """

    shard: ShardKey
    entity: EntityKey
    expected: int
    events: tuple[bytes, ...] = ()
    inbox: tuple[tuple[str, bytes | None], ...] = ()
    replies: tuple[tuple[str, bytes], ...] = ()


class Batch(msgspec.Struct, frozen=True, gc=False):
    """Writes of many entities and shards: one transaction, one round trip (J3).

    `number` rises from batch to batch of an owner; each shard has one batch in flight. `claims`
    has one claim for each shard of `writes`, sorted by shard.
    """

    number: int
    claims: tuple[Claim, ...]
    writes: tuple[JournalWrite, ...]


class Written(msgspec.Struct, frozen=True, gc=False):
    """A write that committed: its entity has `seq` events, its shard `offset` events."""

    seq: int
    offset: int


class WriteRefused(msgspec.Struct, frozen=True, gc=False):
    """A write that did not commit. `epoch` is the newest epoch of the shard's fence.

    fenced: another owner or epoch has the shard, or a later batch took this one's place (J2, J4).
    seq, key: the number of events is not the expected one, or a key is not as the write says.
    busy: the write is in order, but its shard took nothing of this batch; send it again, alone.
    """

    why: Literal["fenced", "busy", "seq", "key"]
    epoch: int


class Recovered(msgspec.Struct, frozen=True, gc=False):
    """Events of one entity, up to number `seq`; `more` says that the entity has more than these."""

    events: tuple[bytes, ...]
    seq: int
    more: bool


class StoredReply(msgspec.Struct, frozen=True, gc=False):
    """An inbox key that was seen before, and the reply if there is one."""

    reply: bytes | None


class JournalUnknown(Exception):
    """The journal's answer was lost; the call may have had its effect. Settle a batch (J4)."""


class Journal(Protocol):
    """What durable entities need. Any call may raise `JournalUnknown`, for all that it asked.

    Calls answer in the order of what they were asked. A call whose caller went away may still have
    its effect. A journal in the memory of this process whose calls never suspend may say so by an
    attribute `immediate = True`.
    """

    async def claim(self, claims: Sequence[Claim]) -> Sequence[int | None]:
        """Raise fences to these epochs and owners (J1): None if granted, else the newest epoch.

        A claim of a higher epoch starts the count of batches anew; repeating one does not (J4).
        """
        ...

    async def write(self, batch: Batch) -> Sequence[Written | WriteRefused]:
        """Lock and advance each shard's fence row, in shard order; write, in one transaction (J2).

        A row demands the claim's epoch and owner, and a batch number below this one. A fenced, busy
        or clashing shard fails alone, and as a whole: of one shard all writes commit, or none. A
        batch of several shards may leave out one whose row is held; a batch of one shard waits.
        """
        ...

    async def settle(self, batch: Batch) -> Sequence[Written | WriteRefused | None]:
        """After an unknown outcome: lock the rows and say what became of each write (J4).

        None: the write never happened, and never will; its batch number is used up. `fenced`: an
        owner or epoch has the shard that cannot know. Settling again gives the same answers.
        """
        ...

    async def recover(
        self, wanted: Sequence[tuple[EntityKey, int]], max_bytes: int
    ) -> Sequence[Recovered]:
        """The events of entities after a number of events each, in order.

        The answer holds about `max_bytes` of events. It holds at least one event, if there is one.
        """
        ...

    async def inbox(self, asked: Sequence[tuple[EntityKey, str]]) -> Sequence[StoredReply | None]:
        """What became of keyed asks that were recorded."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


def is_immediate(journal: Journal) -> bool:
    """Whether the calls of a journal end within the call, without suspending."""
    return bool(getattr(journal, "immediate", False))
