"""What an entity can count on at its home, seen through whole simulated clusters."""

from __future__ import annotations

import asyncio
import gc
import inspect
from datetime import timedelta

import pytest
from room_lab import (
    FEW,
    LOG,
    SEEDS,
    Alarmed,
    Hesitant,
    Room,
    Sleeper,
    Stubborn,
    cell_of,
    move,
    notes,
)

from domicile import (
    Entity,
    HandlerFailed,
    Node,
    NotExecuted,
    Settings,
    Unavailable,
    handler,
)
from domicile.entity.running.workers import SPARE
from domicile.testing import Sim, simulated
from domicile.testing.sim.clock import EPOCH
from domicile.testing.sim.simulated import run_simulation
from domicile.testing.sim.tasks import tasks_of

# lifecycle


@simulated(entities=[Room], nodes=2, seeds=SEEDS, settings=FEW)
async def test_on_start_comes_first_and_on_stop_last_at_each_home(sim: Sim) -> None:
    LOG.clear()
    room = sim.ref(Room, "r")
    assert await room.ask(Room.enter) == 1
    assert await room.ask(Room.enter) == 2
    await move(sim, Room, "r")
    assert await room.ask(Room.enter) == 1, "another home, another object"
    names = [entry[0] for entry in LOG]
    assert names == ["on_start", "enter", "enter", "on_stop", "on_start", "enter"]
    old, new = LOG[0][2], LOG[4][2]
    assert [entry[2] for entry in LOG] == [old, old, old, old, new, new]
    assert new > old
    assert new == sim.entry(sim.shard(Room, "r")).epoch


