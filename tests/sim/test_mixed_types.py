"""Nodes of one role with different sets of entity types (DX-26): messages wait, their shards move.

`Room` is everywhere; `Annex` is the type that a rolling update adds or removes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from manager_lab import inside, moves, stored, traffic
from rounds_lab import leader

from domicile import Client, Entity, HandlerFailed, Node, Settings, Unavailable, handler
from domicile.core.ids import ShardKey
from domicile.core.state.keys import needs_key
from domicile.errors import DomicileError
from domicile.testing import Sim, simulated
from domicile.testing.sim.simulated import run_simulation

MANY = Settings(shards=32)
STEADY = Settings(shards=32, balance_interval_s=600.0)
"""Nothing is balanced, so every move has another reason."""


class Room(Entity, name="room"):
    """Known to every node."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    @handler
    async def note(self, number: int) -> int:
        self.numbers.append(number)
        await asyncio.sleep(0.002)
        return number

    @handler
    async def ask_annex(self, annex: str) -> str:
        await asyncio.sleep(0.001)
        return await self.ref(Annex, annex).ask(Annex.where)

    @handler
    async def ask_room(self, room: str, annex: str) -> str:
        await asyncio.sleep(0.001)
        return await self.ref(Room, room).ask(Room.ask_annex, annex)


class Annex(Entity, name="annex"):
    """Known to some nodes only."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    @handler
    async def where(self) -> str:
        return self.id

    @handler
    async def note(self, number: int) -> int:
        self.numbers.append(number)
        return len(self.numbers)


IDS = [f"a{number}" for number in range(60)]


def shard_homes(sim: Sim) -> dict[int, int]:
    """The node of each shard."""
    of = {node.incarnation: node.index for node in sim.nodes}
    return {
        number: of[sim.entry(ShardKey("default", number)).owner]
        for number in range(sim.settings.shards)
    }


def moved(sim: Sim) -> set[int]:
    """Shards that were ever told to move."""
    return {change.shard.shard for change in moves(sim)}


def needs(sim: Sim) -> dict[int, bytes]:
    """By shard: the types that the store says it needs."""
    found: dict[int, bytes] = {}
    for number in range(sim.settings.shards):
        item = sim.servers.store.peek(needs_key(ShardKey("default", number)))
        if item is not None:
            found[number] = item.value
    return found


def same_shard(sim: Sim, shard: ShardKey, kind: type[Entity]) -> str:
    """An id of an entity in this shard."""
    return next(id for id in map(str, range(10_000)) if sim.shard(kind, id) == shard)


async def ask_all(client: Client | Sim | Node, ids: Sequence[str] = IDS) -> None:
    async def one(id: str) -> None:
        assert await client.ref(Annex, id).ask(Annex.where) == id

    async with asyncio.TaskGroup() as group:
        for id in ids:
            group.create_task(one(id))


@pytest.mark.scenario("DX-26")
@simulated(entities=[Room, Annex], nodes=3, seeds=10, settings=STEADY, homes={0: [Room], 1: [Room]})
async def test_messages_for_a_type_that_the_owner_lacks_wait_for_their_shard_to_move(
    sim: Sim,
) -> None:
    before, wanted = shard_homes(sim), {sim.shard(Annex, id).shard for id in IDS}
    over = asyncio.Event()
    sent: dict[str, int] = {}

    async def talk(room: str) -> None:
        while not over.is_set():
            number = sent[room] = sent.get(room, -1) + 1
            await sim.ref(Room, room).tell(Room.note, number)
            assert await sim.ref(Room, room).ask(Room.note, -1) == -1

    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(talk(f"r{number}"))
        await sim.advance(0.05)
        began_at = sim.world.now
        await asyncio.gather(ask_all(sim), *(inside(sim, node, ask_all) for node in range(3)))
        assert sim.world.now - began_at < 3.0, "well within the time that an ask has"
        await sim.advance(0.2)
        over.set()
    await sim.wait_until(sim.settled)

    assert all(event.fields["outcome"] == "ok" for event in sim.history.of("outcome"))
    assert not any(True for _ in sim.history.of("lost"))
    assert traffic(sim, "start") == traffic(sim, "submit"), "each once, in the order of its sender"
    after = shard_homes(sim)
    lacking = {number for number in wanted if before[number] != 2}
    assert lacking, "the case is there"
    assert moved(sim) == lacking, "only shards that need the type move"
    assert {number for number in before if before[number] != after[number]} == lacking
    assert all(after[number] == 2 for number in wanted)


# rolling updates


async def update(sim: Sim, new: Sequence[type[Entity]], *, surge: bool, pause_s: float) -> None:
    """Replace all nodes one by one, by nodes of version 2 with other types."""
    for old in range(len(sim.nodes)):
        if surge:
            sim.add(version="2", entities=new)
            await sim.advance(pause_s)
            await sim.stop(old)
        else:
            await sim.stop(old)
            sim.start(old, version="2", entities=new)
            await sim.advance(pause_s)
    await sim.wait_until(sim.settled)


async def under_load(sim: Sim, change: Coroutine[Any, Any, None], kinds: Sequence[Any]) -> int:
    """Ask all the time until a change is over; returns the number of asks. None may fail."""
    over, count = asyncio.Event(), 0

    async def talk(kind: Any, id: str) -> None:
        nonlocal count
        await sim.wait_until(lambda: known(sim, kind), timeout_s=60)
        while not over.is_set():
            await sim.ref(kind, id).ask(kind.note, count)
            count += 1
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        for kind in kinds:
            for number in range(16):
                group.create_task(talk(kind, f"{kind.__name__}{number}"))
        await change
        over.set()
    return count


def known(sim: Sim, kind: type[Entity]) -> bool:
    """Whether the test's own client has seen a node with the type."""
    life = sim.client_life
    return life is not None and life.member.members.knows_type("default", kind.__name__.lower())


