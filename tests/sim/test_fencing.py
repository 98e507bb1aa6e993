"""Processes that stop for longer than their lease and wake up after others took over (DX-01,
DX-15): what they had under way, and what piled up for them, changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from domicile import (
    DomicileError,
    Entity,
    EventSourced,
    MaybeExecuted,
    Settings,
    handler,
)
from domicile.core.ids import ShardKey
from domicile.core.state.keys import LEADER_KEY, MAP
from domicile.core.state.txn import Condition, Conflict, Outcome, Write
from domicile.ports.journal import Batch, WriteRefused, Written
from domicile.testing import Event, Sim, simulated
from domicile.testing.sim.calls import Faults

ROLE = "default"
TTL_S = 6.0


# DX-01: a coordinator


class Page(Entity, name="page"):
    @handler
    async def turn(self) -> str:
        return self.id


CANDIDATES, OWNER, TARGET = (0, 1), 2, 3


@dataclass(frozen=True)
class Tried:
    """A commit that reached the store: who sent it, when it arrived, what became of it."""

    at: float
    keys: tuple[bytes, ...]
    outcome: Outcome


def watch_commits(sim: Sim, node: int) -> list[Tried]:
    """Note every commit of one node that arrives at the store, refused ones included."""
    process = sim.nodes[node]
    assert process.node is not None
    assert process.node.life is not None
    client = process.node.life.member._store._backend  # type: ignore[attr-defined]
    commit = client.commit
    tried: list[Tried] = []

    async def noted(conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        outcome: Outcome = await commit(conditions, writes)
        tried.append(Tried(sim.world.now, tuple(write.key for write in writes), outcome))
        return outcome

    client.commit = noted
    return tried


def slow_down_after_news(sim: Sim, store: Faults) -> None:
    """Once the next change of the store is on its way to a node, let its calls take ages."""
    record = sim.history.event
    news = 0

    def event(kind: str, /, **fields: Any) -> None:
        nonlocal news
        record(kind, **fields)
        if kind == "commit" and fields["by"] == "operator":
            news += 1
            if news == 1:
                sim.world.call_at(sim.world.now + 0.0001, slow_down)

    def slow_down() -> None:
        store.delay_s = (2 * TTL_S, 2 * TTL_S)

    sim.history.event = event  # type: ignore[method-assign]


def leaders(sim: Sim) -> list[int]:
    """The nodes that act as coordinator now."""
    return [
        process.index
        for process in sim.nodes
        if process.up
        and process.loop is not None
        and not process.loop.frozen
        and process.node
        and process.node.life
        and process.node.life.control.leading
    ]


def stored_by(sim: Sim, node: int, since: float) -> list[Event]:
    """What a node changed in the map since a time."""
    return [
        event
        for event in sim.history.of("commit")
        if event.fields["by"] == sim.nodes[node].name
        and event.at >= since
        and any(key.startswith(MAP) for key, *_ in event.fields["puts"])
    ]


def homes_on(sim: Sim, node: int) -> list[bool]:
    """Per shard whether the store still names a node's incarnation."""
    me = sim.nodes[node].incarnation
    return [sim.entry(ShardKey(ROLE, number)).owner == me for number in range(8)]


def at_home(sim: Sim, shard: ShardKey, node: int) -> bool:
    """Whether everything is served, and a shard by this node."""
    return sim.settled() and sim.entry(shard).owner == sim.nodes[node].incarnation


def map_commits(tried: Sequence[Tried]) -> list[Tried]:
    return [one for one in tried if any(key.startswith(MAP) for key in one.keys)]


COORDINATED = simulated(
    entities=[Page], nodes=4, seeds=8, settings=Settings(shards=8), candidates=CANDIDATES
)


