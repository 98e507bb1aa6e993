"""The reference journal: a tiny transactional database in memory, with row locks.

Nodes on `memory://` and the simulator use it; a journal on a server must behave the same. What
commits is visible to all at once. A transaction that holds a fence row makes others of that shard
wait, in order of arrival (J1, J2). It must never let go of a row between its check and its commit:
a mere check lets a stale owner through (I2).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Literal, TypeVar

from domicile.core.ids import NOBODY, EntityKey, Incarnation, ShardKey
from domicile.ports.journal import (
    BLIND,
    Batch,
    Claim,
    JournalWrite,
    Recovered,
    StoredReply,
    WriteRefused,
    Written,
)
from domicile.ports.meter import Meter, NoMeter, takes_events

T = TypeVar("T")

_Answer = Written | WriteRefused
_Why = Literal["fenced", "busy", "seq", "key"]


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

    A transaction whose caller went away still completes; `close` waits for it.
    """

    def __init__(
        self,
        meter: Meter | None = None,
        pause: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._meter: Meter = NoMeter() if meter is None else meter
        self._tells = takes_events(self._meter)
        self._pause = pause
        self._fences: dict[tuple[ShardKey, int], _Fence] = {}
        self._events: dict[EntityKey, list[bytes]] = {}
        self._inbox: dict[tuple[EntityKey, str], bytes | None] = {}
        self._running: dict[asyncio.Task[Any], None] = {}

    @property
    def immediate(self) -> bool:
        """Whether no transaction ever waits inside: then each call ends within the call."""
        return self._pause is None

    async def claim(self, claims: Sequence[Claim]) -> Sequence[int | None]:
        """Raise fences to these epochs and owners (J1): None if granted, else the newest epoch."""
        return await self._whole(self._claim_all(claims))

    async def write(self, batch: Batch) -> Sequence[_Answer]:
        """Lock and advance the fence rows, then write, in one transaction (J2, J3)."""
        return await self._whole(self._write(batch))

    async def settle(self, batch: Batch) -> Sequence[_Answer | None]:
        """What became of a batch of unknown outcome, once its rows are free (J4)."""
        return await self._whole(self._settle_all(batch))

    async def recover(
        self, wanted: Sequence[tuple[EntityKey, int]], max_bytes: int
    ) -> Sequence[Recovered]:
        """The committed events of entities, in order. Waits for no lock."""
        found: list[Recovered] = []
        left, first = max_bytes, True
        for entity, after in wanted:
            events = self._events.get(entity, [])
            end = after
            while end < len(events) and (first or len(events[end]) <= left):
                left -= len(events[end])
                first = False
                end += 1
            found.append(Recovered(tuple(events[after:end]), end, end < len(events)))
        return found

    async def inbox(self, asked: Sequence[tuple[EntityKey, str]]) -> Sequence[StoredReply | None]:
        """What became of keyed asks that were recorded. Waits for no lock."""
        return [StoredReply(self._inbox[one]) if one in self._inbox else None for one in asked]

    def peek(self, entity: EntityKey) -> tuple[bytes, ...]:
        """All committed events of an entity, for tests and tools in the same process."""
        return tuple(self._events.get(entity, ()))

    def newest(self, shard: ShardKey) -> int:
        """The epoch that a shard was last claimed under, for tests and tools; 0 if it never was."""
        row = self._fences.get((shard, 0))
        return 0 if row is None else row.epoch

    @property
    def queued(self) -> int:
        """How many transactions wait for a row that another one holds, for tests."""
        return sum(max(0, fence.users - 1) for fence in self._fences.values())

    async def close(self) -> None:
        """Wait for the transactions that still run. The data stays."""
        while self._running:
            await asyncio.shield(next(iter(self._running)))

    async def _claim_all(self, claims: Sequence[Claim]) -> list[int | None]:
        answers: dict[Claim, int | None] = {}
        for claim in sorted(claims, key=_by_shard):
            answers[claim] = await self._claim(claim)
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
        for write in writes:
            events = self._events.setdefault(write.entity, [])
            self._note_write(batch, claim, write, len(events))
            events.extend(write.events)
            for key, reply in (*write.inbox, *write.replies):
                self._inbox[write.entity, key] = reply
            fence.next += len(write.events)
            answers[write.entity] = Written(len(events), fence.next)

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
        entity, known = write.entity, self._inbox
        if write.expected not in (BLIND, len(self._events.get(entity, ()))):
            return "seq"
        for key, _ in write.inbox:
            if (entity, key) in known:
                return "key"
        for key, _ in write.replies:
            if known.get((entity, key), b"") is not None:
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
                offset = fence.next - sum(len(write.events) for write in writes)
                for write in writes:
                    offset += len(write.events)
                    answers[write.entity] = Written(len(self.peek(write.entity)), offset)
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
                count=len(write.events), keys=[key for key, _ in write.inbox], batch=batch.number,
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
