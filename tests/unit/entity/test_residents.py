"""Who is resident: the wheel of idle times, the limit, and both in a simulated node."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile import ConfigError, Entity, Settings, handler
from domicile.core.ids import EntityKey
from domicile.entity.hosting.policies import POLICIES
from domicile.entity.hosting.residents import (
    PERIOD_S,
    REST,
    SLICE,
    TRIES,
    IdleWheel,
    Residents,
    StopReason,
)
from domicile.entity.model.entity import entity_type
from domicile.ports.meter import NoMeter
from domicile.testing import Sim, simulated


class Item:
    """A cell, as far as residents care."""

    def __init__(self, number: int = 0, idle_s: float = 10.0, *, busy: bool = False) -> None:
        self.key = EntityKey("item", str(number))
        self.idle_s = idle_s
        self.used_at = 0.0
        self.bucket: dict[Any, None] | None = None
        self.busy = busy
        self.awaits_timer = False

    def __repr__(self) -> str:
        return f"<{self.key.id}>"


class Meter(NoMeter):
    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def count(self, name: str, value: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + value


class Place:
    """Residents whose stop is at once, unless they are busy."""

    def __init__(self, limit: int = 0, by: str = "lru") -> None:
        self.meter = Meter()
        self.asked: list[Item] = []
        self.reasons: list[StopReason] = []
        self.here: dict[Item, None] = {}
        self.called = False
        self.residents: Residents[Item] = Residents(
            self.stop, self.call, self.meter, 0.0, limit=limit, by=by
        )

    def call(self) -> None:
        assert not self.called, "once is enough"
        self.called = True

    def stop(self, item: Item, why: StopReason) -> bool:
        self.asked.append(item)
        self.reasons.append(why)
        if item.busy:
            return False
        del self.here[item]
        self.residents.left(item)
        return True

    def arrive(self, item: Item, now: float = 0.0) -> Item:
        self.here[item] = None
        self.residents.arrived(item, now)
        while self.called:
            self.called = False
            self.residents.trim()
        return item


# the wheel


def test_the_wheel_gives_what_is_due_and_not_before() -> None:
    wheel: IdleWheel[Item] = IdleWheel(100.0)
    early, late, never = Item(1), Item(2), Item(3)
    wheel.add(early, 110.0)
    wheel.add(late, 117.5)
    wheel.add(never, math.inf)
    assert len(wheel) == 2
    assert wheel.due(110.0, 9) == []
    assert wheel.due(110.0 + PERIOD_S, 9) == [early]
    assert early.bucket is None
    wheel.remove(late)
    wheel.remove(late)
    assert wheel.due(1_000.0, 9) == []
    assert len(wheel) == 0


def test_the_wheel_takes_no_more_than_asked_and_goes_on() -> None:
    wheel: IdleWheel[Item] = IdleWheel(0.0)
    items = [Item(number) for number in range(25)]
    for item in items:
        wheel.add(item, 5.0)
    found: list[Item] = []
    while some := wheel.due(8.0, 10):
        assert len(some) <= 10
        found += some
    assert sorted(map(id, found)) == sorted(map(id, items))


def test_what_is_overdue_when_added_comes_next() -> None:
    wheel: IdleWheel[Item] = IdleWheel(0.0)
    assert wheel.due(50.0, 9) == []
    item = Item()
    wheel.add(item, 3.0)
    assert wheel.due(50.0, 9) == []
    assert wheel.due(50.0 + PERIOD_S, 9) == [item]


times = st.floats(0, 60, allow_nan=False)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 5), times),
        st.tuples(st.just("remove"), st.integers(0, 5), times),
        st.tuples(st.just("due"), st.integers(1, 3), times),
    )
)


@given(script=steps)
def test_the_wheel_loses_nobody_and_is_never_early(script: list[tuple[str, int, float]]) -> None:
    wheel: IdleWheel[Item] = IdleWheel(0.0)
    items = [Item(number) for number in range(6)]
    due_at: dict[Item, float] = {}
    now = 0.0
    for step, number, time in script:
        if step == "add":
            wheel.add(items[number], now + time)
            due_at[items[number]] = now + time
        elif step == "remove":
            wheel.remove(items[number])
            due_at.pop(items[number], None)
        else:
            now += time
            for item in wheel.due(now, number):
                assert due_at.pop(item) <= now
        assert len(wheel) == len(due_at)
    found = wheel.due(now + 200.0, 99)
    assert sorted(map(repr, found)) == sorted(map(repr, due_at))


# residents


def test_a_sweep_stops_the_idle_and_looks_at_nobody_else() -> None:
    place = Place()
    idle, used, busy, never = (place.arrive(Item(n)) for n in range(4))
    long = place.arrive(Item(9, idle_s=1_000.0))
    never.idle_s = math.inf
    place.residents.left(never)
    place.residents.arrived(never, 0.0)
    used.used_at = 8.0
    busy.busy = True
    assert not place.residents.sweep(5.0)
    assert place.asked == []
    assert not place.residents.sweep(12.0)
    assert idle not in place.here
    assert sorted(map(repr, place.asked)) == ["<0>", "<2>"], "the used one was not even asked"
    busy.busy, busy.used_at = False, 13.0
    place.residents.sweep(20.0)
    assert used not in place.here
    assert busy in place.here
    place.residents.sweep(30.0)
    assert list(place.here) == [never, long]
    assert place.residents.count == 2
    assert place.meter.counts == {"residents.idle": 3}


def test_an_entity_with_a_timer_is_not_idle_but_goes_if_there_are_too_many() -> None:
    place = Place(limit=1)
    waits = place.arrive(Item(0))
    waits.awaits_timer = True
    place.residents.sweep(12.0)
    assert place.asked == []
    waits.awaits_timer = False
    place.residents.sweep(25.0)
    assert (list(place.here), place.reasons) == ([], [StopReason.IDLE])
    place.arrive(Item(1)).awaits_timer = True
    place.arrive(Item(2))
    assert [item.key.id for item in place.here] == ["2"]
    assert place.reasons[1:] == [StopReason.EVICTED]


def test_a_sweep_is_cut_into_slices() -> None:
    place = Place()
    for number in range(2 * SLICE + 1):
        place.arrive(Item(number))
    assert place.residents.sweep(20.0)
    assert len(place.here) == SLICE + 1
    assert place.residents.sweep(20.0)
    assert not place.residents.sweep(20.0)
    assert not place.here


def test_a_use_costs_nothing_and_one_look_serves_a_whole_idle_time() -> None:
    place, looks = Place(), 0
    items = [place.arrive(Item(number)) for number in range(100)]

    class Counted(Item):
        @property
        def idle_s(self) -> float:  # type: ignore[override]
            nonlocal looks
            looks += 1
            return 10.0

        @idle_s.setter
        def idle_s(self, value: float) -> None: ...

    items = [place.arrive(Counted(number)) for number in range(100, 200)]
    looks = 0
    for now in range(1, 101):
        for item in items:
            item.used_at = float(now)
        place.residents.sweep(float(now))
    assert len(place.here) == 100
    assert looks <= 100 * 2 * 12, "about once per idle time, not once per sweep"


def test_the_limit_is_kept_by_stopping_the_longest_unused() -> None:
    place = Place(limit=3)
    items = [place.arrive(Item(number)) for number in range(3)]
    place.residents.touch(items[0])
    place.arrive(Item(3))
    place.arrive(Item(4))
    assert [item.key.id for item in place.here] == ["0", "3", "4"]
    assert place.meter.counts == {"residents.evicted": 2}


def test_many_that_arrive_at_once_are_made_up_for_turn_by_turn() -> None:
    place = Place(limit=10)
    for number in range(10 + 2 * TRIES):
        item = Item(number)
        place.here[item] = None
        place.residents.arrived(item, 0.0)
    assert len(place.here) == 10 + 2 * TRIES, "nobody goes while someone else arrives"
    turns = 0
    while place.called:
        place.called = False
        place.residents.trim()
        turns += 1
    assert len(place.here) == 10
    assert turns == 2


def test_busy_ones_stay_the_limit_is_exceeded_and_counted_and_made_up_for() -> None:
    place = Place(limit=3)
    items = [place.arrive(Item(number)) for number in range(3)]
    for item in items:
        item.busy = True
    for number in range(3, 3 + REST):
        place.arrive(Item(number, busy=True))
    assert len(place.here) == 3 + REST
    assert place.meter.counts == {"residents.over": 1}, "not searched again for each"
    for item in list(place.here):
        item.busy = False
    place.residents.sweep(1.0)
    assert len(place.here) == 3


def test_one_idle_among_many_busy_ones_is_found() -> None:
    place = Place(limit=20)
    items = [place.arrive(Item(number)) for number in range(20)]
    for item in items:
        item.busy = item is not items[15]
    place.arrive(Item(20, busy=True))
    assert items[15] not in place.here
    assert len(place.here) == 20


def test_the_busy_do_not_hide_the_idle_for_long() -> None:
    place = Place(limit=2 * TRIES)
    items = [place.arrive(Item(number)) for number in range(2 * TRIES)]
    for item in items[: TRIES + 10]:
        item.busy = True
    for number in range(2 * TRIES, 2 * TRIES + 2 * REST + 2):
        place.arrive(Item(number, busy=True))
    assert len(place.here) == 2 * TRIES
    assert items[TRIES + 10] not in place.here


def test_who_left_is_not_looked_at_again() -> None:
    place = Place(limit=1)
    item = place.arrive(Item())
    del place.here[item]
    place.residents.left(item)
    place.residents.sweep(100.0)
    place.arrive(Item(1))
    assert place.asked == []


@pytest.mark.parametrize("by", POLICIES)
@given(script=st.lists(st.tuples(st.sampled_from("aatbfs"), st.integers(0, 11))))
def test_never_more_idle_ones_than_the_limit_allows(by: str, script: list[tuple[str, int]]) -> None:
    place = Place(limit=4, by=by)
    items = [Item(number) for number in range(12)]
    now = 0.0
    for step, number in script:
        item = items[number]
        here = item in place.here
        if step == "a" and not here:
            place.arrive(item, now)
        elif step == "t" and here:
            item.used_at = now
            place.residents.touch(item)
        elif step == "b":
            item.busy = here
        elif step == "f":
            item.busy = False
        elif step == "s":
            now += number
            place.residents.sweep(now)
            busy = sum(item.busy for item in place.here)
            assert len(place.here) <= max(4, busy)
        assert place.residents.count == len(place.here)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="residents_policy='best' must be one of"):
        Place(limit=3, by="best")
    assert Place(by="best").residents.limited is False


# in a simulated node

log: list[Any] = []


class Guest(Entity, name="guest"):
    async def on_start(self) -> None:
        log.append(("on_start", self.id))

    async def on_stop(self) -> None:
        log.append(("on_stop", self.id))

    @handler
    async def hello(self) -> str:
        return self.id

    @handler
    async def stay(self, for_s: float) -> None:
        await asyncio.sleep(for_s)


class Fixture(Entity, name="fixture", idle_s=None):
    def __init__(self) -> None:
        self.count = 0

    @handler
    async def hello(self) -> int:
        self.count += 1
        return self.count


def residents_of(sim: Sim, node: int = 0) -> int:
    process = sim.nodes[node].node
    assert process is not None
    assert process.life is not None
    runtime = process.life.runtime
    cells = sum(len(host.cells) for host in runtime.hosts.values())
    assert cells == runtime.residents.count
    return cells


@pytest.mark.parametrize("by", POLICIES)
def test_a_node_keeps_its_limit(by: str) -> None:
    settings = Settings(shards=4, residents=5, residents_policy=by)

    @simulated(entities=[Guest], nodes=1, seeds=1, settings=settings)
    async def body(sim: Sim) -> None:
        log.clear()
        for number in range(40):
            id = f"g{number % 13}"
            assert await sim.ref(Guest, id).ask(Guest.hello) == id
            assert residents_of(sim) <= 6, "at most one more, while its on_stop runs"
        await sim.advance(1.0)
        assert residents_of(sim) == 5
        assert sim.history.counts["residents.evicted"] >= 8
        starts, stops = (sum(what == kind for what, _ in log) for kind in ("on_start", "on_stop"))
        assert starts - stops == 5

    body()


@simulated(entities=[Guest], nodes=1, seeds=2, settings=Settings(shards=4, residents=2))
async def test_every_message_counts_as_a_use(sim: Sim) -> None:
    log.clear()
    for id in ("a", "b", "a", "c"):
        await sim.ref(Guest, id).ask(Guest.hello)
    await sim.advance(0.5)
    assert log == [("on_start", "a"), ("on_start", "b"), ("on_start", "c"), ("on_stop", "b")]


@simulated(entities=[Guest], nodes=1, seeds=2, settings=Settings(shards=4, residents=3))
async def test_busy_entities_are_not_stopped_for_others(sim: Sim) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(sim.ref(Guest, f"g{number}").ask(Guest.stay, 2.0))
        await sim.advance(1.0)
        assert residents_of(sim) == 8
        assert sim.history.counts["residents.over"] > 0
    await sim.advance(10.0)
    assert residents_of(sim) == 3


@simulated(entities=[Guest, Fixture], nodes=1, seeds=1, settings=Settings(shards=4, idle_s=10))
async def test_a_type_without_an_idle_time_stays(sim: Sim) -> None:
    await sim.ref(Guest, "g").ask(Guest.hello)
    await sim.ref(Fixture, "f").ask(Fixture.hello)
    assert residents_of(sim) == 2
    await sim.advance(400.0)
    assert residents_of(sim) == 1
    assert await sim.ref(Fixture, "f").ask(Fixture.hello) == 2
    assert entity_type(Fixture).idle_s == math.inf


@simulated(entities=[Guest, Fixture], nodes=2, seeds=2, settings=Settings(shards=4))
async def test_residents_are_counted_through_moves_and_fences(sim: Sim) -> None:
    for number in range(12):
        await sim.ref(Guest, f"g{number}").ask(Guest.hello)
        await sim.ref(Fixture, f"f{number}").ask(Fixture.hello)
    assert residents_of(sim, 0) + residents_of(sim, 1) == 24
    await sim.drain(0)
    await sim.wait_until(lambda: residents_of(sim, 0) == 0)
    await sim.undrain(0)
    for number in range(12):
        await sim.ref(Guest, f"g{number}").ask(Guest.hello)
    await sim.wait_until(sim.settled)
    residents_of(sim, 0)
    residents_of(sim, 1)
