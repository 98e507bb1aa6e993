"""Hand-off under load: order and completeness (RG-05), full buffers (RG-06), and coordinators
that die in the middle of it (RG-08).

Entities write down who sent them what number, in a ledger that all nodes of a run share.
`DOMICILE_FULL=1` runs RG-05 at its full simulated size.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from domicile import Client, Entity, Overloaded, Settings, handler
from domicile.core.ids import ShardKey
from domicile.core.state.keys import KeyFamily, block_key
from domicile.core.state.shardmap import BLOCK_SIZE, Entry, decode_block
from domicile.testing import Event, Sim, simulated

FULL = bool(os.environ.get("DOMICILE_FULL"))

ROLE = "default"


class Ledger:
    """What every entity saw, in order, and a gate that holds handlers back."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.seen: dict[tuple[str, str], list[int]] = {}
        self.gate_open = True

    def see(self, id: str, sender: str, number: int) -> None:
        self.seen.setdefault((id, sender), []).append(number)

    async def gate(self) -> None:
        while not self.gate_open:  # noqa: ASYNC110 - set from outside of this event loop
            await asyncio.sleep(0.005)


LEDGER = Ledger()


@asynccontextmanager
async def ledger() -> AsyncGenerator[Mapping[type[Any], Any]]:
    yield {Ledger: LEDGER}


class Desk(Entity, name="desk"):
    """Notes numbers; some notes take a while, some need another desk."""

    @handler
    async def note(self, sender: str, number: int) -> int:
        self.resource(Ledger).see(self.id, sender, number)
        return number

    @handler
    async def ponder(self, sender: str, number: int) -> int:
        self.resource(Ledger).see(self.id, sender, number)
        await asyncio.sleep(self.random.random() ** 6 * 0.1)
        return number

    @handler
    async def relay(self, sender: str, number: int, to: str, inner: int) -> int:
        self.resource(Ledger).see(self.id, sender, number)
        via, other = f"{sender} via {self.id}", self.ref(Desk, to)
        await other.tell(Desk.note, via, inner)
        return await other.ask(Desk.ponder, via, inner + 1)

    @handler
    async def hold(self, sender: str, number: int) -> None:
        self.resource(Ledger).see(self.id, sender, number)
        await self.resource(Ledger).gate()


# RG-05


MESSAGES = 10_000 if FULL else 3_000
DESKS, ASKED = 24, 5
"""Desks that relay, and further ones that they ask."""

TASKS = {0: 2, 1: 2, 2: 2, 3: 2, None: 2}
"""Senders per node; None is the test's own client."""


class Load:
    """Numbered messages of all kinds from many senders, with a record of what must arrive."""

    def __init__(self, messages: int) -> None:
        self.left = messages
        self.sent: dict[tuple[str, str], int] = {}
        self.senders = 0

    def number(self, sender: str, desk: str) -> int:
        key = (desk, sender)
        self.sent[key] = self.sent.get(key, -1) + 1
        return self.sent[key]

    def sender(self, name: str, random: Random) -> Callable[[Client], Coroutine[Any, Any, None]]:
        self.senders += 1

        async def send(client: Client) -> None:
            try:
                while self.left > 0:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(random.randint(1, 12)):
                            self._one(group, client, name, random)
                    await asyncio.sleep(random.random() * 0.05)
            finally:
                self.senders -= 1

        return send

    def _one(self, group: asyncio.TaskGroup, client: Client, name: str, random: Random) -> None:
        # All as tasks: they start, and take their place in the order, in this order.
        at = random.randrange(DESKS + ASKED)
        desk = f"desk-{at}"
        number = self.number(name, desk)
        ref = client.ref(Desk, desk)
        kind = random.random()
        self.left -= 1
        if kind < 0.5:
            method = Desk.note if kind < 0.4 else Desk.ponder
            group.create_task(ref.tell(method, name, number))
        elif kind < 0.8 or at >= DESKS:
            group.create_task(self._ask(ref.ask(Desk.ponder, name, number), number))
        else:
            # Always upwards, so that no two desks ever wait for each other.
            to = f"desk-{DESKS + at % ASKED}"
            via = f"{name} via {desk}"
            told, asked = self.number(via, to), self.number(via, to)
            self.left -= 2
            group.create_task(self._ask(ref.ask(Desk.relay, name, number, to, told), asked))

    async def _ask(self, reply: Coroutine[Any, Any, int], expected: int) -> None:
        assert await reply == expected

    def arrived(self) -> bool:
        return self.senders == 0 and all(
            len(LEDGER.seen.get(key, ())) > last for key, last in self.sent.items()
        )