@pytest.mark.scenario("DX-01", partial=True)
@pytest.mark.parametrize("moved", [True, False], ids=["shard moved", "map untouched"])
@COORDINATED
async def test_a_commit_of_a_deposed_coordinator_is_refused_by_the_store(
    sim: Sim, moved: bool
) -> None:
    """`moved`: whether the successor rewrote the very entry that the late commit is about."""
    shard = ShardKey(ROLE, 0)
    [old] = leaders(sim)
    await sim.drain(old)
    await sim.wish(shard, OWNER)
    await sim.wait_until(lambda: at_home(sim, shard, OWNER) and not any(homes_on(sim, old)))
    await sim.advance(2.0)
    store = sim.nodes[old].store
    assert store is not None
    tried = watch_commits(sim, old)
    # It hears of the wish, decides, and stops while its commit is on a very slow way to the store.
    usual, wished_at = store.delay_s, sim.world.now
    slow_down_after_news(sim, store)
    await sim.wish(shard, TARGET)
    await sim.advance(0.1)
    assert sim.entry(shard).state == "serving"
    sim.freeze(old)
    store.delay_s = usual
    successor = next(node for node in CANDIDATES if node != old)
    if not moved:
        await sim.wish(shard, None)
    await sim.wait_until(lambda: leaders(sim) == [successor])
    await sim.wait_until(lambda: at_home(sim, shard, TARGET if moved else OWNER))
    acted_at = sim.world.now
    assert acted_at < wished_at + 2 * TTL_S
    sim.thaw(old)
    await sim.advance(1.0)
    before = sim.entry(shard)
    assert before.state == "serving"
    assert not map_commits(tried)
    await sim.advance(2 * TTL_S)
    [late] = map_commits(tried)
    assert late.at > acted_at
    assert isinstance(late.outcome, Conflict)
    assert late.outcome.key == LEADER_KEY
    assert sim.entry(shard) == before
    assert not stored_by(sim, old, wished_at)


@pytest.mark.scenario("DX-01", partial=True)
@COORDINATED
async def test_a_coordinator_that_wakes_up_with_work_at_hand_does_none_of_it(sim: Sim) -> None:
    shard = ShardKey(ROLE, 0)
    await sim.wish(shard, OWNER)
    await sim.wait_until(lambda: at_home(sim, shard, OWNER))
    [old] = leaders(sim)
    incarnation = sim.nodes[old].incarnation
    tried = watch_commits(sim, old)
    await sim.wish(shard, TARGET)
    await sim.wait_until(lambda: sim.entry(shard).state == "moving")
    # The release, and the news of everything after it, will wait in its sockets.
    sim.freeze(old)
    frozen_at = sim.world.now
    successor = next(node for node in CANDIDATES if node != old)
    await sim.wait_until(lambda: leaders(sim) == [successor] and at_home(sim, shard, TARGET))
    await sim.wait_until(lambda: not any(homes_on(sim, old)))
    # And a new wish: whoever still thinks that it leads would act on it.
    await sim.wish(shard, OWNER)
    await sim.wait_until(lambda: at_home(sim, shard, OWNER))
    assert [
        event
        for event in sim.history.of("released")
        if event.at > frozen_at and event.fields["shard"] == shard.shard
    ], "nobody had anything to say to it"
    loop = sim.nodes[old].loop
    assert loop is not None
    assert len(loop._parked) > 10
    told_before = len(list(sim.history.of("told")))
    sim.thaw(old)
    thawed_at = sim.world.now
    await sim.wait_until(lambda: sim.nodes[old].incarnation not in (None, incarnation))
    await sim.advance(3.0)
    await sim.wait_until(sim.settled)
    assert [
        event
        for event in sim.history.of("deposed")
        if event.fields["inc"] == incarnation and event.at >= thawed_at
    ]
    assert not [one for one in map_commits(tried) if one.at >= frozen_at]
    assert not stored_by(sim, old, frozen_at)
    assert not [
        event
        for event in list(sim.history.of("told"))[told_before:]
        if event.fields["inc"] == incarnation
    ]
    assert sim.entry(shard).owner == sim.nodes[OWNER].incarnation
    assert leaders(sim) == [successor]


# DX-01: a node


@dataclass(frozen=True)
class Wrote:
    text: str


class Diary(EventSourced[list[str], Wrote], name="diary"):
    @staticmethod
    def initial(id: str, /) -> list[str]:
        return []

    @staticmethod
    def apply(state: list[str], event: Wrote, /) -> list[str]:
        return [*state, event.text]

    @handler
    async def write(self, text: str, pause_s: float = 0.0) -> list[str]:
        await self.state()
        if pause_s:
            await asyncio.sleep(pause_s)
        return await self.persist(Wrote(text))

    @handler(shared=True)
    async def read(self) -> list[str]:
        return await self.state()


DIARIES = simulated(entities=[Diary], nodes=3, seeds=10, settings=Settings(shards=4))


def watch_writes(sim: Sim) -> list[tuple[float, str, Written | WriteRefused]]:
    """Note what the journal answers to every write: when, of which owner, what."""
    journal = sim.servers.journal
    write = journal.write
    answers: list[tuple[float, str, Written | WriteRefused]] = []

    async def noted(batch: Batch) -> Sequence[Written | WriteRefused]:
        found = await write(batch)
        answers.extend((sim.world.now, batch.claims[0].owner, answer) for answer in found)
        return found

    journal.write = noted  # type: ignore[method-assign]
    return answers


