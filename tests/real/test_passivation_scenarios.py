"""Scenarios of entities that stop: when they are idle (SM-25), and in their own time (SM-26)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from lines_lab import whole_lines
from real_entities import LEDGER, enter
from real_lab import balanced, judge, nothing_lost, open_ledger, run

from domicile import Entity, Settings, handler
from domicile.core.ids import ShardKey
from domicile.membership.clock import SystemClock
from domicile.testing import History, Processes, Sim, simulated

log: list[tuple[str, str, int]] = []
"""What simulated entities did: id, what, number."""


def note(id: str, what: str, number: int = 0) -> None:
    """Into the ledger of real processes, or into the log of a simulation."""
    if LEDGER in os.environ:
        enter(id, what, number)
    else:
        log.append((id, what, number))


def read(ledger: Path) -> list[tuple[str, str, int]]:
    lines = (line.split("\t") for line in whole_lines(ledger))
    return [(id, what, int(number)) for id, what, number in lines]


class Sleepy(Entity, name="sleepy", idle_s=1.5):
    """Takes its time to stop, so that messages meet it there."""

    def __init__(self) -> None:
        self.seen = 0

    async def on_start(self) -> None:
        note(self.id, "start")

    async def on_stop(self) -> None:
        note(self.id, "stops", self.seen)
        await asyncio.sleep(0.3)
        note(self.id, "stopped", self.seen)

    @handler
    async def put(self, number: int) -> int:
        note(self.id, "put", number)
        self.seen += 1
        return self.seen


# SM-25


@pytest.mark.scenario("SM-25")
@simulated(entities=[Sleepy], nodes=3, seeds=10, settings=Settings(shards=6))
async def test_an_idle_entity_stops_and_mail_that_meets_the_stop_starts_it_again(sim: Sim) -> None:
    log.clear()
    sleepy = sim.ref(Sleepy, "s")
    assert await sleepy.ask(Sleepy.put, 0) == 1
    assert await sleepy.ask(Sleepy.put, 1) == 2
    await sim.wait_until(lambda: ("s", "stopped", 2) in log)
    await sim.advance(5.0)
    assert await sleepy.ask(Sleepy.put, 2) == 1, "started again, without its memory"

    await sim.wait_until(lambda: log[-1] == ("s", "stops", 1))
    for number in range(3, 8):
        await sleepy.tell(Sleepy.put, number)
    assert await sleepy.ask(Sleepy.put, 8) == 6
    assert log == [
        ("s", "start", 0), ("s", "put", 0), ("s", "put", 1), ("s", "stops", 2), ("s", "stopped", 2),
        ("s", "start", 0), ("s", "put", 2), ("s", "stops", 1), ("s", "stopped", 1),
        ("s", "start", 0), *(("s", "put", number) for number in range(3, 9)),
    ]  # fmt: skip


@pytest.mark.scenario("SM-25", partial=True)
@simulated(entities=[Sleepy], nodes=3, seeds=10, settings=Settings(shards=6), rough=True)
async def test_whenever_it_comes_no_message_is_lost_to_a_stop(sim: Sim) -> None:
    log.clear()
    ids = [f"s{number}" for number in range(6)]
    sent = dict.fromkeys(ids, 0)

    async def visit(id: str) -> None:
        random = sim.random
        for _ in range(12):
            # Around the moment at which it is found idle, and around the end of its stop.
            await asyncio.sleep(random.choice((0.05, 1.2, 2.0, 2.4, 2.9)) + random.random() * 0.5)
            for _ in range(random.randint(1, 3)):
                await sim.ref(Sleepy, id).ask(Sleepy.put, sent[id])
                sent[id] += 1

    async with asyncio.TaskGroup() as group:
        for id in ids:
            group.create_task(visit(id))
    for id in ids:
        put = [number for one, what, number in log if one == id and what == "put"]
        assert put == list(range(sent[id]))
    assert sum(what == "stopped" for _, what, _ in log) > 10
    inside = 0
    for event in sim.history.of("accept"):
        stops = [
            other.at
            for other in sim.history.of("stopped")
            if other.fields["id"] == event.fields["id"] and 0 < other.at - event.at < 0.3
        ]
        inside += bool(stops)
    assert inside > 0, "no message met a stop"


@pytest.mark.scenario("SM-25")
def test_real_processes_lose_no_message_to_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = open_ledger(monkeypatch, tmp_path)

    async def scenario() -> None:
        async with Processes([Sleepy], nodes=2, settings=Settings(shards=4)) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            sleepy = cluster.ref(Sleepy, "s")
            assert await sleepy.ask(Sleepy.put, 0) == 1
            await cluster.wait_until(lambda: read(ledger)[-1] == ("s", "stopped", 1))
            assert await sleepy.ask(Sleepy.put, 1) == 1
            await cluster.wait_until(lambda: read(ledger)[-1] == ("s", "stops", 1))
            for number in range(2, 30):
                await sleepy.tell(Sleepy.put, number)
            assert await sleepy.ask(Sleepy.put, 30) == 29
            history = cluster.history()
        judge(history)
        nothing_lost(history)

    run(scenario())
    assert read(ledger)[:38] == [
        ("s", "start", 0), ("s", "put", 0), ("s", "stops", 1), ("s", "stopped", 1),
        ("s", "start", 0), ("s", "put", 1), ("s", "stops", 1), ("s", "stopped", 1),
        ("s", "start", 0), *(("s", "put", number) for number in range(2, 31)),
    ]  # fmt: skip


# SM-26


class Tenacious(Entity, name="tenacious"):
    """Does not stop by itself; cleans up for a moment if it has to."""

    async def on_start(self) -> None:
        note(self.id, "start", self.epoch)

    async def on_stop(self) -> None:
        note(self.id, "stops", self.epoch)
        try:
            await asyncio.sleep(1_000)
        finally:
            note(self.id, "cancelled", self.epoch)
            await asyncio.sleep(0.2)
            clock = SystemClock() if LEDGER in os.environ else None
            note(self.id, "cleaned up", 0 if clock is None else int(clock.now() * 1e6))

    @handler
    async def hello(self) -> int:
        return self.epoch


STUBBORN = Settings(shards=4, stop_timeout_s=1.0)


def released(history: History, shard: ShardKey) -> list[float]:
    return [e.at for e in history.of("released") if e.fields["shard"] == shard.shard]


@pytest.mark.scenario("SM-26")
@pytest.mark.parametrize("why", ["a wish", "its node leaves"])
def test_a_stop_that_takes_too_long_is_cancelled_and_only_then_the_shard_goes(why: str) -> None:
    @simulated(entities=[Tenacious], nodes=2, seeds=5, settings=STUBBORN)
    async def body(sim: Sim) -> None:
        log.clear()
        epoch = await sim.ref(Tenacious, "t").ask(Tenacious.hello)
        shard, home = sim.shard(Tenacious, "t"), sim.owner(Tenacious, "t")
        began = sim.world.now
        cleaned: list[float] = []

        async def watch() -> None:
            await sim.wait_until(lambda: log[-1][1] == "cancelled")
            assert released(sim.history, shard) == []
            await sim.wait_until(lambda: ("t", "cleaned up", 0) in log)
            cleaned.append(sim.world.now)

        watching = asyncio.ensure_future(watch())
        if why == "a wish":
            await sim.wish(shard, 1 - home)
            await sim.wait_until(lambda: log[-1][1] == "stops")
        else:
            await sim.stop(home)
        asked = await sim.ref(Tenacious, "t").ask(Tenacious.hello)
        await watching
        assert asked == epoch + 1
        [at] = released(sim.history, shard)
        assert began + 1.2 <= at < began + 2.0
        assert abs(cleaned[0] - at) < 0.02, "released at once when the clean-up was over"
        assert log == [
            ("t", "start", epoch), ("t", "stops", epoch), ("t", "cancelled", epoch),
            ("t", "cleaned up", 0), ("t", "start", epoch + 1),
        ]  # fmt: skip

    body()


@pytest.mark.scenario("SM-26")
def test_a_real_process_releases_after_the_stop_was_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = open_ledger(monkeypatch, tmp_path)

    async def scenario() -> None:
        async with Processes([Tenacious], nodes=2, settings=STUBBORN) as cluster:
            await cluster.wait_until(lambda: balanced(cluster))
            epoch = await cluster.ref(Tenacious, "t").ask(Tenacious.hello)
            shard = cluster.shard(Tenacious, "t")
            await cluster.wish(shard, 1 - cluster.owner(Tenacious, "t"))
            await cluster.wait_until(lambda: read(ledger)[-1][1] == "stops")
            assert await cluster.ref(Tenacious, "t").ask(Tenacious.hello) == epoch + 1
            history = cluster.history()
            *before, (_, cleaned, at_us), last = read(ledger)
            assert before == [
                ("t", "start", epoch), ("t", "stops", epoch), ("t", "cancelled", epoch),
            ]  # fmt: skip
            assert cleaned == "cleaned up"
            assert last == ("t", "start", epoch + 1)
            [at] = released(history, shard)
            assert at >= at_us / 1e6 - 1e-5
        judge(history)

    run(scenario())
