"""Scenarios of blame: which entity is put away, how it is said, and how it comes back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import pytest

from domicile import DomicileError, Entity, Settings, Unavailable, handler
from domicile.core.ids import EntityKey, ShardKey
from domicile.core.state.keys import TRIAL, clearance_key
from domicile.core.state.shardmap import Entry
from domicile.core.state.txn import Put
from domicile.incarnation.gauges import gauges_of
from domicile.testing import Sim, SimulationError
from domicile.testing.sim.simulated import run_simulation

SETTINGS = Settings(shards=32)
KEYS = [f"k{number}" for number in range(80)]


class Mines:
    """Which ids kill their process when they start, and how many did."""

    def __init__(self) -> None:
        self.sim: Sim | None = None
        self.live: dict[str, None] = {}
        self.killed = 0

    @asynccontextmanager
    async def resources(self) -> AsyncGenerator[dict[type[Any], Any]]:
        yield {Mines: self}

    async def step_on(self, kind: type[Entity], id: str, how: str = "", after_s: float = 0) -> None:
        """End the process of the caller after a while, if the id is live."""
        sim = self.sim
        if how + id in self.live and sim is not None:
            home = sim.owner(kind, id)

            def blow() -> None:
                self.killed += 1
                sim.crash(home)
                sim.world.call_at(sim.world.now + 1.0, lambda: sim.start(home))

            await asyncio.sleep(after_s)
            sim.world.call_at(sim.world.now, blow)
            await asyncio.sleep(60)


class Desk(Entity, name="desk"):
    """Counts, unless it kills its process."""

    def __init__(self) -> None:
        self.count = 0

    async def on_start(self) -> None:
        await self.resource(Mines).step_on(Desk, self.id)

    @handler
    async def add(self) -> int:
        self.count += 1
        return self.count

    @handler
    async def late(self) -> int:
        """Kills its process only when it is asked to, long after its start."""
        await self.resource(Mines).step_on(Desk, self.id, "late ")
        return 0

    @handler
    async def take(self, order: str) -> int:
        """Serves well, and kills its process only for an order that is live."""
        await self.resource(Mines).step_on(Desk, self.id, f"{order} ")
        self.count += 1
        return self.count

    @handler
    async def work(self, for_s: float) -> int:
        """Takes its time, and kills its process after that if it is live."""
        await self.resource(Mines).step_on(Desk, self.id, "work ", for_s)
        await asyncio.sleep(for_s)
        return 0


def run(seed: int, body: Callable[[Sim, Mines], Awaitable[None]], **more: Any) -> None:
    mines = Mines()
    settings = more.pop("settings", SETTINGS)
    sim = mines.sim = Sim(
        seed, entities=[Desk], settings=settings, resources=mines.resources, locks=True, **more
    )

    async def main(sim: Sim) -> None:
        await body(sim, mines)

    run_simulation(sim, main)


def entries(sim: Sim) -> list[Entry]:
    return [sim.entry(ShardKey("default", shard)) for shard in range(sim.settings.shards)]


def put_away(sim: Sim) -> list[tuple[int, tuple[EntityKey, ...]]]:
    """Shards that are quarantined, or of which entities are."""
    return [
        (shard, entry.barred)
        for shard, entry in enumerate(entries(sim))
        if entry.state == "quarantined" or entry.barred
    ]


async def ask(sim: Sim, key: str) -> int:
    return await sim.ref(Desk, key).options(timeout_s=5).ask(Desk.add)


async def ask_until_answered(sim: Sim, key: str) -> None:
    for _ in range(1_000):
        try:
            await ask(sim, key)
        except DomicileError:
            await asyncio.sleep(0.05)
        else:
            return
    raise AssertionError(f"{key} was never served")


@asynccontextmanager
async def load(sim: Sim, keys: list[str] = KEYS) -> AsyncGenerator[None]:
    """Callers that ask one key after the other until the end."""
    over = asyncio.Event()

    async def caller(first: int) -> None:
        at = first
        while not over.is_set():
            await ask_until_answered(sim, keys[at % len(keys)])
            await asyncio.sleep(0.02)
            at += 7

    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(caller(number * 19))
        yield
        over.set()


def losing_owners(sim: Sim) -> float:
    """The gauge of shards that lose owners, as the test's client reports it."""
    life = sim.client_life
    assert life is not None
    (family,) = [one for one in gauges_of(life) if one.name == "domicile_shards_losing_owners"]
    return family.samples[0].value