def spread_news_unevenly(sim: Sim) -> None:
    """Everybody hears of a move at another moment."""
    random = sim.world.stream("news")
    for faults in (sim.store, *(node.store for node in sim.nodes)):
        assert faults is not None
        faults.watch_delay_s = (0.0, random.random() * 0.05)


async def keep_moving(sim: Sim, load: Load) -> None:
    """Wishes, wishes taken back in the middle of a move, drains: until all senders are done.

    Distances change all the time, so that what is said later by one may arrive before what was
    said earlier by another.
    """
    names = ["client", *(node.name for node in sim.nodes)]
    random = sim.world.stream("moves")
    shards = sim.settings.shards
    drained: int | None = None
    give_up_at = sim.world.now + MESSAGES / 100
    while load.senders:
        assert sim.world.now < give_up_at, "some sender waits in vain"
        shard = ShardKey(ROLE, random.randrange(shards))
        await sim.wish(shard, random.randrange(len(sim.nodes)))
        if random.random() < 0.4:
            await sim.advance(random.random() * 0.01)
            await sim.wish(shard, None)
        if random.random() < 0.05:
            if drained is None:
                drained = random.randrange(len(sim.nodes))
                await sim.drain(drained)
            else:
                await sim.undrain(drained)
                drained = None
        if random.random() < 0.5:
            sim.network.slow(random.choice(names), random.random() ** 2 * 0.05)
        await sim.advance(random.random() * 0.01)


@pytest.mark.scenario("RG-05", partial=True)
@simulated(
    entities=[Desk],
    nodes=4,
    seeds=200 if FULL else 3,
    settings=Settings(shards=8),
    resources=ledger,
)
async def test_every_number_arrives_once_and_in_order_while_shards_move(sim: Sim) -> None:
    LEDGER.clear()
    spread_news_unevenly(sim)
    load = Load(MESSAGES)
    for node, count in TASKS.items():
        for task in range(count):
            name = f"sender {node}.{task}"
            send = load.sender(name, sim.world.stream(name))
            if node is None:
                sim.loop.create_task(send(sim))
            else:
                sim.spawn(node, send)
    await keep_moving(sim, load)
    await sim.wait_until(load.arrived)
    for (desk, sender), last in load.sent.items():
        assert LEDGER.seen[desk, sender] == list(range(last + 1)), (desk, sender)
    assert LEDGER.seen.keys() == load.sent.keys()
    # Not in vain: shards moved all the time, mail came back, chains passed draining shards.
    moved = list(sim.history.of("released"))
    assert len(moved) >= MESSAGES / 60
    assert len(list(sim.history.of("return"))) > MESSAGES / 100
    assert any(event.fields["finishing"] for event in sim.history.of("write"))
    assert len(list(sim.history.of("draining"))) > len(moved), "no move was taken back"
    assert not sim.history.counts["message.overloaded"]


# RG-06


BUFFER = 20
OVER = 15


def desks_in(sim: Sim, shard: ShardKey) -> list[str]:
    """Desks of one shard."""
    return [f"d{n}" for n in range(400) if sim.shard(Desk, f"d{n}") == shard]


async def flood(client: Client, busy: str, other: str, name: str, told: list[str]) -> None:
    """Tells and asks beyond the buffer; `told` gets the fate of each, in order."""
    async with asyncio.TaskGroup() as group:

        async def one(number: int) -> None:
            ref = client.ref(Desk, busy if number % 3 == 0 else other)
            told.append("")
            try:
                if number % 2:
                    await ref.tell(Desk.note, name, number)
                else:
                    await ref.ask(Desk.note, name, number)
                told[number] = "ok"
            except Overloaded:
                told[number] = "refused"

        for number in range(BUFFER + OVER):
            group.create_task(one(number))


