"""Which writes go to the journal together, and what becomes of them: a pure machine (J3, J4).

Theory of operation. Each shard has a line. A write waits in the line of its shard until a batch
takes it along. A batch takes all writes that wait when a turn of the loop ends or when another
batch is answered, of all shards that may send: a lone write goes out at once, and under load one
round trip serves many entities. The writes of one entity join to one.

A line is in one of five states:

- idle: no batch of the shard is on its way, and the next one may take its writes;
- out: a batch is on its way, or is being settled; a second one could overtake it (J3);
- held: a transaction of the application has the fence row, and writes wait for its end (J10);
- in doubt: a batch's outcome is unknown, and the journal did not answer when it was asked. Nothing
  of this shard is written or read before the batch is settled (J4);
- fenced: the journal knows a newer owner. Nothing more is sent under this claim (J2).

A batch without an answer is settled by its number. What is there is done; what never happened is
sent again under a new number, for the old one is used up; what nobody can know any more is said to
be unknown. Outcomes are kept per shard: a shard that is fenced, busy or clashes fails alone.

So does a write that the journal can't take at all: what never happened twice in a row is sent write
by write, and given up in the end.

`JournalWriter` drives this and nobody else may. It holds no clock, loop or journal, and it never
decides what an entity does about an outcome.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from domicile.core.ids import EntityKey, ShardKey
from domicile.ports.journal import (
    BLIND,
    Batch,
    Claim,
    JournalWrite,
    WriteRefused,
    Written,
    counted,
    placed,
)

BATCHES = 4
"""Batches on their way to a journal that can write several at once. One that waits for a row takes
no place: it is of a shard that was busy, or is being settled, and each shard has at most one."""

BATCH_WRITES = 1_024
BATCH_BYTES = 1 << 20
"""A batch takes no more along than this, but at least one write."""

TRIES = 5
"""How often an unanswered journal is asked again before the outcome is called unknown."""


class Unsettled(msgspec.Struct, frozen=True, gc=False):
    """Nobody knows whether a write happened: the journal does not answer, or it has a newer owner,
    whose epoch this is, and can't know any more."""

    fenced_by: int | None = None


WriteOutcome = Written | WriteRefused | Unsettled


class PendingWrite:
    """One write that somebody waits for. `outcome` is None until it is over."""

    __slots__ = ("outcome", "write")

    def __init__(self, write: JournalWrite) -> None:
        self.write = write
        self.outcome: WriteOutcome | None = None


class ShardLine:
    """The writes of one shard under one claim, in order."""

    __slots__ = (
        "alone", "claim", "doubt", "fenced_by", "is_held", "is_out", "is_unsure", "voids",
        "waiting",
    )  # fmt: skip

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.waiting: list[PendingWrite] = []
        self.is_out = False
        """A batch of it is on its way, or is being settled."""
        self.is_unsure = False
        """That batch is being settled."""
        self.doubt: Batch | None = None
        """What the journal must settle before anything else, if nobody asks it now."""
        self.alone = 0
        """How often in a row the journal was busy with this shard: its next batch has no other."""
        self.voids = 0
        """How often in a row what it sent never happened."""
        self.fenced_by: int | None = None
        """The epoch that this claim lost its shard to."""
        self.is_held = False
        """A transaction of the application holds the fence row: a batch would wait for it (J10)."""

    @property
    def is_clear(self) -> bool:
        """Whether the journal holds of this shard what its entities know, but for what they wait
        for: else nobody may recover from it."""
        return self.doubt is None and not self.is_unsure

    @property
    def may_send(self) -> bool:
        """Whether a batch may take its writes along now."""
        return bool(self.waiting) and not self.is_out and not self.is_held and self.doubt is None

    @property
    def is_suspect(self) -> bool:
        """Whether it may hold a write that the journal can't take: the next one goes by itself."""
        return self.voids > 1


class _Flight(msgspec.Struct):
    """A batch on its way, and who waits for each of its writes."""

    batch: Batch
    lines: dict[ShardKey, ShardLine]
    parts: list[list[PendingWrite]]
    places: int
    """How many of the places it takes: one, or none."""
    lost: int = 0
    """How many answers did not come: of the batch, then of its settling."""


class SendBatch(msgspec.Struct, frozen=True):
    """Have the journal write it; then `answered`, or `lost`."""

    batch: Batch


class SettleBatch(msgspec.Struct, frozen=True):
    """Ask the journal what became of it; then `settled`, or `lost`."""

    batch: Batch