@pytest.mark.scenario("DX-26")
@pytest.mark.parametrize("surge", [True, False])
@pytest.mark.parametrize("rough", [False, True])
def test_no_ask_fails_in_a_rolling_update_that_adds_a_type(surge: bool, rough: bool) -> None:
    async def body(sim: Sim) -> None:
        adding = update(sim, [Room, Annex], surge=surge, pause_s=2.5)
        assert await under_load(sim, adding, [Room, Annex]) > 1_000
        assert all(event.fields["outcome"] == "ok" for event in sim.history.of("outcome"))
        assert traffic(sim, "start") == traffic(sim, "submit")
        await sim.wait_until(lambda: not needs(sim), timeout_s=10)

    for seed in range(3):
        settings = Settings(shards=16)
        sim = Sim(
            seed, entities=[Room, Annex], nodes=3, settings=settings,
            homes={node: [Room] for node in range(3)}, rough=rough,
        )  # fmt: skip
        run_simulation(sim, body)


@pytest.mark.scenario("DX-26", partial=True)
@simulated(entities=[Room, Annex], nodes=3, seeds=3, settings=Settings(shards=16))
async def test_a_rolling_update_that_removes_a_type_serves_it_until_its_last_node_leaves(
    sim: Sim,
) -> None:
    async def remove() -> None:
        for old in range(3):
            sim.add(version="2", entities=[Room])
            await sim.advance(2.5)
            if old < 2:
                await sim.stop(old)
                await ask_all(sim)
                await inside(sim, 3, ask_all)
        over.set()
        await asyncio.gather(*talks)
        await sim.stop(2)

    async def talk(id: str) -> None:
        while not over.is_set():
            await sim.ref(Annex, id).ask(Annex.note, 1)
            await asyncio.sleep(0.05)

    over = asyncio.Event()
    talks = [asyncio.ensure_future(talk(f"t{number}")) for number in range(8)]
    assert await under_load(sim, remove(), [Room]) > 1_000
    assert all(event.fields["outcome"] == "ok" for event in sim.history.of("outcome"))
    await sim.wait_until(lambda: not known(sim, Annex))
    began_at = sim.world.now
    with pytest.raises(Unavailable, match=r"'a1'.*lacks that type|no node has registered"):
        await sim.ref(Annex, "a1").ask(Annex.where)
    assert sim.world.now - began_at < 3.0, "the first time, nodes may have seen too little yet"
    began_at = sim.world.now
    with pytest.raises(Unavailable, match=r"'a1'.*lacks that type|no node has registered"):
        await sim.ref(Annex, "a1").ask(Annex.where)
    assert sim.world.now - began_at < 0.1, "at once"
    await sim.wait_until(lambda: not needs(sim), timeout_s=10)


# what may happen meanwhile


