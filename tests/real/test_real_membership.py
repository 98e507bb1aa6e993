"""Real processes: silence and death under `fencing = "health"` (SM-08), and known shards that work
on while nobody coordinates (RG-09)."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from real_entities import Diary
from real_lab import Loss, balanced, fault_at, judge, mine, of, run, within_each_time

from domicile import Settings
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.lease import death_probes
from domicile.core.state.keys import dead_key, node_key
from domicile.core.state.shardmap import Entry
from domicile.links.outgoing import SILENCE_S
from domicile.testing import Event, History, Processes, Sim, simulated

ROLE = "default"
SHARDS = 6
TTL_S = 2.0
SILENT_S = 3 * TTL_S
AT_ONCE_S = 1.0
MANAGER = 3
HEALTH = Settings(
    shards=SHARDS, ttl_s=TTL_S, link_timeout_s=2.0, poison_deaths=1_000_000, fencing="health"
)
"""A manager of its own, so that whoever reports and whoever judges are two processes."""


def everything(cluster: Processes) -> list[Entry]:
    """Owner, epoch and state of every shard."""
    return [cluster.entry(ShardKey(ROLE, number)) for number in range(SHARDS)]


def shared(cluster: Processes) -> bool:
    """Whether everything is served, by all nodes alike."""
    owners = Counter(entry.owner for entry in everything(cluster))
    fair = {cluster.incarnation(node): SHARDS // 3 for node in range(3)}
    return cluster.settled() and owners == fair


def buried(history: History, incarnation: Incarnation) -> list[Event]:
    """What removed the record of an incarnation."""
    key = node_key(incarnation)
    return [event for event in history.of("commit") if key in event.fields["deletes"]]


def an_id_at(cluster: Processes, node: int) -> str:
    """A diary whose home is a node now."""
    return next(id for n in range(1_000) if cluster.owner(Diary, id := f"d{n}") == node)


# SM-08


@pytest.mark.scenario("SM-08", partial=True)
def test_a_process_that_is_reported_or_silent_keeps_its_shards_while_it_lives() -> None:
    """A lease would have run out several times over; nothing but the proof counts."""

    async def scenario() -> None:
        processes = Processes([Diary], nodes=3, managers=1, settings=HEALTH, network="auto")
        async with processes as cluster:
            await cluster.wait_until(lambda: shared(cluster) and cluster.leader() == MANAGER)
            sender, node = 0, 1
            visitor, silent, other = (an_id_at(cluster, one) for one in (sender, node, 2))
            assert await cluster.ref(Diary, silent).ask(Diary.write, "before") == 1
            before, incarnation = everything(cluster), mine(cluster, node)
            assert cluster.counts(MANAGER)["node.suspected"] == 0

            # One sender gets no answer. The manager does, so what it hears is that sender's word.
            cluster.partition(sender, node)
            visit = cluster.ref(Diary, visitor).ask(Diary.visit, silent, "lost")
            visiting = asyncio.ensure_future(visit)
            await cluster.wait_until(lambda: cluster.counts(MANAGER)["node.suspected"] > 0)
            assert cluster.counts(sender)["link.lost"] > 0
            assert cluster.counts(MANAGER)["link.lost"] == 0
            cluster.heal()
            await asyncio.gather(visiting, return_exceptions=True)
            assert everything(cluster) == before
            written = await cluster.ref(Diary, visitor).ask(Diary.visit, silent, "in reach")
            assert written in (2, 3), "one line may have come through"

            # Nobody gets an answer, and that lasts: renewals of the others measure it.
            reported = cluster.counts(MANAGER)["node.suspected"]
            cluster.freeze(node)
            late = asyncio.ensure_future(
                cluster.ref(Diary, silent).options(timeout_s=60).ask(Diary.nap, 0.0)
            )
            frozen_at = fault_at(cluster.history(), "freeze", incarnation)
            watcher = mine(cluster, MANAGER)
            await cluster.wait_until(
                lambda: (
                    cluster.counts(MANAGER)["node.suspected"] > reported
                    and of(cluster.history(), watcher, "renewed")[-1].at > frozen_at + SILENT_S
                ),
                timeout_s=60,
            )
            assert everything(cluster) == before
            assert await cluster.ref(Diary, other).ask(Diary.write, "meanwhile") == 1

            cluster.thaw(node)
            await asyncio.gather(late, return_exceptions=True)
            assert await cluster.ref(Diary, silent).ask(Diary.write, "after") == written + 1
            assert everything(cluster) == before
            assert mine(cluster, node) == incarnation
            history = cluster.history()
        judge(history)
        assert not of(history, incarnation, "fenced")
        assert buried(history, incarnation) == []

    run(scenario())


@pytest.mark.scenario("SM-08")
def test_a_reported_process_that_is_dead_is_unregistered_and_its_shards_placed_at_once() -> None:
    async def scenario() -> None:
        async with Processes([Diary], nodes=3, managers=1, settings=HEALTH) as cluster:
            lost: list[Loss] = []

            async def lose_one() -> tuple[float, float]:
                await cluster.wait_until(lambda: shared(cluster) and cluster.leader() == MANAGER)
                visitor, silent = an_id_at(cluster, 0), an_id_at(cluster, 1)
                loss = Loss(cluster, 1)
                reported = cluster.counts(MANAGER)["node.suspected"]
                cluster.freeze(1)
                # It is reported first, and nothing follows from that: it lives.
                visit = cluster.ref(Diary, visitor).ask(Diary.visit, silent, "waits")
                visiting = asyncio.ensure_future(visit)
                await cluster.wait_until(
                    lambda: cluster.counts(MANAGER)["node.suspected"] > reported
                )
                assert buried(cluster.history(), loss.incarnation) == []
                cluster.crash(1)
                await loss.replaced()
                await asyncio.gather(visiting, return_exceptions=True)
                assert await cluster.ref(Diary, silent).ask(Diary.write, "elsewhere") >= 1
                history = cluster.history()
                lost.append(loss)
                cluster.start(1)
                return fault_at(history, "crash", loss.incarnation), loss.served_at(history)[1]

            await within_each_time(cluster, AT_ONCE_S, lose_one)
            history = cluster.history()
        judge(history)
        for loss in lost:
            [burial] = buried(history, loss.incarnation)
            assert burial.at <= loss.served_at(history)[0]
            assert dead_key(loss.incarnation) in [key for key, *_ in burial.fields["puts"]]

    run(scenario())


@pytest.mark.scenario("SM-08", partial=True)
@simulated(entities=[Diary], nodes=3, managers=1, seeds=4, settings=HEALTH, locks=True)
async def test_a_report_alone_has_the_manager_look_and_bury_the_dead(
    sim: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In virtual time, for real processes see a death without it: by a connection that breaks, and
    by a look at everybody each second. Here the next look is far away and no connection tells."""
    sender, node = 0, 1
    reports: list[float] = []
    count = sim.history.count

    def counted(name: str, value: int = 1) -> None:
        count(name, value)
        if name == "node.suspected":
            reports.append(sim.world.now)

    sim.history.count = counted  # type: ignore[method-assign]
    monkeypatch.setattr(death_probes, "PROBE_S", 3_600.0)
    await sim.advance(2.0)
    ids = [f"d{number}" for number in range(1_000)]
    visitor, silent = (
        next(id for id in ids if sim.owner(Diary, id) == one) for one in (sender, node)
    )
    dead = sim.nodes[node].incarnation
    assert dead is not None
    assert await sim.ref(Diary, visitor).ask(Diary.visit, silent, "before") == 1
    sim.block(sender, node)
    sim.block(node, sender)
    visit = sim.ref(Diary, visitor).ask(Diary.visit, silent, "lost")
    visiting = asyncio.ensure_future(visit)
    # The sender is about to give its link up; nobody else gets no answer so far.
    await sim.advance(SILENCE_S + HEALTH.link_timeout_s / 2)
    assert reports == []
    sim.partition([node], [0, 2, MANAGER])
    sim.crash(node)
    crashed_at = sim.world.now
    await sim.wait_until(lambda: bool(reports))
    assert reports[0] < crashed_at + HEALTH.link_timeout_s, "nobody but the sender knows by then"
    await sim.wait_until(lambda: bool(buried(sim.history, dead)), timeout_s=0.5)
    [burial] = buried(sim.history, dead)
    assert burial.fields["by"] == sim.nodes[MANAGER].name
    assert reports[0] <= burial.at, "something else told"
    await sim.wait_until(sim.settled, timeout_s=1.0)
    await asyncio.gather(visiting, return_exceptions=True)


# RG-09


@pytest.mark.scenario("RG-09")
def test_known_shards_flow_and_unknown_ones_wait_until_somebody_coordinates_again() -> None:
    """Only one process may coordinate, so the time without a coordinator lasts until it is back."""
    settings = Settings(shards=SHARDS)

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
    settings = Settings(shards=SHARDS)

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
