"""The one way of an incarnation's durable entities to their journal: drives `Batches` (J1-J4).

Made once per incarnation and ended with it. It claims a shard before its first use, sends batches,
settles those without an answer, and tells the shard's host when the journal knows a newer owner. It
decides nothing about grouping and outcomes, and it knows nothing of events, states and keys.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextvars import Context
from typing import Any, TypeVar

from domicile.concurrency.single_flight import SingleFlight
from domicile.concurrency.task_set import TaskSet
from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.entity.hosting.execution import OutcomeUnknown
from domicile.entity.hosting.shard_host import ShardHost
from domicile.errors import Fenced
from domicile.persist.batches import (
    TRIES,
    Batches,
    LineChecked,
    LineFenced,
    PendingWrite,
    SendBatch,
    SettleBatch,
    ShardLine,
    WriteDone,
    WriteOutcome,
    WriterEffect,
)
from domicile.ports.journal import (
    Batch,
    Claim,
    Journal,
    JournalUnknown,
    JournalWrite,
    Recovered,
    StoredReply,
    is_immediate,
)

T = TypeVar("T")

log = logging.getLogger("domicile")

LAYOUT = 0
"""The layout of shards that fences are kept for; the only one until shards can be split."""

RECOVER_BYTES = 1 << 20
"""About how much of an entity's events one answer holds."""


class ShardClaim:
    """One shard's claim under one epoch, made once for all its entities, and its line."""

    def __init__(self, writer: JournalWriter, host: ShardHost, line: ShardLine) -> None:
        self.line = line
        self.epoch = line.claim.epoch
        self._writer = writer
        self._host = host
        self._is_granted = False
        self._flight = SingleFlight()
        """Under way while the claim is made, or the line is settled."""

    @property
    def is_ready(self) -> bool:
        """Whether the shard may be read and written now."""
        line = self.line
        return self._is_granted and line.is_clear and line.fenced_by is None

    async def ready(self) -> None:
        """Until the shard may be read and written; `Fenced` if a newer claim stands (J1, J4)."""
        while not self.is_ready:
            if self._writer.is_over:
                raise OutcomeUnknown("this process leaves or lost its lease; nothing more is read")
            if self.line.fenced_by is not None:
                raise self.outrun(self.line.fenced_by)
            landing = self._flight.join()
            if landing is None and not self._is_granted:
                await self._make()
                continue
            if landing is None:
                self._writer.check(self.line)
                landing = self._flight.join()
                assert landing is not None
            await landing
            if self.line.doubt is not None:
                raise _no_answer()

    async def _make(self) -> None:
        try:
            newest = await self._writer.claim(self.line.claim)
            if newest is None:
                self._is_granted = True
            else:
                self._writer.refused(self.line, newest)
        finally:
            self.checked()

    def outrun(self, newest: int) -> Fenced:
        """J1, J2: drop this home, unless the shard has been opened anew; what callers learn."""
        if self._host.owner.epoch == self.epoch:
            self._host.outrun(newest)
        shard = self.line.claim.shard
        return Fenced(
            f"shard {shard.role}/{shard.shard} was claimed under epoch {newest}; this home has "
            f"epoch {self.epoch}"
        )

    def checked(self) -> None:
        """Something became known: those who wait look again."""
        self._flight.land()


