"""Tables of the application under the fence of a shard (J10), on a real PostgreSQL server."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
import psycopg
import pytest
from postgres_lab import shared_server

from domicile.core.ids import EntityKey, ShardKey
from domicile.errors import ConfigError, Unavailable
from domicile.journals.postgres.journal import PostgresJournal
from domicile.membership.clock import SystemClock
from domicile.ports.journal import Batch, Claim, JournalUnknown, JournalWrite, Written
from domicile.testing.suites.journal import ENTITY, NEW, OLD, OTHER, SHARD, batch, write

LIMIT_S = 60.0
numbers = itertools.count()


@pytest.fixture(autouse=True)
def _server() -> None:
    shared_server()


@dataclass
class Place:
    """A journal, and a table of the application in its database."""

    url: str
    journal: PostgresJournal
    watching: Any

    async def connect(self) -> Any:
        return await asyncpg.connect(self.url)

    async def rows(self) -> list[str]:
        return [row["who"] for row in await self.watching.fetch("SELECT who FROM own ORDER BY who")]

    async def until_blocked(self) -> None:
        """Until some session waits for a lock."""
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
            "AND datname = current_database()"
        )
        async with asyncio.timeout(LIMIT_S):
            while not await self.watching.fetchval(waiting):
                await self.watching.execute("SELECT pg_sleep(0.01)")


@asynccontextmanager
async def place(wait_s: float = 30.0) -> AsyncIterator[Place]:
    url = shared_server().new_database()
    journal = PostgresJournal(url, "c", SystemClock(), shown="postgresql://here", wait_s=wait_s)
    watching = await asyncpg.connect(url)
    await watching.execute("CREATE TABLE own (who text)")
    assert await journal.claim([OLD]) == [None]
    try:
        yield Place(url, journal, watching)
    finally:
        await watching.close()
        await journal.close()


async def note(connection: Any, who: str) -> None:
    await connection.execute("INSERT INTO own VALUES ($1)", who)


def test_what_the_owner_writes_is_committed() -> None:
    async def scenario() -> None:
        async with place() as here:
            connection = await here.connect()
            block = here.journal.fenced(connection, OLD)
            assert await block.begin() is None
            await note(connection, "old")
            assert await here.rows() == []
            await block.check()
            await block.commit()
            assert await here.rows() == ["old"]
            assert not connection.is_in_transaction()
            await connection.close()

    asyncio.run(scenario())


def test_a_stale_owner_is_refused() -> None:
    async def scenario() -> None:
        async with place() as here:
            assert await here.journal.claim([NEW]) == [None]
            connection = await here.connect()
            block = here.journal.fenced(connection, OLD)
            assert await block.begin() == NEW.epoch
            await block.rollback()
            assert not connection.is_in_transaction()
            await connection.close()

    asyncio.run(scenario())


def test_a_stale_owner_that_waited_for_the_row_is_refused() -> None:
    """The successor's claim is not committed yet when the stale owner looks."""

    async def scenario() -> None:
        async with place() as here:
            connection, successor = await here.connect(), await here.connect()
            claiming = successor.transaction()
            await claiming.start()
            await successor.execute(
                "UPDATE c_journal.fence SET epoch = $1, owner = $2, batch = 0 WHERE shard = $3",
                NEW.epoch, NEW.owner, SHARD.shard,
            )  # fmt: skip
            block = here.journal.fenced(connection, OLD)
            beginning = asyncio.create_task(block.begin())
            await here.until_blocked()
            await claiming.commit()
            assert await beginning == NEW.epoch
            await block.rollback()
            # And if the claim is not committed, the owner goes on.
            another = Claim(SHARD, 0, NEW.epoch + 1, OLD.owner)
            claiming = successor.transaction()
            await claiming.start()
            await successor.execute("UPDATE c_journal.fence SET epoch = $1", another.epoch)
            block = here.journal.fenced(connection, NEW)
            beginning = asyncio.create_task(block.begin())
            await here.until_blocked()
            await claiming.rollback()
            assert await beginning is None
            await note(connection, "new")
            await block.check()
            await block.commit()
            assert await here.rows() == ["new"]
            await connection.close()
            await successor.close()

    asyncio.run(scenario())


