"""What one might take instead of durable entities: one INSERT per request, and Restate.

`PARTS` are measured processes, run by `proving.benchmarks.part`. `restate` starts a server of its
own with a service beside it. A peer that cannot be had is a `Missing` with a reason.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import asyncpg

from proving.benchmarks.caller import Caller
from proving.benchmarks.durable_parts import FILLING
from proving.benchmarks.environments import Missing
from proving.benchmarks.part import Options, Part

CONNECTIONS = 100
EVENT = b"x" * 100
REPLY = b"r" * 16
START_S = 60.0
INSTALL_S = 600.0
RESTATE = Path(__file__).resolve().parent / "peers" / "restate"

TABLE = """CREATE TABLE note (
    entity bigint NOT NULL, n bigint GENERATED ALWAYS AS IDENTITY, key text NOT NULL,
    data bytea NOT NULL, reply bytea NOT NULL, PRIMARY KEY (entity, n), UNIQUE (entity, key)
)"""
INSERT = "INSERT INTO note (entity, key, data, reply) VALUES ($1, $2, $3, $4)"


class Inserts(Caller):
    """One INSERT per request, in a transaction of its own."""

    def __init__(self, pool: Any, entities: int) -> None:
        self._pool, self._entities = pool, entities
        self._keys = (f"{os.getpid()}-{number}" for number in count())

    async def ask(self, number: int) -> None:
        """One row, committed."""
        entity = number % self._entities
        async with self._pool.acquire() as connection:
            await connection.execute(INSERT, entity, next(self._keys), EVENT, REPLY)


@asynccontextmanager
async def inserts(options: Options) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """A pool of connections to a database with one table."""
    url = options["where"]
    async with asyncpg.create_pool(url, min_size=CONNECTIONS, max_size=CONNECTIONS) as pool:
        await pool.execute(TABLE)
        yield url, {"inserts": Inserts(pool, options["entities"])}


class Invocations(Caller):
    """Calls of virtual objects by HTTP, each with a key that makes it safe to repeat."""

    def __init__(self, port: int, entities: int) -> None:
        self._port, self._entities = port, entities
        self._free: asyncio.LifoQueue[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        self._free = asyncio.LifoQueue()
        self._keys = (f"{os.getpid()}-{number}" for number in count())
        self._body = json.dumps(FILLING.decode())

    async def open(self) -> None:
        """Connect as often as the plain loop does."""
        for _ in range(CONNECTIONS):
            self._free.put_nowait(await asyncio.open_connection("127.0.0.1", self._port))

    async def ask(self, number: int) -> None:
        """One call of one object."""
        reader, writer = await self._free.get()
        writer.write(
            f"POST /notebook/{number % self._entities}/note HTTP/1.1\r\n"
            f"host: 127.0.0.1:{self._port}\r\ncontent-type: application/json\r\n"
            f"idempotency-key: {next(self._keys)}\r\ncontent-length: {len(self._body)}\r\n\r\n"
            f"{self._body}".encode()
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].partition("\r\n")[0])
        answer = await reader.readexactly(length)
        if not head.startswith("http/1.1 200 "):
            raise RuntimeError(f"{head.splitlines()[0]} {answer.decode(errors='replace')}")
        self._free.put_nowait((reader, writer))

    def close(self) -> None:
        """Close the connections that are free."""
        while not self._free.empty():
            self._free.get_nowait()[1].close()


@asynccontextmanager
async def invocations(options: Options) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """A client of Restate's ingress."""
    caller = Invocations(int(options["where"]), options["entities"])
    await caller.open()
    try:
        yield options["where"], {"invocations": caller}
    finally:
        caller.close()


PARTS: dict[str, Part] = {"inserts": inserts, "invocations": invocations}


class Restate:
    """Where a running Restate is reached, and its processes."""

    def __init__(self, port: int, server: int, service: int) -> None:
        self.port, self.server, self.service = port, server, service


def installed(cache: Path) -> Path:
    """The directory with Restate's packages, made by npm at the first time."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        raise Missing("it is installed by npm and its service runs in Node; neither is here")
    place = cache / "restate"
    stamp = place / ".ready"
    wanted = (RESTATE / "package-lock.json").read_text(encoding="utf-8")
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        place.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(RESTATE / name, place)
        try:
            ran = subprocess.run(
                [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"],
                cwd=place, capture_output=True, text=True, check=False, timeout=INSTALL_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise Missing(f"npm did not end: {error}") from error
        if ran.returncode:
            raise Missing(f"npm can't install it: {ran.stderr.strip()[-300:]}")
        stamp.write_text(wanted, encoding="utf-8")
    shutil.copy(RESTATE / "service.mjs", place)
    return place


@contextmanager
def restate(cache: Path, directory: Path) -> Generator[Restate]:
    """A server with its data in a directory, and the service that it calls."""
    place = installed(cache)
    found = sorted(place.glob("node_modules/@restatedev/restate-server-*/bin/restate-server"))
    if not found:
        raise Missing("its package has no server for this machine")
    node, ingress, admin, service = (_free_port() for _ in range(4))
    env = {
        **os.environ,
        "RESTATE_BASE_DIR": str(directory / "restate"),
        "RESTATE_BIND_ADDRESS": f"127.0.0.1:{node}",
        "RESTATE_INGRESS__BIND_ADDRESS": f"127.0.0.1:{ingress}",
        "RESTATE_ADMIN__BIND_ADDRESS": f"127.0.0.1:{admin}",
        "RESTATE_DISABLE_TELEMETRY": "true",
        "RESTATE_LOG_FILTER": "warn",
        "RESTATE_LOGGING": "ERROR",
    }
    log = directory / "restate.log"
    with log.open("wb") as written:
        running = [
            subprocess.Popen(command, cwd=place, env=env, stdout=written, stderr=written)
            for command in ([str(found[0])], ["node", "service.mjs", str(service)])
        ]
    try:
        _register(admin, service, log)
        yield Restate(ingress, running[0].pid, running[1].pid)
    finally:
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _register(admin: int, service: int, log: Path) -> None:
    """Tell the server of the service, as soon as both are there."""
    body = json.dumps({"uri": f"http://127.0.0.1:{service}"}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{admin}/deployments", body, {"content-type": "application/json"}
    )
    until = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=START_S):
                return
        except (OSError, urllib.error.URLError) as error:
            if time.monotonic() > until:
                said = log.read_text(encoding="utf-8", errors="replace")[-300:]
                raise Missing(f"it does not start: {error}; {said}") from error
            time.sleep(0.1)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port