class JournalWriter:
    """Writes and reads of one incarnation. Implements `Durability`."""

    def __init__(self, journal: Journal, me: Incarnation) -> None:
        self._journal = journal
        self._me = me
        self._immediate = is_immediate(journal)
        self._batches = Batches()
        self._claims: dict[ShardKey, ShardClaim] = {}
        self._waiting: dict[PendingWrite, asyncio.Future[None]] = {}
        self._tasks: TaskSet[None] = TaskSet("domicile-journal")

    # for entities

    async def claimed(self, host: ShardHost, epoch: int) -> ShardClaim:
        """The claim of a shard, once the shard may be read and written (J1, J4)."""
        claim = self._claims.get(host.shard)
        if claim is None or claim.epoch != epoch:
            claim = self._open(host, epoch)
        if not claim.is_ready:
            await claim.ready()
        return claim

    async def write(self, claim: ShardClaim, write: JournalWrite) -> WriteOutcome:
        """Have something written, with whatever else waits, and wait for its outcome."""
        pending, batches = PendingWrite(write), self._batches
        self._carry_out(batches.submit(claim.line, pending))
        if pending.outcome is None:
            waiter = self._waiting[pending] = asyncio.get_running_loop().create_future()
            try:
                await waiter
            except BaseException:
                self._waiting.pop(pending, None)
                batches.withdraw(claim.line, pending)
                raise
        assert pending.outcome is not None
        return pending.outcome

    async def recover(self, entity: EntityKey, after: int) -> Recovered:
        """Events of an entity, after the first so many of them. Its shard must be claimed."""
        wanted = [(entity, after)]
        [found] = await _asked(lambda: self._journal.recover(wanted, RECOVER_BYTES))
        return found

    async def inbox(self, entity: EntityKey, key: str) -> StoredReply | None:
        """What became of a keyed ask, if it was ever recorded. Its shard must be claimed."""
        [found] = await _asked(lambda: self._journal.inbox([(entity, key)]))
        return found

    # for the runtime

    @property
    def is_over(self) -> bool:
        """Whether nothing more is sent."""
        return self._batches.is_over

    def fence(self) -> None:
        """L4: this process lost its lease. What was not sent to the journal never is."""
        self._carry_out(self._batches.end())

    async def close(self) -> None:
        """End what is under way; nothing of it is left running."""
        self.fence()
        await self._tasks.close()
        for waiter in self._waiting.values():
            waiter.cancel()
        for claim in self._claims.values():
            claim.checked()

    # for claims

    async def claim(self, claim: Claim) -> int | None:
        """Raise the fence of a shard (J1): None if it is granted, else the newest epoch."""
        [newest] = await _asked(lambda: self._journal.claim([claim]))
        return newest

    def refused(self, line: ShardLine, newest: int) -> None:
        """A claim was not granted: the shard is dropped as after a fenced write."""
        self._carry_out(self._batches.fence(line, newest))

    def check(self, line: ShardLine) -> None:
        """Have a line settled that is in doubt."""
        self._carry_out(self._batches.check(line))

    # what the machine wants

    def _open(self, host: ShardHost, epoch: int) -> ShardClaim:
        shard = ShardKey(*host.shard)
        line, effects = self._batches.open(Claim(shard, LAYOUT, epoch, self._me))
        if line is None:
            newest = self._claims[shard].epoch
            raise Fenced(
                f"shard {shard.role}/{shard.shard} was opened anew under epoch {newest}; what ran "
                f"here belongs to epoch {epoch}"
            )
        old = self._claims.get(shard)
        claim = self._claims[shard] = ShardClaim(self, host, line)
        self._carry_out(effects)
        if old is not None:
            # Those who still wait for it learn that it is over.
            old.checked()
        return claim

    def _carry_out(self, effects: Iterable[WriterEffect]) -> None:
        todo = deque(effects)
        while todo:
            match todo.popleft():
                case SendBatch(batch) if self._immediate:
                    outcomes = _at_once(self._journal.write(batch))
                    todo.extend(self._batches.answered(batch, outcomes))
                case SendBatch(batch):
                    self._start(self._send(batch))
                case SettleBatch(batch):
                    self._start(self._settle(batch))
                case WriteDone(pending):
                    waiter = self._waiting.pop(pending, None)
                    if waiter is not None and not waiter.done():
                        waiter.set_result(None)
                case LineFenced(line, epoch):
                    claim = self._claims[line.claim.shard]
                    if claim.line is line:
                        claim.outrun(epoch)
                case LineChecked(line):
                    claim = self._claims[line.claim.shard]
                    if claim.line is line:
                        claim.checked()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        # Without the context of the turn that happened to be first: the batch is everybody's.
        self._tasks.spawn(work, Context())

    async def _send(self, batch: Batch) -> None:
        try:
            outcomes = await self._journal.write(batch)
        except Exception as error:
            self._lost(batch, error)
        else:
            self._carry_out(self._batches.answered(batch, outcomes))

    async def _settle(self, batch: Batch) -> None:
        try:
            outcomes = await self._journal.settle(batch)
        except Exception as error:
            self._lost(batch, error)
        else:
            self._carry_out(self._batches.settled(batch, outcomes))

    def _lost(self, batch: Batch, error: Exception) -> None:
        if not isinstance(error, JournalUnknown):
            log.error("the journal failed on batch %d", batch.number, exc_info=error)
        self._carry_out(self._batches.lost(batch))


async def _asked(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call that changes nothing twice until the journal answers."""
    for _ in range(TRIES):
        try:
            return await call()
        except JournalUnknown:
            continue
    raise _no_answer()


def _no_answer() -> OutcomeUnknown:
    return OutcomeUnknown("the journal does not answer")


def _at_once(call: Coroutine[Any, Any, T]) -> T:
    """The result of a call that never suspends."""
    try:
        call.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    call.close()
    raise AssertionError("a journal that says that it is immediate has suspended")
