"""What needs a network, a store or a clock that can be broken, on real processes."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import ceil
from pathlib import Path

import pytest
from moving_lab import LEAVERS, leave_under_load, leavers
from real_entities import Desk, Diary
from real_lab import balanced, deadline, fault_at, judge, nothing_lost, of, open_ledger, run

from domicile import MaybeExecuted, Settings
from domicile.core.ids import Incarnation
from domicile.core.state.keys import NODES, node_key
from domicile.core.state.records import NodeRecord, decode_record
from domicile.testing import History, Processes

TTL_S = 2.0
SHORT = Settings(shards=10, ttl_s=TTL_S)
HOUR_S = 3_600.0
ASKS = 10
"""How often somebody asks whose link broke under way: once is usual, and none is for ever."""


def evicted(history: History) -> dict[str, None]:
    """The names of the nodes that were marked."""
    return {
        record.node: None
        for event in history.of("commit")
        for key, value, _ in event.fields["puts"]
        if key.startswith(NODES)
        and (record := decode_record(value, NodeRecord)).status == "evicted"
    }


def expired(history: History, incarnation: Incarnation) -> bool:
    """Whether a node's lease ended in the store: its time was over, unless it gave it back."""
    key = node_key(incarnation)
    return any(key in event.fields["deletes"] for event in history.of("expire"))


def mine(cluster: Processes, node: int) -> Incarnation:
    found = cluster.incarnation(node)
    assert found is not None
    return found


def id_at(cluster: Processes, node: int) -> str:
    return next(id for n in range(400) if cluster.owner(Diary, id := f"d{n}") == node)


async def once_more(ask: Callable[[], Awaitable[int]]) -> int:
    """Ask until there is an answer: a link that breaks under way leaves it open what ran (I9)."""
    for _ in range(ASKS - 1):
        with suppress(MaybeExecuted):
            return await ask()
    return await ask()


# DX-17


@pytest.mark.scenario("DX-17")
def test_a_process_that_no_peer_reaches_is_evicted_and_comes_back() -> None:
    async def scenario() -> None:
        async with Processes([Diary], nodes=4, settings=SHORT, network="auto") as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            hostage = next(node for node in range(4) if node != cluster.leader())
            old, name = mine(cluster, hostage), cluster.node_id(hostage)
            id = id_at(cluster, hostage)
            cut_at = cluster.now()
            cluster.partition([hostage], [node for node in range(-1, 4) if node != hostage])
            await cluster.wait_until(lambda: name in evicted(cluster.history()))
            assert cluster.nodes[hostage].up, "it lives, and the store is in its reach"
            await cluster.wait_until(lambda: cluster.incarnation(hostage) != old)
            await cluster.wait_until(cluster.settled)
            # What it had is served by those who are in reach, while it is not.
            diary = cluster.ref(Diary, id).options(timeout_s=30)
            assert await once_more(lambda: diary.ask(Diary.write, "elsewhere")) >= 1
            cluster.heal()
            await cluster.wait_until(lambda: balanced(cluster))
            assert await cluster.ref(Diary, id_at(cluster, hostage)).ask(Diary.write, "back") >= 1
            history = cluster.history()
        judge(history)
        assert evicted(history) == {name: None}
        [fenced] = of(history, old, "fenced")
        assert fenced.at < deadline(history, old), "it was told, not timed out"
        # Nothing was wrong with its lease: it renewed until it was told.
        renewals = [event.at for event in of(history, old, "renewed")]
        assert renewals[-1] > cut_at
        against = [one for one in history.of("probed") if one.fields["reached"] is False]
        assert len({one.fields["inc"] for one in against if one.fields["node"] == old}) >= 2

    run(scenario())


@pytest.mark.scenario("DX-17")
@pytest.mark.parametrize("fault", ["hears nobody", "is heard by nobody"])
def test_a_coordinator_with_a_one_way_fault_cannot_evict_the_others(fault: str) -> None:
    async def scenario() -> None:
        async with Processes([Diary], nodes=4, settings=SHORT, network="auto") as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            faulty = cluster.leader()
            assert faulty is not None
            others = [node for node in range(4) if node != faulty]
            before = {node: mine(cluster, node) for node in others}
            ways = (others, [faulty]) if fault == "hears nobody" else ([faulty], others)
            cluster.partition(*ways, one_way=True)
            await cluster.wait_until(lambda: cluster.leader() in others, timeout_s=60)
            assert {node: mine(cluster, node) for node in others} == before
            cluster.heal()
            await cluster.wait_until(lambda: balanced(cluster), timeout_s=60)
            assert {node: mine(cluster, node) for node in others} == before
            history = cluster.history()
        judge(history)
        assert [*evicted(history)] in ([], [cluster.node_id(faulty)])

    run(scenario())


# LS-12


FAILED = "lease.unacknowledged"


def most_attempts(settings: Settings) -> int:
    """How often a node without its store can try to renew: from its last renewal to its deadline,
    four times as often as with it."""
    return 1 + ceil((settings.ttl_s - settings.margin_s) / (settings.renew_s / 4))


