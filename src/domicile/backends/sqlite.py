"""`sqlite:///file.db`: store and journal of the processes of one machine, with their locks (L6).

The registry calls it. The journal (`file.db.journal`) and a directory with the locks are next to
the store's file. Nothing here opens any of them.
"""

from __future__ import annotations

from pathlib import Path

from domicile.backends.registry import Backend, OpenOptions
from domicile.core.state.keys import CLIENTS
from domicile.errors import ConfigError
from domicile.membership.clock import SystemClock
from domicile.ports.health import Health
from domicile.ports.journal import Journal
from domicile.ports.store import Store
from domicile.stores.commit_log import QueuedCommit
from domicile.stores.file_locks import FileLocks


def sqlite_url(path: Path) -> str:
    """The URL of the embedded store in a file."""
    return f"sqlite:///{path}"


class SqliteBackend(Backend):
    """SQLite files that the processes of one machine share."""

    scheme = "sqlite"
    stores = "sqlite:///path/to/file.db (many processes of one machine)"
    journals = "sqlite:///path/to/file.db.journal (many processes of one machine)"
    reach = "machine"

    def check_url(self, url: str) -> None:
        """As `Backend.check_url`."""
        self.sqlite_file(url)

    def similar(self, rest: str) -> str:
        """As `Backend.similar`: a relative path stays relative."""
        return f"{self.scheme}:///{rest.removeprefix('/')}"

    def open_store(self, url: str, options: OpenOptions) -> Store:
        """As `Backend.open_store`."""
        # Here, because SQLite takes long to import and other stores do not need it.
        from domicile.stores.sqlite.store import SqliteStore

        cluster = options.cluster
        return SqliteStore(
            self.sqlite_file(url),
            by=options.by,
            op_timeout_s=options.op_timeout_s,
            meter=options.meter,
            unhurried=f"{cluster}/".encode() + CLIENTS if cluster else b"",
            reads_only=options.reads_only,
        )

    def missing(self, url: str) -> str | None:
        """As `Backend.missing`: opening a missing file would create it."""
        path = self.sqlite_file(url)
        if path.is_dir():
            return f"{path} is a directory; name the store's file, as in {url}/dev.db"
        if not path.exists() or not path.stat().st_size:
            return (
                f"there is no store at {path} (looked in {Path.cwd()}): start a node with it "
                "first, as in `domicile run app:node`, or an agent of a replica group, as in "
                "`domicile replica run FILE.toml`; or name another"
            )
        return None

    def health(self, url: str, options: OpenOptions) -> Health | None:
        """As `Backend.health`: the locks next to the file."""
        path = self.sqlite_file(url)
        return FileLocks(path.with_name(path.name + ".d"))

    def default_journal(self, url: str) -> str | None:
        """As `Backend.default_journal`: a file of its own, so that no renewal waits for events."""
        path = self.sqlite_file(url)
        return sqlite_url(path.with_name(path.name + ".journal"))

    def open_journal(self, url: str, options: OpenOptions) -> Journal:
        """As `Backend.open_journal`."""
        from domicile.journals.sqlite.journal import SqliteJournal  # late, as above

        return SqliteJournal(
            self.sqlite_file(url), options.cluster, wait_s=options.op_timeout_s,
            lives=options.lives, ttl_s=options.ttl_s, reads_only=options.reads_only,
            serves=options.serves, now=SystemClock().now,
        )  # fmt: skip

    def copy_journal(self, url: str, to: str) -> None:
        """As `Backend.copy_journal`."""
        from domicile.journals.sqlite.inspection import copy_journal_file  # late, as above

        copy_journal_file(self.sqlite_file(url), self.sqlite_file(to))

    def commits(self, url: str, after: int) -> list[QueuedCommit] | None:
        """As `Backend.commits`: none as long as the file is missing."""
        from domicile.stores.sqlite.store import commits  # late, as above

        path = self.sqlite_file(url)
        return [one for one in commits(path) if one.revision > after] if path.exists() else []

    def sqlite_file(self, url: str) -> Path:
        """As `Backend.sqlite_file`; four slashes begin an absolute path."""
        path = url.removeprefix(f"{self.scheme}://")
        if not path.startswith("/") or len(path) < 2 or path.endswith("/"):
            raise ConfigError(
                f"{url!r} names no file: write {self.scheme}:///relative/file.db or "
                f"{self.scheme}:////absolute/file.db, or memory://name for one process"
            )
        return Path(path[1:])


SQLITE = SqliteBackend()
