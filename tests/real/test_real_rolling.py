"""Real processes: rolling updates (RG-27, SM-14), emptied nodes and clusters that grow and shrink.

All of it under a load of numbered messages: no ask fails, every number is seen exactly once and in
order, and shards move as often as the plan says and not more. How long callers wait is measured by
`make rolling`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from real_entities import Desk
from real_lab import ROLE, Load, judge, nothing_lost, open_ledger, run

from domicile import Settings, connect
from domicile.core.ids import ShardKey
from domicile.core.state.shardmap import Entry
from domicile.testing import Processes
from domicile.testing.processes.node_process import NodeProcess
from domicile.testing.processes.recorder import FileRecorder, RecordReader

ENDLESS = 1_000_000_000
SHARDS = 60
"""In equal shares for 2, 3, 4 and 5 nodes, so that what has to move is exact."""

SETTINGS = Settings(
    shards=SHARDS, ask_timeout_s=60.0, balance_interval_s=0.1, balance_limit=1.0,
    balance_receiver=1.0, poison_deaths=1_000,
)  # fmt: skip
"""Patient, so that a busy machine makes no ask fail; whatever may be balanced is, at once."""


def add(cluster: Processes, version: str = "") -> int:
    """A node more."""
    place = NodeProcess(len(cluster.nodes), True)
    place.version = version
    cluster.nodes.append(place)
    cluster.start(place.index)
    return place.index


async def joined(cluster: Processes, node: int) -> None:
    """Return once a node is registered and the coordinator has heard from it (C7)."""
    await cluster.wait_until(lambda: cluster.incarnation(node) is not None, timeout_s=60)
    readers = [RecordReader(path) for path in cluster.directory.glob("node-*.events")]

    def heard() -> bool:
        leader = cluster.leader()
        me = None if leader is None else cluster.incarnation(leader)
        new = cluster.incarnation(node)
        taken.update(
            (event.fields["inc"], event.fields["peer"])
            for reader in readers
            for event in reader.more()
            if event.kind == "taken"
        )
        return (me, new) in taken

    taken: set[tuple[str | None, str | None]] = set()
    await cluster.wait_until(heard)


def entries(cluster: Processes) -> list[Entry]:
    """What the store says of every shard."""
    return [cluster.entry(ShardKey(ROLE, number)) for number in range(SHARDS)]


def epochs(cluster: Processes) -> list[int]:
    """Of every shard; each move raises one."""
    return [entry.epoch for entry in entries(cluster)]


def moves(before: list[int], after: list[int]) -> Counter[int]:
    """How many shards moved how often."""
    return Counter(later - earlier for earlier, later in zip(before, after, strict=True))


def homes(cluster: Processes) -> Counter[int]:
    """How many shards each running node has."""
    incarnations = {cluster.incarnation(node.index): node.index for node in cluster.nodes}
    owners = [entry.owner for entry in entries(cluster)]
    return Counter(incarnations[owner] for owner in owners if owner in incarnations)


async def until_shared(cluster: Processes, nodes: list[int]) -> None:
    """Return once just these nodes serve everything, in equal shares."""
    fair = {node: SHARDS // len(nodes) for node in nodes}
    await cluster.wait_until(lambda: homes(cluster) == fair and cluster.settled(), timeout_s=60)


@asynccontextmanager
async def under_load(cluster: Processes, ledger: Path) -> AsyncGenerator[Load]:
    """Two clients send all the time; at the end all that they sent has been seen in order."""
    load = Load(ENDLESS)
    async with AsyncExitStack() as stack:
        recorder = FileRecorder(cluster.directory / "client-2.events")
        stack.callback(recorder.close)
        other = await stack.enter_async_context(
            connect(cluster.store, settings=cluster.settings, meter=recorder)
        )
        async with asyncio.TaskGroup() as group:
            for name, client in (("first", cluster), ("second", other)):
                group.create_task(load.send(client, name, pause_s=0.1))
            await cluster.wait_until(lambda: load.left < ENDLESS - 100)
            yield load
            load.left = 100
        await cluster.wait_until(lambda: load.arrived(ledger))
    load.compare(ledger)


@pytest.mark.scenario("RG-27")
@pytest.mark.scenario("SM-14", partial=True)
def test_a_rolling_update_fails_no_ask_and_moves_each_shard_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = open_ledger(monkeypatch, tmp_path)

    async def scenario() -> None:
        cluster = Processes([Desk], nodes=5, settings=SETTINGS)
        for node in cluster.nodes:
            node.version = "1.9"
        async with cluster:
            await until_shared(cluster, [0, 1, 2, 3, 4])
            async with under_load(cluster, ledger) as load:
                before = epochs(cluster)
                for old in range(5):
                    at = load.left
                    await joined(cluster, add(cluster, "1.10"))
                    await cluster.wait_until(lambda at=at: load.left < at - 50)  # type: ignore[misc]
                    await cluster.stop(old)
                await until_shared(cluster, [5, 6, 7, 8, 9])
                assert moves(before, epochs(cluster)) == {1: SHARDS}
            history = cluster.history()
        judge(history)
        nothing_lost(history)

    run(scenario())


async def planned(cluster: Processes, leaving: int, heard: list[int]) -> None:
    """Return once the coordinator must have seen that a node leaves: afterwards it asked the others
    how they are and had their answers, twice."""
    gone, leader = cluster.incarnation(leaving), cluster.leader()
    assert gone is not None
    assert leader is not None
    await cluster.wait_until(lambda: cluster.status(gone) == "leaving")
    since, me = cluster.now(), cluster.incarnation(leader)
    peers = {cluster.incarnation(node) for node in heard if node != leader}

    def answers() -> Counter[str]:
        return Counter(
            event.fields["peer"]
            for event in cluster.recorded
            if event.kind == "taken" and event.fields["inc"] == me and event.at > since
        )

    await cluster.wait_until(lambda: all(answers()[peer] >= 2 for peer in peers if peer))


@pytest.mark.scenario("SM-14", partial=True)
def test_a_rolling_update_in_haste_moves_each_shard_once() -> None:
    """Each old node is told to go when the new one has registered, and nobody has heard of that one
    before the coordinator could have given away what the old one has."""
    patient = replace(SETTINGS, heard_s=15.0, drain_deadline_s=30.0)

    async def scenario() -> None:
        # All places have to be there from the beginning, so that the network knows them.
        cluster = Processes([Desk], nodes=6, settings=patient, network="auto")
        for node in cluster.nodes:
            node.version = "1.9"
        async with cluster:
            await asyncio.gather(*(cluster.stop(node) for node in (3, 4, 5)))
            await until_shared(cluster, [0, 1, 2])
            before = epochs(cluster)
            for old in range(3):
                new, others = old + 3, list(range(old, old + 3))
                cluster.partition([new], others)
                cluster.nodes[new].version = "1.10"
                cluster.start(new)
                await cluster.wait_until(
                    lambda new=new: cluster.incarnation(new) is not None,  # type: ignore[misc]
                    timeout_s=60,
                )
                await cluster.wait_until(cluster.settled)
                held = entries(cluster)
                async with asyncio.TaskGroup() as group:
                    group.create_task(cluster.stop(old))
                    await planned(cluster, old, others)
                    assert entries(cluster) == held, "it did not wait for the new one"
                    cluster.heal()
            await until_shared(cluster, [3, 4, 5])
            assert moves(before, epochs(cluster)) == {1: SHARDS}
            history = cluster.history()
        judge(history)

    run(scenario())


@pytest.mark.scenario("RG-27")
def test_a_cluster_that_grows_is_drained_and_shrinks_fails_no_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = open_ledger(monkeypatch, tmp_path)

    async def scenario() -> None:
        async with Processes([Desk], nodes=2, settings=SETTINGS) as cluster:
            await until_shared(cluster, [0, 1])
            async with under_load(cluster, ledger) as load:
                known = epochs(cluster)
                for nodes, expected in (([0, 1, 2], 20), ([0, 1, 2, 3], 15)):
                    add(cluster)
                    await until_shared(cluster, nodes)
                    before, known = known, epochs(cluster)
                    assert moves(before, known) == {0: SHARDS - expected, 1: expected}

                await cluster.drain(3)
                await until_shared(cluster, [0, 1, 2])
                before, known = known, epochs(cluster)
                assert moves(before, known) == {0: 45, 1: 15}, "what it had, and nothing else"

                at = load.left
                await asyncio.gather(cluster.stop(2), cluster.stop(3))
                await cluster.wait_until(lambda: load.left < at - 50)
                await until_shared(cluster, [0, 1])
                assert moves(known, epochs(cluster)) == {0: 40, 1: 20}
            history = cluster.history()
        judge(history)
        nothing_lost(history)

    run(scenario())
