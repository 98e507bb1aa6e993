"""Scenarios of assignment at size: scaling, versions, strategies; what was moved is printed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from itertools import pairwise
from typing import Any

import pytest
from manager_lab import Diary, Stored, stored

from domicile import Settings
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.placement.strategies import Situation
from domicile.core.state.keys import TARGET_KEY, node_key
from domicile.core.state.txn import Put
from domicile.testing import Sim, simulated
from domicile.testing.sim.simulated import run_simulation

MANY = Settings(shards=300)


def homes(sim: Sim) -> list[int]:
    """The node index of each shard's owner; -1 for one that is not running."""
    by_incarnation = {node.incarnation: node.index for node in sim.nodes if node.up}
    shards = range(sim.settings.shards)
    return [by_incarnation.get(sim.entry(ShardKey("default", s)).owner, -1) for s in shards]


def loads(sim: Sim) -> list[int]:
    """Shards of each running node."""
    count = Counter(homes(sim))
    return sorted(count[node.index] for node in sim.nodes if node.up and not node.manager)


def at_rest(sim: Sim) -> bool:
    return sim.settled() and max(loads(sim)) - min(loads(sim)) <= 1


class Count:
    """What the coordinator commits from now on."""

    def __init__(self, sim: Sim) -> None:
        self._sim, self._began, self._from = sim, sim.world.now, len(stored(sim))

    @property
    def changes(self) -> list[Stored]:
        """Every changed entry."""
        return stored(self._sim)[self._from :]

    @property
    def moved(self) -> list[int]:
        """The shard of each new owner, in order."""
        return [one.shard.shard for one in self.changes if one.entry.epoch > one.before.epoch]

    @property
    def rounds(self) -> int:
        """How many rounds began moves: commits of one round are closer than half an interval."""
        began = [one.at for one in self.changes if one.entry.state == "moving"]
        gap_s = self._sim.settings.balance_interval_s / 2
        return len(began) and 1 + sum(b - a > gap_s for a, b in pairwise(began))

    def report(self, what: str, least: int, rounds: int) -> None:
        """A line for people, with the least that could do it."""
        spread = max(loads(self._sim)) - min(loads(self._sim))
        took_s = self._sim.world.now - self._began
        print(
            f"{what}: {len(self.moved)} moves (minimum {least}), {self.rounds} rounds of moves "
            f"(limit implies {rounds}), spread {spread}, {took_s:.1f} s"
        )


# SM-09, SM-10, SM-11


@pytest.mark.scenario("SM-09")
@simulated(entities=[Diary], nodes=20, seeds=2, settings=MANY)
async def test_scale_out_is_balanced_within_the_rounds_that_the_limit_implies(sim: Sim) -> None:
    await sim.wait_until(lambda: at_rest(sim), timeout_s=60)
    assert loads(sim) == [15] * 20
    count = Count(sim)
    for _ in range(5):
        sim.add()
    await sim.wait_until(lambda: sim.settled() and loads(sim) == [12] * 25, timeout_s=60)
    implied = 60 / (300 * sim.settings.balance_limit)
    count.report("SM-09, 20 to 25 nodes", 60, int(implied))
    await sim.advance(10)
    assert len(count.moved) == 60, "12 shards for each of 5 nodes, and not one more"
    assert len(set(count.moved)) == 60, "no shard twice"
    assert implied <= count.rounds <= implied + 2, "nodes are heard of one after the other"


@pytest.mark.scenario("SM-10")
@simulated(entities=[Diary], nodes=25, seeds=2, settings=MANY, locks=True)
async def test_scale_in_is_balanced_at_once(sim: Sim) -> None:
    await sim.wait_until(lambda: at_rest(sim), timeout_s=60)
    count = Count(sim)
    for index in (3, 8, 11, 17, 24):
        sim.crash(index)
    await sim.wait_until(lambda: loads(sim) == [15] * 20 and sim.settled(), timeout_s=10)
    count.report("SM-10, 25 to 20 nodes by crashes", 60, 0)
    assert count.rounds == 0, "what lost its home is placed evenly; nothing is left to balance"
    moved = len(count.moved)
    assert moved <= 75, "but for what went to a node whose death was not known yet"
    await sim.advance(10)
    assert len(count.moved) == moved


