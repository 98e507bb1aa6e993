"""A node that empties does so in small steps (H9, H10): its shards move in stages, its entities
stop a few per turn of the event loop, and what runs, waits or comes meanwhile finds its way.
"""

from __future__ import annotations

import asyncio
from itertools import count

import pytest
from manager_lab import stored

from domicile import Entity, Settings, handler
from domicile.core.coordinator import departures
from domicile.core.ids import ShardKey
from domicile.entity.hosting import stop_budget
from domicile.testing import Sim, simulated
from proving.campaign import run_seed


class Counter(Entity, name="counter", carry=True):
    """Counts, also on behalf of another one."""

    total: int = 0

    @handler
    async def add(self, amount: int = 1) -> int:
        """At once."""
        self.total += amount
        return self.total

    @handler
    async def slowly(self, seconds: float) -> int:
        """Later."""
        await asyncio.sleep(seconds)
        self.total += 1
        return self.total

    @handler
    async def both(self, other: str) -> int:
        """Another one first: a chain that a drain must let through (N3)."""
        await self.ref(Counter, other).ask(Counter.add)
        self.total += 1
        return self.total


def most_moving(sim: Sim) -> int:
    """How many shards the store said to be moving at the same time, at the most."""
    moving: dict[ShardKey, None] = {}
    most = 0
    for change in stored(sim):
        if change.entry.state == "moving":
            moving[change.shard] = None
        else:
            moving.pop(change.shard, None)
        most = max(most, len(moving))
    return most


@simulated(entities=[Counter], nodes=3, seeds=2, settings=Settings(shards=450))
async def test_a_node_that_leaves_gives_its_shards_away_in_stages(sim: Sim) -> None:
    await sim.wait_until(sim.settled)
    await sim.stop(2)
    await sim.wait_until(sim.settled)
    # Those that are released and wait for their commit come on top; without stages it would be all.
    stage = max(departures.STAGE, 150 // departures.STAGES)
    assert 0 < most_moving(sim) <= 2 * stage < 150


@simulated(entities=[Counter], nodes=6, seeds=10, settings=Settings(shards=120))
async def test_nodes_that_leave_together_give_nothing_to_each_other(sim: Sim) -> None:
    """Three become six become three, and each shard moves once."""
    await sim.wait_until(sim.settled)
    before = [sim.entry(ShardKey("default", number)) for number in range(120)]
    leaving = {sim.nodes[node].incarnation for node in (3, 4, 5)}

    async def leave(node: int) -> None:
        # A signal reaches one a little later than the other.
        await asyncio.sleep(0.02 * (node - 3))
        await sim.stop(node)

    await asyncio.gather(*[leave(node) for node in (3, 4, 5)])
    await sim.wait_until(sim.settled)
    after = [sim.entry(ShardKey("default", number)) for number in range(120)]
    moved = [new.epoch - old.epoch for old, new in zip(before, after, strict=True)]
    assert moved == [int(old.owner in leaving) for old in before]


@pytest.fixture(params=[1, 2])
def small_steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were thousands of entities and hundreds of shards."""
    monkeypatch.setattr(stop_budget, "STOPS_PER_TURN", request.param)
    monkeypatch.setattr(departures, "STAGE", request.param)
    monkeypatch.setattr(departures, "STAGES", 100)


@pytest.mark.usefixtures("small_steps")
@simulated(entities=[Counter], nodes=3, seeds=10, settings=Settings(shards=12))
async def test_in_small_steps_nothing_is_lost_reordered_or_forgotten(sim: Sim) -> None:
    """The checkers judge order and homes; what entities took along says that each ran once."""
    await sim.wait_until(sim.settled)
    ids, numbers = [f"c{number}" for number in range(60)], count()
    wanted = dict.fromkeys(ids, 0)
    failures: list[Exception] = []

    async def one() -> None:
        number = next(numbers)
        id, other = ids[number % 60], ids[(7 * number + 1) % 60]
        ref = sim.ref(Counter, id)
        try:
            if number % 3 == 0 and id != other:
                await ref.ask(Counter.both, other)
                wanted[other] += 1
            elif number % 7 == 0:
                await ref.ask(Counter.slowly, 0.05)
            else:
                await ref.ask(Counter.add)
            wanted[id] += 1
        except Exception as error:
            failures.append(error)

    async def load() -> None:
        async with asyncio.TaskGroup() as group:
            while not over.is_set():
                for _ in range(4):
                    group.create_task(one())
                await asyncio.sleep(0.01)

    over = asyncio.Event()
    loading = asyncio.ensure_future(load())
    await sim.advance(0.5)
    for node in (0, 1, 2):
        await sim.stop(node)
        sim.start(node)
        await sim.wait_until(sim.settled)
        await sim.advance(0.3)
    over.set()
    await loading
    assert failures == []
    found = {id: await sim.ref(Counter, id).ask(Counter.add, 0) for id in ids}
    assert found == wanted
    assert sum(found.values()) > 500


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize(
    ("profile", "seed"),
    [("mixed", 754), *(("rolling", seed) for seed in range(4)), ("standard", 1)],
)
def test_in_small_steps_no_rule_is_broken_under_faults(profile: str, seed: int) -> None:
    """Seed 754 once made the coordinator look for its next stage again and again."""
    result = run_seed(seed, profile)
    assert (result.violations, result.error) == ([], "")
