"""The writer of one incarnation: claims, grouping, lost answers, fences, its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.entity.hosting.execution import OutcomeUnknown
from domicile.entity.hosting.shard_host import ShardHost
from domicile.errors import Fenced
from domicile.journals.memory import MemoryJournal
from domicile.persist.batches import TRIES, Unsettled
from domicile.persist.writer import ALONE, JournalWriter, SentWrite, ShardClaim
from domicile.ports.journal import (
    Batch,
    Claim,
    ClaimAnswer,
    JournalUnknown,
    JournalWrite,
    Recovered,
    StoredReply,
    Wanted,
    WriteRefused,
    Written,
)
from domicile.testing.suites.journal import Gate

ME, THIEF = Incarnation("a" * 32), Incarnation("b" * 32)
SHARD = ShardKey("default", 7)


class Home:
    """A shard's host, as the writer knows it."""

    def __init__(self, shard: int = 7, epoch: int = 1) -> None:
        self.shard = ShardKey("default", shard)
        self.owner = SimpleNamespace(epoch=epoch)
        self.outruns: list[int] = []
        self.open_writes = 0
        self.settled = 0

    def settle(self) -> None:
        self.settled += 1

    def outrun(self, epoch: int) -> None:
        self.outruns.append(epoch)


class Faulty(MemoryJournal):
    """A journal whose next calls get lost before or after they had their effect."""

    immediate = False
    one_writer = False

    def __init__(self, pause: Callable[[], Awaitable[None]] | None = None) -> None:
        super().__init__(pause=pause)
        self.calls: list[str] = []
        self.batches: list[Batch] = []
        self.losing: list[str] = []
        """For each of the next calls "request", "reply", "bug" or ""."""

    async def _call(self, kind: str, work: Any) -> Any:
        self.calls.append(kind)
        how = self.losing.pop(0) if self.losing else ""
        if how in ("request", "bug"):
            work.close()
            raise ValueError("a bug") if how == "bug" else JournalUnknown
        answer = await work
        if how == "reply":
            raise JournalUnknown
        return answer

    async def claim(self, claims: Sequence[Claim], *, wait: bool = True) -> Sequence[ClaimAnswer]:
        found = await self._call("claim", super().claim(claims, wait=wait))
        return cast(Sequence[ClaimAnswer], found)

    async def write(self, batch: Batch) -> Sequence[Written | WriteRefused]:
        self.batches.append(batch)
        return cast(
            Sequence[Written | WriteRefused], await self._call("write", super().write(batch))
        )

    async def settle(self, batch: Batch) -> Sequence[Written | WriteRefused | None]:
        found = await self._call("settle", super().settle(batch))
        return cast(Sequence[Written | WriteRefused | None], found)

    async def recover(self, wanted: Sequence[Wanted], max_bytes: int) -> Sequence[Recovered]:
        found = await self._call("recover", super().recover(wanted, max_bytes))
        return cast(Sequence[Recovered], found)

    async def inbox(self, asked: Sequence[tuple[EntityKey, str]]) -> Sequence[StoredReply | None]:
        found = await self._call("inbox", super().inbox(asked))
        return cast(Sequence[StoredReply | None], found)


class Sender:
    """A log that sends one write."""

    def __init__(self) -> None:
        self.outcomes: list[object] = []
        self.waiter: asyncio.Future[None] | None = None

    def done(self, sent: SentWrite) -> None:
        self.outcomes.append(sent.outcome)
        for output in sent.held:
            output(None)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Desk:
    def __init__(self, journal: MemoryJournal) -> None:
        self.writer = JournalWriter(journal, ME)
        self.journal = journal

    async def claimed(self, home: Home, epoch: int = 1) -> ShardClaim:
        return await self.writer.claimed(cast(ShardHost, home), epoch)

    async def write(self, home: Home, id: str, expected: int, *events: bytes) -> object:
        claim = await self.claimed(home, home.owner.epoch)
        one = JournalWrite(home.shard, EntityKey("T", id), expected, events)
        sender = Sender()
        self.writer.send(claim, SentWrite(one, sender, cast(ShardHost, home)))
        if not sender.outcomes:
            sender.waiter = asyncio.get_running_loop().create_future()
            await sender.waiter
        [outcome] = sender.outcomes
        return outcome


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            await scenario()

    asyncio.run(main())


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