class WriteDone(msgspec.Struct, frozen=True):
    """A write is over: its `outcome` says how."""

    pending: PendingWrite


class LineFenced(msgspec.Struct, frozen=True):
    """The journal knows a newer owner of a shard: its home must be dropped (J1, J2)."""

    line: ShardLine
    epoch: int


class LineChecked(msgspec.Struct, frozen=True):
    """A line that was not clear is, or it is in doubt: the journal did not answer."""

    line: ShardLine


WriterEffect = SendBatch | SettleBatch | WriteDone | LineFenced | LineChecked


class Batches:
    """The lines of one owner to one journal, which takes so many batches at once."""

    def __init__(self, places: int = BATCHES) -> None:
        self._lines: dict[ShardKey, ShardLine] = {}
        self._ready: dict[ShardLine, None] = {}
        """Lines that may send, in the order in which they could."""
        self._flights: dict[tuple[int, ShardKey], _Flight] = {}
        self._number = 0
        self._free = places
        """Places for batches that do not wait for a row."""
        self.is_over = False

    def open(self, claim: Claim) -> tuple[ShardLine | None, list[WriterEffect]]:
        """The line of a claim; None if this owner has claimed the shard under a newer epoch."""
        line = self._lines.get(claim.shard)
        if line is not None and line.claim.epoch >= claim.epoch:
            return (line if line.claim == claim else None), []
        new = self._lines[claim.shard] = ShardLine(claim)
        return new, [] if line is None else list(self._fence(line, claim.epoch, ()))

    @property
    def on_their_way(self) -> int:
        """How many batches are sent or being settled."""
        return len(self._flights)

    # what happens

    def submit(self, line: ShardLine, pending: PendingWrite) -> list[WriterEffect]:
        """Somebody wants something written; `depart` sends it."""
        if self.is_over:
            return list(_end([pending], Unsettled()))
        if line.fenced_by is not None:
            return list(self._fence(line, line.fenced_by, [pending]))
        line.waiting.append(pending)
        if line.doubt is not None:
            return self.check(line)
        self._mark(line)
        return []

    def depart(self) -> list[WriterEffect]:
        """No more is submitted in this turn of the loop: send what may go out."""
        return self._send()

    def check(self, line: ShardLine) -> list[WriterEffect]:
        """Have a line that is in doubt settled; `LineChecked` follows."""
        batch, line.doubt = line.doubt, None
        if batch is None:
            return []
        # Nobody waits for these writes any more, but the late batch must be stopped (J4).
        nobody: list[list[PendingWrite]] = [[] for _ in batch.writes]
        flight = _Flight(batch, {line.claim.shard: line}, nobody, places=0, lost=1)
        self._flights[_name(batch)] = flight
        line.is_out = line.is_unsure = True
        return [SettleBatch(batch)]

    def hold(self, line: ShardLine) -> None:
        """Send nothing of a line until `let_go`; what is on its way is answered as ever (J10)."""
        line.is_held = True
        self._ready.pop(line, None)

    def let_go(self, line: ShardLine) -> list[WriterEffect]:
        """Send what waits in a line again."""
        line.is_held = False
        self._mark(line)
        return self._send()

    def fence(self, line: ShardLine, epoch: int) -> list[WriterEffect]:
        """The journal refused the claim of a line: it knows a newer epoch (J1)."""
        return list(self._fence(line, epoch, ()))

    def answered(self, batch: Batch, outcomes: Sequence[WriteOutcome]) -> list[WriterEffect]:
        """The journal said what became of a batch."""
        return self._over(batch, outcomes)

    def settled(self, batch: Batch, outcomes: Sequence[WriteOutcome | None]) -> list[WriterEffect]:
        """The journal said what had become of a batch (J4)."""
        known = [
            Unsettled(one.epoch) if isinstance(one, WriteRefused) and one.why == "fenced" else one
            for one in outcomes
        ]
        return self._over(batch, known)

    def lost(self, batch: Batch) -> list[WriterEffect]:
        """The answer to a batch, or to its settling, did not come."""
        flight = self._flights[_name(batch)]
        flight.lost += 1
        self._free, flight.places = self._free + flight.places, 0
        for line in flight.lines.values():
            line.is_unsure = True
        if flight.lost <= TRIES and not self.is_over:
            return [SettleBatch(flight.batch), *self._send()]
        return self._give_up(flight)

    def end(self) -> list[WriterEffect]:
        """This owner lost its lease, or leaves: what was not sent never is."""
        self.is_over = True
        self._ready.clear()
        effects: list[WriterEffect] = []
        for line in self._lines.values():
            waiting, line.waiting = line.waiting, []
            effects += _end(waiting, Unsettled())
        return effects

    # what follows

    def _over(self, batch: Batch, outcomes: Sequence[WriteOutcome | None]) -> list[WriterEffect]:
        flight = self._flights.pop(_name(batch))
        self._free += flight.places
        effects: list[WriterEffect] = []
        again: dict[ShardLine, list[PendingWrite]] = {}
        busy: dict[ShardLine, None] = {}
        void: dict[ShardLine, None] = {}
        for write, part, outcome in zip(batch.writes, flight.parts, outcomes, strict=True):
            line = flight.lines[write.shard]
            match outcome:
                case Written():
                    effects += _written(part, outcome)
                case None if line.voids < TRIES or not part:
                    if part:
                        void[line] = None
                    again.setdefault(line, []).extend(part)
                case Unsettled(int(epoch)) | WriteRefused("fenced", epoch):
                    effects += self._fence(line, epoch, part, outcome)
                case WriteRefused("busy") if line.alone < TRIES:
                    busy[line] = None
                    again.setdefault(line, []).extend(part)
                case _:
                    later = [one for one in line.waiting if one.write.entity == write.entity]
                    line.waiting = [one for one in line.waiting if one not in later]
                    effects += _end([*part, *later], outcome or Unsettled())
        for line in flight.lines.values():
            if line.is_unsure:
                effects.append(LineChecked(line))
            line.is_out = line.is_unsure = False
            line.alone = line.alone + 1 if line in busy else 0
            line.voids = line.voids + 1 if line in void else 0
            if line in again:
                if self.is_over:
                    effects += _end(again[line], Unsettled())
                else:
                    line.waiting[:0] = again[line]
            self._mark(line)
        effects += self._send()
        return effects

    def _fence(
        self,
        line: ShardLine,
        epoch: int,
        writes: Sequence[PendingWrite],
        outcome: WriteOutcome | None = None,
    ) -> Iterator[WriterEffect]:
        """J2: the shard is lost, and with it what waits in its line."""
        refused = WriteRefused("fenced", epoch)
        line.fenced_by = epoch
        waiting, line.waiting = line.waiting, []
        self._ready.pop(line, None)
        yield from _end(writes, outcome or refused)
        yield from _end(waiting, refused)
        yield LineFenced(line, epoch)

    def _give_up(self, flight: _Flight) -> list[WriterEffect]:
        """The journal does not answer: callers learn that, and each line stays in doubt."""
        batch = flight.batch
        del self._flights[_name(batch)]
        effects: list[WriterEffect] = []
        for part in flight.parts:
            effects += _end(part, Unsettled())
        for shard, line in flight.lines.items():
            writes = tuple([write for write in batch.writes if write.shard == shard])
            line.doubt = Batch(batch.number, (line.claim,), writes)
            line.is_out = line.is_unsure = False
            # What waits here was never sent, but it would wait for a journal that is not there.
            waiting, line.waiting = line.waiting, []
            effects += [*_end(waiting, Unsettled()), LineChecked(line)]
        return [*effects, *self._send()]

    # batches

    def _mark(self, line: ShardLine) -> None:
        """A line may be able to send now."""
        if line.may_send and not self.is_over:
            self._ready[line] = None

    def _send(self) -> list[WriterEffect]:
        """Send what may go out: a shard that was busy or is suspect by itself, all others
        together."""
        effects: list[WriterEffect] = []
        if self._ready:
            for line in [line for line in self._ready if line.alone or line.is_suspect]:
                effects.append(self._depart([line], places=0))
            while self._free > 0 and self._ready:
                effects.append(self._depart(list(self._ready), places=1))
        return effects

    def _depart(self, ready: Sequence[ShardLine], *, places: int) -> SendBatch:
        """Make a batch of what waits, until it is full."""
        taken: list[tuple[ShardLine, list[list[PendingWrite]]]] = []
        room, room_bytes = BATCH_WRITES, BATCH_BYTES
        if ready[0].is_suspect:
            room = 1
        for line in ready:
            parts: dict[EntityKey, list[PendingWrite]] = {}
            left: list[PendingWrite] = []
            for pending in line.waiting:
                write = pending.write
                part = parts.get(write.entity)
                size = _bytes(write)
                fits = (room > 0 and size <= room_bytes) or not (parts or taken)
                if left or not fits or (part is not None and not _joins(part, write)):
                    left.append(pending)
                    continue
                parts.setdefault(write.entity, []).append(pending)
                room, room_bytes = room - 1, room_bytes - size
            if not parts:
                break
            line.waiting, line.is_out = left, True
            del self._ready[line]
            taken.append((line, list(parts.values())))
        taken.sort(key=lambda one: one[0].claim.shard)
        lines = [line for line, _ in taken]
        return self._sent(lines, [part for _, parts in taken for part in parts], places)

    def _sent(
        self, lines: Sequence[ShardLine], parts: list[list[PendingWrite]], places: int
    ) -> SendBatch:
        self._number += 1
        self._free -= places
        claims = tuple([line.claim for line in lines])
        batch = Batch(self._number, claims, tuple([_join(part) for part in parts]))
        by_shard = {line.claim.shard: line for line in lines}
        self._flights[_name(batch)] = _Flight(batch, by_shard, parts, places)
        return SendBatch(batch)


