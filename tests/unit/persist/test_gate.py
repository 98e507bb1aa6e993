"""The output gate: handlers do not wait for the journal, what leaves their entity does (J5)."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any

import pytest

from domicile import (
    Entity,
    EventSourced,
    HandlerFailed,
    MaybeExecuted,
    Node,
    NotExecuted,
    Rejection,
    Settings,
    handler,
)
from domicile.entity.hosting.cell import current_turn
from domicile.persist.entity_log import OPEN_TURNS
from domicile.testing import Sim, simulated

FEW = Settings(shards=8)
SEEDS = 2
STALL_S = 2.0

LOG: list[Any] = []
"""What entities did; emptied at the start of each run."""


@dataclass(frozen=True)
class Added:
    what: int


class TooMuch(Rejection, name="gate.TooMuch"):
    """Refused, because of what is there."""


class Basket(EventSourced[tuple[int, ...], Added], name="basket"):
    def __init__(self) -> None:
        self.alarms = 0

    @staticmethod
    def initial(id: str, /) -> tuple[int, ...]:
        LOG.append(("recovered", id))
        return ()

    @staticmethod
    def apply(state: tuple[int, ...], event: Added, /) -> tuple[int, ...]:
        return (*state, event.what)

    @handler
    async def add(self, what: int) -> int:
        state = await self.persist(Added(what))
        LOG.append(("added", what))
        return len(state)

    @handler
    async def take(self, what: int) -> int:
        """Like `add`, without reading."""
        await self.append(Added(what))
        LOG.append(("taken", what))
        return what

    @handler
    async def take_and_count(self, what: int) -> int:
        await self.append(Added(what))
        return len(await self.state())

    @handler(shared=True)
    async def count(self) -> int:
        state = await self.state()
        LOG.append(("counted", len(state)))
        return len(state)

    @handler(shared=True)
    async def show(self, to: str) -> int:
        """A reader that tells what it saw."""
        seen = len(await self.state())
        await self.ref(Witness, to).tell(Witness.hear, seen)
        return seen

    @handler
    async def refuse(self) -> None:
        raise TooMuch(len(await self.state()))

    @handler
    async def fail(self) -> None:
        raise KeyError(len(await self.state()))

    @handler
    async def add_and_refuse(self, what: int) -> None:
        raise TooMuch(len(await self.persist(Added(what))))

    @handler
    async def add_and_ask(self, what: int, to: str) -> int:
        await self.persist(Added(what))
        return await self.ref(Witness, to).ask(Witness.hear, what)

    @handler
    async def add_ask_and_refuse(self, what: int, to: str) -> int:
        await self.persist(Added(what))
        await self.ref(Witness, to).ask(Witness.hear, what)
        raise TooMuch(len(await self.persist(Added(-what))))

    @handler
    async def leave_a_task(self, what: int, to: str) -> int:
        """A task that goes on after its handler tells somebody what it knows."""
        state = await self.persist(Added(what))

        async def later() -> None:
            await asyncio.sleep(0)
            await self.ref(Witness, to).tell(Witness.hear, what)

        LOG.append(asyncio.get_running_loop().create_task(later()))
        return len(state)

    @handler
    async def take_and_start_over(self, what: int) -> None:
        """Goes on after what it appended was given up."""
        await self.append(Added(what))
        try:
            await self.committed()
        except MaybeExecuted:
            LOG.append(("given up", what))
        await asyncio.sleep(STALL_S)
        await self.delete()
        await self.append(Added(-what))

    @handler
    async def add_and_commit(self, what: int) -> int:
        state = await self.persist(Added(what))
        await self.committed()
        LOG.append(("committed", what))
        return len(state)

    @handler
    async def add_with_hook(self, what: int, fails: bool = False) -> int:
        async def hook() -> None:
            LOG.append(("hook", what, len(await self.state())))

        self.after_commit(hook)
        state = await self.persist(Added(what))
        if fails:
            raise KeyError(what)
        return len(state)

    @handler
    async def bad_hook(self) -> None:
        async def hook() -> None:
            try:
                await self.persist(Added(0))
            except RuntimeError as error:
                LOG.append(str(error))
            raise KeyError("a hook's own error")

        self.after_commit(hook)

    @handler
    async def remind(self, delay_s: float) -> None:
        self.after(delay_s, self.alarm)

    @handler
    async def alarm(self) -> None:
        self.alarms += 1
        await self.persist(Added(-1))

    @handler
    async def rest(self, what: int) -> int:
        state = await self.persist(Added(what))
        self.passivate()
        return len(state)


class Talker(EventSourced[int, Added], name="talker"):
    """Tells others what it knows where no message runs: at its start, at its stop, in hooks."""

    def __init__(self) -> None:
        self.seen = 0

    @staticmethod
    def initial(id: str, /) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: Added, /) -> int:
        return state + event.what

    async def on_start(self) -> None:
        if self.id == "early":
            await self.tell_all(await self.persist(Added(7)))

    async def on_stop(self) -> None:
        if self.id == "late":
            await self.tell_all(self.seen)

    async def tell_all(self, what: int) -> None:
        await self.ref(Witness, "w").tell(Witness.hear, what)

    @handler(shared=True)
    async def total(self) -> int:
        return await self.state()

    @handler
    async def add(self, what: int) -> int:
        self.seen = await self.persist(Added(what))
        return self.seen

    @handler
    async def add_and_rest(self, what: int) -> int:
        self.seen = await self.persist(Added(what))
        self.passivate()
        return self.seen

    @handler
    async def add_slowly(self, what: int, seconds: float) -> int:
        """Suspends with something staged, then refuses if it is negative."""
        self.seen = await self.persist(Added(what))
        await asyncio.sleep(seconds)
        if what < 0:
            raise TooMuch(what)
        return self.seen

    @handler
    async def tell_later(self, what: int, seconds: float) -> None:
        """Its hook tells what there is then."""

        async def hook() -> None:
            await asyncio.sleep(seconds)
            await self.tell_all(await self.state())

        self.after_commit(hook)
        await self.append(Added(what))

    @handler
    async def take(self, what: int) -> None:
        await self.append(Added(what))


class Crier(EventSourced[int, Added], name="crier"):
    """Calls from several tasks, handlers and hooks at once. Notes each call when it makes it."""

    @staticmethod
    def initial(id: str, /) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: Added, /) -> int:
        return state + event.what

    async def cry(self, what: int) -> None:
        LOG.append(("made", what))
        await self.ref(Witness, "w").tell(Witness.hear, what)

    async def after(self, happens: asyncio.Event, *whats: int) -> None:
        await happens.wait()
        for what in whats:
            await self.cry(what)

    async def after_the_commit(self, *whats: int) -> None:
        await self.committed()
        for what in whats:
            await self.cry(what)

    @handler
    async def cry_from_tasks(self) -> None:
        """The first task waits for the same write as the second one's call."""
        await self.persist(Added(1))
        async with asyncio.TaskGroup() as group:
            group.create_task(self.after_the_commit(2, 3))
            group.create_task(self.cry(1))
            group.create_task(self.after_the_commit(4, 5))

    @handler
    async def add_slowly(self, what: int, seconds: float) -> None:
        """Suspends with something staged, and wakes tasks when it ends."""
        await self.persist(Added(what))
        await asyncio.sleep(seconds)
        for woken in WOKEN:
            woken.set()

    @handler(shared=True)
    async def cry_now(self, what: int) -> None:
        await self.cry(what)

    @handler(shared=True)
    async def cry_once_committed(self, whats: list[int]) -> None:
        await self.after_the_commit(*whats)

    @handler
    async def cry_from_a_hook(self, seconds: float) -> None:
        """Two tasks of a hook: the second one's call need not wait any more when it is made."""

        async def hook() -> None:
            await asyncio.sleep(seconds)
            woken = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                WOKEN.append(woken)
                group.create_task(self.after(woken, 2, 3))
                group.create_task(self.cry(1))

        self.after_commit(hook)
        await self.append(Added(1))


