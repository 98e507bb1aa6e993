"""The stores that benchmarks compare: each with a server of its own, and what that was asked.

The embedded store has no server: its clients count their calls, and a file takes the place of the
URL. Servers run with their defaults, and with each write forced onto the disk.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import asyncpg

from domicile.backends.sqlite import sqlite_url
from proving.benchmarks.processes import cpu_s
from proving.chaos.server import NO_SERVER, SERVERS, StoreServer
from proving.etcd_server import EtcdServer
from proving.postgres_server import PostgresServer
from proving.redis_server import RedisProcess

STORES = ("sqlite", *SERVERS)
TITLES = {"sqlite": "SQLite", "postgresql": "PostgreSQL", "etcd": "etcd", "redis": "Redis/Valkey"}
ABSENT = NO_SERVER
"""What is raised where a server can't be started."""

ASKED = ("eval", "evalsha", "eval_ro", "evalsha_ro", "xread")
"""The commands that a client of the Redis store sends; a script's own ones are none."""

_RECEIVED = re.compile(r"^grpc_server_msg_received_total\{.*\} (\S+)$", re.MULTILINE)


class StorePlace:
    """An empty store, and its server if it has one."""

    def __init__(self, name: str, url: str, home: Path, server: StoreServer | None) -> None:
        self.name, self.url, self.home, self.server = name, url, home, server

    def asked(self) -> int | None:
        """How many requests the server got so far; None if only clients can tell."""
        match self.server:
            case PostgresServer():
                return asyncio.run(_transactions(self.url))
            case EtcdServer(metrics_port=port):
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                    text = answer.read().decode()
                return sum(int(float(found)) for found in _RECEIVED.findall(text))
            case RedisProcess() as server:
                told = cast("dict[str, Any]", server.ask("INFO", "commandstats"))
                return sum(
                    int(told.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in ASKED
                )
            case None:
                return None

    def cpu_s(self) -> float | None:
        """What the server has used of processors so far."""
        return None if self.server is None else sum(map(cpu_s, self.server.pids()))


async def _transactions(url: str) -> int:
    """Each call of the store is a transaction; those of this function are not counted."""
    other = f"{url.rpartition('/')[0]}/postgres"
    connection = await asyncpg.connect(other)
    try:
        found = await connection.fetchval(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = $1",
            url.rpartition("/")[2],
        )
        return int(found)
    finally:
        await connection.close()


@contextmanager
def store_place(name: str, parent: Path | None = None) -> Generator[StorePlace]:
    """A new store of that name; its server is stopped and its files are gone afterwards."""
    if name not in SERVERS:
        with tempfile.TemporaryDirectory(prefix="domicile-bench-", dir=parent) as made:
            yield StorePlace(name, sqlite_url(Path(made) / "store.db"), Path(made), None)
        return
    server = EtcdServer(hasty=False) if name == "etcd" else SERVERS[name]()
    try:
        server.start()
        url = server.url("bench") if isinstance(server, EtcdServer) else server.new_database()
        yield StorePlace(name, url, server.home, server)
    finally:
        server.stop()
