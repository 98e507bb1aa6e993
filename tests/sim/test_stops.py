"""Scenarios of owners that let go: nodes that stop, and shards that are not released in time."""

from __future__ import annotations

import asyncio

import pytest
from manager_lab import first, incarnation, inside, of_shard, stored
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
    leader,
    leaving_at,
    loads,
    returned,
    steps,
)

from domicile import MaybeExecuted, Settings
from domicile.core.ids import Incarnation
from domicile.testing import Sim, simulated

FEW = Settings(shards=12)

AT_ONCE_S = 0.1
"""Some messages and commits, each of a few milliseconds."""


def ended(sim: Sim, node: Incarnation) -> int:
    """Where in the history a node was done, by its own will."""
    return first(sim, "ended", lambda fields: bool(fields["inc"] == node))


# SM-03: a node stops


@pytest.mark.scenario("SM-03")
@simulated(entities=[Clerk], nodes=4, seeds=4, settings=FEW)
async def test_a_stopping_node_hands_everything_over_and_nobody_fails(sim: Sim) -> None:
    ids = clerks(sim)
    leaver = next(node for node in range(4) if node != acting(sim))
    me = incarnation(sim, leaver)
    mine = clerks_at(sim, leaver)
    load = Load(sim, ids.values())
    load.begin([node for node in range(4) if node != leaver])
    await sim.advance(0.5)
    shard, busy = next(iter(mine.items()))
    nap = asyncio.ensure_future(sim.ref(Clerk, busy).ask(Clerk.nap, 2.0))
    await sim.wait_until(lambda: any(e.fields["method"] == "nap" for e in sim.history.of("start")))
    await sim.advance(0.2)

    await sim.stop(leaver)
    await sim.advance(0.5)
    await load.end()
    assert load.failures == []
    assert load.asked > 500
    assert_nothing_lost(sim)

    left, left_at = leaving_at(sim, me)
    unregistered, _ = gone_at(sim, me)
    given = [change for change in stored(sim) if change.position > left]
    assert not [change for change in given if me == change.entry.to], "it receives nothing more"
    residents = {
        event.fields["id"]: event.fields["shard"]
        for event in sim.history.of("start")
        if event.fields["inc"] == me
    }
    assert sorted(residents) == sorted(mine.values())
    for shard, id in mine.items():
        [(drained, _)] = of_shard(sim, shard, "draining")
        [(stopped, _)] = of_shard(sim, shard, "stopped")
        [(released, release)] = of_shard(sim, shard, "released")
        assert left < drained < stopped < released < unregistered
        late = [event for at, event in of_shard(sim, shard, "accept", "start") if at > drained]
        assert [event for event in late if event.fields["inc"] == me] == [], "nothing new entered"
        moving, serving = changes_of(sim, shard, left)
        assert (moving.entry.state, moving.entry.owner) == ("moving", me)
        assert serving.entry.state == "serving"
        assert serving.entry.epoch == moving.entry.epoch + 1
        assert serving.at - release.at < AT_ONCE_S, "placed at once"
        if id != busy:
            assert serving.at - left_at < AT_ONCE_S, "nobody waits for the one that is busy"

    # What it sent back ran at the new home, once, and nowhere before.
    back = returned(sim, me)
    assert len(back) > 3
    for (sender, id, n), position in back.items():
        [ran] = [
            (at, event.fields["inc"])
            for at, event in enumerate(sim.history.events)
            if event.kind == "start"
            and (event.fields["sender"], event.fields["id"], event.fields["n"]) == (sender, id, n)
        ]
        assert ran[0] > position
        assert ran[1] != me
    assert await nap == 1, "what was in progress ended here, in the epoch it began in"
    [(_, finish)] = [
        (at, event)
        for at, event in of_shard(sim, sim.shard(Clerk, busy), "finish")
        if event.fields["id"] == busy and event.at - left_at > 1.0 and event.fields["inc"] == me
    ]
    assert finish.fields["how"] == "ok"
    assert not sim.nodes[leaver].up
    assert ended(sim, me) < unregistered
    assert sorted(loads(sim).values()) == [4, 4, 4]


