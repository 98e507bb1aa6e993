"""`postgresql://user@host/database`: store and journal for nodes on many machines.

The registry calls it. It needs asyncpg, which the extra `domicile[postgres]` installs; nothing here
imports it before a store or a journal is opened.
"""

from __future__ import annotations

from domicile.backends.registry import Backend, OpenOptions, shown_url
from domicile.core.state.keys import CLIENTS
from domicile.membership.clock import SystemClock
from domicile.ports.journal import Journal
from domicile.ports.store import Store
from domicile.stores.commit_log import QueuedCommit


class PostgresBackend(Backend):
    """Tables of a PostgreSQL database: one schema for the store, one for each cluster's journal."""

    scheme = "postgresql"
    stores = "postgresql://user@host/database (nodes of many machines)"
    journals = "postgresql://user@host/database (nodes of many machines)"
    needs = ("asyncpg",)
    install = "domicile[postgres]"

    def open_store(self, url: str, options: OpenOptions) -> Store:
        """As `Backend.open_store`."""
        # Imported late: asyncpg is an extra, and its import takes time.
        from domicile.stores.postgres.store import PostgresStore

        cluster = options.cluster
        return PostgresStore(
            url,
            shown=shown_url(url),
            by=options.by,
            op_timeout_s=options.op_timeout_s,
            meter=options.meter,
            unhurried=f"{cluster}/".encode() + CLIENTS if cluster else b"",
            reads_only=options.reads_only,
            creates=options.creates,
        )

    def commits(self, url: str, after: int) -> list[QueuedCommit] | None:
        """As `Backend.commits`, for a user that owns the tables."""
        from domicile.stores.postgres.commits import stored_commits  # late, as above

        return stored_commits(url, shown_url(url), after, SystemClock().now)

    def default_journal(self, url: str) -> str | None:
        """As `Backend.default_journal`: the same database, in a schema of the cluster's own."""
        return url

    def open_journal(self, url: str, options: OpenOptions) -> Journal:
        """As `Backend.open_journal`."""
        from domicile.journals.postgres.journal import PostgresJournal  # late, as above

        return PostgresJournal(
            url, options.cluster, SystemClock(), shown=shown_url(url),
            wait_s=options.op_timeout_s, reads_only=options.reads_only, serves=options.serves,
        )  # fmt: skip


POSTGRES = PostgresBackend()
