"""The memory journal: the contract, its events, and what a stale owner tries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.journals.memory import MemoryJournal
from domicile.ports.journal import Claim, Journal, JournalWrite, WriteRefused, Written, is_immediate
from domicile.testing.history import History
from domicile.testing.suites.journal import (
    BESIDE,
    CAROL,
    ENTITY,
    NEW,
    OLD,
    OTHER,
    SHARD,
    Gate,
    JournalContract,
    batch,
    events_of,
    write,
)


class TestMemoryJournal(JournalContract):
    @asynccontextmanager
    async def open(self, pause: Callable[[], Awaitable[None]]) -> AsyncIterator[Journal]:
        journal = MemoryJournal(pause=pause)
        yield journal
        await journal.close()

    async def queued(self, journal: Journal) -> int:
        assert isinstance(journal, MemoryJournal)
        return journal.queued


def test_claims_writes_and_settlings_are_reported_as_they_commit() -> None:
    history = History(lambda: 0.0)

    async def scenario() -> None:
        journal = MemoryJournal(history)
        await journal.claim([OLD])
        one = batch(1, OLD, JournalWrite(SHARD, ENTITY, 0, (b"1", b"2"), (("tx", None),)))
        await journal.write(one)
        await journal.settle(one)
        await journal.write(batch(2, OLD, write(ENTITY, 1, b"clash")))
        await journal.settle(batch(3, OLD, write(ENTITY, 2, b"late")))
        await journal.claim([NEW])
        await journal.claim([OLD])
        stale = batch(4, OLD, write(ENTITY, 2, b"stale"))
        await journal.write(stale)
        await journal.settle(stale)

    asyncio.run(scenario())
    old = {"role": "default", "shard": 7, "epoch": 1, "owner": OLD.owner}
    new = {"role": "default", "shard": 7, "epoch": 2, "owner": NEW.owner}
    assert [(event.kind, event.fields) for event in history.events] == [
        ("claim", old | {"ok": True}),
        ("append", old | _write(1, seq=0, count=2, keys=["tx"])),
        ("settle", old | {"batch": 1, "how": "there"}),
        ("append", old | _write(2, seq=1, count=1, why="seq")),
        ("settle", old | {"batch": 3, "how": "void"}),
        ("claim", new | {"ok": True}),
        ("claim", old | {"ok": False}),
        ("append", old | _write(4, seq=2, count=1, why="fenced")),
        ("settle", old | {"batch": 4, "how": "fenced"}),
    ]


def _write(
    number: int, *, seq: int, count: int, why: str = "", keys: list[str] | None = None
) -> dict[str, object]:
    return {
        "type": "Account", "id": "alice", "batch": number, "seq": seq, "count": count,
        "ok": not why, "why": why, "keys": keys or [],
    }  # fmt: skip


def test_without_a_pause_a_transaction_is_one_turn() -> None:
    journal = MemoryJournal()
    assert is_immediate(journal)
    assert not is_immediate(MemoryJournal(pause=Gate()))
    both = batch(1, (OLD, BESIDE), write(ENTITY, 0, b"1"), write(CAROL, 0, b"c", shard=OTHER))
    for coroutine in (journal.claim([OLD, BESIDE]), journal.write(both), journal.settle(both)):
        with pytest.raises(StopIteration):
            coroutine.send(None)


def test_close_waits_for_what_still_runs() -> None:
    async def scenario() -> None:
        gate = Gate()
        journal = MemoryJournal(pause=gate)
        await journal.claim([OLD])
        gate.shut()
        caller = asyncio.create_task(journal.write(batch(1, OLD, write(ENTITY, 0, b"1"))))
        await gate.reached()
        caller.cancel()
        closing = asyncio.create_task(journal.close())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not closing.done()
        gate.open()
        await closing
        assert await events_of(journal) == (b"1",)

    asyncio.run(scenario())


def test_waiters_for_a_row_go_in_order_of_arrival() -> None:
    async def scenario() -> None:
        gate = Gate()
        journal = MemoryJournal(pause=gate)
        await journal.claim([OLD])
        gate.shut()
        answers: list[object] = []

        async def add(n: int) -> None:
            answers.extend(await journal.write(batch(n + 1, OLD, write(ENTITY, n, b"%d" % n))))

        async with asyncio.TaskGroup() as tasks:
            for n in range(5):
                tasks.create_task(add(n))
            await gate.reached()
            gate.open()
        assert answers == [Written(n + 1, n + 1) for n in range(5)]

    asyncio.run(scenario())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_interleaving_lets_a_stale_owner_commit(seed: int) -> None:
    """Owners of rising epochs claim, read and write at random; whoever is late writes nothing."""
    random = Random(seed)
    history = History(lambda: 0.0)
    shard = ShardKey("default", 1)
    entity = EntityKey("Account", "a")

    async def turns() -> None:
        for _ in range(random.randrange(4)):
            await asyncio.sleep(0)

    async def owner(journal: MemoryJournal, epoch: int) -> None:
        claim = Claim(shard, 0, epoch, Incarnation(f"{epoch:032x}"))
        await turns()
        if await journal.claim([claim]) != [None]:
            return
        seq = len(await events_of(journal, entity))
        for n in range(4):
            await turns()
            one = batch(n + 1, claim, write(entity, seq, b"%d" % epoch, shard=shard))
            [done] = await journal.write(one)
            if isinstance(done, WriteRefused):
                assert done.why == "fenced"
                assert done.epoch > epoch
                return
            # J1 before the read: nobody else wrote between them.
            seq += 1
            assert done.seq == seq

    async def scenario() -> None:
        journal = MemoryJournal(history, turns)
        async with asyncio.TaskGroup() as tasks:
            for epoch in range(1, 6):
                tasks.create_task(owner(journal, epoch))
        written = [int(event) for event in await events_of(journal, entity)]
        assert written == sorted(written)

    asyncio.run(scenario())
    newest = 0
    for event in history.of("claim", "append"):
        if event.fields["ok"]:
            assert event.fields["epoch"] >= newest
            newest = event.fields["epoch"]
