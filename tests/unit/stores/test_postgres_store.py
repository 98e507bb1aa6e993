"""The PostgreSQL store, on a server of the test run's own: the contract, and what only it does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from postgres_lab import shared_server
from postgres_store_lab import PostgresStores, lab

from domicile.testing.suites.store import StoreContract


@pytest.fixture(autouse=True)
def _server() -> None:
    shared_server()


class TestPostgresStore(StoreContract):
    # Time is advanced exactly, so a long ttl only means that a slow machine ends no lease.
    ttl_s = 600.0
    patience_s = 120.0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[PostgresStores]:
        async with lab(shared_server()) as stores:
            yield stores