@pytest.mark.scenario("DX-01", partial=True)
@pytest.mark.parametrize("under_way", [True, False], ids=["append under way", "append to come"])
@DIARIES
async def test_a_node_that_wakes_up_behind_its_successor_appends_nothing(
    sim: Sim, under_way: bool
) -> None:
    answers = watch_writes(sim)
    diary = sim.ref(Diary, "d")
    assert await diary.ask(Diary.write, "one") == ["one"]
    old = sim.owner(Diary, "d")
    incarnation = sim.nodes[old].incarnation
    assert incarnation is not None
    journal = sim.nodes[old].journal
    assert journal is not None
    usual = journal.delay_s
    if under_way:
        # The append of "lost" leaves the node, and is on its way for longer than the lease.
        journal.delay_s = (2 * TTL_S, 2 * TTL_S)
    pause_s = 0.0 if under_way else 1.0
    lost = asyncio.ensure_future(
        diary.options(timeout_s=60).ask(Diary.write, "lost", pause_s=pause_s)
    )
    await sim.wait_until(lambda: writes_started(sim) == 2)
    await sim.advance(0.1)
    assert len(answers) == 1
    sim.freeze(old)
    frozen_at = sim.world.now
    journal.delay_s = usual

    def moved_on() -> bool:
        return sim.entry(sim.shard(Diary, "d")).owner not in ("", incarnation)

    await sim.wait_until(moved_on)
    new = sim.owner(Diary, "d")
    assert new != old
    assert await diary.ask(Diary.write, "two") == ["one", "two"]
    assert sim.world.now < frozen_at + 2 * TTL_S
    sim.thaw(old)
    await sim.wait_until(lambda: sim.nodes[old].incarnation not in (None, incarnation))
    await sim.advance(2 * TTL_S)
    with pytest.raises(MaybeExecuted):
        await lost
    stale = [answer for at, owner, answer in answers if owner == incarnation and at > frozen_at]
    if under_way:
        [refused] = stale
        assert isinstance(refused, WriteRefused)
        assert refused.why == "fenced"
    else:
        assert stale == []
    assert [event.text for event in sim.events(Diary, "d")] == ["one", "two"]
    assert await diary.ask(Diary.write, "three") == ["one", "two", "three"]
    # Back home at the node that had slept: its memory is not what it was before.
    await sim.wish(sim.shard(Diary, "d"), old)
    await sim.wait_until(lambda: sim.settled() and sim.owner(Diary, "d") == old)
    assert await diary.ask(Diary.read) == ["one", "two", "three"]


def writes_started(sim: Sim) -> int:
    return sum(event.fields["method"] == "write" for event in sim.history.of("start"))


# DX-15


class Clerk(Entity, name="clerk"):
    """Quick and slow work, each of which is visible if it goes on too late."""

    @handler
    async def quick(self, number: int) -> int:
        return number

    @handler
    async def slow(self, number: int) -> int:
        await asyncio.sleep(0.5)
        await asyncio.sleep(0.0)
        return number

    @handler(shared=True)
    async def patient(self, number: int) -> int:
        for _ in range(20):
            await asyncio.sleep(0.5)
        return number

    @handler
    async def curious(self, number: int, other: str) -> int:
        await asyncio.sleep(0.2)
        return await self.ref(Clerk, other).ask(Clerk.slow, number)


CLERKS = 150
BUSY = 0
"""The node that is stopped."""


class Crowd:
    """Asks from the client and all other nodes, without an end until told."""

    def __init__(self) -> None:
        self.over = False
        self.running = 0
        self.answers = 0
        self.failures: list[DomicileError] = []

    async def press(self, sim: Sim, node: object, seed: str) -> None:
        """One sender: a new ask every few milliseconds, whatever became of the earlier ones."""
        random = sim.world.stream(seed)
        ref = node.ref  # type: ignore[attr-defined]
        self.running += 1
        async with asyncio.TaskGroup() as group:
            while not self.over:
                clerk = ref(Clerk, f"c{random.randrange(CLERKS)}").options(timeout_s=30)
                other = f"o{random.randrange(CLERKS)}"
                number = random.randrange(1_000)
                kind = random.random()
                if kind < 0.5:
                    ask = clerk.ask(Clerk.quick, number)
                elif kind < 0.6:
                    ask = clerk.ask(Clerk.slow, number)
                elif kind < 0.9:
                    ask = clerk.ask(Clerk.patient, number)
                else:
                    ask = clerk.ask(Clerk.curious, number, other)
                group.create_task(self._one(ask))
                await asyncio.sleep(0.03)
        self.running -= 1

    async def _one(self, ask: object) -> None:
        try:
            await ask  # type: ignore[misc]
            self.answers += 1
        except DomicileError as error:
            self.failures.append(error)


