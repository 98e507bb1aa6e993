"""Scenarios of state that moves along: rolling updates with `carry=True` (DX-13)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

import pytest
from real_lab import balanced, judge, nothing_lost, run

from domicile import Entity, NotExecuted, Settings, handler
from domicile.core.ids import ShardKey
from domicile.testing import Processes, Sim, simulated

COUNTERS = [f"c{number}" for number in range(12)]
SETTINGS = Settings(shards=6, carry_bytes=20_000)

LARGE = 50_000


class Counter(Entity, name="carried-counter", carry=True):
    """Counts, and may hold so much that it cannot be taken along."""

    count: int = 0
    load: bytes = b""
    homes: list[int]

    def __init__(self) -> None:
        self.homes = []

    async def on_start(self) -> None:
        self.homes.append(self.epoch)

    @handler
    async def add(self) -> int:
        self.count += 1
        return self.count

    @handler
    async def weigh(self, size_bytes: int) -> None:
        self.load = b"x" * size_bytes

    @handler
    async def rest(self) -> None:
        self.passivate()

    @handler
    async def look(self) -> tuple[int, list[int], int]:
        return self.count, self.homes, self.epoch


class Reluctant(Entity, name="carried-reluctant"):
    """Keeps its shard from going by a slow stop."""

    async def on_stop(self) -> None:
        await asyncio.sleep(3.0)

    @handler
    async def hello(self) -> None: ...


def near(sim: Sim, shard: ShardKey) -> str:
    """A reluctant neighbour in a shard."""
    ids = (f"r{number}" for number in range(1_000))
    return next(id for id in ids if sim.shard(Reluctant, id) == shard)


def joined(sim: Sim, node: int) -> bool:
    return sim.nodes[node].incarnation is not None


async def updated(sim: Sim) -> None:
    """Replace every process by one of a newer version, one after the other."""
    for node in range(len(sim.nodes)):
        await sim.stop(node)
        sim.start(node, version="2")
        await sim.wait_until(partial(joined, sim, node))


# DX-13


@pytest.mark.scenario("DX-13")
@simulated(entities=[Counter], nodes=3, seeds=8, settings=SETTINGS)
async def test_carried_state_survives_a_rolling_update(sim: Sim) -> None:
    counted = dict.fromkeys(COUNTERS, 0)
    for id in COUNTERS:
        counted[id] = await sim.ref(Counter, id).ask(Counter.add)
    await sim.ref(Counter, "large").ask(Counter.weigh, LARGE)
    await sim.ref(Counter, "large").ask(Counter.add)
    over = False

    async def count(id: str) -> None:
        while not over:
            counted[id] += 1
            assert await sim.ref(Counter, id).ask(Counter.add) == counted[id]
            await asyncio.sleep(sim.random.random() * 0.2)

    async with asyncio.TaskGroup() as group:
        for id in COUNTERS[:8]:
            group.create_task(count(id))
        await updated(sim)
        over = True
    for id in COUNTERS:
        total, homes, epoch = await sim.ref(Counter, id).ask(Counter.look)
        assert total == counted[id] >= 1
        assert homes == sorted(set(homes)), "each home set it once"
        assert homes[-1] == epoch
    # Those that nobody asked meanwhile were carried on without being started.
    _, homes, epoch = await sim.ref(Counter, COUNTERS[-1]).ask(Counter.look)
    assert len(homes) == 2
    assert epoch >= 2
    total, homes, _ = await sim.ref(Counter, "large").ask(Counter.look)
    assert (total, len(homes)) == (0, 1), "over the limit it starts fresh"
    assert sim.history.counts["carry.dropped"] == 1
    assert sim.history.counts["carry.sent"] >= len(COUNTERS)


@pytest.mark.scenario("DX-13", partial=True)
@simulated(entities=[Counter], nodes=3, seeds=4, settings=SETTINGS)
async def test_nothing_is_carried_from_a_crash(sim: Sim) -> None:
    await sim.ref(Counter, "c").ask(Counter.add)
    sim.crash(sim.owner(Counter, "c"))
    await sim.wait_until(sim.settled)
    assert await sim.ref(Counter, "c").ask(Counter.add) == 1
    assert sim.history.counts["carry.sent"] == 0


@pytest.mark.scenario("DX-13", partial=True)
@simulated(entities=[Counter], nodes=2, seeds=4, settings=SETTINGS)
async def test_the_old_home_waits_for_a_slow_way_but_not_for_a_dead_one(sim: Sim) -> None:
    shard = sim.shard(Counter, "c")
    assert await sim.ref(Counter, "c").ask(Counter.add) == 1
    home = sim.owner(Counter, "c")
    sim.slow_way(home, 1 - home, 0.3)
    await sim.wish(shard, 1 - home)
    await sim.wait_until(lambda: sim.owner(Counter, "c") == 1 - home)
    assert await sim.ref(Counter, "c").ask(Counter.add) == 2
    sim.slow_way(home, 1 - home, 0.0)
    sim.block(1 - home, home)
    began = sim.world.now
    await sim.wish(shard, home)
    await sim.wait_until(lambda: sim.owner(Counter, "c") == home)
    assert 1.0 <= sim.world.now - began < 4.0
    assert await sim.ref(Counter, "c").ask(Counter.add) == 1
    assert sim.history.counts["carry.unconfirmed"] == 1


@pytest.mark.scenario("DX-13", partial=True)
@simulated(entities=[Counter], nodes=2, seeds=4, settings=SETTINGS)
async def test_what_was_carried_is_used_once(sim: Sim) -> None:
    shard, counter = sim.shard(Counter, "c"), sim.ref(Counter, "c")
    assert await counter.ask(Counter.add) == 1
    home = sim.owner(Counter, "c")
    await sim.wish(shard, 1 - home)
    await sim.wait_until(lambda: sim.owner(Counter, "c") == 1 - home)
    assert await counter.ask(Counter.add) == 2
    await counter.ask(Counter.rest)
    await sim.advance(1.0)
    assert await counter.ask(Counter.add) == 1, "passivated: what it had taken along is used up"
    await counter.ask(Counter.rest)
    await sim.advance(1.0)
    await sim.wish(shard, home)
    await sim.wait_until(lambda: sim.owner(Counter, "c") == home)
    assert await counter.ask(Counter.add) == 1, "who was not resident takes nothing along"


@pytest.mark.scenario("DX-13", partial=True)
@simulated(entities=[Counter, Reluctant], nodes=2, seeds=4, settings=SETTINGS)
async def test_a_move_that_is_taken_back_gives_everything_back(sim: Sim) -> None:
    shard = sim.shard(Counter, "c")
    other = near(sim, shard)
    await sim.ref(Reluctant, other).ask(Reluctant.hello)
    await sim.ref(Counter, "c").ask(Counter.add)
    epoch, home = sim.entry(shard).epoch, sim.owner(Counter, "c")
    await sim.wish(shard, 1 - home)
    await sim.wait_until(lambda: any(True for _ in sim.history.of("draining")))
    await sim.advance(0.5)
    node = sim.nodes[home].node
    assert node is not None
    assert node.life is not None
    assert [key.id for key in node.life.runtime.hosts[shard].cells] == [other], "the rest stopped"
    await sim.wish(shard, None)
    assert await sim.ref(Counter, "c").ask(Counter.add) == 2
    total, homes, now = await sim.ref(Counter, "c").ask(Counter.look)
    assert (total, homes, now) == (2, [epoch, epoch], epoch), "started twice in one epoch"


@pytest.mark.scenario("DX-13", partial=True)
@simulated(entities=[Counter], nodes=3, seeds=12, settings=SETTINGS, rough=True)
async def test_under_faults_a_count_is_whole_or_fresh_but_never_old(sim: Sim) -> None:
    """I1: what was counted after a home handed over never comes from two homes."""
    last = dict.fromkeys(COUNTERS[:6], 0)
    over = False

    async def count(id: str) -> None:
        while not over:
            value = None
            with suppress(NotExecuted):
                value = await sim.ref(Counter, id).ask(Counter.add)
            if value is not None:
                assert value in (last[id] + 1, 1), "an older state came back"
                last[id] = value
            await asyncio.sleep(sim.random.random() * 0.1)

    async with asyncio.TaskGroup() as group:
        for id in last:
            group.create_task(count(id))
        for _ in range(8):
            id = sim.random.choice(list(last))
            await sim.wish(sim.shard(Counter, id), sim.random.randrange(3))
            await sim.advance(sim.random.random())
        over = True


@pytest.mark.scenario("DX-13")
def test_real_processes_keep_carried_state_through_a_rolling_update() -> None:
    async def scenario() -> None:
        async with Processes([Counter], nodes=3, settings=SETTINGS) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            counted = dict.fromkeys(COUNTERS, 0)
            for id in COUNTERS:
                counted[id] = await cluster.ref(Counter, id).ask(Counter.add)
            await cluster.ref(Counter, "large").ask(Counter.weigh, LARGE)
            sent = dropped = 0
            over = False

            async def count(id: str) -> None:
                while not over:
                    counted[id] += 1
                    assert await cluster.ref(Counter, id).ask(Counter.add) == counted[id]
                    await asyncio.sleep(0.02)

            async with asyncio.TaskGroup() as group:
                for id in COUNTERS[:4]:
                    group.create_task(count(id))
                for node in range(3):
                    await cluster.stop(node)
                    sent += cluster.counts(node)["carry.sent"]
                    dropped += cluster.counts(node)["carry.dropped"]
                    cluster.start(node)
                    await cluster.wait_until(lambda: balanced(cluster))
                over = True
            for id in COUNTERS:
                total, homes, epoch = await cluster.ref(Counter, id).ask(Counter.look)
                assert total == counted[id]
                assert homes == sorted(set(homes))
                assert homes[-1] == epoch
            total, homes, _ = await cluster.ref(Counter, "large").ask(Counter.look)
            assert (total, len(homes)) == (0, 1)
            assert sent >= len(COUNTERS)
            assert dropped == 1
            history = cluster.history()
        judge(history)
        nothing_lost(history)

    run(scenario())
