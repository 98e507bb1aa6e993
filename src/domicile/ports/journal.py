"""Durable, fenced record of entities' events (J1-J4).

Journals implement this port; the writer in `domicile.persist` alone calls it. Every write locks and
advances the fence row of its shard in the same transaction, so a stale owner commits nothing (I2),
and offsets follow the order of commits. A journal must never check a fence without holding its row.

What later features need comes with them: deliveries and reminders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeGuard, runtime_checkable

import msgspec

from domicile.core.ids import EntityKey, Incarnation, ShardKey

BLIND = -1
"""The `expected` of a write that does not know how many events its entity has."""

MOST_KEYS = 256
"""A recovery tells the keys of an entity that has no more than these."""


SCAN_BYTES = 1 << 20
"""Most bytes of events in one page of a scan, unless its caller says another number."""


class Claim(msgspec.Struct, frozen=True, gc=False):
    """The right of an owner to write to a shard under an epoch. A fence row has one per layout."""

    shard: ShardKey
    layout: int
    epoch: int
    owner: Incarnation


ClaimAnswer = int | Literal["busy"] | None
"""None: the claim is granted. A number: the newest epoch of the fence. busy: another transaction
holds the row, so nothing was tried."""


class JournalWrite(msgspec.Struct, frozen=True, gc=False):
    """What one entity adds: all of it in one transaction. A batch has one write per entity.

    `expected` is the number `seq` that the entity has before, or `BLIND`. `inbox` holds keys of
    asks that the journal has not seen, each with its reply, or None while the reply is to come.
    `replies` holds the replies of keys that were stored before without one.

    `state` is the whole new state of an entity without events. It takes no offset and no row among
    the events. `seq` rises by `saves`: as many turns saved a state, and this is the last one. A
    write has events or a state, never both.

    `snapshot` is (the number of the last event in it, the bytes). It replaces one that is not
    newer, and it may be older than this write. It can't include events that are not there: that is
    refused as `seq`. The journal ignores one from before a deletion.

    `remember` sets or clears the flag that `Journal.remembered` lists. `delete` comes last: events,
    state and snapshot go, those of this write too, and the flag is cleared. One event without data
    takes their place, with a number and an offset of its own. Keys of asks stay.

    `erase` takes the entity's snapshot and the replies of all its keys away; keys stay. Such a
    write has nothing else but keys without replies, and a deletion.
    """

    shard: ShardKey
    entity: EntityKey
    expected: int
    events: tuple[bytes, ...] = ()
    inbox: tuple[tuple[str, bytes | None], ...] = ()
    replies: tuple[tuple[str, bytes], ...] = ()
    state: bytes | None = None
    snapshot: tuple[int, bytes] | None = None
    remember: bool | None = None
    delete: bool = False
    saves: int = 1
    erase: bool = False


def counted(write: JournalWrite) -> int:
    """How far a write raises the number `seq` of its entity."""
    if write.state is None and not write.delete:
        return len(write.events)
    return len(write.events) + (0 if write.state is None else write.saves) + write.delete


def placed(write: JournalWrite) -> int:
    """How far a write raises the offset of its shard: a state takes no place."""
    return len(write.events) + write.delete


class Batch(msgspec.Struct, frozen=True, gc=False):
    """Writes of many entities and shards: one transaction, one round trip (J3).

    `number` rises from batch to batch of an owner; each shard has one batch in flight. `claims`
    has one claim for each shard of `writes`, sorted by shard.
    """

    number: int
    claims: tuple[Claim, ...]
    writes: tuple[JournalWrite, ...]


class Written(msgspec.Struct, frozen=True, gc=False):
    """A write that committed: the numbers of its entity and of its shard after it.

    `seq` counts the events, saves and deletions of the entity, `offset` the events and deletions of
    the shard.
    """

    seq: int
    offset: int


class WriteRefused(msgspec.Struct, frozen=True, gc=False):
    """A write that did not commit. `epoch` is the newest epoch of the shard's fence.

    fenced: another owner or epoch has the shard, or a later batch took this one's place (J2, J4).
    seq, key: the number `seq` is not the expected one, or a key is not as the write says.
    busy: the write is in order, but its shard took nothing of this batch; send it again, alone.
    """

    why: Literal["fenced", "busy", "seq", "key"]
    epoch: int


class Wanted(msgspec.Struct, frozen=True, gc=False):
    """What to recover of an entity: all after number `after`.

    From the start (0), the journal begins with the snapshot if there is one and `snapshot` is true.
    """

    entity: EntityKey
    after: int = 0
    snapshot: bool = True


class Recovered(msgspec.Struct, frozen=True, gc=False):
    """Events of one entity, up to number `seq`; `more` says that the entity has more than these.

    `events` follow the snapshot, if there is one here. `state` is that of an entity without events.
    `keys` has all keys of asks that the journal knows for the entity: from the start only, and only
    if they are at most `MOST_KEYS`. An entity that found no room has nothing here, `seq` is the
    number asked for, and `more` is true.
    """

    events: tuple[bytes, ...]
    seq: int
    more: bool
    snapshot: tuple[int, bytes] | None = None
    state: bytes | None = None
    keys: tuple[str, ...] | None = None


class StoredEvent(msgspec.Struct, frozen=True, gc=False):
    """An event as a projection reads it. `data` is None if the entity was deleted here."""

    offset: int
    entity: EntityKey
    seq: int
    data: bytes | None


class EventPage(msgspec.Struct, frozen=True, gc=False):
    """Events of a shard in the order of offsets.

    Every offset up to `upto` is here, or in an earlier page, or will never exist: a deletion takes
    events away. An `upto` below the offset asked for says that the journal has lost events.
    """

    events: tuple[StoredEvent, ...]
    upto: int


class Remembered(msgspec.Struct, frozen=True, gc=False):
    """An entity whose flag is set. `last` orders the entities of a shard by their last writes."""

    entity: EntityKey
    last: int


class StoredReply(msgspec.Struct, frozen=True, gc=False):
    """An inbox key that was seen before, and the reply if there is one."""

    reply: bytes | None


class JournalUnknown(Exception):
    """The journal's answer was lost; the call may have had its effect. Settle a batch (J4)."""


