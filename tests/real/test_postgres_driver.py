"""A replica group's PostgreSQL in short: followed, fenced, promoted, rewound. What settings do.

The contract of drivers and the driver's own points are in `tests/replica`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from postgres_group_lab import (
    FOUND,
    PostgresServers,
    level,
    needs,
    run_on,
    serve,
    template,
    with_options,
)

from domicile.errors import ConfigError
from domicile.failover.database_kinds import Mode, ServerPlace, database_kind
from domicile.failover.drivers.postgres import PostgresKind
from domicile.failover.drivers.postgres.local_server import LocalServer
from domicile.failover.records import WriteQuorum

NEWEST = max(FOUND, default=18)


@needs(NEWEST)
def test_a_primary_is_replaced_and_comes_back_as_a_replica() -> None:
    async def scenario(servers: PostgresServers) -> None:
        await serve(servers, 1)
        first, second = servers.driver(0), servers.driver(1)
        assert await servers.write(0, "common")
        kept = await level(servers)
        await second.stand()
        session = await servers.session(0)
        assert await servers.write_in(session, "lost")
        await servers.lock(0)
        assert not await servers.write_in(session, "refused")
        await first.stand()
        await second.promote(2)
        assert not await servers.write(1, "early")
        await servers.unlock(1, 2)
        assert await servers.write(1, "next")
        assert (await first.save(kept)).writes == 1
        await first.follow(servers.address(1), kept)
        await level(servers, 1, 0)
        assert await servers.values(0) == ["common", "next"]

    run_on(NEWEST, scenario)


@needs(NEWEST)
def test_the_server_that_is_opened_is_the_guards_child() -> None:
    """F2: by the server's own word, and for the run that is opened only."""

    async def scenario(servers: PostgresServers) -> None:
        run = (await servers.driver(0).look()).run
        pid = await servers.gates[0].process_id(run)
        assert pid == servers.processes[0].pid
        assert servers.processes[0].outlives(pid) == ""
        assert f"process {pid} answers" in servers.processes[1].outlives(pid)
        with pytest.raises(ConnectionError, match="restarted"):
            await servers.gates[0].process_id("another run")

    run_on(NEWEST, scenario)


@needs(NEWEST)
def test_closing_a_server_ends_no_server_that_was_started_meanwhile() -> None:
    """F2: a guard starts it anew once its main process is gone. Closing must end all the same."""

    async def scenario(servers: PostgresServers) -> None:
        server, pid = servers.local[0], servers.processes[0].pid
        async with asyncio.timeout(10):
            await server.end_all()  # what is left of one that ended before
        assert pid is not None
        assert server.postmaster() == pid == servers.processes[0].pid
        async with asyncio.timeout(10):
            await server.end_all(pid)
        assert server.postmaster() != pid

    run_on(NEWEST, scenario)


@needs(NEWEST)
def test_roles_whose_commits_do_not_wait_are_told() -> None:
    async def scenario(servers: PostgresServers) -> None:
        await servers.driver(0).stand()
        await servers.driver(0).promote(1)
        with servers.local[0].own_config().open("a") as file:
            file.write("fsync = on\n")
        await servers.unlock(0, 1)
        place = servers.places[0]
        admin = await servers.session(0, "domicile")
        assert await PostgresKind().check(place, "sync") == ()
        await admin.execute("ALTER ROLE app SET synchronous_commit = off")
        await admin.execute("ALTER DATABASE postgres SET synchronous_commit = local")
        await admin.execute("ALTER ROLE app IN DATABASE postgres SET synchronous_commit = on")
        first, second = await PostgresKind().check(place, "sync")
        assert "is local for all roles in database postgres" in first
        assert "is off for role app:" in second
        assert await PostgresKind().check(place, "async") == ()

    run_on(NEWEST, scenario, count=1)


