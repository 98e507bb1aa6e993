"""The reference journal: a tiny transactional database in memory, with row locks.

Nodes on `memory://` and the simulator use it; a journal on a server must behave the same. What
commits is visible to all at once. A transaction that holds a fence row makes others of that shard
wait, in order of arrival (J1, J2). It must never let go of a row between its check and its commit:
a mere check lets a stale owner through (I2).
"""

from __future__ import annotations

import asyncio
import secrets
from bisect import bisect_right
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from heapq import nsmallest
from typing import Any, Literal, TypeVar

from domicile.core.ids import NOBODY, EntityKey, Incarnation, ShardKey
from domicile.ports.journal import (
    BLIND,
    MOST_KEYS,
    SCAN_BYTES,
    Batch,
    Claim,
    ClaimAnswer,
    EventPage,
    JournalMarks,
    JournalWrite,
    Recovered,
    Remembered,
    StoredEvent,
    StoredReply,
    Wanted,
    WriteRefused,
    Written,
    counted,
    placed,
)
from domicile.ports.meter import Meter, NoMeter, takes_events

T = TypeVar("T")

_Answer = Written | WriteRefused
_Why = Literal["fenced", "busy", "seq", "key"]


class _Head:
    """What there is of one entity."""

    __slots__ = (
        "deleted", "events", "fence", "keys", "last", "logs", "remembered", "seq", "snapshot",
        "state",
    )  # fmt: skip

    def __init__(self, fence: _Fence) -> None:
        self.fence = fence
        self.logs = [fence.log]
        """Where its events are: that of its shard, unless it had another one before."""
        self.seq = 0
        self.events: list[StoredEvent] = []
        self.keys: dict[str, bytes | None] = {}
        self.state: bytes | None = None
        self.snapshot: tuple[int, bytes] | None = None
        self.deleted = 0
        """The number of the last deletion, whose event is the first one from then on."""
        self.remembered = False
        self.last = 0
        """Which write of its shard was the last one."""

    def keep(self, snapshot: tuple[int, bytes]) -> None:
        """Replace the snapshot, unless this one is older, or from before a deletion."""
        if snapshot[0] > self.deleted and (
            self.snapshot is None or snapshot[0] >= self.snapshot[0]
        ):
            self.snapshot = snapshot

    def remember(self, entity: EntityKey, *, flag: bool) -> None:
        """Set or clear the flag."""
        self.remembered = flag
        if flag:
            self.fence.remembered[entity] = self
        else:
            self.fence.remembered.pop(entity, None)

    def clear(self, entity: EntityKey) -> None:
        """What a deletion takes away."""
        for event in self.events:
            for log in self.logs:
                if log.get(event.offset) is event:
                    del log[event.offset]
        self.events.clear()
        self.state = self.snapshot = None
        self.deleted = self.seq
        self.remember(entity, flag=False)


class _Fence:
    """A shard's fence row. A transaction that changes it, or checks it for a write, holds it."""

    def __init__(self) -> None:
        self.epoch = 0
        self.owner: Incarnation = NOBODY
        self.next = 0
        self.batch = 0
        """The number of the last batch: the last that wrote, or that `settle` used up (J4)."""
        self.void = 0
        """The number of the last batch that `settle` used up: it never wrote."""
        self.writes = 0
        """How many batches the shard has taken."""
        self.log: dict[int, StoredEvent] = {}
        """The events of the shard by their offsets."""
        self.remembered: dict[EntityKey, _Head] = {}
        self.users = 0
        """Transactions that hold the row or wait for it."""
        self._lock = asyncio.Lock()

    async def acquire(self) -> None:
        """Wait for the row, behind those who came before."""
        self.users += 1
        try:
            await self._lock.acquire()
        except BaseException:
            self.users -= 1
            raise

    def release(self) -> None:
        self.users -= 1
        self._lock.release()

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *_: object) -> None:
        self.release()

    def is_held(self, claim: Claim) -> bool:
        return self.epoch == claim.epoch and self.owner == claim.owner