@pytest.mark.scenario("DX-26")
@simulated(
    entities=[Room, Annex], nodes=3, managers=2, seeds=8, settings=MANY, rough=True,
    homes={0: [Room], 1: [Room]},
)  # fmt: skip
async def test_a_new_leader_goes_on_with_the_moves_of_a_dead_one(sim: Sim) -> None:
    asks = asyncio.ensure_future(ask_all(sim))
    await sim.wait_until(lambda: bool(needs(sim)))
    await sim.advance(sim.random.uniform(0, 0.03))
    first = leader(sim)
    assert first is not None
    sim.crash(first)
    await asks
    await sim.wait_until(sim.settled)
    homes = shard_homes(sim)
    assert all(homes[sim.shard(Annex, id).shard] == 2 for id in IDS)


@simulated(
    entities=[Room, Annex], nodes=3, seeds=8, settings=MANY, rough=True, homes={0: [Room]}
)  # fmt: skip
async def test_balancing_and_drains_leave_shards_where_their_types_are(sim: Sim) -> None:
    await ask_all(sim)
    await sim.advance(10 * sim.settings.balance_interval_s)
    await ask_all(sim)
    await sim.wait_until(sim.settled)
    earlier, wanted = len(stored(sim)), set(needs(sim))
    await sim.drain(1)
    await sim.wait_until(lambda: 1 not in shard_homes(sim).values() and sim.settled())
    assert all(shard_homes(sim)[number] == 2 for number in wanted)
    await ask_all(sim)
    await sim.undrain(1)
    await sim.advance(10 * sim.settings.balance_interval_s)
    of = {node.incarnation: node.index for node in sim.nodes}
    for change in stored(sim)[earlier:]:
        if change.shard.shard in wanted:
            assert of.get(change.entry.to) != 0
            assert of.get(change.entry.owner) != 0
    assert 0 in shard_homes(sim).values(), "it still has shards that need nothing"


@simulated(entities=[Room, Annex], nodes=2, seeds=6, settings=STEADY, homes={0: [Room]})
async def test_a_wish_for_a_node_without_the_type_waits(sim: Sim) -> None:
    await ask_all(sim)
    number = min(needs(sim))
    shard = ShardKey("default", number)
    await sim.wish(shard, 0)
    await sim.advance(3)
    assert shard_homes(sim)[number] == 1
    await sim.stop(0)
    sim.start(0, entities=[Room, Annex])
    await sim.wait_until(lambda: sim.settled() and shard_homes(sim)[number] == 0)


# SM-30: nothing waits in vain


@pytest.mark.scenario("SM-30")
@simulated(
    entities=[Room, Annex], nodes=3, seeds=6, settings=STEADY, homes={0: [Room], 1: [Room]}
)  # fmt: skip
async def test_a_type_whose_nodes_can_take_no_shard_is_refused_at_once(sim: Sim) -> None:
    await sim.drain(2)
    await sim.wait_until(lambda: 2 not in shard_homes(sim).values() and sim.settled())

    async def send(client: Client | Sim | Node) -> None:
        began_at = sim.world.now
        with pytest.raises(Unavailable, match=r"annex 'a1' did not run: node node-[01] is its hom"):
            await client.ref(Annex, "a1").ask(Annex.where)
        assert sim.world.now - began_at < 0.1, "at once"

    await send(sim)
    for node in range(3):
        await inside(sim, node, send)
    assert not needs(sim)
    await sim.undrain(2)
    await sim.advance(0.1)
    assert await sim.ref(Annex, "a1").ask(Annex.where) == "a1"


@pytest.mark.scenario("SM-30")
@simulated(
    entities=[Room, Annex], nodes=3, managers=1, seeds=6, settings=STEADY, locks=True,
    homes={0: [Room], 1: [Room]},
)  # fmt: skip
async def test_messages_that_wait_are_refused_when_the_last_node_with_their_type_dies(
    sim: Sim,
) -> None:
    sim.freeze(3)  # the coordinator: nothing moves
    id = next(id for id in IDS if sim.owner(Annex, id) != 2)
    ask = asyncio.ensure_future(sim.ref(Annex, id).options(timeout_s=60).ask(Annex.where))
    await sim.wait_until(lambda: bool(needs(sim)))
    assert not ask.done()
    sim.crash(2)
    with pytest.raises(Unavailable, match="lacks that type"):
        await asyncio.wait_for(ask, 5)
    sim.thaw(3)
    await sim.wait_until(lambda: sim.settled() and not needs(sim))


# what waits


