"""Valkey and Redis as kinds of databases. Implements `DatabaseKind`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from domicile.errors import ConfigError
from domicile.failover.database_kinds import Mode, ServerPlace
from domicile.failover.driver import ReplicaDriver, ServerGate, ServerProcess
from domicile.failover.drivers.child_process import ChildProcess
from domicile.failover.drivers.valkey.driver import ValkeyDriver
from domicile.failover.drivers.valkey.gate import ValkeyGate, fence_the_start, listens_at
from domicile.failover.drivers.valkey.server import DEAD_ADDRESS, ValkeyServer

PROVED = "9.1"
"""The version of Valkey on which the contract of drivers runs."""


class ValkeyKind:
    """Servers that speak Redis's protocol of replication. Asynchronous mode only."""

    name: ClassVar[str] = "valkey"
    modes: ClassVar[tuple[Mode, ...]] = ("async",)
    options: ClassVar[tuple[str, ...]] = ()

    async def check(self, place: ServerPlace, mode: Mode) -> tuple[str, ...]:
        """As `DatabaseKind.check`."""
        if mode not in self.modes:
            raise ConfigError(
                "Valkey and Redis have no synchronous mode: the server answers its clients before "
                "any replica has the write. Use mode = 'async'"
            )
        if place.options:
            raise ConfigError(
                f"the kind {self.name!r} has no option {next(iter(place.options))!r}: remove it"
            )
        if place.data is not None:
            raise ConfigError(
                "a Valkey server's data directory is in its own configuration: remove `data`"
            )
        server = ValkeyServer(place.url)
        try:
            info = await listens_at(server)
        finally:
            await server.close()
        if info is None:
            return ()
        if not place.command:
            file = str(info.get("config_file", ""))
            try:
                fence_the_start_of(file)
            except ConnectionError as error:
                raise ConfigError(str(error)) from error
        name = str(info.get("server_name", "redis"))
        version = str(info.get(f"{name}_version", info.get("redis_version", "?")))
        if name == "valkey" and version.startswith(f"{PROVED}."):
            return ()
        return (f"the server is {name} {version}; this driver is proved on Valkey {PROVED} only",)

    def driver(self, place: ServerPlace, mode: Mode) -> ReplicaDriver:
        """As `DatabaseKind.driver`."""
        return ValkeyDriver(place.url, place.folder)

    def gate(self, place: ServerPlace, mode: Mode) -> ServerGate:
        """As `DatabaseKind.gate`."""
        return ValkeyGate(place.url, place.folder, writes_config=not place.command)

    def process(self, place: ServerPlace) -> ServerProcess | None:
        """As `DatabaseKind.process`. The server starts as a replica of the dead address (F3)."""
        if not place.command:
            return None
        server = ValkeyServer(place.url)

        async def ready() -> bool:
            return await listens_at(server) is not None

        return ChildProcess(
            [*place.command, "--replicaof", *DEAD_ADDRESS], log=place.folder / "server.log",
            ready=ready,
        )  # fmt: skip


def fence_the_start_of(file: str) -> None:
    """As `fence_the_start`, for the file that a server names; `ConnectionError` if it has none."""
    if not file:
        raise ConnectionError(
            "the server was started without a configuration file, so a restart would not come up "
            "fenced: start it with one, or give its command to Domicile"
        )
    fence_the_start(Path(file))
