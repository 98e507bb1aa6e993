"""What every journal must do (J1, J2, J4).

For authors of journals: derive `class TestMine(JournalContract)` and define `open`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.ports.journal import Append, Appended, Claim, Journal, Refusal, StoredEvents

SHARD = ShardKey("default", 7)
ENTITY = EntityKey("Account", "alice")
OLD = Claim(SHARD, 1, Incarnation("a" * 32))
NEW = Claim(SHARD, 2, Incarnation("b" * 32))


class Gate:
    """Holds up transactions while it is shut."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._reached = asyncio.Event()

    async def __call__(self) -> None:
        """The pause that a journal makes inside a transaction."""
        self._reached.set()
        await self._open.wait()

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
    """Derive a test class from this and define `open`."""

    patience_s: float = 10.0
    """How long, in real time, one scenario may take."""

    @abstractmethod
    def open(self, pause: Callable[[], Awaitable[None]]) -> AbstractAsyncContextManager[Journal]:
        """A fresh, empty journal that awaits `pause()` in every append, the fence row locked."""

    def run(self, scenario: Callable[[Journal, Gate], Awaitable[None]]) -> None:
        """Run one scenario on a fresh journal and a fresh event loop."""

        async def main() -> None:
            gate = Gate()
            async with asyncio.timeout(self.patience_s), self.open(gate) as journal:
                await scenario(journal, gate)

        asyncio.run(main())

    def test_events_are_read_in_order(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            assert await journal.claim(OLD) is None
            assert await journal.read(ENTITY) == ()
            first = await journal.append(OLD, Append("w1", ENTITY, 0, (b"1", b"2")))
            second = await journal.append(OLD, Append("w2", ENTITY, 2, (b"3",)))
            assert isinstance(first, Appended)
            assert isinstance(second, Appended)
            assert (first.seq, second.seq) == (2, 3)
            assert first.offset < second.offset
            assert await journal.read(ENTITY) == (b"1", b"2", b"3")
            assert await journal.read(EntityKey("Account", "bob")) == ()

        self.run(scenario)

    def test_nothing_is_written_without_a_claim(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            refused = await journal.append(OLD, Append("w1", ENTITY, 0, (b"1",)))
            assert isinstance(refused, Refusal)
            assert refused.fenced
            assert await journal.read(ENTITY) == ()

        self.run(scenario)

    def test_claims_only_rise(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            assert await journal.claim(NEW) is None
            assert await journal.claim(NEW) is None
            assert await journal.claim(OLD) == Refusal(NEW.epoch, fenced=True)
            twin = Claim(SHARD, NEW.epoch, OLD.owner)
            assert await journal.claim(twin) == Refusal(NEW.epoch, fenced=True)
            assert await journal.claim(Claim(ShardKey("default", 8), 1, OLD.owner)) is None

        self.run(scenario)

    def test_a_newer_claim_fences_the_old_owner(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim(OLD)
            await journal.append(OLD, Append("w1", ENTITY, 0, (b"1",)))
            await journal.claim(NEW)
            refused = await journal.append(OLD, Append("w2", ENTITY, 1, (b"stale",)))
            assert refused == Refusal(NEW.epoch, fenced=True)
            twin = Claim(SHARD, NEW.epoch, OLD.owner)
            refused = await journal.append(twin, Append("w3", ENTITY, 1, (b"stale",)))
            assert refused == Refusal(NEW.epoch, fenced=True)
            assert await journal.read(ENTITY) == (b"1",)
            assert await journal.appended(NEW, "w2") is None
            done = await journal.append(NEW, Append("w4", ENTITY, 1, (b"2",)))
            assert isinstance(done, Appended)

        self.run(scenario)

    def test_a_claim_waits_for_an_append_under_way(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim(OLD)
            order: list[str] = []

            async def append() -> None:
                done = await journal.append(OLD, Append("w1", ENTITY, 0, (b"1",)))
                assert isinstance(done, Appended)
                order.append("append")

            async def claim() -> None:
                assert await journal.claim(NEW) is None
                order.append("claim")
                assert await journal.read(ENTITY) == (b"1",)

            gate.shut()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(append())
                await gate.reached()
                tasks.create_task(claim())
                for _ in range(20):
                    await asyncio.sleep(0)
                assert order == []
                assert await journal.read(ENTITY) == ()
                gate.open()
            assert order == ["append", "claim"]

        self.run(scenario)

    def test_another_shard_does_not_wait(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim(OLD)
            gate.shut()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(journal_append(journal, Append("w1", ENTITY, 0, (b"1",))))
                await gate.reached()
                other = Claim(ShardKey("default", 8), 1, OLD.owner)
                assert await journal.claim(other) is None
                gate.open()

        self.run(scenario)

    def test_the_same_append_id_writes_once(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim(OLD)
            append = Append("w1", ENTITY, 0, (b"1",))
            done = await journal.append(OLD, append)
            assert isinstance(done, Appended)
            assert await journal.append(OLD, append) == done
            assert await journal.read(ENTITY) == (b"1",)

        self.run(scenario)

    def test_a_wrong_seq_is_refused(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim(OLD)
            await journal.append(OLD, Append("w1", ENTITY, 0, (b"1",)))
            for seq in (0, 2):
                refused = await journal.append(OLD, Append(f"x{seq}", ENTITY, seq, (b"no",)))
                assert refused == Refusal(OLD.epoch, fenced=False)
            assert await journal.read(ENTITY) == (b"1",)

        self.run(scenario)

    def test_an_unknown_write_is_looked_up_behind_the_lock(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim(OLD)
            assert await journal.appended(OLD, "w1") is None
            gate.shut()
            async with asyncio.TaskGroup() as tasks:
                write = Append("w1", ENTITY, 0, (b"1",))
                done = tasks.create_task(journal_append(journal, write))
                await gate.reached()
                looked = tasks.create_task(journal_appended(journal, "w1"))
                for _ in range(20):
                    await asyncio.sleep(0)
                assert not looked.done()
                gate.open()
            assert looked.result() == done.result()

        self.run(scenario)

    def test_a_write_whose_caller_went_away_still_happens(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim(OLD)
            gate.shut()
            write = Append("w1", ENTITY, 0, (b"1",))
            caller = asyncio.create_task(journal_append(journal, write))
            await gate.reached()
            caller.cancel()
            for _ in range(3):
                await asyncio.sleep(0)
            gate.open()
            assert await journal.appended(OLD, "w1") is not None
            assert caller.cancelled()

        self.run(scenario)

    def test_an_inbox_key_is_stored_with_its_events_once(self) -> None:
        async def scenario(journal: Journal, gate: Gate) -> None:
            await journal.claim(OLD)
            assert await journal.inbox(ENTITY, "tx") is None
            await journal.append(OLD, Append("w1", ENTITY, 0, (b"1",), key="tx"))
            assert await journal.inbox(ENTITY, "tx") == StoredEvents(None)
            assert await journal.inbox(EntityKey("Account", "bob"), "tx") is None
            again = await journal.append(OLD, Append("w2", ENTITY, 1, (b"2",), key="tx"))
            assert again == Refusal(OLD.epoch, fenced=False)
            reply = await journal.append(OLD, Append("w3", ENTITY, 1, (), "tx", b"reply"))
            assert isinstance(reply, Appended)
            assert reply.seq == 1
            assert await journal.inbox(ENTITY, "tx") == StoredEvents(b"reply")
            assert await journal.read(ENTITY) == (b"1",)

        self.run(scenario)


async def journal_append(journal: Journal, append: Append) -> Appended | Refusal:
    """An append by the old owner, as a coroutine that a task can run."""
    return await journal.append(OLD, append)


async def journal_appended(journal: Journal, append_id: str) -> Appended | None:
    """A look-up by the old owner, as a coroutine that a task can run."""
    return await journal.appended(OLD, append_id)
