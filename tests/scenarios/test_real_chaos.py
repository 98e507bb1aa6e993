"""What needs a network, a store or a clock that can be broken, on real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from real_lab import (
    Desk,
    Diary,
    Load,
    balanced,
    deadline,
    fault_at,
    judge,
    nothing_lost,
    of,
    open_ledger,
    run,
)

from domicile import MaybeExecuted, Settings
from domicile.core.ids import NODES, Incarnation
from domicile.core.records import NodeRecord, decode_record
from domicile.testing import History, Processes

TTL_S = 2.0
SHORT = Settings(shards=10, ttl_s=TTL_S)
HOUR_S = 3_600.0


def evicted(history: History) -> dict[str, None]:
    """The names of the nodes that were marked."""
    return {
        record.node: None
        for event in history.of("commit")
        for key, value, _ in event.fields["puts"]
        if key.startswith(NODES)
        and (record := decode_record(value, NodeRecord)).status == "evicted"
    }


def mine(cluster: Processes, node: int) -> Incarnation:
    found = cluster.incarnation(node)
    assert found is not None
    return found


def id_at(cluster: Processes, node: int) -> str:
    return next(id for n in range(400) if cluster.owner(Diary, id := f"d{n}") == node)


async def once_more(ask: Callable[[], Awaitable[int]]) -> int:
    """Ask until there is an answer: a link that breaks under way leaves it open what ran (I9)."""
    while True:
        try:
            return await ask()
        except MaybeExecuted:
            continue


# DX-17


@pytest.mark.scenario("DX-17", partial=True)
def test_a_process_that_no_peer_reaches_is_evicted_and_comes_back() -> None:
    async def scenario() -> None:
        async with Processes([Diary], nodes=4, settings=SHORT, network="auto") as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            hostage = next(node for node in range(4) if node != cluster.leader())
            old, name = mine(cluster, hostage), cluster.node_id(hostage)
            cluster.partition([hostage], [node for node in range(-1, 4) if node != hostage])
            await cluster.wait_until(lambda: name in evicted(cluster.history()))
            assert cluster.nodes[hostage].up, "it lives, and the store is in its reach"
            await cluster.wait_until(lambda: cluster.incarnation(hostage) != old)
            await cluster.wait_until(cluster.settled)
            cluster.heal()
            await cluster.wait_until(lambda: balanced(cluster))
            assert await cluster.ref(Diary, id_at(cluster, hostage)).ask(Diary.write, "back") == 1
            history = cluster.history()
        judge(history)
        assert evicted(history) == {name: None}
        [fenced] = of(history, old, "fenced")
        assert fenced.at < deadline(history, old), "it was told, not timed out"

    run(scenario())


@pytest.mark.scenario("DX-17", partial=True)
def test_a_process_that_hears_nobody_cannot_evict_the_others() -> None:
    async def scenario() -> None:
        async with Processes([Diary], nodes=4, settings=SHORT, network="auto") as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            deaf = cluster.leader()
            assert deaf is not None
            others = [node for node in range(4) if node != deaf]
            before = {node: mine(cluster, node) for node in others}
            cluster.partition(others, [deaf], one_way=True)
            await cluster.wait_until(lambda: cluster.leader() in others, timeout_s=60)
            assert {node: mine(cluster, node) for node in others} == before
            cluster.heal()
            await cluster.wait_until(lambda: balanced(cluster), timeout_s=60)
            assert {node: mine(cluster, node) for node in others} == before
            history = cluster.history()
        judge(history)
        assert [*evicted(history)] in ([], [cluster.node_id(deaf)])

    run(scenario())


# LS-12


@pytest.mark.scenario("LS-12")
def test_a_process_that_cannot_reach_the_store_stops_itself_though_its_peers_are_there() -> None:
    async def scenario() -> None:
        async with Processes([Diary], nodes=3, settings=SHORT) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            node = next(node for node in range(3) if node != cluster.leader())
            old, id = mine(cluster, node), id_at(cluster, node)
            diary = cluster.ref(Diary, id).options(timeout_s=30)
            assert await diary.ask(Diary.write, "before") == 1
            cluster.cut_store(node)
            await cluster.wait_until(lambda: bool(of(cluster.history(), old, "fenced")))
            assert await once_more(lambda: diary.ask(Diary.write, "elsewhere")) == 1
            await cluster.wait_until(cluster.settled)
            assert cluster.owner(Diary, id) != node
            assert cluster.nodes[node].up
            cluster.heal()
            await cluster.wait_until(lambda: cluster.incarnation(node) not in (None, old))
            await cluster.wait_until(cluster.settled)
            history = cluster.history()
        judge(history)
        assert fault_at(history, "outage", old) < of(history, old, "fenced")[0].at
        late = of(history, old, "start", "resume", "reply")
        assert [event for event in late if event.at >= deadline(history, old)] == []
        # Its peers reached it all the time.
        assert not any(event.fields["reached"] is False for event in history.of("probed"))

    run(scenario())


# DX-18


@pytest.mark.scenario("DX-18", partial=True)
@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S])
def test_a_step_of_the_wall_clock_ends_no_lease_and_prolongs_none(by_s: float) -> None:
    async def scenario() -> None:
        async with Processes([Diary], nodes=3, settings=SHORT) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            before = [mine(cluster, node) for node in range(3)]
            renewed = len([*cluster.history().of("renewed")])
            cluster.clock_step(by_s)
            # Each of them renews a few times under the new wall clock.
            await cluster.wait_until(
                lambda: len([*cluster.history().of("renewed")]) >= renewed + 12
            )
            assert [mine(cluster, node) for node in range(3)] == before
            node = next(node for node in range(3) if node != cluster.leader())
            shard = cluster.shard(Diary, id_at(cluster, node))
            cluster.freeze(node)
            await cluster.wait_until(lambda: cluster.entry(shard).owner not in ("", before[node]))
            cluster.thaw(node)
            await cluster.wait_until(lambda: cluster.incarnation(node) not in (None, before[node]))
            await cluster.wait_until(cluster.settled)
            history = cluster.history()
        judge(history)
        fenced = [event.fields["inc"] for event in history.of("fenced")]
        assert fenced == [before[node]], "nobody but the frozen one"
        assert [event.fields["by"] for event in history.of("stepped")] == [by_s]

    run(scenario())


# RG-10


@pytest.mark.scenario("RG-10", partial=True)
def test_a_coordinator_that_leaves_over_a_slow_network_takes_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = open_ledger(monkeypatch, tmp_path)
    load = Load(10_000)

    async def scenario() -> None:
        async with Processes([Desk], nodes=3, settings=SHORT, network="auto") as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            leader = cluster.leader()
            assert leader is not None
            old = mine(cluster, leader)
            for node in range(3):
                cluster.delay(node, 0.01, jitter_s=0.03)
            async with asyncio.TaskGroup() as group:
                group.create_task(load.send(cluster, "sender"))
                await cluster.wait_until(lambda: load.left < 9_900)
                await cluster.stop(leader)
                load.left = min(load.left, 100)
            await cluster.wait_until(lambda: load.arrived(ledger) and cluster.settled())
            history = cluster.history()
        load.compare(ledger)
        judge(history)
        nothing_lost(history)
        assert of(history, old, "released"), "it had nothing to hand over"
        assert of(history, old, "ended")

    run(scenario())