def _name(batch: Batch) -> tuple[int, ShardKey]:
    """What tells batches apart: parts of one that are in doubt keep its number."""
    return batch.number, batch.claims[0].shard


def _end(writes: Sequence[PendingWrite], outcome: WriteOutcome) -> Iterator[WriterEffect]:
    for pending in writes:
        pending.outcome = outcome
        yield WriteDone(pending)


def _written(part: Sequence[PendingWrite], done: Written) -> Iterator[WriterEffect]:
    """What was joined, taken apart: each write learns the numbers after its own events."""
    if len(part) == 1:
        part[0].outcome = done
        yield WriteDone(part[0])
        return
    seqs = sum([counted(pending.write) for pending in part])
    offsets = sum([placed(pending.write) for pending in part])
    for pending in part:
        seqs -= counted(pending.write)
        offsets -= placed(pending.write)
        pending.outcome = Written(done.seq - seqs, done.offset - offsets)
        yield WriteDone(pending)


def _joins(part: Sequence[PendingWrite], write: JournalWrite) -> bool:
    """Whether a write continues those of its entity that a batch takes already."""
    first = part[0].write
    if part[-1].write.delete or part[-1].write.erase or write.erase:
        # What follows a deletion is a new beginning: the journal deletes at the end of a write.
        # An erasure takes replies away, and those beside it must stay.
        return False
    if (write.state is not None and any(pending.write.events for pending in part)) or (
        write.events and any(pending.write.state is not None for pending in part)
    ):
        return False
    if write.expected != BLIND:
        before = sum(counted(pending.write) for pending in part)
        if first.expected == BLIND or write.expected != first.expected + before:
            return False
    keys = [key for pending in part for key, _ in pending.write.inbox]
    return not any(key in keys for key, _ in write.inbox)


