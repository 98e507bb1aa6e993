"""What attacks on coordinator and membership broke once: each test is an attack that must fail."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from domicile import Entity, EventSourced, MaybeExecuted, Settings, handler
from domicile.core.ids import ShardKey
from domicile.core.placement.strategies import Situation
from domicile.core.state.keys import (
    CLEARANCE,
    CLIENTS,
    DEAD,
    DRAIN,
    NODES,
    RELEASE,
    TARGET_KEY,
    WISH,
)
from domicile.core.state.txn import Delete, Put
from domicile.testing import Sim, simulated
from domicile.testing.sim.simulated import run_simulation


class Desk(Entity, name="desk"):
    """Counts in memory."""

    def __init__(self) -> None:
        self.total = 0

    @handler
    async def add(self, amount: int) -> int:
        self.total += amount
        return self.total


class Shelf(Desk, name="shelf", role="store"):
    """The same in a role of its own."""


IDS = [f"d{number}" for number in range(24)]


def leader(sim: Sim) -> int | None:
    """The node that coordinates now, if one does."""
    for one in sim.nodes:
        if one.up and one.node and one.node.life and one.node.life.control.leading:
            return one.index
    return None


# users' functions


class Counted:
    """A strategy that has no opinion, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, situation: Situation) -> Mapping[int, str]:
        self.asked += 1
        assert self.asked < 1_000, "it is asked without end"
        return {}


def test_with_several_roles_a_function_is_asked_once_a_round_for_each() -> None:
    strategy = Counted()
    settings = Settings(shards=4)
    sim = Sim(1, entities=[Desk, Shelf], nodes=2, settings=settings, strategy=strategy)

    async def body(sim: Sim) -> None:
        before = strategy.asked
        await sim.advance(10 * settings.balance_interval_s)
        assert 18 <= strategy.asked - before <= 22

    run_simulation(sim, body)


def cancels(situation: Situation) -> Mapping[int, str]:
    raise asyncio.CancelledError


async def cancels_later(situation: Situation) -> Mapping[int, str]:
    raise asyncio.CancelledError


def exits(situation: Situation) -> Mapping[int, str]:
    raise SystemExit(3)


async def deaf(situation: Situation) -> Mapping[int, str]:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


@pytest.mark.parametrize("strategy", [cancels, cancels_later, exits, deaf])
def test_no_function_keeps_shards_homeless_or_ends_a_node(strategy: Any) -> None:
    sim = Sim(1, entities=[Desk], nodes=2, settings=Settings(shards=4), strategy=strategy)

    async def body(sim: Sim) -> None:
        first = leader(sim)
        assert first is not None
        sim.crash(first)
        await sim.wait_until(sim.settled, timeout_s=20.0)
        for id in IDS:
            assert await sim.ref(Desk, id).ask(Desk.add, 1) == 1

    run_simulation(sim, body)


# who reaches whom


@simulated(entities=[Desk], nodes=4, seeds=2, settings=Settings(shards=8, ttl_s=30.0))
async def test_a_hostage_is_evicted_however_long_its_lease_is(sim: Sim) -> None:
    first = leader(sim)
    assert first is not None
    hostage = (first + 1) % 4
    sim.partition([one for one in range(4) if one != hostage], [hostage])
    await sim.wait_until(lambda: bool(list(sim.history.of("fenced"))), timeout_s=60.0)
    sim.heal()
    await sim.wait_until(sim.settled, timeout_s=90.0)


@simulated(entities=[Desk], nodes=2, seeds=4, settings=Settings(shards=8, ttl_s=1.0))
async def test_nobody_is_evicted_for_the_time_between_two_pings(sim: Sim) -> None:
    await sim.advance(120.0)
    assert not list(sim.history.of("fenced"))


@simulated(
    entities=[Desk],
    nodes=3,
    seeds=2,
    settings=Settings(shards=12, fencing="health"),
    locks=True,
)
async def test_a_silent_majority_does_not_leave_the_cluster_without_a_leader(sim: Sim) -> None:
    awake = leader(sim)
    for one in range(3):
        if one != awake:
            sim.freeze(one)
    without_s = 0.0
    for _ in range(600):
        await sim.advance(0.2)
        without_s = 0.0 if leader(sim) is not None else without_s + 0.2
        assert without_s < 3.0


# what is in the store


def test_stray_keys_end_nobody() -> None:
    prefixes = (NODES, CLIENTS, DRAIN, WISH, RELEASE, CLEARANCE, DEAD)
    keys = [*(prefix + tail for prefix in prefixes for tail in (b"\xff", b"x")), TARGET_KEY]
    sim = Sim(1, entities=[Desk], nodes=3, settings=Settings(shards=8))

    async def body() -> None:
        async with sim:
            lives = [one.incarnation for one in sim.nodes]
            store = sim.servers.store.client("vandal")
            for key in keys:
                await store.commit((), (Put(key, b"\xff"),))
                await sim.advance(0.5)
                await store.commit((), (Delete(key),))
                await sim.advance(0.5)
                assert await sim.ref(Desk, "d0").ask(Desk.add, 0) == 0, key
            assert [one.incarnation for one in sim.nodes] == lives
            assert leader(sim) is not None

    try:
        # Without the checkers, which read every key as one of the cluster's own.
        sim.world.run(body(), sim.loop)
        assert sim.world.errors == []
    finally:
        sim.close()


