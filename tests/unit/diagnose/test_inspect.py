"""Looking into handlers while they run, and ending them, in simulated clusters."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from room_lab import LOG, move

from domicile import Entity, MaybeExecuted, Settings, Unavailable, handler
from domicile.core.ids import EntityKey
from domicile.core.state.keys import kick_key, stuck_key
from domicile.core.state.txn import Absent, Committed, Delete, Put
from domicile.diagnose.inspect import thread_stack
from domicile.diagnose.records import (
    MOST_TURNS,
    REFRESH_S,
    KickOutcome,
    KickRecord,
    StuckRecord,
    decode_kick,
    decode_stuck,
    encode_kick,
)
from domicile.testing import Sim, simulated

SEEDS = 2
FEW = Settings(shards=8)
UNLEASED = Settings(shards=8, fencing="health")
HANG_S = 1_000.0


async def deep(levels: int) -> None:
    if levels:
        await deep(levels - 1)
    await asyncio.sleep(HANG_S)


async def ticks() -> AsyncIterator[int]:
    await asyncio.sleep(HANG_S)
    yield 1


class Mole(Entity, name="mole"):
    """Digs in and does not come out."""

    async def on_start(self) -> None:
        if self.id == "never starts":
            await asyncio.sleep(HANG_S)
        LOG.append(("on_start", self.id))

    async def on_stop(self) -> None:
        if self.id == "never stops":
            while True:
                try:
                    await asyncio.sleep(HANG_S)
                except asyncio.CancelledError:
                    LOG.append("will not stop")

    @handler
    async def hello(self) -> str:
        return "hello"

    @handler
    async def dig(self) -> None:
        await asyncio.sleep(HANG_S)

    @handler
    async def dig_deep(self, levels: int) -> None:
        async with asyncio.timeout(HANG_S):
            await deep(levels)

    @handler
    async def count(self) -> None:
        async for _ in ticks():
            pass

    @handler
    async def ask(self, other: str) -> None:
        await self.ref(Mole, other).options(timeout_s=HANG_S).ask(Mole.dig)

    @handler
    async def ring_soon(self) -> None:
        self.after(1, self.ring)

    async def ring(self) -> None:
        await asyncio.sleep(HANG_S)

    @handler(shared=True)
    async def peep(self) -> None:
        await asyncio.sleep(HANG_S)

    @handler(timeout_s=100)
    async def ignore(self, times: int) -> str:
        """Swallows this many cancellations, and does not end for any other reason."""
        try:
            for number in range(times):
                try:
                    async with asyncio.timeout(20):
                        await asyncio.sleep(HANG_S)
                except asyncio.CancelledError:
                    LOG.append(("ignored", number))
            await asyncio.sleep(HANG_S)
        finally:
            LOG.append("cleaned up")
        return "?"

    @handler(timeout_s=5)
    async def overstay(self) -> None:
        try:
            await asyncio.sleep(HANG_S)
        except asyncio.CancelledError:
            LOG.append("overstays")
            await asyncio.sleep(HANG_S)


def record_of(sim: Sim, node: int) -> StuckRecord | None:
    """What a node has said in the store."""
    incarnation = sim.nodes[node].incarnation
    assert incarnation is not None
    item = sim.servers.store.peek(stuck_key(incarnation))
    return None if item is None else decode_stuck(item.value)


async def stuck(sim: Sim, node: int = 0) -> StuckRecord:
    await sim.wait_until(lambda: record_of(sim, node) is not None, timeout_s=10)
    record = record_of(sim, node)
    assert record is not None
    return record


async def kick(sim: Sim, id: str) -> KickOutcome:
    """As the command does it; what it ends may have run, which is no fault of the cluster's."""
    sim.note_fault("kick")
    store = sim._operator_store()
    key = kick_key(sim.shard(Mole, id), EntityKey("mole", id))
    await store.grant("kick-test", 30)
    wish = encode_kick(KickRecord("eva@desk", "kick-test"))
    assert isinstance(await store.commit((Absent(key),), (Put(key, wish, "kick-test"),)), Committed)

    def answered() -> KickOutcome | None:
        item = sim.servers.store.peek(key)
        return None if item is None else decode_kick(item.value).outcome

    await sim.wait_until(lambda: answered() is not None, timeout_s=10)
    outcome = answered()
    assert outcome is not None
    await store.revoke("kick-test")
    return outcome


