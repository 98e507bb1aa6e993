"""The driver of PostgreSQL on real servers: the contract of all drivers, and its own part."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import pytest
from postgres_group_lab import PostgresServers, open_group_servers, versions

from domicile.testing.suites.replica_driver import ReplicaDriverContract

FOUND = versions()


def needs(version: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(version not in FOUND, reason=f"no PostgreSQL {version} is installed")


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