WOKEN: list[asyncio.Event] = []
"""What wakes the task of a hook."""


class Mutable(EventSourced[list[int], Added], name="mutable"):
    """A state that is changed in place, which `apply` should not do."""

    @staticmethod
    def initial(id: str, /) -> list[int]:
        return []

    @staticmethod
    def apply(state: list[int], event: Added, /) -> list[int]:
        state.append(event.what)
        return state

    @handler
    async def add(self, what: int, seconds: float = 0.0) -> int:
        state = await self.persist(Added(what))
        if seconds:
            await asyncio.sleep(seconds)
        if what < 0:
            raise TooMuch(what)
        return len(state)

    @handler
    async def tell_later(self, what: int, seconds: float) -> None:
        """Its hook tells how many there are then."""

        async def hook() -> None:
            await asyncio.sleep(seconds)
            await self.ref(Witness, "w").tell(Witness.hear, len(await self.state()))

        self.after_commit(hook)
        await self.persist(Added(what))


class Witness(Entity, name="witness"):
    @handler
    async def hear(self, what: int) -> int:
        LOG.append(("heard", what))
        return what


class Starting(EventSourced[int, Added], name="starting"):
    """Stores something when it starts and when it stops."""

    @staticmethod
    def initial(id: str, /) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: Added, /) -> int:
        return state + event.what

    async def on_start(self) -> None:
        await self.persist(Added(1))

    async def on_stop(self) -> None:
        await self.persist(Added(100))

    @handler(shared=True)
    async def total(self) -> int:
        return await self.state()

    @handler
    async def fail(self) -> None:
        await self.persist(Added(10))
        raise KeyError("after persist")


