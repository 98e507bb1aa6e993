"""NATS: request and reply through nats-server; one-way messages are published."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nats
from nats.aio.msg import Msg

from proving.benchmarks.caller import PAYLOAD, Arrivals, Caller

LIMIT_S = 60.0
NO_LIMIT = -1
"""Of messages and bytes that wait for a subscription: nothing is dropped."""


class Requests(Caller):
    """One connection for all."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def ask(self, number: int) -> None:
        """A request of its own."""
        await self._connection.request("echo", PAYLOAD, timeout=LIMIT_S)

    async def begin(self, part: int) -> int:
        """How many the responder has seen."""
        return int((await self._connection.request("count", b"", timeout=LIMIT_S)).data)

    async def send(self, first: int, count: int) -> None:
        """Publish."""
        for _ in range(count):
            await self._connection.publish("note", PAYLOAD)

    async def confirm(self, total: int) -> None:
        """A request that is answered once so many have come."""
        await self._connection.request("reach", b"%d" % total, timeout=LIMIT_S)


@asynccontextmanager
async def broker() -> AsyncGenerator[str]:
    """A nats-server on a port of its own choice."""
    with TemporaryDirectory(prefix="bench-nats-") as place:
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("nats-server")),
            *("--addr", "127.0.0.1", "--port", "-1", "--ports_file_dir", place),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            written = Path(place) / f"nats-server_{process.pid}.ports"
            async with asyncio.timeout(20.0):
                while not (written.exists() and written.read_text("utf-8").endswith("}")):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            found = written.read_text(encoding="utf-8")
            yield found[found.index("nats://") :].split('"')[0]
        finally:
            process.terminate()
            await process.wait()


@asynccontextmanager
async def server(options: dict[str, Any]) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """The broker, and a process that answers."""
    arrivals = Arrivals()

    async def echo(message: Msg) -> None:
        await message.respond(message.data)

    async def note(message: Msg) -> None:
        arrivals.note()

    async def count(message: Msg) -> None:
        await message.respond(b"%d" % arrivals.count)

    async def reach(message: Msg) -> None:
        await arrivals.reach(int(message.data))
        await message.respond(b"")

    async with broker() as where:
        connection = await nats.connect(where)
        for subject, heard in (("echo", echo), ("note", note), ("count", count), ("reach", reach)):
            await connection.subscribe(
                subject, cb=heard, pending_msgs_limit=NO_LIMIT, pending_bytes_limit=NO_LIMIT
            )
        await connection.flush()
        try:
            yield where, {}
        finally:
            await connection.close()


@asynccontextmanager
async def client(options: dict[str, Any]) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """Another connection to that broker."""
    connection = await nats.connect(options["where"])
    try:
        requests = Requests(connection)
        await requests.ask(0)
        yield options["where"], {"nats": requests}
    finally:
        await connection.close()


PARTS = {"server": server, "client": client}
