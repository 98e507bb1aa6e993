"""`async with self.fenced(conn)`: a user's own tables under the fence of the journal (J10)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
import pytest
from postgres_lab import shared_server

from domicile import (
    Entity,
    EventSourced,
    Fenced,
    HandlerFailed,
    MaybeExecuted,
    Node,
    Settings,
    handler,
)
from domicile.core.ids import EntityKey
from domicile.errors import DomicileError
from domicile.journals.postgres.fencing import PostgresFencedTransaction

LIMIT_S = 60.0


@dataclass(frozen=True)
class Paid:
    amount: int


class Tables:
    """The application's own tables, and what a test does in the middle of a block."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = url.rpartition("/")[2]
        self.inside = asyncio.Event()
        self.go_on = asyncio.Event()
        self.do: Callable[[Account], Any] | None = None
        self.errors: list[BaseException] = []
        self.watching: Any = None

    async def rows(self) -> list[int]:
        found = await self.watching.fetch("SELECT amount FROM own ORDER BY amount")
        return [row["amount"] for row in found]

    async def fences(self) -> dict[int, int]:
        found = await self.watching.fetch("SELECT shard, epoch FROM domicile_journal.fence")
        return {row["shard"]: row["epoch"] for row in found}


class Other(Entity, name="other"):
    @handler
    async def hear(self) -> None:
        pass


class Account(EventSourced[int, Paid], name="account"):
    @staticmethod
    def initial(id: str, /) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: Paid, /) -> int:
        return state + event.amount

    @handler
    async def pay(self, amount: int) -> int:
        return await self.persist(Paid(amount))

    @handler(timeout_s=30)
    async def note(self, amount: int) -> int:
        """A row of the application's, then an event."""
        tables = self.resource(Tables)
        conn = await asyncpg.connect(tables.url)
        try:
            await self.persist(Paid(amount))
            async with self.fenced(conn):
                await conn.execute("INSERT INTO own VALUES ($1)", amount)
                if tables.do is not None:
                    await tables.do(self)
            return await self.state()
        except BaseException as error:
            tables.errors.append(error)
            raise
        finally:
            conn.terminate()

    @handler
    async def note_only(self, amount: int) -> int:
        """A row and no event: nothing but the block notices a successor."""
        tables = self.resource(Tables)
        state = await self.state()
        conn = await asyncpg.connect(tables.url)
        try:
            async with self.fenced(conn):
                await conn.execute("INSERT INTO own VALUES ($1)", amount)
        except BaseException as error:
            tables.errors.append(error)
            raise
        finally:
            conn.terminate()
        return state

    @handler
    async def note_nowhere(self) -> None:
        async with self.fenced(object()):
            pass

    @handler(timeout_s=0.2)
    async def note_slowly(self) -> None:
        await self.note(1)

    @handler(shared=True)
    async def note_in_a_reader(self) -> None:
        async with self.fenced(None):
            pass


async def wait(account: Account) -> None:
    tables = account.resource(Tables)
    tables.inside.set()
    await tables.go_on.wait()


@asynccontextmanager
async def running(**more: Any) -> AsyncIterator[tuple[Node, Tables]]:
    url = shared_server().new_database()
    tables = Tables(url)
    tables.watching = await asyncpg.connect(url)
    await tables.watching.execute("CREATE TABLE own (amount int)")

    @asynccontextmanager
    async def resources() -> AsyncIterator[dict[type[Any], Any]]:
        yield {Tables: tables}

    node = Node(
        f"memory://{tables.name}", journal=url, entities=[Account, Other], resources=resources,
        settings=Settings(shards=4, **more),
    )  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT_S), node:
            yield node, tables
    finally:
        await tables.watching.close()


def ids_of_shards(node: Node) -> tuple[str, str, str]:
    """Two ids of one shard, and one of another."""
    by_shard: dict[int, list[str]] = {}
    life = node.life
    assert life is not None
    for number in range(50):
        id = f"a{number}"
        shard = life.runtime.catalogue["account"].place(EntityKey("account", id), 4)
        by_shard.setdefault(shard, []).append(id)
    first, second, *_ = by_shard.values()
    return first[0], first[1], second[0]


def test_a_row_and_an_event() -> None:
    async def scenario() -> None:
        async with running() as (node, tables):
            account = node.ref(Account, "a")
            assert await account.ask(Account.note, 5) == 5
            assert await account.ask(Account.note, 6) == 11
            assert await tables.rows() == [5, 6]

    asyncio.run(scenario())


def test_inside_nothing_can_wait_for_the_shard() -> None:
    """And what was persisted before the block is committed before its rows are."""

    async def inside(account: Account) -> None:
        tables = account.resource(Tables)
        committed = await tables.watching.fetchval("SELECT count(*) FROM domicile_journal.event")
        assert committed == 1
        for attempt in (
            lambda: account.ref(Other, "x").ask(Other.hear),
            lambda: account.ref(Other, "x").tell(Other.hear),
            account.committed,
        ):
            with pytest.raises(RuntimeError, match=r"inside `async with self\.fenced"):
                await attempt()
        with pytest.raises(RuntimeError, match="one at a time"):
            async with account.fenced(None):
                pass
        assert await account.state() == 5
        assert await account.persist(Paid(2)) == 7, "staged: it commits after the block"

    async def scenario() -> None:
        async with running() as (node, tables):
            tables.do = inside
            assert await node.ref(Account, "a").ask(Account.note, 5) == 7
            assert await tables.rows() == [5]

    asyncio.run(scenario())


