"""The scenarios that depend on the store, with real nodes on real servers of every store.

They are those that `test_real_fencing`, `test_real_membership`, `test_real_manager` and
`test_real_chaos` play on the embedded store. Several share one cluster, which costs less.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack

import pytest
from backends_lab import SERVERS, StoreServer
from real_entities import Diary
from real_lab import (
    Loss,
    acted_late,
    balanced,
    deadline,
    entries,
    fenced,
    id_at,
    judge,
    mine,
    of,
    run,
    within_each_time,
    written,
)

from domicile import Settings
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.state.keys import NODES
from domicile.core.state.records import NodeRecord, decode_record
from domicile.testing import History, Processes
from domicile.testing.suites.byte_proxy import ByteProxy

ROLE = "default"
SETTINGS = Settings(shards=6, ttl_s=3.0, balance_interval_s=0.3, ask_timeout_s=60.0)
FAILED = "lease.unacknowledged"
HOUR_S = 3_600.0
LIMIT_S = 120.0

ALL = os.environ.get("DOMICILE_TEST_STORES") == "all"
"""Whether everything is played, as `make test-stores` does."""

STORES = list(SERVERS) if ALL else ["postgresql", "etcd"]
LONG = list(SERVERS) if ALL else ["postgresql"]
"""For what takes longer."""

OUTAGES = [True, False] if ALL else [True]
"""How the server is away: it dies, or stands still, too."""


@pytest.fixture(params=STORES)
def server(request: pytest.FixtureRequest) -> StoreServer:
    """A server of each store."""
    return SERVERS[request.param]()


def evicted(history: History) -> list[str]:
    """The names of the nodes that were marked."""
    return [
        record.node
        for event in history.of("commit")
        for key, value, _ in event.fields["puts"]
        if key.startswith(NODES)
        and (record := decode_record(value, NodeRecord)).status == "evicted"
    ]


@pytest.mark.scenario("LS-13")
@pytest.mark.scenario("DX-01", partial=True)
def test_a_stopped_node_and_then_a_stopped_leader_change_nothing_when_they_wake_up(
    server: StoreServer,
) -> None:
    async def scenario() -> None:
        store = server.new_database()
        async with Processes([Diary], nodes=3, settings=SETTINGS, store=store) as cluster:
            await cluster.wait_until(lambda: balanced(cluster), timeout_s=LIMIT_S)
            leader = cluster.leader()
            node = next(one for one in range(3) if one != leader)
            stopped: list[tuple[str, str]] = []
            for victim in (node, leader):
                assert victim is not None
                old, id = mine(cluster, victim), id_at(cluster, victim)
                known = id_at(cluster, next(n for n in range(3) if n not in (leader, node)))
                first = await written(cluster, id, "at the old home")
                cluster.freeze(victim)
                # What others serve goes on, also without a coordinator.
                assert await written(cluster, known, "meanwhile") >= 1
                shard = cluster.shard(Diary, id)

                def moved(shard: ShardKey = shard, old: Incarnation = old) -> bool:
                    entry = cluster.entry(shard)
                    return entry.state == "serving" and entry.owner not in ("", old)

                await cluster.wait_until(moved, timeout_s=LIMIT_S)
                assert await written(cluster, id, "at the new home") <= first
                before = cluster.entry(shard)
                cluster.thaw(victim)
                await cluster.wait_until(lambda old=old: fenced(cluster, old), timeout_s=LIMIT_S)  # type: ignore[misc]
                assert cluster.entry(shard) == before
                await cluster.wait_until(lambda: balanced(cluster), timeout_s=LIMIT_S)
                stopped.append((old, cluster.node_id(victim)))
            assert cluster.leader() not in (None, leader)
            history = cluster.history()
        judge(history)
        for old, name in stopped:
            assert not acted_late(history, old)
            frozen = next(
                event.at
                for event in history.of("fault")
                if event.fields["fault"] == "freeze" and event.fields["inc"] == old
            )
            writes = [
                event for event in history.of("commit")
                if event.fields["by"] == name and event.at > frozen
            ]  # fmt: skip
            # The first that it stores afterwards is the record of another incarnation.
            assert [key.startswith(NODES) for key, *_ in writes[0].fields["puts"]] == [True]
            assert all(old not in repr(event.fields["puts"]) for event in writes[:1])

    run(scenario())


@pytest.mark.scenario("SM-20")
@pytest.mark.parametrize("dies", OUTAGES, ids=lambda dies: "dies" if dies else "stands still")
def test_the_server_is_away_in_a_rebalance_and_the_manager_restarts(
    server: StoreServer, dies: bool
) -> None:
    async def scenario() -> None:
        store = server.new_database()
        settings = Settings(shards=40, ttl_s=3.0, balance_interval_s=0.5, ask_timeout_s=60.0)
        async with Processes(
            [Diary], nodes=2, managers=1, settings=settings, store=store
        ) as cluster:
            await cluster.wait_until(cluster.settled, timeout_s=LIMIT_S)
            cluster.crash(1)
            await cluster.wait_until(cluster.settled, timeout_s=LIMIT_S)
            cluster.start(1)

            def begun() -> bool:
                newcomer = cluster.incarnation(1)
                there = entries(cluster).values()
                return newcomer is not None and any(entry.to == newcomer for entry in there)

            await cluster.wait_until(begun, timeout_s=LIMIT_S)
            lives = [mine(cluster, node) for node in range(2)]
            (server.kill if dies else server.freeze)()
            try:
                assert not all(entry.state == "serving" for entry in entries(cluster).values())
                cluster.crash(2)
                cluster.start(2)
                await cluster.wait_until(
                    lambda: all(fenced(cluster, life) for life in lives), timeout_s=LIMIT_S
                )
            finally:
                await asyncio.to_thread(server.start if dies else server.thaw)
            await cluster.wait_until(
                lambda: cluster.settled() and cluster.leader() == 2, timeout_s=LIMIT_S
            )
            before = entries(cluster)
            # RG-12: everything restarts, and what was decided is known.
            for node in range(3):
                cluster.crash(node)
            for node in range(3):
                cluster.start(node)
            await cluster.wait_until(
                lambda: (
                    cluster.settled()
                    and all(entries(cluster)[n].epoch > before[n].epoch for n in before)
                ),
                timeout_s=LIMIT_S,
            )
            assert await written(cluster, "after", "all of it") == 1
            history = cluster.history()
        # An epoch has one owner (I1a): judged over all commits.
        judge(history)
        assert not any(acted_late(history, life) for life in lives)

    run(scenario())


@pytest.mark.scenario("LS-12")
@pytest.mark.scenario("DX-18", partial=True)
def test_a_node_without_the_store_stops_itself_and_steps_of_the_clock_stop_none(
    server: StoreServer,
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
                )
            )  # fmt: skip
            await cluster.wait_until(lambda: balanced(cluster), timeout_s=LIMIT_S)
            # DX-18: nobody loses a lease by a step, there or back, and even further back.
            lives = [mine(cluster, node) for node in range(3)]
            # What a process keeps of a renewal is of before the first step.
            await _all_renew(cluster, lives)
            led = _terms(cluster)
            for by_s in (HOUR_S, -2 * HOUR_S):
                await asyncio.to_thread(server.step_wall, store, by_s)
                cluster.clock_step(by_s)
                await _all_renew(cluster, lives)
            assert [mine(cluster, node) for node in range(3)] == lives
            assert _terms(cluster) == led, "the coordinator's own lease ended"
            # LS-12. By the clock that was stepped back its lease would live on for an hour.
            node = next(node for node in range(3) if node != cluster.leader())
            old, id = lives[node], id_at(cluster, node)
            earlier = cluster.counts(node)[FAILED]
            await proxies[node].refuse()
            await cluster.wait_until(lambda: fenced(cluster, old), timeout_s=LIMIT_S)
            attempts = cluster.counts(node)[FAILED] - earlier
            assert 1 <= attempts <= 20
            assert await written(cluster, id, "elsewhere") == 1
            await cluster.wait_until(cluster.settled, timeout_s=LIMIT_S)
            assert cluster.owner(Diary, id) != node
            assert cluster.nodes[node].up
            await proxies[node].release()
            await cluster.wait_until(
                lambda: cluster.incarnation(node) not in (None, old), timeout_s=LIMIT_S
            )
            await cluster.wait_until(cluster.settled, timeout_s=LIMIT_S)
            history = cluster.history()
        judge(history)
        assert not acted_late(history, old)
        assert not any(event.fields["reached"] is False for event in history.of("probed"))

    run(scenario())


async def _all_renew(cluster: Processes, lives: list[str]) -> None:
    """Return once each of these incarnations has renewed several times more; none may end."""
    renewed = [len(_renewals(cluster, life)) for life in lives]

    def again() -> bool:
        assert not any(fenced(cluster, life) for life in lives)
        return all(
            len(_renewals(cluster, life)) > before + 3
            for life, before in zip(lives, renewed, strict=True)
        )

    await cluster.wait_until(again, timeout_s=LIMIT_S)


def _terms(cluster: Processes) -> list[tuple[str, int]]:
    """Who has led, each time that somebody was elected."""
    return [
        (event.fields["inc"], event.fields["revision"])
        for event in cluster.recorded
        if event.kind == "leading"
    ]


def _renewals(cluster: Processes, incarnation: str) -> list[float]:
    return [
        event.at
        for event in cluster.recorded
        if event.kind == "renewed" and event.fields["inc"] == incarnation
    ]


async def no_leader_and_no_map_is_lost(server: StoreServer) -> None:
    settings = Settings(shards=6, ttl_s=3.0, poison_deaths=1_000_000, ask_timeout_s=60.0)
    store = server.new_database()
    async with Processes([Diary], nodes=3, settings=settings, store=store) as cluster:
        # The coordinator first: then no node is lost twice before all of them are.
        await cluster.wait_until(lambda: balanced(cluster), timeout_s=LIMIT_S)
        leader = cluster.leader()
        assert leader is not None
        for victim in (leader, *(node for node in range(3) if node != leader)):
            await cluster.wait_until(lambda: balanced(cluster), timeout_s=LIMIT_S)
            before, loss = entries(cluster), Loss(cluster, victim)
            unknown = id_at(cluster, victim)
            known = id_at(cluster, next(node for node in range(3) if node != victim))
            cluster.crash(victim)
            waits = asyncio.ensure_future(written(cluster, unknown, "elsewhere"))
            assert await written(cluster, known, "meanwhile") >= 1
            await loss.replaced()
            after = entries(cluster)
            for number, was in before.items():
                now = after[number]
                if was.owner == loss.incarnation:
                    assert now.epoch == was.epoch + 1
                else:
                    assert (now.owner, now.epoch) == (was.owner, was.epoch), "nothing else moved"
            assert await waits == 1, "it waited for the home that the next coordinator named"
            assert cluster.leader() not in (None, victim)
            cluster.start(victim)
        # What people have asked for: this shard is to be here, and that node empty.
        await cluster.wait_until(lambda: balanced(cluster), timeout_s=LIMIT_S)
        wished = ShardKey(ROLE, 0)
        place = next(n for n in range(3) if mine(cluster, n) != cluster.entry(wished).owner)
        empty = next(node for node in range(3) if node != place)
        await cluster.wish(wished, place)
        await cluster.drain(empty)

        def as_asked() -> bool:
            owners = [entry.owner for entry in entries(cluster).values()]
            return (
                cluster.settled()
                and cluster.entry(wished).owner == cluster.incarnation(place)
                and cluster.incarnation(empty) not in (None, *owners)
            )

        await cluster.wait_until(as_asked, timeout_s=LIMIT_S)
        before = entries(cluster)
        for node in range(3):
            cluster.crash(node)
        server.kill()
        await asyncio.to_thread(server.start)
        for node in range(3):
            cluster.start(node)
        await cluster.wait_until(
            lambda: as_asked() and all(entries(cluster)[n].epoch > before[n].epoch for n in before),
            timeout_s=LIMIT_S,
        )
        assert await written(cluster, "after", "all of it") == 1
        history = cluster.history()
    # An epoch has one owner (I1a), before the restart and after it.
    judge(history)


@pytest.mark.scenario("RG-12")
@pytest.mark.parametrize("server", LONG, indirect=True)
def test_what_the_coordinator_knew_survives_each_node_and_a_restart_of_all(
    server: StoreServer,
) -> None:
    run(no_leader_and_no_map_is_lost(server))


@pytest.mark.scenario("RG-09")
@pytest.mark.parametrize("server", LONG, indirect=True)
def test_known_shards_flow_and_unknown_ones_wait_until_somebody_coordinates_again(
    server: StoreServer,
) -> None:
    """Only one process may coordinate, so the time without a coordinator lasts until it is back."""

    async def scenario() -> None:
        store = server.new_database()
        async with Processes(
            [Diary], nodes=3, settings=SETTINGS, store=store, candidates=[0]
        ) as cluster:
            await cluster.wait_until(lambda: balanced(cluster), timeout_s=LIMIT_S)
            unknown, known = id_at(cluster, 0), [id_at(cluster, 1), id_at(cluster, 2)]
            dead, before = mine(cluster, 0), entries(cluster)
            cluster.crash(0)
            # Its record goes, and its leader key; who asks then has no home to send to.
            await cluster.wait_until(
                lambda: (
                    cluster.status(dead) is None
                    and any(
                        event.kind == "gone" and event.fields["peer"] == dead
                        for event in cluster.recorded
                    )
                ),
                timeout_s=LIMIT_S,
            )
            waiting = [
                asyncio.ensure_future(cluster.ref(Diary, unknown).ask(Diary.write, "held"))
                for _ in range(10)
            ]
            for line in range(50):
                for id in known:
                    assert await cluster.ref(Diary, id).ask(Diary.write, "flows") == line + 1
            assert not any(ask.done() for ask in waiting)
            assert entries(cluster) == before, "nobody can have changed the map"
            cluster.start(0)
            assert await asyncio.gather(*waiting) == list(range(1, 11)), "in order, each once"
            await cluster.wait_until(lambda: cluster.leader() == 0, timeout_s=LIMIT_S)
            history = cluster.history()
        judge(history)

    run(scenario())


LOST = ("SIGKILL", "SIGSTOP", "cut network", "the coordinator", "the server restarts")


async def lost_and_served(server: StoreServer, ttl_s: float, within_s: float, how: str) -> None:
    settings = Settings(shards=6, ttl_s=ttl_s, poison_deaths=1_000_000, ask_timeout_s=60.0)
    store = server.new_database()
    async with Processes(
        [Diary], nodes=3, settings=settings, store=store, network="loopback"
    ) as cluster:

        async def lose_one() -> tuple[float, float]:
            await cluster.wait_until(lambda: balanced(cluster), timeout_s=LIMIT_S)
            leader = cluster.leader()
            assert leader is not None
            if how == "the server restarts":
                return await _restarted(cluster, server)
            victim = leader if how == "the coordinator" else (leader + 1) % 3
            id, loss = id_at(cluster, victim), Loss(cluster, victim)
            others = [end for end in range(-1, 3) if end != victim]
            began = cluster.now()
            match how:
                case "SIGSTOP":
                    cluster.freeze(victim)
                case "cut network":
                    cluster.partition([victim], others)
                case _:
                    cluster.crash(victim)
            await loss.replaced()
            assert await written(cluster, id, "elsewhere") >= 1
            served_at = loss.served_at(cluster.history())[1]
            match how:
                case "SIGSTOP":
                    cluster.thaw(victim)
                case "cut network":
                    cluster.heal()
                case _:
                    cluster.start(victim)
            await cluster.wait_until(
                lambda: cluster.incarnation(victim) not in (None, loss.incarnation),
                timeout_s=LIMIT_S,
            )
            return began, served_at

        await within_each_time(cluster, within_s, lose_one)
        history = cluster.history()
    judge(history)


async def _restarted(cluster: Processes, server: StoreServer) -> tuple[float, float]:
    """SIGKILL to the server, which starts again at once: from its first answer until all shards are
    served and known. How long a server recovers is not the nodes' affair: PostgreSQL took 15 s."""
    lives = [mine(cluster, node) for node in range(3)]
    server.kill()
    await asyncio.to_thread(server.start)
    began = cluster.now()
    renewed = {life: len(_renewals(cluster, life)) for life in lives}

    def known() -> bool:
        now = [cluster.incarnation(node) for node in range(3)]
        return cluster.settled() and all(
            one is not None and len(_renewals(cluster, one)) > renewed.get(one, 0) for one in now
        )

    await cluster.wait_until(known, timeout_s=LIMIT_S)
    for node in range(3):
        assert await written(cluster, id_at(cluster, node), "served") >= 1
    return began, cluster.now()