@simulated(entities=[Room], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_crash_calls_no_on_stop_and_the_next_home_starts_afresh(sim: Sim) -> None:
    LOG.clear()
    room = sim.ref(Room, "r")
    await room.ask(Room.enter)
    sim.crash(sim.owner(Room, "r"))
    await sim.wait_until(sim.settled)
    assert await room.ask(Room.enter) == 1
    assert [entry[0] for entry in LOG] == ["on_start", "enter", "on_start", "enter"]


@simulated(entities=[Room], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_leaving_node_stops_its_entities(sim: Sim) -> None:
    LOG.clear()
    await sim.ref(Room, "r").ask(Room.enter)
    await sim.stop(sim.owner(Room, "r"))
    assert [entry[0] for entry in LOG] == ["on_start", "enter", "on_stop"]


@simulated(entities=[Stubborn], nodes=2, seeds=SEEDS, settings=Settings(shards=8, stop_timeout_s=2))
async def test_on_stop_has_a_deadline(sim: Sim) -> None:
    LOG.clear()
    await sim.ref(Stubborn, "s").ask(Stubborn.hello)
    before = sim.world.now
    await move(sim, Stubborn, "s")
    assert LOG == ["on_stop", "cut short"]
    assert 2.0 <= sim.world.now - before < 4.0


@simulated(entities=[Stubborn], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_failing_on_stop_does_not_hold_the_shard(sim: Sim) -> None:
    LOG.clear()
    await sim.ref(Stubborn, "fails to stop").ask(Stubborn.hello)
    before = sim.world.now
    await move(sim, Stubborn, "fails to stop")
    assert LOG == ["on_stop"]
    assert sim.world.now - before < 3.0


@simulated(
    entities=[Stubborn], nodes=2, seeds=SEEDS, settings=Settings(shards=8, handler_timeout_s=2)
)
async def test_on_start_has_a_deadline_and_nothing_ran(sim: Sim) -> None:
    """I9: the message did not reach its handler, so it is safe to retry."""
    before = sim.world.now
    with pytest.raises(NotExecuted):
        await sim.ref(Stubborn, "never starts").ask(Stubborn.hello)
    assert 2.0 <= sim.world.now - before < 3.0


@simulated(entities=[Hesitant], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_failing_on_start_answers_not_executed_and_backs_off(sim: Sim) -> None:
    LOG.clear()
    ref = sim.ref(Hesitant, "h")
    with pytest.raises(Unavailable, match="failed to start: OSError: not yet"):
        await ref.ask(Hesitant.hello)
    with pytest.raises(Unavailable, match="failed to start"):
        await ref.ask(Hesitant.hello)
    assert len(LOG) == 1, "no second try within the backoff"
    await sim.advance(0.1)
    with pytest.raises(Unavailable, match="not yet"):
        await ref.ask(Hesitant.hello)
    await sim.advance(0.12)
    with pytest.raises(Unavailable):
        await ref.ask(Hesitant.hello)
    assert len(LOG) == 2, "the backoff has doubled"
    await sim.advance(0.1)
    assert await ref.ask(Hesitant.hello) == "hello"
    assert len(LOG) == 3


@simulated(entities=[Hesitant], nodes=2, seeds=SEEDS, settings=FEW)
async def test_one_start_serves_all_who_wait_for_it(sim: Sim) -> None:
    LOG.clear()
    ref = sim.ref(Hesitant, "h")

    async def hello() -> str:
        try:
            return await ref.ask(Hesitant.hello)
        except Unavailable:
            return "unavailable"

    async def all_at_once() -> list[str]:
        async with asyncio.TaskGroup() as group:
            asks = [group.create_task(hello()) for _ in range(4)]
        return [ask.result() for ask in asks]

    assert await all_at_once() == ["unavailable"] * 4
    assert len(LOG) == 1
    LOG.extend([None, None])
    await sim.advance(0.2)
    assert await all_at_once() == ["hello"] * 4
    assert len(LOG) == 4


@simulated(entities=[Room], nodes=2, seeds=SEEDS, settings=FEW)
async def test_passivate_stops_after_the_message_and_the_next_one_starts_anew(sim: Sim) -> None:
    LOG.clear()
    room = sim.ref(Room, "r")
    await room.ask(Room.enter)
    async with asyncio.TaskGroup() as group:
        group.create_task(room.ask(Room.leave))
        queued = group.create_task(room.ask(Room.enter))
    assert queued.result() == 1
    assert [entry[0] for entry in LOG] == [
        "on_start", "enter", "leave", "on_stop", "on_start", "enter",
    ]  # fmt: skip
    await room.ask(Room.leave)
    await sim.wait_until(lambda: LOG[-1][0] == "on_stop")
    await sim.advance(0.1)
    assert cell_of(sim, Room, "r") is None


@simulated(entities=[Sleeper], nodes=2, seeds=SEEDS, settings=FEW)
async def test_an_idle_entity_is_passivated_after_its_own_time(sim: Sim) -> None:
    LOG.clear()
    ref = sim.ref(Sleeper, "s")
    for _ in range(3):
        await ref.ask(Sleeper.touch)
        await sim.advance(19)
    assert LOG == ["on_start"]
    await sim.advance(7)
    assert LOG == ["on_start", "on_stop"]
    assert cell_of(sim, Sleeper, "s") is None
    await ref.ask(Sleeper.touch)
    assert LOG == ["on_start", "on_stop", "on_start"]


@simulated(entities=[Room], nodes=2, seeds=1, settings=Settings(shards=8, idle_s=10))
async def test_idle_time_is_a_setting_for_types_without_their_own(sim: Sim) -> None:
    LOG.clear()
    await sim.ref(Room, "r").options(timeout_s=30).ask(Room.work, "long", 20)
    await sim.advance(9)
    assert LOG[-1] == ("end", "long"), "work is not idleness"
    await sim.advance(7)
    assert LOG[-1][0] == "on_stop"


# concurrency


@simulated(entities=[Room], nodes=2, seeds=SEEDS, settings=FEW)
async def test_exclusive_handlers_run_alone_and_in_order(sim: Sim) -> None:
    LOG.clear()
    room = sim.ref(Room, "r")
    async with asyncio.TaskGroup() as group:
        for name in "abc":
            group.create_task(room.ask(Room.work, name, 0.5))
    steps = [entry for entry in LOG if entry[0] != "on_start"]
    assert steps == [(verb, name) for name in "abc" for verb in ("begin", "end")]


@simulated(entities=[Room], nodes=2, seeds=SEEDS, settings=FEW)
async def test_shared_handlers_run_beside_each_other_but_not_beside_a_writer(sim: Sim) -> None:
    LOG.clear()
    room = sim.ref(Room, "r")
    async with asyncio.TaskGroup() as group:
        group.create_task(room.ask(Room.look, "r1", 1.0))
        group.create_task(room.ask(Room.look, "r2", 0.5))
        group.create_task(room.ask(Room.work, "w", 0.5))
        group.create_task(room.ask(Room.look, "r3", 0.1))
    steps = [entry for entry in LOG if entry[0] != "on_start"]
    assert steps == [
        ("begin", "r1"), ("begin", "r2"), ("end", "r2"), ("end", "r1"),
        ("begin", "w"), ("end", "w"), ("begin", "r3"), ("end", "r3"),
    ]  # fmt: skip


class Waking(Entity, name="waking"):
    """Takes a few turns of the event loop to start; its readers note their numbers."""

    async def on_start(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    @handler(shared=True)
    async def look(self, number: int) -> None:
        LOG.append(number)


@simulated(entities=[Waking], nodes=2, seeds=SEEDS, settings=FEW)
async def test_readers_that_come_while_their_entity_starts_begin_in_order(sim: Sim) -> None:
    """I5: a reader that came as the entity was up must not pass one that waited for its start."""
    LOG.clear()

    async def look(node: Node) -> None:
        waking = node.ref(Waking, "w")
        async with asyncio.TaskGroup() as group:
            for number in range(60):
                group.create_task(waking.ask(Waking.look, number))
                await asyncio.sleep(0)

    sim.spawn(sim.owner(Waking, "w"), look)
    await sim.wait_until(lambda: len(LOG) == 60)
    assert list(range(60)) == LOG


@simulated(entities=[Room], nodes=2, seeds=SEEDS, settings=FEW)
async def test_entities_do_not_wait_for_each_other(sim: Sim) -> None:
    LOG.clear()
    before = sim.world.now
    async with asyncio.TaskGroup() as group:
        for number in range(50):
            group.create_task(sim.ref(Room, f"r{number}").ask(Room.work, str(number), 2.0))
    assert sim.world.now - before < 2.5


# what an entity has


@simulated(entities=[Alarmed], nodes=2, seeds=SEEDS, settings=FEW)
async def test_after_runs_later_and_replaces_an_earlier_wish_of_that_method(sim: Sim) -> None:
    LOG.clear()
    ref = sim.ref(Alarmed, "a")
    await ref.ask(Alarmed.ring_in, 1.0, "first")
    await sim.advance(0.9)
    await ref.ask(Alarmed.ring_in, 1.0, "second")
    await sim.advance(0.9)
    assert LOG == []
    await sim.advance(0.2)
    assert LOG[0] == ("second", pytest.approx(1.0, abs=0.01))
    await sim.advance(5)
    assert len(LOG) == 1


@simulated(entities=[Alarmed], nodes=2, seeds=SEEDS, settings=FEW)
async def test_alarms_of_different_methods_are_apart_and_may_fail(sim: Sim) -> None:
    LOG.clear()
    ref = sim.ref(Alarmed, "a")
    await ref.ask(Alarmed.both)
    await sim.advance(1.5)
    assert "chime" in LOG
    assert len(LOG) == 2
    await ref.ask(Alarmed.ring_in, 0, "again")
    await sim.advance(0.1)
    assert len(LOG) == 3


@simulated(entities=[Alarmed], nodes=2, seeds=SEEDS, settings=FEW)
async def test_an_alarm_waits_for_its_turn(sim: Sim) -> None:
    LOG.clear()
    ref = sim.ref(Alarmed, "a")
    await ref.ask(Alarmed.ring_in, 0.5, "ring")
    await ref.ask(Alarmed.busy, 2)
    await sim.advance(0.1)
    assert LOG[:2] == ["busy", "free"]
    assert LOG[2] == ("ring", pytest.approx(2.0, abs=0.02))


@simulated(entities=[Alarmed], nodes=2, seeds=SEEDS, settings=FEW)
async def test_alarms_end_with_an_entity_that_passivates_itself(sim: Sim) -> None:
    LOG.clear()
    ref = sim.ref(Alarmed, "a")
    await ref.ask(Alarmed.ring_in, 1.0, "passivated")
    await ref.ask(Alarmed.leave)
    await ref.ask(Alarmed.busy, 2)
    assert LOG == ["busy", "free"]
    assert sim.history.counts["timer.lost"] == 0, "the entity wanted it"


@simulated(entities=[Room], nodes=2, seeds=1, settings=FEW, resources=notes)
async def test_resources_are_injected_and_a_missing_one_is_explained(sim: Sim) -> None:
    LOG.clear()
    room = sim.ref(Room, "r")
    assert await room.ask(Room.note) == "hello"
    with pytest.raises(HandlerFailed, match="asked for resource Missing"):
        await room.ask(Room.missing)
    assert await room.ask(Room.enter) == 1


@simulated(entities=[Room], nodes=2, seeds=SEEDS, settings=FEW)
async def test_an_entity_can_ask_others_wherever_they_live(sim: Sim) -> None:
    LOG.clear()
    ids = [f"r{number}" for number in range(6)]
    assert len({sim.owner(Room, id) for id in ids}) == 2
    for id in ids:
        assert await sim.ref(Room, "sender").ask(Room.send_to, id) == 1


def numbers(seed: int) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []

    async def body(sim: Sim) -> None:
        before = (EPOCH + timedelta(seconds=sim.world.now)).timestamp()
        for id in ("a", "b", "c"):
            found.append(await sim.ref(Room, id).ask(Room.numbers))
        after = (EPOCH + timedelta(seconds=sim.world.now)).timestamp()
        assert before < found[0][0] < found[1][0] < found[2][0] < after

    run_simulation(Sim(seed, entities=[Room], nodes=2, settings=FEW), body)
    return found


def test_time_and_randomness_of_entities_replay_from_the_seed() -> None:
    first = numbers(5)
    assert first == numbers(5)
    assert first != numbers(6)
    assert len({value for _, value in first}) == 3


# weight


@simulated(entities=[Room], nodes=2, seeds=1, settings=FEW)
async def test_an_idle_entity_owns_no_task_queue_timer_or_future(sim: Sim) -> None:
    LOG.clear()

    async def visit(count: int) -> None:
        for number in range(count):
            await sim.ref(Room, f"r{number}").ask(Room.enter)
        await sim.advance(1)

    def weigh() -> tuple[int, int]:
        gc.collect()
        tasks = sum(len(tasks_of(process.loop)) for process in sim.nodes if process.loop)
        futures = sum(isinstance(thing, asyncio.Future) for thing in gc.get_objects())
        return tasks, futures

    await visit(2)
    before = weigh()
    await visit(300)
    after = weigh()
    residents = 0
    for process in sim.nodes:
        assert process.node is not None
        assert process.node.life is not None
        for host in process.node.life.runtime.hosts.values():
            residents += len(host.cells)
            assert not host.owner.mailboxes
            assert all(
                cell.starting is None and cell.alarms is None for cell in host.cells.values()
            )
    assert residents == 300
    assert after[0] <= before[0] + 4, "workers may come, a few, for all entities together"
    assert after[1] <= before[1] + 8, "futures of the cluster itself come and go"


@simulated(entities=[Room], nodes=2, seeds=1, settings=FEW)
async def test_a_burst_of_waiting_handlers_leaves_a_bounded_pool(sim: Sim) -> None:
    LOG.clear()
    async with asyncio.TaskGroup() as group:
        for number in range(3 * SPARE):
            group.create_task(sim.ref(Room, f"r{number}").ask(Room.work, str(number), 1.0))
    await sim.advance(1)
    for process in sim.nodes:
        assert process.loop is not None
        workers = [task for task in tasks_of(process.loop) if task.get_name() == "domicile-worker"]
        assert len(workers) <= SPARE


def test_an_entity_made_by_hand_has_no_home() -> None:
    room = Room()
    for use in (lambda: room.id, lambda: room.epoch, room.now, room.passivate):
        with pytest.raises(RuntimeError, match="has no home"):
            use()


def test_simulated_tests_take_no_arguments() -> None:
    assert not inspect.signature(test_an_alarm_waits_for_its_turn).parameters
