"""What every journal must do (J1-J4, J9, J11).

For authors of journals: derive `class TestMine(JournalContract)` and define `open` and `queued`.
Nothing here takes a moment of sleep for waiting: a scenario goes on once it sees that a transaction
is held up, or that a call stands in line for a row. The last scenario compares a journal with the
reference, `domicile.journals.memory`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import combinations, count
from random import Random

import msgspec

from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.journals.memory import MemoryJournal
from domicile.ports.journal import (
    BLIND,
    MOST_KEYS,
    Batch,
    Claim,
    ComparableJournal,
    EventPage,
    Journal,
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
)

A, B = Incarnation("a" * 32), Incarnation("b" * 32)
SHARD, OTHER, THIRD = ShardKey("default", 7), ShardKey("default", 8), ShardKey("default", 9)
ENTITY, BOB = EntityKey("Account", "alice"), EntityKey("Account", "bob")
CAROL, DAVE = EntityKey("Account", "carol"), EntityKey("Account", "dave")
OLD, NEW = Claim(SHARD, 0, 1, A), Claim(SHARD, 0, 2, B)
BESIDE, BEYOND = Claim(OTHER, 0, 1, A), Claim(THIRD, 0, 1, A)

MUCH = 1 << 20
POLL_S = 0.001
"""How often a condition is looked at that nothing announces."""


def write(
    entity: EntityKey, expected: int, *events: bytes, shard: ShardKey = SHARD
) -> JournalWrite:
    """A write without keys."""
    return JournalWrite(shard, entity, expected, events)


def batch(number: int, claims: Claim | Sequence[Claim], *writes: JournalWrite) -> Batch:
    """A batch under one claim or several."""
    return Batch(number, (claims,) if isinstance(claims, Claim) else tuple(claims), writes)


async def events_of(journal: Journal, entity: EntityKey = ENTITY) -> tuple[bytes, ...]:
    """All events of an entity."""
    [found] = await journal.recover([Wanted(entity, snapshot=False)], MUCH)
    assert (found.seq, found.more) == (len(found.events), False)
    return found.events


async def recovered(
    journal: Journal, entity: EntityKey = ENTITY, after: int = 0, *, snapshot: bool = True
) -> Recovered:
    """All that a journal says of one entity."""
    [found] = await journal.recover([Wanted(entity, after, snapshot)], MUCH)
    return found


async def remembered_ids(journal: Journal, shard: ShardKey = SHARD, limit: int = 100) -> list[str]:
    """The ids of all remembered entities of a shard, read in pages."""
    ids: list[str] = []
    last: Remembered | None = None
    while page := await journal.remembered(shard, last, limit):
        ids += [one.entity.id for one in page]
        last = page[-1]
    return ids


async def scanned(
    journal: Journal, shard: ShardKey = SHARD, limit: int = 100
) -> tuple[StoredEvent, ...]:
    """All events of a shard, read in pages."""
    events: list[StoredEvent] = []
    upto = 0
    while (page := await journal.scan(shard, upto, limit)).upto > upto:
        events += page.events
        upto = page.upto
    return tuple(events)


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():  # noqa: ASYNC110 - a server announces nothing
        await asyncio.sleep(POLL_S)


class Gate:
    """Holds up transactions while it is shut."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._reached = asyncio.Event()
        self.held = 0
        """How many transactions it holds up now."""

    async def __call__(self) -> None:
        """The pause that a journal makes inside a transaction."""
        self.held += 1
        self._reached.set()
        try:
            await self._open.wait()
        finally:
            self.held -= 1

    def shut(self) -> None:
        """Hold up what comes from now on."""
        self._open.clear()
        self._reached.clear()

    async def reached(self) -> None:
        """Until a transaction is held up."""
        await self._reached.wait()

    def open(self) -> None:
        """Let go."""
        self._open.set()