def test_a_claim_waits_for_an_open_block() -> None:
    """What the block writes is there before the successor reads anything."""

    async def scenario() -> None:
        async with place() as here:
            await here.journal.claim([Claim(OTHER, 0, OLD.epoch, OLD.owner)])
            connection = await here.connect()
            block = here.journal.fenced(connection, OLD)
            assert await block.begin() is None
            claiming = asyncio.create_task(here.journal.claim([NEW]))
            await here.until_blocked()
            # Another shard is not concerned, not even in the same batch.
            other = Claim(OTHER, 0, OLD.epoch, OLD.owner)
            beside = write(ENTITY, 0, b"1")
            done = await here.journal.write(batch(1, other, write_to(OTHER)))
            assert isinstance(done[0], Written)
            both = await here.journal.write(Batch(2, (OLD, other), (beside, write_to(OTHER, 1))))
            assert [getattr(one, "why", "ok") for one in both] == ["busy", "ok"]
            await note(connection, "old")
            await block.check()
            assert not claiming.done()
            await block.commit()
            assert await claiming == [None]
            assert await here.rows() == ["old"]
            await connection.close()

    asyncio.run(scenario())


def write_to(shard: ShardKey, expected: int = 0) -> JournalWrite:
    return JournalWrite(shard, EntityKey("Account", "elsewhere"), expected, (b"x",))


def test_connections_that_are_not_fit() -> None:
    async def scenario() -> None:
        async with place() as here:
            journal, connection = here.journal, await here.connect()
            with pytest.raises(ConfigError, match=r"not object.*token"):
                journal.fenced(object(), OLD)
            async with asyncpg.create_pool(here.url, min_size=1, max_size=1) as pool:
                with pytest.raises(ConfigError, match="not Pool; acquire one"):
                    journal.fenced(pool, OLD)
                async with pool.acquire() as lent:
                    block = journal.fenced(lent, OLD)
                    assert await block.begin() is None
                    await block.rollback()
            async with await psycopg.AsyncConnection.connect(here.url) as other_driver:
                with pytest.raises(ConfigError, match="asyncpg, not AsyncConnection"):
                    journal.fenced(other_driver, OLD)
            async with connection.transaction():
                block = journal.fenced(connection, OLD)
                with pytest.raises(ConfigError, match="begins and commits the transaction itself"):
                    await block.begin()
                await block.rollback()
                await note(connection, "mine")
            assert await here.rows() == ["mine"], "a transaction of others is left alone"
            # Another database of the same server, even one that looks the same.
            elsewhere = await asyncpg.connect(shared_server().url)
            block = journal.fenced(elsewhere, OLD)
            with pytest.raises(ConfigError, match=r"own database.*another one"):
                await block.begin()
            await block.rollback()
            assert not elsewhere.is_in_transaction()
            await elsewhere.close()
            # A user without rights, and a session without writes.
            await here.watching.execute("DROP ROLE IF EXISTS nobody_here")
            await here.watching.execute("CREATE ROLE nobody_here")
            await connection.execute("SET ROLE nobody_here")
            block = journal.fenced(connection, OLD)
            with pytest.raises(ConfigError, match="GRANT USAGE ON SCHEMA"):
                await block.begin()
            await block.rollback()
            await connection.execute("RESET ROLE; SET default_transaction_read_only = on")
            block = journal.fenced(connection, OLD)
            with pytest.raises(ConfigError, match="takes no writes"):
                await block.begin()
            await block.rollback()
            await connection.close()
            block = journal.fenced(connection, OLD)
            with pytest.raises(Unavailable, match="nothing of this block ran"):
                await block.begin()

    asyncio.run(scenario())


