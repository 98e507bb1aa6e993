"""Real processes: silence and death under `fencing = "health"` (SM-08), and known shards that work
on while nobody coordinates (RG-09)."""

from __future__ import annotations

import asyncio

import pytest
from real_lab import Diary, balanced, fault_at, judge, of, run

from domicile import Settings
from domicile.core.ids import Incarnation, ShardKey, dead_key, node_key
from domicile.core.shardmap import Entry
from domicile.testing import Processes

ROLE = "default"
SHARDS = 6
TTL_S = 2.0
SILENT_S = 3 * TTL_S


def mine(cluster: Processes, node: int) -> Incarnation:
    found = cluster.incarnation(node)
    assert found is not None
    return found


def everything(cluster: Processes) -> list[Entry]:
    """Owner, epoch and state of every shard."""
    return [cluster.entry(ShardKey(ROLE, number)) for number in range(SHARDS)]


def an_id_at(cluster: Processes, node: int) -> str:
    """A diary whose home is a node now."""
    return next(id for n in range(1_000) if cluster.owner(Diary, id := f"d{n}") == node)


# SM-08


@pytest.mark.scenario("SM-08")
def test_a_stopped_process_keeps_its_shards_and_a_killed_one_loses_them_at_once() -> None:
    """A lease would have run out several times over; nothing but the proof counts."""
    health = Settings(shards=SHARDS, ttl_s=TTL_S, fencing="health")

    async def scenario() -> None:
        async with Processes([Diary], nodes=3, settings=health) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            leader = cluster.leader()
            assert leader is not None
            node = (leader + 1) % 3
            silent, other = an_id_at(cluster, node), an_id_at(cluster, leader)
            assert await cluster.ref(Diary, silent).ask(Diary.write, "before") == 1
            before, incarnation = everything(cluster), mine(cluster, node)

            cluster.freeze(node)
            late = asyncio.ensure_future(
                cluster.ref(Diary, silent).options(timeout_s=60).ask(Diary.nap, 0.0)
            )
            # The silence has to last: renewals of the others measure it.
            frozen_at = fault_at(cluster.history(), "freeze", incarnation)
            watcher = mine(cluster, leader)
            await cluster.wait_until(
                lambda: (
                    cluster.counts(leader)["node.suspected"] > 0
                    and of(cluster.history(), watcher, "renewed")[-1].at > frozen_at + SILENT_S
                ),
                timeout_s=60,
            )
            assert everything(cluster) == before
            assert await cluster.ref(Diary, other).ask(Diary.write, "meanwhile") == 1

            cluster.thaw(node)
            await asyncio.gather(late, return_exceptions=True)
            assert await cluster.ref(Diary, silent).ask(Diary.write, "after") == 2
            assert everything(cluster) == before
            assert mine(cluster, node) == incarnation

            cluster.crash(node)
            await cluster.wait_until(cluster.settled)
            assert await cluster.ref(Diary, silent).ask(Diary.write, "elsewhere") == 1
            history = cluster.history()
        judge(history)
        assert not of(history, incarnation, "fenced")
        [burial] = [
            event
            for event in history.of("commit")
            if node_key(incarnation) in event.fields["deletes"]
        ]
        assert dead_key(incarnation) in [key for key, *_ in burial.fields["puts"]]

    run(scenario())


# RG-09


@pytest.mark.scenario("RG-09")
def test_known_shards_flow_and_unknown_ones_wait_until_somebody_coordinates_again() -> None:
    """Only one process may coordinate, so the time without a coordinator lasts until it is back."""
    settings = Settings(shards=SHARDS, ttl_s=TTL_S)

    async def scenario() -> None:
        async with Processes([Diary], nodes=3, settings=settings, candidates=[0]) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            assert cluster.leader() == 0
            unknown = an_id_at(cluster, 0)
            known = [an_id_at(cluster, 1), an_id_at(cluster, 2)]
            dead, before = mine(cluster, 0), everything(cluster)
            cluster.crash(0)
            await cluster.wait_until(lambda: cluster.leader() is None)
            await cluster.wait_until(
                lambda: any(event.fields["peer"] == dead for event in cluster.history().of("gone"))
            )
            waiting = [
                asyncio.ensure_future(
                    cluster.ref(Diary, unknown).options(timeout_s=60).ask(Diary.write, "held")
                )
                for _ in range(10)
            ]
            for line in range(200):
                for id in known:
                    assert await cluster.ref(Diary, id).ask(Diary.write, "flows") == line + 1
            assert not any(ask.done() for ask in waiting)
            assert everything(cluster) == before, "nobody can have changed the map"

            cluster.start(0)
            assert await asyncio.gather(*waiting) == list(range(1, 11)), "in order, each once"
            await cluster.wait_until(lambda: cluster.leader() == 0)
            for id in known:
                assert await cluster.ref(Diary, id).ask(Diary.write, "still") >= 1
            history = cluster.history()
        judge(history)

    run(scenario())


@pytest.mark.scenario("RG-09")
def test_another_process_coordinates_when_the_first_is_killed() -> None:
    settings = Settings(shards=SHARDS, ttl_s=TTL_S)

    async def scenario() -> None:
        async with Processes([Diary], nodes=3, settings=settings) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            leader = cluster.leader()
            assert leader is not None
            unknown, known = an_id_at(cluster, leader), an_id_at(cluster, (leader + 1) % 3)
            assert await cluster.ref(Diary, known).ask(Diary.write, "before") == 1
            before = cluster.entry(cluster.shard(Diary, known))
            dead = mine(cluster, leader)
            cluster.crash(leader)
            assert await cluster.ref(Diary, known).ask(Diary.write, "meanwhile") == 2
            await cluster.wait_until(cluster.settled)
            assert await cluster.ref(Diary, unknown).ask(Diary.write, "elsewhere") == 1
            assert cluster.leader() not in (None, leader)
            after = cluster.entry(cluster.shard(Diary, known))
            assert (after.owner, after.epoch) == (before.owner, before.epoch)
            assert cluster.entry(cluster.shard(Diary, unknown)).owner not in ("", dead)
            history = cluster.history()
        judge(history)

    run(scenario())