@pytest.mark.scenario("SM-10")
@simulated(entities=[Diary], nodes=25, seeds=2, settings=MANY)
async def test_a_planned_scale_in_takes_the_fewest_moves(sim: Sim) -> None:
    await sim.wait_until(lambda: at_rest(sim), timeout_s=60)
    count = Count(sim)
    async with asyncio.TaskGroup() as group:
        for index in (3, 8, 11, 17, 24):
            group.create_task(sim.stop(index))
    await sim.wait_until(lambda: loads(sim) == [15] * 20 and sim.settled(), timeout_s=20)
    count.report("SM-10, 25 to 20 nodes that leave", 60, 1)
    await sim.advance(10)
    assert sorted(set(count.moved)) == sorted(count.moved), "no shard twice"
    assert len(count.moved) == 60


@pytest.mark.scenario("SM-11")
@simulated(entities=[Diary], nodes=1, seeds=2, settings=MANY)
async def test_thirty_nodes_one_by_one_end_balanced_with_every_shard_assigned(sim: Sim) -> None:
    count = Count(sim)
    for _ in range(29):
        sim.add()
        await sim.advance(0.5)
    await sim.wait_until(lambda: at_rest(sim) and loads(sim) == [10] * 30, timeout_s=120)
    count.report("SM-11, 30 nodes one by one", 290, 10)
    assert -1 not in homes(sim)
    moved = len(count.moved)
    await sim.advance(10)
    assert len(count.moved) == moved, "and stays so"


# SM-13, SM-14: versions


async def roll(sim: Sim, version: str, count: int, *, unheard: bool = False) -> None:
    """A rolling update in surge style: start a new one, then stop an old one.

    If the new one is `unheard`, it has registered but answers nobody before the old one departs.
    """
    old = [node.index for node in sim.nodes if node.up and node.version != version]
    for index in old[:count]:
        others = [node.index for node in sim.nodes if node.up]
        new = sim.nodes[sim.add(version=version)]
        if unheard:
            sim.partition([new.index], others)
            await sim.wait_until(lambda new=new: _registered(sim, new.incarnation))  # type: ignore[misc]
            sim.loop.call_later(0.5, sim.heal)
        else:
            await sim.advance(1.5)
        await sim.stop(index)
        await sim.wait_until(sim.settled, timeout_s=30)


def _registered(sim: Sim, incarnation: Incarnation | None) -> bool:
    return incarnation is not None and sim.servers.store.peek(node_key(incarnation)) is not None


def mixed(seed: int, body: Callable[[Sim], Coroutine[Any, Any, None]], version: str) -> None:
    sim = Sim(seed, entities=[Diary], nodes=5, settings=Settings(shards=100))
    for node in sim.nodes:
        node.version = version

    async def run(sim: Sim) -> None:
        await sim.wait_until(lambda: at_rest(sim), timeout_s=60)
        await body(sim)

    run_simulation(sim, run)


@pytest.mark.scenario("SM-13")
@pytest.mark.parametrize(("old", "new"), [("1.9", "1.10"), ("9", "10"), ("1.0rc1", "1.0")])
def test_while_versions_are_mixed_only_the_newest_receive_and_nothing_is_balanced(
    old: str, new: str
) -> None:
    async def body(sim: Sim) -> None:
        count = Count(sim)
        sim.add(version=new)
        sim.add(version=new)
        await sim.advance(15)
        assert count.moved == [], "two empty nodes, and yet nothing is balanced"
        sim.crash(2)
        await sim.wait_until(sim.settled, timeout_s=30)
        assert len(count.moved) == 20
        assert Counter(homes(sim)) == {0: 20, 1: 20, 3: 20, 4: 20, 5: 10, 6: 10}

    mixed(1, body, old)


@pytest.mark.scenario("SM-14")
@pytest.mark.parametrize("seed", range(2))
def test_a_rolling_update_moves_each_shard_once(seed: int) -> None:
    async def body(sim: Sim) -> None:
        count = Count(sim)
        await roll(sim, "2", 5)
        await sim.wait_until(lambda: at_rest(sim), timeout_s=60)
        await sim.advance(10)
        count.report("SM-14, rolling update of 5 nodes", 100, 0)
        assert sorted(count.moved) == list(range(100))

    mixed(seed, body, "1")