def spawned(sim: Sim, method: Any, *args: Any, id: str = "m") -> asyncio.Task[Any]:
    patient = sim.ref(Mole, id).options(timeout_s=500)
    return asyncio.get_running_loop().create_task(patient.ask(method, *args))


async def suspended(sim: Sim, count: int = 1) -> None:
    """Until that many handlers wait for something."""

    def now() -> int:
        lives = [process.node.life for process in sim.nodes if process.node is not None]
        return sum(len(life.runtime.suspended) for life in lives if life is not None)

    await sim.wait_until(lambda: now() >= count)


async def outcome_of(task: asyncio.Task[Any]) -> BaseException | None:
    await asyncio.wait([task], timeout=60)
    return task.exception()


# what is said


@simulated(entities=[Mole], nodes=1, seeds=SEEDS, settings=FEW)
async def test_a_late_handler_is_named_with_its_stack_and_its_queue(sim: Sim) -> None:
    began = sim.world.now
    tasks = [spawned(sim, Mole.dig_deep, 2), *(spawned(sim, Mole.hello) for _ in range(3))]
    record = await stuck(sim)
    assert sim.world.now - began < 3.5, "well within five seconds of its beginning"
    (one,) = record.turns
    assert (one.type, one.id, one.handler, one.kind) == ("mole", "m", "dig_deep", "waits")
    assert (one.role, one.shard) == sim.shard(Mole, "m")
    assert one.queue == 3
    assert 2.0 <= record.age_s(one) <= 3.0
    assert [step.rpartition(" ")[2] for step in one.stack] == [
        "Mole.dig_deep", "deep", "deep", "deep", "sleep",
    ]  # fmt: skip
    assert all("test_inspect.py:" in step for step in one.stack[:-1])
    for task in tasks:
        task.cancel()


@simulated(entities=[Mole], nodes=1, seeds=SEEDS, settings=FEW)
async def test_all_kinds_of_turns_are_told_apart(sim: Sim) -> None:
    await sim.ref(Mole, "rings").ask(Mole.ring_soon)
    tasks = [
        spawned(sim, Mole.hello, id="never starts"),
        spawned(sim, Mole.count, id="counts"),
        spawned(sim, Mole.ask, "asked", id="asks"),
    ]
    await suspended(sim, 5)
    await sim.advance(4)
    record = await stuck(sim)
    told = {one.id: (one.handler, one.stack[0].rpartition(" ")[2]) for one in record.turns}
    assert told == {
        "never starts": ("on_start", "Mole.on_start"),
        "counts": ("count", "Mole.count"),
        "asks": ("ask", "Mole.ask"),
        "asked": ("dig", "Mole.dig"),
        "rings": ("ring", "Mole.ring"),
    }
    asks = next(one for one in record.turns if one.id == "asks")
    assert "OutgoingCalls.ask" in asks.stack[1], "where it waits is in the library, and shown"
    counts = next(one for one in record.turns if one.id == "counts")
    assert any(step.endswith(" ticks") for step in counts.stack)
    for task in tasks:
        task.cancel()


@simulated(entities=[Mole], nodes=1, seeds=SEEDS, settings=FEW)
async def test_the_oldest_are_named_and_the_rest_counted(sim: Sim) -> None:
    tasks = [spawned(sim, Mole.dig, id=f"m{number}") for number in range(MOST_TURNS + 4)]
    await sim.advance(4)
    record = await stuck(sim)
    assert len(record.turns) == MOST_TURNS
    assert record.more == 4
    assert record.residents == MOST_TURNS + 4
    since = [one.since_s for one in record.turns]
    assert since == sorted(since)
    for task in tasks:
        task.cancel()


@simulated(entities=[Mole], nodes=1, seeds=SEEDS, settings=FEW)
async def test_the_record_goes_with_the_last_late_handler(sim: Sim) -> None:
    task = spawned(sim, Mole.dig)
    await stuck(sim)
    await kick(sim, "m")
    await sim.wait_until(lambda: record_of(sim, 0) is None, timeout_s=3)
    assert isinstance(await outcome_of(task), MaybeExecuted)


