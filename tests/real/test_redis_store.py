"""The store on Redis and Valkey: the contract on real servers, and what only it does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis_lab import RedisStores, lab, shared

from domicile.testing.suites.store import StoreContract


class TestRedisStore(StoreContract):
    # Real time passes, too: a slow machine must end no lease.
    ttl_s = 120.0
    patience_s = 60.0
    races = 3

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RedisStores]:
        async with lab(shared()) as stores:
            yield stores
