"""Backends for tests: servers of stores by name, and an installed package with one of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from etcd_lab import scenario_server
from postgres_lab import shared_server
from redis_lab import shared as scenario_redis


class StoreServer(Protocol):
    """The server of a store, for scenarios on real processes; `shared` in one test process."""

    port: int

    def new_database(self) -> str:
        """The URL of an empty store."""
        ...

    def behind(self, url: str, port: int) -> str:
        """The same store, asked through a proxy at a port of 127.0.0.1."""
        ...

    def kill(self) -> None:
        """SIGKILL."""
        ...

    def start(self) -> None:
        """Start it again on what it left; returns once it answers."""
        ...

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, and nothing is answered."""
        ...

    def thaw(self) -> None:
        """SIGCONT."""
        ...

    def step_wall(self, url: str, by_s: float) -> None:
        """Step the clock from which a store makes its time."""
        ...


SERVERS: dict[str, Callable[[], StoreServer]] = {
    "postgresql": shared_server,
    "etcd": scenario_server,
    "redis": scenario_redis,
}
"""The server of each store, started at its first use; a call skips the test where there is none."""

WRAPPED = '''
"""The embedded store under another scheme, with nothing beside it that only SQLite has."""

from domicile.backends import Backend, OpenOptions
from domicile.errors import ConfigError
from domicile.ports.store import Store
from domicile.stores.sqlite.store import SqliteStore
from pathlib import Path


class WrappedBackend(Backend):
    scheme = "wrapped"
    stores = "wrapped://path/to/file (a test)"

    def check_url(self, url: str) -> None:
        if not url.removeprefix("wrapped://"):
            raise ConfigError(f"store {url!r} names nothing: write wrapped://path/to/file")

    def open_store(self, url: str, options: OpenOptions) -> Store:
        path = Path(url.removeprefix("wrapped://"))
        return SqliteStore(path, by=options.by, op_timeout_s=options.op_timeout_s)

    def missing(self, url: str) -> str | None:
        path = Path(url.removeprefix("wrapped://"))
        return None if path.exists() else f"nothing is wrapped at {path}"


BACKEND = WrappedBackend()
'''


def installed(
    site: Path, package: str, code: str, scheme: str = "wrapped", name: str = "BACKEND"
) -> None:
    """Put a package into a directory of the import path, with an entry point for a scheme."""
    site.mkdir(parents=True, exist_ok=True)
    (site / f"{package}.py").write_text(code, encoding="utf-8")
    info = site / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8"
    )
    (info / "entry_points.txt").write_text(
        f"[domicile.backends]\n{scheme} = {package}:{name}\n", encoding="utf-8"
    )
