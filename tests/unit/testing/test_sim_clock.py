"""Simulated machines: clocks that run at rates of their own, and timers that keep to them."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.testing import Sim, SimulationError, simulated
from domicile.testing.history import History
from domicile.testing.sim.clock import EPOCH, Machine, SimClock, SkewedClock
from domicile.testing.sim.loop import World
from proving.workload import Ledger, Room

TTL_S = 6.0


@given(
    st.floats(-1e4, 1e5),
    st.floats(0.999, 1.001),
    st.floats(1000.0, 1100.0),
)
def test_a_moment_is_reached_exactly_once(boot_s: float, rate: float, world_s: float) -> None:
    machine = Machine(boot_s, rate)
    own_s = machine.read(world_s)
    reached = machine.reached(own_s)
    assert machine.read(reached) >= own_s
    assert reached <= world_s


def test_a_true_machine_has_the_worlds_clock() -> None:
    world = World(0)
    loop = world.process("p")
    assert isinstance(Machine().clock(world, loop), SimClock)
    assert isinstance(Machine(rate=1.001).clock(world, loop), SkewedClock)
    assert Machine(wall_s=60.0).clock(world, loop).wall() == EPOCH.replace(minute=17, second=40)


@pytest.mark.parametrize("rate", [0.999, 1.0, 1.001])
def test_a_timer_comes_when_the_own_clock_says_so(rate: float) -> None:
    world = World(0)
    loop = world.process("p")
    clock = Machine(5.0, rate).clock(world, loop)
    due = clock.now() + 10.0
    fired: list[float] = []

    async def main() -> None:
        clock.call_at(due, lambda: fired.append(world.now))
        await asyncio.sleep(11.0)

    world.run(main(), loop)
    world.close()
    assert fired == [pytest.approx(1000.0 + 10.0 / rate)]
    assert clock.now() > due


def test_events_of_a_skewed_process_are_told_in_the_worlds_time() -> None:
    world = World(0)
    machine = Machine(500.0, 1.001)
    history = History(world.clock)
    meter = machine.meter(history, 10.0)
    sent_at = machine.read(1003.0)
    until = sent_at + 6.0 - 1.0
    meter.event("renewed", inc="a", sent_at=sent_at, ttl=6.0, margin=1.0)
    meter.event("life", inc="a", limits={"window": 1})
    meter.event("submit", inc="a", timeout=10.01)
    meter.event("submit", inc="a", timeout=None)
    meter.count("things")
    renewed, life, submit, endless = [event.fields for event in history.events]
    assert renewed["sent_at"] + renewed["ttl"] - renewed["margin"] == machine.reached(until)
    assert renewed["sent_at"] == pytest.approx(1003.0)
    assert life["limits"] == {"window": 1, "drain": pytest.approx(9.99, rel=1e-4)}
    assert submit["timeout"] == pytest.approx(10.0)
    assert endless["timeout"] is None
    assert history.counts["things"] == 1


@simulated(entities=[Room], nodes=2, seeds=1)
async def test_the_clock_of_a_running_node_does_not_jump(sim: Sim) -> None:
    with pytest.raises(SimulationError, match="crash or stop it"):
        sim.skew(0, 5.0)
    sim.crash(0)
    sim.skew(0, 5.0, 1.001)
    sim.start(0)
    await sim.wait_until(sim.settled)
    life = sim.node(0).life
    assert life is not None
    assert sim.nodes[0].machine == Machine(5.0, 1.001, 5.0)


@simulated(entities=[Room], nodes=3, seeds=2)
async def test_a_node_with_a_slow_clock_stops_before_its_lease_is_over(sim: Sim) -> None:
    """A1: it counts 0.1 % too few seconds, and the margin covers it."""
    sim.crash(0)
    sim.skew(0, -100.0, 0.999)
    sim.start(0)
    await sim.wait_until(lambda: sim.nodes[0].incarnation is not None)
    await sim.wait_until(sim.settled)
    me = sim.nodes[0].incarnation
    sim.cut_store(0)
    await sim.advance(TTL_S + 1)
    fenced = next(event for event in sim.history.of("fenced") if event.fields["inc"] == me)
    expired = next(
        event
        for event in sim.history.of("expire")
        if any(str(me).encode() in key for key in event.fields["deletes"])
    )
    assert fenced.at < expired.at - 0.25
    sim.heal()


@pytest.mark.scenario("DX-18")
@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_a_stepped_store_clock_ends_no_lease_early(step_s: float) -> None:
    @simulated(entities=[Room], nodes=3, seeds=3)
    async def run(sim: Sim) -> None:
        await sim.advance(sim.random.uniform(0.0, 3.0))
        lives = len(list(sim.history.of("life")))
        for _ in range(3):
            sim.step_store_clock(step_s)
            await sim.advance(sim.random.uniform(0.0, 4.0))
        await sim.advance(2 * TTL_S)
        assert list(sim.history.of("fenced", "expire")) == []
        assert len(list(sim.history.of("life"))) == lives

    run()


@pytest.mark.scenario("DX-18")
@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_a_stepped_store_clock_keeps_no_lease_alive(step_s: float) -> None:
    @simulated(entities=[Ledger], nodes=3, seeds=3)
    async def run(sim: Sim) -> None:
        ledger = sim.ref(Ledger, "a")
        assert await ledger.ask(Ledger.note, 1) == 1
        home = sim.owner(Ledger, "a")
        sim.crash(home)
        crashed_at = sim.world.now
        await sim.advance(sim.random.uniform(0.0, 2.0))
        sim.step_store_clock(step_s)
        await sim.wait_until(sim.settled, timeout_s=10)
        assert TTL_S - 2.5 < sim.world.now - crashed_at < TTL_S + 3
        assert await ledger.options(key="k").ask(Ledger.note, 2) == 2

    run()


@simulated(entities=[Room], nodes=3, seeds=2)
async def test_wall_clocks_of_nodes_do_not_matter_to_leases(sim: Sim) -> None:
    for node in range(3):
        sim.step_clock(node, 3600.0 * (node - 1))
    await sim.advance(2 * TTL_S)
    assert list(sim.history.of("fenced", "expire")) == []
    walls = [sim.nodes[node].machine.wall_s for node in range(3)]
    assert walls == [-3600.0, 0.0, 3600.0]