@needs(NEWEST)
def test_what_alter_system_says_does_not_keep() -> None:
    """F12: neither before a server is opened, nor while it is open; nor what is ruled for ever."""

    async def scenario(servers: PostgresServers) -> None:
        quorum = WriteQuorum("server-0", ("server-1",), 1)
        first = servers.driver(0)
        await first.stand()
        admin = await servers.session(0, "domicile")
        await admin.execute("ALTER SYSTEM SET synchronous_standby_names = ''")
        await admin.execute("ALTER SYSTEM SET restart_after_crash = on")
        await first.promote(1)
        await servers.unlock(0, 1, quorum)
        assert not await servers.write(0, "alone", 0.5)
        opened = await first.look()
        assert opened.in_use is not None
        assert (opened.open_epoch, opened.in_use.quorum) == (1, quorum)

        admin = await servers.session(0, "domicile")
        await admin.execute("ALTER SYSTEM SET synchronous_standby_names = ''")
        await admin.execute("SELECT pg_reload_conf()")
        while (facts := await first.look()).open_epoch == 1:
            pass
        assert (facts.open_epoch, facts.in_use) == (-1, None)
        assert await servers.write(0, "nobody else has it")
        await servers.unlock(0, 1, quorum)
        assert not await servers.write(0, "alone again", 0.5)
        facts = await first.look()
        assert facts.in_use is not None
        # What was acknowledged meanwhile lies before the quorum counts again.
        assert (facts.open_epoch, facts.in_use.since > opened.in_use.since) == (1, True)

        await admin.execute("ALTER SYSTEM SET synchronous_commit = off")
        with pytest.raises(ConnectionError, match="synchronous_commit is off"):
            await servers.unlock(0, 1, quorum)
        await servers.lock(0)
        admin = await servers.session(0, "domicile")
        assert await admin.fetchval("SHOW restart_after_crash") == "off"
        # A replica that was made to follow somebody lets go of it.
        await admin.execute("ALTER SYSTEM SET primary_conninfo = 'host=127.0.0.1 port=1'")
        await first.stand()
        admin = await servers.session(0, "domicile")
        assert await admin.fetchval("SHOW primary_conninfo") == ""

    run_on(NEWEST, scenario, count=1, mode="sync")


def checked(place: ServerPlace, mode: Mode = "async") -> tuple[str, ...]:
    return asyncio.run(database_kind("postgresql").check(place, mode))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> ServerPlace:
    """A place with data, whose server does not run."""
    if NEWEST not in FOUND:
        pytest.skip("no PostgreSQL is installed")
    home = tmp_path_factory.mktemp("place")
    for one in (home, *home.parents):
        if not os.getuid() and not one.stat().st_mode & 0o001 and one != Path("/"):
            one.chmod(one.stat().st_mode | 0o011)
    if not os.getuid():
        shutil.chown(home, "nobody", "nogroup")
    subprocess.run(["cp", "-a", template(FOUND[NEWEST], 0), home / "data"], check=True)
    with (home / "data" / "postgresql.conf").open("a") as file:
        file.write("fsync = on\n")
    return ServerPlace(
        url="postgresql://domicile@127.0.0.1:1/postgres", folder=home / "agent",
        data=home / "data", options={"binaries": str(FOUND[NEWEST])},
    )  # fmt: skip


@needs(NEWEST)
@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("wal_level = minimal\nmax_wal_senders = 0", "wal_level = replica"),
        ("max_wal_senders = 1", "max_wal_senders = 10"),
        ("max_replication_slots = 1", "max_replication_slots = 10"),
        ("full_page_writes = off", "full_page_writes = on"),
        ("fsync = off", "fsync = on"),
        ("synchronous_commit = local", "synchronous_commit = on"),
    ],
)
def test_a_wrong_setting_is_named_with_its_remedy(made: ServerPlace, line: str, fix: str) -> None:
    assert made.data is not None
    path = made.data / "postgresql.conf"
    before = path.read_text()
    try:
        path.write_text(f"{before}\n{line}\n")
        with pytest.raises(ConfigError, match=fix):
            checked(made, "sync")
    finally:
        path.write_text(before)


@needs(NEWEST)
@pytest.mark.parametrize(
    "name", ["synchronous_standby_names", "primary_conninfo", "primary_slot_name"]
)
def test_what_would_win_over_domicile_is_refused(made: ServerPlace, name: str) -> None:
    """`ALTER SYSTEM` of before, or what pg_basebackup -R wrote; or the command itself."""
    assert made.data is not None
    path = made.data / "postgresql.auto.conf"
    before = path.read_text()
    try:
        path.write_text(f"{before}{name} = ''\n")
        with pytest.raises(ConfigError, match=rf"auto.conf sets {name}.* RESET {name}"):
            checked(made, "sync")
    finally:
        path.write_text(before)
    given = replace(made, command=("postgres", "-D", str(made.data), "-c", f"{name}="))
    with pytest.raises(ConfigError, match=rf"command sets {name}"):
        checked(given, "sync")


@needs(NEWEST)
def test_settings_of_the_command_are_checked_too(made: ServerPlace) -> None:
    weak = ("postgres", "-D", str(made.data), "--synchronous-commit=off")
    with pytest.raises(ConfigError, match="synchronous_commit is off"):
        checked(replace(made, command=weak), "sync")
    # Ruled: it can't be said otherwise.
    assert checked(replace(made, command=(*weak[:3], "-c", "restart_after_crash=on")), "sync") == ()


@needs(NEWEST)
def test_a_server_that_is_down_and_in_order_passes(made: ServerPlace) -> None:
    assert checked(made, "sync") == ()