@pytest.mark.scenario("LS-12")
def test_a_process_that_cannot_reach_the_store_stops_itself_though_its_peers_are_there() -> None:
    async def scenario() -> None:
        async with Processes([Diary], nodes=3, settings=SHORT) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            node = next(node for node in range(3) if node != cluster.leader())
            old, id = mine(cluster, node), id_at(cluster, node)
            diary = cluster.ref(Diary, id).options(timeout_s=30)
            assert await diary.ask(Diary.write, "before") == 1
            earlier = cluster.counts(node)[FAILED]
            cluster.cut_store(node)
            await cluster.wait_until(lambda: bool(of(cluster.history(), old, "fenced")))
            # A fence is written with all counts, so these are those of that moment.
            attempts = cluster.counts(node)[FAILED] - earlier
            assert await once_more(lambda: diary.ask(Diary.write, "elsewhere")) == 1
            await cluster.wait_until(cluster.settled)
            assert cluster.owner(Diary, id) != node
            assert cluster.nodes[node].up
            cluster.heal()
            await cluster.wait_until(lambda: cluster.incarnation(node) not in (None, old))
            await cluster.wait_until(cluster.settled)
            assert cluster.counts(node)[FAILED] - earlier == attempts, "it tried on"
            history = cluster.history()
        judge(history)
        assert 2 <= attempts <= most_attempts(SHORT)
        assert fault_at(history, "outage", old) < of(history, old, "fenced")[0].at
        late = of(history, old, "start", "resume", "reply")
        assert [event for event in late if event.at >= deadline(history, old)] == []
        # Its peers reached it all the time.
        assert not any(event.fields["reached"] is False for event in history.of("probed"))

    run(scenario())


# DX-18


def step_every_clock(cluster: Processes, by_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock of the machine: this process writes to the store, too."""
    now_s, now_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now_s() + by_s)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + int(by_s * 1e9))
    cluster.clock_step(by_s)


@pytest.mark.scenario("DX-18")
@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S])
def test_a_step_of_the_wall_clock_ends_no_lease_and_prolongs_none(
    monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    async def scenario() -> None:
        # Agreement takes its time here, or a busy machine might let it come first.
        alone = Settings(shards=10, ttl_s=TTL_S, evict_after_s=30.0)
        async with Processes([Diary], nodes=3, settings=alone) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            before = [mine(cluster, node) for node in range(3)]
            renewed = len([*cluster.history().of("renewed")])
            step_every_clock(cluster, by_s, monkeypatch)
            # Each of them renews a few times under the new wall clock.
            await cluster.wait_until(
                lambda: len([*cluster.history().of("renewed")]) >= renewed + 12
            )
            assert [mine(cluster, node) for node in range(3)] == before
            node = next(node for node in range(3) if node != cluster.leader())
            shard, old = cluster.shard(Diary, id_at(cluster, node)), before[node]
            epoch = cluster.entry(shard).epoch
            cluster.freeze(node)
            # Nothing but its lease tells of it: its lock is held, and nobody has to agree.
            await cluster.wait_until(lambda: expired(cluster.history(), old))
            await cluster.wait_until(
                lambda: cluster.settled() and cluster.entry(shard).owner not in ("", old)
            )
            new = cluster.entry(shard).owner
            cluster.thaw(node)
            await cluster.wait_until(lambda: cluster.incarnation(node) not in (None, old))
            await cluster.wait_until(cluster.settled)
            history = cluster.history()
        judge(history)
        fenced = [event.fields["inc"] for event in history.of("fenced")]
        assert fenced == [old], "nobody but the frozen one"
        assert [event.fields["by"] for event in history.of("stepped")] == [by_s]
        assert evicted(history) == {}
        # By the clock of the new home, which counts from the machine's boot.
        granted = of(history, old, "renewed")[-1].fields
        opened = next(
            event.at
            for event in of(history, new, "open")
            if event.fields["shard"] == shard.shard and event.fields["epoch"] > epoch
        )
        assert granted["ttl"] == TTL_S
        assert granted["sent_at"] + TTL_S <= opened
        assert opened < fault_at(history, "freeze", old) + 10 * TTL_S

    run(scenario())


# RG-10


@pytest.mark.scenario("RG-10")
@pytest.mark.parametrize("who", LEAVERS)
def test_a_node_that_leaves_over_a_slow_network_takes_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    ledger = open_ledger(monkeypatch, tmp_path)
    patient = Settings(shards=10, ttl_s=TTL_S, ask_timeout_s=60.0)
    busy = "desk-slow"

    async def scenario() -> None:
        async with Processes([Desk], nodes=4, settings=patient, network="auto") as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            leaving = leavers(cluster, who, busy)
            gone = [mine(cluster, node) for node in leaving]
            for node in range(4):
                cluster.delay(node, 0.01, jitter_s=0.03)
            slow = busy if who == "slow entity" else None
            await leave_under_load(cluster, ledger, leaving, slow)
            history = cluster.history()
        judge(history)
        nothing_lost(history)
        for inc in gone:
            assert of(history, inc, "released"), "it had nothing to hand over"
            assert of(history, inc, "ended")

    run(scenario())