def neighbours(sim: Sim, id: str, count: int) -> list[str]:
    """Other ids of the same shard."""
    found: list[str] = []
    number = 0
    while len(found) < count:
        if sim.shard(Desk, f"n{number}") == sim.shard(Desk, id):
            found.append(f"n{number}")
        number += 1
    return found


async def repeat(sim: Sim, id: str, method: Callable[..., Any], *args: Any) -> None:
    """Ask one entity again and again, as soon as it has answered or failed."""
    while True:
        with suppress(DomicileError):
            await sim.ref(Desk, id).options(timeout_s=5).ask(method, *args)
        await asyncio.sleep(0.02)


# the innocent


@pytest.mark.scenario("DX-24")
@pytest.mark.parametrize("pause_s", [2.0, 5.0, 18.0])
@pytest.mark.parametrize("seed", range(3))
def test_three_unrelated_crashes_within_a_minute_quarantine_nothing(
    seed: int, pause_s: float
) -> None:
    async def body(sim: Sim, mines: Mines) -> None:
        async with load(sim):
            await sim.advance(1.0)
            for victim in (seed % 3, (seed + 1) % 3, (seed + 2) % 3):
                sim.crash(victim)
                await sim.advance(pause_s)
                sim.start(victim)
                assert put_away(sim) == []
        await asyncio.gather(*(ask_until_answered(sim, key) for key in KEYS))
        await sim.wait_until(sim.settled)
        assert put_away(sim) == []
        assert any(entry.deaths for entry in entries(sim)), "deaths are counted"

    run(seed, body, nodes=3)


async def kill_at_random(sim: Sim, random: Random, id: str, kills: int, most_s: float) -> None:
    """Kill owners of an entity, and sometimes other nodes, at random moments."""
    for _ in range(kills):
        await sim.advance(random.uniform(0.1, most_s))
        victim = random.randrange(len(sim.nodes))
        if random.random() < 0.8:
            with suppress(SimulationError):  # Its last owner is dead, and it has no other yet.
                victim = sim.owner(Desk, id)
        if sim.nodes[victim].up:
            sim.crash(victim)
            sim.world.call_at(sim.world.now + 1.0, lambda victim=victim: sim.start(victim))  # type: ignore[misc]