async def saved_and_failed(connection: Any) -> None:
    async with connection.transaction():
        await note(connection, "undone")
        await connection.execute("SELECT 1 / 0")


def test_a_block_that_failed_inside_or_ended_itself_is_not_committed() -> None:
    async def scenario() -> None:
        async with place() as here:
            connection = await here.connect()
            block = here.journal.fenced(connection, OLD)
            await block.begin()
            await note(connection, "old")
            with pytest.raises(asyncpg.DivisionByZeroError):
                await connection.execute("SELECT 1 / 0")
            # A caught error: PostgreSQL would answer COMMIT with a rollback, and no error.
            with pytest.raises(RuntimeError, match="savepoint"):
                await block.check()
            await block.rollback()
            block = here.journal.fenced(connection, OLD)
            await block.begin()
            async with connection.transaction():
                await note(connection, "saved")
            with pytest.raises(asyncpg.DivisionByZeroError):
                await saved_and_failed(connection)
            await block.check()
            await block.commit()
            assert await here.rows() == ["saved"]
            for words in ("COMMIT", "COMMIT; BEGIN", "ROLLBACK; BEGIN"):
                block = here.journal.fenced(connection, OLD)
                await block.begin()
                await connection.execute(words)
                with pytest.raises(RuntimeError, match="ended its transaction itself"):
                    await block.check()
                await block.rollback()
                if connection.is_closed():
                    connection = await here.connect()
            await connection.close()

    asyncio.run(scenario())


def test_a_commit_that_the_server_refuses_and_one_without_an_answer() -> None:
    async def scenario() -> None:
        async with place() as here:
            await here.watching.execute(
                """CREATE FUNCTION at_commit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                    IF NEW.who = 'killed' THEN PERFORM pg_terminate_backend(pg_backend_pid());
                    ELSIF NEW.who = 'refused' THEN RAISE unique_violation; END IF;
                    RETURN NULL; END $$;
                CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON own
                    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION at_commit()"""
            )
            connection = await here.connect()
            block = here.journal.fenced(connection, OLD)
            await block.begin()
            await note(connection, "refused")
            await block.check()
            with pytest.raises(asyncpg.UniqueViolationError):
                await block.commit()
            await block.rollback()
            assert not connection.is_closed(), "the server has said what happened"
            block = here.journal.fenced(connection, OLD)
            await block.begin()
            await note(connection, "killed")
            await block.check()
            with pytest.raises(JournalUnknown, match="as a whole, or not at all"):
                await block.commit()
            await block.rollback()
            # The row is free again.
            assert await here.journal.claim([NEW]) == [None]
            assert await here.rows() == []

    asyncio.run(scenario())


def test_a_connection_lost_before_the_commit_committed_nothing() -> None:
    async def scenario() -> None:
        async with place() as here:
            connection = await here.connect()
            block = here.journal.fenced(connection, OLD)
            await block.begin()
            await note(connection, "old")
            pid = connection.get_server_pid()
            await here.watching.execute("SELECT pg_terminate_backend($1)", pid)
            with pytest.raises(Unavailable, match="nothing was committed"):
                await block.check()
            await block.rollback()
            assert await here.journal.claim([NEW]) == [None]
            assert await here.rows() == []

    asyncio.run(scenario())


def test_a_process_that_stands_still_in_a_block_keeps_the_row_for_a_while_only() -> None:
    async def scenario() -> None:
        async with place(wait_s=0.3) as here:
            connection = await here.connect()
            block = here.journal.fenced(connection, OLD)
            await block.begin()
            await note(connection, "old")
            async with asyncio.timeout(LIMIT_S):
                while True:
                    try:
                        assert await here.journal.claim([NEW]) == [None]
                        break
                    except JournalUnknown:
                        pass  # it waits no longer than the block may stand still
            with pytest.raises(Unavailable, match="nothing was committed"):
                await block.check()
            await block.rollback()
            assert await here.rows() == []

    asyncio.run(scenario())
