"""Smoke: two real nodes and a client on PostgreSQL; one is killed, and the other serves on.

What else real processes must show is in `tests/real`; this one runs with every `make test`.
"""

from __future__ import annotations

import asyncio
import os

from postgres_lab import shared_server

from domicile import Entity, Settings, handler
from domicile.testing import Processes, check


class Meter(Entity, name="smoke.meter"):
    """Counts, and says in which process."""

    def __init__(self) -> None:
        self.total = 0

    @handler
    async def add(self) -> tuple[int, int]:
        self.total += 1
        return self.total, os.getpid()


async def a_process_is_killed(store: str) -> None:
    settings = Settings(shards=16, ttl_s=3.0, ask_timeout_s=60.0)
    async with Processes([Meter], nodes=2, settings=settings, store=store) as cluster:
        ids = [f"m{n}" for n in range(16)]

        def both_have_some() -> bool:
            owners = {cluster.owner(Meter, id) for id in ids}
            return owners == {0, 1} and cluster.settled()

        await cluster.wait_until(both_have_some, timeout_s=60.0)
        first = {id: await cluster.ref(Meter, id).ask(Meter.add) for id in ids}
        homes = {id: cluster.owner(Meter, id) for id in ids}
        assert {total for total, _ in first.values()} == {1}
        cluster.crash(0)
        await cluster.wait_until(cluster.settled, timeout_s=60.0)
        for id in ids:
            total, pid = await cluster.ref(Meter, id).ask(Meter.add)
            lost = homes[id] == 0
            assert total == (1 if lost else 2), "memory goes with its process, and only with it"
            assert (pid == first[id][1]) != lost
    assert check(cluster.history()) == []


def test_a_killed_process_is_replaced() -> None:
    asyncio.run(a_process_is_killed(shared_server().new_database()))
