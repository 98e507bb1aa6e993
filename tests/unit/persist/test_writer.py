"""The writer of one incarnation: claims, grouping, lost answers, fences, its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.entity.hosting.execution import OutcomeUnknown
from domicile.entity.hosting.shard_host import ShardHost
from domicile.errors import Fenced
from domicile.journals.memory import MemoryJournal
from domicile.persist.batches import TRIES, Unsettled
from domicile.persist.writer import JournalWriter, ShardClaim
from domicile.ports.journal import (
    Batch,
    Claim,
    JournalUnknown,
    JournalWrite,
    Recovered,
    StoredReply,
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

    def outrun(self, epoch: int) -> None:
        self.outruns.append(epoch)


class Faulty(MemoryJournal):
    """A journal whose next calls get lost before or after they had their effect."""

    immediate = False

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

    async def claim(self, claims: Sequence[Claim]) -> Sequence[int | None]:
        return cast(Sequence[int | None], await self._call("claim", super().claim(claims)))

    async def write(self, batch: Batch) -> Sequence[Written | WriteRefused]:
        self.batches.append(batch)
        return cast(
            Sequence[Written | WriteRefused], await self._call("write", super().write(batch))
        )

    async def settle(self, batch: Batch) -> Sequence[Written | WriteRefused | None]:
        found = await self._call("settle", super().settle(batch))
        return cast(Sequence[Written | WriteRefused | None], found)

    async def recover(
        self, wanted: Sequence[tuple[EntityKey, int]], max_bytes: int
    ) -> Sequence[Recovered]:
        found = await self._call("recover", super().recover(wanted, max_bytes))
        return cast(Sequence[Recovered], found)

    async def inbox(self, asked: Sequence[tuple[EntityKey, str]]) -> Sequence[StoredReply | None]:
        found = await self._call("inbox", super().inbox(asked))
        return cast(Sequence[StoredReply | None], found)


class Desk:
    def __init__(self, journal: MemoryJournal) -> None:
        self.writer = JournalWriter(journal, ME)
        self.journal = journal

    async def claimed(self, home: Home, epoch: int = 1) -> ShardClaim:
        return await self.writer.claimed(cast(ShardHost, home), epoch)

    async def write(self, home: Home, id: str, expected: int, *events: bytes) -> object:
        claim = await self.claimed(home, home.owner.epoch)
        one = JournalWrite(home.shard, EntityKey("T", id), expected, events)
        return await self.writer.write(claim, one)


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
        assert await desk.writer.recover(EntityKey("T", "3"), 0) == Recovered((b"1",), 1, False)
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
        gate = Gate()
        journal = Faulty(gate)
        desk, home = Desk(journal), Home()
        await desk.claimed(home)
        gate.shut()
        gone = asyncio.ensure_future(desk.write(home, "a", 0, b"1"))
        await gate.reached()
        gone.cancel()
        await asyncio.wait([gone])
        waiting = asyncio.ensure_future(desk.claimed(home))
        await turns()
        assert not waiting.done()
        home.owner.epoch = 3
        new = asyncio.ensure_future(desk.claimed(home, 3))
        with pytest.raises(Fenced):
            await waiting
        assert home.outruns == []
        gate.open()
        await new

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
            await desk.writer.recover(EntityKey("T", "a"), 0)
        journal.losing = ["reply"] * (TRIES - 1)
        assert await desk.writer.inbox(EntityKey("T", "a"), "k") is None

    run(scenario)


def test_who_goes_away_leaves_a_line_that_is_not_clear_until_its_batch_is_over() -> None:
    async def scenario() -> None:
        gate = Gate()
        journal = Faulty(gate)
        desk, home = Desk(journal), Home()
        await desk.claimed(home)
        gate.shut()
        gone = asyncio.ensure_future(desk.write(home, "a", 0, b"1"))
        await gate.reached()
        behind = asyncio.ensure_future(desk.write(home, "b", 0, b"1"))
        await turns()
        gone.cancel()
        behind.cancel()
        await asyncio.wait([gone, behind])
        claiming = asyncio.ensure_future(desk.claimed(home))
        await turns()
        assert not claiming.done()
        gate.open()
        await claiming
        assert journal.peek(EntityKey("T", "a")) == (b"1",)
        assert journal.peek(EntityKey("T", "b")) == ()
        assert len(journal.batches) == 1

    run(scenario)


def test_a_claim_whose_maker_goes_away_is_made_by_the_next() -> None:
    async def scenario() -> None:
        journal = Faulty()
        desk, home = Desk(journal), Home()
        held = asyncio.Event()
        claim = journal.claim

        async def slow(claims: Sequence[Claim]) -> Sequence[int | None]:
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
        assert journal.calls == ["claim"]

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
        await asyncio.wait([out])
        assert out.cancelled()
        with pytest.raises(OutcomeUnknown, match="leaves or lost its lease"):
            await desk.write(home, "c", 0, b"1")
        gate.open()
        await journal.close()
        assert len(journal.batches) == 1

    run(scenario)
