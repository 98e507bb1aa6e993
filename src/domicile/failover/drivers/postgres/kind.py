"""PostgreSQL as a kind of database. Implements `DatabaseKind`."""

from __future__ import annotations

import os
import re
import sys
from typing import ClassVar

from domicile.errors import ConfigError
from domicile.failover.database_kinds import Mode, ServerPlace
from domicile.failover.driver import ReplicaDriver, ServerGate, ServerProcess
from domicile.failover.drivers.postgres.config_files import (
    AUTO_FILE,
    CHANGED,
    LONGEST_NAME,
    RULED,
    WEAK_COMMITS,
    command_settings,
    names_in,
)
from domicile.failover.drivers.postgres.driver import PostgresDriver
from domicile.failover.drivers.postgres.gate import PostgresGate
from domicile.failover.drivers.postgres.local_server import LocalServer, ServerRefused
from domicile.failover.drivers.postgres.process import PostgresProcess
from domicile.failover.drivers.postgres.server_family import may_see_others

PROVED = (15, 18)
"""The major versions on which the contract of drivers runs."""

OLDEST = 13
"""Older ones can't change their primary without a restart."""


WEAKER = """
SELECT split_part(said, '=', 2) AS value,
    concat_ws(' in ', coalesce('role ' || quote_ident(rolname), 'all roles'),
        'database ' || quote_ident(datname)) AS whom
FROM pg_db_role_setting CROSS JOIN unnest(setconfig) AS said
    LEFT JOIN pg_roles ON pg_roles.oid = setrole
    LEFT JOIN pg_database ON pg_database.oid = setdatabase
WHERE split_part(said, '=', 1) = 'synchronous_commit' AND split_part(said, '=', 2) = ANY($1)
ORDER BY whom
"""
"""Who gets another default of `synchronous_commit`: roles, databases, roles in databases."""


class PostgresKind:
    """PostgreSQL, started by Domicile, with streaming replication."""

    name: ClassVar[str] = "postgresql"
    modes: ClassVar[tuple[Mode, ...]] = ("async", "sync")
    options: ClassVar[tuple[str, ...]] = ("binaries", "replication")

    async def check(self, place: ServerPlace, mode: Mode) -> tuple[str, ...]:
        """As `DatabaseKind.check`."""
        if sys.platform != "linux":
            raise ConfigError(
                "a PostgreSQL server is guarded on Linux only: the guard must find and end all of "
                "its processes"
            )
        server = LocalServer(place)
        _check_places(server, mode)
        if why := server.without_settings():
            raise ConfigError(why)
        said = await server.run("postgres", "--version")
        found = re.search(r"(\d+)(?:\.\d+)?", said)
        version = int(found[1]) if found else 0
        if version < OLDEST:
            raise ConfigError(
                f"PostgreSQL {version} changes its primary by a restart only: take {OLDEST} or "
                f"later; proved are {PROVED[0]} and {PROVED[1]}"
            )
        warnings: list[str] = []
        if version not in PROVED:
            warnings.append(
                f"the server is PostgreSQL {version}; this driver is proved on {PROVED[0]} and "
                f"{PROVED[1]} only"
            )
        if not server.has_data:
            return (*warnings, f"{server.data} is empty: it gets a copy of the primary's data")
        server.prepare()
        _check_ruled(server)
        warnings += await _check_settings(server, mode)
        warnings += await _check_login(server, mode)
        return tuple(warnings)

    def driver(self, place: ServerPlace, mode: Mode) -> ReplicaDriver:
        """As `DatabaseKind.driver`."""
        return PostgresDriver(place, mode)

    def gate(self, place: ServerPlace, mode: Mode) -> ServerGate:
        """As `DatabaseKind.gate`."""
        return PostgresGate(place)

    def process(self, place: ServerPlace) -> ServerProcess | None:
        """As `DatabaseKind.process`. Domicile starts every server of this kind."""
        return PostgresProcess(place)


