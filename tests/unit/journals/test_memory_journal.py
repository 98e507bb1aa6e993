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
from domicile.ports.journal import Append, Appended, Claim, Journal, Refusal
from domicile.testing.history import History
from domicile.testing.suites.journal import ENTITY, NEW, OLD, Gate, JournalContract


class TestMemoryJournal(JournalContract):
    @asynccontextmanager
    async def open(self, pause: Callable[[], Awaitable[None]]) -> AsyncIterator[Journal]:
        journal = MemoryJournal(pause=pause)
        yield journal
        await journal.close()


def test_claims_and_appends_are_reported_as_they_commit() -> None:
    history = History(lambda: 0.0)

    async def scenario() -> None:
        journal = MemoryJournal(history)
        await journal.claim(OLD)
        await journal.append(OLD, Append("w1", ENTITY, 0, (b"1", b"2"), "tx"))
        await journal.append(OLD, Append("w1", ENTITY, 0, (b"1", b"2"), "tx"))
        await journal.append(OLD, Append("w2", ENTITY, 1, (b"clash",)))
        await journal.claim(NEW)
        await journal.claim(OLD)
        await journal.append(OLD, Append("w3", ENTITY, 2, (b"stale",)))

    asyncio.run(scenario())
    old = {"role": "default", "shard": 7, "epoch": 1, "owner": OLD.owner}
    new = {"role": "default", "shard": 7, "epoch": 2, "owner": NEW.owner}
    alice = {"type": "Account", "id": "alice"}
    append = old | alice
    assert [(event.kind, event.fields) for event in history.events] == [
        ("claim", old | {"ok": True}),
        ("append", append | _write("w1", seq=0, count=2, ok=True, key="tx")),
        ("append", append | _write("w2", seq=1, count=1, ok=False)),
        ("claim", new | {"ok": True}),
        ("claim", old | {"ok": False}),
        ("append", append | _write("w3", seq=2, count=1, ok=False)),
    ]


def _write(append_id: str, *, seq: int, count: int, ok: bool, key: str = "") -> dict[str, object]:
    return {"append_id": append_id, "seq": seq, "count": count, "ok": ok, "key": key}


def test_without_a_pause_a_transaction_is_one_turn() -> None:
    journal = MemoryJournal()
    for coroutine in (journal.claim(OLD), journal.append(OLD, Append("w", ENTITY, 0, (b"1",)))):
        with pytest.raises(StopIteration):
            coroutine.send(None)


def test_close_waits_for_what_still_runs() -> None:
    async def scenario() -> None:
        gate = Gate()
        journal = MemoryJournal(pause=gate)
        await journal.claim(OLD)
        gate.shut()
        caller = asyncio.create_task(journal.append(OLD, Append("w", ENTITY, 0, (b"1",))))
        await gate.reached()
        caller.cancel()
        closing = asyncio.create_task(journal.close())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not closing.done()
        gate.open()
        await closing
        assert await journal.read(ENTITY) == (b"1",)

    asyncio.run(scenario())


def test_waiters_for_a_row_go_in_order_of_arrival() -> None:
    async def scenario() -> None:
        gate = Gate()
        journal = MemoryJournal(pause=gate)
        await journal.claim(OLD)
        gate.shut()
        answers: list[object] = []

        async def write(n: int) -> None:
            append = Append(f"w{n}", ENTITY, n, (b"%d" % n,))
            answers.append(await journal.append(OLD, append))

        async with asyncio.TaskGroup() as tasks:
            for n in range(5):
                tasks.create_task(write(n))
            await gate.reached()
            gate.open()
        assert answers == [Appended(n + 1, n + 1) for n in range(5)]

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
        claim = Claim(shard, epoch, Incarnation(f"{epoch:032x}"))
        await turns()
        if await journal.claim(claim) is not None:
            return
        seq = len(await journal.read(entity))
        for n in range(4):
            await turns()
            append = Append(f"{epoch}-{n}", entity, seq, (b"%d" % epoch,))
            done = await journal.append(claim, append)
            if isinstance(done, Refusal):
                assert done.fenced
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
        written = [int(event) for event in await journal.read(entity)]
        assert written == sorted(written)

    asyncio.run(scenario())
    newest = 0
    for event in history.of("claim", "append"):
        if event.fields["ok"]:
            assert event.fields["epoch"] >= newest
            newest = event.fields["epoch"]