@pytest.mark.scenario("DX-24")
@pytest.mark.parametrize("seed", range(40))
def test_kills_at_random_moments_put_no_innocent_entity_away(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The kills follow a shard in which entities begin at all times. Some runs have three kills,
    and entities that run for a moment, for long, or always; others have many kills."""
    caplog.set_level("INFO", logger="domicile")
    random, three = Random(seed), seed % 2 == 0

    async def body(sim: Sim, mines: Mines) -> None:
        near = neighbours(sim, "k0", 6)
        durations_s = [random.uniform(0, 0.05) for _ in near]
        if three:
            durations_s[:3] = [random.uniform(0.05, 0.5), random.uniform(0.5, 3), 60.0]
        async with load(sim), asyncio.TaskGroup() as group:
            asking = [
                group.create_task(repeat(sim, id, Desk.work, duration_s))
                for id, duration_s in zip(near, durations_s, strict=True)
            ]
            await sim.advance(1.0)
            kills, most_s = (3, random.choice([2.0, 5.0, 20.0])) if three else (10, 4.0)
            await kill_at_random(sim, random, "k0", kills, most_s)
            await sim.wait_until(sim.settled)
            for one in asking:
                one.cancel()
        await asyncio.gather(*(ask_until_answered(sim, key) for key in (*KEYS, *near)))
        assert not [one for one in caplog.records if "quarantined" in one.getMessage()]
        assert put_away(sim) == []
        assert sim.entry(sim.shard(Desk, "k0")).deaths, "the kills hit it"

    run(seed, body, nodes=4)


@pytest.mark.scenario("DX-24")
@pytest.mark.parametrize("seed", range(8))
def test_kills_that_follow_a_busy_shard_do_not_put_its_busiest_entity_away(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Its entity runs at all times, alone in its shard or beside others. If runs did not rest after
    the third death, it would run at each crash."""
    caplog.set_level("INFO", logger="domicile")
    random = Random(seed)

    async def body(sim: Sim, mines: Mines) -> None:
        near = neighbours(sim, "k0", seed % 2 * 2)
        async with asyncio.TaskGroup() as group:
            asking = [
                group.create_task(repeat(sim, id, Desk.work, 0.05))
                for id in ("k0", "k0", "k0", *near)
            ]
            await sim.advance(1.0)
            await kill_at_random(sim, random, "k0", 10, 2.5)
            await sim.wait_until(sim.settled)
            for one in asking:
                one.cancel()
        await asyncio.gather(*(ask_until_answered(sim, key) for key in (*KEYS, *near)))
        assert not [one for one in caplog.records if "quarantined" in one.getMessage()]
        assert sim.entry(sim.shard(Desk, "k0")).deaths >= 6, "the kills hit it"

    run(seed, body, nodes=4)


def test_deaths_and_trials_are_forgotten() -> None:
    async def body(sim: Sim, mines: Mines) -> None:
        async with load(sim), asyncio.TaskGroup() as group:
            worker = group.create_task(repeat(sim, "k0", Desk.work, 30.0))
            await sim.advance(1.0)
            for _ in range(2):
                victim = sim.owner(Desk, "k0")
                sim.crash(victim)
                await sim.wait_until(sim.settled)
                await sim.advance(1.0)
                sim.start(victim)
            worker.cancel()
        assert sim.entry(sim.shard(Desk, "k0")).blamed == 1, "the second death hit a trial"
        await sim.advance(SETTINGS.poison_window_s + 5.0)
        assert not any(entry.deaths or entry.blamed for entry in entries(sim))
        keys = [item.key for item in (await sim._operator_store().list(b"")).items]
        assert not [key for key in keys if key.startswith(TRIAL)]

    run(1, body, nodes=4)


# the guilty


async def until_put_away(sim: Sim, id: str) -> None:
    """Ask for an entity again and again, until it is put away."""
    while not put_away(sim):
        try:
            await ask(sim, id)
        except DomicileError:
            await asyncio.sleep(0.05)


@pytest.mark.scenario("DX-20")
@pytest.mark.scenario("DX-24")
@pytest.mark.parametrize("seed", range(4))
def test_an_entity_that_kills_its_process_at_each_start_is_put_away_alone(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="domicile")

    async def body(sim: Sim, mines: Mines) -> None:
        shard = sim.shard(Desk, "mine").shard
        near = neighbours(sim, "mine", 3)
        mines.live["mine"] = None
        async with load(sim, [*KEYS, *near]):
            await until_put_away(sim, "mine")
            assert mines.killed == 3
            assert put_away(sim) == [(shard, (EntityKey("desk", "mine"),))]
            await sim.wait_until(sim.settled)
            for key in (*near, *KEYS):
                await ask_until_answered(sim, key)
            with pytest.raises(Unavailable, match=f"domicile unquarantine default/{shard}"):
                await ask(sim, "mine")
        (warned,) = [one for one in caplog.records if "quarantined" in one.getMessage()]
        assert warned.levelname == "WARNING"
        assert "desk 'mine'" in warned.getMessage()
        assert "3 owners" in warned.getMessage()
        assert f"domicile unquarantine default/{shard}" in warned.getMessage()

    run(seed, body, nodes=4)


@pytest.mark.scenario("DX-20")
@pytest.mark.parametrize("seed", range(12))
def test_an_entity_that_kills_soon_after_it_began_is_always_put_away_and_no_other_is(
    seed: int,
) -> None:
    """Three deaths are enough; two more are, if those that ran beside it hid its name."""
    random = Random(seed)

    async def body(sim: Sim, mines: Mines) -> None:
        shard, beside = sim.shard(Desk, "mine").shard, random.choice([2, 12])
        near = neighbours(sim, "mine", beside)
        mines.live["work mine"] = None
        async with load(sim), asyncio.TaskGroup() as group:
            asking = [
                group.create_task(repeat(sim, id, Desk.work, random.uniform(0, 0.1))) for id in near
            ]
            asking.append(
                group.create_task(repeat(sim, "mine", Desk.work, random.uniform(0, 0.15)))
            )
            await sim.wait_until(lambda: bool(put_away(sim)), timeout_s=120)
            assert put_away(sim) == [(shard, (EntityKey("desk", "mine"),))]
            assert mines.killed == 3 or (beside > 2 and mines.killed <= 5)
            for one in asking:
                one.cancel()

    run(seed, body, nodes=4)


@pytest.mark.scenario("DX-20")
@pytest.mark.parametrize("seed", range(4))
def test_an_entity_that_kills_after_it_has_run_for_long_is_put_away_with_more_deaths(
    seed: int,
) -> None:
    async def body(sim: Sim, mines: Mines) -> None:
        mines.live["work mine"] = None
        async with load(sim), asyncio.TaskGroup() as group:
            worker = group.create_task(repeat(sim, "mine", Desk.work, 0.4 + 0.5 * seed))
            await sim.wait_until(lambda: bool(put_away(sim)), timeout_s=300)
            worker.cancel()
        shard = sim.shard(Desk, "mine").shard
        assert put_away(sim) == [(shard, (EntityKey("desk", "mine"),))]
        assert mines.killed == 6

    run(seed, body, nodes=4)


@pytest.mark.scenario("DX-20")
@pytest.mark.scenario("DX-24")
@pytest.mark.parametrize("beside", [0, 4])
@pytest.mark.parametrize("seed", range(2))
def test_an_entity_that_serves_well_until_a_deadly_message_comes_is_put_away(
    seed: int, beside: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="domicile")

    async def body(sim: Sim, mines: Mines) -> None:
        shard = sim.shard(Desk, "mine").shard
        near = neighbours(sim, "mine", beside)
        mines.live["bad mine"], told = None, list[float]()

        async def until_put_away() -> int:
            before = mines.killed
            while not put_away(sim):
                told.append(losing_owners(sim))
                await sim.advance(0.5)
                with suppress(DomicileError):
                    await sim.ref(Desk, "mine").options(timeout_s=5).ask(Desk.take, "bad")
            assert put_away(sim) == [(shard, (EntityKey("desk", "mine"),))]
            return mines.killed - before

        async with asyncio.TaskGroup() as group:
            asking = [
                group.create_task(repeat(sim, id, Desk.take, "good"))
                for id in ("mine", "mine", "mine", *near)
            ]
            deaths = await until_put_away()
            assert told[0] == 0 < max(told)
            assert deaths == 6 or (beside and deaths <= 8)
            for one in asking[3:]:
                one.cancel()
            await sim.wait_until(sim.settled)
            for key in (*near, *KEYS):
                await ask_until_answered(sim, key)
            await sim.wait_until(lambda: not put_away(sim), timeout_s=60)
            assert await until_put_away() == 1, "after its pause one death is enough"
            assert sim.entry(ShardKey("default", shard)).tries == 2
            for one in asking:
                one.cancel()
        mines.live.clear()
        await sim.wait_until(lambda: not put_away(sim), timeout_s=60)
        await ask_until_answered(sim, "mine")
        await sim.advance(SETTINGS.poison_window_s + 5.0)
        assert sim.entry(ShardKey("default", shard)).suspicion == Entry().suspicion
        blind = [one.getMessage() for one in caplog.records if "can be blamed" in one.getMessage()]
        assert len(blind) >= 3, "the third, fourth and fifth death"
        assert "lost 3 owners in a row, each within 60 s" in blind[0]
        assert "domicile status" in blind[0]
        said = [one for one in caplog.records if "is quarantined:" in one.getMessage()]
        assert "desk 'mine'" in said[0].getMessage()
        assert said[0].levelname == "WARNING"

    run(seed, body, nodes=4)


@pytest.mark.scenario("DX-24")
def test_a_quarantine_is_tried_again_with_growing_pauses_and_ends_with_its_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="domicile")

    async def body(sim: Sim, mines: Mines) -> None:
        shard = sim.shard(Desk, "mine")
        mines.live["mine"] = None
        await until_put_away(sim, "mine")
        away_at = [sim.world.now]
        for tries in (2, 3):
            await sim.wait_until(lambda: not put_away(sim), timeout_s=60)
            await until_put_away(sim, "mine")
            assert sim.entry(shard).tries == tries
            assert mines.killed == 1 + 1 + tries
            away_at.append(sim.world.now)
        pauses = [after - before for before, after in itertools.pairwise(away_at)]
        assert 10 <= pauses[0] < 20 <= pauses[1] < 40
        del mines.live["mine"]
        await sim.wait_until(lambda: not put_away(sim), timeout_s=60)
        assert await ask(sim, "mine") == 1
        await sim.advance(SETTINGS.poison_window_s + 5.0)
        assert sim.entry(shard).suspicion == Entry().suspicion
        assert await ask(sim, "mine") == 2
        said = [one.getMessage() for one in caplog.records]
        assert sum("is served again, on trial" in one for one in said) == 3
        assert sum("over and forgotten" in one for one in said) == 1

    run(5, body, nodes=4)


