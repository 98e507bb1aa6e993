"""An installed package with a backend of its own, for tests: files as pip would leave them."""

from __future__ import annotations

from pathlib import Path

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
