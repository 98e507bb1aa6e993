"""Handlers that begin within the callback or the call that brings their message: what may not
change by that. Asks are made inside the process that is home to the entity, where they run within
the call, or by a client, whose messages come in frames."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import desk_lab
import pytest
from desk_lab import (
    FEW,
    LAPSE_S,
    LOG,
    SEEDS,
    SEEN,
    Desk,
    Farewell,
    Fussy,
    Unfit,
    inside,
    runtime_of,
    warm,
)

from domicile import HandlerFailed, MaybeExecuted, Node, NotExecuted, Settings
from domicile.core.handoff.pending import Pending
from domicile.entity.hosting.cell import current_turn
from domicile.entity.model.ref import Ref
from domicile.entity.sending.outgoing_call import OutgoingCall
from domicile.testing import Sim, simulated
from domicile.testing.sim.simulated import run_simulation

# one at a time


@pytest.mark.parametrize("via", ["", "other"])
@simulated(entities=[Desk], nodes=1, seeds=SEEDS, settings=FEW)
async def test_shared_handlers_within_each_other_keep_out_an_exclusive_one(
    sim: Sim, via: str
) -> None:
    async def work(node: Node) -> None:
        if via:
            await warm(node, via)
        desk = await warm(node)
        outer = asyncio.ensure_future(desk.ask(Desk.look_twice, via, 0.1))
        await asyncio.sleep(0.5)
        assert LOG == ["outer begins", "look begins", "look ends"]
        await desk.ask(Desk.slow, 0.0)
        assert LOG[3:] == ["outer ends", "slow begins", "slow ends"]
        await outer

    await inside(sim, work)


@simulated(entities=[Desk], nodes=1, seeds=SEEDS, settings=FEW)
async def test_an_entity_stops_only_after_the_outermost_of_its_handlers(sim: Sim) -> None:
    async def work(node: Node) -> None:
        desk = await warm(node)
        outer = asyncio.ensure_future(desk.ask(Desk.leave_below))
        await asyncio.sleep(0.5)
        assert await desk.ask(Desk.look) == await outer, "both see the same object"
        assert await desk.ask(Desk.add, 0) == 0, "the next one is new"

    await inside(sim, work)


@simulated(entities=[Desk], nodes=1, seeds=SEEDS, settings=FEW)
async def test_circles_of_asks_are_seen_where_nothing_is_marked_as_busy(sim: Sim) -> None:
    async def work(node: Node) -> None:
        await warm(node, "other")
        desk = await warm(node)
        with pytest.raises(HandlerFailed, match="CallCycle"):
            await desk.ask(Desk.ask_myself)
        with pytest.raises(HandlerFailed, match="CallCycle"):
            await desk.ask(Desk.ask_back, "other")
        assert await desk.ask(Desk.add, 0) == 0

    await inside(sim, work)


@simulated(entities=[Desk], nodes=1, seeds=SEEDS, settings=FEW)
async def test_nothing_runs_within_a_handler_that_does_not_ask_in_its_own_name(sim: Sim) -> None:
    async def work(node: Node) -> None:
        desk = await warm(node)
        assert await desk.ask(Desk.ask_unseen) == "waits"

    await inside(sim, work)


# in order


@simulated(entities=[Desk], nodes=1, seeds=SEEDS, settings=FEW)
async def test_an_ask_within_a_call_passes_nothing_that_was_sent_before(sim: Sim) -> None:
    async def work(node: Node) -> None:
        other, desk = await warm(node, "other"), await warm(node)
        # Both travel in one batch: while the first runs, the second is still to come.
        await desk.tell(Desk.have_marked, "other", 2)
        await other.tell(Desk.mark, 1)
        await asyncio.sleep(0.1)
        await other.tell(Desk.mark, 3)
        await other.ask(Desk.mark, 4)
        await other.ask(Desk.mark, 5)
        assert LOG == [1, 2, 3, 4, 5]

    await inside(sim, work)


# what fails, fails alone


async def choke(desk: Ref[Desk], what: str, busy: bool) -> None:
    """Ask for something impossible between two others, perhaps behind one that takes a while."""
    bad: Awaitable[Any]
    if what == "arguments":
        bad, Unfit.now = desk.ask(Desk.fussy, Fussy(1)), True
    elif what == "reply":
        bad = desk.ask(Desk.endless_reply)
    else:
        bad = desk.ask(Desk.endless_rejection)
    waiting = [desk.ask(Desk.slow, 0.05)] if busy else []
    *_, before, failed, after = await asyncio.gather(
        *waiting, desk.ask(Desk.add), bad, desk.ask(Desk.add), return_exceptions=True
    )
    assert (before, after) == ((2, 3) if busy else (1, 2))
    assert type(failed) is (NotExecuted if what == "arguments" else HandlerFailed)


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("where", ["home", "elsewhere"])
@pytest.mark.parametrize("what", ["arguments", "reply", "rejection"])
@simulated(entities=[Desk], nodes=1, seeds=1, settings=FEW)
async def test_what_the_codec_chokes_on_fails_its_own_message_alone(
    sim: Sim, where: str, what: str, busy: bool
) -> None:
    Unfit.now = False
    try:
        if where == "home":

            async def work(node: Node) -> None:
                await choke(await warm(node), what, busy)

            await inside(sim, work)
        else:
            await sim.ref(Desk, "d").ask(Desk.add, 0)
            await choke(sim.ref(Desk, "d"), what, busy)
    finally:
        Unfit.now = False
    assert runtime_of(sim).running is None


@pytest.mark.parametrize("how", ["failed", "cancelled", "closed"])
@simulated(entities=[Desk], nodes=1, seeds=1, settings=FEW)
async def test_an_entity_outlives_what_its_handlers_raise_at_once(sim: Sim, how: str) -> None:
    async def work(node: Node) -> None:
        desk = await warm(node)
        with pytest.raises(HandlerFailed):
            await desk.ask(Desk.fail, how)
        await desk.tell(Desk.fail, how)
        assert await desk.ask(Desk.add) == 3

    await inside(sim, work)
    with pytest.raises(HandlerFailed):
        await sim.ref(Desk, "d").ask(Desk.fail, how)
    assert await sim.ref(Desk, "d").ask(Desk.add) == 5


# cancellations


@simulated(entities=[Desk], nodes=1, seeds=SEEDS, settings=FEW)
async def test_who_cancels_the_task_of_a_handler_ends_that_handler_alone(sim: Sim) -> None:
    async def work(node: Node) -> None:
        desk = await warm(node)
        working = asyncio.ensure_future(desk.ask(Desk.work))
        await asyncio.sleep(0.1)
        await desk.ask(Desk.interrupt)
        with pytest.raises(HandlerFailed, match="CancelledError"):
            await working
        assert await desk.ask(Desk.interrupt_myself, False) == "ended"
        with pytest.raises(HandlerFailed, match="CancelledError"):
            await desk.ask(Desk.interrupt_myself, True)
        assert await desk.ask(Desk.add) == 1

    await inside(sim, work)


@simulated(entities=[Farewell], nodes=2, seeds=SEEDS, settings=FEW)
async def test_an_on_stop_that_cancels_itself_does_not_hold_the_shard(sim: Sim) -> None:
    LOG.clear()
    await sim.ref(Farewell, "f").ask(Farewell.hello)
    to = 1 - sim.owner(Farewell, "f")
    await sim.wish(sim.shard(Farewell, "f"), to)
    await sim.wait_until(lambda: sim.owner(Farewell, "f") == to and sim.settled(), timeout_s=8)
    assert LOG == ["on_stop"]


@simulated(entities=[Desk], nodes=1, seeds=SEEDS, settings=FEW)
async def test_a_caller_that_is_cancelled_hurts_nobody(sim: Sim) -> None:
    async def work(node: Node) -> None:
        desk = await warm(node)
        caller = asyncio.ensure_future(desk.ask(Desk.slow, 0.2))
        await asyncio.sleep(0.1)
        caller.cancel()
        assert await desk.ask(Desk.add) == 2
        assert LOG == ["slow begins", "slow ends"]
        assert caller.cancelled()

    await inside(sim, work)


# values


@pytest.mark.scenario("SM-27")
@pytest.mark.parametrize("serialize_local", [False, True])
def test_nothing_that_can_change_is_shared_between_entities(serialize_local: bool) -> None:
    async def work(node: Node) -> None:
        desk = await warm(node)
        given = [1]
        await desk.ask(Desk.keep, given)
        given.append(2)
        shown = await desk.ask(Desk.show)
        assert shown == [1]
        shown.append(3)
        assert await desk.ask(Desk.show) == [1]
        text = "long enough to be no constant " * 10
        assert (await desk.ask(Desk.identity, text) == id(text)) is not serialize_local

    settings = Settings(shards=4, serialize_local=serialize_local)
    run_simulation(
        Sim(0, entities=[Desk], nodes=1, settings=settings), lambda sim: inside(sim, work)
    )


@simulated(entities=[Desk], nodes=1, seeds=1, settings=FEW)
async def test_what_cannot_travel_is_refused_at_home_too(sim: Sim) -> None:
    async def work(node: Node) -> None:
        desk = await warm(node)
        for n, text in ((2**64, "a"), (-(2**63) - 1, "a"), (0, "\udc80")):
            with pytest.raises(TypeError, match="cannot travel"):
                await desk.ask(Desk.echo, n, text)
        for n in (2**64 - 1, -(2**63)):
            assert await desk.ask(Desk.echo, n, "a\u00e4") == n
        with pytest.raises(NotExecuted, match="do not fit"):
            await desk.ask(Desk.echo, "1", "a")  # type: ignore[arg-type]

    await inside(sim, work)


@simulated(entities=[Desk], nodes=1, seeds=1, settings=FEW)
async def test_handlers_do_not_see_the_variables_of_their_callers(sim: Sim) -> None:
    async def work(node: Node) -> None:
        desk = await warm(node)
        SEEN.set("mine")
        assert await desk.ask(Desk.seen) == "nothing"
        assert SEEN.get() == "mine"

    await inside(sim, work)


# time


def without_verdict(sim: Sim, work: Callable[[], Awaitable[None]]) -> None:
    """Run something in which time jumps, which no checker could know."""

    async def main() -> None:
        async with sim:
            await work()

    def block(for_s: float) -> None:
        sim.world._agenda.now += for_s
        if not for_s:
            # The lease was about to end when it began.
            runtime_of(sim).lease.valid_until = sim.world.now

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(desk_lab, "BLOCK", block)
            sim.world.run(main(), sim.loop)
    finally:
        sim.close()


def test_a_local_ask_has_no_outcome_past_the_deadline() -> None:
    sim = Sim(0, entities=[Desk], nodes=1, settings=FEW)

    async def work(node: Node) -> None:
        await warm(node, "other")
        desk = await warm(node)
        life = node.life
        assert life is not None
        with pytest.raises(MaybeExecuted):
            await desk.ask(Desk.block_below, "other", LAPSE_S)
        assert not life.member.guard()
        assert node.life is life
        assert LOG == [], "whoever waited for it does not go on either (L3)"

    without_verdict(sim, lambda: inside(sim, work))


@pytest.mark.parametrize("lapse_s", [0.0, LAPSE_S])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("busy", [False, True])
def test_nothing_of_a_batch_starts_or_is_answered_past_the_deadline(
    busy: bool, told: bool, lapse_s: float
) -> None:
    """`told`: nobody waits for the one that blocks, so that no answer of its own is in question."""
    sim = Sim(0, entities=[Desk], nodes=1, settings=FEW)

    async def work() -> None:
        desk, other = sim.ref(Desk, "d"), sim.ref(Desk, "other")
        await asyncio.gather(desk.ask(Desk.add, 0), other.ask(Desk.add, 0))
        LOG.clear()
        first = [desk.ask(Desk.slow, 0.01)] if busy else []
        outcomes = await asyncio.gather(
            *first,
            desk.tell(Desk.block, lapse_s) if told else desk.ask(Desk.block, lapse_s),
            desk.tell(Desk.mark, 0),
            desk.ask(Desk.mark, 1),
            other.tell(Desk.mark, 2),
            other.ask(Desk.mark, 3),
            return_exceptions=True,
        )
        done = ["slow begins", 2, 3, "slow ends"] if busy else []
        assert done == LOG
        blocked, _, behind, _, beside = outcomes[1:] if busy else outcomes
        late = [behind] if busy else [behind, beside]
        late += [] if told else [blocked]
        assert all(isinstance(outcome, MaybeExecuted) for outcome in late)

    without_verdict(sim, work)


@simulated(entities=[Desk], nodes=1, seeds=1, settings=FEW)
async def test_asks_without_end_let_others_run_even_in_virtual_time(sim: Sim) -> None:
    async def work(node: Node) -> None:
        desk = await warm(node)
        over = asyncio.Event()
        asyncio.get_running_loop().call_soon(over.set)
        for _ in range(100_000):
            await desk.ask(Desk.add)
            if over.is_set():
                return
        raise AssertionError("nobody else got a turn")

    await inside(sim, work)


# what stays behind


@simulated(entities=[Desk], nodes=1, seeds=1, settings=FEW)
async def test_a_history_tells_all_of_an_ask_within_its_call(sim: Sim) -> None:
    async def work(node: Node) -> None:
        desk = await warm(node)
        before = len(sim.history.events)
        await desk.ask(Desk.add)
        with pytest.raises(HandlerFailed):
            await desk.ask(Desk.fail, "failed")
        assert told(before) == [
            *("submit", "write", "accept", "start", "finish", "outcome"),
            *("submit", "write", "accept", "start", "finish", "outcome"),
        ]
        before = len(sim.history.events)
        await desk.ask(Desk.slow, 0.0)
        assert told(before)[:5] == ["submit", "write", "accept", "start", "resume"]
        assert told(before)[5:] == ["finish", "outcome"]

    def told(since: int) -> list[str]:
        return [e.kind for e in list(sim.history.events)[since:] if e.fields.get("n") is not None]

    await inside(sim, work)


@simulated(entities=[Desk], nodes=1, seeds=1, settings=FEW)
async def test_neither_refs_nor_workers_keep_what_is_over(sim: Sim) -> None:
    async def work(node: Node) -> None:
        desk = await warm(node)
        life = node.life
        assert life is not None
        host = life.runtime.hosts[sim.shard(Desk, "d")]
        (cell,) = host.cells.values()
        entity = weakref.ref(cell.entity)
        del cell
        await asyncio.gather(*(desk.ask(Desk.slow, 0.01) for _ in range(3)))
        await desk.ask(Desk.leave)
        await asyncio.sleep(0.1)
        assert not host.cells
        sender = life.runtime.sending.senders[sim.shard(Desk, "d")]
        assert (sender.written, sender.queue, sender.open) == ({}, [], 0)
        assert not life.runtime.suspended
        gc.collect()
        assert not [thing for thing in gc.get_objects() if type(thing) in (OutgoingCall, Pending)]
        assert entity() is None, "the ref outlives the entity, and does not keep it"
        for worker in life.runtime.workers._spare:
            turn = worker.context.get(current_turn)
            assert turn is None or not turn.active

    await inside(sim, work)