@simulated(entities=[Mole], nodes=2, seeds=SEEDS, settings=FEW)
async def test_the_record_goes_with_its_node(sim: Sim) -> None:
    tasks = [spawned(sim, Mole.dig, id=str(number)) for number in range(20)]
    await stuck(sim, 0)
    incarnation = sim.nodes[0].incarnation
    assert incarnation is not None
    sim.crash(0)
    await sim.wait_until(lambda: sim.servers.store.peek(stuck_key(incarnation)) is None)
    for task in tasks:
        task.cancel()


@simulated(entities=[Mole], nodes=2, seeds=SEEDS, settings=UNLEASED, locks=True)
async def test_the_record_goes_with_its_node_also_if_that_has_no_lease(sim: Sim) -> None:
    tasks = [spawned(sim, Mole.dig, id=str(number)) for number in range(20)]
    await stuck(sim, 0)
    incarnation = sim.nodes[0].incarnation
    assert incarnation is not None
    sim.crash(0)
    gone = lambda: sim.servers.store.peek(stuck_key(incarnation)) is None  # noqa: E731
    await sim.wait_until(gone, timeout_s=4 * REFRESH_S)
    for task in tasks:
        task.cancel()


@simulated(entities=[Mole], nodes=1, seeds=SEEDS, settings=FEW)
async def test_nothing_is_written_for_handlers_that_end_in_time(sim: Sim) -> None:
    before = sim.servers.store.revision
    for _ in range(20):
        task = spawned(sim, Mole.dig)
        await sim.advance(1.0)
        task.cancel()
        await kick(sim, "m")
    keys = [key for event in sim.history.events if event.kind == "commit"
            for key, _, _ in event.fields["puts"]]  # fmt: skip
    assert sim.servers.store.revision > before
    assert not [key for key in keys if key.startswith(b"stuck/")]


@simulated(entities=[Mole], nodes=1, seeds=SEEDS, settings=FEW)
async def test_a_set_that_stays_the_same_is_written_now_and_then_only(sim: Sim) -> None:
    task = spawned(sim, Mole.dig)
    await stuck(sim)
    await sim.advance(25)
    writes = [
        key for event in sim.history.events if event.kind == "commit"
        for key, _, _ in event.fields["puts"] if key.startswith(b"stuck/")
    ]  # fmt: skip
    assert len(writes) == 3, "at once, after ten and after twenty seconds"
    task.cancel()


def test_the_stack_of_a_thread_is_that_of_its_function() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def wait_here() -> None:
        inside.set()
        go_on.wait()

    thread = threading.Thread(target=wait_here)
    thread.start()
    try:
        assert inside.wait(10)
        assert thread.ident is not None
        stack = thread_stack(thread.ident)
    finally:
        go_on.set()
        thread.join()
    assert any("test_inspect.py:" in line and "wait_here" in line for line in stack)
    assert thread_stack(-1) == []


# kicks


