"""Scenarios of what is gone for a while: managers, the coordinator's node, the whole store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from manager_lab import Stored, incarnation, of_shard, stored
from rounds_lab import (
    Clerk,
    Load,
    acting,
    assert_nothing_lost,
    assert_one_owner_per_epoch,
    changes_of,
    clerks,
    clerks_at,
    gone_at,
    homes,
    leader,
    loads,
)

from domicile import Settings
from domicile.core.state.keys import LEADER_KEY
from domicile.testing import Event, Sim, simulated

FEW = Settings(shards=12)

MANAGERS = (4, 5)
"""Their numbers, after those of four nodes."""

MANAGED = simulated(entities=[Clerk], nodes=4, managers=2, seeds=5, settings=FEW)


def leaderless(sim: Sim) -> bool:
    """Whether the store names no coordinator."""
    return sim.servers.store.peek(LEADER_KEY) is None


def since(sim: Sim, position: int) -> list[Stored]:
    """All changes of the map that were committed after a position of the history."""
    return [change for change in stored(sim) if change.position > position]


def leaderships(sim: Sim) -> list[str]:
    """Who won the leader key, one after the other."""
    return [event.fields["inc"] for event in sim.history.of("leading")]


# SM-19: managers come and go


@pytest.mark.scenario("SM-19")
@MANAGED
async def test_a_manager_that_restarts_moves_nothing(sim: Sim) -> None:
    before, lives = homes(sim), [incarnation(sim, node) for node in range(4)]
    position = len(sim.history.events)
    load = Load(sim, clerks(sim).values(), timeout_s=1.0, pause_s=0.5)
    load.begin([0, 2])
    for manager in MANAGERS:
        sim.crash(manager)
    await sim.wait_until(lambda: leaderless(sim), timeout_s=10)
    await sim.advance(1.0)
    for manager in MANAGERS:
        sim.start(manager)
    await sim.wait_until(lambda: leader(sim) in MANAGERS, timeout_s=10)
    await sim.advance(10.0)
    # And the second stands by: it takes over what the first one led.
    first = acting(sim)
    sim.crash(first)
    await sim.wait_until(lambda: leader(sim) == 9 - first, timeout_s=10)
    sim.start(first)
    await sim.advance(10.0)
    await load.end()
    assert load.failures == []
    assert_nothing_lost(sim)
    assert since(sim, position) == []
    assert homes(sim) == before
    assert [incarnation(sim, node) for node in range(4)] == lives
    assert leader(sim) == 9 - first, "nobody is pre-empted"
    assert len(leaderships(sim)) == len(dict.fromkeys(leaderships(sim))) == 3


@pytest.mark.scenario("SM-19")
@MANAGED
async def test_a_manager_that_returns_places_the_shards_of_the_dead_and_no_others(sim: Sim) -> None:
    before = homes(sim)
    dead, orphans = incarnation(sim, 1), clerks_at(sim, 1)
    living = [incarnation(sim, node) for node in (0, 2, 3)]
    position = len(sim.history.events)
    load = Load(sim, clerks_at(sim, 0, 2, 3).values(), timeout_s=1.0, pause_s=0.5)
    load.begin([0, 2])
    for manager in MANAGERS:
        sim.crash(manager)
    sim.crash(1)
    await sim.advance(sim.settings.ttl_s + 3)
    assert leaderless(sim)
    gone_at(sim, dead)
    assert since(sim, position) == [], "nobody is there to decide"
    for manager in MANAGERS:
        sim.start(manager)
    await sim.wait_until(sim.settled, timeout_s=10)
    await sim.advance(10.0)
    await load.end()
    assert load.failures == []
    assert_nothing_lost(sim)
    [won] = [event for event in sim.history.of("leading") if event.at > gone_at(sim, dead)[1]]
    changes = since(sim, position)
    assert sorted(change.shard for change in changes) == sorted(orphans)
    for change in changes:
        assert change.entry.state == "serving"
        assert change.entry.owner in living
        assert change.entry.epoch == change.before.epoch + 1
        assert change.before.owner == dead
        assert change.at > won.at
    for shard, home in before.items():
        if shard not in orphans:
            assert homes(sim)[shard] == home
    assert sorted(loads(sim).values()) == [4, 4, 4]
    assert [incarnation(sim, node) for node in (0, 2, 3)] == living


# SM-20: the store is away in the middle of a rebalance


def at_first(
    sim: Sim, kind: str, wanted: Callable[[Event], bool], then: Callable[[], None]
) -> None:
    """Have something happen right after the first such event, outside of all processes."""
    struck: list[float] = []

    def listen(event: Event) -> None:
        if not struck and wanted(event):
            struck.append(event.at)
            sim.world.call_at(sim.world.now, then)

    sim.history.subscribe(listen, kind)


MOMENTS = {
    "moving stored": ("told", lambda event: event.fields["state"] == "moving"),
    "an owner drains": ("draining", lambda event: True),
    "an owner released": ("released", lambda event: True),
}


@pytest.mark.scenario("SM-20")
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("away_s", [2.0, 12.0])
@pytest.mark.parametrize("running", [False, True])
@simulated(entities=[Clerk], nodes=4, managers=2, seeds=3, settings=Settings(shards=24))
async def test_a_store_outage_and_a_manager_restart_in_mid_rebalance(
    sim: Sim, moment: str, away_s: float, running: bool
) -> None:
    ids = clerks(sim)
    down: list[float] = []

    def strike() -> None:
        down.append(sim.world.now)
        sim.store_outage(running=running)

    kind, wanted = MOMENTS[moment]
    at_first(sim, kind, wanted, strike)
    head = acting(sim)
    led = incarnation(sim, head)
    sim.add(candidate=False)
    await sim.wait_until(lambda: bool(down), timeout_s=10)
    assert any(change.entry.state == "moving" for change in stored(sim))
    sim.crash(head)
    await sim.advance(away_s / 2)
    sim.start(head)
    await sim.advance(away_s / 2)
    sim.store_back()
    await sim.wait_until(
        lambda: sorted(loads(sim).values()) == [4, 5, 5, 5, 5] and sim.settled(), timeout_s=40
    )
    again = incarnation(sim, head)
    assert again != led, "the manager that was started meanwhile joined by itself"
    assert leader(sim) in MANAGERS
    position = len(sim.history.events)
    await sim.advance(5.0)
    assert since(sim, position) == [], "and it stays so"
    assert all(sim.entry(shard).state == "serving" for shard in ids)
    for shard, id in ids.items():
        epoch = await sim.ref(Clerk, id).options(timeout_s=2).ask(Clerk.note)
        assert epoch == sim.entry(shard).epoch
    assert_one_owner_per_epoch(sim)


# RG-09: the coordinator's node crashes


@pytest.mark.scenario("RG-09")
@simulated(entities=[Clerk], nodes=4, seeds=5, settings=FEW, candidates=[0])
async def test_without_a_coordinator_known_shards_flow_and_homeless_ones_wait(sim: Sim) -> None:
    orphans = {**clerks_at(sim, 0), **clerks_at(sim, 1)}
    known = clerks_at(sim, 2, 3)
    lost = {node: incarnation(sim, node) for node in (0, 1)}
    position = len(sim.history.events)
    await sim.ref(Clerk, next(iter(known.values()))).ask(Clerk.note)
    sim.crash(0)
    sim.crash(1)
    load = Load(sim, known.values(), timeout_s=1.0, pause_s=0.5)
    load.begin([2, 3])
    await sim.wait_until(
        lambda: all(sim.servers.store.peek(b"nodes/" + me.encode()) is None for me in lost.values())
    )
    await sim.advance(0.5)
    assert leaderless(sim)
    asks: list[asyncio.Future[int]] = []
    for _ in range(5):
        for id in orphans.values():
            ref = sim.ref(Clerk, id).options(timeout_s=60)
            await ref.tell(Clerk.note)
            asks.append(asyncio.ensure_future(ref.ask(Clerk.note)))
        await sim.advance(1.0)
    assert not any(ask.done() for ask in asks), "held, neither answered nor refused"
    assert since(sim, position) == []
    sim.start(0)
    await sim.wait_until(sim.settled, timeout_s=10)
    assert [await ask for ask in asks] == [2] * len(asks)
    await sim.advance(1.0)
    await load.end()
    assert load.failures == []
    assert load.slowest_s < 0.1
    assert_nothing_lost(sim)
    *_, won = sim.history.of("leading")
    assert won.fields["inc"] == incarnation(sim, 0)
    for shard in orphans:
        starts = [event for at, event in of_shard(sim, shard, "start") if at > position]
        assert len(starts) == 10
        assert all(event.at > won.at for event in starts)
        assert [event.fields["n"] for event in starts] == sorted(e.fields["n"] for e in starts)
    for shard in known:
        assert [c for c in changes_of(sim, shard, position) if c.at < won.at] == []


@pytest.mark.scenario("RG-09")
@simulated(entities=[Clerk], nodes=4, seeds=5, settings=FEW, candidates=[0, 1])
async def test_the_next_coordinator_gives_the_crashed_ones_shards_a_home(sim: Sim) -> None:
    head = acting(sim)
    successor = 1 - head
    dead, orphans = incarnation(sim, head), clerks_at(sim, head)
    known = {shard: id for shard, id in clerks(sim).items() if shard not in orphans}
    before = homes(sim)
    load = Load(sim, known.values(), timeout_s=1.0, pause_s=0.5)
    load.begin([node for node in range(4) if node != head])
    position, crashed_at = len(sim.history.events), sim.world.now
    sim.crash(head)
    # Nobody has told the senders yet: what they send now waits until the home is known to be gone.
    asks: dict[str, list[asyncio.Future[int]]] = {id: [] for id in orphans.values()}
    while sim.world.now < crashed_at + 4.0:
        for id, mine in asks.items():
            ref = sim.ref(Clerk, id).options(timeout_s=60)
            mine.append(asyncio.ensure_future(ref.ask(Clerk.note)))
            await ref.tell(Clerk.note)
        await sim.advance(0.5)
    await sim.wait_until(lambda: leader(sim) == successor and sim.settled(), timeout_s=15)
    assert sim.world.now - crashed_at < 10, "crash to served elsewhere"
    for mine in asks.values():
        assert [await ask for ask in mine] == [2] * len(mine)
    await sim.advance(1.0)
    await load.end()
    assert load.failures == []
    assert load.slowest_s < 0.1
    assert_nothing_lost(sim)
    assert sorted(change.shard for change in since(sim, position)) == sorted(orphans)
    [won] = [event for event in sim.history.of("leading") if event.at > crashed_at]
    assert won.fields["inc"] == incarnation(sim, successor)
    for change in since(sim, position):
        assert change.at > won.at
        assert (change.before.owner, change.entry.epoch) == (dead, 2)
    assert {shard: homes(sim)[shard] for shard in known} == {s: before[s] for s in known}