@pytest.mark.scenario("DX-20")
def test_an_operator_ends_a_quarantine_and_it_survives_a_restart_of_everything() -> None:
    async def body(sim: Sim, mines: Mines) -> None:
        shard = sim.shard(Desk, "mine")
        mines.live["mine"] = None
        await until_put_away(sim, "mine")
        for node in sim.nodes:
            if node.up:
                sim.crash(node.index)
        await sim.advance(8.0)
        for node in sim.nodes:
            if not node.up:
                sim.start(node.index)
        await sim.wait_until(sim.settled)
        assert put_away(sim) == [(shard.shard, (EntityKey("desk", "mine"),))]
        with pytest.raises(Unavailable, match="is quarantined"):
            await ask(sim, "mine")
        mines.live.clear()
        await sim._write(Put(clearance_key(shard), b""))
        await sim.wait_until(lambda: not put_away(sim), timeout_s=5)
        assert sim.entry(shard).suspicion == Entry().suspicion
        assert await ask(sim, "mine") == 1

    run(6, body, nodes=4)


@pytest.mark.scenario("DX-20")
@pytest.mark.parametrize("seed", range(3))
def test_a_handler_that_kills_long_after_its_entity_started_is_found_as_well(seed: int) -> None:
    """Each time the entity serves other messages for a while, and only then gets the deadly one."""

    async def body(sim: Sim, mines: Mines) -> None:
        shard = sim.shard(Desk, "slow").shard
        mines.live["late slow"] = None
        async with load(sim):
            for count in range(1, 4):
                for _ in range(8):
                    await ask_until_answered(sim, "slow")
                    await sim.advance(0.5)
                with pytest.raises(DomicileError):
                    await sim.ref(Desk, "slow").options(timeout_s=3).ask(Desk.late)
                await sim.wait_until(lambda count=count: mines.killed == count)  # type: ignore[misc]
                assert count == 3 or put_away(sim) == []
            await sim.wait_until(lambda: bool(put_away(sim)), timeout_s=5)
            assert put_away(sim) == [(shard, (EntityKey("desk", "slow"),))]

    run(seed, body, nodes=4)