def deadline(sim: Sim, incarnation: str) -> float:
    """L1: how long an incarnation may act, from its acknowledged renewals alone."""
    return max(
        event.fields["sent_at"] + event.fields["ttl"] - event.fields["margin"]
        for event in sim.history.of("renewed")
        if event.fields["inc"] == incarnation
    )


def of(sim: Sim, incarnation: str, *kinds: str) -> list[Event]:
    return [event for event in sim.history.of(*kinds) if event.fields["inc"] == incarnation]


async def freeze_in_the_middle(sim: Sim, incarnation: str) -> float:
    """Stop a node right after it took a message into a mailbox: its turn is next; when."""
    record = sim.history.event
    frozen: list[float] = []

    def event(kind: str, /, **fields: Any) -> None:
        record(kind, **fields)
        mine = kind == "accept" and fields["inc"] == incarnation and fields["depth"] == 1
        if mine and not frozen:
            frozen.append(sim.world.now)
            sim.freeze(BUSY)

    sim.history.event = event  # type: ignore[method-assign]
    await sim.wait_until(lambda: bool(frozen))
    return frozen[0]


@pytest.mark.scenario("DX-15", partial=True)
@pytest.mark.parametrize(
    "late_s", [0.0, 0.2, 0.7, 5.0], ids=["at it", "within the stop budget", "past it", "long past"]
)
@simulated(entities=[Clerk], nodes=3, seeds=3, settings=Settings(shards=6))
async def test_nothing_starts_goes_on_or_answers_past_the_deadline(sim: Sim, late_s: float) -> None:
    """`late_s`: how long after the deadline the node wakes up."""
    crowd = Crowd()
    pressing = asyncio.ensure_future(crowd.press(sim, sim, "client crowd"))
    for node in range(3):
        sim.spawn(node, lambda node, name=f"crowd {node}": crowd.press(sim, node, name))
    await sim.advance(2.0)
    incarnation = sim.nodes[BUSY].incarnation
    assert incarnation is not None
    process = sim.nodes[BUSY]
    assert process.loop is not None
    assert process.node is not None
    assert process.node.life is not None
    frozen_at = await freeze_in_the_middle(sim, incarnation)
    suspended = len(process.node.life.runtime.suspended)
    assert suspended > 10, "no handler is suspended"
    until = deadline(sim, incarnation)
    assert until > frozen_at
    sim.world.call_at(until + late_s, lambda: sim.thaw(BUSY))
    await sim.advance(until - sim.world.now - 0.001)
    piled_up = [
        event
        for event in sim.history.of("write")
        if event.fields["to"] == incarnation and event.at > frozen_at
    ]
    assert len(piled_up) > 50, "its sockets are empty"
    assert len(process.loop._parked) > 50, "its sockets are empty"
    await sim.wait_until(lambda: process.incarnation not in (None, incarnation))
    await sim.advance(1.0)
    crowd.over = True
    await pressing
    await sim.wait_until(lambda: crowd.running == 0, timeout_s=60)

    assert deadline(sim, incarnation) == until, "it was renewed in its sleep"
    for event in of(sim, incarnation, "start", "resume", "reply", "accept", "taken"):
        assert event.at < until, f"{event.kind} {event.at - until:.3f} s past the deadline"
    # Until it fell asleep it did all of these: the silence afterwards is no accident.
    for kind in ("start", "resume", "reply", "accept", "taken"):
        assert of(sim, incarnation, kind)
    ends = [event.fields["how"] for event in of(sim, incarnation, "finish") if event.at >= until]
    expected = "cancelled" if late_s < 0.5 else "abandoned"
    assert ends.count(expected) == suspended
    assert [event.fields["reason"] for event in of(sim, incarnation, "fenced")]
    # Nobody is left without an answer, and those who may have been heard know that (I9).
    assert any(isinstance(failure, MaybeExecuted) for failure in crowd.failures)
    lives = [
        event.fields["inc"]
        for event in sim.history.of("life")
        if event.fields["node"] == process.name
    ]
    assert lives[0] == incarnation
    assert lives[-1] == process.incarnation != incarnation
    await sim.wish(ShardKey(ROLE, 0), BUSY)
    await sim.wait_until(
        lambda: sim.settled() and sim.entry(ShardKey(ROLE, 0)).owner == process.incarnation
    )
    at_home = [f"c{n}" for n in range(400) if sim.shard(Clerk, f"c{n}").shard == 0]
    assert await sim.ref(Clerk, at_home[0]).ask(Clerk.quick, 1) == 1
