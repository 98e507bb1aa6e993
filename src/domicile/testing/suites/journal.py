"""What every journal must do (J1-J4).

For authors of journals: derive `class TestMine(JournalContract)` and define `open` and `queued`.
Nothing here takes a moment of sleep for waiting: a scenario goes on once it sees that a transaction
is held up, or that a call stands in line for a row.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import combinations

from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.ports.journal import (
    BLIND,
    Batch,
    Claim,
    Journal,
    JournalWrite,
    Recovered,
    StoredReply,
    WriteRefused,
    Written,
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
    [found] = await journal.recover([(entity, 0)], MUCH)
    assert (found.seq, found.more) == (len(found.events), False)
    return found.events


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
            [first] = await journal.recover([(ENTITY, 0)], 5)
            assert first == Recovered((b"11", b"22"), 2, True)
            assert await journal.recover([(ENTITY, first.seq)], 5) == [
                Recovered((b"33",), 3, False)
            ]
            assert await journal.recover([(ENTITY, 3)], 5) == [Recovered((), 3, False)]
            # One event at least, however large, or a reader would never come to an end.
            assert await journal.recover([(ENTITY, 1)], 0) == [Recovered((b"22",), 2, True)]
            three = list(await journal.recover([(CAROL, 0), (ENTITY, 2), (BOB, 0)], MUCH))
            assert [one.events for one in three] == [(), (b"33",), (b"b",)]
            assert [(one.seq, one.more) for one in three] == [(0, False), (3, False), (1, False)]

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
