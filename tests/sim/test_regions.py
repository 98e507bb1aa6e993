"""Scenarios of routing: shards that nobody knows yet, and shards whose home changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from manager_lab import (
    Access,
    Diary,
    from_the_start,
    incarnation,
    inside,
    of_shard,
    one_id_per_shard,
    spy_on_store,
    stored,
    traffic,
)

from domicile import Entity, Node, Settings, handler
from domicile.core.ids import ShardKey
from domicile.core.state.keys import MAP
from domicile.testing import Sim, simulated

FEW = Settings(shards=12)
QUIET_S = 2.0
"""Less than a lease has left at any time, and than a link waits for its peer."""


def map_reads(accesses: list[Access], by: str) -> list[Access]:
    """How often a process asked the store where shards are."""
    return [
        access
        for access in accesses
        if access.by == by
        and (access.call == "list" or (access.call == "get" and access.key.startswith(MAP)))
    ]


def silence(sim: Sim, coordinator: int) -> None:
    """From here on neither the coordinator nor the store can have a part in anything."""
    sim.freeze(coordinator)
    for node in range(len(sim.nodes)):
        sim.cut_store(node)
    sim.store.cut = True


def end_silence(sim: Sim, coordinator: int) -> None:
    sim.heal()
    sim.thaw(coordinator)


# RG-01, RG-02: shards without a home


@pytest.mark.scenario("RG-01")
@pytest.mark.parametrize("seed", range(10))
def test_a_shard_unknown_to_its_own_node_is_located_once_and_started(seed: int) -> None:
    async def body(sim: Sim, ready: Awaitable[Sim]) -> None:
        accesses = spy_on_store(sim)
        await sim.wait_until(lambda: all(node.incarnation is not None for node in sim.nodes))
        homes = one_id_per_shard(sim)
        assert all(sim.entry(shard).state == "free" for shard in homes)
        sent_at = sim.world.now

        async def greet(node: Node) -> dict[str, tuple[int, float]]:
            async with asyncio.TaskGroup() as group:
                asks = {
                    id: group.create_task(node.ref(Diary, id).ask(Diary.birth))
                    for id in homes.values()
                }
            return {id: ask.result() for id, ask in asks.items()}

        births = await inside(sim, 0, greet)
        await ready
        me = incarnation(sim, 0)
        local = {shard: id for shard, id in homes.items() if sim.entry(shard).owner == me}
        assert len(local) == 6
        for shard, id in local.items():
            starts, started_at = births[id]
            assert starts == 1
            assert started_at > sent_at
            [(opened, _)] = of_shard(sim, shard, "open")
            [(began, start)] = of_shard(sim, shard, "start")
            assert (start.fields["inc"], start.fields["sender"]) == (me, me)
            assert opened < began
            [(_, submit)] = of_shard(sim, shard, "submit")
            [(_, write)] = of_shard(sim, shard, "write")
            assert submit.at < write.at, "it had to wait for a home"

        silence(sim, coordinator=1)

        async def go_on(node: Node) -> list[int]:
            ends_at = sim.world.now + QUIET_S
            counts: list[int] = []
            while sim.world.now < ends_at:
                counts = [await node.ref(Diary, id).ask(Diary.write, "x") for id in local.values()]
                await asyncio.sleep(0.05)
            return counts

        counts = await inside(sim, 0, go_on)
        end_silence(sim, coordinator=1)
        assert min(counts) > 30
        assert max(counts) == min(counts)
        assert len(map_reads(accesses, "node-0")) == 1, "the location was asked once"
        assert len(stored(sim)) == len(homes)

    from_the_start(Sim(seed, entities=[Diary], nodes=2, settings=FEW, candidates=[1]), body)


@pytest.mark.scenario("RG-02")
@pytest.mark.parametrize("seed", range(10))
def test_mail_for_unknown_remote_shards_waits_and_goes_out_in_order(seed: int) -> None:
    async def body(sim: Sim, ready: Awaitable[Sim]) -> None:
        accesses = spy_on_store(sim)
        await sim.wait_until(lambda: all(node.incarnation is not None for node in sim.nodes))
        await sim.wait_until(lambda: any(lease_of(sim, client_of(sim))))
        await sim.advance(0.05)
        homes = one_id_per_shard(sim)
        me = client_of(sim)
        assert all(sim.entry(shard).state == "free" for shard in homes)
        for number in range(9):
            for id in homes.values():
                await sim.ref(Diary, id).tell(Diary.write, str(number))
        asks = [asyncio.ensure_future(sim.ref(Diary, id).ask(Diary.read)) for id in homes.values()]
        await sim.advance(0)
        assert all(sim.entry(shard).state == "free" for shard in homes)
        assert not any(event.fields["inc"] == me for event in sim.history.of("write"))
        for shard in homes:
            held = [event.fields["held"] for _, event in of_shard(sim, shard, "submit")]
            assert held == list(range(1, 11))

        await ready
        for ask in asks:
            assert await ask == [str(number) for number in range(9)]
        located = {change.shard: change for change in stored(sim)}
        assert sorted(located) == sorted(homes)
        for shard in homes:
            writes = of_shard(sim, shard, "write")
            assert [event.fields["n"] for _, event in writes] == list(range(1, 11))
            assert all(event.fields["to"] == located[shard].entry.owner for _, event in writes)
            assert writes[0][0] > located[shard].position

        remote = {shard: id for shard, id in homes.items() if sim.owner(Diary, id) != 0}
        assert len(remote) == 8
        silence(sim, coordinator=0)
        ends_at, lines = sim.world.now + QUIET_S, 9
        while sim.world.now < ends_at:
            lines += 1
            for id in remote.values():
                assert await sim.ref(Diary, id).ask(Diary.write, "more") == lines
        end_silence(sim, coordinator=0)
        for shard in remote:
            submits = of_shard(sim, shard, "submit")[10:]
            writes = of_shard(sim, shard, "write")[10:]
            assert len(submits) == lines - 9 > 5
            assert [event.at for _, event in writes] == [event.at for _, event in submits]
        assert len(map_reads(accesses, "client")) == 1, "the location was asked once"
        assert len(stored(sim)) == len(homes)

    from_the_start(Sim(seed, entities=[Diary], nodes=3, settings=FEW, candidates=[0]), body)


def client_of(sim: Sim) -> str:
    """The incarnation of the test itself."""
    return next(
        event.fields["inc"] for event in sim.history.of("life") if not event.fields["hosts"]
    )


def lease_of(sim: Sim, inc: str) -> list[bool]:
    """Whether a process has registered."""
    return [event.fields["inc"] == inc for event in sim.history.of("renewed")]


# RG-04: a change of home


class Marks:
    """When entities have stopped."""

    def __init__(self) -> None:
        self.stopped: dict[str, float] = {}


MARKS = Marks()


@asynccontextmanager
async def marks() -> AsyncGenerator[Mapping[type[Any], Any]]:
    """What every node gives to its entities."""
    yield {Marks: MARKS}


class Keeper(Entity, name="keeper"):
    """Takes its time to stop."""

    async def on_stop(self) -> None:
        await asyncio.sleep(0.3)
        self.resource(Marks).stopped.setdefault(self.id, asyncio.get_running_loop().time())

    @handler
    async def note(self, number: int) -> int:
        return self.epoch

    @handler
    async def nap(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return self.epoch


@pytest.mark.scenario("RG-04")
@simulated(entities=[Keeper], nodes=3, seeds=12, settings=FEW, candidates=[0], resources=marks)
async def test_during_a_hand_off_all_senders_hold_and_then_flow_in_order(sim: Sim) -> None:
    MARKS.stopped.clear()
    shard, ids = keepers_at(sim, 1)
    old, new, me = incarnation(sim, 1), incarnation(sim, 2), client_of(sim)
    nap = asyncio.ensure_future(sim.ref(Keeper, ids[0]).ask(Keeper.nap, 1.0))
    await sim.wait_until(lambda: bool(of_shard(sim, shard, "start")))

    async def chatter(source: Sim | Node) -> list[int]:
        asks: list[asyncio.Task[int]] = []
        async with asyncio.TaskGroup() as group:
            for number in range(80):
                for id in ids:
                    keeper = source.ref(Keeper, id)
                    await keeper.tell(Keeper.note, number)
                    if number % 4 == 0:
                        asks.append(group.create_task(keeper.ask(Keeper.note, number)))
                await asyncio.sleep(0.025)
        return [ask.result() for ask in asks]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(inside(sim, node, chatter)) for node in range(3)]
        tasks.append(group.create_task(chatter(sim)))
        await sim.advance(0.2)
        await sim.wish(shard, 2)
    assert await nap == 1
    for task in tasks:
        assert sorted(dict.fromkeys(task.result())) == [1, 2], "both homes answered"
    await sim.wait_until(sim.settled)

    first, moving, serving = [change for change in stored(sim) if change.shard == shard]
    assert (first.entry.owner, moving.entry.owner, moving.entry.to) == (old, old, new)
    assert (moving.entry.state, serving.entry.state) == ("moving", "serving")
    assert (serving.entry.owner, serving.entry.epoch) == (new, 2)

    # It completes when every entity has stopped, and not before.
    [(released, release)] = of_shard(sim, shard, "released")
    assert sorted(MARKS.stopped) == sorted(ids)
    assert max(MARKS.stopped.values()) <= release.at
    naps = [at for at, event in of_shard(sim, shard, "finish") if event.fields["inc"] == old]
    assert max(naps) < released < serving.position

    # Nobody is told of another home meanwhile, and nobody writes: everybody holds.
    for position, event in of_shard(sim, shard, "told"):
        if moving.position < position < serving.position:
            assert (event.fields["state"], event.fields["owner"]) == ("moving", old)
    known_at = moving.at + 0.05
    senders = [old, new, incarnation(sim, 0), me]
    for sender in senders:
        submits = [
            event.fields["held"]
            for position, event in of_shard(sim, shard, "submit")
            if event.fields["inc"] == sender and known_at < event.at and position < serving.position
        ]
        assert len(submits) > 30
        assert submits == sorted(submits)
        assert submits[0] > 0
    for position, event in of_shard(sim, shard, "write"):
        if event.fields["to"] == new:
            assert position > serving.position
        else:
            assert event.at < known_at
    assert of_shard(sim, shard, "return"), "unstarted mail went back"

    # What was held flows to the new home, in order, nothing twice and nothing lost.
    for sender in senders:
        flown = [
            event.fields["n"]
            for _, event in of_shard(sim, shard, "write")
            if event.fields["to"] == new and event.fields["inc"] == sender
        ]
        assert flown == sorted(dict.fromkeys(flown))
        assert len(flown) > 30
    assert traffic(sim, "start") == traffic(sim, "submit")


def keepers_at(sim: Sim, node: int) -> tuple[ShardKey, list[str]]:
    """Three entities of one shard that is at home at a node."""
    found: dict[ShardKey, list[str]] = {}
    for number in range(1_000):
        id = f"k{number}"
        if sim.owner(Keeper, id) == node:
            ids = found.setdefault(sim.shard(Keeper, id), [])
            ids.append(id)
            if len(ids) == 3:
                return sim.shard(Keeper, id), ids
    raise AssertionError(f"node {node} is home to nothing")