# the usual


def test_an_immediate_journal_is_written_within_the_call() -> None:
    desk = Desk(MemoryJournal())
    with pytest.raises(StopIteration) as stop:
        desk.write(Home(), "a", 0, b"1").send(None)  # type: ignore[attr-defined]
    assert stop.value.value == Written(1, 1)


def test_a_journal_that_wrongly_says_that_it_is_immediate_is_found_out() -> None:
    class Wrong(MemoryJournal):
        immediate = True

    async def scenario() -> None:
        gate = Gate()
        gate.shut()
        with pytest.raises(AssertionError, match="has suspended"):
            await Desk(Wrong(pause=gate)).write(Home(), "a", 0, b"1")

    run(scenario)


def test_what_waits_together_is_written_together() -> None:
    async def scenario() -> None:
        gate = Gate()
        journal = Faulty(gate)
        desk = Desk(journal)
        homes = [Home(shard) for shard in range(20)]
        gate.shut()
        async with asyncio.TaskGroup() as tasks:
            done = [
                tasks.create_task(desk.write(home, f"{home.shard.shard}-{n}", 0, b"1"))
                for home in homes
                for n in range(5)
            ]
            await gate.reached()
            await turns()
            gate.open()
        assert all(isinstance(one.result(), Written) for one in done)
        assert len(journal.batches) < 30
        assert max(len(batch.claims) for batch in journal.batches) > 5
        assert sum(len(batch.writes) for batch in journal.batches) == 100

    run(scenario)


def test_a_shard_is_claimed_once_for_all_who_come() -> None:
    async def scenario() -> None:
        journal = Faulty()
        desk, home = Desk(journal), Home()
        async with asyncio.TaskGroup() as tasks:
            for n in range(5):
                tasks.create_task(desk.write(home, f"{n}", 0, b"1"))
        assert journal.calls.count("claim") == 1
        found = await desk.writer.recover(Wanted(EntityKey("T", "3")))
        assert found == Recovered((b"1",), 1, False, keys=())
        assert await desk.writer.inbox(EntityKey("T", "3"), "k") is None

    run(scenario)


# fences


def test_a_refused_claim_drops_the_shard_and_is_remembered() -> None:
    async def scenario() -> None:
        journal = Faulty()
        desk, home = Desk(journal), Home()
        await journal.claim([Claim(SHARD, 0, 4, THIEF)])
        for _ in range(2):
            with pytest.raises(Fenced, match="claimed under epoch 4; this home has epoch 1"):
                await desk.claimed(home)
        assert journal.calls == ["claim", "claim"], "the second answer came from memory"
        assert {*home.outruns} == {4}
        home.owner.epoch = 5
        assert await desk.write(home, "a", 0, b"1") == Written(1, 1)

    run(scenario)


def test_a_fenced_write_drops_the_shard_and_is_remembered() -> None:
    async def scenario() -> None:
        journal = Faulty()
        desk, home = Desk(journal), Home()
        await desk.write(home, "a", 0, b"1")
        await journal.claim([Claim(SHARD, 0, 4, THIEF)])
        assert await desk.write(home, "a", 1, b"2") == WriteRefused("fenced", 4)
        assert home.outruns == [4]
        with pytest.raises(Fenced):
            await desk.write(home, "b", 0, b"1")
        assert len(journal.batches) == 2

    run(scenario)


def test_a_fence_of_an_epoch_that_is_over_drops_nothing() -> None:
    async def scenario() -> None:
        gate = Gate()
        journal = Faulty(gate)
        desk, home = Desk(journal), Home()
        gate.shut()
        old = asyncio.ensure_future(desk.write(home, "a", 0, b"1"))
        await gate.reached()
        waiting = asyncio.ensure_future(desk.write(home, "b", 0, b"1"))
        await turns()
        # The shard went away and came back; the fence of its old epoch is its own new claim.
        home.owner.epoch = 3
        new = asyncio.ensure_future(desk.claimed(home, 3))
        await turns()
        gate.open()
        await new
        assert await old == Written(1, 1)
        assert await waiting == WriteRefused("fenced", 3)
        with pytest.raises(Fenced, match="opened anew under epoch 3"):
            await desk.claimed(home, 1)
        assert home.outruns == []
        assert await desk.write(home, "b", 0, b"1") == Written(1, 2)

    run(scenario)


