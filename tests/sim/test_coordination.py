"""Scenarios of the coordinator: who leads, who is evicted, what survives, and what is set apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from manager_lab import Diary, one_id_per_shard

from domicile import DomicileError, Entity, Settings, Unavailable, handler
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.state.keys import LEADER_KEY, clearance_key
from domicile.core.state.records import LeaderRecord, NodeRecord, decode_record
from domicile.core.state.txn import Put
from domicile.testing import Sim, simulated
from domicile.testing.sim.simulated import run_simulation

FEW = Settings(shards=12)


def leader(sim: Sim) -> int | None:
    """The node that the store names as coordinator."""
    item = sim.servers.store.peek(LEADER_KEY)
    if item is None:
        return None
    incarnation = decode_record(item.value, LeaderRecord).incarnation
    return next((node.index for node in sim.nodes if node.incarnation == incarnation), None)


def owners(sim: Sim, role: str = "default") -> list[Incarnation]:
    return [sim.entry(ShardKey(role, shard)).owner for shard in range(sim.settings.shards)]


def evicted(sim: Sim) -> list[str]:
    """Node ids whose records were marked evicted, in order."""
    found: list[str] = []
    for event in sim.history.of("commit"):
        for key, value, _ in event.fields["puts"]:
            if key.startswith(b"nodes/"):
                record = decode_record(value, NodeRecord)
                if record.status == "evicted":
                    found.append(record.node)
    return found


def homes(sim: Sim) -> list[int]:
    """The node index of each shard's owner; -1 for one that is not running."""
    by_incarnation = {node.incarnation: node.index for node in sim.nodes if node.up}
    return [by_incarnation.get(owner, -1) for owner in owners(sim)]


# DX-17: eviction by agreement


@pytest.mark.scenario("DX-17")
@simulated(entities=[Diary], nodes=5, seeds=6, settings=FEW)
async def test_a_node_that_no_peer_reaches_is_evicted_by_agreement(sim: Sim) -> None:
    hostage = next(index for index in range(5) if index != leader(sim))
    kept = sim.nodes[hostage].incarnation
    others = [index for index in range(5) if index != hostage]
    sim.partition([hostage], others)
    sim.network.partition([[f"node-{hostage}"], [*(f"node-{n}" for n in others), "client"]])
    await sim.wait_until(lambda: f"node-{hostage}" in evicted(sim), timeout_s=20)
    assert sim.nodes[hostage].up, "it lives and renewed its lease all along"
    await sim.wait_until(lambda: hostage not in homes(sim) and sim.settled(), timeout_s=20)
    for id in one_id_per_shard(sim).values():
        assert await sim.ref(Diary, id).ask(Diary.write, "on") >= 1
    assert kept not in owners(sim)
    sim.heal()
    await sim.wait_until(lambda: hostage in homes(sim), timeout_s=30)


@pytest.mark.scenario("DX-17")
@simulated(entities=[Diary], nodes=5, seeds=6, settings=FEW)
async def test_a_leader_with_a_one_way_fault_resigns_and_evicts_nobody(sim: Sim) -> None:
    before = leader(sim)
    assert before is not None
    incarnations = {node.index: node.incarnation for node in sim.nodes}
    for other in range(5):
        if other != before:
            sim.block(other, before)
    await sim.wait_until(lambda: leader(sim) not in (before, None), timeout_s=30)
    assert all(name == f"node-{before}" for name in evicted(sim))
    await sim.advance(20)
    assert all(name == f"node-{before}" for name in evicted(sim))
    for node in sim.nodes:
        if node.index != before:
            assert node.incarnation == incarnations[node.index]
    sim.heal()
    await sim.wait_until(sim.settled, timeout_s=30)


@pytest.mark.scenario("DX-17")
@simulated(entities=[Diary], nodes=4, seeds=6, settings=FEW)
async def test_a_bad_link_to_the_leader_alone_evicts_nobody(sim: Sim) -> None:
    head = leader(sim)
    assert head is not None
    victim = next(index for index in range(4) if index != head)
    sim.network.block(f"node-{victim}", f"node-{head}")
    sim.network.block(f"node-{head}", f"node-{victim}")
    await sim.advance(25)
    assert evicted(sim) == []
    assert victim in homes(sim)
    sim.heal()


# RG-11, RG-12: who leads, and what it knows


@pytest.mark.scenario("RG-11")
@simulated(entities=[Diary], nodes=4, seeds=5, settings=FEW, candidates=[1, 3])
async def test_the_oldest_eligible_node_leads(sim: Sim) -> None:
    first = leader(sim)
    assert first in (1, 3)
    assert first is not None
    created = {
        node.index: sim.servers.store.peek(b"nodes/" + str(node.incarnation).encode())
        for node in sim.nodes
    }
    ages = {index: item.created for index, item in created.items() if item is not None}
    assert first == min((1, 3), key=lambda index: ages[index])
    sim.crash(first)
    await sim.wait_until(lambda: leader(sim) not in (first, None), timeout_s=20)
    assert leader(sim) == 4 - first, "never one that is no candidate"


