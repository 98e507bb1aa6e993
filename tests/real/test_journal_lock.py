"""A journal that stalls, and a process that stands still in the middle of a write (J3, DX-29)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import apsw
import asyncpg
import pytest
from postgres_lab import shared_server

from domicile import Entity, EventSourced, Node, Settings, handler
from domicile.backends.wiring import open_backends
from domicile.core.hashing import shard_of
from domicile.core.ids import EntityKey, Incarnation
from domicile.core.state.keys import NODES, node_key
from domicile.core.state.records import NodeRecord, decode_record, encode_record
from domicile.core.state.txn import Delete, Put
from domicile.journals.sqlite.journal import SqliteJournal
from domicile.journals.sqlite.lock_holder import started_at
from domicile.ports.journal import Claim, JournalUnknown, Written
from domicile.testing.suites.journal import BOB, ENTITY, OLD, OTHER, B, batch, events_of, write

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux names the holder")

HELD_UP = """
import asyncio, signal, sys, threading
from pathlib import Path
from domicile.journals.sqlite.journal import SqliteJournal
from domicile.testing.suites.journal import ENTITY, OLD, batch, write

def stand_still() -> None:
    print("stands still", flush=True)
    # To this thread: a signal to the process may be taken by another one, and this one runs on.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

async def main() -> None:
    journal = SqliteJournal(Path(sys.argv[1]), "c", pause=stand_still)
    await journal.claim([OLD])
    await journal.write(batch(1, OLD, write(ENTITY, 0, b"never")))