def test_who_waits_for_an_epoch_that_is_over_learns_it() -> None:
    async def scenario() -> None:
        journal = Faulty()
        desk, home = Desk(journal), Home()
        await desk.claimed(home)
        held, settle = asyncio.Event(), journal.settle

        async def slow(batch: Batch) -> Sequence[Written | WriteRefused | None]:
            await held.wait()
            return await settle(batch)

        journal.settle = slow  # type: ignore[method-assign]
        journal.losing = ["request"]
        out = asyncio.ensure_future(desk.write(home, "a", 0, b"1"))
        await turns()
        # Its batch is being settled: nobody may read before that is over.
        waiting = asyncio.ensure_future(desk.claimed(home))
        await turns()
        assert not waiting.done()
        home.owner.epoch = 3
        new = asyncio.ensure_future(desk.claimed(home, 3))
        with pytest.raises(Fenced):
            await waiting
        assert home.outruns == []
        held.set()
        await new
        assert await out == Unsettled(3)

    run(scenario)


def test_open_writes_are_counted_for_their_shard() -> None:
    """H10, J5(f): a shard is released only when none is open."""

    async def scenario() -> None:
        gate = Gate()
        journal = Faulty(gate)
        desk, home, other = Desk(journal), Home(), Home(8)
        await desk.claimed(home)
        gate.shut()
        asks = [asyncio.ensure_future(desk.write(home, id, 0, b"1")) for id in ("a", "b")]
        await gate.reached()
        await turns()
        assert (home.open_writes, home.settled, other.open_writes) == (2, 0, 0)
        gate.open()
        await asyncio.wait(asks)
        assert (home.open_writes, home.settled) == (0, 1)

    run(scenario)


def test_nobody_reads_an_entity_before_its_own_writes_are_over() -> None:
    async def scenario() -> None:
        gate = Gate()
        journal = Faulty(gate)
        desk, home = Desk(journal), Home()
        await desk.claimed(home)
        gate.shut()
        asks = [asyncio.ensure_future(desk.write(home, "a", n, b"%d" % n)) for n in range(2)]
        await gate.reached()
        quiet = asyncio.ensure_future(desk.writer.settled(EntityKey("T", "a")))
        await desk.writer.settled(EntityKey("T", "b"))
        await turns()
        assert not quiet.done()
        gate.open()
        await quiet
        assert [ask.done() for ask in asks] == [True, True]
        assert journal.peek(EntityKey("T", "a")) == (b"0", b"1")

    run(scenario)


def test_with_too_many_open_writes_turns_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """I6, J5(g)."""
    monkeypatch.setattr("domicile.persist.writer.MOST_OPEN", 3)

    async def scenario() -> None:
        gate = Gate()
        journal = Faulty(gate)
        desk, home = Desk(journal), Home()
        await desk.claimed(home)
        gate.shut()
        asks = [asyncio.ensure_future(desk.write(home, f"{n}", 0, b"1")) for n in range(3)]
        await gate.reached()
        await turns()
        assert desk.writer.is_full
        places = [asyncio.ensure_future(desk.writer.room()) for _ in range(3)]
        await turns()
        places[0].cancel()
        assert not any(place.done() for place in places)
        gate.open()
        await asyncio.wait([*asks, *places])
        assert not desk.writer.is_full

    run(scenario)


# lost answers