@pytest.mark.scenario("RG-12")
@simulated(entities=[Diary], nodes=4, seeds=5, settings=FEW)
async def test_what_the_coordinator_knew_survives_any_one_node_and_a_restart_of_all(
    sim: Sim,
) -> None:
    before = {shard: sim.entry(ShardKey("default", shard)) for shard in range(12)}
    head = leader(sim)
    assert head is not None
    sim.crash(head)
    await sim.wait_until(lambda: leader(sim) not in (head, None) and sim.settled(), timeout_s=30)
    dead = {entry.owner for entry in before.values()} - {
        node.incarnation for node in sim.nodes if node.up
    }
    for shard, entry in before.items():
        now = sim.entry(ShardKey("default", shard))
        if entry.owner not in dead:
            assert (now.owner, now.epoch) == (entry.owner, entry.epoch), "nothing else moved"
        else:
            assert now.epoch == entry.epoch + 1
    epochs = [sim.entry(ShardKey("default", shard)).epoch for shard in range(12)]
    for node in sim.nodes:
        if node.up:
            sim.crash(node.index)
    await sim.advance(10)
    for node in sim.nodes:
        sim.start(node.index)
    await sim.wait_until(sim.settled, timeout_s=30)
    for shard in range(12):
        assert sim.entry(ShardKey("default", shard)).epoch > epochs[shard]
    assert sorted(homes(sim).count(index) for index in range(4)) == [3, 3, 3, 3]


# DX-20: a shard that kills its owners


class Bomb(Entity, name="bomb"):
    """Ends its process when asked to."""

    @handler
    async def tick(self) -> str:
        return self.id

    @handler
    async def explode(self) -> None:
        self.resource(Fuse).blow(self.id)
        await asyncio.sleep(10)


class Fuse:
    """How a simulated handler kills its own process."""

    def __init__(self) -> None:
        self.sim: Sim | None = None

    @asynccontextmanager
    async def resources(self) -> AsyncGenerator[dict[type[Any], Any]]:
        yield {Fuse: self}

    def blow(self, id: str) -> None:
        sim = self.sim
        assert sim is not None
        home = sim.owner(Bomb, id)
        sim.world.call_at(sim.world.now, lambda: sim.crash(home))


def quarantined(sim: Sim) -> list[int]:
    """Shards that are quarantined, or of which entities are."""
    found = [(shard, sim.entry(ShardKey("default", shard))) for shard in range(sim.settings.shards)]
    return [shard for shard, entry in found if entry.state == "quarantined" or entry.barred]


def with_bombs(seed: int, body: Callable[[Sim], Awaitable[None]]) -> None:
    fuse = Fuse()
    sim = fuse.sim = Sim(
        seed, entities=[Bomb], nodes=5, settings=FEW, resources=fuse.resources, locks=True
    )

    async def run(sim: Sim) -> None:
        await body(sim)

    run_simulation(sim, run)


async def kill_home(sim: Sim, id: str) -> None:
    """Have an entity kill its process, then start that node again."""
    home = sim.owner(Bomb, id)
    with suppress(DomicileError):
        await sim.ref(Bomb, id).options(timeout_s=3).ask(Bomb.explode)
    await sim.wait_until(lambda: not sim.nodes[home].up)
    sim.start(home)
    await sim.wait_until(lambda: sim.settled() or bool(quarantined(sim)), timeout_s=30)


@pytest.mark.scenario("DX-20")
@pytest.mark.parametrize("seed", range(4))
def test_a_shard_that_kills_three_owners_in_a_minute_is_quarantined(seed: int) -> None:
    async def body(sim: Sim) -> None:
        culprit = sim.shard(Bomb, "b0").shard
        for _ in range(3):
            assert quarantined(sim) == []
            await kill_home(sim, "b0")
        assert quarantined(sim) == [culprit]
        with pytest.raises(Unavailable, match=f"is quarantined.*default/{culprit}"):
            await sim.ref(Bomb, "b0").ask(Bomb.tick)
        number = 0
        for shard in range(12):
            while sim.shard(Bomb, f"x{number}").shard != shard:
                number += 1
            assert await sim.ref(Bomb, f"x{number}").ask(Bomb.tick) == f"x{number}"
        store = sim.servers.remote_store(sim.loop, "test", sim.servers.faults("test"))
        await store.commit((), (Put(clearance_key(ShardKey("default", culprit)), b""),))
        await sim.wait_until(lambda: quarantined(sim) == [], timeout_s=10)
        assert await sim.ref(Bomb, "b0").ask(Bomb.tick) == "b0"
        assert sim.entry(ShardKey("default", culprit)).deaths == 0

    with_bombs(seed, body)


@pytest.mark.scenario("DX-20")
def test_deaths_far_apart_quarantine_nothing() -> None:
    async def body(sim: Sim) -> None:
        for _ in range(4):
            await kill_home(sim, "b0")
            await sim.advance(61)
        assert quarantined(sim) == []
        assert await sim.ref(Bomb, "b0").ask(Bomb.tick) == "b0"

    with_bombs(7, body)


@pytest.mark.scenario("DX-20")
def test_crashes_that_no_shard_is_to_blame_for_quarantine_nothing() -> None:
    """Machines that fail one after the other: nothing had started in their shards again."""

    async def body(sim: Sim) -> None:
        for _ in range(6):
            home = sim.owner(Bomb, "b0")
            sim.crash(home)
            sim.start(home)
            await sim.wait_until(sim.settled, timeout_s=30)
        assert quarantined(sim) == []

    with_bombs(3, body)
