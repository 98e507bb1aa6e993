"""One cluster of real processes on the embedded store: it serves, loses a process, serves on.

What else real processes must show is in `tests/real`; this one runs with every `make test`.
"""

from __future__ import annotations

import asyncio
import os

from domicile import Entity, Settings, handler
from domicile.testing import Processes, check


class Counter(Entity, name="smoke.counter"):
    """Counts, and says in which process."""

    def __init__(self) -> None:
        self.total = 0

    @handler
    async def add(self) -> tuple[int, int]:
        self.total += 1
        return self.total, os.getpid()


async def a_process_is_killed() -> None:
    settings = Settings(shards=16, ask_timeout_s=60.0)
    async with Processes([Counter], nodes=2, settings=settings) as cluster:
        ids = [f"c{n}" for n in range(16)]

        def both_have_some() -> bool:
            owners = {cluster.owner(Counter, id) for id in ids}
            return owners == {0, 1} and cluster.settled()

        await cluster.wait_until(both_have_some, timeout_s=60.0)
        first = {id: await cluster.ref(Counter, id).ask(Counter.add) for id in ids}
        homes = {id: cluster.owner(Counter, id) for id in ids}
        assert {total for total, _ in first.values()} == {1}
        cluster.crash(0)
        await cluster.wait_until(cluster.settled, timeout_s=60.0)
        for id in ids:
            total, pid = await cluster.ref(Counter, id).ask(Counter.add)
            lost = homes[id] == 0
            assert total == (1 if lost else 2), "memory goes with its process, and only with it"
            assert (pid == first[id][1]) != lost
    assert check(cluster.history()) == []


def test_a_killed_process_is_replaced() -> None:
    asyncio.run(a_process_is_killed())