class JournalContract(ABC):
    """Derive a test class from this and define `open` and `queued`."""

    patience_s: float = 10.0
    """How long, in real time, one scenario may take."""

    one_writer: bool = False
    """Whether a transaction makes those of other shards wait, too."""

    @abstractmethod
    def open(self, pause: Callable[[], Awaitable[None]]) -> AbstractAsyncContextManager[Journal]:
        """A fresh, empty journal.

        It awaits `pause()` in every `write` that some shard takes: its rows are locked and checked,
        and nothing is committed.
        """

    @abstractmethod
    async def queued(self, journal: Journal) -> int:
        """How many calls wait for a row that another transaction holds."""

    def run(self, scenario: Callable[[Journal, Gate], Awaitable[None]]) -> None:
        """Run one scenario on a fresh journal and a fresh event loop."""

        async def main() -> None:
            gate = Gate()
            async with asyncio.timeout(self.patience_s), self.open(gate) as journal:
                await scenario(journal, gate)

        asyncio.run(main())

    async def until_queued(self, journal: Journal, calls: int) -> None:
        """Until so many calls wait for a row."""

        async def is_so() -> bool:
            return await self.queued(journal) >= calls

        await _until(is_so)

    # claims (J1)

    def test_claims_only_rise(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            assert await journal.claim([NEW]) == [None]
            assert await journal.claim([NEW]) == [None]
            assert await journal.claim([OLD]) == [NEW.epoch]
            assert await journal.claim([Claim(SHARD, 0, NEW.epoch, A)]) == [NEW.epoch]

        self.run(scenario)

    def test_many_claims_are_answered_in_order(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            assert await journal.claim([NEW]) == [None]
            assert list(await journal.claim([BEYOND, OLD, BESIDE])) == [None, NEW.epoch, None]
            done = await journal.write(batch(1, BEYOND, write(CAROL, 0, b"1", shard=THIRD)))
            assert done == [Written(1, 1)]

        self.run(scenario)

    def test_each_layout_has_rows_of_its_own(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            assert await journal.claim([NEW]) == [None]
            assert await journal.claim([Claim(SHARD, 1, 1, A)]) == [None]
            assert await journal.claim([OLD]) == [NEW.epoch]

        self.run(scenario)

    def test_nothing_is_written_without_a_claim(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            [refused] = await journal.write(batch(1, OLD, write(ENTITY, 0, b"1")))
            assert isinstance(refused, WriteRefused)
            assert refused.why == "fenced"
            assert await events_of(journal) == ()

        self.run(scenario)

    # events

    def test_events_are_read_in_order(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            assert await events_of(journal) == ()
            assert await journal.write(batch(1, OLD, write(ENTITY, 0, b"1", b"2"))) == [
                Written(2, 2)
            ]
            done = await journal.write(batch(2, OLD, write(BOB, 0, b"b"), write(ENTITY, 2, b"3")))
            assert list(done) == [Written(1, 3), Written(3, 4)]
            assert await events_of(journal) == (b"1", b"2", b"3")
            assert await events_of(journal, BOB) == (b"b",)
            assert await events_of(journal, CAROL) == ()

        self.run(scenario)

    def test_events_come_in_pages(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            await journal.write(batch(1, OLD, write(ENTITY, 0, b"11", b"22", b"33")))
            await journal.write(batch(2, OLD, write(BOB, 0, b"b")))
            [first] = await journal.recover([Wanted(ENTITY)], 5)
            assert first == Recovered((b"11", b"22"), 2, True, keys=())
            rest = await journal.recover([Wanted(ENTITY, first.seq)], 5)
            assert rest == [Recovered((b"33",), 3, False)]
            assert await journal.recover([Wanted(ENTITY, 3)], 5) == [Recovered((), 3, False)]
            # One event at least, however large, or a reader would never come to an end.
            assert await journal.recover([Wanted(ENTITY, 1)], 0) == [Recovered((b"22",), 2, True)]
            three = [Wanted(CAROL), Wanted(ENTITY, 2), Wanted(BOB)]
            assert list(await journal.recover(three, MUCH)) == [
                Recovered((), 0, False, keys=()),
                Recovered((b"33",), 3, False),
                Recovered((b"b",), 1, False, keys=()),
            ]
            # What finds no room is asked for again; an entity without events needs none.
            assert list(await journal.recover(three, 2)) == [
                Recovered((), 0, False, keys=()),
                Recovered((b"33",), 3, False),
                Recovered((), 0, True),
            ]
            assert await journal.recover([], MUCH) == []

        self.run(scenario)

    def test_a_wrong_seq_is_refused(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            await journal.write(batch(1, OLD, write(ENTITY, 0, b"1")))
            for number, seq in ((2, 0), (3, 2)):
                refused = await journal.write(batch(number, OLD, write(ENTITY, seq, b"no")))
                assert refused == [WriteRefused("seq", OLD.epoch)]
            assert await events_of(journal) == (b"1",)

        self.run(scenario)

    def test_a_blind_write_follows_whatever_there_is(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            for number in (1, 2):
                done = await journal.write(batch(number, OLD, write(ENTITY, BLIND, b"%d" % number)))
                assert done == [Written(number, number)]
            assert await events_of(journal) == (b"1", b"2")

        self.run(scenario)

    # fences (J2)

    def test_a_newer_claim_fences_the_old_owner(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            await journal.write(batch(1, OLD, write(ENTITY, 0, b"1")))
            await journal.claim([NEW])
            twin = Claim(SHARD, 0, NEW.epoch, A)
            for number, claim in ((2, OLD), (3, twin)):
                refused = await journal.write(batch(number, claim, write(ENTITY, 1, b"stale")))
                assert refused == [WriteRefused("fenced", NEW.epoch)]
            assert await events_of(journal) == (b"1",)
            # The count of batches is the owner's and the epoch's: the new one begins at the start.
            assert await journal.write(batch(1, NEW, write(ENTITY, 1, b"2"))) == [Written(2, 2)]

        self.run(scenario)

    def test_a_claim_waits_for_a_write_under_way(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            gate.shut()
            writing = asyncio.ensure_future(journal.write(batch(1, OLD, write(ENTITY, 0, b"1"))))
            await gate.reached()
            claiming = asyncio.ensure_future(journal.claim([NEW]))
            await self.until_queued(journal, 1)
            assert not claiming.done()
            assert await events_of(journal) == ()
            gate.open()
            assert await claiming == [None]
            assert await events_of(journal) == (b"1",)
            assert await writing == [Written(1, 1)]

        self.run(scenario)

    def test_another_shard_does_not_wait(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            gate.shut()
            writing = asyncio.ensure_future(journal.write(batch(1, OLD, write(ENTITY, 0, b"1"))))
            await gate.reached()
            assert await journal.claim([BESIDE]) == [None]
            gate.open()
            await writing

        if not self.one_writer:
            self.run(scenario)

    def test_a_claim_whose_row_is_held_fails_alone_or_waits(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            gate.shut()
            writing = asyncio.ensure_future(journal.write(batch(1, OLD, write(ENTITY, 0, b"1"))))
            await gate.reached()
            # A shard with a row that nobody holds, the held one, one without a row.
            assert await journal.claim([BESIDE], wait=False) == [None]
            higher = Claim(OTHER, 0, 2, B)
            answers = await journal.claim([BEYOND, NEW, higher], wait=False)
            assert list(answers) == [None, "busy", None]
            assert await journal.claim([NEW], wait=False) == ["busy"]
            waiting = asyncio.ensure_future(journal.claim([NEW, BEYOND]))
            await self.until_queued(journal, 1)
            gate.open()
            assert list(await waiting) == [None, None]
            assert await writing == [Written(1, 1)]
            # Free again: without waiting, it says what a claim says.
            assert list(await journal.claim([OLD, higher], wait=False)) == [NEW.epoch, None]

        if not self.one_writer:
            self.run(scenario)

    def test_no_interleaving_of_two_owners_lets_the_old_one_write_behind_the_new_one(self) -> None:
        """Each owner claims, reads, begins a write and sees it end, in every order of the two."""
        steps = ("claim", "write", "end")
        for chosen in combinations(range(2 * len(steps)), len(steps)):
            order = [OLD if place in chosen else NEW for place in range(2 * len(steps))]
            self.run(lambda journal, gate, order=order: self._interleave(journal, gate, order))  # type: ignore[misc]

    async def _interleave(self, journal: Journal, gate: Gate, order: Sequence[Claim]) -> None:
        permits = {OLD: asyncio.Semaphore(0), NEW: asyncio.Semaphore(0)}
        given, taken = {OLD: 0, NEW: 0}, {OLD: 0, NEW: 0}
        seen: dict[Claim, tuple[bytes, ...]] = {}
        done: dict[Claim, object] = {}

        async def owner(claim: Claim) -> None:
            await permits[claim].acquire()
            [newest] = await journal.claim([claim])
            if newest is None:
                seen[claim] = await events_of(journal)
            taken[claim] += 1
            await permits[claim].acquire()
            mine = write(ENTITY, len(seen.get(claim, ())), b"%d" % claim.epoch)
            [done[claim]] = await journal.write(batch(1, claim, mine))
            taken[claim] += 1

        async def stands_still() -> bool:
            """Each has taken its steps, or is held up in one, or stands in line for a row."""
            busy = sum(given[claim] > taken[claim] for claim in (OLD, NEW))
            return busy == gate.held + await self.queued(journal)

        async def is_empty() -> bool:
            return gate.held == 0

        gate.shut()
        async with asyncio.TaskGroup() as tasks:
            for claim in (OLD, NEW):
                tasks.create_task(owner(claim))
            for place, claim in enumerate(order):
                if order[:place].count(claim) < 2:
                    given[claim] += 1
                    permits[claim].release()
                    await _until(stands_still)
                else:
                    gate.open()
                    await _until(is_empty)
                    await _until(stands_still)
                    gate.shut()
            gate.open()
        events = await events_of(journal)
        written = [claim for claim in (OLD, NEW) if isinstance(done[claim], Written)]
        assert events == tuple(b"%d" % claim.epoch for claim in written)
        # I2: what the new owner read when it had claimed is all that ever precedes its own.
        assert NEW in written
        assert seen[NEW] == events[:-1]

    # batches (J3)

    def test_a_batch_writes_to_many_shards(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD, BESIDE])
            done = await journal.write(
                batch(
                    1, (OLD, BESIDE), write(ENTITY, 0, b"1", b"2"),
                    write(CAROL, 0, b"c", shard=OTHER), write(BOB, 0, b"b"),
                )
            )  # fmt: skip
            assert list(done) == [Written(2, 2), Written(1, 1), Written(1, 3)]
            assert await events_of(journal, CAROL) == (b"c",)

        self.run(scenario)

    def test_a_fenced_shard_fails_alone(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD, BESIDE, BEYOND])
            await journal.claim([Claim(OTHER, 0, 2, B)])
            done = await journal.write(
                batch(
                    1, (OLD, BESIDE, BEYOND), write(ENTITY, 0, b"1"),
                    write(CAROL, 0, b"no", shard=OTHER), write(DAVE, 0, b"d", shard=THIRD),
                )
            )  # fmt: skip
            assert list(done) == [Written(1, 1), WriteRefused("fenced", 2), Written(1, 1)]
            assert await events_of(journal, CAROL) == ()

        self.run(scenario)

    def test_a_clashing_shard_fails_alone_and_as_a_whole(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD, BESIDE])
            first = batch(
                1, (OLD, BESIDE), write(ENTITY, 0, b"1"), write(BOB, 1, b"gap"),
                write(CAROL, 0, b"c", shard=OTHER),
            )  # fmt: skip
            assert list(await journal.write(first)) == [
                WriteRefused("busy", 1), WriteRefused("seq", 1), Written(1, 1),
            ]  # fmt: skip
            assert await events_of(journal) == await events_of(journal, BOB) == ()
            # The shard took nothing, so its number is not used up either.
            assert list(await journal.settle(first)) == [None, None, Written(1, 1)]
            assert await journal.write(batch(2, OLD, write(ENTITY, 0, b"1"))) == [Written(1, 1)]

        self.run(scenario)

    def test_a_busy_shard_fails_alone_and_by_itself_it_waits(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD, BESIDE])
            gate.shut()
            holding = asyncio.ensure_future(journal.write(batch(1, OLD, write(BOB, 0, b"b"))))
            await gate.reached()
            together = asyncio.ensure_future(
                journal.write(
                    batch(
                        2, (OLD, BESIDE), write(ENTITY, 0, b"1"),
                        write(CAROL, 0, b"c", shard=OTHER),
                    )
                )
            )  # fmt: skip

            async def both_held() -> bool:
                return gate.held == 2

            await _until(both_held)
            alone = asyncio.ensure_future(journal.write(batch(3, OLD, write(ENTITY, 0, b"1"))))
            await self.until_queued(journal, 1)
            gate.open()
            assert list(await together) == [WriteRefused("busy", 1), Written(1, 1)]
            assert await alone == [Written(1, 2)]
            assert await holding == [Written(1, 1)]

        if not self.one_writer:
            self.run(scenario)

    def test_claims_and_batches_in_opposite_orders_come_to_an_end(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            shards = [ShardKey("default", number) for number in range(10, 30)]

            async def owner(owner: Incarnation, shards: Sequence[ShardKey]) -> None:
                for epoch in range(1, 11):
                    claims = [Claim(shard, 0, epoch, owner) for shard in shards]
                    await journal.claim(claims)
                    await journal.write(
                        batch(
                            epoch, sorted(claims, key=lambda claim: claim.shard),
                            *[
                                write(EntityKey("T", f"{shard.shard}"), BLIND, b"x", shard=shard)
                                for shard in shards
                            ],
                        )
                    )  # fmt: skip

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(owner(A, shards))
                tasks.create_task(owner(B, shards[::-1]))

        self.run(scenario)

    # numbers and unknown outcomes (J4)

    def test_a_number_writes_once(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            await journal.write(batch(5, OLD, write(ENTITY, BLIND, b"1")))
            for number in (5, 4):
                again = await journal.write(batch(number, OLD, write(ENTITY, BLIND, b"no")))
                assert again == [WriteRefused("fenced", OLD.epoch)]
            assert await journal.write(batch(6, OLD, write(ENTITY, BLIND, b"2"))) == [Written(2, 2)]
            assert await events_of(journal) == (b"1", b"2")

        self.run(scenario)

    def test_a_claim_starts_the_numbers_anew_only_if_its_epoch_is_higher(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            await journal.write(batch(5, OLD, write(ENTITY, BLIND, b"1")))
            await journal.claim([OLD])
            again = await journal.write(batch(5, OLD, write(ENTITY, BLIND, b"no")))
            assert again == [WriteRefused("fenced", OLD.epoch)]
            higher = Claim(SHARD, 0, 3, A)
            await journal.claim([higher])
            done = await journal.write(batch(5, higher, write(ENTITY, BLIND, b"2")))
            assert done == [Written(2, 2)]

        self.run(scenario)

    def test_a_batch_that_landed_is_found(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD, BESIDE])
            one = batch(
                1, (OLD, BESIDE), write(ENTITY, 0, b"1", b"2"), write(BOB, BLIND, b"b"),
                write(CAROL, 0, b"c", shard=OTHER),
            )  # fmt: skip
            done = list(await journal.write(one))
            assert done == [Written(2, 2), Written(1, 3), Written(1, 1)]
            for _ in range(2):
                assert list(await journal.settle(one)) == done

        self.run(scenario)

    def test_a_batch_that_did_not_land_never_does(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            late = batch(1, OLD, write(ENTITY, BLIND, b"late"))
            # The answer may get lost: asking again must not take the used number for a proof.
            for _ in range(2):
                assert await journal.settle(late) == [None]
            assert await journal.write(late) == [WriteRefused("fenced", OLD.epoch)]
            assert await events_of(journal) == ()
            again = batch(2, OLD, write(ENTITY, BLIND, b"again"))
            assert await journal.write(again) == [Written(1, 1)]
            assert await journal.write(late) == [WriteRefused("fenced", OLD.epoch)]
            # A settling that comes late itself changes nothing either.
            await journal.settle(late)
            assert await journal.settle(again) == [Written(1, 1)]
            assert await events_of(journal) == (b"again",)

        self.run(scenario)

    def test_a_batch_under_way_is_settled_behind_the_lock(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            one = batch(1, OLD, write(ENTITY, 0, b"1"))
            gate.shut()
            writing = asyncio.ensure_future(journal.write(one))
            await gate.reached()
            settling = asyncio.ensure_future(journal.settle(one))
            await self.until_queued(journal, 1)
            assert not settling.done()
            gate.open()
            assert await settling == await writing == [Written(1, 1)]

        self.run(scenario)

    def test_a_batch_behind_its_settling_writes_nothing(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            one, late = (batch(n, OLD, write(ENTITY, BLIND, b"%d" % n)) for n in (1, 2))
            gate.shut()
            writing = asyncio.ensure_future(journal.write(one))
            await gate.reached()
            settling = asyncio.ensure_future(journal.settle(late))
            await self.until_queued(journal, 1)
            arriving = asyncio.ensure_future(journal.write(late))
            await self.until_queued(journal, 2)
            gate.open()
            assert await writing == [Written(1, 1)]
            # Either may get the row first; what counts is that their answers agree.
            if await settling == [None]:
                assert await arriving == [WriteRefused("fenced", OLD.epoch)]
                assert await events_of(journal) == (b"1",)
            else:
                assert await arriving == await settling == [Written(2, 2)]

        self.run(scenario)

    def test_nobody_but_the_owner_can_settle(self) -> None:
        """The successor counts, too: a number without epoch and owner proves nothing."""

        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD, BESIDE])
            one = batch(
                1, (OLD, BESIDE), write(ENTITY, 0, b"1"), write(CAROL, 0, b"c", shard=OTHER)
            )
            await journal.claim([NEW])
            await journal.write(batch(1, NEW, write(BOB, 0, b"b")))
            assert list(await journal.settle(one)) == [WriteRefused("fenced", NEW.epoch), None]
            # And what the old owner's settling did hinders nobody.
            assert await journal.write(batch(2, NEW, write(ENTITY, 0, b"2"))) == [Written(1, 2)]

        self.run(scenario)

    def test_a_write_whose_caller_went_away_is_settled_like_any_other(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            gate.shut()
            one = batch(1, OLD, write(ENTITY, 0, b"1"))
            caller = asyncio.ensure_future(journal.write(one))
            await gate.reached()
            caller.cancel()
            await asyncio.wait([caller])
            settling = asyncio.ensure_future(journal.settle(one))
            gate.open()
            [answer] = await settling
            assert await events_of(journal) == ((b"1",) if answer else ())
            assert answer in (None, Written(1, 1))

        self.run(scenario)

    # keys

    def test_a_key_is_stored_with_its_events_and_its_reply_once(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            numbers: Iterator[int] = iter(range(1, 100))
            await journal.claim([OLD])

            async def put(one: JournalWrite) -> Written | WriteRefused:
                [answer] = await journal.write(batch(next(numbers), OLD, one))
                return answer

            async def stored(entity: EntityKey, key: str) -> StoredReply | None:
                [answer] = await journal.inbox([(entity, key)])
                return answer

            clash = WriteRefused("key", OLD.epoch)
            assert await stored(ENTITY, "tx") is None
            # A reply needs a key that waits for one.
            early = JournalWrite(SHARD, ENTITY, 0, (b"no",), replies=(("tx", b"r"),))
            assert await put(early) == clash
            first = JournalWrite(SHARD, ENTITY, 0, (b"1",), (("tx", None),))
            assert await put(first) == Written(1, 1)
            assert await stored(ENTITY, "tx") == StoredReply(None)
            assert await stored(BOB, "tx") is None
            for reply in (None, b"r"):
                twice = JournalWrite(SHARD, ENTITY, 1, (b"2",), (("tx", reply),))
                assert await put(twice) == clash
            last = JournalWrite(SHARD, ENTITY, 1, (b"2",), replies=(("tx", b"r"),))
            assert await put(last) == Written(2, 2)
            assert await stored(ENTITY, "tx") == StoredReply(b"r")
            assert await put(JournalWrite(SHARD, ENTITY, 2, replies=(("tx", b"s"),))) == clash
            whole = JournalWrite(SHARD, BOB, 0, (b"b",), (("tx", b"t"), ("ty", b"")))
            assert await put(whole) == Written(1, 3)
            asked = [(BOB, "ty"), (ENTITY, "tz"), (ENTITY, "tx"), (BOB, "tx")]
            assert list(await journal.inbox(asked)) == [
                StoredReply(b""), None, StoredReply(b"r"), StoredReply(b"t"),
            ]  # fmt: skip
            assert await events_of(journal) == (b"1", b"2")

        self.run(scenario)

    def test_a_recovery_tells_the_keys_of_an_entity_if_they_are_few(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            keys = [f"k{n}" for n in range(MOST_KEYS)]
            many = JournalWrite(SHARD, ENTITY, 0, (b"1",), tuple((key, None) for key in keys))
            few = JournalWrite(SHARD, BOB, 0, (), (("only", b"r"),))
            await journal.write(batch(1, OLD, many, few))
            three = await journal.recover([Wanted(ENTITY), Wanted(BOB), Wanted(CAROL)], MUCH)
            assert [sorted(one.keys or ()) for one in three] == [sorted(keys), ["only"], []]
            assert [one.keys is None for one in three] == [False, False, False]
            assert (await recovered(journal, after=1)).keys is None, "only from the start"
            more = JournalWrite(SHARD, ENTITY, 1, (), (("one more", None),))
            await journal.write(batch(2, OLD, more))
            assert await recovered(journal) == Recovered((b"1",), 1, False, keys=None)

        self.run(scenario)

    # states

    def test_a_state_replaces_the_one_before_and_counts_in_seq_alone(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            first = JournalWrite(SHARD, ENTITY, 0, (), (("tx", b"r"),), state=b"one")
            done = await journal.write(batch(1, OLD, first, write(BOB, 0, b"b")))
            assert list(done) == [Written(1, 0), Written(1, 1)]
            assert await recovered(journal) == Recovered((), 1, False, state=b"one", keys=("tx",))
            late = JournalWrite(SHARD, ENTITY, 0, state=b"late")
            assert await journal.write(batch(2, OLD, late)) == [WriteRefused("seq", 1)]
            joined = JournalWrite(SHARD, ENTITY, 1, state=b"", saves=3)
            again = batch(3, OLD, joined)
            assert await journal.write(again) == await journal.settle(again) == [Written(4, 1)]
            found = await recovered(journal)
            assert (found.seq, found.state, found.events, found.more) == (4, b"", (), False)
            assert await recovered(journal, after=1) == Recovered((), 4, False, state=b"")
            assert await recovered(journal, after=4) == Recovered((), 4, False)
            assert await scanned(journal) == (StoredEvent(1, BOB, 1, b"b"),)

        self.run(scenario)

    # snapshots (J9)

    def test_a_recovery_begins_with_the_newest_snapshot(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            numbers = count(1)
            await journal.claim([OLD])

            async def keep(seq: int, data: bytes, expected: int, *events: bytes) -> object:
                one = JournalWrite(SHARD, ENTITY, expected, events, snapshot=(seq, data))
                [answer] = await journal.write(batch(next(numbers), OLD, one))
                return answer

            assert await keep(2, b"early", 0, b"1") == WriteRefused("seq", 1), "not there yet"
            assert await recovered(journal) == Recovered((), 0, False, keys=())
            assert await keep(2, b"two", 0, b"1", b"2", b"3") == Written(3, 3)
            whole = Recovered((b"3",), 3, False, (2, b"two"), keys=())
            assert await recovered(journal) == whole
            everything = Recovered((b"1", b"2", b"3"), 3, False, keys=())
            assert await recovered(journal, snapshot=False) == everything
            assert await recovered(journal, after=1) == Recovered((b"2", b"3"), 3, False)
            assert await keep(1, b"older", 3) == Written(3, 3)
            assert await recovered(journal) == whole, "an older one changes nothing"
            assert await keep(2, b"another", BLIND) == Written(3, 3)
            assert (await recovered(journal)).snapshot == (2, b"another")
            assert await keep(4, b"four", 3, b"4") == Written(4, 4)
            assert await recovered(journal) == Recovered((), 4, False, (4, b"four"), keys=())

        self.run(scenario)

    def test_snapshots_and_states_need_room_too(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            snapped = JournalWrite(SHARD, ENTITY, 0, (b"11", b"22"), snapshot=(1, b"12345678"))
            whole = JournalWrite(SHARD, BOB, 0, state=b"12345678")
            await journal.write(batch(1, OLD, snapped, whole, write(CAROL, 0, b"c")))
            three = [Wanted(ENTITY), Wanted(BOB), Wanted(CAROL)]
            # The first piece always finds room, and what finds none is asked for again.
            assert list(await journal.recover(three, 0)) == [
                Recovered((), 1, True, (1, b"12345678"), keys=()),
                Recovered((), 0, True),
                Recovered((), 0, True),
            ]
            two = [Wanted(BOB), Wanted(ENTITY, 1)]
            assert list(await journal.recover(two, 8)) == [
                Recovered((), 1, False, state=b"12345678", keys=()),
                Recovered((), 1, True),
            ]
            assert [one.more for one in await journal.recover(three, MUCH)] == [False] * 3

        self.run(scenario)

    # deletions

    def test_a_deletion_leaves_a_number_and_an_event_without_data(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            begun = JournalWrite(
                SHARD, ENTITY, 0, (b"1", b"2"), (("tx", b"r"),), snapshot=(1, b"s"), remember=True
            )
            await journal.write(batch(1, OLD, begun, write(BOB, 0, b"b")))
            ended = batch(
                2, OLD, JournalWrite(SHARD, ENTITY, 2, (b"3",), (("end", None),), delete=True),
                write(BOB, 1, b"c"),
            )  # fmt: skip
            done = [Written(4, 5), Written(2, 6)]
            for answers in (await journal.write(ended), await journal.settle(ended)):
                assert list(answers) == done
            gone = await recovered(journal)
            assert sorted(gone.keys or ()) == ["end", "tx"], "keys of asks stay"
            assert (gone.events, gone.seq, gone.more, gone.snapshot) == ((), 4, False, None)
            assert await recovered(journal, after=1) == Recovered((), 4, False)
            assert await journal.inbox([(ENTITY, "tx")]) == [StoredReply(b"r")]
            assert await remembered_ids(journal) == []
            left = (
                StoredEvent(3, BOB, 1, b"b"), StoredEvent(5, ENTITY, 4, None),
                StoredEvent(6, BOB, 2, b"c"),
            )  # fmt: skip
            assert await scanned(journal) == left
            page = await journal.scan(SHARD, 0, 1)
            assert page == EventPage(left[:1], 3), "the offsets before will never exist"
            # A new beginning. A snapshot that was made before the end must not bring it back.
            anew = JournalWrite(SHARD, ENTITY, 4, (b"5",), snapshot=(2, b"old"))
            assert await journal.write(batch(3, OLD, anew)) == [Written(5, 7)]
            found = await recovered(journal)
            assert (found.events, found.seq, found.snapshot) == ((b"5",), 5, None)
            later = JournalWrite(SHARD, ENTITY, 5, snapshot=(5, b"new"))
            await journal.write(batch(4, OLD, later))
            found = await recovered(journal)
            assert (found.events, found.seq, found.snapshot) == ((), 5, (5, b"new"))
            again = JournalWrite(SHARD, ENTITY, BLIND, delete=True)
            assert await journal.write(batch(5, OLD, again)) == [Written(6, 8)]
            assert [one.offset for one in await scanned(journal)] == [3, 6, 8]

        self.run(scenario)

    def test_a_deletion_takes_a_state_and_what_its_own_write_brings(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            await journal.write(batch(1, OLD, JournalWrite(SHARD, ENTITY, 0, state=b"one")))
            last = JournalWrite(
                SHARD, ENTITY, 1, state=b"three", saves=2, remember=True, delete=True
            )
            assert await journal.write(batch(2, OLD, last)) == [Written(4, 1)]
            assert await recovered(journal) == Recovered((), 4, False, keys=())
            assert await remembered_ids(journal) == []
            assert await scanned(journal) == (StoredEvent(1, ENTITY, 4, None),)
            await journal.write(batch(3, OLD, JournalWrite(SHARD, ENTITY, 4, state=b"new")))
            assert await recovered(journal) == Recovered((), 5, False, state=b"new", keys=())

        self.run(scenario)

    def test_an_erasure_takes_the_snapshot_and_all_replies_and_leaves_the_rest(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            kept = JournalWrite(SHARD, BOB, 0, (b"b",), inbox=(("k", b"bob"),), snapshot=(1, b"s"))
            first = JournalWrite(
                SHARD, ENTITY, 0, (b"1",), inbox=(("a", b"secret"), ("b", None)), snapshot=(1, b"s")
            )
            await journal.write(batch(1, OLD, first, kept))
            # Refused: nothing goes.
            wrong = JournalWrite(SHARD, ENTITY, 7, erase=True)
            [refused] = await journal.write(batch(2, OLD, wrong))
            assert isinstance(refused, WriteRefused)
            assert await journal.inbox([(ENTITY, "a")]) == [StoredReply(b"secret")]
            gone = JournalWrite(SHARD, ENTITY, 1, inbox=(("c", None),), erase=True)
            other = write(CAROL, 0, b"c")
            asked = batch(3, OLD, gone, other)
            assert await journal.write(asked) == await journal.settle(asked)
            found = await recovered(journal)
            assert (found.events, found.seq, found.snapshot) == ((b"1",), 1, None)
            keys = [(ENTITY, "a"), (ENTITY, "b"), (ENTITY, "c"), (ENTITY, "d"), (BOB, "k")]
            assert await journal.inbox(keys) == [
                StoredReply(None), StoredReply(None), StoredReply(None), None, StoredReply(b"bob"),
            ]  # fmt: skip
            assert (await recovered(journal, BOB)).snapshot == (1, b"s")
            assert await events_of(journal, CAROL) == (b"c",)

        self.run(scenario)

    def test_a_deletion_may_erase_replies_too(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            first = JournalWrite(
                SHARD, ENTITY, 0, (b"1",), inbox=(("a", b"secret"),), snapshot=(1, b"s")
            )
            await journal.write(batch(1, OLD, first))
            gone = JournalWrite(SHARD, ENTITY, 1, inbox=(("b", None),), delete=True, erase=True)
            assert await journal.write(batch(2, OLD, gone)) == [Written(2, 2)]
            own = JournalWrite(SHARD, ENTITY, 2, replies=(("b", b"done"),))
            assert await journal.write(batch(3, OLD, own)) == [Written(2, 2)]
            keys = [(ENTITY, "a"), (ENTITY, "b")]
            assert await journal.inbox(keys) == [StoredReply(None), StoredReply(b"done")]
            found = await recovered(journal)
            assert (found.events, found.seq, found.snapshot) == ((), 2, None)

        self.run(scenario)

    def test_what_is_refused_deletes_and_replaces_nothing(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD, BESIDE])
            kept = JournalWrite(SHARD, ENTITY, 0, (b"1",), snapshot=(1, b"s"), remember=True)
            await journal.write(
                batch(1, (OLD, BESIDE), kept, JournalWrite(OTHER, CAROL, 0, state=b"c"))
            )

            async def unchanged() -> bool:
                return (
                    await recovered(journal) == Recovered((), 1, False, (1, b"s"), keys=())
                    and await recovered(journal, CAROL)
                    == Recovered((), 1, False, state=b"c", keys=())
                    and await remembered_ids(journal) == ["alice"]
                    and [one.offset for one in await scanned(journal)] == [1]
                )

            assert await unchanged()
            end = JournalWrite(SHARD, ENTITY, 1, delete=True)
            clash = batch(
                2, (OLD, BESIDE), end, write(BOB, 7, b"gap"), write(CAROL, 7, shard=OTHER)
            )
            refused = list(await journal.write(clash))
            assert refused == [
                WriteRefused("busy", 1), WriteRefused("seq", 1), WriteRefused("seq", 1),
            ]  # fmt: skip
            assert await unchanged()
            await journal.claim([NEW, Claim(OTHER, 0, 2, B)])
            state = JournalWrite(OTHER, CAROL, 1, state=b"stale")
            flag = JournalWrite(SHARD, BOB, 0, remember=True, snapshot=(0, b"x"))
            stale = batch(3, (OLD, BESIDE), end, flag, state)
            for answers in (await journal.write(stale), await journal.settle(stale)):
                assert list(answers) == [WriteRefused("fenced", 2)] * 3
            assert await unchanged()

        self.run(scenario)

    # remembered entities (J9)

    def test_remembered_entities_come_in_pages_those_written_last_first(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            numbers = count(1)
            await journal.claim([OLD, BESIDE])

            def flag(id: str, flag: bool | None, *events: bytes) -> JournalWrite:
                return JournalWrite(SHARD, EntityKey("T", id), BLIND, events, remember=flag)

            async def put(*writes: JournalWrite) -> None:
                await journal.write(batch(next(numbers), OLD, *writes))

            assert await journal.remembered(SHARD, None, 5) == []
            await put(
                flag("c", True), flag("a", True, b"1"), flag("b", True), flag("z", None, b"z")
            )
            await put(flag("d", True, b"1"))
            other = JournalWrite(OTHER, CAROL, 0, remember=True)
            await journal.write(batch(1, BESIDE, other))
            for limit in (1, 2, 100):
                assert await remembered_ids(journal, limit=limit) == ["d", "a", "b", "c"]
            assert await remembered_ids(journal, OTHER) == ["carol"]
            await put(flag("b", None, b"2"))
            first = list(await journal.remembered(SHARD, None, 2))
            assert [one.entity.id for one in first] == ["b", "d"]
            # One that is written between two pages goes to the front; no other one is left out.
            await put(flag("c", None, b"2"))
            rest = await journal.remembered(SHARD, first[-1], 100)
            assert [one.entity.id for one in rest] == ["a"]
            await put(flag("a", False), flag("z", False))
            assert await remembered_ids(journal) == ["c", "b", "d"]
            # The order outlives its owner: the count of batches begins anew, this one does not.
            await journal.claim([NEW])
            await journal.write(batch(1, NEW, flag("d", None, b"2")))
            assert await remembered_ids(journal) == ["d", "c", "b"]

        self.run(scenario)

    def test_more_remembered_entities_than_a_page_has_are_all_found(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            ids = [f"{n:05}" for n in range(10_500)]
            for number, start in enumerate(range(0, len(ids), 1_500), 1):
                writes = [
                    JournalWrite(SHARD, EntityKey("T", id), 0, remember=True)
                    for id in ids[start : start + 1_500]
                ]
                await journal.write(batch(number, OLD, *writes))
            found = await remembered_ids(journal, limit=1_000)
            assert found[:2] == ["09000", "09001"], "the last batch is first"
            assert sorted(found) == ids

        self.run(scenario)

    # reading by offset

    def test_a_shard_is_read_by_offset_in_pages(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            for claim in (BESIDE, OLD):
                await journal.claim([claim])
                assert await journal.scan(SHARD, 0, 10) == EventPage((), 0)
            await journal.write(
                batch(
                    1, (OLD, BESIDE), write(ENTITY, 0, b"1", b""),
                    write(CAROL, 0, b"c", shard=OTHER), write(BOB, 0, b"\0\xff"),
                )
            )  # fmt: skip
            await journal.write(batch(2, OLD, write(ENTITY, 2, b"3")))
            events = (
                StoredEvent(1, ENTITY, 1, b"1"), StoredEvent(2, ENTITY, 2, b""),
                StoredEvent(3, BOB, 1, b"\0\xff"), StoredEvent(4, ENTITY, 3, b"3"),
            )  # fmt: skip
            for limit in (1, 3, 4, 100):
                assert await scanned(journal, limit=limit) == events
            assert await journal.scan(SHARD, 1, 2) == EventPage(events[1:3], 3)
            assert await journal.scan(SHARD, 4, 10) == EventPage((), 4)
            assert (await journal.scan(SHARD, 9, 10)).upto == 4, "a journal that lost events"
            assert await scanned(journal, OTHER) == (StoredEvent(1, CAROL, 1, b"c"),)

        self.run(scenario)

    def test_a_page_of_a_shard_has_not_too_many_bytes_and_one_event_always(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            await journal.write(batch(1, OLD, write(ENTITY, 0, b"11", b"", b"333", b"4" * 9)))
            await journal.write(
                batch(2, OLD, write(BOB, 0, b"b"), JournalWrite(SHARD, CAROL, 0, delete=True))
            )

            async def page(after: int, limit: int, most: int) -> tuple[list[bytes | None], int]:
                found = await journal.scan(SHARD, after, limit, most)
                return [one.data for one in found.events], found.upto

            assert await page(0, 10, 4) == ([b"11", b""], 2)
            assert await page(0, 10, 5) == ([b"11", b"", b"333"], 3)
            assert await page(0, 1, 5) == ([b"11"], 1)
            assert await page(3, 10, 0) == ([b"4" * 9], 4)
            # The mark of a deletion has no bytes.
            assert await page(4, 10, 1) == ([b"b", None], 6)
            assert await page(0, 10, 15) == ([b"11", b"", b"333", b"4" * 9, b"b", None], 6)
            assert await page(6, 10, 0) == ([], 6)

        self.run(scenario)

    def test_no_event_of_a_stalled_commit_is_passed_over(self) -> None:
        """What is not committed yet has no offset that a later one could overtake."""

        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD])
            await journal.write(batch(1, OLD, write(ENTITY, 0, b"1")))
            gate.shut()
            stalled = asyncio.ensure_future(journal.write(batch(2, OLD, write(ENTITY, 1, b"2"))))
            await gate.reached()
            behind = asyncio.ensure_future(journal.write(batch(3, OLD, write(BOB, 0, b"b"))))
            await self.until_queued(journal, 1)
            page = await journal.scan(SHARD, 0, 10)
            assert page == EventPage((StoredEvent(1, ENTITY, 1, b"1"),), 1)
            gate.open()
            assert await behind == [Written(1, 3)]
            assert await stalled == [Written(2, 2)]
            page = await journal.scan(SHARD, page.upto, 10)
            assert [one.data for one in page.events] == [b"2", b"b"]

        self.run(scenario)

    def test_a_reader_beside_writers_sees_every_event_once_and_in_order(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim([OLD, BESIDE])
            rounds = 40

            async def writing() -> None:
                for n in range(1, rounds + 1):
                    await journal.write(
                        batch(
                            n, (OLD, BESIDE), write(ENTITY, BLIND, b"%d" % n),
                            write(BOB, BLIND, b"%d" % n, b"%d" % n),
                            write(CAROL, BLIND, b"%d" % n, shard=OTHER),
                        )
                    )  # fmt: skip

            task = asyncio.ensure_future(writing())
            events: list[StoredEvent] = []
            upto = 0
            while upto < 3 * rounds:
                page = await journal.scan(SHARD, upto, 7)
                assert page.upto >= upto
                events += page.events
                upto = page.upto
                # A journal in memory answers at once: the writer needs a turn, too.
                await asyncio.sleep(0)
            await task
            assert [one.offset for one in events] == list(range(1, 3 * rounds + 1))

        self.run(scenario)

    # history (J11)

    def test_every_journal_has_an_id_of_its_own(self) -> None:
        found: list[str] = []

        async def scenario(journal: Journal, gate: Gate) -> None:
            found.append(await journal.history())
            await journal.claim([OLD])
            assert await journal.history() == found[-1]
            assert len(found[-1]) == 32

        self.run(scenario)
        self.run(scenario)
        assert found[0] != found[1]

    def test_it_tells_how_far_shards_are_and_takes_another_id(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            if not isinstance(journal, ComparableJournal):
                return
            history = await journal.history()
            assert await journal.marks([SHARD, OTHER]) == JournalMarks(history, {})
            assert await journal.marks([]) == JournalMarks(history, {})
            await journal.claim([OLD, BESIDE])
            await journal.write(batch(1, OLD, write(ENTITY, 0, b"1", b"2")))
            assert await journal.marks([SHARD, OTHER, THIRD]) == JournalMarks(
                history, {SHARD: 2, OTHER: 0}
            )
            assert (await journal.marks([OTHER])).offsets == {OTHER: 0}
            await journal.renew("f" * 32)
            assert await journal.history() == "f" * 32
            assert await journal.marks([SHARD]) == JournalMarks("f" * 32, {SHARD: 2})
            assert await events_of(journal) == (b"1", b"2")
            assert await journal.write(batch(2, OLD, write(ENTITY, 2, b"3"))) == [Written(3, 3)]

        self.run(scenario)

    # all of it

    def test_random_batches_leave_what_they_leave_in_the_reference(self) -> None:
        for seed in range(3):
            self.run(lambda journal, gate, seed=seed: _compare(journal, Random(seed)))  # type: ignore[misc]


async def _compare(journal: Journal, random: Random) -> None:
    """The same random batches go to the reference, too: both must answer and hold the same."""
    reference = MemoryJournal()
    shards = (SHARD, OTHER, THIRD)
    entities = {
        EntityKey(kind, f"{shard.shard}-{n}"): shard
        for shard in shards for kind in ("Events", "State") for n in range(2)
    }  # fmt: skip
    seqs = dict.fromkeys(entities, 0)
    epochs = dict.fromkeys(shards, 0)

    async def claim(shard: ShardKey) -> None:
        epochs[shard] += 1
        one = Claim(shard, 0, epochs[shard], A)
        assert await journal.claim([one]) == await reference.claim([one]) == [None]

    for shard in shards:
        await claim(shard)
    for number in range(1, 41):
        chosen = random.sample(sorted(entities), random.randrange(1, 6))
        writes = [_random_write(random, entities[one], one, seqs[one]) for one in chosen]
        taken = sorted({one.shard for one in writes})
        stale = random.random() < 0.1
        claims = [Claim(shard, 0, epochs[shard] - stale, A) for shard in taken]
        one = batch(number, claims, *writes)
        if random.random() < 0.1:
            assert await journal.settle(one) == await reference.settle(one)
        answers = list(await journal.write(one))
        assert answers == list(await reference.write(one)), one
        if random.random() < 0.2:
            assert list(await journal.settle(one)) == list(await reference.settle(one))
        for asked, answer in zip(writes, answers, strict=True):
            if isinstance(answer, Written):
                seqs[asked.entity] = answer.seq
        if random.random() < 0.1:
            await claim(random.choice(shards))
        wanted = [
            Wanted(one, random.choice((0, 0, 0, 1, 3, seqs[one])), random.random() < 0.8)
            for one in random.sample(sorted(entities), 4)
        ]
        # The keys have no order, and how much fits is said in about: only all of it is compared.
        for mine, theirs in zip(
            await journal.recover(wanted, MUCH), await reference.recover(wanted, MUCH), strict=True
        ):
            assert sorted(mine.keys or ()) == sorted(theirs.keys or ())
            assert _without_keys(mine) == _without_keys(theirs)
        limit = random.randrange(1, 9)
        for shard in shards:
            after = random.randrange(40)
            page = await journal.scan(shard, after, limit)
            assert page == await reference.scan(shard, after, limit)
            assert await scanned(journal, shard, limit) == await scanned(reference, shard)
            ids = await remembered_ids(journal, shard, limit)
            assert ids == await remembered_ids(reference, shard)


def _without_keys(found: Recovered) -> tuple[object, ...]:
    return found.events, found.seq, found.more, found.snapshot, found.state, found.keys is None


def _random_write(random: Random, shard: ShardKey, entity: EntityKey, seq: int) -> JournalWrite:
    events: tuple[bytes, ...] = ()
    state: bytes | None = None
    if entity.type == "Events":
        events = tuple(random.randbytes(random.randrange(5)) for _ in range(random.randrange(4)))
    elif random.random() < 0.8:
        state = random.randbytes(random.randrange(5))
    expected = random.choices((seq, BLIND, seq + 1), (0.8, 0.15, 0.05))[0]
    inbox = tuple((f"{random.randrange(10**6)}", random.choice((None, b"r"))) for _ in range(2))
    one = JournalWrite(
        shard, entity, expected, events, inbox[: random.randrange(3)], (), state, None,
        random.choice((None, None, True, False)), random.random() < 0.1, random.randrange(1, 3),
    )  # fmt: skip
    if random.random() < 0.3 and entity.type == "Events":
        latest = seq + counted(one)
        kept = (random.randrange(latest + 1), random.randbytes(3))
        one = msgspec.structs.replace(one, snapshot=kept)
    return one
