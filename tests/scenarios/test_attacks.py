"""What attacks on coordinator and membership broke once: each test is an attack that must fail."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from domicile import Entity, Settings, handler
from domicile.core.strategies import Situation
from domicile.testing import Sim, simulated
from domicile.testing.simulated import run_simulation


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
        if one.up and one.node and one.node.life and one.node.life.elected.leading:
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
