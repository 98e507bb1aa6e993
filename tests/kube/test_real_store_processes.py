"""LS-19 with node processes on a real kube-apiserver, each behind a proxy of its own (S8, L1).

The history that is judged has every commit of the store, read from the etcd below the API server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest
from real_entities import Diary
from real_lab import (
    ROLE,
    acted_late,
    balanced,
    deadline,
    fenced,
    id_at,
    judge,
    mine,
    of,
    run,
    written,
)

from domicile import Settings
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.state.keys import NODES
from domicile.membership.clock import SystemClock
from domicile.testing import History, Processes
from domicile.testing.suites.byte_proxy import ByteProxy
from proving.kube_commits import KubernetesCommits
from proving.kube_server import KubernetesServer, NoKubernetes

SETTINGS = Settings(shards=9, ttl_s=6.0, balance_interval_s=0.3, ask_timeout_s=60.0)
LIMIT_S = 240.0


@pytest.fixture
def server() -> Iterator[KubernetesServer]:
    try:
        made = KubernetesServer()
    except NoKubernetes as error:
        pytest.skip(str(error))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.mark.scenario("LS-19")
def test_a_process_without_the_api_server_stops_before_others_open_its_shards(
    server: KubernetesServer,
) -> None:
    async def scenario() -> None:
        store = server.new_database()
        async with AsyncExitStack() as stack:
            proxies = [
                await stack.enter_async_context(ByteProxy("127.0.0.1", server.port))
                for _ in range(3)
            ]
            cluster = await stack.enter_async_context(
                Processes(
                    [Diary], nodes=3, settings=SETTINGS, store=store,
                    store_at=lambda node: server.behind(store, proxies[node].port),
                    commits=KubernetesCommits(server, store, SystemClock().now),
                )
            )  # fmt: skip
            await cluster.wait_until(lambda: balanced(cluster), timeout_s=LIMIT_S)
            node = next(one for one in range(3) if one != cluster.leader())
            old = mine(cluster, node)
            shards = {
                number
                for number in range(SETTINGS.shards)
                if cluster.entry(ShardKey(ROLE, number)).owner == old
            }
            id, stop = id_at(cluster, node), asyncio.Event()

            async def keep_writing() -> None:
                while not stop.is_set():
                    await written(cluster, id, "all the time")

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(keep_writing())
                cut_at = cluster.now()
                # Nothing is refused: connections stay open, and no byte passes. It costs the node
                # its lease, and that may cost messages.
                cluster.note_fault("outage", cluster.nodes[node])
                await proxies[node].hold()
                await cluster.wait_until(lambda: fenced(cluster, old), timeout_s=LIMIT_S)

                def moved() -> bool:
                    owners = {cluster.entry(ShardKey(ROLE, one)).owner for one in shards}
                    return old not in owners and cluster.settled()

                await cluster.wait_until(moved, timeout_s=LIMIT_S)
                assert cluster.nodes[node].up
                await proxies[node].release()
                cluster.note_fault("heal")
                stop.set()
            await cluster.wait_until(
                lambda: cluster.incarnation(node) not in (None, old), timeout_s=LIMIT_S
            )
            await cluster.wait_until(cluster.settled, timeout_s=LIMIT_S)
            history = cluster.history()
        judge(history)
        assert not acted_late(history, old)
        served = [one.at for one in of(history, old, "start") if one.at > cut_at]
        assert served, "it served what came after the cut, as long as its lease was valid"
        assert max(served) < deadline(history, old)
        ended_at = next(one.at for one in of(history, old, "fenced", "ended"))
        opened = opened_elsewhere(history, old, shards, cut_at)
        assert opened.keys() == shards
        assert ended_at < min(opened.values())
        assert ended_at < gone_at(history, old)

    run(scenario())


def opened_elsewhere(
    history: History, old: Incarnation, shards: set[int], since: float
) -> dict[int, float]:
    """When another incarnation first opened each of these shards."""
    found: dict[int, float] = {}
    for event in history.of("open"):
        shard = event.fields["shard"]
        if event.at > since and event.fields["inc"] != old and shard in shards:
            found.setdefault(shard, event.at)
    return found


def gone_at(history: History, old: Incarnation) -> float:
    """When the store lost an incarnation's record."""
    key = NODES + old.encode()
    return next(
        event.at for event in history.of("commit", "expire") if key in event.fields["deletes"]
    )
