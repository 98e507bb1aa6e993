"""Scenarios of rounds: who hears of what, who is left out, who must not wait, who may not host."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from manager_lab import from_the_start, incarnation, inside, of_shard, stored
from rounds_lab import (
    ROLE,
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
    registered_at,
    served_at,
    shards,
    steps,
)

from domicile import Client, Entity, Node, Settings, connect, handler
from domicile.core.ids import Incarnation, ShardKey
from domicile.ports.transport import ConnectionHandler
from domicile.testing import Sim, simulated
from domicile.testing.sim.loop import SimLoop
from domicile.testing.sim.simulated import run_simulation
from domicile.transports.tcp import TcpTransport

FEW = Settings(shards=12)

AT_ONCE_S = 0.1
"""Some messages and commits, each of a few milliseconds."""


# SM-04: how nodes learn of assignments


@pytest.mark.scenario("SM-04")
@simulated(entities=[Clerk], nodes=3, seeds=6, settings=FEW, candidates=[0])
async def test_the_leader_tells_nodes_long_before_their_watch_does(sim: Sim) -> None:
    old, new = incarnation(sim, 1), incarnation(sim, 2)
    wanted = clerks_at(sim, 1)
    for node in (1, 2):
        store = sim.nodes[node].store
        assert store is not None
        store.watch_delay_s = (5.0, 5.0)
    position = len(sim.history.events)
    for shard in wanted:
        await sim.wish(shard, 2)
    await sim.advance(1.0)

    for shard in wanted:
        moving, serving = changes_of(sim, shard, position)
        assert steps([moving, serving]) == [("moving", old, 1), ("serving", new, 2)]
        [(told_away, away), (told_here, here)] = [
            (at, event)
            for at, event in of_shard(sim, shard, "told")
            if at > position
            and event.fields["to"] == (old if event.fields["state"] == "moving" else new)
        ]
        [(drained, drain)] = of_shard(sim, shard, "draining")
        [(opened, opening)] = [
            (at, event) for at, event in of_shard(sim, shard, "open") if at > position
        ]
        # I3: stored, then told, then acted upon; and nothing of it has come by a watch yet.
        assert moving.position < told_away < drained < serving.position < told_here < opened
        assert drain.at - away.at < AT_ONCE_S
        assert opening.at - here.at < AT_ONCE_S
        assert (opening.fields["inc"], opening.fields["epoch"]) == (new, 2)
    for id in wanted.values():
        assert await sim.ref(Clerk, id).options(timeout_s=1).ask(Clerk.note) == 2


@pytest.mark.scenario("SM-04")
@simulated(
    entities=[Clerk],
    nodes=3,
    seeds=6,
    settings=Settings(shards=12, heard_s=10.0),
    candidates=[0],
)
async def test_the_watch_alone_brings_assignments_when_the_leader_is_not_heard(sim: Sim) -> None:
    head, old, new = (incarnation(sim, node) for node in range(3))
    wanted = clerks_at(sim, 1)
    sim.block(0, 1)
    sim.block(0, 2)
    position = len(sim.history.events)
    for shard in wanted:
        await sim.wish(shard, 2)
    await sim.wait_until(
        lambda: all(sim.entry(shard).owner == new for shard in wanted) and sim.settled(),
        timeout_s=5,
    )
    deaf = [
        event
        for event in sim.history.events[position:]
        if event.kind == "taken" and event.fields["peer"] == head and event.fields["inc"] != head
    ]
    assert [event for event in deaf if event.fields["inc"] in (old, new)] == []
    for shard in wanted:
        assert steps(changes_of(sim, shard, position)) == [
            ("moving", old, 1),
            ("serving", new, 2),
        ]
        moving, serving = changes_of(sim, shard, position)
        [(_, drain)] = of_shard(sim, shard, "draining")
        [*_, (_, opening)] = of_shard(sim, shard, "open")
        assert 0 < drain.at - moving.at < AT_ONCE_S
        assert 0 < opening.at - serving.at < AT_ONCE_S
    for id in wanted.values():
        assert await sim.ref(Clerk, id).options(timeout_s=1).ask(Clerk.note) == 2


@pytest.mark.scenario("SM-04", partial=True)
@simulated(entities=[Clerk], nodes=3, seeds=5, settings=FEW)
async def test_what_nodes_have_cached_serves_without_the_store(sim: Sim) -> None:
    ids = clerks(sim)
    before = homes(sim)
    load = Load(sim, ids.values(), timeout_s=1.0)
    sim.store_outage()
    began_at, position = sim.world.now, len(sim.history.events)
    load.begin([0, 1, 2])
    await sim.advance(3.0)
    await load.end()
    assert load.failures == []
    assert load.slowest_s < AT_ONCE_S
    answered = [event for event in sim.history.events[position:] if event.kind == "outcome"]
    assert len(answered) == load.asked > 4 * len(ids) * 20
    assert all(event.at < began_at + 3.5 for event in answered)
    sim.store_back()
    await sim.advance(5.0)
    assert homes(sim) == before
    assert_nothing_lost(sim)


# SM-15: silent nodes


def silence(sim: Sim, nodes: list[int], towards: list[int]) -> None:
    """Nothing that these nodes say reaches those."""
    for node in nodes:
        for other in towards:
            sim.block(node, other)


class Placed:
    """When the shards of a node that died were placed and opened, counted from its end."""

    def __init__(self) -> None:
        self.placed_s: list[float] = []
        self.opened_s: list[float] = []
        self.by: list[Incarnation] = []


def placement(seed: int, *, quiet: bool, dies: str, wait_s: float) -> tuple[Placed, Placed]:
    """A node dies while two others are quiet, or are not: where its shards went, and when.

    The second part is about shards that then moved to a node that joined.
    """
    died, joined = Placed(), Placed()

    async def body(sim: Sim) -> None:
        [head] = [node for node in (0, 1) if node == acting(sim)]
        silent = [4, 5]
        if quiet:
            silence(sim, silent, [0, 1])
        await sim.advance(wait_s)
        victim = head if dies == "the leader" else 2
        me, orphans = incarnation(sim, victim), clerks_at(sim, victim)
        mute = [incarnation(sim, node) for node in silent]
        assert orphans
        position = len(sim.history.events)
        sim.crash(victim)
        await sim.wait_until(
            lambda: all(sim.entry(shard).owner != me for shard in orphans) and sim.settled()
        )
        gone, at = gone_at(sim, me)
        assert gone > position
        for shard in orphans:
            placed_at, opened_at, owner = served_at(sim, shard, position)
            died.placed_s.append(placed_at - at)
            died.opened_s.append(opened_at - at)
            died.by.append(owner)
        position = len(sim.history.events)
        newcomer = incarnation(sim, await joining(sim))
        await sim.wait_until(lambda: len(clerks_at(sim, 6)) >= 2, timeout_s=10)
        await sim.advance(5 * sim.settings.balance_interval_s)
        for change in stored(sim):
            if change.position > position and change.entry.state == "moving":
                assert change.entry.to == newcomer
                joined.by.append(change.entry.owner)
                joined.placed_s.append(change.at - registered_at(sim, newcomer)[1])
        if quiet and wait_s:
            for node in mute:
                assert node not in died.by, "a silent node was given a shard"
                assert node not in joined.by, "a silent node was asked to give one"
            assert all(node.incarnation for node in sim.nodes if node.up), "nobody was evicted"
        assert sim.settled()
        for id in clerks(sim).values():
            assert await sim.ref(Clerk, id).options(timeout_s=2).ask(Clerk.note) >= 1

    settings = Settings(shards=24, evict_after_s=60.0)
    run_simulation(
        Sim(seed, entities=[Clerk], nodes=6, settings=settings, candidates=[0, 1], locks=True), body
    )
    return died, joined


async def joining(sim: Sim) -> int:
    """One node more, once it is registered."""
    node = sim.add(candidate=False)
    await sim.wait_until(lambda: sim.nodes[node].incarnation is not None)
    return node


LISTEN_S = 0.5
"""How long a new leader gives nodes to be heard before it leaves the silent ones out."""


@pytest.mark.scenario("SM-15")
@pytest.mark.parametrize("dies", ["an owner", "the leader"])
@pytest.mark.parametrize("seed", range(4))
def test_silent_nodes_are_left_out_and_delay_nobody(seed: int, dies: str) -> None:
    ping_timeout_s = Settings().heard_s
    wait_s = 1.5 * ping_timeout_s
    usual, balanced = placement(seed, quiet=False, dies=dies, wait_s=wait_s)
    placed, moved = placement(seed, quiet=True, dies=dies, wait_s=wait_s)
    assert len(placed.placed_s) == len(usual.placed_s) == 4
    extra_s = AT_ONCE_S if dies == "an owner" else LISTEN_S + AT_ONCE_S
    assert max(placed.placed_s) <= max(usual.placed_s) + extra_s
    assert max(placed.opened_s) <= max(usual.opened_s) + extra_s
    assert len(moved.placed_s) >= 2
    assert moved.placed_s[0] <= balanced.placed_s[0] + ping_timeout_s


@pytest.mark.scenario("SM-15")
@pytest.mark.parametrize("seed", range(4))
def test_nodes_that_fell_silent_a_moment_ago_delay_a_round_by_the_ping_timeout_at_most(
    seed: int,
) -> None:
    usual, _ = placement(seed, quiet=False, dies="an owner", wait_s=0.0)
    placed, _ = placement(seed, quiet=True, dies="an owner", wait_s=0.0)
    assert max(placed.opened_s) <= max(usual.opened_s) + Settings().heard_s


# SM-17: a node that hangs


@pytest.mark.scenario("SM-17")
@simulated(
    entities=[Clerk], nodes=5, seeds=6, settings=Settings(shards=20), candidates=[0], locks=True
)
async def test_a_node_that_hangs_while_it_is_assigned_delays_nobody_else(sim: Sim) -> None:
    hung = incarnation(sim, 4)
    orphans = clerks_at(sim, 1)
    sim.freeze(4)
    position = len(sim.history.events)
    me = incarnation(sim, 1)
    sim.crash(1)
    await sim.advance(3.0)
    _, at = gone_at(sim, me)
    given: list[ShardKey] = []
    for shard in orphans:
        change = changes_of(sim, shard, position)[0]
        assert (change.entry.state, change.entry.epoch) == ("serving", 2)
        assert change.at - at < AT_ONCE_S, "all were assigned at once, the hung node or not"
        if change.entry.owner == hung:
            given.append(shard)
        else:
            _, opened_at, _ = served_at(sim, shard, position)
            assert opened_at - at < AT_ONCE_S
            assert await sim.ref(Clerk, orphans[shard]).options(timeout_s=1).ask(Clerk.note) == 2
    assert given, "the hung node got its share"
    asks = [
        asyncio.ensure_future(sim.ref(Clerk, orphans[shard]).options(timeout_s=5).ask(Clerk.note))
        for shard in given
    ]
    sim.thaw(4)
    assert [await ask for ask in asks] == [2] * len(given)
    assert sim.nodes[4].incarnation == hung, "it hung for less than its lease"
    for shard in orphans:
        assert len(changes_of(sim, shard, position)) == 1


@pytest.mark.scenario("SM-17")
@simulated(entities=[Clerk], nodes=4, seeds=6, settings=FEW, candidates=[0])
async def test_a_node_that_hangs_instead_of_releasing_delays_nobody_else(sim: Sim) -> None:
    hung, other = incarnation(sim, 2), incarnation(sim, 1)
    stuck, free = clerks_at(sim, 2), clerks_at(sim, 1)
    sim.freeze(2)
    position, began_at = len(sim.history.events), sim.world.now
    await sim.drain(2)
    await sim.drain(1)
    await sim.wait_until(lambda: loads(sim)[1] == 0, timeout_s=2)
    for shard in free:
        moving, serving = changes_of(sim, shard, position)
        assert steps([moving]) == [("moving", other, 1)]
        assert (serving.entry.state, serving.entry.epoch) == ("serving", 2)
        assert serving.at - began_at < 2 * AT_ONCE_S
        assert await sim.ref(Clerk, free[shard]).options(timeout_s=1).ask(Clerk.note) == 2
    await sim.advance(3.0 - (sim.world.now - began_at))
    for shard in stuck:
        assert steps(changes_of(sim, shard, position)) == [("moving", hung, 1)]
    sim.thaw(2)
    thawed_at = sim.world.now
    await sim.wait_until(lambda: loads(sim)[2] == 0 and sim.settled(), timeout_s=5)
    for shard in stuck:
        [_, serving] = changes_of(sim, shard, position)
        assert serving.entry.epoch == 2
        assert serving.at - thawed_at < AT_ONCE_S
    assert sim.nodes[2].incarnation == hung
    assert_one_owner_per_epoch(sim)


# RG-11, RG-16: what a role allows


class Paper(Entity, name="paper", role="office"):
    """Lives in a role of its own."""

    @handler
    async def read(self) -> int:
        return self.epoch


def owners(sim: Sim, role: str) -> list[Incarnation]:
    """Everybody who ever was home to a shard of a role, or was meant to be."""
    named = [
        name
        for change in stored(sim)
        if change.shard.role == role
        for name in (change.entry.owner, change.entry.to)
        if name
    ]
    return sorted(dict.fromkeys(named))


@pytest.mark.scenario("RG-11")
@simulated(
    entities=[Clerk, Paper],
    nodes=4,
    homes={0: [Clerk], 2: [Paper], 3: [Clerk]},
    seeds=5,
    settings=Settings(shards=12, coordinator_role="office"),
)
async def test_only_nodes_of_the_coordinators_role_lead(sim: Sim) -> None:
    ages = {node.index: registered_at(sim, incarnation(sim, node.index))[0] for node in sim.nodes}
    first = acting(sim)
    assert first == min((1, 2), key=lambda node: ages[node]), "the oldest of the office"
    sim.crash(first)
    await sim.wait_until(lambda: leader(sim) not in (None, first), timeout_s=15)
    second = acting(sim)
    assert second == 3 - first
    await sim.wait_until(sim.settled, timeout_s=10)
    sim.crash(second)
    await sim.advance(3 * sim.settings.ttl_s)
    assert leader(sim) is None, "the others are candidates, but of no office"
    known = clerks_at(sim, 0, 3)
    for id in known.values():
        assert await sim.ref(Clerk, id).options(timeout_s=1).ask(Clerk.note) >= 1
    sim.start(second)
    await sim.wait_until(lambda: leader(sim) == second and sim.settled(), timeout_s=15)
    led = [event.fields["inc"] for event in sim.history.of("leading")]
    assert len(led) == len(dict.fromkeys(led)) == 3


@pytest.mark.scenario("RG-16")
@pytest.mark.parametrize("seed", range(5))
def test_clients_and_nodes_without_the_role_route_but_never_host(seed: int) -> None:
    homes: dict[int, list[type[Entity]]] = {0: [Clerk], 1: [Clerk], 2: [Paper], 3: []}
    sim = Sim(seed, entities=[Clerk, Paper], nodes=4, homes=homes, settings=FEW)
    listeners: list[str] = []
    listen = sim.network.listen

    def spied(loop: SimLoop, host: str, accept: Callable[[], ConnectionHandler]) -> str:
        listeners.append(host)
        return listen(loop, host, accept)

    sim.network.listen = spied  # type: ignore[method-assign]

    async def body(sim: Sim) -> None:
        one, other, office, _ = (incarnation(sim, node) for node in range(4))

        async def talk(source: Client) -> None:
            for id in clerks(sim).values():
                await source.ref(Clerk, id).tell(Clerk.note)
                assert await source.ref(Clerk, id).ask(Clerk.note) >= 1
            assert await source.ref(Paper, "p").ask(Paper.read) == 1

        await talk(sim)
        for node in (2, 3):
            await inside(sim, node, talk)
        senders = dict.fromkeys(event.fields["inc"] for event in sim.history.of("submit"))
        assert len(senders) == 3
        assert_nothing_lost(sim)
        # Whatever happens to the nodes of the role, the others are given nothing of it.
        await sim.drain(0)
        await sim.wait_until(lambda: loads(sim)[0] == 0 and sim.settled())
        await sim.stop(0)
        sim.crash(1)
        await sim.advance(2 * sim.settings.ttl_s)
        ask = asyncio.ensure_future(inside(sim, 2, talk))
        await sim.advance(3.0)
        assert not ask.done(), "there is no home, and nobody here becomes one"
        sim.start(1)
        await sim.wait_until(sim.settled, timeout_s=15)
        await ask
        again = incarnation(sim, 1)
        assert owners(sim, ROLE) == sorted((one, other, again))
        assert owners(sim, "office") == [office]
        assert sorted(listeners) == ["node-0", "node-1", "node-1", "node-2", "node-3"]

    run_simulation(sim, body)


@pytest.mark.scenario("RG-16", partial=True)
def test_a_connected_client_opens_no_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[str] = []
    listen = TcpTransport.listen

    async def spied(self: TcpTransport, accept: Callable[[], ConnectionHandler]) -> str:
        ports.append(await listen(self, accept))
        return ports[-1]

    async def talk() -> None:
        store, settings = f"sqlite:///{tmp_path}/store.db", Settings(shards=4)
        async with Node(store, entities=[Clerk], settings=settings) as node:
            assert len(ports) == 1
            async with connect(store, settings=settings) as client:
                assert await client.ref(Clerk, "c").ask(Clerk.note) == 1
                assert await node.ref(Clerk, "c").ask(Clerk.note) == 1

    monkeypatch.setattr(TcpTransport, "listen", spied)
    asyncio.run(talk())
    assert len(ports) == 1


# RG-17: not before enough nodes are there


@pytest.mark.scenario("RG-17")
@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_allocated_before_the_wanted_number_of_nodes_is_there(seed: int) -> None:
    async def body(sim: Sim, ready: Awaitable[Sim]) -> None:
        await sim.advance(15.0)
        assert leader(sim) == 0
        assert stored(sim) == []
        await joining(sim)
        await sim.advance(15.0)
        assert stored(sim) == [], "two are not three"
        ask = asyncio.ensure_future(sim.ref(Clerk, "c").options(timeout_s=60).ask(Clerk.note))
        await sim.advance(1.0)
        third = incarnation(sim, await joining(sim))
        await ready
        _, at = registered_at(sim, third)
        given = stored(sim)
        assert sorted(change.shard for change in given) == shards(sim)
        assert all(change.at - at < AT_ONCE_S for change in given), "then at once"
        assert sorted(loads(sim).values()) == [4, 4, 4]
        assert await ask == 1
        # It is about the first allocation: afterwards fewer nodes take over what others leave.
        sim.crash(1)
        sim.crash(2)
        await sim.wait_until(lambda: loads(sim) == {0: 12} and sim.settled(), timeout_s=20)
        for id in clerks(sim).values():
            assert await sim.ref(Clerk, id).options(timeout_s=1).ask(Clerk.note) >= 1

    settings = Settings(shards=12, min_nodes=3)
    from_the_start(Sim(seed, entities=[Clerk], nodes=1, settings=settings), body)


@pytest.mark.scenario("RG-17", partial=True)
@pytest.mark.parametrize("seed", range(3))
def test_nodes_of_other_roles_do_not_count_towards_the_wanted_number(seed: int) -> None:
    async def body(sim: Sim, ready: Awaitable[Sim]) -> None:
        del ready
        await sim.advance(15.0)
        assert {change.shard.role for change in stored(sim)} == {"office"}

    homes: dict[int, list[type[Entity]]] = {0: [Clerk], 2: [Paper], 3: [Paper]}
    settings = Settings(shards=12, min_nodes=3)
    sim = Sim(seed, entities=[Clerk, Paper], nodes=4, homes=homes, settings=settings)
    from_the_start(sim, body)
