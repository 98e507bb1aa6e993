"""The kind `linelog` of replica groups: driver, gate and process of the toy database.

`pyproject.toml` registers `LineKind`. What lives in which process: the driver in the agent's, gate
and process in the guard's.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import linelog

from domicile.errors import ConfigError
from domicile.failover.database_kinds import Mode, ServerPlace
from domicile.failover.driver import (
    ReplicaDriver,
    SavedLoss,
    ServerFacts,
    ServerGate,
    ServerProcess,
)
from domicile.failover.drivers.child_process import ChildProcess
from domicile.failover.records import Resyncs, WriteQuorum

ANSWER_S = 1.0
"""A server that does not answer within this time counts as down."""


async def ask(address: str, *words: object) -> dict[str, Any]:
    """One command; `OSError` or `TimeoutError` if it was not carried out."""
    async with asyncio.timeout(ANSWER_S):
        answer = await linelog.ask(address, " ".join(map(str, words)))
    if "error" in answer:
        raise ConnectionError(f"{address}: {answer['error']}")
    return answer


class LineDriver(ReplicaDriver):
    """One server, for the agent."""

    def __init__(self, address: str, folder: Path) -> None:
        self._address, self._folder = address, folder

    async def look(self) -> ServerFacts:
        try:
            found = await ask(self._address, "INFO")
        except (OSError, TimeoutError):
            return ServerFacts(up=False, why="it does not answer")
        return ServerFacts(
            up=True, run=found["run"], open_epoch=found["open_epoch"], follows=found["follows"],
            offset=found["offset"], empty=not found["offset"], native=found["history"],
            acknowledged=found["confirmed"], resyncs=Resyncs(**found["syncs"]),
        )  # fmt: skip

    async def stand(self) -> None:
        # The server applies what it receives at once, so nothing has to be waited for.
        await ask(self._address, "STAND")

    async def drain(self) -> None:
        await ask(self._address, "DRAIN")

    async def dismiss(self) -> None:
        await ask(self._address, "DISMISS")

    async def save(self, kept: int) -> SavedLoss:
        had = (await ask(self._address, "INFO"))["offset"]
        lines: list[list[str]] = []
        while kept + len(lines) < had:
            begin = kept + len(lines)
            found = await ask(self._address, "ENTRIES", begin, begin + linelog.AT_A_TIME)
            lines += found["entries"]
        path = self._folder / f"lost-{kept}-{had}.jsonl"
        await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
        await asyncio.to_thread(path.write_text, "".join(f"{json.dumps(one)}\n" for one in lines))
        writes = sum(not text.startswith(linelog.MARK) for _, text in lines)
        return SavedLoss(writes, str(path))

    async def follow(self, address: str, kept: int) -> None:
        primary = await ask(address, "INFO")
        if primary["follows"] or not primary["promoted"]:
            raise ConnectionError(f"{address} is no primary: nobody can follow it yet")
        await ask(self._address, "FOLLOW", address, primary["history"], kept)
        while True:
            now = await ask(self._address, "INFO")
            if now["offset"] >= primary["offset"] and now["follows"] == address:
                return
            await asyncio.sleep(linelog.PAUSE_S)

    async def promote(self, epoch: int) -> None:
        await ask(self._address, "PROMOTE", epoch)

    async def close(self) -> None:
        """Each call has a connection of its own."""


class LineGate(ServerGate):
    """The same server, for the guard: it opens and closes it without the agent's help."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def process_id(self, run: str) -> int:
        found = await ask(self._address, "INFO")
        if found["run"] != run:
            raise ConnectionError("the server restarted")
        return int(found["pid"])

    async def unlock(self, epoch: int, run: str, quorum: WriteQuorum | None) -> None:
        await ask(self._address, "OPEN", epoch, run)

    async def lock(self) -> None:
        try:
            await ask(self._address, "CLOSE")
        except ConnectionRefusedError:
            # It does not run, and starts closed.
            return


class LineKind:
    """What `driver = "linelog"` names. Implements `DatabaseKind`."""

    name: ClassVar[str] = "linelog"
    modes: ClassVar[tuple[Mode, ...]] = ("async",)
    options: ClassVar[tuple[str, ...]] = ()

    async def check(self, place: ServerPlace, mode: Mode) -> tuple[str, ...]:
        if mode not in self.modes:
            raise ConfigError("linelog answers before a replica has the line: use mode = 'async'")
        if not place.command:
            raise ConfigError("linelog has no attach mode: write `command` in [server]")
        return ()

    def driver(self, place: ServerPlace, mode: Mode) -> ReplicaDriver:
        return LineDriver(_address(place), place.folder)

    def gate(self, place: ServerPlace, mode: Mode) -> ServerGate:
        return LineGate(_address(place))

    def process(self, place: ServerPlace) -> ServerProcess | None:
        async def ready() -> bool:
            try:
                await ask(_address(place), "INFO")
            except (OSError, TimeoutError):
                return False
            return True

        return ChildProcess(place.command, log=place.folder / "server.log", ready=ready)


def _address(place: ServerPlace) -> str:
    parts = urlsplit(place.url)
    if parts.scheme != "linelog" or not parts.hostname or not parts.port:
        raise ConfigError("the server's url must look like linelog://127.0.0.1:7001")
    return f"{parts.hostname}:{parts.port}"