@simulated(entities=[Mole], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_kick_cancels_the_handler_and_the_next_message_runs(sim: Sim) -> None:
    LOG.clear()
    task, then = spawned(sim, Mole.dig), spawned(sim, Mole.hello)
    await suspended(sim)
    assert await kick(sim, "m") == KickOutcome(ended=1)
    error = await outcome_of(task)
    assert isinstance(error, MaybeExecuted)
    assert "kicked by an operator" in str(error)
    assert await then == "hello"
    assert LOG == [("on_start", "m")], "the entity lives on"


@simulated(entities=[Mole], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_kick_ends_all_handlers_of_that_entity_and_no_other(
    sim: Sim, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    shared = [spawned(sim, Mole.peep) for _ in range(3)]
    other = spawned(sim, Mole.dig, id="other")
    await suspended(sim, 4)
    assert await kick(sim, "m") == KickOutcome(ended=3)
    for task in shared:
        assert isinstance(await outcome_of(task), MaybeExecuted)
    await sim.advance(1)
    assert not other.done()
    assert await kick(sim, "other") == KickOutcome(ended=1)
    assert isinstance(await outcome_of(other), MaybeExecuted)
    assert "kick: eva@desk ends 3 handlers of mole 'm'" in caplog.text
    assert "kick: eva@desk ends 1 handler of mole 'other'" in caplog.text


@simulated(entities=[Mole], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_kick_of_what_does_not_run_says_so(sim: Sim) -> None:
    assert await sim.ref(Mole, "m").ask(Mole.hello) == "hello"
    assert await kick(sim, "m") == KickOutcome()
    assert await sim.ref(Mole, "m").ask(Mole.hello) == "hello"


@simulated(entities=[Mole], nodes=2, seeds=SEEDS, settings=FEW)
async def test_an_entity_that_does_not_start_is_kicked_and_did_not_run(sim: Sim) -> None:
    task = spawned(sim, Mole.hello, id="never starts")
    await suspended(sim)
    assert await kick(sim, "never starts") == KickOutcome(ended=1)
    error = await outcome_of(task)
    assert isinstance(error, Unavailable)
    assert "kicked" in str(error)


@simulated(entities=[Mole], nodes=2, seeds=SEEDS, settings=FEW)
async def test_what_ignores_its_cancellation_is_given_up_by_the_second_kick(sim: Sim) -> None:
    LOG.clear()
    task, then = spawned(sim, Mole.ignore, 3), spawned(sim, Mole.hello)
    await suspended(sim)
    assert await kick(sim, "m") == KickOutcome(ignoring=1, waiting=1)
    assert ("ignored", 0) in LOG
    assert not task.done()
    assert await kick(sim, "m") == KickOutcome(dropped=1)
    error = await outcome_of(task)
    assert isinstance(error, MaybeExecuted)
    assert "kicked by an operator" in str(error)
    assert await then == "hello"
    # Neither its own timeout nor anything else resumes it, and nobody else is hit by that.
    long = spawned(sim, Mole.dig, id="m")
    await sim.advance(40)
    assert LOG == [("on_start", "m"), ("ignored", 0), ("on_start", "m")]
    long.cancel()


@simulated(entities=[Mole], nodes=2, seeds=SEEDS, settings=FEW)
async def test_what_ignored_its_timeout_is_cancelled_once_more_first(sim: Sim) -> None:
    LOG.clear()
    task = spawned(sim, Mole.overstay)
    await sim.wait_until(lambda: "overstays" in LOG)
    assert await kick(sim, "m") == KickOutcome(ended=1)
    assert isinstance(await outcome_of(task), MaybeExecuted)
    assert await sim.ref(Mole, "m").ask(Mole.hello) == "hello"


@simulated(entities=[Mole], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_shard_that_can_not_be_handed_over_is_freed_by_kicks(sim: Sim) -> None:
    LOG.clear()
    assert await sim.ref(Mole, "never stops").ask(Mole.hello) == "hello"
    to = (sim.owner(Mole, "never stops") + 1) % 2
    await sim.wish(sim.shard(Mole, "never stops"), to)
    await sim.wait_until(lambda: "will not stop" in LOG)
    assert await kick(sim, "never stops") == KickOutcome(ignoring=1)
    assert await kick(sim, "never stops") == KickOutcome(dropped=1)
    await sim.wait_until(lambda: sim.owner(Mole, "never stops") == to and sim.settled())


@simulated(entities=[Mole], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_wish_that_nobody_can_read_or_that_came_to_the_wrong_node_is_left_alone(
    sim: Sim,
) -> None:
    task = spawned(sim, Mole.dig)
    await suspended(sim)
    store, key = sim._operator_store(), kick_key(sim.shard(Mole, "m"), EntityKey("mole", "m"))
    await store.commit((), (Put(key, b"no JSON"),))
    await sim.advance(3)
    assert not task.done()
    done = msgspec.structs.replace(KickRecord("eva", "x"), outcome=KickOutcome(ended=1))
    await store.commit((), (Put(key, encode_kick(done)),))
    await sim.advance(3)
    assert not task.done(), "an answered wish is no wish"
    task.cancel()
    await kick_away(sim, key)
    await move(sim, Mole, "m")


async def kick_away(sim: Sim, key: bytes) -> None:
    """End what runs, after the wish that stood in its place."""
    await sim._operator_store().commit((), (Delete(key),))
    await kick(sim, "m")
