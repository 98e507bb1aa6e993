"""What a caller learns of its message, whatever became of it (I9, I6)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from room_lab import (
    FEW,
    LOG,
    SEEDS,
    Broke,
    Room,
    Sleeper,
    begun,
    submitted,
)

from domicile import (
    HandlerFailed,
    MaybeExecuted,
    NotExecuted,
    Overloaded,
    Settings,
    Unavailable,
    connect,
)
from domicile.testing import Sim, simulated

# outcomes


@simulated(entities=[Room], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_failing_handler_answers_and_leaves_the_entity_up(sim: Sim) -> None:
    LOG.clear()
    room = sim.ref(Room, "r")
    with pytest.raises(HandlerFailed, match=r"KeyError.*no such chair") as failed:
        await room.ask(Room.fail)
    assert "room_lab:" in failed.value.remote_traceback
    assert failed.value.remote_traceback.endswith(" in Room.fail")
    assert await room.ask(Room.enter) == 11
    assert [entry[0] for entry in LOG] == ["on_start", "enter"]


@simulated(entities=[Room], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_tell_to_a_failing_handler_is_nobodys_error(sim: Sim) -> None:
    LOG.clear()
    room = sim.ref(Room, "r")
    await room.tell(Room.fail)
    await room.tell(Room.pay, 3)
    assert await room.ask(Room.enter) == 11
    assert not [event for event in sim.history.events if event.kind == "lost"]


@simulated(entities=[Room], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_rejection_crosses_the_wire_as_itself(sim: Sim) -> None:
    LOG.clear()
    for id in ("a", "b", "c", "d"):
        with pytest.raises(Broke) as caught:
            await sim.ref(Room, id).ask(Room.pay, 7)
        assert caught.value.args == (7, "euros")
        assert caught.value.missing == 7


@simulated(entities=[Room], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_handler_has_a_time_limit_of_its_own(sim: Sim) -> None:
    LOG.clear()
    room = sim.ref(Room, "r")
    await room.ask(Room.hurry, 1.9)
    before = sim.world.now
    with pytest.raises(HandlerFailed, match="more than 2 s"):
        await room.ask(Room.hurry, 5)
    assert 2.0 <= sim.world.now - before < 2.1
    assert await room.ask(Room.enter) == 1, "the entity is up and free"


@simulated(entities=[Room], nodes=2, seeds=1, settings=Settings(shards=8, handler_timeout_s=3))
async def test_the_nodes_time_limit_holds_for_the_others(sim: Sim) -> None:
    LOG.clear()
    with pytest.raises(HandlerFailed, match="more than 3 s"):
        await sim.ref(Room, "r").ask(Room.work, "long", 9)
    assert LOG[-1] == ("cancelled", "long")


@simulated(entities=[Room], nodes=2, seeds=SEEDS, settings=FEW)
async def test_an_answer_that_is_late_means_maybe_executed(sim: Sim) -> None:
    LOG.clear()
    room = sim.ref(Room, "r").options(timeout_s=1)
    before = sim.world.now
    with pytest.raises(MaybeExecuted, match="may have run"):
        await room.ask(Room.work, "long", 3)
    assert sim.world.now - before == pytest.approx(1.0)
    await sim.wait_until(lambda: ("end", "long") in LOG)


@simulated(entities=[Room], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_message_that_was_never_written_is_unavailable(sim: Sim) -> None:
    LOG.clear()
    room = sim.ref(Room, "r")
    shard = sim.shard(Room, "r")
    async with asyncio.TaskGroup() as group:
        group.create_task(room.ask(Room.work, "long", 5))
        await begun(sim, "long")
        await sim.wish(shard, 1 - sim.owner(Room, "r"))
        await sim.wait_until(lambda: sim.entry(shard).state == "moving")
        await sim.advance(0.1)
        with pytest.raises(Unavailable, match="retry is safe"):
            await room.options(timeout_s=1).ask(Room.enter)
    await sim.wait_until(sim.settled)
    await sim.advance(5)
    assert not [entry for entry in LOG if entry[0] == "enter"]


@simulated(entities=[Room], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_message_whose_time_ran_out_in_the_mailbox_never_starts(sim: Sim) -> None:
    LOG.clear()
    room = sim.ref(Room, "r")
    async with asyncio.TaskGroup() as group:
        group.create_task(room.ask(Room.work, "long", 3))
        await begun(sim, "long")
        with pytest.raises(MaybeExecuted):
            await room.options(timeout_s=1).ask(Room.enter)
    await sim.advance(1)
    assert not [entry for entry in LOG if entry[0] == "enter"]


@simulated(entities=[Room], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_cancelled_ask_is_forgotten(sim: Sim) -> None:
    LOG.clear()
    room = sim.ref(Room, "r")
    ask = asyncio.get_running_loop().create_task(room.ask(Room.work, "long", 2))
    await begun(sim, "long")
    ask.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ask
    await sim.wait_until(lambda: ("end", "long") in LOG)
    assert await room.ask(Room.enter) == 1
    outcomes = [e.fields["outcome"] for e in sim.history.events if e.kind == "outcome"]
    assert outcomes == ["maybe_executed", "ok"]


@simulated(entities=[Room], nodes=2, seeds=SEEDS, settings=FEW)
async def test_an_ask_cancelled_before_it_was_written_never_runs(sim: Sim) -> None:
    LOG.clear()
    room = sim.ref(Room, "r")
    shard = sim.shard(Room, "r")
    async with asyncio.TaskGroup() as group:
        group.create_task(room.ask(Room.work, "long", 3))
        await begun(sim, "long")
        await sim.wish(shard, 1 - sim.owner(Room, "r"))
        await sim.wait_until(lambda: sim.entry(shard).state == "moving")
        await sim.advance(0.1)
        queued = group.create_task(room.ask(Room.enter))
        await sim.advance(0.1)
        queued.cancel()
    await sim.wait_until(sim.settled)
    assert await room.ask(Room.text, "abc") == 3
    assert not [entry for entry in LOG if entry[0] == "enter"]


# refused before anything is sent


@simulated(entities=[Room], nodes=2, seeds=1, settings=FEW)
async def test_a_method_without_handler_is_refused_before_anything_is_sent(sim: Sim) -> None:
    room = sim.ref(Room, "r")
    for call in (room.ask, room.tell):
        with pytest.raises(TypeError, match="not marked with @handler"):
            await call(Room.hidden)
    assert submitted(sim, "hidden") == 0


@simulated(entities=[Room], nodes=2, seeds=1, settings=Settings(shards=8, message_bytes=1_000))
async def test_a_message_that_is_too_large_is_not_executed(sim: Sim) -> None:
    LOG.clear()
    room = sim.ref(Room, "r")
    assert await room.ask(Room.text, "x" * 500) == 500
    for call in (room.ask, room.tell):
        with pytest.raises(NotExecuted, match="the limit is 1,000"):
            await call(Room.text, "x" * 1_001)
    assert submitted(sim, "text") == 1


@simulated(entities=[Room], nodes=2, seeds=1, settings=FEW)
async def test_a_type_that_no_node_has_is_unavailable(sim: Sim) -> None:
    with pytest.raises(Unavailable, match="no node has registered entity type 'sleeper'") as caught:
        await sim.ref(Sleeper, "s").ask(Sleeper.touch)
    assert "store" not in str(caught.value)


def test_a_client_that_finds_no_node_at_all_is_told_to_look_at_its_store() -> None:
    async def alone() -> None:
        async with connect("memory://nobody-is-here") as client:
            nobody = client.ref(Sleeper, "s").options(timeout_s=0.1)
            with pytest.raises(Unavailable, match=r"no node of role 'default' .* another store"):
                await nobody.ask(Sleeper.touch)

    asyncio.run(alone())


@simulated(entities=[Room], nodes=2, seeds=SEEDS, settings=Settings(shards=8, mailbox=3))
async def test_a_full_mailbox_is_overloaded(sim: Sim) -> None:
    """I6."""
    LOG.clear()
    room = sim.ref(Room, "r")
    refused = 0
    async with asyncio.TaskGroup() as group:
        group.create_task(room.ask(Room.work, "long", 2))
        await begun(sim, "long")
        asks = [group.create_task(_or_overloaded(room.ask(Room.enter))) for _ in range(5)]
        await sim.advance(1)
        refused = sum(ask.done() for ask in asks)
    assert refused == 2
    assert [ask.result() for ask in asks] == [1, 2, 3, None, None]


@simulated(entities=[Room], nodes=2, seeds=SEEDS, settings=Settings(shards=8, buffer=3))
async def test_a_full_buffer_is_overloaded(sim: Sim) -> None:
    """I6."""
    LOG.clear()
    room = sim.ref(Room, "r")
    shard = sim.shard(Room, "r")
    async with asyncio.TaskGroup() as group:
        group.create_task(room.ask(Room.work, "long", 2))
        await begun(sim, "long")
        await sim.wish(shard, 1 - sim.owner(Room, "r"))
        await sim.wait_until(lambda: sim.entry(shard).state == "moving")
        await sim.advance(0.1)
        for _ in range(3):
            group.create_task(room.ask(Room.enter))
        await sim.advance(0.1)
        with pytest.raises(Overloaded, match="slow down"):
            await room.tell(Room.enter)
    assert await room.ask(Room.enter) == 4


async def _or_overloaded(ask: Any) -> Any:
    try:
        return await ask
    except Overloaded:
        return None