@pytest.mark.scenario("SM-03", partial=True)
@simulated(entities=[Clerk], nodes=3, seeds=6, settings=FEW)
async def test_an_entity_that_never_ran_starts_elsewhere_once_its_node_stops(sim: Sim) -> None:
    leaver = next(node for node in range(3) if node != acting(sim))
    me, mine = incarnation(sim, leaver), clerks_at(sim, leaver)
    # The client hears late of everything: what comes back tells it first that the node leaves.
    await sim.ref(Clerk, next(iter(mine.values()))).ask(Clerk.note)
    sim.store.watch_delay_s = (4.0, 4.0)
    held, busy = next(iter(mine.items()))
    nap = asyncio.ensure_future(sim.ref(Clerk, busy).ask(Clerk.nap, 3.0))
    await sim.advance(0.1)
    fresh = next(id for id in (f"f{n}" for n in range(1_000)) if sim.shard(Clerk, id) == held)
    stopping = asyncio.ensure_future(sim.stop(leaver))
    await sim.wait_until(lambda: all(of_shard(sim, shard, "draining") for shard in mine))
    await sim.wait_until(
        lambda: all(sim.entry(shard).owner != me for shard in mine if shard != held), timeout_s=1
    )
    began_at = sim.world.now
    asks = [
        asyncio.ensure_future(sim.ref(Clerk, id).options(timeout_s=5).ask(Clerk.note))
        for shard, id in mine.items()
        if shard != held
    ]
    assert [await ask for ask in asks] == [2] * (len(mine) - 1)
    assert sim.world.now - began_at < 1.0, "it waited neither for its watch nor for the nap"
    late = asyncio.ensure_future(sim.ref(Clerk, fresh).options(timeout_s=15).ask(Clerk.note))
    await sim.wait_until(lambda: len(returned(sim, me)) == len(mine))
    assert not nap.done(), "it came back while its shard still drained"
    for shard, id in mine.items():
        if shard != held:
            [(_, start)] = of_shard(sim, shard, "start")
            assert (start.fields["id"], start.fields["inc"]) == (id, sim.entry(shard).owner)
    assert await nap == 1
    assert await late == 2
    await stopping


# RG-10: graceful stops that are hard


WHO = {
    "the coordinator": lambda head: [head],
    "two at once": lambda head: [(head + 1) % 4, (head + 2) % 4],
    "the coordinator and another": lambda head: [head, (head + 1) % 4],
}