@pytest.mark.scenario("SM-14")
@pytest.mark.parametrize("seed", range(3))
def test_a_rolling_update_in_haste_moves_each_shard_once(seed: int) -> None:
    """Newcomers have registered but were not heard yet when an old node departs: the last, too."""

    async def body(sim: Sim) -> None:
        count = Count(sim)
        await roll(sim, "2", 5, unheard=True)
        await sim.wait_until(lambda: at_rest(sim), timeout_s=60)
        await sim.advance(10)
        assert sorted(count.moved) == list(range(100))

    mixed(seed, body, "1")


@pytest.mark.scenario("SM-14")
def test_a_rollback_to_the_target_version_moves_each_shard_once() -> None:
    async def body(sim: Sim) -> None:
        store = sim.servers.remote_store(sim.loop, "test", sim.servers.store_faults("test"))
        await store.commit((), (Put(TARGET_KEY, b"1"),))
        count = Count(sim)
        await roll(sim, "1", 5)
        await sim.wait_until(lambda: at_rest(sim), timeout_s=60)
        count.report("SM-14, rollback of 5 nodes", 100, 0)
        assert sorted(count.moved) == list(range(100))

    mixed(0, body, "2")


@pytest.mark.scenario("SM-14")
def test_a_rollback_without_a_target_does_not_pile_shards_on_one_node() -> None:
    async def body(sim: Sim) -> None:
        most = 0
        for _ in range(5):
            await roll(sim, "1", 1)
            most = max(most, *loads(sim))
        assert most <= 40, "twice a fair share of 100 shards on 5 nodes"
        await sim.wait_until(lambda: at_rest(sim), timeout_s=60)

    mixed(0, body, "2")


@pytest.mark.scenario("SM-14")
def test_versions_that_cannot_be_compared_prefer_nobody() -> None:
    async def body(sim: Sim) -> None:
        sim.add(version="b7c9d1")
        await sim.advance(2)
        sim.crash(2)
        await sim.wait_until(sim.settled, timeout_s=30)
        assert Counter(homes(sim))[5] == 20, "the empty one, as if versions were no matter"

    mixed(0, body, "a3f0e2")


# RG-13, RG-14, RG-15: strategies


def per_round(count: Count, interval_s: float) -> list[int]:
    """How many moves each round began."""
    sizes: list[int] = []
    last = float("-inf")
    for one in count.changes:
        if one.entry.state == "moving":
            if one.at - last > interval_s / 2:
                sizes.append(0)
            sizes[-1] += 1
            last = one.at
    return sizes


@pytest.mark.scenario("RG-13")
@pytest.mark.parametrize(
    ("shards", "relative", "absolute", "receiver", "rounds"),
    [
        (60, 0.1, 1_000, 1.0, [6, 6, 3]),
        (60, 0.1, 1_000, 0.5, [3, 3, 3, 3, 3]),
        (60, 0.5, 5, 1.0, [5, 5, 5]),
        (60, 1.0, 1_000, 1.0, [15]),
        (60, 0.001, 1_000, 1.0, [1] * 15),
        (10, 0.5, 2, 1.0, [2]),
    ],
)
def test_least_shards_keeps_to_absolute_and_relative_limits(
    shards: int, relative: float, absolute: int, receiver: float, rounds: list[int]
) -> None:
    """Three even nodes and a fourth that joins: who gives is known, so is each round's size."""
    settings = Settings(
        shards=shards, balance_limit=relative, balance_shards=absolute, balance_receiver=receiver
    )
    sim = Sim(0, entities=[Diary], nodes=3, settings=settings)

    async def body(sim: Sim) -> None:
        await sim.wait_until(lambda: at_rest(sim), timeout_s=60)
        count = Count(sim)
        sim.add()
        await sim.advance(30)
        assert per_round(count, settings.balance_interval_s) == rounds
        assert at_rest(sim)

    run_simulation(sim, body)


@pytest.mark.scenario("RG-13")
@simulated(entities=[Diary], nodes=4, seeds=6, settings=Settings(shards=40))
async def test_least_shards_converges_from_anywhere(sim: Sim) -> None:
    random = sim.random
    for shard in range(40):
        await sim.wish(ShardKey("default", shard), random.choice((0, 0, 0, 1, 2)))
    await sim.advance(5)
    assert not at_rest(sim)
    for shard in range(40):
        await sim.wish(ShardKey("default", shard), None)
    for _ in range(random.randrange(3)):
        sim.add()
    await sim.wait_until(lambda: at_rest(sim), timeout_s=60)
    count = Count(sim)
    await sim.advance(10)
    assert count.moved == [], "at rest it stays at rest"


