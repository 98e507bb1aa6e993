"""A smoke test of a store on a server: two real nodes and a client, and one node is killed."""

from __future__ import annotations

import os
from collections import Counter

from domicile import Entity, Settings, handler
from domicile.core.ids import ShardKey
from domicile.testing import Processes, check

SHARDS = 16
SETTINGS = Settings(shards=SHARDS, ttl_s=3.0, ask_timeout_s=60.0)
LIMIT_S = 60.0


class Meter(Entity, name="smoke.meter"):
    """Counts, and says in which process."""

    def __init__(self) -> None:
        self.total = 0

    @handler
    async def add(self) -> tuple[int, int]:
        self.total += 1
        return self.total, os.getpid()


async def a_process_is_killed(store: str, *, judged: bool = False) -> None:
    """Its shards go to the other one; `judged` if the store keeps what checkers read."""
    async with Processes([Meter], nodes=2, settings=SETTINGS, store=store) as cluster:
        ids = [f"m{n}" for n in range(SHARDS)]

        def even() -> bool:
            """Nothing is moved any more: what is in memory stays there."""
            owners = Counter(cluster.entry(ShardKey("default", n)).owner for n in range(SHARDS))
            nodes = [cluster.incarnation(node) for node in range(2)]
            return dict(owners) == dict.fromkeys(nodes, SHARDS // 2) and cluster.settled()

        await cluster.wait_until(even, timeout_s=LIMIT_S)
        homes = {id: cluster.owner(Meter, id) for id in ids}
        first = {id: await cluster.ref(Meter, id).ask(Meter.add) for id in ids}
        assert {total for total, _ in first.values()} == {1}
        cluster.crash(0)
        await cluster.wait_until(cluster.settled, timeout_s=LIMIT_S)
        for id in ids:
            total, pid = await cluster.ref(Meter, id).ask(Meter.add)
            lost = homes[id] == 0
            assert total == (1 if lost else 2), "memory goes with its process, and only with it"
            assert (pid == first[id][1]) != lost
    if judged:
        assert check(cluster.history()) == []