class JournalAbsent(JournalUnknown):
    """There is no journal of this cluster yet: a node with durable entities makes it."""


class Journal(Protocol):
    """What durable entities need. Any call may raise `JournalUnknown`, for all that it asked.

    Calls answer in the order of what they were asked. A call whose caller went away may still have
    its effect. A journal in the memory of this process whose calls never suspend may say so by an
    attribute `immediate = True`. One that writes one batch after the other anyway may say
    `one_writer = True`: what comes meanwhile goes with the next batch then, which is larger. One
    that tells the log why it does not answer says `tells_trouble = True`. One that must know which
    processes still have a record names this process as `process`: node records then say it, too.
    """

    async def claim(self, claims: Sequence[Claim], *, wait: bool = True) -> Sequence[ClaimAnswer]:
        """Raise fences to these epochs and owners (J1): None if granted, else the newest epoch.

        A claim of a higher epoch starts the count of batches anew; repeating one does not (J4).
        Without `wait`, a shard whose row is held is answered `busy`, and the others go on. A
        journal with one writer, which holds no row longer than its batch, may wait all the same.
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

    async def recover(self, wanted: Sequence[Wanted], max_bytes: int) -> Sequence[Recovered]:
        """What entities were, and what happened to them since: one round trip for all of them.

        The answer holds about `max_bytes` of events, snapshots and states. It holds at least one of
        them, if there is one.
        """
        ...

    async def inbox(self, asked: Sequence[tuple[EntityKey, str]]) -> Sequence[StoredReply | None]:
        """What became of keyed asks that were recorded."""
        ...

    async def scan(
        self, shard: ShardKey, after: int, limit: int, max_bytes: int = SCAN_BYTES
    ) -> EventPage:
        """Events of a shard after an offset, at most `limit`, for projections.

        Their data has at most `max_bytes` together, but one event comes always, if there is one.

        No gap is possible: offsets are taken under the lock of the fence row, which is held until
        the commit.
        """
        ...

    async def remembered(
        self, shard: ShardKey, after: Remembered | None, limit: int
    ) -> Sequence[Remembered]:
        """Remembered entities of a shard, those written last first; `after` is the last one known.

        An entity that is written between two pages moves to the front. Later pages may leave it
        out: who wrote it has it already.
        """
        ...

    async def history(self) -> str:
        """The random id of this journal: another one is never taken for it (J11)."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...


@runtime_checkable
class TellsOffsets(Protocol):
    """A journal that can tell how far all its shards are in one call. One that can't is scanned."""

    async def offsets(self, role: str) -> Mapping[int, int]:
        """The last offsets of a role's shards, by their numbers; shards without a claim are left
        out."""
        ...


