"""How a guard opens and closes a Valkey or Redis server. Implements `ServerGate`.

It runs in the guard's process and has connections of its own. Closing is one transaction on one
connection: the pause comes first, then every other session ends, also one of ours on which an order
to open may be under way. So no such order takes effect after the server was closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from domicile.failover.drivers.valkey.server import (
    ANSWER_S,
    DEAD_ADDRESS,
    FOR_EVER_MS,
    OpenedNote,
    ValkeyServer,
    write_opened,
)
from domicile.failover.records import WriteQuorum

FENCED_START = ("replica-read-only yes", f"replicaof {DEAD_ADDRESS[0]} {DEAD_ADDRESS[1]}")
"""The last lines of a configuration file by which a server starts fenced (F3)."""


class ValkeyGate:
    """One server. `writes_config`: somebody else starts it, so its file must have it fenced."""

    def __init__(self, url: str, folder: Path, *, writes_config: bool = False) -> None:
        self._server = ValkeyServer(url)
        self._folder, self._writes_config = folder, writes_config

    async def process_id(self, run: str) -> int:
        """As `ServerGate.process_id`."""
        info = await self._server.info()
        _check_run(info, run)
        return int(info["process_id"])

    async def unlock(self, epoch: int, run: str, quorum: WriteQuorum | None) -> None:
        """As `ServerGate.unlock`."""
        if quorum is not None:
            raise ConnectionError("this server can't wait for a quorum: it has no synchronous mode")
        info = await self._server.info()
        if info["role"] != "master":
            raise ConnectionError("the server is a replica; it is not opened")
        _check_run(info, run)
        if self._writes_config:
            await asyncio.to_thread(fence_the_start, Path(str(info["config_file"])))
        await asyncio.to_thread(write_opened, self._folder, OpenedNote(run, epoch))
        await self._server.ask("CLIENT", "UNPAUSE")

    async def lock(self) -> None:
        """As `ServerGate.lock`."""
        try:
            await self._server.together(
                ("CLIENT", "PAUSE", FOR_EVER_MS, "WRITE"),
                ("CLIENT", "KILL", "TYPE", "normal"),
                ("CLIENT", "KILL", "TYPE", "pubsub"),
            )
        except ConnectionError:
            if await self._listens():
                raise

    async def close(self) -> None:
        """Let go of connections."""
        await self._server.close()

    async def _listens(self) -> bool:
        """Whether anybody takes connections at the server's address: nobody does if it is gone."""
        try:
            async with asyncio.timeout(ANSWER_S):
                _, writer = await asyncio.open_connection(self._server.host, self._server.port)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        writer.close()
        return True


def fence_the_start(file: Path) -> None:
    """Let a server's configuration file end with the lines that start it fenced. Blocks.

    `ConnectionError` if that can't be. The server itself never writes the file, so they stay.
    """
    try:
        text = file.read_text()
        last = [line.strip() for line in text.rstrip().splitlines()[-len(FENCED_START) :]]
        if last == list(FENCED_START):
            return
        new = file.with_name(f"{file.name}.new")
        new.write_text("\n".join((text.rstrip(), *FENCED_START, "")))
        new.chmod(file.stat().st_mode)
        new.replace(file)
    except OSError as error:
        raise ConnectionError(
            f"the server's configuration file {str(file)!r} can't be made to start it fenced: "
            f"{error.strerror}. Start the server with a file that this process may write, or give "
            "its command to Domicile"
        ) from error


def _check_run(info: Mapping[str, Any], run: str) -> None:
    if info["run_id"] != run:
        raise ConnectionError(f"the server restarted: its run is {info['run_id']}, not {run}")


async def listens_at(server: ValkeyServer) -> dict[str, Any] | None:
    """What a server that may be down tells about itself; None if it does not answer."""
    try:
        return dict(await server.info())
    except (OSError, TimeoutError):
        return None