ENTITIES: list[type[Entity]] = [Basket, Witness]


async def stalled(sim: Sim, seconds: float = STALL_S) -> None:
    """The next write stands still in the journal."""
    sim.servers.stall(seconds, lambda: LOG.append("stalled"))


def background(sim: Sim, work: Any) -> asyncio.Task[Any]:
    return sim.loop.create_task(_outcome(work))


async def _outcome(work: Any) -> Any:
    try:
        return await work
    except (MaybeExecuted, NotExecuted, HandlerFailed, Rejection) as error:
        return error


async def crash(sim: Sim, id: str) -> None:
    old = sim.owner(Basket, id)
    sim.crash(old)
    await sim.wait_until(lambda: sim.owner(Basket, id) != old and sim.settled())


# what waits, and what does not


@simulated(entities=ENTITIES, nodes=2, seeds=SEEDS, settings=FEW)
@pytest.mark.scenario("DX-28", partial=True)
async def test_handlers_go_on_while_answers_wait_for_the_journal(sim: Sim) -> None:
    LOG.clear()
    basket = sim.ref(Basket, "b")
    assert await basket.ask(Basket.add, 1) == 1
    await stalled(sim)
    asks = [background(sim, basket.ask(Basket.add, n)) for n in (2, 3)]
    asks += [
        background(sim, basket.ask(Basket.count)),
        background(sim, basket.ask(Basket.refuse)),
        background(sim, basket.ask(Basket.fail)),
    ]
    await sim.wait_until(lambda: ("counted", 3) in LOG)
    await sim.advance(STALL_S / 2)
    assert "stalled" in LOG
    assert not any(ask.done() for ask in asks), "everything depends on what is not stored"
    assert sim.events(Basket, "b") == [Added(1)]
    # Another entity, whose events another shard has, is not concerned.
    await sim.advance(STALL_S)
    added, twice, counted, refused, failed = [ask.result() for ask in asks]
    assert (added, twice, counted) == (2, 3, 3)
    assert isinstance(refused, TooMuch)
    assert refused.args == (3,)
    assert isinstance(failed, HandlerFailed)
    assert sim.events(Basket, "b") == [Added(1), Added(2), Added(3)]


@simulated(entities=ENTITIES, nodes=3, seeds=4, settings=FEW)
@pytest.mark.scenario("DX-28", partial=True)
async def test_what_waits_when_its_home_dies_was_never_told(sim: Sim) -> None:
    LOG.clear()
    basket = sim.ref(Basket, "b")
    await basket.ask(Basket.add, 1)
    await stalled(sim, 5.0)
    asks = [
        background(sim, basket.ask(Basket.add, 2)),
        background(sim, basket.ask(Basket.count)),
        background(sim, basket.options(key="k").ask(Basket.add, 3)),
    ]
    await sim.wait_until(lambda: ("added", 3) in LOG)
    await crash(sim, "b")
    await sim.wait_until(lambda: all(ask.done() for ask in asks))
    assert all(isinstance(ask.result(), MaybeExecuted) for ask in asks)
    await sim.advance(5.0)
    assert await basket.ask(Basket.count) == len(sim.events(Basket, "b"))


