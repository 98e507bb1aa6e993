"""The simulator's verbs for the store as a whole and for connections that linger or come twice."""

from __future__ import annotations

import pytest

from domicile.core.ids import ShardKey
from domicile.errors import DomicileError
from domicile.testing import Sim, SimulationError, simulated
from domicile.testing.history import Event
from proving.workload import Ledger, Room

TTL_S = 6.0


def fenced(sim: Sim) -> list[Event]:
    return list(sim.history.of("fenced"))


@simulated(entities=[Ledger], nodes=3, seeds=3)
async def test_a_short_outage_of_the_store_is_not_noticed(sim: Sim) -> None:
    ledger = sim.ref(Ledger, "a")
    sim.store_outage()
    for number in range(5):
        assert await ledger.ask(Ledger.note, number) == number + 1
        await sim.advance(0.5)
    sim.store_back()
    await sim.advance(2 * TTL_S)
    assert fenced(sim) == []


@pytest.mark.parametrize("running", [False, True])
def test_a_long_outage_of_the_store_fences_everybody_and_passes(running: bool) -> None:
    @simulated(entities=[Ledger], nodes=3, seeds=3)
    async def run(sim: Sim) -> None:
        ledger = sim.ref(Ledger, "a")
        assert await ledger.ask(Ledger.note, 1) == 1
        nodes = {event.fields["inc"] for event in sim.history.of("life") if event.fields["hosts"]}
        sim.store_outage(running=running)
        await sim.advance(2 * TTL_S)
        assert {event.fields["inc"] for event in fenced(sim)} >= nodes
        expired = [key for event in sim.history.of("expire") for key in event.fields["deletes"]]
        assert bool(expired) is running, "a store that is down expires nobody (S4)"
        with pytest.raises(DomicileError):
            await ledger.ask(Ledger.note, 2)
        sim.store_back()
        await sim.wait_until(sim.settled, timeout_s=30)
        await sim.advance(3)
        assert await ledger.ask(Ledger.note, 3) >= 2

    run()


@simulated(entities=[Ledger], nodes=3, seeds=5)
async def test_after_a_rewind_all_begin_again_and_nothing_acknowledged_is_lost(sim: Sim) -> None:
    ledger = sim.ref(Ledger, "a")
    await sim.advance(5)
    assert await ledger.ask(Ledger.note, 1) == 1
    shard = sim.shard(Ledger, "a")
    await sim.wish(shard, (sim.owner(Ledger, "a") + 1) % 3)
    await sim.advance(1)
    assert await ledger.ask(Ledger.note, 2) == 2
    moved = sim.entry(shard)
    lived = {event.fields["inc"] for event in sim.history.of("life")}
    back_s = sim.rewind(3.0)
    assert 3.0 <= back_s <= 3.5
    assert sim.entry(shard).epoch < moved.epoch, "the move is forgotten"
    await sim.wait_until(lambda: {e.fields["inc"] for e in fenced(sim)} >= lived, timeout_s=5)
    assert all(e.fields["reason"].startswith("store rewound") for e in fenced(sim))
    await sim.wait_until(sim.settled, timeout_s=30)
    for number in range(20):
        try:
            await ledger.options(key="after").ask(Ledger.note, 3)
            break
        except DomicileError:
            await sim.advance(1)
            assert number < 19, "it never got a home that its journal takes"
    assert [event.what for event in sim.events(Ledger, "a")] == [1, 2, 3]


@simulated(entities=[Room], nodes=1, seeds=1)
async def test_there_is_no_way_back_beyond_the_backups(sim: Sim) -> None:
    with pytest.raises(SimulationError, match="no backup of the store is 300 s old"):
        sim.rewind(300.0)


@simulated(entities=[Room], nodes=3, seeds=3)
async def test_a_compacted_watch_lists_again_and_misses_nothing(sim: Sim) -> None:
    shard = ShardKey("default", 7)
    for node in sim.nodes:
        assert node.store is not None
        node.store.break_watch()
    target = next(n for n in range(3) if sim.nodes[n].incarnation != sim.entry(shard).owner)
    await sim.wish(shard, target)
    sim.compact()
    await sim.wait_until(lambda: sim.entry(shard).owner == sim.nodes[target].incarnation)
    await sim.wait_until(sim.settled)
    assert fenced(sim) == []


@simulated(entities=[Room], nodes=3, seeds=10)
async def test_lingering_and_repeated_connections_change_nothing(sim: Sim) -> None:
    room = sim.ref(Room, "a")
    home = sim.owner(Room, "a")
    other = (home + 1) % 3
    shard = sim.shard(Room, "a")
    repeated = 0
    for round in range(6):
        sim.spawn(other, lambda node: node.ref(Room, "a").ask(Room.note, 1))
        await sim.advance(sim.random.uniform(0.0, 0.01))
        sim.linger(home, other, sim.random.uniform(0.1, 2.0))
        await sim.advance(sim.random.uniform(0.0, 0.3))
        repeated += sim.duplicate(home, other)
        if round % 2:
            await sim.wish(shard, sim.random.randrange(3))
        await sim.advance(sim.random.uniform(0.0, 1.0))
    assert repeated
    await sim.advance(5)
    assert await room.ask(Room.note, 5) == 5


@simulated(entities=[Room], nodes=2, seeds=2)
async def test_a_slow_way_is_slow_in_one_direction(sim: Sim) -> None:
    home = sim.owner(Room, "a")
    other = 1 - home
    took: list[float] = []

    async def ask(node: object) -> None:
        began = sim.world.now
        await sim.node(other).ref(Room, "a").ask(Room.note, 1)
        took.append(sim.world.now - began)

    for extra_s in (0.0, 0.5, 0.0):
        sim.slow_way(other, home, extra_s)
        sim.spawn(other, ask)
        await sim.advance(3)
    assert took[0] < 0.1
    assert 0.5 <= took[1] < 0.6
    assert took[2] < 0.1
