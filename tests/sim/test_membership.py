"""Who counts as gone, and what goes on meanwhile: silent nodes under `fencing = "health"` (SM-08,
I7), node ids that change their role (SM-28), and entities that fail to start (RG-26).
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from domicile import ConfigError, Entity, Node, NotExecuted, Settings, handler
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.lease.death_probes import removal
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.keys import dead_key, node_key
from domicile.core.state.shardmap import Entry
from domicile.testing import Sim, simulated

ROLE = "default"
HEALTH = Settings(shards=12, fencing="health", idle_s=86_400.0)
LONG_S = 120.0
"""Twenty leases."""


class Till(Entity, name="till"):
    """Counts in memory, so a new home would be noticed."""

    def __init__(self) -> None:
        self.total = 0

    @handler
    async def add(self, amount: int) -> int:
        self.total += amount
        return self.total


IDS = [f"t{number}" for number in range(24)]


def everything(sim: Sim) -> dict[int, Entry]:
    """Owner, epoch and state of every shard."""
    return {number: sim.entry(ShardKey(ROLE, number)) for number in range(HEALTH.shards)}


def at(sim: Sim, node: int) -> list[str]:
    """Tills whose home is a node."""
    return [id for id in IDS if sim.owner(Till, id) == node]


def mine(sim: Sim, node: int) -> Incarnation:
    found = sim.nodes[node].incarnation
    assert found is not None
    return found


async def fill(sim: Sim) -> None:
    """Every till holds one."""
    for id in IDS:
        assert await sim.ref(Till, id).ask(Till.add, 1) == 1


def leader(sim: Sim) -> int:
    [found] = [n.index for n in sim.nodes if n.node and n.node.life and n.node.life.control.leading]
    return found


# SM-08


@pytest.mark.scenario("SM-08", partial=True)
@simulated(entities=[Till], nodes=3, seeds=4, settings=HEALTH, locks=True)
async def test_a_reported_node_that_lives_keeps_everything_however_long_it_is_silent(
    sim: Sim,
) -> None:
    await fill(sim)
    node = next(one for one in range(3) if one != leader(sim))
    before, old = everything(sim), mine(sim, node)
    silent, [other, *_] = at(sim, node), at(sim, (node + 1) % 3)
    sim.freeze(node)
    asks = [
        asyncio.ensure_future(sim.ref(Till, id).options(timeout_s=10.0).ask(Till.add, 100))
        for id in silent
    ]
    await asyncio.gather(*asks, return_exceptions=True)
    await sim.advance(LONG_S)
    assert sim.history.counts["node.suspected"] > 0, "nobody reported it"
    assert everything(sim) == before
    assert await sim.ref(Till, other).ask(Till.add, 1) == 2, "the others work on"

    sim.thaw(node)
    await sim.wait_until(sim.settled)
    assert mine(sim, node) == old
    assert everything(sim) == before
    for id in silent:
        # What nobody could vouch for ran at most once; what was there before is still there.
        assert await sim.ref(Till, id).ask(Till.add, 1) in (2, 102)
    assert not list(sim.history.of("fenced"))


@pytest.mark.scenario("SM-08", partial=True)
@simulated(entities=[Till], nodes=3, seeds=4, settings=HEALTH, locks=True)
async def test_a_node_that_is_dead_is_unregistered_and_its_shards_placed_at_once(sim: Sim) -> None:
    await fill(sim)
    for step in (0, 1):
        node = (leader(sim) + step) % 3
        dead, lost = mine(sim, node), at(sim, node)
        sim.crash(node)
        await sim.wait_until(sim.settled, timeout_s=2.0)
        asks = [sim.ref(Till, id).ask(Till.add, 1) for id in lost]
        assert await asyncio.gather(*asks) == [1] * len(lost), "a new home begins anew"
        assert sim.servers.store.peek(node_key(dead)) is None
        assert sim.servers.store.peek(dead_key(dead)) is not None
        sim.start(node)
        await sim.wait_until(lambda: sim.settled() and all(at(sim, one) for one in range(3)))


@pytest.mark.scenario("SM-08", partial=True)
@simulated(entities=[Till], nodes=3, seeds=4, settings=HEALTH, locks=True)
async def test_a_death_during_a_silence_is_noticed_without_any_lease(sim: Sim) -> None:
    """Frozen first, so that nothing but the proof tells the dead from the silent."""
    node = next(one for one in range(3) if one != leader(sim))
    before = everything(sim)
    sim.freeze(node)
    await sim.advance(LONG_S)
    assert everything(sim) == before
    sim.crash(node)
    await sim.wait_until(sim.settled, timeout_s=5.0)


@simulated(entities=[Till], nodes=3, seeds=4, settings=HEALTH, locks=True)
async def test_what_waits_for_a_silent_node_runs_when_it_goes_on(sim: Sim) -> None:
    await fill(sim)
    node = sim.owner(Till, "t0")
    sim.freeze(node)
    # Until its link is given up, nobody can say what became of the first.
    await asyncio.gather(sim.ref(Till, "t0").ask(Till.add, 100), return_exceptions=True)
    late = [
        asyncio.ensure_future(sim.ref(Till, "t0").options(timeout_s=2 * LONG_S).ask(Till.add, 1))
        for _ in range(20)
    ]
    await sim.advance(LONG_S)
    assert not any(ask.done() for ask in late)
    sim.thaw(node)
    totals = await asyncio.gather(*late)
    assert totals == list(range(totals[0], totals[0] + 20)), "each once, and in order"
    assert totals[0] in (2, 102)


@pytest.mark.scenario("SM-08", partial=True)
@simulated(entities=[Till], nodes=3, seeds=4, settings=HEALTH, locks=True)
async def test_a_node_that_nobody_reaches_keeps_everything_too(sim: Sim) -> None:
    """C6 is for leases: who has none would not stop if it did not hear of its eviction."""
    await fill(sim)
    node = next(one for one in range(3) if one != leader(sim))
    before, [id, *_] = everything(sim), at(sim, node)
    sim.partition([node], [one for one in range(3) if one != node])
    await sim.advance(LONG_S)
    assert sim.history.counts["node.suspected"] > 0
    assert everything(sim) == before
    assert await sim.ref(Till, id).ask(Till.add, 1) == 2, "it serves whoever reaches it"
    sim.heal()
    await sim.advance(10.0)
    assert everything(sim) == before


@simulated(entities=[Till], nodes=3, seeds=4, settings=HEALTH, locks=True)
async def test_a_death_that_nothing_proves_waits_for_an_operator(sim: Sim) -> None:
    node = next(one for one in range(3) if one != leader(sim))
    dead, before = mine(sim, node), everything(sim)
    sim.nodes[node].node.life._backends.health.let_go(dead)  # type: ignore[union-attr]
    sim.crash(node)
    await sim.advance(LONG_S)
    assert everything(sim) == before
    members = ClusterView()
    store = sim._operator_store()
    members.load(await store.list(b""))
    await store.grant("evidence", 60.0)
    await store.commit(*removal(members, dead, "its machine burnt", "evidence"))
    await sim.wait_until(sim.settled, timeout_s=5.0)


# I7


def cut_all(sim: Sim) -> None:
    """The store is away, for everybody."""
    for node in sim.nodes:
        if node.up:
            sim.cut_store(node.index)
    sim.store.cut = True


async def outage(sim: Sim, gone: int | None) -> None:
    """Ten minutes without a store, and perhaps without a coordinator."""
    await fill(sim)
    before, lives = everything(sim), [mine(sim, node) for node in range(3)]
    known = [id for id in IDS if sim.owner(Till, id) != gone]
    cut_all(sim)
    if gone is not None:
        sim.crash(gone)
    for minute in range(10):
        await sim.advance(60.0)
        for id in known:
            assert await sim.ref(Till, id).ask(Till.add, 1) == minute + 2
    assert everything(sim) == before
    sim.heal()
    await sim.wait_until(sim.settled)
    await sim.advance(10.0)
    for node in range(3):
        if node != gone:
            assert mine(sim, node) == lives[node], "nobody had to begin anew"
    for id in IDS:
        assert await sim.ref(Till, id).ask(Till.add, 1) == (12 if id in known else 1)


@simulated(entities=[Till], nodes=3, seeds=3, settings=HEALTH, locks=True)
async def test_with_the_store_away_messages_flow_on(sim: Sim) -> None:
    await outage(sim, None)


@simulated(entities=[Till], nodes=3, seeds=3, settings=HEALTH, locks=True)
async def test_with_the_store_and_the_coordinator_away_known_shards_flow_on(sim: Sim) -> None:
    await outage(sim, leader(sim))


@simulated(entities=[Till], nodes=3, seeds=3, settings=HEALTH, locks=True)
async def test_who_leaves_while_the_store_is_away_holds_nothing_back(sim: Sim) -> None:
    """Its record stays behind, and so does the proof that it is over."""
    node = next(one for one in range(3) if one != leader(sim))
    left = mine(sim, node)
    cut_all(sim)
    await sim.stop(node)
    assert sim.servers.store.peek(node_key(left)) is not None
    sim.heal()
    await sim.wait_until(sim.settled)
    assert sim.servers.store.peek(node_key(left)) is None


@simulated(entities=[Till], nodes=3, seeds=3, settings=HEALTH, locks=True)
async def test_who_leaves_removes_its_record(sim: Sim) -> None:
    left = mine(sim, 1)
    await sim.stop(1)
    assert sim.servers.store.peek(node_key(left)) is None
    await sim.wait_until(sim.settled)


# SM-28: one node id, other roles


class Parcel(Entity, name="parcel", role="parcels"):
    @handler
    async def weigh(self) -> int:
        return 1


@pytest.mark.scenario("SM-28", partial=True)
def test_a_running_node_s_id_can_not_be_registered_under_another_role() -> None:
    store, settings = "memory://one-id-two-roles", Settings(shards=4, settle_s=0.01)

    def node(*entities: type[Entity], id: str = "n1") -> Node:
        return Node(store, entities=entities, settings=settings, node_id=id)

    async def scenario() -> None:
        async with node(Till) as first:
            with pytest.raises(ConfigError, match=r"'n1' is registered with role 'default' at"):
                async with node(Parcel):
                    pass
            with pytest.raises(ConfigError, match=r"this process has roles 'default', 'parcels'"):
                async with node(Till, Parcel):
                    pass
            async with node(Parcel, id="n2") as second:
                assert await second.ref(Parcel, "p").ask(Parcel.weigh) == 1
            async with node(Till):
                pass
            assert await first.ref(Till, "t").ask(Till.add, 1) == 1
        async with node(Parcel) as again:
            assert await again.ref(Parcel, "p").ask(Parcel.weigh) == 1

    asyncio.run(scenario())


# RG-26


class Engine(Entity, name="engine"):
    """Fails to start until somebody mends it."""

    broken: ClassVar[bool] = True
    takes_s: ClassVar[float] = 0.0
    starts: ClassVar[list[str]] = []

    async def on_start(self) -> None:
        Engine.starts.append(self.id)
        if Engine.takes_s:
            await asyncio.sleep(Engine.takes_s)
        if Engine.broken and self.id.startswith("bad"):
            raise RuntimeError("no fuel")

    @handler
    async def run(self) -> str:
        return self.id

    @handler(shared=True)
    async def look(self) -> str:
        return self.id


@pytest.fixture
def engines() -> type[Engine]:
    Engine.broken, Engine.takes_s, Engine.starts = True, 0.0, []
    return Engine


async def outcome(ask: Any) -> str:
    try:
        return str(await ask)
    except NotExecuted as error:
        return "not executed" if "failed to start" in str(error) else str(error)


@pytest.mark.scenario("RG-26")
@simulated(entities=[Engine], nodes=2, seeds=2, settings=Settings(shards=4))
async def test_a_start_that_fails_is_tried_less_and_less_often_and_recovers(
    sim: Sim, engines: type[Engine]
) -> None:
    engines.broken, engines.starts = True, []
    began = sim.world.now
    asks = 0
    while sim.world.now - began < 60.0:
        assert await outcome(sim.ref(Engine, "bad").ask(Engine.run)) == "not executed"
        assert await outcome(sim.ref(Engine, "good").ask(Engine.run)) == "good"
        asks += 1
        await sim.advance(0.05)
    assert asks > 1_000
    # After 0.1 s, then twice as long each time, at most 10 s: 0.1 + 0.2 + ... + 6.4 + 4 x 10.
    assert 10 <= engines.starts.count("bad") <= 13
    assert engines.starts.count("good") == 1
    engines.broken = False
    await sim.advance(11.0)
    assert await outcome(sim.ref(Engine, "bad").ask(Engine.run)) == "bad"
    assert await outcome(sim.ref(Engine, "bad").ask(Engine.look)) == "bad"


@pytest.mark.scenario("RG-26")
@simulated(entities=[Engine], nodes=2, seeds=2, settings=Settings(shards=4))
async def test_many_messages_share_one_failing_start(sim: Sim, engines: type[Engine]) -> None:
    engines.broken, engines.takes_s, engines.starts = True, 0.5, []
    for method in (Engine.look, Engine.run):
        before = len(engines.starts)
        asks = [outcome(sim.ref(Engine, "bad").ask(method)) for _ in range(200)]
        assert await asyncio.gather(*asks) == ["not executed"] * 200
        # Those in line behind the one that failed come within the pause that follows.
        assert len(engines.starts) == before + 1
        await sim.advance(10.0)
    engines.broken = False
    assert await outcome(sim.ref(Engine, "bad").ask(Engine.run)) == "bad"
    assert len(engines.starts) == 3