def _check_places(server: LocalServer, mode: Mode) -> None:
    above = server.data.parent
    if not above.is_dir():
        whose = "`install -d -o postgres`" if not os.geteuid() else "`mkdir`"
        raise ConfigError(
            f"there is no folder {above}, in which the data directory {server.data.name!r} and its "
            f"copies are made: make it, as with {whose}, or correct server.data"
        )
    if server.owner() is not None and not may_see_others():
        raise ConfigError(
            "this process is root and may not see the processes of other users, so it could not "
            "close the server: run agent and guard as the owner of the data, or give them "
            "CAP_SYS_PTRACE (docker run --cap-add SYS_PTRACE)"
        )
    if os.path.ismount(server.data):
        raise ConfigError(
            f"{server.data} is a mount point, so a copy can't take its place by renaming: put the "
            "data one folder below it"
        )
    if not os.access(server.data.parent, os.W_OK):
        raise ConfigError(
            f"{server.data.parent} is not writable for this user: a copy of the primary's data is "
            "made there, beside the old data"
        )
    if not server.name.isascii() or len(server.name) > LONGEST_NAME:
        raise ConfigError(
            f"the server id {server.name!r} can't be the name of a follower: take at most "
            f"{LONGEST_NAME} plain letters, digits and signs"
        )


def _check_ruled(server: LocalServer) -> None:
    """Nobody else may say what gate and driver change while the server runs (F10, F12)."""
    path = server.data / AUTO_FILE
    auto = names_in(path.read_text(errors="replace")) if path.exists() else []
    given = command_settings(server.command)
    for name in CHANGED:
        if name in auto:
            raise ConfigError(
                f"{path} sets {name}, and would win over Domicile, which changes it: remove the "
                f"line while the server is down, or ALTER SYSTEM RESET {name}"
            )
        if name in given:
            raise ConfigError(
                f"server.command sets {name}, and would win over Domicile, which changes it: "
                "remove it from the command"
            )


async def _check_settings(server: LocalServer, mode: Mode) -> list[str]:
    """What the server would start with, asked of its own program: it may be down."""

    given = command_settings(server.command)

    async def setting(name: str) -> str:
        if name in given and name not in RULED:
            return given[name]
        said = await server.run("postgres", "-D", str(server.data), *server.ruled(), "-C", name)
        return said.strip()

    where = f"Write it into {server.own_config()}"

    def refuse(name: str, found: str, needed: str, why: str) -> ConfigError:
        return ConfigError(f"{name} is {found}: {why}. {where}: {name} = {needed}")

    level = await setting("wal_level")
    if level not in ("replica", "logical"):
        raise refuse("wal_level", level, "replica", "nobody could follow this server")
    for name, least in (("max_wal_senders", 3), ("max_replication_slots", 2)):
        value = await setting(name)
        if int(value) < least:
            raise refuse(
                name, value, "10", f"each follower and each copy needs one, {least} is few"
            )
    hints = await setting("wal_log_hints")
    if hints != "on" and (await server.control())["Data page checksum version"] == "0":
        raise refuse("wal_log_hints", hints, "on", "pg_rewind could not bring an old primary back")
    warnings: list[str] = []
    for name in ("fsync", "full_page_writes"):
        value = await setting(name)
        if value != "on":
            raise refuse(name, value, "on", "a crash would leave data that nobody may follow")
    commit = await setting("synchronous_commit")
    if commit in WEAK_COMMITS:
        if mode == "sync":
            raise refuse(
                "synchronous_commit", commit, "on",
                "clients would get an answer before a replica has their write",
            )  # fmt: skip
        if commit == "off":
            warnings.append(
                "synchronous_commit is off: a crash of the primary loses what it has acknowledged "
                "within the last moments, and no receipt can count that"
            )
    return warnings


async def _check_login(server: LocalServer, mode: Mode) -> list[str]:
    """If the server runs: whether it takes the role, and whether the role may do what it must.

    Warnings, as far as only the running server knows.
    """
    if server.postmaster() is None:
        return []
    try:
        async with server.session("agent") as session:
            able = await session.fetchval("SELECT rolsuper FROM pg_roles WHERE rolname = user")
            weak = await session.fetch(WEAKER, list(WEAK_COMMITS))
    except ServerRefused as refused:
        if refused.forbidden:
            given = "the password" if server.login.password else "server.password_file, not set,"
            raise ConfigError(
                f"the server refuses the role {server.login.user!r} of its url: {refused}; look at "
                f"{given} and at pg_hba.conf. A role is made before the first start: "
                "docs/how-to/replica-group-of-postgresql.md"
            ) from refused
        return []
    except (OSError, TimeoutError):
        return []
    if not able:
        raise ConfigError(
            f"the role {server.login.user!r} may not promote, rewind and end sessions: "
            f'ALTER ROLE "{server.login.user}" SUPERUSER, and let nobody else use it'
        )
    if mode == "async":
        return []
    return [
        f"synchronous_commit is {one['value']} for {one['whom']}: their clients get an answer "
        "before a replica has the write, and a failover may lose it"
        for one in weak
    ]
