"""Real processes: many nodes start and stop at once, many clients come and go (I8).

`make crowd` does the same with 50 nodes and 200 clients, and counts every request. Here the store's
own history says who wrote how often: no herd, whatever the others do.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from random import Random

from real_entities import Diary
from real_lab import ROLE, run

from domicile import Settings, connect
from domicile.core.ids import ShardKey
from domicile.core.state.keys import NODES as NODE_RECORDS
from domicile.core.state.records import NodeRecord, decode_record
from domicile.stores.namespace import Namespace
from domicile.stores.sqlite.store import SqliteStore
from domicile.testing import History, Processes

NODES, CLIENTS, VISITS, ASKS = 12, 40, 2, 5
SHARDS = 60
MOST_TO_JOIN, MOST_TO_LEAVE = 3, 8
"""Commits of a node that does not coordinate: its record and a retry or two; its status, its shards
if nobody is there to hear of them (H10), and a try at leading while others leave."""

SETTINGS = Settings(
    shards=SHARDS, ttl_s=60.0, ask_timeout_s=60.0, balance_limit=1.0, balance_receiver=1.0,
    poison_deaths=1_000,
)  # fmt: skip


async def visit(store: str, name: str) -> None:
    """A client comes, is answered as many times as it asks, and goes; more than once."""
    random = Random(name)
    for turn in range(VISITS):
        await asyncio.sleep(random.random())
        async with connect(store, settings=SETTINGS) as client:
            diary = client.ref(Diary, f"{name}.{turn}")
            for number in range(ASKS):
                assert await diary.ask(Diary.write, "hello") == number + 1


def even(cluster: Processes) -> bool:
    """Whether everything is served and all nodes have equally much."""
    owners = Counter(cluster.entry(ShardKey(ROLE, n)).owner for n in range(SHARDS))
    nodes = [cluster.incarnation(node) for node in range(NODES)]
    return dict(owners) == dict.fromkeys(nodes, SHARDS // NODES) and cluster.settled()


def commits(history: History) -> Counter[str]:
    """How often each process wrote, but for a node's word that its loop stood still, or goes on: a
    busy machine makes it say so, and no client does."""
    still: dict[bytes, bool] = {}
    found: Counter[str] = Counter()
    for event in history.of("commit"):
        puts = event.fields["puts"]
        records = [
            (key, decode_record(value, NodeRecord)) for key, value, *_ in puts if is_node(key)
        ]
        turned = [key for key, record in records if record.stalled != still.get(key, False)]
        still.update((key, record.stalled) for key, record in records)
        found[event.fields["by"]] += not (turned and len(puts) == 1)
    return found


def is_node(key: bytes) -> bool:
    return key.startswith(NODE_RECORDS)


async def remaining(database: Path) -> list[bytes]:
    """Records of nodes and clients that are still there."""
    store = Namespace(SqliteStore(database, by="test"), "domicile")
    try:
        listings = [await store.list(prefix) for prefix in (b"nodes/", b"clients/")]
    finally:
        await store.close()
    return [item.key for listing in listings for item in listing.items]


def test_a_crowd_comes_and_goes_without_an_error_and_without_a_herd() -> None:
    async def scenario() -> None:
        async with Processes([Diary], nodes=NODES, settings=SETTINGS, record=False) as cluster:
            await cluster.wait_until(lambda: even(cluster), timeout_s=60)
            leader, started = cluster.leader(), commits(cluster.history())
            assert leader is not None
            followers = [cluster.node_id(node) for node in range(NODES) if node != leader]
            assert max(started[name] for name in followers) <= MOST_TO_JOIN

            async with asyncio.TaskGroup() as group:
                for number in range(CLIENTS):
                    group.create_task(visit(cluster.store, f"client-{number}"))
            assert even(cluster), "clients move nothing"
            visited = commits(cluster.history())
            assert all(visited[name] == started[name] for name in followers), "nor write nodes"
            assert (visited - started).total() <= 2 * CLIENTS * VISITS

            await asyncio.gather(*(cluster.stop(node) for node in range(NODES)))
            assert len(await remaining(cluster.directory / "store.db")) == 1, "the test's client"
            gone = commits(cluster.history())
            most = max(gone[name] - visited[name] for name in followers)
            assert most <= MOST_TO_LEAVE + SHARDS // NODES
            for node in cluster.nodes:
                log = node.log_tail()
                assert "Traceback" not in log
                assert " ERROR " not in log

    run(scenario())
