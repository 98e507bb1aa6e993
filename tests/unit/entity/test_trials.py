"""DX-20 at the owner and at senders: starts that are named first, and shards that nobody serves."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import pytest

from domicile import Entity, MaybeExecuted, NotExecuted, Settings, Unavailable, handler
from domicile.core.ids import EntityKey, ShardKey
from domicile.core.state.keys import TRIAL
from domicile.core.state.records import OnTrial, TrialRecord, decode_record
from domicile.entity.hosting.trials import (
    GROW_S,
    LEAST_REST_S,
    MOST_ENTITIES,
    MOST_NAMED,
    NEW_S,
    REST,
    RETRY_S,
    Trial,
    Trials,
)
from domicile.testing import Event, Sim, simulated
from domicile.testing.sim.clock import ManualClock

CAREFUL = Settings(shards=4, poison_deaths=2, fencing="health")
"""After one death every shard is on the brink."""

LAX = Settings(shards=4, fencing="health")


class Vial(Entity, name="vial"):
    @handler
    async def shake(self) -> str:
        return self.id

    @handler
    async def simmer(self, for_s: float) -> str:
        await asyncio.sleep(for_s)
        return self.id

    @handler
    async def stew(self, for_s: float) -> None:
        self.after(for_s, self.boil)

    async def boil(self) -> None:
        await asyncio.sleep(60.0)


# the record, with a store and a clock of the test's own


class Shelf:
    """A store that takes records, or does not, or lets them wait."""

    def __init__(self) -> None:
        self.records: list[tuple[OnTrial, ...]] = []
        self.takes = True
        self.asked = 0
        self.open = asyncio.Event()
        self.open.set()

    async def store(self, record: TrialRecord) -> bool:
        self.asked += 1
        await self.open.wait()
        if self.takes:
            self.records.append(record.trials)
        return self.takes


def shard(number: int) -> ShardKey:
    return ShardKey("r", number)


def key(id: str) -> EntityKey:
    return EntityKey("t", id)


def on(number: int, id: str = "", manner: Literal["", "alone", "long"] = "") -> OnTrial:
    return OnTrial("r", number, 1, "t" if id else "", id, manner)


def begin(trials: Trials, id: str, alone: bool = False) -> asyncio.Task[Trial | None]:
    return asyncio.ensure_future(trials.begin(shard(1), 1, key(id), alone))


def begin_again(
    trials: Trials, id: str, rests: bool = True, until: float = float("inf"), number: int = 1
) -> asyncio.Task[Trial | None]:
    return asyncio.ensure_future(trials.begin_again(shard(number), 1, key(id), rests, until))


def with_trials(body: Callable[[Trials, Shelf, ManualClock], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        clock, shelf = ManualClock(), Shelf()
        trials = Trials(clock, shelf.store)
        await body(trials, shelf, clock)
        await trials.close()

    asyncio.run(run())


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_starts_that_wait_share_a_commit() -> None:
    async def body(trials: Trials, shelf: Shelf, clock: ManualClock) -> None:
        shelf.open.clear()
        begun = [begin(trials, str(n)) for n in range(50)]
        await settle()
        assert not any(one.done() for one in begun)
        shelf.open.set()
        assert all(await asyncio.gather(*begun))
        assert shelf.records == [tuple(on(1, str(n)) for n in range(50))]

    with_trials(body)


def test_a_start_during_a_commit_waits_for_the_next_one() -> None:
    async def body(trials: Trials, shelf: Shelf, clock: ManualClock) -> None:
        shelf.open.clear()
        first = begin(trials, "a")
        await settle()
        others = [begin(trials, id) for id in "abc"]
        await settle()
        shelf.open.set()
        assert all(await asyncio.gather(first, *others))
        assert shelf.records == [(on(1, "a"),), (on(1, "a"), on(1, "b"), on(1, "c"))]

    with_trials(body)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.scenario("DX-24", partial=True)
def test_a_name_leaves_the_record_with_the_end_of_its_handler(alone: bool) -> None:
    """No time passes. An unrelated crash after that blames nobody."""

    async def body(trials: Trials, shelf: Shelf, clock: ManualClock) -> None:
        trial = await begin(trials, "a", alone)
        assert trial is not None
        await settle()
        assert shelf.records == [(on(1, "a", "alone" if alone else ""),)]
        trials.end(trial)
        await settle()
        assert shelf.records[1:] == [()]
        clock.advance(60.0)
        await settle()
        assert len(shelf.records) == 2, "nothing is left to look after"

    with_trials(body)


def test_ends_and_starts_that_come_together_share_a_commit() -> None:
    async def body(trials: Trials, shelf: Shelf, clock: ManualClock) -> None:
        running = [await begin(trials, id) for id in "abc"]
        written = len(shelf.records)
        for trial in running:
            assert trial is not None
            trials.end(trial)
        assert await trials.begin(shard(1), 1, key("d"), False) is not None
        assert shelf.records[written:] == [(on(1, "d"),)]

    with_trials(body)


def test_a_name_stays_while_any_of_its_handlers_runs() -> None:
    async def body(trials: Trials, shelf: Shelf, clock: ManualClock) -> None:
        first, second = await begin(trials, "a"), await begin(trials, "a")
        assert first is not None
        assert second is not None
        trials.end(first)
        trials.end(first)
        await settle()
        assert shelf.records == [(on(1, "a"),)], "and an end that is said twice counts once"
        trials.end(second)
        await settle()
        assert shelf.records[1:] == [()]

    with_trials(body)


def test_entities_on_the_brink_are_tried_one_at_a_time() -> None:
    async def body(trials: Trials, shelf: Shelf, clock: ManualClock) -> None:
        begun = [begin(trials, id, alone=True) for id in "abc"]
        await settle()
        for at, id in enumerate("abc"):
            assert [one.done() for one in begun] == [other <= at for other in range(3)]
            assert shelf.records[at:] == [(on(1, id, "alone"),)], "exactly one is named"
            trial = begun[at].result()
            assert trial is not None
            trials.end(trial)
            await settle()
        assert shelf.records[3:] == [()]

    with_trials(body)


@pytest.mark.parametrize("alone", [False, True])
def test_a_handler_that_runs_on_is_told_apart(alone: bool) -> None:
    async def body(trials: Trials, shelf: Shelf, clock: ManualClock) -> None:
        trial = await begin(trials, "a", alone)
        assert trial is not None
        clock.advance(NEW_S - 0.01)
        await settle()
        assert len(shelf.records) == 1
        clock.advance(0.02)
        await settle()
        assert shelf.records[1:] == [(on(1, "a", "long"),)]
        trials.end(trial)
        await settle()
        assert shelf.records[2:] == [()]

    with_trials(body)


def test_a_handler_that_runs_on_gives_its_place_away() -> None:
    async def body(trials: Trials, shelf: Shelf, clock: ManualClock) -> None:
        slow, next_one = begin(trials, "slow", alone=True), begin(trials, "next", alone=True)
        await settle()
        assert slow.done()
        assert not next_one.done()
        clock.advance(NEW_S)
        await settle()
        assert next_one.done()
        assert shelf.records[1:] == [(on(1, "slow", "long"), on(1, "next", "alone"))]

    with_trials(body)


def test_places_grow_while_entities_wait_for_long() -> None:
    async def body(trials: Trials, shelf: Shelf, clock: ManualClock) -> None:
        begun = [begin(trials, str(n), alone=True) for n in range(60)]
        await settle()
        served: list[int] = []
        for _ in range(int(4 * GROW_S / NEW_S)):
            clock.advance(NEW_S)
            await settle()
            served.append(sum(one.done() for one in begun))
        steps = [after - before for before, after in itertools.pairwise(served)]
        assert steps[0] == 1
        assert max(steps) >= 4
        for one in begun:
            one.cancel()

    with_trials(body)


def test_places_grow_although_no_handler_gives_its_place_away() -> None:
    """The store is slow, so the first is not named yet."""

    async def body(trials: Trials, shelf: Shelf, clock: ManualClock) -> None:
        shelf.open.clear()
        begun = [begin(trials, id, alone=True) for id in "ab"]
        await settle()
        clock.advance(GROW_S)
        await settle()
        shelf.open.set()
        await settle()
        assert all(one.done() for one in begun)
        assert shelf.records == [
            (on(1, "a", "alone"),),
            (on(1, "a", "alone"), on(1, "b", "alone")),
        ]

    with_trials(body)


def test_later_runs_are_named_as_long_and_beside_each_other() -> None:
    async def body(trials: Trials, shelf: Shelf, clock: ManualClock) -> None:
        running = [await begin_again(trials, id, rests=False) for id in "ab"]
        assert shelf.records[-1] == (on(1, "a", "long"), on(1, "b", "long"))
        for trial in running:
            assert trial is not None
            trials.end(trial)
        await settle()
        assert shelf.records[-1] == ()

    with_trials(body)


def test_runs_that_rest_come_one_at_a_time_and_the_record_is_empty_in_between() -> None:
    async def body(trials: Trials, shelf: Shelf, clock: ManualClock) -> None:
        begun = [begin_again(trials, id) for id in "ab"]
        other = await begin_again(trials, "c", number=2)
        assert other is not None, "each shard has its own turns"
        trials.end(other)
        await settle()
        first = begun[0].result()
        assert first is not None
        clock.advance(0.1)
        trials.end(first)
        await settle()
        assert shelf.records[-1] == ()
        clock.advance(0.1 * REST - 0.01)
        await settle()
        assert not begun[1].done()
        assert shelf.records[-1] == ()
        clock.advance(0.02)
        await settle()
        second = begun[1].result()
        assert second is not None
        assert shelf.records[-1] == (on(1, "b", "long"),)
        trials.end(second)
        third = begin_again(trials, "a")
        clock.advance(LEAST_REST_S - 0.001)
        await settle()
        assert not third.done(), "the shortest run, too, is followed by a rest"
        clock.advance(0.002)
        await settle()
        assert third.done()

    with_trials(body)


def test_a_run_that_goes_on_for_long_gives_its_turn_away() -> None:
    async def body(trials: Trials, shelf: Shelf, clock: ManualClock) -> None:
        slow, next_one = begin_again(trials, "slow"), begin_again(trials, "next")
        await settle()
        assert slow.done()
        clock.advance(NEW_S)
        await settle()
        clock.advance(NEW_S * REST)
        await settle()
        assert next_one.done()
        assert shelf.records[-1] == (on(1, "slow", "long"), on(1, "next", "long"))
        trial = slow.result()
        assert trial is not None
        trials.end(trial)
        last = begin_again(trials, "last")
        await settle()
        assert not last.done(), "an end that comes later gives no turn away"

    with_trials(body)


def test_a_run_that_comes_too_late_or_is_given_up_is_not_named() -> None:
    async def body(trials: Trials, shelf: Shelf, clock: ManualClock) -> None:
        first = await begin_again(trials, "first")
        assert first is not None
        waiting = [
            begin_again(trials, "late", until=clock.now() + 0.01),
            begin_again(trials, "gone"),
            begin_again(trials, "goes"),
            begin_again(trials, "last"),
        ]
        await settle()
        waiting[1].cancel()
        trials.end(first)
        await settle()
        clock.advance(0.01)
        await settle()
        late = waiting[0].result()
        assert late is not None
        assert late.name is None
        waiting[2].cancel()
        clock.advance(LEAST_REST_S)
        await settle()
        assert waiting[3].done()
        names = [name.id for record in shelf.records for name in record]
        assert names == ["first", "last"]

    with_trials(body)


def test_a_caller_that_gives_up_leaves_its_place_to_the_next() -> None:
    async def body(trials: Trials, shelf: Shelf, clock: ManualClock) -> None:
        first = await begin(trials, "a", alone=True)
        assert first is not None
        waiting = [begin(trials, id, alone=True) for id in "bcd"]
        await settle()
        waiting[0].cancel()
        trials.end(first)
        waiting[1].cancel()
        await settle()
        assert [one.done() for one in waiting] == [True, True, True]
        assert waiting[2].result() is not None
        assert shelf.records[-1] == (on(1, "d", "alone"),)

    with_trials(body)


def test_a_caller_that_gives_up_while_it_is_named_leaves_no_name() -> None:
    async def body(trials: Trials, shelf: Shelf, clock: ManualClock) -> None:
        shelf.open.clear()
        caller = begin(trials, "a")
        await settle()
        caller.cancel()
        await settle()
        shelf.open.set()
        await settle()
        assert shelf.records == [(on(1, "a"),), ()]

    with_trials(body)


def test_what_the_store_does_not_take_does_not_begin_and_the_next_tries_again() -> None:
    async def body(trials: Trials, shelf: Shelf, clock: ManualClock) -> None:
        shelf.takes = False
        assert await begin(trials, "a") is None
        assert await begin(trials, "b", alone=True) is None
        shelf.takes = True
        assert await begin(trials, "c", alone=True) is not None
        assert shelf.records == [(on(1, "c", "alone"),)]

    with_trials(body)


def test_a_slow_store_takes_no_place_from_an_entity_that_is_not_named_yet() -> None:
    async def body(trials: Trials, shelf: Shelf, clock: ManualClock) -> None:
        shelf.open.clear()
        begun = [begin(trials, id, alone=True) for id in "ab"]
        await settle()
        clock.advance(3 * NEW_S)
        await settle()
        shelf.open.set()
        await settle()
        assert shelf.records == [(on(1, "a", "alone"),)]
        assert begun[0].result() is not None
        begun[1].cancel()

    with_trials(body)


def test_a_name_that_could_not_be_removed_is_removed_later() -> None:
    """A name that stays would blame an innocent. A store that is away is not asked in a loop."""

    async def body(trials: Trials, shelf: Shelf, clock: ManualClock) -> None:
        trial = await begin(trials, "a")
        assert trial is not None
        shelf.takes = False
        trials.end(trial)
        for _ in range(8):
            await settle()
            clock.advance(RETRY_S)
        await settle()
        assert shelf.asked == 1 + 9
        shelf.takes = True
        clock.advance(RETRY_S)
        await settle()
        assert shelf.records == [(on(1, "a"),), ()]

    with_trials(body)


def test_those_that_wait_are_refused_when_the_node_stops() -> None:
    async def body(trials: Trials, shelf: Shelf, clock: ManualClock) -> None:
        shelf.open.clear()
        waiting = [begin(trials, id) for id in "ab"]
        await settle()
        waiting.append(begin(trials, "c"))
        await settle()
        await trials.close()
        assert await asyncio.gather(*waiting) == [None, None, None]
        assert await begin(trials, "d") is None

    with_trials(body)


def test_the_record_is_bounded_and_long_ids_are_left_out() -> None:
    async def body(trials: Trials, shelf: Shelf, clock: ManualClock) -> None:
        many = [trials.begin(shard(n), 1, key(str(n)), False) for n in range(MOST_NAMED + 10)]
        running = await asyncio.gather(*many)
        assert all(running)
        (record,) = shelf.records
        assert len(record) == MOST_NAMED
        assert record[: MOST_ENTITIES + 1] == (
            *(on(n, str(n)) for n in range(MOST_ENTITIES)),
            on(MOST_ENTITIES),
        )
        for trial in running:
            assert trial is not None
            trials.end(trial)
        await settle()
        assert shelf.records[1:] == [()]
        for id in ("x" * 1_000, "\ud800"):
            assert await begin(trials, id) is not None
            assert OnTrial("r", 1, 1, "t", "") in shelf.records[-1]

    with_trials(body)


# in a cluster


def trials_of(sim: Sim) -> list[tuple[Event, tuple[OnTrial, ...]]]:
    """Each record of trials that was stored, in order."""
    return [
        (event, decode_record(value, TrialRecord).trials)
        for event in sim.history.of("commit")
        for key, value, *_ in event.fields["puts"]
        if key.startswith(TRIAL)
    ]


def same_shard(sim: Sim, count: int) -> list[str]:
    """Entities of one shard."""
    shard = sim.shard(Vial, "v0")
    return [id for n in range(200) if sim.shard(Vial, id := f"v{n}") == shard][:count]


async def after_a_death(sim: Sim) -> None:
    """Crash the owner of `v0`, and wait for the next."""
    sim.crash(sim.owner(Vial, "v0"))
    await sim.wait_until(lambda: sim.entry(sim.shard(Vial, "v0")).deaths == 1)
    await sim.wait_until(sim.settled)


@simulated(entities=[Vial], nodes=2, seeds=5, settings=CAREFUL, locks=True)
async def test_each_entity_on_the_brink_is_named_before_it_starts(sim: Sim) -> None:
    await after_a_death(sim)
    ids = same_shard(sim, 6)
    asks = [sim.ref(Vial, id).ask(Vial.shake) for id in ids for _ in range(3)]
    assert await asyncio.gather(*asks) == [id for id in ids for _ in range(3)]
    records = trials_of(sim)
    assert all(len(names) == 1 for _, names in records)
    started = {event.fields["id"]: event for event in reversed(list(sim.history.of("start")))}
    named = {names[0].id: event for event, names in records}
    assert sorted(named) == sorted(started) == sorted(ids)
    assert all(named[id].at < started[id].at for id in ids)


@simulated(entities=[Vial], nodes=2, seeds=5, settings=LAX, locks=True)
async def test_a_shard_without_deaths_has_no_trials(sim: Sim) -> None:
    for id in same_shard(sim, 3):
        assert await sim.ref(Vial, id).ask(Vial.shake) == id
    assert not trials_of(sim)
    await after_a_death(sim)
    shard = sim.shard(Vial, "v0")
    for id in same_shard(sim, 3):
        assert await sim.ref(Vial, id).ask(Vial.shake) == id
    found = [name for _, names in trials_of(sim) for name in names]
    assert found == [
        OnTrial(*shard, sim.entry(shard).epoch, "vial", id) for id in same_shard(sim, 3)
    ]


@simulated(entities=[Vial], nodes=2, seeds=5, settings=CAREFUL, locks=True)
async def test_what_can_not_be_named_does_not_start_and_the_next_tries_again(sim: Sim) -> None:
    await after_a_death(sim)
    ids = same_shard(sim, 4)
    owner = sim.owner(Vial, ids[0])
    sim.cut_store(owner)
    asks = [sim.ref(Vial, id).ask(Vial.shake) for id in ids]
    for error in await asyncio.gather(*asks, return_exceptions=True):
        assert isinstance(error, Unavailable)
        assert "try again" in str(error)
    assert not list(sim.history.of("start"))
    sim.heal()
    for id in ids:
        assert await sim.ref(Vial, id).ask(Vial.shake) == id


# what senders learn of a quarantine


def quarantined(sim: Sim, shard: ShardKey) -> bool:
    return sim.entry(shard).state == "quarantined"


def started(sim: Sim) -> list[str]:
    """Methods of all messages and timers that began."""
    return [event.fields["method"] for event in sim.history.of("start")]


LONG = "v" * 600
"""An id that is too long for a record: its whole shard is put away."""


@pytest.mark.scenario("DX-20", partial=True)
@simulated(entities=[Vial], nodes=4, seeds=5, settings=CAREFUL, locks=True)
async def test_a_quarantine_is_told_at_once_to_all_that_wait_and_all_that_come(sim: Sim) -> None:
    shard = sim.shard(Vial, LONG)
    sim.crash(sim.owner(Vial, LONG))
    await sim.wait_until(lambda: sim.entry(shard).deaths == 1 and sim.settled())
    owner = sim.owner(Vial, LONG)
    where = f"{shard.role}/{shard.shard}"
    number = itertools.count()
    near = next(id for n in number if sim.shard(Vial, id := f"v{n}") == shard)
    cooking = asyncio.ensure_future(sim.ref(Vial, near).ask(Vial.simmer, 60.0))
    await sim.wait_until(lambda: "simmer" in started(sim))
    await sim.ref(Vial, LONG).ask(Vial.stew, 1.2)
    # Its connection is down, so what comes now waits here.
    sim.partition([owner], [node.index for node in sim.nodes if node.index != owner and node.up])
    sim.network.block("client", sim.node_id(owner))
    sim.cut_client(owner)
    await sim.advance(1.0)
    waiting = asyncio.ensure_future(sim.ref(Vial, LONG).ask(Vial.shake))
    await sim.ref(Vial, LONG).tell(Vial.shake)
    await sim.wait_until(lambda: "boil" in started(sim))
    sim.crash(owner)
    began = sim.world.now
    await sim.wait_until(lambda: quarantined(sim, shard))
    with pytest.raises(NotExecuted, match=f"shard {where} is quarantined"):
        await waiting
    with pytest.raises(MaybeExecuted):
        await cooking
    for _ in range(2):
        with pytest.raises(Unavailable, match=f"domicile unquarantine {where}"):
            await sim.ref(Vial, LONG).ask(Vial.shake)
        with pytest.raises(Unavailable, match="2 owners died within 60 s"):
            await sim.ref(Vial, LONG).tell(Vial.shake)
    assert sim.world.now - began < 5.0, "nobody waited for a timeout"
    other = next(id for n in range(100) if sim.shard(Vial, id := f"v{n}") != shard)
    assert await sim.ref(Vial, other).ask(Vial.shake) == other
    await sim.wait_until(lambda: not quarantined(sim, shard) and sim.settled(), timeout_s=20)
    assert await sim.ref(Vial, LONG).ask(Vial.shake) == LONG
