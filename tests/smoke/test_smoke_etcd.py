"""Two nodes and a client of real processes on an etcd server: a process dies, its shards move."""

from __future__ import annotations

import asyncio
import os

from etcd_lab import shared_server

from domicile import Entity, Settings, handler
from domicile.testing import Processes


class Tally(Entity, name="smoke.etcd.tally"):
    """Counts, and says in which process."""

    def __init__(self) -> None:
        self.total = 0

    @handler
    async def add(self) -> tuple[int, int]:
        self.total += 1
        return self.total, os.getpid()


async def a_process_is_killed(store: str) -> None:
    settings = Settings(shards=8, ttl_s=3.0, ask_timeout_s=60.0)
    async with Processes([Tally], nodes=2, settings=settings, store=store) as cluster:
        ids = [f"t{n}" for n in range(8)]

        def both_have_some() -> bool:
            return {cluster.owner(Tally, id) for id in ids} == {0, 1} and cluster.settled()

        await cluster.wait_until(both_have_some, timeout_s=60.0)
        first = {id: await cluster.ref(Tally, id).ask(Tally.add) for id in ids}
        homes = {id: cluster.owner(Tally, id) for id in ids}
        cluster.crash(0)
        await cluster.wait_until(cluster.settled, timeout_s=60.0)
        for id in ids:
            total, pid = await cluster.ref(Tally, id).ask(Tally.add)
            assert total == (1 if homes[id] == 0 else 2)
            assert (pid == first[id][1]) == (homes[id] == 1)


def test_a_killed_process_is_replaced() -> None:
    asyncio.run(a_process_is_killed(shared_server().url("smoke")))
