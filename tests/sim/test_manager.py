"""Scenarios of assignment: who gets which shard, when, and what senders notice of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest
from manager_lab import (
    Access,
    Diary,
    first,
    from_the_start,
    ids_at,
    incarnation,
    inside,
    moves,
    of_shard,
    one_id_per_shard,
    spy_on_store,
    stored,
    traffic,
)

from domicile import Entity, Node, Settings, Unavailable, handler
from domicile.core.ids import ShardKey
from domicile.core.state.keys import LEADER_KEY, node_key
from domicile.ports.transport import ConnectionHandler
from domicile.testing import Sim, simulated
from domicile.testing.sim.loop import SimLoop
from domicile.testing.sim.node import SimNode

FEW = Settings(shards=12)


class Book(Entity, name="book", role="library"):
    """Lives in a role of its own."""

    @handler
    async def title(self) -> str:
        return self.id


class Stranger(Entity, name="stranger"):
    """No node of these tests has it."""

    @handler
    async def hello(self) -> str:
        return self.id


class Exile(Entity, name="exile", role="nowhere"):
    """Nor this one, nor its role: a node of it may be about to start."""

    @handler
    async def hello(self) -> str:
        return self.id


def add_node(sim: Sim) -> int:
    """Start one node more."""
    index = len(sim.nodes)
    sim.nodes.append(SimNode(index, True))
    sim.start(index)
    return index


def loads(sim: Sim) -> list[int]:
    """How many shards each running node is home to, the most first."""
    counts = [0 for _ in sim.nodes]
    for shard in range(sim.settings.shards):
        owner = sim.entry(ShardKey("default", shard)).owner
        for node in sim.nodes:
            counts[node.index] += node.incarnation == owner
    return sorted((counts[node.index] for node in sim.nodes if node.up), reverse=True)


# SM-01, SM-02: how it begins


@pytest.mark.scenario("SM-01")
@pytest.mark.parametrize("seed", range(6))
def test_the_first_node_to_register_is_given_every_shard(seed: int) -> None:
    async def body(sim: Sim, ready: Awaitable[Sim]) -> None:
        await sim.advance(0)
        early = seed % 3
        for node in range(3):
            if node != early:
                sim.cut_store(node)
        await ready

        me = incarnation(sim, early)
        given = stored(sim)
        assert [change.entry.owner for change in given] == [me] * 200
        assert all((change.entry.state, change.entry.epoch) == ("serving", 1) for change in given)
        assert sorted(change.shard for change in given) == [
            ShardKey(role, shard) for role in ("default", "library") for shard in range(100)
        ]
        assert await sim.ref(Diary, "d").ask(Diary.write, "line") == 1
        assert await sim.ref(Book, "b").ask(Book.title) == "b"

        sim.heal()
        await sim.wait_until(lambda: all(node.incarnation is not None for node in sim.nodes))

    settings = Settings(shards=100)
    from_the_start(Sim(seed, entities=[Diary, Book], nodes=3, settings=settings), body)


@pytest.mark.scenario("SM-02")
@simulated(entities=[Diary], nodes=2, seeds=15, settings=FEW)
async def test_a_node_reads_listens_and_registers_before_it_gets_shards(sim: Sim) -> None:
    accesses = spy_on_store(sim)
    listen = sim.network.listen

    def spied(loop: SimLoop, host: str, accept: Callable[[], ConnectionHandler]) -> str:
        address = listen(loop, host, accept)
        accesses.append(Access(host, "listen", address.encode()))
        return address

    sim.network.listen = spied  # type: ignore[method-assign]
    node = add_node(sim)
    await sim.wait_until(lambda: loads(sim) == [4, 4, 4] and sim.settled())

    me = incarnation(sim, node)
    key = node_key(me)
    steps = [
        access.call
        for access in accesses
        if access.call in ("list", "listen") or (access.call == "commit" and access.key == key)
    ]
    assert steps == ["list", "listen", "commit"]

    stands = first(sim, "commit", lambda fields: any(put[0] == key for put in fields["puts"]))
    named = next(change for change in stored(sim) if me in (change.entry.owner, change.entry.to))
    opened = first(sim, "open", lambda fields: fields["inc"] == me)
    assert stands < named.position < opened
    assert stands < first(sim, "taken", lambda fields: fields["inc"] == me)


# SM-05, SM-06, SM-07, SM-30: what senders see


@pytest.mark.scenario("SM-05")
@simulated(entities=[Diary], nodes=3, seeds=15, settings=FEW)
async def test_an_ask_from_one_node_starts_an_entity_on_another_and_is_answered(sim: Sim) -> None:
    for sender, home in ((0, 1), (1, 2), (2, 0)):
        for id in ids_at(sim, home, 3):
            assert not any(event.fields["id"] == id for event in sim.history.of("start"))
            sent_at = sim.world.now

            async def talk(node: Node, id: str = id) -> tuple[tuple[int, float], int, int]:
                diary = node.ref(Diary, id)
                birth = await diary.ask(Diary.birth)
                return birth, await diary.ask(Diary.write, "a"), await diary.ask(Diary.write, "b")

            (starts, started_at), one, two = await inside(sim, sender, talk)
            assert (starts, one, two) == (1, 1, 2)
            assert started_at > sent_at

            runs = [event.fields for event in sim.history.of("start") if event.fields["id"] == id]
            assert [run["method"] for run in runs] == ["birth", "write", "write"]
            for run in runs:
                assert run["inc"] == incarnation(sim, home)
                assert run["sender"] == incarnation(sim, sender)


@pytest.mark.scenario("SM-06")
@simulated(entities=[Diary], nodes=3, seeds=15, settings=FEW)
async def test_a_message_to_a_node_that_is_no_longer_home_comes_back_and_finds_the_home(
    sim: Sim,
) -> None:
    homes = one_id_per_shard(sim)
    for id in homes.values():
        await sim.ref(Diary, id).ask(Diary.write, "before")
    old = {shard: sim.entry(shard).owner for shard in homes}
    sim.store.watch_delay_s = (30.0, 30.0)
    for shard, id in homes.items():
        await sim.wish(shard, (sim.owner(Diary, id) + 1) % 3)
    await sim.wait_until(
        lambda: sim.settled() and all(sim.entry(shard).owner != old[shard] for shard in homes)
    )

    me = next(event.fields["inc"] for event in sim.history.of("submit"))
    began_at, position = sim.world.now, len(sim.history.events)
    async with asyncio.TaskGroup() as group:
        asks = [
            group.create_task(sim.ref(Diary, id).options(timeout_s=1.0).ask(Diary.write, line))
            for id in homes.values()
            for line in ("one", "two", "three")
        ]
    assert [ask.result() for ask in asks] == [1, 2, 3] * len(homes)
    assert sim.world.now - began_at < 0.5, "it did not wait for its own watch"

    for shard in homes:
        after = [
            (at, event) for at, event in of_shard(sim, shard, "return", "start") if at > position
        ]
        returned = [event for _, event in after if event.kind == "return"]
        assert [(back.fields["inc"], back.fields["sender"]) for back in returned] == [
            (old[shard], me)
        ] * 3
        started = [event.fields["inc"] for _, event in after if event.kind == "start"]
        assert started == [sim.entry(shard).owner] * 3


@pytest.mark.scenario("SM-07")
@simulated(entities=[Diary], nodes=3, seeds=4, settings=FEW, candidates=[0])
async def test_known_shards_go_on_without_any_coordinator(sim: Sim) -> None:
    await sim.drain(0)
    await sim.wait_until(lambda: loads(sim) == [6, 6, 0] and sim.settled())
    await sim.ref(Diary, "d0").ask(Diary.write, "warm")
    client = next(event.fields["inc"] for event in sim.history.of("submit"))
    ids = list(one_id_per_shard(sim).values())
    changes = len(stored(sim))
    sim.crash(0)
    crashed_at = sim.world.now
    ends_at = crashed_at + 4 * sim.settings.ttl_s
    answers: list[int] = []

    async def chat(source: Sim | Node) -> None:
        while sim.world.now < ends_at:
            for id in ids:
                await source.ref(Diary, id).tell(Diary.write, "told")
                answers.append(await source.ref(Diary, id).ask(Diary.write, "asked"))
            await asyncio.sleep(0.5)

    async with asyncio.TaskGroup() as group:
        group.create_task(chat(sim))
        for node in (1, 2):
            group.create_task(inside(sim, node, chat))
        await sim.advance(sim.settings.ttl_s + 1)
        while sim.world.now < ends_at:
            assert sim.servers.store.peek(LEADER_KEY) is None
            await sim.advance(0.5)

    assert len(answers) > 1_000
    submitted, started = traffic(sim, "submit"), traffic(sim, "start")
    senders = [client, incarnation(sim, 1), incarnation(sim, 2)]
    assert sorted(submitted) == sorted((sender, id) for sender in senders for id in ids)
    assert started == submitted
    assert sum(map(len, submitted.values())) == 2 * len(answers) + 1, "a tell for every ask"
    assert all(event.fields["outcome"] == "ok" for event in sim.history.of("outcome"))
    assert not any(True for _ in sim.history.of("lost"))
    assert len(stored(sim)) == changes, "nobody changed the map"


@pytest.mark.scenario("SM-30")
@simulated(entities=[Diary], nodes=2, seeds=10, settings=FEW)
async def test_a_type_that_no_node_has_is_refused_at_once_by_name(sim: Sim) -> None:
    async def send(source: Sim | Node) -> None:
        began_at = sim.world.now
        stranger = source.ref(Stranger, "x")
        for sent in (stranger.ask(Stranger.hello), stranger.tell(Stranger.hello)):
            with pytest.raises(Unavailable, match="no node has registered entity type 'stranger'"):
                await sent
        assert sim.world.now == began_at, "at once"
        exile = source.ref(Exile, "x").options(timeout_s=2)
        for sent in (exile.ask(Exile.hello), exile.tell(Exile.hello)):
            with pytest.raises(Unavailable, match="no node of role 'nowhere' is up, so 'exile'"):
                await sent
        assert sim.world.now == pytest.approx(began_at + 4, abs=0.01), "it waits for its role"

    await send(sim)
    await inside(sim, 0, send)
    assert await sim.ref(Diary, "d").ask(Diary.write, "line") == 1
    await send(sim)
    assert not any(event.fields["type"] != "diary" for event in sim.history.of("submit"))


# SM-12: balance


@pytest.mark.scenario("SM-12", partial=True)
@simulated(entities=[Diary], nodes=3, seeds=10, settings=Settings(shards=5))
async def test_a_difference_of_one_shard_moves_nothing(sim: Sim) -> None:
    await sim.wait_until(lambda: loads(sim) == [2, 2, 1])
    before = len(stored(sim))
    await sim.advance(20 * sim.settings.balance_interval_s)
    assert loads(sim) == [2, 2, 1]
    assert len(stored(sim)) == before


@pytest.mark.scenario("SM-12")
@simulated(entities=[Diary], nodes=1, seeds=10, settings=Settings(shards=3))
async def test_a_difference_of_two_shards_moves_one(sim: Sim) -> None:
    for joined, wanted in enumerate(([2, 1], [1, 1, 1], [1, 1, 1, 0]), start=1):
        had = loads(sim)
        earlier = len(moves(sim))
        node = add_node(sim)
        await sim.wait_until(lambda node=node: sim.nodes[node].incarnation is not None)
        # From [3, 0] and from [2, 1, 0] one shard moves; from [1, 1, 1, 0] none does.
        await sim.advance(20 * sim.settings.balance_interval_s)
        assert loads(sim) == wanted, f"after {had} and {joined} more"
        new = moves(sim)[earlier:]
        assert len(new) == (had[0] >= 2)
        for move in new:
            assert move.entry.to == incarnation(sim, node)
    assert sim.settled()


@pytest.mark.scenario("SM-12", partial=True)
@simulated(entities=[Diary], nodes=2, seeds=10, settings=Settings(shards=4))
async def test_a_wish_that_makes_a_difference_of_two_costs_one_move_more(sim: Sim) -> None:
    await sim.wait_until(lambda: loads(sim) == [2, 2])
    assert moves(sim) == []
    [id, _] = ids_at(sim, 0, 2)
    wished = sim.shard(Diary, id)
    await sim.wish(wished, 1)
    await sim.advance(20 * sim.settings.balance_interval_s)

    one, other = moves(sim)
    assert (one.shard, one.entry.to) == (wished, incarnation(sim, 1))
    assert other.shard != wished
    assert (other.entry.owner, other.entry.to) == (incarnation(sim, 1), incarnation(sim, 0))
    assert loads(sim) == [2, 2]
    assert sim.owner(Diary, id) == 1


# SM-16, SM-18: what must not happen


@pytest.mark.scenario("SM-16")
@simulated(entities=[Diary], nodes=3, seeds=10, settings=FEW, candidates=[0])
async def test_a_shard_whose_handler_runs_on_gets_no_other_home_meanwhile(sim: Sim) -> None:
    busy, idle = ids_at(sim, 1, 2)
    shard = sim.shard(Diary, busy)
    me, there = incarnation(sim, 1), incarnation(sim, 2)
    nap = asyncio.ensure_future(sim.ref(Diary, busy).options(timeout_s=60).ask(Diary.nap, 25.0))
    await sim.wait_until(lambda: bool(of_shard(sim, shard, "start")))
    await sim.wish(shard, 2)
    await sim.wish(sim.shard(Diary, idle), 2)

    await sim.wait_until(lambda: sim.owner(Diary, idle) == 2, timeout_s=2)
    assert (sim.entry(shard).state, sim.entry(shard).owner) == ("moving", me)
    assert await nap == 1, "it ended under the epoch it began with"
    await sim.wait_until(lambda: sim.owner(Diary, busy) == 2 and sim.settled(), timeout_s=30)

    [(finished, _)] = of_shard(sim, shard, "finish")
    [(released, _)] = of_shard(sim, shard, "released")
    assert finished < released
    changes = [change for change in stored(sim) if change.shard == shard]
    held = [change for change in changes if change.position < released]
    assert all((change.entry.owner, change.entry.epoch) == (me, 1) for change in held)
    states = [change.entry.state for change in held]
    assert states[:3] == ["serving", "moving", "serving"], "the failed attempt was taken back"
    [after] = [change for change in changes if change.position > released]
    assert (after.entry.owner, after.entry.epoch) == (there, 2)


@pytest.mark.scenario("SM-16", partial=True)
@simulated(entities=[Diary], nodes=3, seeds=10, settings=FEW, candidates=[0])
async def test_a_shard_whose_owner_stands_still_gets_no_other_home_meanwhile(sim: Sim) -> None:
    [held] = ids_at(sim, 1, 1)
    [free] = ids_at(sim, 0, 1)
    shard = sim.shard(Diary, held)
    before = sim.entry(shard)
    sim.freeze(1)
    await sim.wish(shard, 2)
    await sim.wish(sim.shard(Diary, free), 2)
    await sim.wait_until(lambda: sim.owner(Diary, free) == 2, timeout_s=1)
    await sim.advance(2.0)
    entry = sim.entry(shard)
    assert (entry.state, entry.owner, entry.epoch) == ("moving", before.owner, before.epoch)
    sim.thaw(1)
    await sim.wait_until(lambda: sim.owner(Diary, held) == 2 and sim.settled(), timeout_s=5)
    assert sim.entry(shard).epoch == before.epoch + 1


@pytest.mark.scenario("SM-18")
@simulated(
    entities=[Diary], nodes=3, seeds=10, settings=Settings(shards=12, ttl_s=5), candidates=[0]
)
async def test_an_assignment_whose_answer_is_lost_stands_and_is_not_made_again(sim: Sim) -> None:
    store = sim.nodes[0].store
    assert store is not None
    here, there, gone = (incarnation(sim, node) for node in range(3))
    homes = {shard: id for shard, id in one_id_per_shard(sim).items() if sim.owner(Diary, id) == 2}
    sim.crash(2)
    # The coordinator hears everything two seconds late: that node 2 is gone, a moment after that
    # the wishes, and its own commit only when it has given up waiting for the answer to it.
    store.watch_delay_s = (2.0, 2.0)
    await sim.wait_until(lambda: sim.servers.store.peek(node_key(gone)) is None)
    await sim.advance(0.5)
    for shard in homes:
        await sim.wish(shard, 1)
    await sim.advance(1.4)
    before = len(stored(sim))
    store.lost_reply = 1.0
    await sim.wait_until(lambda: len(stored(sim)) > before, timeout_s=2)
    store.lost_reply = 0.0
    given = {change.shard: change.entry for change in stored(sim)[before:]}
    assert sorted(given) == sorted(homes)
    assert sorted(dict.fromkeys(entry.owner for entry in given.values())) == sorted((here, there))
    assert sim.history.counts["leader.commit_unknown"] == 0

    await sim.wait_until(lambda: all(sim.owner(Diary, id) == 1 for id in homes.values()))
    await sim.advance(10.0)
    assert sim.history.counts["leader.commit_unknown"] > 0, "the coordinator knew the outcome"
    for shard, id in homes.items():
        first, *later = [change.entry for change in stored(sim)[before:] if change.shard == shard]
        assert (first.state, first.epoch) == ("serving", 2)
        # What the lost answer was about stands: another home follows only by a hand-off.
        assert [(entry.state, entry.owner, entry.epoch) for entry in later] == (
            [] if first.owner == there else [("moving", here, 2), ("serving", there, 3)]
        )
        opened = [event.fields for _, event in of_shard(sim, shard, "open")]
        assert [(fields["epoch"], fields["inc"]) for fields in opened] == [
            (1, gone),
            (2, first.owner),
            *((entry.epoch, entry.owner) for entry in later if entry.state == "serving"),
        ]
        assert await sim.ref(Diary, id).ask(Diary.write, "line") == 1


@pytest.mark.scenario("SM-18", partial=True)
@simulated(entities=[Diary], nodes=3, seeds=12, settings=Settings(shards=12, ttl_s=5))
async def test_many_lost_answers_never_give_an_epoch_two_owners(sim: Sim) -> None:
    homes = one_id_per_shard(sim)
    for node in sim.nodes:
        assert node.store is not None
        node.store.lost_reply = 0.15
    for _ in range(12):
        for shard in sim.random.sample(sorted(homes), 4):
            await sim.wish(shard, sim.random.randrange(3))
        await sim.advance(1.0)
    for node in sim.nodes:
        assert node.store is not None
        node.store.lost_reply = 0.0
    await sim.wait_until(sim.settled, timeout_s=60)
    assert sim.history.counts["leader.commit_unknown"] > 0

    for shard in homes:
        owners = [
            (change.entry.epoch, change.entry.owner)
            for change in stored(sim)
            if change.shard == shard and change.entry.epoch > change.before.epoch
        ]
        epochs = [epoch for epoch, _ in owners]
        assert all(later == earlier + 1 for earlier, later in pairwise(epochs))
        homes_by_epoch = dict(owners)
        for _, event in of_shard(sim, shard, "open", "start"):
            assert event.fields["inc"] == homes_by_epoch[event.fields["epoch"]]
    for id in homes.values():
        await sim.ref(Diary, id).ask(Diary.write, "line")
