"""Scenarios of timers (DX-25): they fire once, also after moves, or their loss is told."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lines_lab import whole_lines
from real_entities import LEDGER, enter
from real_lab import balanced, judge, open_ledger, run
from room_lab import cell_of, move

from domicile import Entity, NotExecuted, Settings, handler
from domicile.core.ids import ShardKey
from domicile.testing import Processes, Sim, simulated

SETTINGS = Settings(shards=6)

RINGS: list[tuple[str, int, float]] = []
"""What rang in a simulation: id, number, virtual time."""

LOG: list[tuple[str, str]] = []

SIMS: list[Sim] = []
"""The simulation that runs."""


class Bell(Entity, name="timer-bell", idle_s=10):
    """Rings when it was told to."""

    async def on_start(self) -> None:
        LOG.append((self.id, "start"))
        if self.id.startswith("late"):
            self.after(1.0, self.ring, 99)
        if self.id.startswith("broken") and len(LOG) < 4:
            self.after(0.0, self.ring, 98)
            raise OSError("not yet")

    async def on_stop(self) -> None:
        LOG.append((self.id, "stop"))
        if self.id.startswith("slow"):
            await asyncio.sleep(3.0)
        if self.id.startswith("parting"):
            self.after(5.0, self.ring, 97)

    @handler
    async def ring_in(self, delay_s: float, number: int) -> None:
        self.after(delay_s, self.ring, number)

    @handler
    async def chime_in(self, delay_s: float, count: int) -> None:
        self.after(delay_s, self.chime, [count], times=count)

    @handler
    async def ring_with(self, what: str) -> None:
        given: Any = object() if what == "object" else "x" * 30_000
        self.after(5.0, self.ring, given)

    @handler
    async def busy(self, for_s: float) -> None:
        await asyncio.sleep(for_s)

    @handler
    async def leave(self) -> None:
        self.passivate()

    async def ring(self, number: int) -> None:
        self.note(number)

    @handler(name="other name on the wire")
    async def chime(self, counts: list[int], *, times: int) -> None:
        assert counts == [times]
        self.note(times)

    def note(self, number: int) -> None:
        if LEDGER in os.environ:
            enter(self.id, "ring", number)
        else:
            RINGS.append((self.id, number, SIMS[0].world.now))
            LOG.append((self.id, f"ring in epoch {self.epoch}"))


class CarriedBell(Bell, name="timer-carried-bell", carry=True):
    """Also takes along how often it rang."""

    rang: int = 0

    @handler
    async def count(self) -> int:
        return self.rang

    async def ring(self, number: int) -> None:
        self.rang += 1
        self.note(number)


class Fading(Entity, name="timer-fading", carry=True, idle_s=5):
    """Carries, and idles by its own wish."""

    count: int = 0

    @handler
    async def add(self) -> int:
        self.count += 1
        return self.count


BELLS: list[type[Bell]] = [Bell, CarriedBell]
KINDS = pytest.mark.parametrize("kind", BELLS)


def clear(sim: Sim) -> None:
    RINGS.clear()
    LOG.clear()
    SIMS[:] = [sim]


def rung(id: str) -> list[int]:
    return [number for one, number, _ in RINGS if one == id]


def lost(sim: Sim) -> int:
    return sim.history.counts["timer.lost"]


def at_s(began: float) -> list[float]:
    return [round(at - began, 1) for _, _, at in RINGS]


def joined(sim: Sim, node: int) -> bool:
    return sim.nodes[node].incarnation is not None


def has_rung(id: str, number: int) -> bool:
    return number in rung(id)


def id_near(sim: Sim, shard: ShardKey, name: str, kind: type[Entity] = Bell) -> str:
    """An id with that prefix in a shard."""
    ids = (f"{name}{number}" for number in range(1_000))
    return next(id for id in ids if sim.shard(kind, id) == shard)


# DX-25: idle


@pytest.mark.scenario("DX-25", partial=True)
@simulated(entities=[Bell], nodes=2, seeds=4, settings=SETTINGS)
async def test_an_entity_with_a_pending_timer_is_not_idle(sim: Sim) -> None:
    clear(sim)
    began = sim.world.now
    await sim.ref(Bell, "b").ask(Bell.ring_in, 30.0, 1)
    await sim.advance(29.0)
    assert LOG == [("b", "start")], "its idle time of 10 s has passed twice"
    await sim.advance(5.0)
    assert at_s(began) == [30.0]
    await sim.advance(10.0)
    assert LOG[-1] == ("b", "stop"), "its idle time began when the timer had run"
    assert lost(sim) == 0


# DX-25: planned moves


@pytest.mark.scenario("DX-25", partial=True)
@KINDS
def test_a_move_takes_timers_along(kind: type[Bell]) -> None:
    @simulated(entities=[kind], nodes=2, seeds=4, settings=SETTINGS)
    async def test(sim: Sim) -> None:
        clear(sim)
        began = sim.world.now
        await sim.ref(kind, "b").ask(kind.ring_in, 5.0, 1)
        await sim.ref(kind, "b").ask(kind.chime_in, 7.0, 3)
        await sim.advance(1.0)
        await move(sim, kind, "b")
        assert cell_of(sim, kind, "b") is None, "nothing starts it before"
        await sim.advance(1.0)
        await move(sim, kind, "b")
        await sim.advance(10.0)
        assert (rung("b"), at_s(began)) == ([1, 3], [5.0, 7.0])
        assert LOG.count(("b", "start")) == 2
        assert lost(sim) == 0
        assert sim.history.counts["timer.sent"] == sim.history.counts["timer.taken"] == 4

    test()


@pytest.mark.scenario("DX-25", partial=True)
@KINDS
def test_an_orderly_stop_of_the_home_takes_timers_along(kind: type[Bell]) -> None:
    @simulated(entities=[kind], nodes=2, seeds=4, settings=SETTINGS)
    async def test(sim: Sim) -> None:
        clear(sim)
        began = sim.world.now
        await sim.ref(kind, "b").ask(kind.ring_in, 5.0, 1)
        await sim.stop(sim.owner(kind, "b"))
        await sim.advance(10.0)
        assert (rung("b"), at_s(began)) == ([1], [5.0])
        assert lost(sim) == 0

    test()


@pytest.mark.scenario("DX-25", partial=True)
@simulated(entities=BELLS, nodes=3, seeds=6, settings=SETTINGS)
async def test_every_timer_fires_once_through_a_rolling_restart(sim: Sim) -> None:
    clear(sim)
    began = sim.world.now
    bells = [(kind, f"{kind.__name__}{number}") for kind in BELLS for number in range(12)]
    for number, (kind, id) in enumerate(bells):
        await sim.ref(kind, id).ask(kind.ring_in, 1.0 + number, number)
    for node in range(3):
        await sim.stop(node)
        sim.start(node, version="2")
        await sim.wait_until(partial(joined, sim, node))
        await sim.advance(1.0)
    await sim.advance(30.0)
    for number, (_, id) in enumerate(bells):
        assert rung(id) == [number]
    # A shard is away for a moment only.
    late = [at - began - 1.0 - number for _, number, at in RINGS]
    assert max(late) < 1.5
    assert lost(sim) == 0


@pytest.mark.scenario("DX-25", partial=True)
@simulated(entities=[Bell], nodes=2, seeds=4, settings=SETTINGS)
async def test_a_newer_timer_replaces_one_that_moved(sim: Sim) -> None:
    clear(sim)
    began = sim.world.now
    await sim.ref(Bell, "b").ask(Bell.ring_in, 5.0, 1)
    await sim.ref(Bell, "late").ask(Bell.ring_in, 8.0, 1)
    await move(sim, Bell, "b")
    await move(sim, Bell, "late")
    await sim.ref(Bell, "b").ask(Bell.ring_in, 9.0, 2)
    await sim.ref(Bell, "late").ask(Bell.busy, 0.0)
    await sim.advance(20.0)
    assert rung("b") == [2]
    assert rung("late") == [99], "what on_start sets is newer, too"
    assert 9.0 <= max(at for _, _, at in RINGS) - began < 11.0


@pytest.mark.scenario("DX-25", partial=True)
@simulated(entities=[Bell], nodes=2, seeds=4, settings=SETTINGS)
async def test_passivate_cancels_a_timer_that_moved(sim: Sim) -> None:
    clear(sim)
    await sim.ref(Bell, "b").ask(Bell.ring_in, 5.0, 1)
    await move(sim, Bell, "b")
    await sim.ref(Bell, "b").ask(Bell.leave)
    await sim.advance(20.0)
    assert RINGS == []
    assert lost(sim) == 0, "the entity wanted it"


@pytest.mark.scenario("DX-25", partial=True)
@simulated(entities=[Bell], nodes=2, seeds=6, settings=SETTINGS)
async def test_a_timer_that_is_due_during_a_move_fires_at_the_new_home(sim: Sim) -> None:
    clear(sim)
    began = sim.world.now
    shard = sim.shard(Bell, "b")
    slow, waiting = id_near(sim, shard, "slow"), id_near(sim, shard, "waiting")
    await sim.ref(Bell, slow).ask(Bell.ring_in, 1.0, 1)
    await sim.ref(Bell, "b").ask(Bell.ring_in, 1.5, 2)
    await sim.ref(Bell, waiting).ask(Bell.ring_in, 0.2, 3)
    await sim.ref(Bell, waiting).tell(Bell.busy, 2.0)
    await sim.advance(0.5)
    home, epoch = sim.owner(Bell, "b"), sim.entry(shard).epoch
    await sim.wish(shard, 1 - home)
    await sim.wait_until(lambda: sim.owner(Bell, "b") == 1 - home)
    await sim.advance(0.5)
    assert [what for _, what in LOG if "ring" in what] == [f"ring in epoch {epoch + 1}"] * 3
    assert sorted((id, number) for id, number, _ in RINGS) == sorted(
        [(slow, 1), ("b", 2), (waiting, 3)]
    )
    assert min(at - began for _, _, at in RINGS) > 3.0
    assert lost(sim) == 0


@pytest.mark.scenario("DX-25", partial=True)
@simulated(entities=[Bell], nodes=2, seeds=6, settings=SETTINGS)
async def test_a_move_that_is_taken_back_gives_the_timers_back(sim: Sim) -> None:
    clear(sim)
    shard = sim.shard(Bell, "b")
    slow = id_near(sim, shard, "slow")
    await sim.ref(Bell, slow).ask(Bell.ring_in, 1.0, 1)
    await sim.ref(Bell, "b").ask(Bell.ring_in, 6.0, 2)
    home = sim.owner(Bell, "b")
    await sim.wish(shard, 1 - home)
    await sim.wait_until(lambda: any(True for _ in sim.history.of("draining")))
    await sim.advance(1.5)
    await sim.wish(shard, None)
    await sim.advance(10.0)
    assert (sorted(rung(slow) + rung("b")), sim.owner(Bell, "b")) == ([1, 2], home)
    assert lost(sim) == 0


@pytest.mark.scenario("DX-25", partial=True)
@simulated(entities=[Bell], nodes=2, seeds=2, settings=SETTINGS)
async def test_what_on_stop_sets_moves_along(sim: Sim) -> None:
    clear(sim)
    await sim.ref(Bell, "parting").ask(Bell.busy, 0.0)
    await move(sim, Bell, "parting")
    await sim.advance(6.0)
    assert rung("parting") == [97]


def at_home(sim: Sim, shard: ShardKey, node: int) -> bool:
    entry = sim.entry(shard)
    return entry.state == "serving" and entry.owner == sim.nodes[node].incarnation


@pytest.mark.scenario("DX-25", partial=True)
@simulated(entities=BELLS, nodes=3, seeds=20, settings=SETTINGS)
async def test_timers_fire_exactly_once_through_many_moves(sim: Sim) -> None:
    clear(sim)
    wanted: list[tuple[str, int]] = []
    random = sim.random

    async def wind(kind: type[Bell], id: str) -> None:
        for number in range(10):
            # Never replaced: the next one is set after the one before has rung.
            await sim.ref(kind, id).ask(kind.ring_in, random.random() * 2.0, number)
            wanted.append((id, number))
            await sim.wait_until(partial(has_rung, id, number))

    async def move_about(shard: ShardKey) -> None:
        for _ in range(6):
            to = random.randrange(3)
            await sim.wish(shard, to)
            await sim.wait_until(partial(at_home, sim, shard, to))
            await sim.advance(random.random() * 2.0)

    async with asyncio.TaskGroup() as group:
        for kind in BELLS:
            for number in range(5):
                group.create_task(wind(kind, f"{kind.__name__}{number}"))
        for number in range(6):
            group.create_task(move_about(ShardKey("default", number)))
    await sim.advance(5.0)
    assert sorted(one[:2] for one in RINGS) == sorted(wanted)
    assert lost(sim) == 0
    assert sim.history.counts["timer.sent"] > 5


@pytest.mark.scenario("DX-25", partial=True)
@simulated(entities=BELLS, nodes=3, seeds=20, settings=SETTINGS)
async def test_a_plan_that_changes_during_moves_fires_a_timer_once_or_tells(sim: Sim) -> None:
    clear(sim)
    random = sim.random
    for number in range(60):
        kind = random.choice(BELLS)
        id = f"{kind.__name__}.{number}"
        await sim.ref(kind, id).ask(kind.ring_in, random.random() * 3.0, number)
        for _ in range(random.randrange(3)):
            await sim.wish(ShardKey("default", random.randrange(6)), random.randrange(3))
            await sim.advance(random.random() * 0.02)
    await sim.advance(10.0)
    numbers = [one[1] for one in RINGS]
    assert len(numbers) == len(set(numbers))
    assert len(numbers) + lost(sim) == 60
    assert len(numbers) > 20


@pytest.mark.scenario("DX-25", partial=True)
@simulated(entities=BELLS, nodes=3, seeds=12, settings=SETTINGS, rough=True)
async def test_under_faults_a_timer_never_fires_twice(sim: Sim) -> None:
    clear(sim)
    random = sim.random
    number = 0
    for step in range(30):
        kind = random.choice(BELLS)
        id = f"{kind.__name__}{random.randrange(6)}"
        number += 1
        try:
            await sim.ref(kind, id).ask(kind.ring_in, random.random() * 3.0, number)
        except NotExecuted:
            continue
        await sim.wish(ShardKey("default", random.randrange(6)), random.randrange(3))
        if step == 15:
            sim.crash(random.randrange(3))
        await sim.advance(random.random())
    await sim.advance(10.0)
    numbers = [one[1] for one in RINGS]
    assert len(numbers) == len(set(numbers)) > 5


# DX-25: a limit on residents


@pytest.mark.scenario("DX-25", partial=True)
@simulated(entities=[Bell], nodes=1, seeds=4, settings=Settings(shards=6, residents=2))
async def test_a_limit_on_residents_holds_and_timers_wait_at_home(sim: Sim) -> None:
    clear(sim)
    began = sim.world.now
    for number in range(8):
        await sim.ref(Bell, f"b{number}").ask(Bell.ring_in, 5.0, number)
        await sim.advance(0.1)
    life = sim.node(0).life
    assert life is not None
    assert life.runtime.residents.count <= 2
    await sim.advance(10.0)
    assert sorted(one[1] for one in RINGS) == list(range(8))
    assert max(at - began - 5.0 - 0.1 * number for _, number, at in RINGS) < 0.2
    assert life.runtime.residents.count <= 2
    assert (lost(sim), sim.history.counts["residents.evicted"] >= 6) == (0, True)


@pytest.mark.scenario("DX-25", partial=True)
@simulated(entities=[Bell, CarriedBell], nodes=2, seeds=2, settings=Settings(shards=6, residents=1))
async def test_what_waits_at_home_moves_and_is_replaced_too(sim: Sim) -> None:
    clear(sim)
    shard = sim.shard(Bell, "b")
    other = id_near(sim, shard, "c", CarriedBell)
    await sim.ref(Bell, "b").ask(Bell.ring_in, 5.0, 1)
    await sim.ref(CarriedBell, other).ask(CarriedBell.ring_in, 1.0, 2)
    await sim.advance(2.0)
    assert rung(other) == [2]
    assert await sim.ref(CarriedBell, other).ask(CarriedBell.count) == 1
    await sim.ref(Bell, "b").ask(Bell.busy, 0.0)
    await sim.advance(0.1)
    assert sim.history.counts["carry.dropped"] == 1, "the limit took its fields"
    assert await sim.ref(CarriedBell, other).ask(CarriedBell.count) == 0
    await sim.ref(Bell, "b").ask(Bell.ring_in, 4.0, 3)
    await sim.advance(0.1)
    await move(sim, Bell, "b")
    await sim.advance(6.0)
    assert rung("b") == [3]
    assert lost(sim) == 0


@simulated(
    entities=[Bell], nodes=1, seeds=1, settings=Settings(shards=1, residents=1, carry_bytes=400)
)
async def test_timers_that_wait_at_home_are_bounded(
    sim: Sim, caplog: pytest.LogCaptureFixture
) -> None:
    clear(sim)
    caplog.clear()
    for number in range(8):
        await sim.ref(Bell, f"b{number}").ask(Bell.ring_in, 5.0, number)
    await sim.advance(10.0)
    assert len(RINGS) + lost(sim) == 8
    assert 2 <= len(RINGS) <= 4
    [line] = [one for one in caplog.messages if "timers of shard" in one]
    assert "exceeds carry_bytes" in line


# DX-25: losses are told


@pytest.mark.scenario("DX-25", partial=True)
@simulated(entities=[Bell], nodes=2, seeds=2, settings=SETTINGS)
async def test_timers_without_a_next_home_are_told(
    sim: Sim, caplog: pytest.LogCaptureFixture
) -> None:
    clear(sim)
    caplog.clear()
    shard = sim.shard(Bell, "b0")
    ids = ["b0", *(id_near(sim, shard, f"b{number}.") for number in range(3))]
    for id in ids:
        await sim.ref(Bell, id).ask(Bell.ring_in, 60.0, 1)
    async with asyncio.TaskGroup() as group:
        for node in range(2):
            group.create_task(sim.stop(node))
    assert lost(sim) == 4
    [line] = [one for one in caplog.messages if "timers of shard" in one]
    assert line.startswith(f"4 timers of shard default/{shard.shard} are lost and will not fire")
    assert "'ring' of timer-bell" in line
    assert "no next home" in line


@pytest.mark.scenario("DX-25", partial=True)
@pytest.mark.parametrize(
    ("what", "said"), [("object", "cannot travel"), ("large", "exceeds carry_bytes")]
)
def test_timers_that_cannot_travel_are_told(
    what: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    @simulated(entities=[Bell], nodes=2, seeds=1, settings=Settings(shards=6, carry_bytes=20_000))
    async def test(sim: Sim) -> None:
        clear(sim)
        await sim.ref(Bell, "b").ask(Bell.ring_with, what)
        await sim.ref(Bell, "b").ask(Bell.chime_in, 5.0, 2)
        await move(sim, Bell, "b")
        assert lost(sim) == 1
        [line] = [one for one in caplog.messages if "timers of shard" in one]
        assert said in line
        await sim.advance(6.0)
        assert rung("b") == [2], "the other one moved"

    test()


class OldBell(Entity, name="timer-versions"):
    """The version that sets a timer."""

    @handler
    async def wind(self) -> None:
        self.after(3.0, self.gone)

    async def gone(self) -> None:
        raise AssertionError("not at its old home")


class NewBell(Entity, name="timer-versions"):
    """The next version, without that method."""

    @handler
    async def wind(self) -> None: ...


def test_a_version_that_does_not_know_the_method_tells(caplog: pytest.LogCaptureFixture) -> None:
    homes = {0: [OldBell], 1: [NewBell]}

    @simulated(entities=[OldBell], nodes=2, seeds=2, settings=SETTINGS, homes=homes)
    async def test(sim: Sim) -> None:
        caplog.clear()
        id = next(one for one in "abcdefgh" if sim.owner(OldBell, one) == 0)
        await sim.ref(OldBell, id).ask(OldBell.wind)
        await move(sim, OldBell, id)
        await sim.advance(5.0)
        assert lost(sim) == 1
        [line] = [one for one in caplog.messages if "timers of shard" in one]
        assert "does not know that method" in line

    test()


@pytest.mark.scenario("DX-25", partial=True)
@simulated(entities=BELLS, nodes=3, seeds=6, settings=SETTINGS)
async def test_a_fenced_home_fires_nothing_and_counts_what_it_lost(
    sim: Sim, caplog: pytest.LogCaptureFixture
) -> None:
    clear(sim)
    caplog.clear()
    ids = [f"b{number}" for number in range(12)]
    home = sim.owner(Bell, ids[0])
    mine = [id for id in ids if sim.owner(Bell, id) == home]
    for id in mine:
        await sim.ref(Bell, id).ask(Bell.ring_in, 20.0, 1)
    sim.freeze(home)
    await sim.advance(30.0)
    sim.thaw(home)
    await sim.advance(30.0)
    assert RINGS == []
    assert lost(sim) == len(mine)
    [line] = [one for one in caplog.messages if "are lost and will not fire" in one]
    assert line.startswith(f"{len(mine)} timers of ")
    assert "lost its lease" in line


@pytest.mark.scenario("DX-25", partial=True)
@simulated(entities=[Bell], nodes=2, seeds=2, settings=SETTINGS)
async def test_a_crash_loses_timers_with_the_process(sim: Sim) -> None:
    clear(sim)
    await sim.ref(Bell, "b").ask(Bell.ring_in, 5.0, 1)
    sim.crash(sim.owner(Bell, "b"))
    await sim.wait_until(sim.settled)
    await sim.advance(60.0)
    assert RINGS == []


@simulated(entities=[Bell], nodes=1, seeds=1, settings=SETTINGS)
async def test_an_entity_that_starts_again_after_a_failure_tells(
    sim: Sim, caplog: pytest.LogCaptureFixture
) -> None:
    clear(sim)
    caplog.clear()
    await sim.ref(Bell, "b").ask(Bell.ring_in, 5.0, 1)
    cell = cell_of(sim, Bell, "b")
    cell.host.restart(cell)
    await sim.advance(6.0)
    assert (RINGS, lost(sim)) == ([], 1)
    assert any("starts again after a failure" in one for one in caplog.messages)


@simulated(entities=[Bell], nodes=2, seeds=2, settings=SETTINGS)
async def test_an_entity_that_cannot_start_yet_rings_later(sim: Sim) -> None:
    clear(sim)
    LOG.extend([("", "")] * 9)
    await sim.ref(Bell, "broken").ask(Bell.ring_in, 3.0, 1)
    LOG.clear()
    await move(sim, Bell, "broken")
    await sim.advance(30.0)
    assert [one for one in LOG if one[1] == "start"] == [("broken", "start")] * 3
    assert rung("broken") == [1], "what a failed start has set is void"
    assert lost(sim) == 0


# what carries does not idle


@pytest.mark.scenario("DX-13", partial=True)
@simulated(entities=[CarriedBell, Fading], nodes=2, seeds=2, settings=SETTINGS)
async def test_an_entity_that_carries_idles_only_by_its_own_wish(sim: Sim) -> None:
    clear(sim)
    bell, fading = sim.ref(CarriedBell, "b"), sim.ref(Fading, "f")
    await bell.ask(CarriedBell.ring_in, 0.0, 1)
    assert await fading.ask(Fading.add) == 1
    await sim.advance(500.0)
    assert await bell.ask(CarriedBell.count) == 1
    assert await fading.ask(Fading.add) == 1, "idle_s= was given"
    await bell.ask(CarriedBell.leave)
    assert await bell.ask(CarriedBell.count) == 0


@pytest.mark.scenario("DX-25")
@simulated(entities=[Bell], nodes=3, seeds=6, settings=SETTINGS)
async def test_a_timer_waits_for_its_time_moves_along_or_is_counted_as_lost(sim: Sim) -> None:
    clear(sim)
    began = sim.world.now
    bell = sim.ref(Bell, "b")
    await bell.ask(Bell.ring_in, 30.0, 1)
    await sim.advance(25.0)
    assert LOG == [("b", "start")], "passivation waits: its idle time has passed twice"
    await move(sim, Bell, "b")
    await sim.advance(10.0)
    assert (rung("b"), at_s(began)) == ([1], [30.0]), "a planned move takes it along"
    assert lost(sim) == 0
    await bell.ask(Bell.ring_in, 20.0, 2)
    home = sim.owner(Bell, "b")
    sim.freeze(home)
    await sim.advance(30.0)
    sim.thaw(home)
    await sim.advance(30.0)
    assert rung("b") == [1]
    assert lost(sim) == 1, "a home that lost its lease counts it"


# real processes


class Chime(Bell, name="timer-chime", idle_s=0.5):
    """Idle soon, and writes down when it starts and stops."""

    async def on_start(self) -> None:
        enter(self.id, "start", 0)

    async def on_stop(self) -> None:
        enter(self.id, "stop", 0)


@pytest.mark.scenario("DX-25")
def test_a_timer_of_a_process_waits_moves_along_or_is_counted_as_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ledger = open_ledger(monkeypatch, tmp_path)

    def done() -> list[str]:
        lines = whole_lines(ledger)
        return [" ".join(line.split("\t")[1:3]) for line in lines]

    async def scenario() -> None:
        async with Processes([Chime], nodes=2, settings=SETTINGS) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            chime = cluster.ref(Chime, "c")
            await chime.ask(Chime.ring_in, 2.0, 1)
            await cluster.wait_until(lambda: "stop 0" in done())
            assert done() == ["start 0", "ring 1", "stop 0"], "passivation waits"
            await chime.ask(Chime.ring_in, 8.0, 2)
            home = cluster.owner(Chime, "c")
            await cluster.stop(home)
            await cluster.wait_until(lambda: "ring 2" in done())
            assert cluster.counts(home)["timer.lost"] == 0
            assert cluster.counts(home)["timer.sent"] == 1, "a planned move takes it along"
            cluster.start(home)
            await cluster.wait_until(cluster.settled)
            await chime.ask(Chime.ring_in, 60.0, 3)
            home = cluster.owner(Chime, "c")
            shard = cluster.shard(Chime, "c")
            epoch = cluster.entry(shard).epoch
            cluster.freeze(home)
            await cluster.wait_until(lambda: cluster.entry(shard).epoch > epoch)
            cluster.thaw(home)
            await cluster.wait_until(lambda: cluster.counts(home)["timer.lost"] == 1)
            assert "ring 3" not in done()

    run(scenario())


@pytest.mark.scenario("DX-25", partial=True)
def test_timers_of_a_stopped_process_fire_once_at_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ledger = open_ledger(monkeypatch, tmp_path)
    ids = [(kind, f"{kind.__name__}{number}") for kind in BELLS for number in range(6)]

    def rings() -> list[str]:
        return [line.split("\t")[0] for line in whole_lines(ledger)]

    async def scenario() -> None:
        async with Processes(BELLS, nodes=2, settings=SETTINGS) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            for kind, id in ids:
                await cluster.ref(kind, id).ask(kind.ring_in, 6.0, 1)
            before = rings()
            await cluster.stop(0)
            sent = cluster.counts(0)["timer.sent"]
            assert cluster.counts(0)["timer.lost"] == 0
            await cluster.wait_until(lambda: len(rings()) >= len(ids))
            # Whatever would ring twice had its chance.
            await cluster.ref(Bell, "end").ask(Bell.ring_in, 1.0, 2)
            await cluster.wait_until(lambda: "end" in rings())
            assert sorted(rings()) == sorted([*(id for _, id in ids), "end"])
            assert sent > 0 or len(before) == len(ids)
            history = cluster.history()
        judge(history)

    run(scenario())
