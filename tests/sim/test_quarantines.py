"""Scenarios of blame: which entity is put away, how it is said, and how it comes back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from domicile import DomicileError, Entity, Settings, Unavailable, handler
from domicile.core.ids import EntityKey, ShardKey
from domicile.core.state.keys import TRIAL, clearance_key
from domicile.core.state.shardmap import Entry
from domicile.core.state.txn import Put
from domicile.testing import Sim
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

    async def step_on(self, kind: type[Entity], id: str, how: str = "") -> None:
        """End the process of the caller, if the id is live."""
        sim = self.sim
        if how + id in self.live and sim is not None:
            home = sim.owner(kind, id)

            def blow() -> None:
                self.killed += 1
                sim.crash(home)
                sim.world.call_at(sim.world.now + 1.0, lambda: sim.start(home))

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


def test_deaths_and_trials_are_forgotten() -> None:
    async def body(sim: Sim, mines: Mines) -> None:
        async with load(sim):
            sim.crash(1)
            await sim.advance(0.7)
            sim.crash(2)
            await sim.advance(3.0)
        assert any(entry.blamed for entry in entries(sim)), "the second death hit trials"
        sim.start(1)
        sim.start(2)
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


def neighbours(sim: Sim, id: str, count: int) -> list[str]:
    """Other ids of the same shard."""
    found: list[str] = []
    number = 0
    while len(found) < count:
        if sim.shard(Desk, f"n{number}") == sim.shard(Desk, id):
            found.append(f"n{number}")
        number += 1
    return found


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
