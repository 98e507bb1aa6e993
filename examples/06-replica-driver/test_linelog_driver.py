"""The contract of all drivers, on two real servers of the toy database."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import linelog
from linelog_driver import LineDriver, LineGate

from domicile.testing.suites.replica_driver import ReplicaDriverContract

PROGRAM = str(Path(linelog.__file__))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LineServers:
    """Two servers, and what the contract does to them."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._ports = [free_port(), free_port()]
        self._drivers = [LineDriver(self.address(n), home / f"saved-{n}") for n in (0, 1)]
        self._gates = [LineGate(self.address(n)) for n in (0, 1)]
        self._processes: list[subprocess.Popen[bytes] | None] = [None, None]

    def driver(self, number: int) -> LineDriver:
        return self._drivers[number]

    def address(self, number: int) -> str:
        return f"127.0.0.1:{self._ports[number]}"

    async def unlock(self, number: int, epoch: int) -> None:
        run = (await self._drivers[number].look()).run
        await self._gates[number].unlock(epoch, run, None)

    async def lock(self, number: int) -> None:
        await self._gates[number].lock()

    async def write(self, number: int, value: str) -> bool:
        return await self.write_in(await self.session(number), value)

    async def session(self, number: int) -> Any:
        return await asyncio.open_connection("127.0.0.1", self._ports[number])

    async def write_in(self, session: Any, value: str) -> bool:
        reader, writer = session
        try:
            writer.write(f"APPEND {value}\n".encode())
            return b"offset" in await reader.readline()
        except OSError:
            return False

    async def has(self, number: int, value: str) -> bool:
        return value in (await linelog.ask(self.address(number), "READ"))["lines"]

    async def crash(self, number: int) -> None:
        process = self._processes[number]
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)
            self._processes[number] = None

    async def start(self, number: int) -> None:
        command = [sys.executable, PROGRAM, str(self._ports[number]), str(self._home / str(number))]
        self._processes[number] = await asyncio.to_thread(subprocess.Popen, command)
        while not (await self._drivers[number].look()).up:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


class TestLineDriver(ReplicaDriverContract):
    @asynccontextmanager
    async def open(self) -> AsyncIterator[LineServers]:
        with tempfile.TemporaryDirectory() as home:
            servers = LineServers(Path(home))
            try:
                for number in (0, 1):
                    await servers.start(number)
                yield servers
            finally:
                for number in (0, 1):
                    await servers.crash(number)
