"""Nodes that leave or are drained in several stages, where handlers, strategies or coordinators
make it hard: all entities are stopped, nothing counts as a death, nobody waits for a round (H14).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from rounds_lab import acting

from domicile import Entity, MaybeExecuted, Settings, handler
from domicile.core.coordinator.departures import STAGE
from domicile.core.handoff.tables import Phase
from domicile.core.ids import ShardKey
from domicile.core.placement.strategies import Situation
from domicile.core.state.shardmap import Entry
from domicile.core.wire import Flush, Request
from domicile.entity.hosting.shard_host import ShardHost
from domicile.testing import Sim, simulated

ROLE = "default"
SHARDS = 5 * STAGE
"""Several stages for each of two nodes."""


class Clerk(Entity, name="clerk"):
    """Works for as long as it is told, and puts its things away in the end."""

    @handler
    async def work(self, seconds: float) -> None:
        """Slowly."""
        await asyncio.sleep(seconds)

    async def on_stop(self) -> None:
        """Takes a while, too."""
        await asyncio.sleep(0.3)


class Reader(Entity, name="reader"):
    """Has to find its place first."""

    async def on_start(self) -> None:
        """Takes a while."""
        await asyncio.sleep(0.3)

    @handler
    async def read(self) -> None:
        """At once."""


def entries(sim: Sim) -> list[Entry]:
    return [sim.entry(ShardKey(ROLE, number)) for number in range(sim.settings.shards)]


def one_each(sim: Sim, node: int) -> list[str]:
    """A clerk in each shard of a node."""
    had = sum(entry.owner == sim.nodes[node].incarnation for entry in entries(sim))
    found: dict[ShardKey, str] = {}
    number = 0
    while len(found) < had:
        id = f"c{number}"
        number += 1
        if sim.owner(Clerk, id) == node:
            found.setdefault(sim.shard(Clerk, id), id)
    return list(found.values())


@simulated(entities=[Clerk], nodes=2, seeds=1, settings=Settings(shards=SHARDS))
async def test_whoever_outlasts_the_deadline_is_cancelled_and_stopped_in_the_last_stage_too(
    sim: Sim,
) -> None:
    """H10: once the last stages had their deadlines behind the end of their node, so that shards
    were lost with it. That is a death in the eyes of the coordinator, three of which make a
    quarantine."""
    await sim.wait_until(sim.settled)
    ids = one_each(sim, 1)
    assert len(ids) > 2 * STAGE
    asks = [
        asyncio.ensure_future(sim.ref(Clerk, id).options(timeout_s=60).ask(Clerk.work, 30.0))
        for id in ids
    ]
    await sim.advance(0.5)
    await sim.stop(1)
    found = await asyncio.gather(*asks, return_exceptions=True)
    assert all(isinstance(one, MaybeExecuted) and "drain deadline" in str(one) for one in found)
    assert len(list(sim.history.of("stopped"))) == len(ids)
    await sim.wait_until(sim.settled)
    assert not any(entry.deaths for entry in entries(sim))


@simulated(entities=[Clerk], nodes=2, seeds=2, settings=Settings(shards=SHARDS), candidates=[0])
async def test_if_all_leave_nobody_waits_for_a_coordinator_that_left_first(sim: Sim) -> None:
    """Whoever has no next home need not be paced; who could tell it later is gone by then."""
    await sim.wait_until(sim.settled)
    ids = one_each(sim, 1)
    for id in ids:
        await sim.ref(Clerk, id).ask(Clerk.work, 0.0)
    began = sim.loop.time()
    await asyncio.gather(sim.stop(0), sim.stop(1))
    assert len(list(sim.history.of("stopped"))) == len(ids)
    ended = [event.at for event in sim.history.of("ended")]
    assert ended[-1] - began < sim.settings.drain_deadline_s


def in_turn(situation: Situation) -> dict[int, str]:
    """A user's own idea of where shards belong."""
    seats = [seat.node for seat in situation.seats]
    return {number: seats[number % len(seats)] for number in range(len(situation.homes))}