@needs(NEWEST)
def test_hints_are_needed_where_there_are_no_checksums(made: ServerPlace) -> None:
    assert made.data is not None
    path = made.data / "postgresql.conf"
    before = path.read_text()
    said = asyncio.run(_control(made))
    try:
        path.write_text(f"{before}\nwal_log_hints = off\n")
        if said == "0":
            with pytest.raises(ConfigError, match="wal_log_hints = on"):
                checked(made)
        else:
            assert checked(made) == ()
    finally:
        path.write_text(before)


async def _control(place: ServerPlace) -> str:
    return (await LocalServer(place).control())["Data page checksum version"]


@needs(NEWEST)
def test_another_version_is_taken_with_a_warning(made: ServerPlace, tmp_path: Path) -> None:
    assert made.data is not None
    real = Path(made.options["binaries"])
    folder = made.data.parent / "sixteen"
    folder.mkdir()
    for program in real.iterdir():
        (folder / program.name).symlink_to(program)
    (folder / "postgres").unlink()
    (folder / "postgres").write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec echo "postgres (PostgreSQL) 16.2"\n'
        f'exec {real}/postgres "$@"\n'
    )
    (folder / "postgres").chmod(0o755)
    (warning,) = checked(with_options(made, binaries=str(folder)))
    assert "PostgreSQL 16" in warning
    assert "15 and 18" in warning


@needs(NEWEST)
def test_a_wrong_password_is_said_without_the_password() -> None:
    async def scenario(servers: PostgresServers) -> None:
        await servers.driver(0).stand()
        await servers.driver(0).promote(1)
        rules = servers.local[0].own_hba()
        asks = "host all keeper 127.0.0.1/32 scram-sha-256\n"
        rules.write_text(asks + rules.read_text())
        with servers.local[0].own_config().open("a") as file:
            file.write("fsync = on\n")
        await servers.unlock(0, 1)
        admin = await servers.session(0, "domicile")
        await admin.execute("CREATE ROLE keeper SUPERUSER LOGIN PASSWORD 'right'")
        url = f"postgresql://keeper:wrong@127.0.0.1:{servers.ports[0]}/postgres"
        place = replace(servers.places[0], url=url, folder=servers.home / "other")
        with pytest.raises(ConfigError, match="refuses the role 'keeper'") as caught:
            await PostgresKind().check(place, "async")
        assert "wrong" not in str(caught.value)
        facts = await PostgresKind().driver(place, "async").look()
        assert (facts.up, "wrong" in facts.why) == (False, False)
        right = replace(place, url=url.replace("wrong", "right"))
        assert await PostgresKind().check(right, "async") == ()
        await admin.execute("ALTER ROLE keeper NOSUPERUSER")
        with pytest.raises(ConfigError, match='ALTER ROLE "keeper" SUPERUSER'):
            await PostgresKind().check(right, "async")

    run_on(NEWEST, scenario, count=1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"url": "mysql://h/db"}, "postgresql://user:password@host"),
        ({"url": "postgresql://h:1/db"}, "names no user"),
        ({"url": "postgresql://u@h:1/db?target_session_attrs=any"}, "sslmode"),
        ({"data": None}, "needs `data`"),
        ({"options": {"slots": "yes"}}, "no option 'slots'"),
        ({"options": {"binaries": "/nowhere"}}, "look at `binaries`"),
    ],
)
def test_a_place_that_can_never_serve_is_refused(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    place = ServerPlace(
        url="postgresql://u:secret@127.0.0.1:1/db", folder=tmp_path, data=tmp_path / "data"
    )
    if not os.getuid():
        shutil.chown(tmp_path, "nobody", "nogroup")
    with pytest.raises(ConfigError, match=said) as caught:
        checked(replace(place, **change))  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)


@pytest.mark.skipif(os.getuid() != 0, reason="only root starts a server as another user")
def test_root_that_may_not_see_the_servers_processes_is_refused(tmp_path: Path) -> None:
    """As in a container: the server could be started, and neither loaded anew nor closed."""
    shutil.chown(tmp_path, "nobody", "nogroup")
    program = (
        "import asyncio\n"
        "from pathlib import Path\n"
        "from domicile.failover.database_kinds import ServerPlace\n"
        "from domicile.failover.drivers.postgres import PostgresKind\n"
        f"home = Path({str(tmp_path)!r})\n"
        "place = ServerPlace(url='postgresql://u@127.0.0.1:1/db', folder=home, data=home / 'd')\n"
        "asyncio.run(PostgresKind().check(place, 'async'))\n"
    )
    less = ["setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"]
    ended = subprocess.run(
        [*less, sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "CAP_SYS_PTRACE" in ended.stderr, ended
