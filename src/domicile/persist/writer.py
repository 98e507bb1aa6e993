"""The one way of an incarnation's durable entities to their journal: drives `Batches` (J1-J4).

Made once per incarnation and ended with it. It claims a shard before its first use, sends batches,
settles those without an answer, and tells the shard's host when the journal knows a newer owner. It
decides nothing about grouping and outcomes, and it knows nothing of events, states and keys.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from functools import partial
from typing import Any, Protocol, TypeVar

from domicile.concurrency.single_flight import SingleFlight
from domicile.concurrency.task_set import TaskSet
from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.state.keys import OffsetMark
from domicile.entity.hosting.execution import OutcomeUnknown
from domicile.entity.hosting.shard_host import ShardHost
from domicile.errors import DomicileError, Fenced
from domicile.persist.batches import (
    BATCHES,
    TRIES,
    Batches,
    LineChecked,
    LineFenced,
    PendingWrite,
    SendBatch,
    SettleBatch,
    ShardLine,
    Unsettled,
    WriteDone,
    WriterEffect,
)
from domicile.persist.grouped import GroupedCalls
from domicile.persist.journal_check import JournalCheck
from domicile.ports.journal import (
    Batch,
    Claim,
    ClaimAnswer,
    Journal,
    JournalUnknown,
    JournalWrite,
    Recovered,
    Remembered,
    StoredReply,
    Wanted,
    has_one_writer,
    is_immediate,
)
from domicile.ports.work import HeldOutput

T = TypeVar("T")

log = logging.getLogger("domicile")

LAYOUT = 0
"""The layout of shards that fences are kept for; the only one until shards can be split."""

RECOVER_BYTES = 1 << 20
"""About how many bytes of events one answer holds."""

ALONE = 4
"""Claims that may wait for a held row at the same time; each of them keeps a connection."""

MOST_OPEN = 16_384
"""I6: writes of this process that may wait for the journal. Beyond that, messages wait."""


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
        self._turns: asyncio.Lock | None = None
        """Who may hold the fence row in a transaction of the application."""

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

    @asynccontextmanager
    async def held(self) -> AsyncGenerator[None, None]:
        """Keep the shard's writes back, for the one who holds its fence row elsewhere (J10).

        Others who want to hold it wait here, not in the journal.
        """
        if self._turns is None:
            self._turns = asyncio.Lock()
        async with self._turns:
            await self.ready()
            self._writer.hold(self.line)
            try:
                yield
            finally:
                self._writer.let_go(self.line)

    async def _make(self) -> None:
        try:
            await self._writer.admit(self.line.claim.shard)
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


class SentWrite(PendingWrite):
    """A write of one durable entity, with what waits for it."""

    __slots__ = ("gate", "held", "host")

    def __init__(self, write: JournalWrite, gate: WriteOwner, host: ShardHost) -> None:
        super().__init__(write)
        self.gate = gate
        self.host = host
        self.held: list[HeldOutput] = []
        """Outputs that may leave the entity once this write has committed."""


class WriteOwner(Protocol):
    """The log of the entity that sent a write."""

    def done(self, sent: SentWrite) -> None:
        """The write is over: its `outcome` says how."""
        ...


class JournalWriter:
    """Writes and reads of one incarnation. Implements `Durability`."""

    def __init__(
        self, journal: Journal, me: Incarnation, check: JournalCheck | None = None
    ) -> None:
        self._journal = journal
        self._check = check
        self._me = me
        self._immediate = is_immediate(journal)
        self._batches = Batches(1 if has_one_writer(journal) else BATCHES)
        self._claims: dict[ShardKey, ShardClaim] = {}
        self._newest: dict[EntityKey, SentWrite] = {}
        """By entity: its newest write that is not over."""
        self._open: dict[SentWrite, None] = {}
        self._room: deque[asyncio.Future[None]] = deque()
        self._gates = 0
        self._departs = False
        """Whether what waits is sent at the end of this turn of the loop."""
        self._context = Context()
        """Empty: a batch belongs to no turn that happened to be first."""
        self._tasks: TaskSet[None] = TaskSet("domicile-journal")
        self._recoveries: GroupedCalls[Wanted, Recovered] = GroupedCalls(self._recover, self._tasks)
        self._claiming: GroupedCalls[Claim, ClaimAnswer] = GroupedCalls(
            partial(self._raise, wait=False), self._tasks
        )
        self._claiming_alone: GroupedCalls[Claim, ClaimAnswer] = GroupedCalls(
            partial(self._raise, wait=True), self._tasks, group=1, calls=ALONE
        )
        self._marks: GroupedCalls[ShardKey, OffsetMark] = GroupedCalls(self._mark, self._tasks)
        self._lookups: GroupedCalls[tuple[EntityKey, str], StoredReply | None] = GroupedCalls(
            self._look_up, self._tasks
        )

    # for entities

    async def claimed(self, host: ShardHost, epoch: int) -> ShardClaim:
        """The claim of a shard, once the shard may be read and written (J1, J4)."""
        claim = self._claims.get(host.shard)
        if claim is None or claim.epoch != epoch:
            claim = self._open_claim(host, epoch)
        if not claim.is_ready:
            await claim.ready()
        return claim

    def next_gate(self) -> int:
        """The number of a new output gate, for histories."""
        self._gates += 1
        return self._gates

    def send(self, claim: ShardClaim, sent: SentWrite) -> None:
        """Have something written, with whatever else waits. Its gate is told when it is over."""
        self._open[sent] = None
        self._newest[sent.write.entity] = sent
        sent.host.open_writes += 1
        self._carry_out(self._batches.submit(claim.line, sent))
        if self._immediate:
            self._depart()
        elif not self._departs:
            self._departs = True
            asyncio.get_running_loop().call_soon(self._depart, context=self._context)

    @property
    def journal(self) -> Journal:
        """Where it writes to."""
        return self._journal

    @property
    def is_full(self) -> bool:
        """Whether so much waits for the journal that no more turns may begin (J5)."""
        return len(self._open) >= MOST_OPEN

    async def room(self) -> None:
        """Until turns may begin again. Those who wait go on in order."""
        while self.is_full and not self.is_over:
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._room.append(place)
            await place

    async def settled(self, entity: EntityKey) -> None:
        """Until no write of an entity is open: what the journal says of it is whole."""
        while (sent := self._newest.get(entity)) is not None:
            await over(sent)

    async def recover(self, wanted: Wanted) -> Recovered:
        """What an entity was and what happened to it since. Its shard must be claimed."""
        if self._immediate:
            [found] = await self._recover([wanted])
            return found
        return await self._recoveries.ask(wanted)

    async def inbox(self, entity: EntityKey, key: str) -> StoredReply | None:
        """What became of a keyed ask, if it was ever recorded. Its shard must be claimed."""
        if self._immediate:
            [found] = await self._look_up([(entity, key)])
            return found
        return await self._lookups.ask((entity, key))

    def look_up_early(
        self, entity: EntityKey, key: str
    ) -> asyncio.Future[StoredReply | None] | None:
        """As `inbox`, for a message that still waits; None: the journal answers at once anyway."""
        if self._immediate or self.is_over:
            return None
        early = self._lookups.begin((entity, key))
        early.add_done_callback(_seen)
        return early

    async def remembered(
        self, host: ShardHost, epoch: int, after: Remembered | None, limit: int
    ) -> list[Remembered]:
        """As `Durability.remembered`."""
        await self.claimed(host, epoch)
        shard = ShardKey(*host.shard)
        return list(await _asked(lambda: self._journal.remembered(shard, after, limit)))

    async def _recover(self, wanted: Sequence[Wanted]) -> Sequence[Recovered]:
        return await _asked(lambda: self._journal.recover(wanted, RECOVER_BYTES))

    async def _look_up(
        self, asked: Sequence[tuple[EntityKey, str]]
    ) -> Sequence[StoredReply | None]:
        return await _asked(lambda: self._journal.inbox(asked))

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
        for sent in list(self._open):
            # Its batch was on its way; nobody is left to hear what became of it.
            sent.outcome = Unsettled()
            self._over(sent)
        for claim in self._claims.values():
            claim.checked()

    # for claims

    async def admit(self, shard: ShardKey) -> None:
        """Before the claim of a shard: `OutcomeUnknown` if the journal must not be used (J11)."""
        if self._check is not None:
            self._check.admit(shard, await self._marks.ask(shard))

    async def _mark(self, shards: Sequence[ShardKey]) -> Sequence[OffsetMark]:
        check = self._check
        assert check is not None
        return await _asked(lambda: check.marks(shards))

    async def claim(self, claim: Claim) -> int | None:
        """Raise the fence of a shard (J1): None if it is granted, else the newest epoch."""
        if self._immediate:
            [newest] = await self._raise([claim], wait=True)
        else:
            # Not within the caller: a handler past its lease never goes on (L4), and would keep
            # what the call holds of the journal, as a connection.
            newest = await self._claiming.ask(claim)
            if newest == "busy":
                newest = await self._claiming_alone.ask(claim)
        if newest == "busy":
            raise _no_answer()  # it was asked to wait
        return newest

    async def _raise(self, claims: Sequence[Claim], *, wait: bool) -> Sequence[ClaimAnswer]:
        """Raise fences together; a shard that came twice, under two epochs, takes turns."""
        answers: dict[Claim, ClaimAnswer] = {}
        while len(answers) < len(claims):
            left = [claim for claim in reversed(claims) if claim not in answers]
            turn = list({claim.shard: claim for claim in left}.values())
            found = await _asked(partial(self._journal.claim, turn, wait=wait))
            answers |= dict(zip(turn, found, strict=True))
        return [answers[claim] for claim in claims]

    def refused(self, line: ShardLine, newest: int) -> None:
        """A claim was not granted: the shard is dropped as after a fenced write."""
        self._carry_out(self._batches.fence(line, newest))

    def hold(self, line: ShardLine) -> None:
        """Send nothing of a line (J10)."""
        self._batches.hold(line)

    def let_go(self, line: ShardLine) -> None:
        """Send what waits in a line that was held."""
        self._carry_out(self._batches.let_go(line))

    def check(self, line: ShardLine) -> None:
        """Have a line settled that is in doubt."""
        self._carry_out(self._batches.check(line))

    # what the machine wants

    def _depart(self) -> None:
        self._departs = False
        self._carry_out(self._batches.depart())

    def _over(self, sent: SentWrite) -> None:
        """A write is over: tell its entity, and let go on what waited for it."""
        del self._open[sent]
        entity, host = sent.write.entity, sent.host
        if self._newest.get(entity) is sent:
            del self._newest[entity]
        host.open_writes -= 1
        sent.gate.done(sent)
        if not host.open_writes:
            host.settle()
        free = MOST_OPEN - len(self._open)
        while self._room and free > 0:
            place = self._room.popleft()
            if not place.done():
                place.set_result(None)
                free -= 1

    def _open_claim(self, host: ShardHost, epoch: int) -> ShardClaim:
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
                    assert isinstance(pending, SentWrite)
                    self._over(pending)
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


async def over(sent: SentWrite) -> DomicileError | None:
    """Wait until a write is over. Returns why what depends on it must not leave, or None."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[DomicileError | None] = loop.create_future()
    sent.held.append(lambda error: None if waiter.done() else waiter.set_result(error))
    return await waiter


async def _asked(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call that changes nothing twice until the journal answers."""
    for _ in range(TRIES):
        try:
            return await call()
        except JournalUnknown:
            continue
    raise _no_answer()


def _seen(early: asyncio.Future[StoredReply | None]) -> None:
    """An early look-up that failed is nobody's error: its message asks again."""
    if not early.cancelled():
        early.exception()


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