@pytest.mark.parametrize("how", ["request", "reply", "bug"])
def test_a_batch_without_an_answer_is_settled(how: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        journal = Faulty()
        desk, home = Desk(journal), Home()
        await desk.claimed(home)
        journal.losing = [how, "request", "reply"]
        assert await desk.write(home, "a", 0, b"1") == Written(1, 1)
        expected = ["claim", "write", "settle", "settle", "settle"]
        assert journal.calls == expected + ([] if how == "reply" else ["write"])
        numbers = [batch.number for batch in journal.batches]
        assert numbers == ([1] if how == "reply" else [1, 2])

    with caplog.at_level(logging.ERROR, "domicile"):
        run(scenario)
    assert bool(caplog.records) == (how == "bug")


def test_a_line_in_doubt_is_settled_before_it_is_used() -> None:
    async def scenario() -> None:
        journal = Faulty()
        desk, home = Desk(journal), Home()
        await desk.claimed(home)
        journal.losing = ["reply", *["request"] * TRIES]
        assert await desk.write(home, "a", 0, b"1") == Unsettled()
        # The journal is still away: nobody reads what may not be the whole truth.
        journal.losing = ["request"] * TRIES
        async with asyncio.TaskGroup() as tasks:
            asks = [tasks.create_task(_outcome(desk.claimed(home))) for _ in range(3)]
        assert [type(ask.result()) for ask in asks] == [OutcomeUnknown] * 3
        journal.calls = []
        assert isinstance(await desk.claimed(home), ShardClaim)
        assert journal.calls == ["settle"]

    run(scenario)


async def _outcome(ask: Awaitable[object]) -> object:
    try:
        return await ask
    except OutcomeUnknown as error:
        return error


def test_a_journal_that_never_answers_is_given_up() -> None:
    async def scenario() -> None:
        journal = Faulty()
        desk, home = Desk(journal), Home()
        journal.losing = ["request"] * TRIES
        with pytest.raises(OutcomeUnknown, match="does not answer"):
            await desk.claimed(home)
        await desk.claimed(home)
        journal.losing = ["reply"] * TRIES
        with pytest.raises(OutcomeUnknown):
            await desk.writer.recover(Wanted(EntityKey("T", "a")))
        journal.losing = ["reply"] * (TRIES - 1)
        assert await desk.writer.inbox(EntityKey("T", "a"), "k") is None

    run(scenario)


def test_what_is_asked_at_once_is_read_together() -> None:
    async def scenario() -> None:
        journal = Faulty()
        desk, home = Desk(journal), Home()
        for id in "abc":
            await desk.write(home, id, 0, id.encode())
        journal.calls = []
        async with asyncio.TaskGroup() as tasks:
            reads = [
                tasks.create_task(desk.writer.recover(Wanted(EntityKey("T", id)))) for id in "abc"
            ]
            gone = tasks.create_task(desk.writer.inbox(EntityKey("T", "a"), "k"))
            looks = [tasks.create_task(desk.writer.inbox(EntityKey("T", id), "k")) for id in "ab"]
            await asyncio.sleep(0)
            gone.cancel()
        assert [read.result().events for read in reads] == [(b"a",), (b"b",), (b"c",)]
        assert [look.result() for look in looks] == [None, None]
        assert sorted(journal.calls) == ["inbox", "recover"]
        journal.losing = ["bug"]
        with pytest.raises(ValueError, match="a bug"):
            await desk.writer.recover(Wanted(EntityKey("T", "a")))

    run(scenario)


def test_a_claim_whose_maker_goes_away_is_made_by_the_next() -> None:
    async def scenario() -> None:
        journal = Faulty()
        desk, home = Desk(journal), Home()
        held = asyncio.Event()
        claim = journal.claim

        async def slow(claims: Sequence[Claim], **options: bool) -> Sequence[ClaimAnswer]:
            await held.wait()
            return await claim(claims)

        journal.claim = slow  # type: ignore[method-assign]
        first, second = (asyncio.ensure_future(desk.claimed(home)) for _ in range(2))
        await turns()
        first.cancel()
        await turns()
        held.set()
        await second
        assert first.cancelled()
        assert journal.calls == ["claim", "claim"]

    run(scenario)


def test_shards_that_open_together_are_claimed_together() -> None:
    async def scenario() -> None:
        journal = Faulty()
        desk = Desk(journal)
        homes = [Home(shard) for shard in range(20)]
        await journal.claim([Claim(ShardKey("default", 3), 0, 4, THIEF)])
        journal.calls = []
        async with asyncio.TaskGroup() as tasks:
            asks = [tasks.create_task(_claimed(desk, home)) for home in homes]
            newer = Home(5, epoch=2)
            asks.append(tasks.create_task(_claimed(desk, newer)))
        assert [ask.result() for ask in asks] == [n not in (3, 5) for n in range(20)] + [True]
        assert len(journal.calls) <= 3

    run(scenario)


def test_a_held_row_keeps_no_other_claim_waiting() -> None:
    """Not those asked with it, and not those that come while as many as may wait do so."""

    async def scenario() -> None:
        journal = Faulty()
        desk = Desk(journal)
        stuck = [ShardKey("default", shard) for shard in range(ALONE + 1)]
        async with AsyncExitStack() as rows, asyncio.TaskGroup() as tasks:
            for shard in stuck:
                await rows.enter_async_context(journal.held(shard))
            waiting = [tasks.create_task(_claimed(desk, Home(shard.shard))) for shard in stuck]
            beside = [tasks.create_task(_claimed(desk, Home(shard))) for shard in range(20, 40)]
            assert all(await asyncio.gather(*beside))
            while journal.queued < ALONE:  # noqa: ASYNC110 - a journal announces nothing
                await asyncio.sleep(0)
            assert await _claimed(desk, Home(40))
            assert not any(ask.done() for ask in waiting)
            await rows.aclose()
        assert all(ask.result() for ask in waiting)

    run(scenario)


async def _claimed(desk: Desk, home: Home) -> bool:
    try:
        await desk.claimed(home, home.owner.epoch)
    except Fenced:
        return False
    return True


def test_a_claim_whose_caller_never_goes_on_ends_with_the_writer() -> None:
    """A handler past its lease is never resumed (L4), and a claim may hold a connection."""

    async def scenario() -> None:
        began, ended = asyncio.Event(), asyncio.Event()

        class Silent(MemoryJournal):
            immediate = False

            async def claim(
                self, claims: Sequence[Claim], *, wait: bool = True
            ) -> Sequence[ClaimAnswer]:
                began.set()
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    ended.set()
                return []

        writer = JournalWriter(Silent(), ME)
        handler = writer.claimed(cast(ShardHost, Home()), 1)
        handler.send(None)
        await began.wait()
        await writer.close()
        assert ended.is_set()
        handler.close()

    run(scenario)


@pytest.mark.parametrize("one_writer", [False, True])
def test_a_journal_with_one_writer_gets_one_batch_at_a_time(one_writer: bool) -> None:
    async def scenario() -> None:
        gate = Gate()
        journal = Faulty(gate)
        journal.one_writer = one_writer
        desk, homes = Desk(journal), [Home(shard) for shard in range(1, 5)]
        for home in homes:
            await desk.claimed(home)
        gate.shut()
        sending: list[asyncio.Task[object]] = []
        for home in homes:
            sending.append(asyncio.create_task(desk.write(home, str(home.shard), 0, b"1")))
            await turns()
        gate.open()
        assert await asyncio.gather(*sending) == [Written(1, 1)] * 4
        writes = [len(batch.writes) for batch in journal.batches]
        assert writes == ([1, 3] if one_writer else [1, 1, 1, 1])

    run(scenario)


# the end


def test_at_the_end_nothing_more_is_sent_and_nothing_is_left() -> None:
    async def scenario() -> None:
        gate = Gate()
        journal = Faulty(gate)
        desk, home = Desk(journal), Home()
        await desk.claimed(home)
        gate.shut()
        out = asyncio.ensure_future(desk.write(home, "a", 0, b"1"))
        await gate.reached()
        waiting = asyncio.ensure_future(desk.write(home, "b", 0, b"1"))
        await turns()
        desk.writer.fence()
        assert await waiting == Unsettled()
        before = asyncio.all_tasks()
        await desk.writer.close()
        assert len(asyncio.all_tasks()) < len(before)
        assert await out == Unsettled()
        assert await desk.write(home, "c", 0, b"1") == Unsettled()
        with pytest.raises(OutcomeUnknown, match="leaves or lost its lease"):
            await desk.claimed(Home(8))
        gate.open()
        await journal.close()
        assert len(journal.batches) == 1

    run(scenario)