@simulated(
    entities=[Clerk], nodes=2, seeds=2, strategy=in_turn,
    settings=Settings(shards=SHARDS, balance_interval_s=60.0),
)  # fmt: skip
async def test_a_strategy_of_ones_own_is_asked_for_every_stage_of_a_drain(sim: Sim) -> None:
    """Not only once per round of balancing, which may be a minute away."""
    await sim.wait_until(sim.settled)
    drained = sim.nodes[1].incarnation
    assert sum(entry.owner == drained for entry in entries(sim)) > 2 * STAGE
    began = sim.loop.time()
    await sim.drain(1)
    await sim.wait_until(lambda: all(entry.owner != drained for entry in entries(sim)))
    assert sim.loop.time() - began < 5.0


@simulated(entities=[Reader], nodes=3, seeds=5, settings=Settings(shards=12))
async def test_who_is_starting_when_its_shard_moves_has_left_its_mailbox(sim: Sim) -> None:
    """The checkers agree: it was not to go back (H9)."""
    await sim.wait_until(sim.settled)
    id = next(f"r{number}" for number in range(100) if sim.owner(Reader, f"r{number}") == 1)
    asked = asyncio.ensure_future(sim.ref(Reader, id).ask(Reader.read))
    await sim.advance(0.1)
    await sim.drain(1)
    await asked
    await sim.wait_until(sim.settled)
    kinds = [event.kind for event in sim.history.events if event.fields.get("id") == id]
    assert kinds.index("waking") < kinds.index("start")