class JournalMarks(msgspec.Struct, frozen=True, gc=False):
    """How far a journal is: its id, and the last offsets of the shards asked for.

    Shards without a claim are left out.
    """

    history: str
    offsets: dict[ShardKey, int]


@runtime_checkable
class ComparableJournal(Journal, Protocol):
    """A journal that outlives its processes: they compare it with what the store knows (J11).

    A journal that ends with its process, although it has these calls, may say so by an attribute
    `volatile = True`.
    """

    async def marks(self, shards: Sequence[ShardKey]) -> JournalMarks:
        """The id of this journal and the last offsets of shards, as of one moment."""
        ...

    async def renew(self, history: str) -> None:
        """Replace the id of this journal, durably. Its contents stay."""
        ...


class FencedTransaction(Protocol):
    """A transaction on a connection of the application that holds a shard's fence row (J10).

    While it is open nobody can claim the shard, and nobody can write to its part of the journal.
    """

    async def begin(self) -> int | None:
        """Begin, lock the row, then look at it: None if the claim holds, else the newest epoch.

        `ConfigError` if the connection is not fit, `Unavailable` if the row can't be locked.
        """
        ...

    async def check(self) -> None:
        """See that what ran since `begin` can be committed; else raise, with nothing committed."""
        ...

    async def commit(self) -> None:
        """Commit. `JournalUnknown` if the answer does not come; other errors: nothing committed."""
        ...

    async def rollback(self) -> None:
        """Undo what ran since `begin`, and let go of the row; also if the connection is gone."""
        ...


@runtime_checkable
class FencesConnections(Protocol):
    """A journal on a server, where an application may have tables of its own beside it (J10)."""

    def fenced(self, connection: object, claim: Claim) -> FencedTransaction:
        """A transaction on this connection; `ConfigError` if it is of another kind."""
        ...


class FenceSeen(msgspec.Struct, frozen=True, gc=False):
    """A fence row as tools see it; `offset` is the last one of the shard."""

    role: str
    shard: int
    layout: int
    epoch: int
    owner: Incarnation
    offset: int


class JournalFigures(msgspec.Struct, frozen=True):
    """A journal as tools see it. `bytes` is what its events have; `history` tells copies apart."""

    backend: str
    format: int
    history: str
    entities: int
    events: int
    bytes: int
    fences: tuple[FenceSeen, ...]


class JournalNames(msgspec.Struct, frozen=True):
    """What a journal knows by name: its clusters, and the entity types of this one, sorted."""

    clusters: tuple[str, ...]
    types: tuple[str, ...]


@runtime_checkable
class InspectableJournal(Protocol):
    """A journal that tools can look into. These calls change nothing, and may take long."""

    async def figures(self) -> JournalFigures | None:
        """What there is of the cluster; None if the journal has nothing of it."""
        ...

    async def fences(self) -> Sequence[FenceSeen]:
        """The fence rows of the cluster, in order; this one is quick."""
        ...

    async def names(self) -> JournalNames:
        """What can be asked for, for those who asked for something else."""
        ...

    async def faults(self) -> Sequence[str]:
        """What does not agree: heads with events, numbers without a gap, offsets with fences."""
        ...


def older_format(place: str, found: int) -> str:
    """What to tell a tool that may not bring the journal at this place up to date."""
    return (
        f"the journal {place} has format {found}, which is older than this version of Domicile: a "
        "node of this version brings it up to date when it starts; until then use the version that "
        "made it"
    )


def is_comparable(journal: Journal) -> TypeGuard[ComparableJournal]:
    """Whether what a journal has can be compared with what the store knows of it."""
    return isinstance(journal, ComparableJournal) and not getattr(journal, "volatile", False)


def process_of(journal: Journal | None) -> str:
    """How a journal names this process; empty if it does not."""
    return str(getattr(journal, "process", ""))


def tells_trouble(journal: Journal) -> bool:
    """Whether a journal tells the log of its node itself why it does not answer."""
    return bool(getattr(journal, "tells_trouble", False))


def is_immediate(journal: Journal) -> bool:
    """Whether the calls of a journal end within the call, without suspending."""
    return bool(getattr(journal, "immediate", False))


def has_one_writer(journal: Journal) -> bool:
    """Whether a journal writes one batch after the other."""
    return bool(getattr(journal, "one_writer", False))