def test_writes_of_the_shard_wait_and_others_go_on() -> None:
    async def scenario() -> None:
        async with running() as (node, tables):
            one, neighbour, elsewhere = ids_of_shards(node)
            for id in (one, neighbour, elsewhere):
                await node.ref(Account, id).ask(Account.pay, 1)
            tables.do = wait
            noting = asyncio.create_task(node.ref(Account, one).ask(Account.note, 5))
            await tables.inside.wait()
            beside = asyncio.create_task(node.ref(Account, neighbour).ask(Account.pay, 10))
            second = asyncio.create_task(node.ref(Account, neighbour).ask(Account.note, 7))
            for _ in range(5):
                await node.ref(Account, elsewhere).ask(Account.pay, 1)
            assert not beside.done()
            assert not noting.done()
            tables.do = None
            tables.go_on.set()
            assert await noting == 6
            assert await beside == 11
            assert await second == 18
            assert await tables.rows() == [5, 7]

    asyncio.run(scenario())


def test_a_handler_that_fails_in_a_block_leaves_nothing() -> None:
    async def fail(account: Account) -> None:
        raise KeyError("in the block")

    async def scenario() -> None:
        async with running() as (node, tables):
            account = node.ref(Account, "a")
            tables.do = fail
            with pytest.raises(HandlerFailed, match="in the block"):
                await account.ask(Account.note, 5)
            tables.do = wait
            with pytest.raises(HandlerFailed, match="ran for more than"):
                await account.ask(Account.note_slowly)
            assert isinstance(tables.errors[-1], asyncio.CancelledError)
            assert await tables.rows() == []
            tables.do = None
            # The event that the block made leave before is there; the row is free.
            assert await account.ask(Account.note, 1) == 7
            assert await tables.rows() == [1]

    asyncio.run(scenario())


def test_a_home_that_lost_its_shard_commits_nothing_and_gets_it_anew() -> None:
    """J2: a fenced block drops the shard, as a fenced write does."""

    async def scenario() -> None:
        async with running() as (node, tables):
            account = node.ref(Account, "a")
            assert await account.ask(Account.pay, 1) == 1

            async def note() -> Any:
                return await account.ask(Account.note_only, 5)

            before = await tables.fences()
            await tables.watching.execute(
                "UPDATE domicile_journal.fence SET epoch = epoch + 7, owner = 'successor'"
            )
            with pytest.raises(MaybeExecuted, match="was claimed under epoch"):
                await note()
            assert await tables.rows() == []
            assert isinstance(tables.errors[-1], Fenced)
            # The node opens the shard under an epoch above the one that the journal has seen.
            while True:
                try:
                    assert await note() == 1
                    break
                except DomicileError:
                    continue
            after = await tables.fences()
            assert any(after[shard] > before[shard] + 7 for shard in before)
            assert await tables.rows() == [5]

    asyncio.run(scenario())


def test_the_deadline_is_compared_before_the_commit() -> None:
    async def expire(account: Account) -> None:
        runtime: Any = account._domicile.host.runtime  # type: ignore[attr-defined]
        runtime.lease.valid_until = runtime.clock.now() - 0.001

    async def scenario() -> None:
        async with running() as (node, tables):
            account = node.ref(Account, "a")
            tables.do = expire
            with pytest.raises(DomicileError):
                await account.options(timeout_s=5).ask(Account.note, 5)
            assert await tables.rows() == []

    asyncio.run(scenario())


def test_a_deadline_that_passes_after_the_last_statement_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No resumption of the handler is between the last look at the clock and the commit."""
    check = PostgresFencedTransaction.check
    lives: list[Any] = []

    async def check_late(self: PostgresFencedTransaction) -> None:
        await check(self)
        lives[0].lease.valid_until = lives[0].clock.now() - 0.001

    monkeypatch.setattr(PostgresFencedTransaction, "check", check_late)

    async def remember(account: Account) -> None:
        lives.append(account._domicile.host.runtime)  # type: ignore[attr-defined]

    async def scenario() -> None:
        async with running() as (node, tables):
            tables.do = remember
            with pytest.raises(DomicileError):
                await node.ref(Account, "a").options(timeout_s=5).ask(Account.note, 5)
            assert await tables.rows() == []
            assert isinstance(tables.errors[-1], Fenced | asyncio.CancelledError)

    asyncio.run(scenario())


def test_a_lost_commit_is_maybe_executed() -> None:
    async def scenario() -> None:
        async with running() as (node, tables):
            await tables.watching.execute(
                """CREATE FUNCTION at_commit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                    PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END $$;
                CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON own
                    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION at_commit()"""
            )
            account = node.ref(Account, "a")
            with pytest.raises(MaybeExecuted, match="as a whole, or not at all"):
                await account.ask(Account.note, 5)
            await tables.watching.execute("DROP TRIGGER at_commit ON own")
            assert await account.ask(Account.note, 6) == 11
            assert await tables.rows() == [6]

    asyncio.run(scenario())


def test_where_there_is_no_fence_to_hold() -> None:
    async def scenario() -> None:
        node = Node("memory://no-fence", entities=[Account], settings=Settings(shards=4))
        async with asyncio.timeout(LIMIT_S), node:
            account = node.ref(Account, "a")
            with pytest.raises(HandlerFailed, match=r"ConfigError.*PostgreSQL.*token"):
                await account.ask(Account.note_nowhere)
            with pytest.raises(HandlerFailed, match="a shared handler cannot persist"):
                await account.ask(Account.note_in_a_reader)

    asyncio.run(scenario())