@pytest.mark.scenario("RG-10")
@pytest.mark.parametrize("who", WHO)
@simulated(entities=[Clerk], nodes=4, seeds=4, settings=FEW)
async def test_nothing_is_lost_when_nodes_stop(sim: Sim, who: str) -> None:
    leavers = WHO[who](acting(sim))
    stayers = [node for node in range(4) if node not in leavers]
    gone = {node: incarnation(sim, node) for node in leavers}
    stay = {node: incarnation(sim, node) for node in stayers}
    before = {shard: sim.entry(shard) for shard in clerks(sim)}
    load = Load(sim, clerks(sim).values())
    load.begin(stayers)
    await sim.advance(0.5)
    async with asyncio.TaskGroup() as group:
        for node in leavers:
            group.create_task(sim.stop(node))
    await sim.wait_until(lambda: leader(sim) in stayers and sim.settled(), timeout_s=15)
    await sim.advance(1.0)
    await load.end()

    assert load.failures == []
    assert_nothing_lost(sim)
    assert load.slowest_s < 5.0
    assert {node: incarnation(sim, node) for node in stayers} == stay
    total = sim.settings.shards
    assert sorted(loads(sim).values()) == [total // len(stayers)] * len(stayers)
    for shard, entry in before.items():
        changes = changes_of(sim, shard)[1:]
        if entry.owner in stay.values():
            assert changes == [], "the others keep what they have"
            continue
        assert entry.owner in gone.values()
        released = [event.fields["epoch"] for _, event in of_shard(sim, shard, "released")]
        assert released == [
            change.entry.epoch for change in changes if change.entry.state == "moving"
        ]
        assert sim.entry(shard).owner in stay.values()
    for me in gone.values():
        position, _ = gone_at(sim, me)
        assert ended(sim, me) < position
        assert not [event for event in sim.history.of("fenced") if event.fields["inc"] == me]
    assert_one_owner_per_epoch(sim)


@pytest.mark.scenario("RG-10")
@pytest.mark.parametrize("leads", [False, True])
@simulated(entities=[Clerk], nodes=3, seeds=4, settings=FEW)
async def test_a_slow_entity_ends_before_its_node_goes(sim: Sim, leads: bool) -> None:
    head = acting(sim)
    leaver = head if leads else (head + 1) % 3
    me = incarnation(sim, leaver)
    shard, busy = next(iter(clerks_at(sim, leaver).items()))
    load = Load(sim, clerks(sim).values(), pause_s=0.5)
    load.begin([node for node in range(3) if node != leaver])
    await sim.advance(0.3)
    nap = asyncio.ensure_future(sim.ref(Clerk, busy).options(timeout_s=30).ask(Clerk.nap, 6.0))
    await sim.advance(0.1)
    behind = [
        asyncio.ensure_future(sim.ref(Clerk, busy).options(timeout_s=30).ask(Clerk.note))
        for _ in range(5)
    ]
    await sim.advance(0.2)
    # The client hears of the move by what comes back, not by itself.
    sim.store.watch_delay_s = (8.0, 8.0)
    stopping = asyncio.ensure_future(sim.stop(leaver))
    await sim.advance(3.0)
    assert len([id for _, id, _ in returned(sim, me) if id == busy]) >= len(behind)
    assert sim.nodes[leaver].up
    assert steps(changes_of(sim, shard)[-1:]) == [("moving", me, 1)]
    assert not any(ask.done() for ask in behind)
    await stopping
    await sim.wait_until(sim.settled)
    await load.end()
    assert await nap == 1
    assert [await ask for ask in behind] == [2] * 5
    assert load.failures == []
    assert_nothing_lost(sim)
    [(finished, _)] = [
        (at, event) for at, event in of_shard(sim, shard, "finish") if event.fields["inc"] == me
    ][-1:]
    [(released, _)] = of_shard(sim, shard, "released")
    assert finished < released < gone_at(sim, me)[0]


@pytest.mark.scenario("RG-10", partial=True)
@simulated(entities=[Clerk], nodes=3, seeds=5, settings=FEW)
async def test_an_entity_slower_than_the_drain_deadline_is_cut_and_its_caller_told(
    sim: Sim,
) -> None:
    leaver = next(node for node in range(3) if node != acting(sim))
    me = incarnation(sim, leaver)
    shard, busy = next(iter(clerks_at(sim, leaver).items()))
    nap = asyncio.ensure_future(sim.ref(Clerk, busy).options(timeout_s=30).ask(Clerk.nap, 25.0))
    await sim.advance(0.1)
    behind = [
        asyncio.ensure_future(sim.ref(Clerk, busy).options(timeout_s=30).ask(Clerk.note))
        for _ in range(5)
    ]
    await sim.advance(0.1)
    began_at = sim.world.now
    await sim.stop(leaver)
    with pytest.raises(MaybeExecuted):
        await nap
    assert [await ask for ask in behind] == [2] * 5
    [(_, finish)] = [(a, e) for a, e in of_shard(sim, shard, "finish") if e.fields["inc"] == me]
    assert finish.fields["how"] == "cancelled"
    assert 0 <= finish.at - began_at - sim.settings.drain_deadline_s < 0.5
    await sim.wait_until(sim.settled)


# RG-07: an owner that does not confirm in time


DRAINING = simulated(entities=[Clerk], nodes=3, seeds=6, settings=FEW, candidates=[0])


@pytest.mark.scenario("RG-07")
@DRAINING
async def test_a_shard_that_can_not_be_emptied_in_time_is_tried_again(sim: Sim) -> None:
    old, new = incarnation(sim, 1), incarnation(sim, 2)
    shard, busy = next(iter(clerks_at(sim, 1).items()))
    deadline_s = sim.settings.drain_deadline_s
    ref = sim.ref(Clerk, busy).options(timeout_s=90)
    await ref.ask(Clerk.note)
    nap = asyncio.ensure_future(ref.ask(Clerk.nap, 2.5 * deadline_s))
    await sim.advance(0.1)
    position, began_at = len(sim.history.events), sim.world.now
    await sim.wish(shard, 2)
    asks: list[asyncio.Future[int]] = []

    async def keep_asking() -> None:
        while sim.entry(shard).owner != new and sim.world.now < began_at + 4 * deadline_s:
            asks.append(asyncio.ensure_future(ref.ask(Clerk.note)))
            await ref.tell(Clerk.note)
            await sim.advance(0.5)

    await keep_asking()
    assert await nap == 1, "it ended in the epoch it began in"
    results = [await ask for ask in asks]
    assert results == sorted(results)
    assert sorted(dict.fromkeys(results))[-1] == 2
    assert_nothing_lost(sim)

    one, back, two, serving = changes_of(sim, shard, position)
    assert steps([one, back, two, serving]) == [
        ("moving", old, 1),
        ("serving", old, 1),
        ("moving", old, 1),
        ("serving", new, 2),
    ]
    assert 0 <= back.at - began_at - deadline_s < 2 * AT_ONCE_S, "given up at the deadline"
    next_round_s = sim.settings.balance_interval_s + AT_ONCE_S
    assert 0 <= two.at - back.at - deadline_s < next_round_s, "another attempt after a rest"
    [number] = [
        event.fields["n"]
        for _, event in of_shard(sim, shard, "start")
        if event.fields["method"] == "nap"
    ]
    [finish] = [event for _, event in of_shard(sim, shard, "finish") if event.fields["n"] == number]
    assert 0 < serving.at - finish.at < 2 * AT_ONCE_S
    drains = [event.at for _, event in of_shard(sim, shard, "draining")]
    assert [at >= change.at for at, change in zip(drains, (one, two), strict=True)] == [True] * 2
    assert sim.settled()


@pytest.mark.scenario("RG-07")
@DRAINING
async def test_a_release_that_the_leader_can_not_hear_reaches_it_by_the_store(sim: Sim) -> None:
    old, new = incarnation(sim, 1), incarnation(sim, 2)
    shard, id = next(iter(clerks_at(sim, 1).items()))
    await sim.ref(Clerk, id).ask(Clerk.note)
    position, began_at = len(sim.history.events), sim.world.now
    sim.block(1, 0)
    await sim.wish(shard, 2)
    await sim.wait_until(lambda: bool(of_shard(sim, shard, "released")), timeout_s=1)
    ask = asyncio.ensure_future(sim.ref(Clerk, id).options(timeout_s=30).ask(Clerk.note))
    await sim.advance(0.5)
    assert sim.entry(shard).state == "moving"
    await sim.wait_until(lambda: sim.entry(shard).owner == new and sim.settled(), timeout_s=15)
    assert sim.world.now - began_at < 10
    assert await ask == 2
    assert steps(changes_of(sim, shard, position)) == [("moving", old, 1), ("serving", new, 2)]

    # All that was held back arrives now: old words about an epoch that is over.
    after = len(sim.history.events)
    sim.heal()
    await sim.advance(10.0)
    heard = [
        event
        for event in sim.history.events[after:]
        if event.kind == "taken" and event.fields["peer"] == old
    ]
    assert heard
    assert changes_of(sim, shard, after) == []
    assert len(of_shard(sim, shard, "released")) == 1
    assert sim.settled()
    assert_nothing_lost(sim)


@pytest.mark.scenario("RG-07")
@DRAINING
async def test_a_release_that_arrives_after_the_move_was_taken_back_still_counts(sim: Sim) -> None:
    old = incarnation(sim, 1)
    shard, id = next(iter(clerks_at(sim, 1).items()))
    ref = sim.ref(Clerk, id).options(timeout_s=30)
    await ref.ask(Clerk.note)
    # The link stands and answers slowly, so that the release comes by itself, not by the store.
    elsewhere = next(iter(clerks_at(sim, 0).values()))
    await inside(sim, 1, lambda node: node.ref(Clerk, elsewhere).ask(Clerk.note))
    position = len(sim.history.events)
    sim.slow_way(1, 0, 1.5)
    await sim.wish(shard, 2)
    await sim.wait_until(lambda: bool(of_shard(sim, shard, "released")), timeout_s=1)
    await sim.wish(shard, None)
    await sim.wait_until(lambda: sim.entry(shard).state == "serving", timeout_s=1)
    assert steps(changes_of(sim, shard, position)) == [("moving", old, 1), ("serving", old, 1)]
    asks = [asyncio.ensure_future(ref.ask(Clerk.note)) for _ in range(5)]
    await sim.advance(1.0)
    assert not any(ask.done() for ask in asks), "a release is final: it does not open again"
    assert len(changes_of(sim, shard, position)) == 2
    await sim.wait_until(lambda: sim.entry(shard).epoch > 1 and sim.settled(), timeout_s=10)
    assert [await ask for ask in asks] == [2] * 5
    [_, _, after] = changes_of(sim, shard, position)
    assert (after.entry.state, after.entry.epoch) == ("serving", 2)
    sim.slow_way(1, 0, 0.0)
    await sim.advance(10.0)
    assert len(changes_of(sim, shard, position)) == 3
    opened = [event.fields["epoch"] for _, event in of_shard(sim, shard, "open")]
    assert opened == [1, 2]
    assert_nothing_lost(sim)