@pytest.mark.scenario("DX-04")
@pytest.mark.parametrize("server", LONG, indirect=True)
@pytest.mark.parametrize("how", LOST if ALL else LOST[:1])
@pytest.mark.parametrize(
    ("ttl_s", "within_s"), [(Settings().ttl_s, 10.0), (2.0, 3.0)] if ALL else [(6.0, 10.0)]
)
def test_what_is_lost_is_served_elsewhere_in_time(
    server: StoreServer, ttl_s: float, within_s: float, how: str
) -> None:
    run(lost_and_served(server, ttl_s, within_s, how))


@pytest.mark.scenario("DX-17")
def test_a_node_that_no_peer_reaches_is_evicted_and_a_one_way_fault_evicts_nobody(
    server: StoreServer,
) -> None:
    async def scenario() -> None:
        store = server.new_database()
        async with Processes(
            [Diary], nodes=4, settings=SETTINGS, network="loopback", store=store
        ) as cluster:
            await cluster.wait_until(lambda: balanced(cluster), timeout_s=LIMIT_S)
            hostage = next(node for node in range(4) if node != cluster.leader())
            old, name = mine(cluster, hostage), cluster.node_id(hostage)
            id = id_at(cluster, hostage)
            cut_at = cluster.now()
            cluster.partition([hostage], [node for node in range(-1, 4) if node != hostage])
            await cluster.wait_until(lambda: fenced(cluster, old), timeout_s=LIMIT_S)
            await cluster.wait_until(cluster.settled, timeout_s=LIMIT_S)
            assert await written(cluster, id, "elsewhere") >= 1
            cluster.heal()
            await cluster.wait_until(lambda: balanced(cluster), timeout_s=LIMIT_S)
            # A coordinator that hears nobody can't evict the majority.
            deaf = cluster.leader()
            assert deaf is not None
            others = [node for node in range(4) if node != deaf]
            before = {node: mine(cluster, node) for node in others}
            faulty = cluster.node_id(deaf)
            cluster.partition(others, [deaf], one_way=True)
            await cluster.wait_until(lambda: cluster.leader() in others, timeout_s=LIMIT_S)
            assert {node: mine(cluster, node) for node in others} == before
            cluster.heal()
            await cluster.wait_until(lambda: balanced(cluster), timeout_s=LIMIT_S)
            assert {node: mine(cluster, node) for node in others} == before
            history = cluster.history()
        judge(history)
        assert name in evicted(history)
        assert {*evicted(history)} <= {name, faulty}
        # Nothing was wrong with its lease: it renewed until it was told.
        [fence] = of(history, old, "fenced")
        assert fence.at < deadline(history, old)
        assert [event.at for event in of(history, old, "renewed")][-1] > cut_at

    run(scenario())