class MemoryJournal:
    """Implements `Journal`. `pause` is the time between the statements of a transaction.

    A transaction whose caller went away still completes; `close` waits for it. Nobody compares its
    history with the store's unless a test sets `volatile` to False.
    """

    def __init__(
        self,
        meter: Meter | None = None,
        pause: Callable[[], Awaitable[None]] | None = None,
        history: str | None = None,
    ) -> None:
        self._meter: Meter = NoMeter() if meter is None else meter
        self._tells = takes_events(self._meter)
        self._pause = pause
        self._fences: dict[tuple[ShardKey, int], _Fence] = {}
        self._heads: dict[EntityKey, _Head] = {}
        self._history = secrets.token_hex(16) if history is None else history
        self._running: dict[asyncio.Task[Any], None] = {}
        self.volatile = True

    @property
    def immediate(self) -> bool:
        """Whether no transaction ever waits inside: then each call ends within the call."""
        return self._pause is None

    async def claim(self, claims: Sequence[Claim], *, wait: bool = True) -> Sequence[ClaimAnswer]:
        """Raise fences to these epochs and owners, each shard by itself (J1)."""
        return await self._whole(self._claim_all(claims, wait=wait))

    async def write(self, batch: Batch) -> Sequence[_Answer]:
        """Lock and advance the fence rows, then write, in one transaction (J2, J3)."""
        return await self._whole(self._write(batch))

    async def settle(self, batch: Batch) -> Sequence[_Answer | None]:
        """What became of a batch of unknown outcome, once its rows are free (J4)."""
        return await self._whole(self._settle_all(batch))

    async def recover(self, wanted: Sequence[Wanted], max_bytes: int) -> Sequence[Recovered]:
        """What is committed of entities. Waits for no lock."""
        room = _Room(max_bytes)
        return [self._recovered(one, room) for one in wanted]

    async def inbox(self, asked: Sequence[tuple[EntityKey, str]]) -> Sequence[StoredReply | None]:
        """What became of keyed asks that were recorded. Waits for no lock."""
        found: list[StoredReply | None] = []
        for entity, key in asked:
            head = self._heads.get(entity)
            known = head is not None and key in head.keys
            found.append(StoredReply(head.keys[key]) if head is not None and known else None)
        return found

    async def scan(
        self, shard: ShardKey, after: int, limit: int, max_bytes: int = SCAN_BYTES
    ) -> EventPage:
        """Committed events of a shard, in order. Waits for no lock."""
        fence = self._fences.get((shard, 0))
        if fence is None:
            return EventPage((), 0)
        events: list[StoredEvent] = []
        size = 0
        for offset in range(after + 1, fence.next + 1):
            event = fence.log.get(offset)
            if event is None:
                continue
            size += len(event.data or b"")
            if events and size > max_bytes:
                return EventPage(tuple(events), events[-1].offset)
            events.append(event)
            if len(events) == limit:
                return EventPage(tuple(events), offset)
        return EventPage(tuple(events), fence.next)

    async def remembered(
        self, shard: ShardKey, after: Remembered | None, limit: int
    ) -> Sequence[Remembered]:
        """Remembered entities of a shard. Waits for no lock."""
        fence = self._fences.get((shard, 0))
        if fence is None:
            return []
        rows = [(-head.last, entity) for entity, head in fence.remembered.items()]
        if after is not None:
            known = (-after.last, after.entity)
            rows = [row for row in rows if row > known]
        return [Remembered(entity, -last) for last, entity in nsmallest(limit, rows)]

    async def offsets(self, role: str) -> dict[int, int]:
        """As `TellsOffsets.offsets`. Waits for no lock."""
        return {
            shard.shard: fence.next
            for (shard, layout), fence in self._fences.items()
            if shard.role == role and layout == 0
        }

    async def history(self) -> str:
        """The random id of this journal (J11)."""
        return self._history

    async def marks(self, shards: Sequence[ShardKey]) -> JournalMarks:
        """As `ComparableJournal.marks`. Waits for no lock."""
        rows = {shard: self._fences.get((shard, 0)) for shard in shards}
        return JournalMarks(
            self._history, {shard: row.next for shard, row in rows.items() if row is not None}
        )

    async def renew(self, history: str) -> None:
        """As `ComparableJournal.renew`."""
        self._history = history

    def peek(self, entity: EntityKey) -> tuple[bytes, ...]:
        """All committed events of an entity, for tests and tools in the same process."""
        head = self._heads.get(entity)
        events = () if head is None else head.events
        return tuple([event.data for event in events if event.data is not None])

    def newest(self, shard: ShardKey) -> int:
        """The epoch that a shard was last claimed under, for tests and tools; 0 if it never was."""
        row = self._fences.get((shard, 0))
        return 0 if row is None else row.epoch

    def claimed(self, shard: ShardKey) -> Claim | None:
        """The claim that holds a shard, for tests and tools; None if it was never claimed."""
        row = self._fences.get((shard, 0))
        return None if row is None or not row.epoch else Claim(shard, 0, row.epoch, row.owner)

    @asynccontextmanager
    async def held(self, shard: ShardKey) -> AsyncGenerator[None]:
        """Hold the row of a shard as another transaction would (J10), for tests."""
        async with self._fence(Claim(shard, 0, 0, NOBODY)):
            yield

    @property
    def queued(self) -> int:
        """How many transactions wait for a row that another one holds, for tests."""
        return sum(max(0, fence.users - 1) for fence in self._fences.values())

    async def close(self) -> None:
        """Wait for the transactions that still run. The data stays."""
        while self._running:
            await asyncio.shield(next(iter(self._running)))

    async def _claim_all(self, claims: Sequence[Claim], *, wait: bool) -> list[ClaimAnswer]:
        answers: dict[Claim, ClaimAnswer] = {}
        for claim in sorted(claims, key=_by_shard):
            is_busy = not wait and self._fence(claim).users > 0
            answers[claim] = "busy" if is_busy else await self._claim(claim)
        return [answers[claim] for claim in claims]

    async def _claim(self, claim: Claim) -> int | None:
        fence = self._fence(claim)
        async with fence:
            granted = fence.epoch < claim.epoch or fence.is_held(claim)
            if granted:
                if fence.epoch < claim.epoch:
                    fence.batch = fence.void = 0
                fence.epoch, fence.owner = claim.epoch, claim.owner
            self._note("claim", claim, ok=granted)
            return None if granted else fence.epoch

    async def _write(self, batch: Batch) -> list[_Answer]:
        answers: dict[EntityKey, _Answer] = {}
        rows: list[_Fence] = []
        held: list[tuple[Claim, _Fence, Sequence[JournalWrite]]] = []
        several = len(batch.claims) > 1
        try:
            for claim in sorted(batch.claims, key=_by_shard) if several else batch.claims:
                fence = self._fence(claim)
                writes: Sequence[JournalWrite] = batch.writes
                if several:
                    writes = [write for write in batch.writes if write.shard == claim.shard]
                if several and fence.users:
                    self._refuse(batch, claim, writes, answers, "busy", fence.epoch)
                    continue
                await fence.acquire()
                rows.append(fence)
                if fence.is_held(claim) and fence.batch < batch.number:
                    held.append((claim, fence, writes))
                else:
                    self._refuse(batch, claim, writes, answers, "fenced", fence.epoch)
            if held and self._pause is not None:
                await self._pause()
            for claim, fence, mine in held:
                if not self._clash(batch, claim, fence, mine, answers):
                    self._commit(batch, claim, fence, mine, answers)
        finally:
            for fence in rows:
                fence.release()
        return [answers[write.entity] for write in batch.writes]

    def _commit(
        self,
        batch: Batch,
        claim: Claim,
        fence: _Fence,
        writes: Iterable[JournalWrite],
        answers: dict[EntityKey, _Answer],
    ) -> None:
        """Nothing before was visible to anyone, and nothing here can fail or wait."""
        fence.batch = batch.number
        fence.writes += 1
        for write in writes:
            head = self._heads.get(write.entity)
            if head is None:
                head = self._heads[write.entity] = _Head(fence)
            self._note_write(batch, claim, write, head.seq)
            for key, reply in (*write.inbox, *write.replies):
                head.keys[key] = reply
            self._change(head, fence, write)
            answers[write.entity] = Written(head.seq, fence.next)

    def _change(self, head: _Head, fence: _Fence, write: JournalWrite) -> None:
        entity = write.entity
        if head.fence is not fence:
            head.fence.remembered.pop(entity, None)
            head.fence = fence
            head.logs.append(fence.log)
            head.remember(entity, flag=head.remembered)
        for data in write.events:
            head.seq += 1
            self._append(head, fence, entity, data)
        if write.state is not None:
            head.seq += write.saves
            head.state = write.state
        if write.snapshot is not None:
            head.keep(write.snapshot)
        if write.remember is not None:
            head.remember(entity, flag=write.remember)
        if write.erase:
            head.snapshot, head.keys = None, dict.fromkeys(head.keys)
        if write.delete:
            head.seq += 1
            head.clear(entity)
            self._append(head, fence, entity, None)
        if counted(write) or write.remember is not None:
            head.last = fence.writes

    def _append(self, head: _Head, fence: _Fence, entity: EntityKey, data: bytes | None) -> None:
        fence.next += 1
        event = fence.log[fence.next] = StoredEvent(fence.next, entity, head.seq, data)
        head.events.append(event)

    def _recovered(self, wanted: Wanted, room: _Room) -> Recovered:
        head, after = self._heads.get(wanted.entity), wanted.after
        keys = None if after else _known_keys(head)
        if head is None or head.seq <= after:
            return Recovered((), after, False, keys=keys)
        snapshot = head.snapshot if wanted.snapshot and after == 0 else None
        seq = max(after, head.deleted)
        for whole in (head.state, None if snapshot is None else snapshot[1]):
            if whole is not None and not room.take(len(whole)):
                return Recovered((), after, True)
        if snapshot is not None:
            seq = max(seq, snapshot[0])
        events: list[bytes] = []
        start = bisect_right(head.events, seq, key=_seq_of)
        for event in head.events[start:]:
            assert event.data is not None, "the event of a deletion is the first one"
            if not room.take(len(event.data)):
                if not events and snapshot is None and head.state is None:
                    return Recovered((), after, True)
                return Recovered(tuple(events), seq, True, snapshot, head.state, keys)
            events.append(event.data)
            seq = event.seq
        return Recovered(tuple(events), head.seq, False, snapshot, head.state, keys)

    def _clash(
        self,
        batch: Batch,
        claim: Claim,
        fence: _Fence,
        writes: Sequence[JournalWrite],
        answers: dict[EntityKey, _Answer],
    ) -> bool:
        """Whether some write of a shard does not fit; then none of that shard is made."""
        faults: list[_Why | None] = [self._fault_of(write) for write in writes]
        if not any(faults):
            return False
        for write, fault in zip(writes, faults, strict=True):
            self._refuse(batch, claim, (write,), answers, fault or "busy", fence.epoch)
        return True

    def _fault_of(self, write: JournalWrite) -> _Why | None:
        """UNIQUE(entity, seq), UNIQUE(entity, key); a reply is filled in once."""
        head = self._heads.get(write.entity)
        seq, keys = (0, {}) if head is None else (head.seq, head.keys)
        if write.expected not in (BLIND, seq):
            return "seq"
        if (
            write.snapshot is not None
            and not write.delete
            and write.snapshot[0] > seq + counted(write)
        ):
            return "seq"
        for key, _ in write.inbox:
            if key in keys:
                return "key"
        for key, _ in write.replies:
            if keys.get(key, b"") is not None:
                return "key"
        return None

    async def _settle_all(self, batch: Batch) -> list[_Answer | None]:
        answers: dict[EntityKey, _Answer | None] = {}
        for claim in sorted(batch.claims, key=_by_shard):
            await self._settle(batch, claim, answers)
        return [answers[write.entity] for write in batch.writes]

    async def _settle(
        self, batch: Batch, claim: Claim, answers: dict[EntityKey, _Answer | None]
    ) -> None:
        fence = self._fence(claim)
        writes = [write for write in batch.writes if write.shard == claim.shard]
        async with fence:
            if not fence.is_held(claim):
                # The number alone proves nothing: the successor counts, too.
                how = "fenced"
                answers |= {write.entity: WriteRefused("fenced", fence.epoch) for write in writes}
            elif fence.batch < batch.number or fence.void == batch.number:
                how = "void"
                # The late batch then writes nothing. The row remembers that it never wrote: a
                # second settling, after a lost answer, must not take its number for a proof.
                fence.batch = max(fence.batch, batch.number)
                fence.void = batch.number
                answers |= dict.fromkeys([write.entity for write in writes])
            else:
                how = "there"
                offset = fence.next - sum(map(placed, writes))
                for write in writes:
                    offset += placed(write)
                    answers[write.entity] = Written(self._heads[write.entity].seq, offset)
            self._note("settle", claim, batch=batch.number, how=how)

    def _fence(self, claim: Claim) -> _Fence:
        row = (claim.shard, claim.layout)
        fence = self._fences.get(row)
        if fence is None:
            fence = self._fences[row] = _Fence()
        return fence

    def _refuse(
        self,
        batch: Batch,
        claim: Claim,
        writes: Iterable[JournalWrite],
        answers: dict[EntityKey, _Answer],
        why: _Why,
        epoch: int,
    ) -> None:
        for write in writes:
            answers[write.entity] = WriteRefused(why, epoch)
            self._note_write(batch, claim, write, write.expected, why)

    def _note_write(
        self, batch: Batch, claim: Claim, write: JournalWrite, seq: int, why: str = ""
    ) -> None:
        if self._tells:
            self._note(
                "append", claim, type=write.entity.type, id=write.entity.id, seq=seq,
                count=counted(write), keys=[key for key, _ in write.inbox], batch=batch.number,
                ok=not why, why=why,
            )  # fmt: skip

    def _note(self, kind: str, claim: Claim, **fields: Any) -> None:
        role, shard = claim.shard
        self._meter.event(
            kind, role=role, shard=shard, epoch=claim.epoch, owner=claim.owner, **fields
        )

    async def _whole(self, transaction: Coroutine[Any, Any, T]) -> T:
        if self._pause is None:
            # No transaction ever waits inside, so none is ever cut short by a cancellation.
            return await transaction
        task = asyncio.get_running_loop().create_task(transaction)
        self._running[task] = None
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        del self._running[task]


def _by_shard(claim: Claim) -> tuple[ShardKey, int]:
    return claim.shard, claim.layout


class _Room:
    """How many bytes an answer may still take; the first piece always finds room."""

    def __init__(self, left: int) -> None:
        self._left = left
        self._is_first = True

    def take(self, size: int) -> bool:
        """Take so much, if there is room."""
        if size > self._left and not self._is_first:
            return False
        self._left -= size
        self._is_first = False
        return True


def _known_keys(head: _Head | None) -> tuple[str, ...] | None:
    if head is None:
        return ()
    return tuple(head.keys) if len(head.keys) <= MOST_KEYS else None


def _seq_of(event: StoredEvent) -> int:
    return event.seq