@simulated(
    entities=[Room, Annex], nodes=3, managers=1, seeds=6, settings=STEADY,
    homes={0: [Room], 1: [Room]},
)  # fmt: skip
async def test_what_waits_is_bounded_in_time_and_runs_in_order(sim: Sim) -> None:
    id = next(id for id in IDS if sim.owner(Annex, id) != 2)
    home = sim.owner(Annex, id)
    sim.freeze(3)  # nothing moves
    annex = sim.ref(Annex, id)
    for number in range(3):
        await annex.options(timeout_s=1).tell(Annex.note, number)
    impatient = asyncio.ensure_future(annex.options(timeout_s=1).ask(Annex.note, 3))
    cancelled = asyncio.ensure_future(annex.options(timeout_s=60).ask(Annex.note, 4))
    await sim.advance(0.2)
    cancelled.cancel()
    with pytest.raises(DomicileError):
        await impatient
    life = sim.node(home).life
    assert life is not None
    host = life.runtime.hosts[sim.shard(Annex, id)]
    await sim.wait_until(lambda: not host.owner.mailboxes, timeout_s=5)
    assert life.runtime.admission.count == 0

    for number in range(3):
        await annex.options(timeout_s=60).tell(Annex.note, number)
    last = asyncio.ensure_future(annex.options(timeout_s=60).ask(Annex.note, 3))
    await sim.advance(0.2)
    sim.thaw(3)
    assert await last == 4, "the three tells first"


# nested asks


@simulated(
    entities=[Room, Annex], nodes=3, seeds=10, settings=STEADY, homes={0: [Room], 1: [Room]}
)  # fmt: skip
async def test_a_handler_that_asks_into_its_own_shard_learns_at_once_that_it_cannot(
    sim: Sim,
) -> None:
    room = next(id for id in IDS if sim.owner(Room, id) != 2)
    annex = same_shard(sim, sim.shard(Room, room), Annex)
    began_at = sim.world.now
    with pytest.raises(HandlerFailed, match="a handler of the same shard waits for it"):
        await sim.ref(Room, room).ask(Room.ask_annex, annex)
    assert sim.world.now - began_at < 0.5
    await sim.wait_until(lambda: sim.owner(Room, room) == 2 and sim.settled())
    assert sim.world.now - began_at < 1.0, "the shard need not wait for a deadline"
    assert await sim.ref(Room, room).ask(Room.ask_annex, annex) == annex


@pytest.mark.scenario("DX-26", partial=True)
@simulated(
    entities=[Room, Annex], nodes=3, seeds=10, settings=STEADY, homes={0: [Room], 1: [Room]}
)  # fmt: skip
async def test_nested_asks_wait_too_also_while_their_own_shards_move(sim: Sim) -> None:
    """Rooms in even shards ask annexes in odd ones, while annexes in even shards are asked too."""

    def is_even(kind: type[Entity], id: str) -> bool:
        return sim.shard(kind, id).shard % 2 == 0

    async def nested(number: int) -> None:
        room, annex = f"n{number}", IDS[number]
        if is_even(Room, room) and not is_even(Annex, annex):
            assert await sim.ref(Room, room).ask(Room.ask_annex, annex) == annex
        elif is_even(Annex, annex):
            assert await sim.ref(Annex, annex).ask(Annex.where) == annex

    began_at = sim.world.now
    async with asyncio.TaskGroup() as group:
        for number in range(60):
            group.create_task(nested(number))
    assert sim.world.now - began_at < sim.settings.drain_deadline_s / 2, "nothing was stuck"


@simulated(
    entities=[Room, Annex], nodes=3, seeds=10, settings=STEADY, homes={0: [Room], 1: [Room]}
)  # fmt: skip
async def test_handlers_that_wait_behind_each_other_come_free_before_the_drain_deadline(
    sim: Sim,
) -> None:
    """`x` asks `hub`, whose running handler waits for an annex in the shard of `x`."""
    x = next(id for id in IDS if sim.owner(Room, id) != 2)
    hub = next(id for id in IDS if sim.shard(Room, id) != sim.shard(Room, x))
    annex = same_shard(sim, sim.shard(Room, x), Annex)
    other = next(
        id for id in IDS if sim.shard(Annex, id) not in (sim.shard(Room, x), sim.shard(Room, hub))
    )
    began_at = sim.world.now
    first = asyncio.ensure_future(sim.ref(Room, hub).ask(Room.ask_annex, annex))
    second = asyncio.ensure_future(sim.ref(Room, x).ask(Room.ask_room, hub, other))
    outcomes = await asyncio.gather(first, second, return_exceptions=True)
    assert outcomes[1] == other
    assert "seem to wait for it" in str(outcomes[0])
    assert sim.world.now - began_at < sim.settings.drain_deadline_s / 2