# innocents


def condemned(sim: Sim) -> list[int]:
    """Shards that are quarantined."""
    return [
        shard
        for shard in range(sim.settings.shards)
        if sim.entry(ShardKey("default", shard)).state == "quarantined"
    ]


async def use_all(sim: Sim) -> None:
    await asyncio.gather(*(sim.ref(Desk, id).ask(Desk.add, 1) for id in IDS))


@simulated(entities=[Desk], nodes=1, seeds=2, settings=Settings(shards=4))
async def test_a_node_that_is_restarted_again_and_again_loses_no_shard(sim: Sim) -> None:
    for _ in range(4):
        await use_all(sim)
        await sim.stop(0)
        sim.start(0)
        await sim.wait_until(sim.settled)
        assert condemned(sim) == []
        assert sim.entry(ShardKey("default", 0)).deaths == 0


@simulated(entities=[Desk], nodes=3, seeds=4, settings=Settings(shards=12))
async def test_outages_of_the_store_quarantine_nothing(sim: Sim) -> None:
    for _ in range(4):
        await use_all(sim)
        sim.store_outage(running=True)
        await sim.advance(9.0)
        sim.store_back()
        await sim.advance(5.0)
        await sim.wait_until(sim.settled)
        assert condemned(sim) == []


# homes that empty themselves


class Nap(Entity, name="nap"):
    """Busy for a while."""

    @handler
    async def nap(self, seconds: float) -> bool:
        await asyncio.sleep(seconds)
        return True


class Tape(EventSourced[int, int], name="tape"):
    """A journaled sum."""

    @staticmethod
    def initial(id: str) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: int) -> int:
        return state + event

    @handler
    async def add(self, amount: int) -> int:
        return await self.persist(amount)


@simulated(entities=[Nap, Tape], nodes=2, seeds=2, settings=Settings(shards=1))
async def test_mail_does_not_go_to_and_fro_while_a_home_drains_by_itself(sim: Sim) -> None:
    """After a rewind the journal knows the epoch that is given out a second time (J1)."""
    shard, home = ShardKey("default", 0), sim.owner(Tape, "t")
    await sim.advance(5.0)
    await sim.wish(shard, 1 - home)
    await sim.wait_until(lambda: sim.settled() and sim.owner(Tape, "t") != home)
    assert await sim.ref(Tape, "t").ask(Tape.add, 1) == 1
    sim.rewind(0.5)
    await sim.advance(8.0)
    await sim.wait_until(sim.settled)

    nap = asyncio.ensure_future(sim.ref(Nap, "busy").ask(Nap.nap, 6.0))
    await sim.wait_until(lambda: bool(list(sim.history.of("start"))))
    await sim.advance(0.2)
    outrun = asyncio.ensure_future(sim.ref(Tape, "t").ask(Tape.add, 1))
    await sim.advance(0.2)
    before = len(list(sim.history.of("return")))
    late = [asyncio.ensure_future(sim.ref(Nap, id).ask(Nap.nap, 0.0)) for id in IDS[:10]]
    assert all(await asyncio.gather(nap, *late))
    with pytest.raises(MaybeExecuted, match="was claimed under epoch 2"):
        await outrun
    returns = len(list(sim.history.of("return"))) - before
    assert 0 < returns < 30 * len(late), "six seconds, four times a second"
    assert await sim.ref(Tape, "t").ask(Tape.add, 1) == 2


# everybody goes


@pytest.mark.parametrize("seed", range(6))
def test_nodes_that_all_stop_at_about_the_same_time_let_go_of_everything(seed: int) -> None:
    sim = Sim(seed, entities=[Desk], nodes=4, settings=Settings(shards=12))

    async def body(sim: Sim) -> None:
        for _ in range(3):
            await use_all(sim)
            began = sim.world.now
            for node in sim.nodes:
                assert node.loop is not None
                assert node.stopping is not None
                node.loop.post(node.stopping.set)
                await sim.advance(0.3 * sim.random.random())
            await sim.wait_until(lambda: all(node.done for node in sim.nodes))
            assert sim.world.now - began < sim.settings.drain_deadline_s / 2
            for number in range(4):
                sim.start(number)
            await sim.wait_until(sim.settled)

    # That each home was emptied before its node left is for the checkers to say (H9, H14).
    run_simulation(sim, body)


@simulated(entities=[Desk], nodes=3, seeds=6, settings=Settings(shards=4))
async def test_a_store_that_is_rewound_again_and_again_ends_nobody(sim: Sim) -> None:
    await sim.advance(10.0)
    for _ in range(60):
        sim.rewind(0.05)
        await sim.advance(0.6 * sim.random.random())
    await sim.advance(10.0)
    await sim.wait_until(sim.settled)
    await use_all(sim)
