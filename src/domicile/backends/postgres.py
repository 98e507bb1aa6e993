"""`postgresql://user@host/database`: a journal for nodes on many machines.

The registry calls it. It needs asyncpg, which the extra `domicile[postgres]` installs; nothing here
imports it before a journal is opened.
"""

from __future__ import annotations

from domicile.backends.registry import Backend, OpenOptions, shown_url
from domicile.membership.clock import SystemClock
from domicile.ports.journal import Journal


class PostgresBackend(Backend):
    """Tables of a PostgreSQL database; each cluster has a schema of its own."""

    scheme = "postgresql"
    journals = "postgresql://user@host/database (nodes of many machines)"
    needs = ("asyncpg",)
    install = "domicile[postgres]"

    def open_journal(self, url: str, options: OpenOptions) -> Journal:
        """As `Backend.open_journal`."""
        # Imported late: asyncpg is an extra, and its import takes time.
        from domicile.journals.postgres.journal import PostgresJournal

        return PostgresJournal(
            url, options.cluster, SystemClock(), shown=shown_url(url),
            wait_s=options.op_timeout_s, reads_only=options.reads_only,
        )  # fmt: skip


POSTGRES = PostgresBackend()
