"""The contract of all drivers, on every version of PostgreSQL that it is promised for."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from postgres_group_lab import FOUND, PostgresServers, needs, open_group_servers

from domicile.testing.suites.replica_driver import ReplicaDriverContract


@needs(15)
class TestPostgres15Driver(ReplicaDriverContract):
    patience_s = 300.0

    def open(self) -> AbstractAsyncContextManager[PostgresServers]:
        return open_group_servers(FOUND[15], 2)


@needs(18)
class TestPostgres18Driver(ReplicaDriverContract):
    patience_s = 300.0

    def open(self) -> AbstractAsyncContextManager[PostgresServers]:
        return open_group_servers(FOUND[18], 2)