@pytest.mark.scenario("RG-13")
def test_capacity_weighs_nodes() -> None:
    sim = Sim(0, entities=[Diary], nodes=3, settings=Settings(shards=60))
    for node, capacity in zip(sim.nodes, (1.0, 2.0, 3.0), strict=True):
        node.capacity = capacity

    async def body(sim: Sim) -> None:
        await sim.wait_until(lambda: loads(sim) == [10, 20, 30], timeout_s=30)
        assert [homes(sim).count(index) for index in range(3)] == [10, 20, 30]

    run_simulation(sim, body)


@pytest.mark.scenario("RG-15")
@simulated(
    entities=[Diary], nodes=9, seeds=2, settings=Settings(shards=256), strategy="consistent_ring"
)
async def test_a_joining_node_takes_about_its_share_from_the_ring(sim: Sim) -> None:
    await sim.advance(60)
    count = Count(sim)
    new = sim.add()
    await sim.advance(30)
    print(f"RG-15, 9 to 10 nodes: {len(count.moved)} of 256 shards moved, a share is 25.6")
    assert 10 <= len(count.moved) <= 1.5 * 25.6
    assert len(set(count.moved)) == len(count.moved)
    assert homes(sim).count(new) >= 0.8 * len(count.moved), "nearly all of them to the new node"


class Pairs:
    """A user's function: even shards on the oldest node, odd ones on the newest."""

    def __init__(self) -> None:
        self.asked = 0
        self.trouble: Callable[[], object] | None = None

    def __call__(self, situation: Situation) -> Mapping[int, str]:
        self.asked += 1
        if self.trouble is not None:
            self.trouble()
        ends = situation.seats[0].node, situation.seats[-1].node
        return {shard: ends[shard % 2] for shard in range(len(situation.homes))}


def fail() -> None:
    raise RuntimeError("no idea")


@pytest.mark.scenario("RG-14")
@pytest.mark.parametrize("seed", range(3))
def test_a_custom_function_decides_placement_and_rebalancing(seed: int) -> None:
    strategy = Pairs()
    sim = Sim(seed, entities=[Diary], nodes=3, settings=Settings(shards=12), strategy=strategy)

    async def body(sim: Sim) -> None:
        assert sorted(Counter(homes(sim)).values()) == [6, 6]
        new = sim.add()
        await sim.wait_until(lambda: homes(sim)[1::2] == [new] * 6 and sim.settled(), timeout_s=30)
        strategy.trouble = fail
        for _ in range(3):
            assert await sim.ref(Diary, "d").ask(Diary.write, "x")
        sim.crash(new)
        await sim.wait_until(lambda: sim.settled() and new not in homes(sim), timeout_s=30)
        before, asked = homes(sim), strategy.asked
        await sim.advance(10)
        assert homes(sim) == before, "while it fails nothing is balanced"
        assert strategy.asked > asked, "and it is asked again all the same"
        strategy.trouble = None
        await sim.wait_until(lambda: len(set(homes(sim)[1::2])) == 1, timeout_s=30)

    run_simulation(sim, body)


@pytest.mark.scenario("RG-14")
@pytest.mark.parametrize("seed", range(3))
def test_a_custom_function_that_hangs_stops_nothing(seed: int) -> None:
    hangs = False

    async def strategy(situation: Situation) -> Mapping[int, str]:
        if hangs:
            await asyncio.sleep(1e6)
        return dict.fromkeys(range(len(situation.homes)), situation.seats[0].node)

    sim = Sim(seed, entities=[Diary], nodes=3, settings=Settings(shards=12), strategy=strategy)

    async def body(sim: Sim) -> None:
        nonlocal hangs
        (home,) = set(homes(sim))
        hangs = True
        sim.crash(home)
        await sim.wait_until(lambda: sim.settled() and home not in homes(sim), timeout_s=30)
        assert await sim.ref(Diary, "d").ask(Diary.write, "x") == 1
        hangs = False
        await sim.wait_until(lambda: len(set(homes(sim))) == 1, timeout_s=30)

    run_simulation(sim, body)