asyncio.run(main())
"""


@contextmanager
def a_stopped_writer(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has stopped itself between the checks of a batch and its writes."""
    process = subprocess.Popen(
        [sys.executable, "-c", HELD_UP, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "stands still\n"
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def written_beside(
    path: Path, gone: bool, ttl_s: float = 0.0
) -> tuple[list[list[Incarnation]], object]:
    """Whose records another process asks for, and what becomes of its own write."""
    asked: list[list[Incarnation]] = []

    async def lives(incarnations: Sequence[Incarnation], process: str) -> bool:
        asked.append(list(incarnations))
        return not gone

    async def scenario() -> object:
        journal = SqliteJournal(path, "c", wait_s=0.2, lives=lives, ttl_s=ttl_s)
        claim = Claim(OTHER, 0, 1, B)
        try:
            await journal.claim([claim])
            [outcome] = await journal.write(batch(1, claim, write(BOB, 0, b"mine", shard=OTHER)))
            assert await events_of(journal, ENTITY) == ()
            return outcome
        except JournalUnknown as error:
            return error
        finally:
            await journal.close()

    return asked, asyncio.run(scenario())


@pytest.mark.scenario("DX-29", partial=True)
def test_a_stopped_writer_whose_record_is_gone_is_ended_and_others_write_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with a_stopped_writer(tmp_path / "x.journal") as process:
        asked, outcome = written_beside(tmp_path / "x.journal", gone=True)
        assert outcome == Written(1, 1)
        assert asked == [[OLD.owner]]
        assert process.wait(60) == -signal.SIGKILL
    assert f"process {process.pid} stood still while it wrote" in caplog.text


def test_a_stopped_writer_with_a_record_is_left_alone(tmp_path: Path) -> None:
    with a_stopped_writer(tmp_path / "x.journal") as process:
        asked, outcome = written_beside(tmp_path / "x.journal", gone=False)
        assert isinstance(outcome, JournalUnknown)
        assert "stayed locked" in str(outcome)
        assert asked
        assert process.poll() is None


def test_a_writer_that_is_waited_for_less_than_a_ttl_is_left_alone(tmp_path: Path) -> None:
    with a_stopped_writer(tmp_path / "x.journal") as process:
        asked, outcome = written_beside(tmp_path / "x.journal", gone=True, ttl_s=3_600.0)
        assert isinstance(outcome, JournalUnknown)
        assert asked == []
        assert process.poll() is None


def test_a_process_with_a_record_under_any_incarnation_is_left_alone(tmp_path: Path) -> None:
    """It lost its lease and joined anew, while its old write still has the lock."""
    path = tmp_path / "x.db"

    async def scenario(process: subprocess.Popen[str]) -> None:
        opened = open_backends(f"sqlite:///{path}", cluster="c", settings=Settings())
        named = f"{process.pid} {started_at(process.pid)}"
        again = NodeRecord("n", B, "", (), (), 6.0, process=named)
        await opened.store.commit((), (Put(node_key(B), encode_record(again)),))
        assert isinstance(opened.journal, SqliteJournal)
        opened.journal._ttl_s = 0.0
        with pytest.raises(JournalUnknown, match="stayed locked"):
            await opened.journal.claim([Claim(OTHER, 0, 1, B)])
        assert process.poll() is None
        await opened.store.commit((), (Delete(node_key(B)),))
        assert await opened.journal.claim([Claim(OTHER, 0, 1, B)]) == [None]
        assert process.wait(60) == -signal.SIGKILL
        await opened.close()

    with a_stopped_writer(tmp_path / "x.db.journal") as process:
        asyncio.run(scenario(process))


def test_a_node_that_stands_still_in_its_write_is_ended_by_another_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """J3: the journal of a node learns from its store which processes are gone."""
    path = tmp_path / "x.db"
    settings = Settings(shards=SHARDS, ask_timeout_s=120.0)

    async def scenario() -> None:
        async with Node(f"sqlite:///{path}", entities=[Purse], settings=settings) as node:
            # What the stopped process was about to write is not there.
            assert await node.ref(Purse, purse_in(0)).ask(Purse.pay, 1) == 2
            opened = open_backends(f"sqlite:///{path}", cluster="domicile", settings=settings)
            [record] = (await opened.store.list(NODES)).items
            here = f"{os.getpid()} {started_at(os.getpid())}"
            assert decode_record(record.value, NodeRecord).process == here
            await opened.close()

    process = subprocess.Popen(
        [sys.executable, "-c", NODE, str(path), *sys.path],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        asyncio.run(scenario())
        assert process.wait(60) == -signal.SIGKILL
        assert f"process {process.pid} stood still while it wrote" in caplog.text
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


@dataclass(frozen=True)
class Paid:
    amount: int


class Purse(EventSourced[int, Paid], name="stalled.purse"):
    @staticmethod
    def initial(id: str, /) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: Paid, /) -> int:
        return state + event.amount

    @handler
    async def pay(self, amount: int) -> int:
        return await self.persist(Paid(amount))


class Bell(Entity, name="stalled.bell"):
    """Stores nothing."""

    rung = 0

    @handler
    async def ring(self) -> int:
        self.rung += 1
        return self.rung


SHARDS = 4

NODE = """
import asyncio, sys
sys.path[:0] = sys.argv[2:]
import signal, threading
from functools import partial
from pathlib import Path

import apsw

from domicile import Node, Settings
from domicile.journals.sqlite import journal
from test_journal_lock import SHARDS, Purse, purse_in

begun = []

def stand_still() -> None:
    begun.append(1)
    if len(begun) < 2:
        return
    # Not while another thread writes to the store: its file has a lock of its own.
    raw = apsw.Connection(sys.argv[1])
    raw.set_busy_timeout(60_000)
    raw.execute("BEGIN IMMEDIATE")
    raw.execute("ROLLBACK")
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

journal.SqliteJournal = partial(journal.SqliteJournal, pause=stand_still)

async def main() -> None:
    async with Node(
        "sqlite:///" + sys.argv[1], entities=[Purse], settings=Settings(shards=SHARDS)
    ) as node:
        purse = node.ref(Purse, purse_in(0))
        print(await purse.ask(Purse.pay, 1), flush=True)
        await purse.ask(Purse.pay, 10)

asyncio.run(main())
"""


def purse_in(shard: int) -> str:
    return next(
        f"p{n}"
        for n in range(100)
        if shard_of(EntityKey("stalled.purse", f"p{n}"), SHARDS) == shard
    )


async def held_up(node: Node, stalled: AbstractAsyncContextManager[None], *, others: bool) -> None:
    """While the journal is stalled for shard 0: what waits for it waits, and nothing else does."""
    purse, other = node.ref(Purse, purse_in(0)), node.ref(Purse, purse_in(1))
    bell = node.ref(Bell, "b")
    assert [await one.ask(Purse.pay, 1) for one in (purse, other)] == [1, 1]
    async with stalled:
        # The first two go in one batch.
        waiting = asyncio.create_task(purse.ask(Purse.pay, 1))
        beside = asyncio.create_task(other.ask(Purse.pay, 1)) if others else None
        for number in range(1, 21):
            assert await bell.ask(Bell.ring) == number
            if others and number == 10:
                # Of a shard that nobody has claimed before.
                assert await node.ref(Purse, purse_in(2)).ask(Purse.pay, 1) == 1
            if beside is not None:
                assert await beside == number + 1
                beside = asyncio.create_task(other.ask(Purse.pay, 1))
        assert not waiting.done()
        if beside is not None:
            await beside
    assert await waiting == 2


async def claimed_anew(node: Node, stalled: AbstractAsyncContextManager[None]) -> None:
    """After a restart no shard is claimed: a held row holds up the claim of its shard alone."""
    purses = [node.ref(Purse, purse_in(shard)) for shard in range(SHARDS)]
    async with stalled:
        # They are asked for together, so that one call claims what it can.
        waiting, *others = [asyncio.create_task(one.ask(Purse.pay, 1)) for one in purses]
        paid = await asyncio.gather(*others)
        assert not waiting.done()
        assert [number > 0 for number in paid] == [True] * (SHARDS - 1)
    assert await waiting == 3


@pytest.mark.scenario("DX-29")
def test_a_stalled_journal_holds_up_only_those_that_wait_for_it(tmp_path: Path) -> None:
    """SQLite: another process has the lock of the file. PostgreSQL: another session has one row.
    And a stopped writer to a file is ended."""
    file, url = tmp_path / "x.db.journal", shared_server().new_database()
    settings = Settings(shards=SHARDS, ask_timeout_s=60.0)

    @asynccontextmanager
    async def locked_file() -> AsyncIterator[None]:
        raw = apsw.Connection(str(file))
        raw.execute("BEGIN IMMEDIATE")
        yield
        raw.execute("ROLLBACK")
        raw.close()

    @asynccontextmanager
    async def locked_row() -> AsyncIterator[None]:
        raw = await asyncpg.connect(url)
        async with raw.transaction():
            await raw.execute("SELECT 1 FROM domicile_journal.fence WHERE shard = 0 FOR UPDATE")
            yield
        await raw.close()

    async def scenario() -> None:
        kinds = [Purse, Bell]
        store = f"sqlite:///{tmp_path / 'x.db'}"
        async with Node(store, entities=kinds, settings=settings) as node:
            await held_up(node, locked_file(), others=False)
        store = f"sqlite:///{tmp_path / 'y.db'}"
        async with Node(store, entities=kinds, journal=url, settings=settings) as node:
            await held_up(node, locked_row(), others=True)
        async with Node(store, entities=kinds, journal=url, settings=settings) as node:
            await claimed_anew(node, locked_row())

    asyncio.run(scenario())
    with a_stopped_writer(tmp_path / "y.journal") as process:
        _, outcome = written_beside(tmp_path / "y.journal", gone=True)
        assert outcome == Written(1, 1)
        assert process.wait(60) == -signal.SIGKILL