@pytest.mark.scenario("RG-06")
@simulated(
    entities=[Desk], nodes=3, seeds=10, settings=Settings(shards=4, buffer=BUFFER), resources=ledger
)
async def test_a_full_buffer_refuses_the_newest_and_keeps_the_rest(sim: Sim) -> None:
    LEDGER.clear()
    busy, other, *_ = desks_in(sim, ShardKey(ROLE, 0))
    shard, home = sim.shard(Desk, busy), sim.owner(Desk, busy)
    new_home, sender = [node for node in range(3) if node != home]
    LEDGER.gate_open = False
    await sim.ref(Desk, busy).tell(Desk.hold, "first", 0)
    # Written to the old home but not started when it drains: these come back into the buffer.
    for number in range(5):
        await sim.ref(Desk, busy).tell(Desk.note, "early", number)
    await sim.wait_until(lambda: "first" in str(LEDGER.seen))
    await sim.wish(shard, new_home)
    await sim.wait_until(lambda: len(list(sim.history.of("return"))) >= 5)
    await sim.advance(0.1)

    fates: dict[str, list[str]] = {"client": [], "node": []}
    flooding = asyncio.ensure_future(flood(sim, busy, other, "client", fates["client"]))
    sim.spawn(sender, lambda node: flood(node, busy, other, "node", fates["node"]))
    await sim.advance(1.0)
    assert sim.entry(shard).state == "moving"
    room = {"client": BUFFER - 5, "node": BUFFER}
    for name, fate in fates.items():
        refused = [number for number, told in enumerate(fate) if told == "refused"]
        assert refused == list(range(room[name], BUFFER + OVER)), "the newest, and only these"
    refusals = 2 * (BUFFER + OVER) - sum(room.values())
    assert sim.history.counts["message.overloaded"] == refusals
    assert not any(sender in ("client", "node") for _, sender in LEDGER.seen)

    LEDGER.gate_open = True
    await flooding
    await sim.wait_until(lambda: "" not in fates["node"])
    await sim.wait_until(lambda: len(LEDGER.seen.get((other, "node"), ())) >= room["node"] // 2)
    await sim.wait_until(sim.settled)
    assert sim.owner(Desk, busy) == new_home
    await sim.ref(Desk, busy).ask(Desk.note, "later", 0)
    await sim.ref(Desk, other).ask(Desk.note, "later", 0)
    await sim.advance(0.1)
    assert LEDGER.seen[busy, "early"] == list(range(5))
    for name, count in room.items():
        assert LEDGER.seen[busy, name] == [n for n in range(count) if n % 3 == 0]
        assert LEDGER.seen[other, name] == [n for n in range(count) if n % 3]
    assert sim.history.counts["message.overloaded"] == refusals


# RG-08


CANDIDATES, OWNER, TARGET = (0, 1), 2, 3
"""Only the first two nodes may coordinate; the shard goes from the third to the fourth."""

Trigger = Callable[[Sim, Event, "Handing"], bool]


class Handing:
    """One hand-off that a test disturbs."""

    def __init__(self, sim: Sim, desk: str) -> None:
        self.desk = desk
        self.shard = sim.shard(Desk, desk)
        self.before = sim.entry(self.shard)
        [self.leader] = leaders(sim)
        self.leader_inc = sim.nodes[self.leader].incarnation
        self.crashed_at = 0.0

    def stored(self, event: Event) -> Entry | None:
        """The entry of this shard in a commit of the map."""
        for key, value, *_ in event.fields["puts"]:
            if key == block_key(self.shard.role, self.shard.shard // BLOCK_SIZE):
                return decode_block(value).entries[self.shard.shard % BLOCK_SIZE]
        return None


def leaders(sim: Sim) -> list[int]:
    """The nodes that act as coordinator now: one, or none for a while."""
    return [
        process.index
        for process in sim.nodes
        if process.up and process.node and process.node.life and process.node.life.control.leading
    ]


def on_wish(sim: Sim, event: Event, it: Handing) -> bool:
    """The wish is stored; the coordinator does not know it yet."""
    return event.kind == "commit" and any(
        key.startswith(b"wish/") and KeyFamily.WISH.parse(key) == it.shard
        for key, *_ in event.fields["puts"]
    )


def on_stored(state: str) -> Trigger:
    """A step of the hand-off is stored; nobody has been told."""

    def trigger(sim: Sim, event: Event, it: Handing) -> bool:
        entry = it.stored(event) if event.kind == "commit" else None
        return entry is not None and entry.state == state and entry.change > it.before.change

    return trigger


def on_phase(kind: str) -> Trigger:
    """The old owner takes a step; what it says of it is still under way."""

    def trigger(sim: Sim, event: Event, it: Handing) -> bool:
        return event.kind == kind and event.fields["shard"] == it.shard.shard

    return trigger


def has_taken(sim: Sim, it: Handing, kind: str) -> bool:
    """Whether the old owner has taken that step."""
    return any(
        (event.fields["inc"], event.fields["shard"], event.fields["epoch"])
        == (it.before.owner, it.shard.shard, it.before.epoch)
        for event in sim.history.of(kind)
    )


def on_release_heard(sim: Sim, event: Event, it: Handing) -> bool:
    """The coordinator got the release and has not stored the new home yet."""
    return (
        event.kind == "taken"
        and event.fields["inc"] == it.leader_inc
        and event.fields["peer"] == it.before.owner
        and any(on_phase("released")(sim, earlier, it) for earlier in sim.history.of("released"))
    )


def on_told(state: str) -> Trigger:
    """The coordinator is telling a node; the message may or may not get out."""

    def trigger(sim: Sim, event: Event, it: Handing) -> bool:
        fields = event.fields
        return (
            event.kind == "told"
            and (fields["shard"], fields["state"]) == (it.shard.shard, state)
            and fields["change"] > it.before.change
        )

    return trigger


STEPS: dict[str, Trigger] = {
    "before it knows the wish": on_wish,
    "moving stored": on_stored("moving"),
    "moving being told": on_told("moving"),
    "the owner drains": on_phase("draining"),
    "the owner released": on_phase("released"),
    "the release is heard": on_release_heard,
    "serving stored": on_stored("serving"),
    "serving being told": on_told("serving"),
}
LAST_BY_THE_FIRST_LEADER = ("serving stored", "serving being told")


def at_the_event(sim: Sim, it: Handing, trigger: Trigger, strike: Callable[[], None]) -> None:
    """Have something happen right after the first event of a kind, outside of all processes."""
    record = sim.history.event

    def event(kind: str, /, **fields: Any) -> None:
        record(kind, **fields)
        if not it.crashed_at and trigger(sim, sim.history.events[-1], it):
            it.crashed_at = sim.world.now
            sim.world.call_at(sim.world.now, strike)

    sim.history.event = event  # type: ignore[method-assign]


async def talk(sim: Sim, desk: str, name: str, stop: Callable[[], bool]) -> int:
    """Numbered tells and asks without a pause; how many."""
    number = 0
    ref = sim.ref(Desk, desk).options(timeout_s=30)
    async with asyncio.TaskGroup() as group:
        while not stop():
            if number % 4:
                await ref.tell(Desk.note, name, number)
            else:
                group.create_task(ref.ask(Desk.ponder, name, number))
            number += 1
            await sim.advance(0.05)
    return number


async def hand_over(sim: Sim) -> Handing:
    """A quiet cluster whose shard is at home on `OWNER` with some mail behind it."""
    LEDGER.clear()
    desk = desks_in(sim, ShardKey(ROLE, 0))[0]
    await sim.wish(sim.shard(Desk, desk), OWNER)
    await sim.wait_until(lambda: sim.settled() and sim.owner(Desk, desk) == OWNER)
    return Handing(sim, desk)


HANDING = simulated(
    entities=[Desk],
    nodes=4,
    seeds=3,
    settings=Settings(shards=8, ask_timeout_s=30.0),
    resources=ledger,
    candidates=CANDIDATES,
)


@pytest.mark.scenario("RG-08")
@pytest.mark.parametrize("step", STEPS)
@HANDING
async def test_the_next_coordinator_finishes_what_a_dead_one_began(sim: Sim, step: str) -> None:
    it = await hand_over(sim)
    successor = next(node for node in CANDIDATES if node != it.leader)
    at_the_event(sim, it, STEPS[step], lambda: sim.crash(it.leader))
    over = False
    talking = asyncio.ensure_future(talk(sim, it.desk, "client", lambda: over))
    await sim.advance(0.3)
    await sim.wish(it.shard, TARGET)
    await sim.wait_until(lambda: bool(it.crashed_at), timeout_s=3)

    def handed_over() -> bool:
        return sim.entry(it.shard).owner == sim.nodes[TARGET].incarnation and sim.settled()

    await sim.wait_until(handed_over)
    await sim.advance(0.3)
    over = True
    count = await talking
    await sim.wait_until(lambda: len(LEDGER.seen[it.desk, "client"]) >= count)
    assert LEDGER.seen[it.desk, "client"] == list(range(count))
    assert sim.entry(it.shard).epoch == it.before.epoch + 1, "moved once, not back and forth"
    [found] = [
        event.fields["by"]
        for event in sim.history.of("commit")
        if (entry := it.stored(event)) is not None
        and (entry.state, entry.epoch) == ("serving", it.before.epoch + 1)
    ][:1]
    first = step in LAST_BY_THE_FIRST_LEADER
    assert found == sim.nodes[it.leader if first else successor].name
    await sim.wait_until(lambda: leaders(sim) == [successor])
    await sim.wait_until(sim.settled)
    assert sim.entry(it.shard).epoch == it.before.epoch + 1, "the successor let it be"


@pytest.mark.scenario("RG-08")
@pytest.mark.parametrize("step", ["moving stored", "the owner drains"])
@HANDING
async def test_the_next_coordinator_reverts_a_move_that_has_no_target(sim: Sim, step: str) -> None:
    it = await hand_over(sim)

    def strike() -> None:
        sim.crash(it.leader)
        sim.crash(TARGET)

    at_the_event(sim, it, STEPS[step], strike)
    LEDGER.gate_open = False
    await sim.ref(Desk, it.desk).tell(Desk.hold, "client", 0)
    await sim.wait_until(lambda: bool(LEDGER.seen))
    await sim.ref(Desk, it.desk).tell(Desk.note, "client", 1)
    await sim.wish(it.shard, TARGET)
    await sim.wait_until(lambda: bool(it.crashed_at), timeout_s=3)
    await sim.ref(Desk, it.desk).tell(Desk.note, "client", 2)
    # The handler keeps the old owner draining until the next coordinator has taken the move back.
    await sim.wait_until(lambda: sim.entry(it.shard).state == "serving")
    entry = sim.entry(it.shard)
    assert (entry.owner, entry.epoch) == (it.before.owner, it.before.epoch)
    LEDGER.gate_open = True
    await sim.ref(Desk, it.desk).ask(Desk.note, "client", 3)
    assert LEDGER.seen[it.desk, "client"] == [0, 1, 2, 3]
    assert sim.entry(it.shard).epoch == it.before.epoch


@pytest.mark.scenario("RG-08")
@HANDING
async def test_a_decision_that_never_reached_the_store_is_made_anew(sim: Sim) -> None:
    it = await hand_over(sim)
    store = sim.nodes[it.leader].store
    assert store is not None
    # The coordinator hears of the wish and decides, but nothing that it writes gets through.
    store.lost_request = 1.0
    await sim.wish(it.shard, TARGET)
    await sim.advance(sim.settings.op_timeout_s + 0.2)
    assert sim.history.counts["leader.commit_unknown"], "it decided nothing"
    assert sim.entry(it.shard) == it.before
    sim.crash(it.leader)
    await sim.wait_until(
        lambda: sim.entry(it.shard).owner == sim.nodes[TARGET].incarnation and sim.settled()
    )
    assert sim.entry(it.shard).epoch == it.before.epoch + 1
    [successor] = leaders(sim)
    assert successor != it.leader


# RG-05, the case that needs the most unlikely of delays


@pytest.mark.scenario("RG-05", partial=True)
@HANDING
async def test_a_sender_that_knows_of_a_move_first_gets_its_unstarted_mail_back(sim: Sim) -> None:
    it = await hand_over(sim)
    ref, leader = sim.ref(Desk, it.desk), sim.nodes[it.leader].name
    store = sim.nodes[OWNER].store
    assert store is not None
    LEDGER.gate_open = False
    await ref.tell(Desk.hold, "client", 0)
    for number in range(1, 6):
        await ref.tell(Desk.note, "client", number)
    await sim.advance(0.1)
    # The owner hears of the move half a second after the client, whose flush arrives before.
    store.watch_delay_s = (0.5, 0.5)
    sim.network.slow(leader, 0.5)
    await sim.wish(it.shard, TARGET)
    await sim.advance(0.1)
    assert sim.entry(it.shard).state == "moving"
    early = [event.fields["n"] for event in sim.history.of("return")]
    for number in range(6, 9):
        await ref.tell(Desk.note, "client", number)
    assert not has_taken(sim, it, "draining")
    # From now on it is the other way round: the new home is known long before mail comes back.
    sim.network.slow("client", 0.3)
    await sim.wait_until(lambda: has_taken(sim, it, "draining"))
    sim.network.slow(leader, 0.0)
    LEDGER.gate_open = True
    await sim.wait_until(lambda: len(LEDGER.seen[it.desk, "client"]) == 9)
    assert LEDGER.seen[it.desk, "client"] == list(range(9))
    assert len(early) == 5
