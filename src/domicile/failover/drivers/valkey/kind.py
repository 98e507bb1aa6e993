"""Valkey and Redis as kinds of databases. Implements `DatabaseKind`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from domicile.errors import ConfigError
from domicile.failover.database_kinds import Mode, ServerPlace
from domicile.failover.driver import ReplicaDriver, ServerGate, ServerProcess
from domicile.failover.drivers.child_process import ChildProcess
from domicile.failover.drivers.valkey.driver import ValkeyDriver
from domicile.failover.drivers.valkey.gate import ValkeyGate, fence_the_start, listens_at
from domicile.failover.drivers.valkey.pause_probe import QUESTION
from domicile.failover.drivers.valkey.server import DEAD_ADDRESS, PasswordRefused, ValkeyServer

PROVED = {"redis": "7.0", "valkey": "9.1"}
"""The versions on which the contract of drivers runs."""

OLDEST = (6, 2)
"""The first version of Redis that can hold back writes alone."""

STARTED = (
    "--daemonize", "no", "--supervised", "no",
    "--replica-read-only", "yes", "--replicaof", *DEAD_ADDRESS,
)  # fmt: skip
"""What a command ends with, whatever its file says: the guard's own child (F2), fenced (F3)."""

FORBIDDEN = ("no permissions", "unknown command")
"""What a server answers where a command is not permitted, or renamed."""


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
            try:
                info = await server.info()
            except PasswordRefused as error:
                raise ConfigError(
                    f"{error}: correct server.password_file, or the user in server.url"
                ) from error
            except (OSError, TimeoutError):
                return ()
            name = str(info.get("server_name", "redis"))
            version = str(info.get(f"{name}_version", info.get("redis_version", "?")))
            await self._refuse_what_hides_its_fence(server, info, f"{name} {version}")
        finally:
            await server.close()
        if not place.command:
            file = str(info.get("config_file", ""))
            try:
                fence_the_start_of(file)
            except ConnectionError as error:
                raise ConfigError(str(error)) from error
        if version.startswith(f"{PROVED.get(name, 'none')}."):
            return ()
        proved = " and ".join(f"{one.capitalize()} {number}" for one, number in PROVED.items())
        return (f"the server is {name} {version}; this driver is proved on {proved}",)

    async def _refuse_what_hides_its_fence(
        self, server: ValkeyServer, info: Mapping[str, Any], what: str
    ) -> None:
        """F1: a server must show whether it holds writes back."""
        redis = str(info.get("redis_version", "0.0")).split(".")
        if (int(redis[0]), int(redis[1])) < OLDEST:
            raise ConfigError(
                f"the server is {what}, which can't hold writes back: use Redis 6.2 or newer, or "
                "Valkey"
            )
        if "paused_actions" in info:
            return
        for words in (QUESTION, ("CLIENT", "ID"), ("CLIENT", "LIST", "ID", "1")):
            try:
                await server.ask(*words)
            except ConnectionError as error:
                if any(one in str(error) for one in FORBIDDEN):
                    raise ConfigError(
                        f"the server is {what}, and {' '.join(words[:2])} is not permitted to "
                        f"{server.user or 'default'!r}: it shows whether writes are held back. "
                        f"Permit it ({error})"
                    ) from error

    def driver(self, place: ServerPlace, mode: Mode) -> ReplicaDriver:
        """As `DatabaseKind.driver`."""
        return ValkeyDriver(place.url, place.folder, place.answer_s)

    def gate(self, place: ServerPlace, mode: Mode) -> ServerGate:
        """As `DatabaseKind.gate`."""
        return ValkeyGate(place.url, place.folder, writes_config=not place.command)

    def process(self, place: ServerPlace) -> ServerProcess | None:
        """As `DatabaseKind.process`. The server starts as a replica of the dead address (F3)."""
        if not place.command:
            return None
        return ValkeyProcess(place)


class ValkeyProcess(ChildProcess):
    """One server. It never takes another server at its address for its own."""

    def __init__(self, place: ServerPlace) -> None:
        self._server = ValkeyServer(place.url)
        super().__init__(
            [*place.command, *STARTED], log=place.folder / "server.log", ready=self._answers
        )

    async def start(self) -> None:
        """As `ServerProcess.start`."""
        if self.pid is None and (who := await self.stranger()):
            raise ConnectionError(f"{who}: stop it, or give this server another address")
        await super().start()

    async def stranger(self) -> str:
        """As `ServerProcess.stranger`."""
        at = f"{self._server.host}:{self._server.port}"
        try:
            pid = int((await self._server.info())["process_id"])
        except PasswordRefused:
            return "" if self.pid else f"a server that refuses the password answers at {at} already"
        except (OSError, TimeoutError):
            return ""
        return "" if self.started(pid) else f"process {pid} answers at {at} already"

    async def _answers(self) -> bool:
        info = await listens_at(self._server)
        return info is not None and self.started(int(info["process_id"]))


def fence_the_start_of(file: str) -> None:
    """As `fence_the_start`, for the file that a server names; `ConnectionError` if it has none."""
    if not file:
        raise ConnectionError(
            "the server was started without a configuration file, so a restart would not come up "
            "fenced: start it with one, or give its command to Domicile"
        )
    fence_the_start(Path(file))
