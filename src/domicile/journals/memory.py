"""The reference journal: a tiny transactional database in memory, with row locks.

What commits is visible to all at once; what locks a fence row makes others of that shard wait,
in order of arrival (J1, J2). It must never let go of the row between check and commit: a mere
check lets a stale owner through (I2).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from domicile.core.ids import NOBODY, EntityKey, Incarnation, ShardKey
from domicile.ports.journal import Append, Appended, Claim, Refusal, StoredEvents
from domicile.ports.meter import Meter, NoMeter

T = TypeVar("T")


@dataclass(slots=True)
class _Fence:
    """A shard's fence row. Whoever changes or checks it for a write holds `lock`."""

    epoch: int = 0
    owner: Incarnation = NOBODY
    next: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

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
        self._pause = pause
        self._fences: dict[ShardKey, _Fence] = {}
        self._events: dict[EntityKey, list[bytes]] = {}
        self._appends: dict[str, Appended] = {}
        self._inbox: dict[tuple[EntityKey, str], StoredEvents] = {}
        self._running: dict[asyncio.Task[Any], None] = {}

    async def claim(self, claim: Claim) -> Refusal | None:
        """Raise the fence to this epoch and owner (J1). None if it was granted."""
        return await self._whole(self._claim(claim))

    async def append(self, claim: Claim, append: Append) -> Appended | Refusal:
        """Lock and advance the fence, then write, in one transaction (J2).

        The same append id again gives the same answer and writes nothing.
        """
        return await self._whole(self._append(claim, append))

    async def appended(self, claim: Claim, append_id: str) -> Appended | None:
        """What became of a write of unknown outcome, once the fence row is free (J4)."""
        return await self._whole(self._appended(claim, append_id))

    async def read(self, entity: EntityKey) -> tuple[bytes, ...]:
        """All committed events of an entity in order. Waits for no lock."""
        return tuple(self._events.get(entity, ()))

    async def inbox(self, entity: EntityKey, key: str) -> StoredEvents | None:
        """What became of a keyed ask, if it was ever recorded. Waits for no lock."""
        return self._inbox.get((entity, key))

    def peek(self, entity: EntityKey) -> tuple[bytes, ...]:
        """All committed events of an entity, for tests and tools in the same process."""
        return tuple(self._events.get(entity, ()))

    async def close(self) -> None:
        """Wait for the transactions that still run. The data stays."""
        while self._running:
            await asyncio.shield(next(iter(self._running)))

    async def _claim(self, claim: Claim) -> Refusal | None:
        fence = self._fence(claim.shard)
        async with fence.lock:
            granted = fence.epoch < claim.epoch or fence.is_held(claim)
            if granted:
                fence.epoch, fence.owner = claim.epoch, claim.owner
            self._meter.event(
                "claim",
                role=claim.shard.role,
                shard=claim.shard.shard,
                epoch=claim.epoch,
                owner=claim.owner,
                ok=granted,
            )
            return None if granted else Refusal(fence.epoch, fenced=True)

    async def _append(self, claim: Claim, append: Append) -> Appended | Refusal:
        fence = self._fence(claim.shard)
        async with fence.lock:
            if not fence.is_held(claim):
                self._note(claim, append, ok=False)
                return Refusal(fence.epoch, fenced=True)
            offset = fence.next + len(append.events)
            if self._pause is not None:
                await self._pause()
            known = self._appends.get(append.append_id)
            if known is not None:
                return known
            if self._clashes(append):
                self._note(claim, append, ok=False)
                return Refusal(fence.epoch, fenced=False)
            # Commit: nothing above is visible to anyone, and nothing below can fail or wait.
            fence.next = offset
            events = self._events.setdefault(append.entity, [])
            events.extend(append.events)
            if append.key:
                self._inbox[append.entity, append.key] = StoredEvents(append.reply)
            done = Appended(len(events), offset)
            self._appends[append.append_id] = done
            self._note(claim, append, ok=True)
            return done

    async def _appended(self, claim: Claim, append_id: str) -> Appended | None:
        async with self._fence(claim.shard).lock:
            return self._appends.get(append_id)

    def _fence(self, shard: ShardKey) -> _Fence:
        fence = self._fences.get(shard)
        if fence is None:
            fence = self._fences[shard] = _Fence()
        return fence

    def _clashes(self, append: Append) -> bool:
        """UNIQUE(entity, seq), and a key that exists takes a reply but no more events."""
        if append.expected_seq != len(self._events.get(append.entity, ())):
            return True
        return bool(append.events) and (append.entity, append.key) in self._inbox

    def _note(self, claim: Claim, append: Append, *, ok: bool) -> None:
        self._meter.event(
            "append",
            role=claim.shard.role,
            shard=claim.shard.shard,
            epoch=claim.epoch,
            owner=claim.owner,
            type=append.entity.type,
            id=append.entity.id,
            seq=append.expected_seq,
            count=len(append.events),
            append_id=append.append_id,
            ok=ok,
            key=append.key,
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