@simulated(entities=[Clerk], nodes=3, seeds=1, settings=Settings(shards=12))
async def test_a_flush_that_takes_back_the_last_mail_ends_the_drain(
    sim: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finishing message waits in a busy turn, so the cut keeps it; then its sender wants it back
    and is never heard of again."""
    await sim.wait_until(sim.settled)
    id = one_each(sim, 1)[0]
    await sim.ref(Clerk, id).ask(Clerk.work, 0.0)
    shard, life, client = sim.shard(Clerk, id), sim.node(1).life, sim.client_life
    assert life is not None
    assert client is not None
    host, see = life.runtime.hosts[shard], ShardHost.see
    source = next(one for one in life.dispatch.incoming if one.sender == client.me)
    taken_back = asyncio.Event()

    def cut_in_a_busy_turn(self: ShardHost, entry: Entry) -> None:
        cut = self is host and entry.state == "moving" and self.owner.phase is Phase.OPEN
        if cut:
            mail = Request(
                *shard, 1_000_000, self.owner.epoch, self.owner.entry.change, "clerk", id, "work",
                b"\x91\x00", True, True, 5.0,
            )  # fmt: skip
            self._request(source, mail, life.runtime.clock.now())
        see(self, entry)
        if cut:
            assert self.owner.mailboxes, "it was kept"
            self.flush(source, Flush(*shard, 7))
            taken_back.set()

    monkeypatch.setattr(ShardHost, "see", cut_in_a_busy_turn)
    began = sim.loop.time()
    await sim.drain(1)
    await sim.wait_until(lambda: sim.entry(shard).owner != life.me)
    assert taken_back.is_set()
    assert sim.loop.time() - began < 1.0


async def stop_all(sim: Sim, order: Sequence[int], gap_s: float = 0.005) -> float:
    """These are asked to leave, one after the other; how long it took."""

    async def stop(place: int, node: int) -> None:
        await asyncio.sleep(gap_s * place)
        await sim.stop(node)

    began = sim.loop.time()
    await asyncio.gather(*[stop(place, node) for place, node in enumerate(order)])
    return sim.loop.time() - began


async def visited(sim: Sim) -> int:
    """Some clerks live; how many."""
    await sim.wait_until(sim.settled)
    for number in range(20):
        await sim.ref(Clerk, f"c{number}").ask(Clerk.work, 0.0)
    return 20


@pytest.mark.parametrize("gap_s", [0.005, 0.1])
@pytest.mark.parametrize("order", [(2, 0, 1), (0, 2, 1), (0, 1, 2)])
def test_a_manager_that_is_stopped_with_all_nodes_sees_them_off(
    order: tuple[int, ...], gap_s: float
) -> None:
    """Once it went at once: nodes waited for their deadline, and no entity was stopped."""

    @simulated(entities=[Clerk], nodes=2, managers=1, seeds=5, settings=Settings(shards=12))
    async def play(sim: Sim) -> None:
        clerks = await visited(sim)
        assert await stop_all(sim, order, gap_s) < 3.0
        assert len(list(sim.history.of("stopped"))) == clerks

    play()


@pytest.mark.parametrize("gap_s", [0.005, 0.015, 0.02, 0.1])
@pytest.mark.parametrize("order", [(2, 3, 0, 1), (3, 2, 0, 1), (0, 1, 3, 2)])
def test_one_of_two_managers_that_are_stopped_with_all_nodes_sees_them_off(
    order: tuple[int, ...], gap_s: float
) -> None:
    @simulated(entities=[Clerk], nodes=2, managers=2, seeds=5, settings=Settings(shards=12))
    async def play(sim: Sim) -> None:
        clerks = await visited(sim)
        assert await stop_all(sim, order, gap_s) < 3.0
        assert len(list(sim.history.of("stopped"))) == clerks

    play()


@simulated(entities=[Clerk], nodes=2, managers=1, seeds=5, settings=Settings(shards=12))
async def test_a_manager_waits_for_nobody_who_stays(sim: Sim) -> None:
    await visited(sim)
    assert await stop_all(sim, [2]) < 1.0


@simulated(entities=[Clerk], nodes=2, managers=2, seeds=5, settings=Settings(shards=12))
async def test_a_manager_leaves_those_who_leave_to_one_that_stays(sim: Sim) -> None:
    clerks = await visited(sim)
    leader = acting(sim)
    began = sim.loop.time()
    leaving = [asyncio.ensure_future(sim.stop(node)) for node in (0, 1)]
    await sim.stop(leader)
    assert sim.loop.time() - began < 0.25, "before the clerks have put their things away"
    await asyncio.gather(*leaving)
    assert len(list(sim.history.of("stopped"))) == clerks


@simulated(entities=[Clerk], nodes=2, managers=1, seeds=3, settings=Settings(shards=12))
async def test_a_manager_does_not_wait_for_those_who_have_let_go(sim: Sim) -> None:
    """They may linger for a client that does not answer them."""
    await visited(sim)
    sim.block(-1, 0)
    lingers = asyncio.ensure_future(sim.stop(0))
    await stop_all(sim, [1, 2])
    assert not lingers.done()
    await lingers


class Boss(Entity, name="boss", role="office"):
    """Lives where the coordinator does."""

    @handler
    async def work(self) -> None:
        """At once."""


@simulated(
    entities=[Boss, Clerk], nodes=3, seeds=3, homes={0: [Boss], 1: [Clerk], 2: [Clerk]},
    settings=Settings(shards=12, coordinator_role="office"),
)  # fmt: skip
async def test_who_leads_alone_does_not_wait_for_its_own_shards(sim: Sim) -> None:
    """Nobody else can have them, so that they go to nobody."""
    await sim.wait_until(sim.settled)
    await sim.ref(Boss, "b").ask(Boss.work)
    assert await stop_all(sim, [0]) < 1.5


class Plain(Entity, name="plain"):
    """Has nothing to put away."""

    @handler
    async def work(self) -> None:
        """At once."""


@simulated(
    entities=[Plain], nodes=6, seeds=3, settings=Settings(shards=20 * STAGE, drain_deadline_s=0.5)
)
async def test_on_a_slow_store_nobody_goes_before_its_last_stage(sim: Sim) -> None:
    """At the deadline nothing may be draining while much waits for its stage (H14)."""
    await sim.wait_until(sim.settled)
    for node in sim.nodes:
        node.store.delay_s = (0.045, 0.05)
    await sim.advance(1.0)
    await asyncio.gather(*[sim.stop(node) for node in (3, 4, 5)])
    await sim.wait_until(sim.settled)
    assert not any(entry.deaths for entry in entries(sim))


@simulated(entities=[Plain], nodes=3, seeds=20, settings=Settings(shards=6 * STAGE))
async def test_a_coordinator_that_leaves_sees_its_own_last_shards_off(sim: Sim) -> None:
    """It once resigned when they were released, before the store named their next homes: for the
    next coordinator, who had not heard of that, their home had died."""
    await sim.wait_until(sim.settled)
    for node in sim.nodes:
        node.store.delay_s = (0.02, 0.06)
    await sim.stop(acting(sim))
    await sim.wait_until(sim.settled)
    assert not any(entry.deaths for entry in entries(sim))


def test_a_function_of_ones_own_is_asked_once_for_a_whole_drain() -> None:
    """It may be slow, and answers for all stages."""
    asked: list[Situation] = []

    async def slow(situation: Situation) -> dict[int, str]:
        asked.append(situation)
        await asyncio.sleep(0.4)
        return {}

    @simulated(
        entities=[Plain], nodes=3, seeds=1, strategy=slow,
        settings=Settings(shards=20 * STAGE, balance_interval_s=1_000.0),
    )  # fmt: skip
    async def play(sim: Sim) -> None:
        await sim.wait_until(sim.settled)
        await sim.advance(2.0)
        before, drained = len(asked), sim.nodes[0].incarnation
        await sim.drain(0)
        await sim.wait_until(lambda: all(entry.owner != drained for entry in entries(sim)))
        assert len(asked) == before + 1

    play()


@pytest.mark.parametrize(("first", "gap_s"), [(1, 0.05), (0, 0.15), (1, 0.15), (1, 0.3)])
def test_a_cluster_that_is_stopped_and_started_again_and_again_quarantines_nothing(
    first: int, gap_s: float
) -> None:
    """What the first that left had was on its way to the second, which then left, too: once that
    was the death of the first to whoever came next."""

    @simulated(entities=[Clerk], nodes=2, seeds=2, settings=Settings(shards=12))
    async def play(sim: Sim) -> None:
        for _ in range(3):
            clerks, before = await visited(sim), len(list(sim.history.of("stopped")))
            await stop_all(sim, [first, 1 - first], gap_s)
            assert len(list(sim.history.of("stopped"))) == before + clerks
            for node in (0, 1):
                sim.start(node)
            await sim.wait_until(sim.settled)
        assert not any(entry.deaths for entry in entries(sim))

    play()


@simulated(entities=[Plain], nodes=4, seeds=15, settings=Settings(shards=12))
async def test_who_leaves_with_its_coordinator_waits_for_no_late_acknowledgement(sim: Sim) -> None:
    """The next coordinator dials those who leave, and must hurry with what they answer."""
    await sim.wait_until(sim.settled)
    await sim.advance(1.0)
    assert await stop_all(sim, [1, 2, 3], 0.0) < 0.5


@pytest.mark.parametrize("later_s", [0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3])
def test_what_is_on_its_way_to_a_node_that_leaves_comes_back(later_s: float) -> None:
    """Seed 1755 of rolling: whoever had just dialled was not told goodbye, so that what it sent
    behind its greeting was lost with the node."""

    @simulated(entities=[Plain], nodes=2, seeds=3, settings=Settings(shards=12))
    async def play(sim: Sim) -> None:
        await sim.wait_until(sim.settled)
        await sim.advance(1.0)
        sim.network.slow_way("client", "node-1", 0.09)
        sim.network.slow_way("node-1", "client", 0.09)
        ids = [id for id in (f"p{number}" for number in range(60)) if sim.owner(Plain, id) == 1]
        asks = [asyncio.ensure_future(sim.ref(Plain, id).ask(Plain.work)) for id in ids]
        await sim.advance(later_s)
        await sim.stop(1)
        assert await asyncio.gather(*asks) == [None] * len(ids)

    play()