def _join(part: Sequence[PendingWrite]) -> JournalWrite:
    """The writes of one entity as one. A reply to a key that is stored with it becomes its own."""
    first = part[0].write
    if len(part) == 1:
        return first
    writes = [pending.write for pending in part]
    inbox = dict(entry for write in writes for entry in write.inbox)
    replies: dict[str, bytes] = {}
    for write in writes:
        for key, reply in write.replies:
            if key in inbox:
                inbox[key] = reply
            else:
                replies[key] = reply
    states = [write for write in writes if write.state is not None]
    snapshots = [write.snapshot for write in writes if write.snapshot is not None]
    flags = [write.remember for write in writes if write.remember is not None]
    return JournalWrite(
        first.shard,
        first.entity,
        first.expected,
        tuple([event for write in writes for event in write.events]),
        tuple(inbox.items()),
        tuple(replies.items()),
        states[-1].state if states else None,
        # The newest one, wherever it stands: a snapshot may come late. Of equal ones, the last.
        max(reversed(snapshots), key=lambda one: one[0]) if snapshots else None,
        flags[-1] if flags else None,
        writes[-1].delete,
        sum(write.saves for write in states) if states else 1,
    )


def _bytes(write: JournalWrite) -> int:
    """About what a write takes on its way."""
    size = sum(map(len, write.events)) + len(write.state or b"")
    if write.snapshot is not None:
        size += len(write.snapshot[1])
    for key, reply in (*write.inbox, *write.replies):
        size += len(key) + len(reply or b"")
    return size
