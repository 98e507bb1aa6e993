"""One cluster of real processes on a Valkey server: it serves, loses a process, serves on."""

from __future__ import annotations

import asyncio
import os

from redis_lab import server

from domicile import Entity, Settings, handler
from domicile.testing import Processes


class Bell(Entity, name="smoke.bell"):
    """Says in which process it rings."""

    @handler
    async def ring(self) -> int:
        return os.getpid()


async def a_process_is_killed(store: str) -> None:
    settings = Settings(shards=8, ttl_s=3.0, ask_timeout_s=60.0)
    async with Processes([Bell], nodes=2, settings=settings, store=store) as cluster:
        bell = cluster.ref(Bell, "b")
        before, home = await bell.ask(Bell.ring), cluster.owner(Bell, "b")
        cluster.crash(home)
        await cluster.wait_until(
            lambda: cluster.settled() and cluster.owner(Bell, "b") != home, timeout_s=60.0
        )
        assert await bell.ask(Bell.ring) != before


def test_a_killed_process_is_replaced() -> None:
    with server() as process:
        asyncio.run(a_process_is_killed(process.url))