@simulated(entities=ENTITIES, nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_handler_that_goes_on_after_a_failed_write_stores_nothing(sim: Sim) -> None:
    LOG.clear()
    basket = sim.ref(Basket, "b")
    await basket.ask(Basket.take, 1)
    way = sim.nodes[sim.owner(Basket, "b")].journal
    assert way is not None
    way.cut = True
    waiting = background(sim, basket.options(timeout_s=60.0).ask(Basket.take_and_start_over, 2))
    await sim.wait_until(lambda: ("given up", 2) in LOG)
    way.cut = False
    assert isinstance(await waiting, MaybeExecuted)
    await sim.advance(STALL_S)
    assert sim.events(Basket, "b") == [Added(1)]


@simulated(entities=ENTITIES, nodes=2, seeds=SEEDS, settings=FEW)
@pytest.mark.scenario("DX-28", partial=True)
async def test_asks_and_tells_leave_after_the_commit(sim: Sim) -> None:
    LOG.clear()
    basket = sim.ref(Basket, "b")
    await basket.ask(Basket.add, 1)
    await stalled(sim)
    asking = background(sim, basket.ask(Basket.add_and_ask, 2, "w"))
    await sim.advance(STALL_S / 2)
    assert ("heard", 2) not in LOG
    assert await asking == 2
    # A reader that stored nothing itself, after a writer whose events are not stored yet.
    await stalled(sim)
    adding = background(sim, basket.ask(Basket.add, 3))
    await sim.wait_until(lambda: ("added", 3) in LOG)
    showing = background(sim, basket.ask(Basket.show, "w"))
    await sim.advance(STALL_S / 2)
    assert ("heard", 3) not in LOG
    assert (await adding, await showing) == (3, 3)
    await sim.wait_until(lambda: ("heard", 3) in LOG)


@simulated(entities=ENTITIES, nodes=2, seeds=SEEDS, settings=FEW)
@pytest.mark.scenario("DX-28", partial=True)
async def test_a_task_that_outlives_its_handler_waits_too(sim: Sim) -> None:
    LOG.clear()
    basket = sim.ref(Basket, "b")
    await basket.ask(Basket.add, 1)
    await stalled(sim)
    adding = background(sim, basket.ask(Basket.leave_a_task, 2, "w"))
    await sim.advance(STALL_S / 2)
    assert ("heard", 2) not in LOG
    assert await adding == 2
    await sim.wait_until(lambda: ("heard", 2) in LOG)


@simulated(entities=ENTITIES, nodes=2, seeds=SEEDS, settings=FEW)
@pytest.mark.scenario("DX-28", partial=True)
async def test_the_stored_reply_of_a_repeated_key_waits_for_that_key(sim: Sim) -> None:
    LOG.clear()
    basket = sim.ref(Basket, "b")
    await basket.ask(Basket.add, 1)
    await stalled(sim)
    keyed = basket.options(key="k")
    first = background(sim, keyed.ask(Basket.add, 2))
    await sim.wait_until(lambda: ("added", 2) in LOG)
    again = background(sim, keyed.ask(Basket.add, 2))
    await sim.advance(STALL_S / 2)
    assert not first.done()
    assert not again.done()
    assert (await first, await again) == (2, 2)
    assert LOG.count(("added", 2)) == 1
    assert sim.events(Basket, "b") == [Added(1), Added(2)]


# a turn is one unit


@simulated(entities=ENTITIES, nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_rejection_drops_what_its_turn_has_staged(sim: Sim) -> None:
    LOG.clear()
    basket = sim.ref(Basket, "b")
    await basket.ask(Basket.add, 1)
    with pytest.raises(TooMuch, match="2"):
        await basket.ask(Basket.add_and_refuse, 2)
    assert await basket.ask(Basket.count) == 1
    assert await basket.ask(Basket.add, 3) == 2
    assert sim.events(Basket, "b") == [Added(1), Added(3)]


@simulated(entities=ENTITIES, nodes=2, seeds=SEEDS, settings=FEW)
async def test_what_was_sent_before_an_ask_stays_when_the_handler_fails(sim: Sim) -> None:
    LOG.clear()
    basket = sim.ref(Basket, "b")
    with pytest.raises(TooMuch, match="2"):
        await basket.ask(Basket.add_ask_and_refuse, 5, "w")
    assert await basket.ask(Basket.count) == 1
    assert sim.events(Basket, "b") == [Added(5)]


@simulated(entities=[Mutable], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_state_changed_in_place_is_read_again_after_a_failure(sim: Sim) -> None:
    mutable = sim.ref(Mutable, "m")
    assert await mutable.ask(Mutable.add, 1) == 1
    with pytest.raises(TooMuch):
        await mutable.ask(Mutable.add, -2)
    assert await mutable.ask(Mutable.add, 3) == 2
    assert sim.events(Mutable, "m") == [Added(1), Added(3)]


@simulated(entities=[Starting], nodes=2, seeds=SEEDS, settings=FEW)
async def test_what_a_start_and_a_stop_store_is_their_own(sim: Sim) -> None:
    starting = sim.ref(Starting, "s")
    with pytest.raises(HandlerFailed, match="after persist"):
        await starting.ask(Starting.fail)
    assert await starting.ask(Starting.total) == 1
    old = sim.owner(Starting, "s")
    await sim.wish(sim.shard(Starting, "s"), 1 - old)
    await sim.wait_until(lambda: sim.owner(Starting, "s") == 1 - old and sim.settled())
    assert await starting.ask(Starting.total) == 102
    assert sim.events(Starting, "s") == [Added(1), Added(100), Added(1)]


TALKERS: list[type[Entity]] = [Talker, Witness]


@simulated(entities=TALKERS, nodes=2, seeds=SEEDS, settings=FEW)
async def test_what_a_start_tells_waits_for_the_commit_also_if_a_reader_woke_the_entity(
    sim: Sim,
) -> None:
    LOG.clear()
    await stalled(sim)
    ask = background(sim, sim.ref(Talker, "early").ask(Talker.total))
    await sim.wait_until(lambda: "stalled" in LOG or ("heard", 7) in LOG)
    await sim.advance(STALL_S / 2)
    assert ("heard", 7) not in LOG
    assert await ask == 7
    await sim.wait_until(lambda: ("heard", 7) in LOG)


@simulated(entities=TALKERS, nodes=2, seeds=SEEDS, settings=FEW)
async def test_what_a_stop_tells_waits_for_the_commit(sim: Sim) -> None:
    LOG.clear()
    talker = sim.ref(Talker, "late")
    await talker.ask(Talker.add, 1)
    await stalled(sim)
    ask = background(sim, talker.ask(Talker.add_and_rest, 2))
    await sim.wait_until(lambda: "stalled" in LOG)
    await sim.advance(STALL_S / 2)
    assert ("heard", 3) not in LOG
    assert await ask == 3
    await sim.wait_until(lambda: ("heard", 3) in LOG)


# committed() and hooks


@simulated(entities=ENTITIES, nodes=2, seeds=SEEDS, settings=FEW)
async def test_committed_waits_for_the_journal(sim: Sim) -> None:
    LOG.clear()
    basket = sim.ref(Basket, "b")
    await basket.ask(Basket.add, 1)
    await stalled(sim)
    ask = background(sim, basket.ask(Basket.add_and_commit, 2))
    await sim.advance(STALL_S / 2)
    assert ("committed", 2) not in LOG
    assert await ask == 2
    assert ("committed", 2) in LOG


@simulated(entities=ENTITIES, nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_hook_runs_once_after_the_commit(sim: Sim) -> None:
    LOG.clear()
    basket = sim.ref(Basket, "b")
    await basket.ask(Basket.add, 1)
    await stalled(sim)
    ask = background(sim, basket.ask(Basket.add_with_hook, 2))
    await sim.advance(STALL_S / 2)
    assert ("hook", 2, 2) not in LOG
    assert await ask == 2
    await sim.wait_until(lambda: ("hook", 2, 2) in LOG)
    with pytest.raises(HandlerFailed):
        await basket.ask(Basket.add_with_hook, 3, fails=True)
    await basket.ask(Basket.bad_hook)
    await sim.wait_until(lambda: any("stores nothing" in str(entry) for entry in LOG))
    await sim.advance(1)
    assert [entry for entry in LOG if entry[0] == "hook"] == [("hook", 2, 2)]
    assert sim.history.counts["handler.failed"] == 2


@simulated(entities=TALKERS, nodes=2, seeds=SEEDS, settings=FEW)
async def test_what_a_hook_tells_waits_for_the_handler_that_runs_beside_it(sim: Sim) -> None:
    """The hook has seen what that handler staged, and that may yet be dropped."""
    LOG.clear()
    talker = sim.ref(Talker, "t")
    await talker.ask(Talker.tell_later, 1, 0.5)
    with pytest.raises(TooMuch):
        await talker.ask(Talker.add_slowly, -5, 2.0)
    await sim.wait_until(lambda: any(entry[0] == "heard" for entry in LOG))
    assert LOG == [("heard", 1)], "what was dropped never was, and nobody hears of it"
    assert sim.events(Talker, "t") == [Added(1)]
    LOG.clear()
    await talker.ask(Talker.tell_later, 1, 0.5)
    ask = background(sim, talker.ask(Talker.add_slowly, 5, 1.0))
    await sim.advance(0.9)
    assert ("heard", 7) not in LOG
    assert await ask == 7
    await sim.wait_until(lambda: ("heard", 7) in LOG)


@simulated(entities=TALKERS, nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_hook_of_a_busy_entity_waits_for_one_handler_only(sim: Sim) -> None:
    LOG.clear()
    talker = sim.ref(Talker, "t").options(timeout_s=20)
    await talker.ask(Talker.tell_later, 1, 0.5)
    asks = [background(sim, talker.ask(Talker.add_slowly, n, 1.0)) for n in (10, -20, 40, 80)]
    await sim.advance(2.5)
    assert LOG == [("heard", 11)]
    await asyncio.gather(*asks)
    assert sim.events(Talker, "t") == [Added(1), Added(10), Added(40), Added(80)]


@simulated(entities=[Mutable, Witness], nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_hook_does_not_see_what_is_changed_in_place_beside_it(sim: Sim) -> None:
    LOG.clear()
    mutable = sim.ref(Mutable, "m")
    await mutable.ask(Mutable.tell_later, 1, 0.5)
    with pytest.raises(TooMuch):
        await mutable.ask(Mutable.add, -2, 1.0)
    await sim.wait_until(lambda: bool(LOG))
    assert LOG == [("heard", 1)]


@simulated(entities=TALKERS, nodes=2, seeds=8, settings=FEW)
async def test_what_is_appended_while_a_hook_reads_the_state_is_seen_by_the_next_reader(
    sim: Sim,
) -> None:
    LOG.clear()
    talker = sim.ref(Talker, "t")
    await talker.ask(Talker.tell_later, 1, 0.5)
    journal = sim.nodes[sim.owner(Talker, "t")].journal
    assert journal is not None
    journal.slow = 300.0
    await sim.advance(0.51)
    await talker.ask(Talker.take, 2)
    journal.slow = 1.0
    await sim.wait_until(lambda: any(entry[0] == "heard" for entry in LOG))
    assert await talker.ask(Talker.total) == 3
    assert await talker.ask(Talker.add, 4) == 7


# the order of what leaves


def heard_as_made() -> bool:
    """I5: whether all calls were heard in the order in which they were made."""
    made = [what for kind, what in LOG if kind == "made"]
    return [what for kind, what in LOG if kind == "heard"] == made


@simulated(entities=[Crier, Witness], nodes=2, seeds=SEEDS, settings=FEW)
async def test_calls_of_several_tasks_leave_in_order(sim: Sim) -> None:
    LOG.clear()
    crier = sim.ref(Crier, "c")
    await crier.ask(Crier.cry_from_tasks)
    await sim.wait_until(lambda: len(LOG) == 10)
    assert heard_as_made(), LOG
    assert LOG[0] == ("made", 1)


@simulated(entities=[Crier, Witness], nodes=2, seeds=SEEDS, settings=FEW)
async def test_calls_of_several_handlers_leave_in_order(sim: Sim) -> None:
    """The first makes its calls when the write is over that the call of the second waits for."""
    LOG.clear()
    WOKEN.clear()
    crier = sim.ref(Crier, "c")
    await crier.ask(Crier.add_slowly, 1, 0.0)
    await stalled(sim)
    work = [
        background(sim, crier.ask(Crier.add_slowly, 1, 0.0)),
        background(sim, crier.ask(Crier.cry_once_committed, [2, 3])),
        background(sim, crier.ask(Crier.cry_now, 1)),
        background(sim, crier.ask(Crier.cry_once_committed, [4])),
    ]
    await asyncio.gather(*work)
    LOG.remove("stalled")
    await sim.wait_until(lambda: len(LOG) == 8)
    assert heard_as_made(), LOG


@simulated(entities=[Crier, Witness], nodes=2, seeds=SEEDS, settings=FEW)
async def test_calls_of_a_hook_leave_in_order(sim: Sim) -> None:
    """The first waits for the handler beside the hook, the others come when it has ended."""
    LOG.clear()
    WOKEN.clear()
    crier = sim.ref(Crier, "c")
    await crier.ask(Crier.cry_from_a_hook, 0.5)
    slow = background(sim, crier.ask(Crier.add_slowly, 1, 1.0))
    await sim.wait_until(lambda: LOG == [("made", 1)])
    assert await slow is None
    await sim.wait_until(lambda: len(LOG) == 6)
    assert heard_as_made(), LOG


# append


@simulated(entities=ENTITIES, nodes=2, seeds=SEEDS, settings=FEW)
@pytest.mark.scenario("LS-15")
async def test_a_handler_that_only_appends_does_not_recover(sim: Sim) -> None:
    LOG.clear()
    basket = sim.ref(Basket, "b")
    for n in range(3):
        assert await basket.ask(Basket.take, n) == n
    assert await basket.options(key="k").ask(Basket.take, 3) == 3
    assert await basket.options(key="k").ask(Basket.take, 3) == 3
    assert ("recovered", "b") not in LOG
    assert await basket.ask(Basket.count) == 4
    assert LOG.count(("recovered", "b")) == 1
    assert await basket.ask(Basket.take_and_count, 4) == 5
    assert sim.events(Basket, "b") == [Added(n) for n in range(5)]


@simulated(entities=ENTITIES, nodes=2, seeds=SEEDS, settings=FEW)
async def test_what_is_appended_is_seen_when_the_state_is_read_first_then(sim: Sim) -> None:
    LOG.clear()
    basket = sim.ref(Basket, "b")
    await stalled(sim)
    asks = [background(sim, basket.ask(Basket.take, 1))]
    await sim.wait_until(lambda: ("taken", 1) in LOG)
    asks.append(background(sim, basket.ask(Basket.take_and_count, 2)))
    asks.append(background(sim, basket.ask(Basket.count)))
    assert [await ask for ask in asks] == [1, 2, 2]


# limits, moves, timers


@simulated(entities=ENTITIES, nodes=2, seeds=1, settings=FEW)
async def test_beyond_a_number_of_open_turns_messages_wait(sim: Sim) -> None:
    """I6, J5(g)."""
    LOG.clear()
    basket = sim.ref(Basket, "b")
    await basket.ask(Basket.add, 0)
    await stalled(sim)
    asks = [background(sim, basket.ask(Basket.add, n)) for n in range(1, OPEN_TURNS + 50)]
    await sim.advance(STALL_S / 2)
    ran = len([entry for entry in LOG if entry[0] == "added"])
    assert OPEN_TURNS <= ran <= OPEN_TURNS + 1
    assert [await ask for ask in asks] == list(range(2, OPEN_TURNS + 51))


@simulated(entities=ENTITIES, nodes=2, seeds=1, settings=FEW)
async def test_all_readers_that_waited_for_room_go_on(sim: Sim) -> None:
    """A reader takes no room: the end of one write may let many of them go on."""
    LOG.clear()
    basket = sim.ref(Basket, "b").options(timeout_s=20)
    await basket.ask(Basket.add, 0)
    await stalled(sim)
    asks = [background(sim, basket.ask(Basket.add, n)) for n in range(1, OPEN_TURNS + 1)]
    await sim.advance(STALL_S / 2)
    reads = [background(sim, basket.ask(Basket.count)) for _ in range(OPEN_TURNS + 100)]
    assert [await ask for ask in asks] == list(range(2, OPEN_TURNS + 2))
    assert {await read for read in reads} == {OPEN_TURNS + 1}


@simulated(entities=ENTITIES, nodes=2, seeds=4, settings=FEW)
async def test_a_shard_is_released_only_when_the_journal_has_answered(sim: Sim) -> None:
    """H10, J5(f): a planned move makes no answer uncertain."""
    LOG.clear()
    basket = sim.ref(Basket, "b")
    await basket.ask(Basket.add, 1)
    await stalled(sim)
    ask = background(sim, basket.ask(Basket.add, 2))
    await sim.wait_until(lambda: "stalled" in LOG)
    old = sim.owner(Basket, "b")
    await sim.wish(sim.shard(Basket, "b"), 1 - old)
    await sim.advance(STALL_S / 2)
    assert sim.owner(Basket, "b") == old
    assert await ask == 2
    await sim.wait_until(lambda: sim.owner(Basket, "b") == 1 - old)
    assert await basket.ask(Basket.count) == 2


@simulated(entities=ENTITIES, nodes=2, seeds=SEEDS, settings=FEW)
async def test_a_timer_stores_as_a_message_does(sim: Sim) -> None:
    LOG.clear()
    basket = sim.ref(Basket, "b")
    await basket.ask(Basket.remind, 0.5)
    await sim.advance(1)
    assert await basket.ask(Basket.count) == 1
    assert sim.events(Basket, "b") == [Added(-1)]


@simulated(entities=ENTITIES, nodes=2, seeds=SEEDS, settings=FEW)
async def test_an_entity_that_starts_again_sees_what_its_last_object_sent(sim: Sim) -> None:
    LOG.clear()
    basket = sim.ref(Basket, "b")
    await basket.ask(Basket.add, 1)
    await stalled(sim)
    resting = background(sim, basket.ask(Basket.rest, 2))
    await sim.wait_until(lambda: "stalled" in LOG)
    counting = background(sim, basket.ask(Basket.count))
    adding = background(sim, basket.ask(Basket.add, 3))
    assert (await resting, await counting, await adding) == (2, 2, 3)


@simulated(entities=ENTITIES, nodes=3, seeds=8, settings=FEW)
@pytest.mark.scenario("DX-28")
async def test_under_faults_every_answer_is_one_that_the_journal_holds(sim: Sim) -> None:
    """The checkers judge the rest of it: J5 says when an answer may leave."""
    LOG.clear()
    ids = [f"b{n}" for n in range(6)]
    told: dict[str, list[int]] = {id: [] for id in ids}

    async def caller(number: int) -> None:
        for n in range(25):
            id = ids[sim.random.randrange(len(ids))]
            basket = sim.ref(Basket, id).options(timeout_s=20)
            kind = sim.random.randrange(5)
            ask: Any = (
                basket.ask(Basket.count) if kind == 0
                else basket.ask(Basket.refuse) if kind == 1
                else basket.ask(Basket.take_and_count, n) if kind == 2
                else basket.ask(Basket.add_and_ask, n, "w") if kind == 3
                else basket.options(key=f"{number}-{n}").ask(Basket.add, n)
            )  # fmt: skip
            outcome = await _outcome(ask)
            if isinstance(outcome, TooMuch):
                told[id].append(outcome.args[0])
            elif isinstance(outcome, int) and kind in (0, 2, 4):
                told[id].append(outcome)
            await asyncio.sleep(sim.random.uniform(0, 0.05))

    callers = [sim.loop.create_task(caller(number)) for number in range(6)]
    for _ in range(4):
        await sim.advance(sim.random.uniform(0.05, 0.3))
        match sim.random.randrange(3):
            case 0:
                await stalled(sim, sim.random.uniform(0.1, 1.0))
            case 1:
                node = sim.owner(Basket, ids[0])
                sim.crash(node)
                await sim.wait_until(sim.settled)
                sim.start(node)
            case _:
                journal = sim.nodes[sim.owner(Basket, ids[1])].journal
                assert journal is not None
                journal.lost_reply = 0.5
                await sim.advance(0.2)
                journal.lost_reply = 0.0
    await asyncio.gather(*callers)
    for id in ids:
        held = len(sim.events(Basket, id))
        assert all(one <= held for one in told[id])


class Calling(EventSourced[int, Added], name="calling"):
    """Calls from a thread, through another event loop, as a synchronous client does."""

    @staticmethod
    def initial(id: str, /) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: Added, /) -> int:
        return state + event.what

    @handler
    async def call(self, commits: bool) -> str:
        await self.persist(Added(1))
        if commits:
            await self.committed()
        turn = current_turn.get()
        assert turn is not None
        told: list[str] = []

        def elsewhere() -> None:
            try:
                asyncio.run(turn.before_output())
            except RuntimeError as error:
                told.append(str(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return "".join(told)


def test_a_call_through_another_loop_needs_a_commit_before() -> None:
    async def main() -> None:
        async with Node("memory://other-loop", entities=[Calling]) as node:
            calling = node.ref(Calling, "c")
            assert "await self.committed() before" in await calling.ask(Calling.call, False)
            assert await calling.ask(Calling.call, True) == ""

    asyncio.run(main())
