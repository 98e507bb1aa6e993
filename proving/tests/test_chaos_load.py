"""The load of a chaos run leaves a room alone that has not answered what it was asked already."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from domicile.core.ids import ShardKey
from domicile.settings import Settings
from domicile.testing.processes.cluster import Processes
from domicile.testing.sim.loop import World
from proving.chaos.load import LINE, TANGLED, Load
from proving.chaos.tally import Tally
from proving.workload import Room

SECONDS = 60.0


class Slow:
    """A cluster in which every call takes as long as it is told to."""

    settings = Settings(shards=32)
    nodes = (0, 1, 2)

    def __init__(self, answer_s: float) -> None:
        self.answer_s = answer_s
        self.lines: Counter[str] = Counter()
        """Calls without an answer, by each room that they go to or through."""
        self.longest = 0
        self.made = 0
        self.state = "serving"
        self.wished: list[ShardKey] = []

    def ref(self, kind: type, id: str) -> SimpleNamespace:
        async def call(method: object, *arguments: Any) -> None:
            path = arguments[-1] if method is Room.relay else []
            rooms = [id, *path] if kind is Room else []
            self.made += 1
            self.lines.update(rooms)
            self.longest = max(self.longest, *self.lines.values(), 0)
            await asyncio.sleep(self.answer_s)
            self.lines.subtract(rooms)

        ref = SimpleNamespace(ask=call, tell=call)
        ref.options = lambda **_: ref
        return ref

    def owner(self, kind: type, id: str) -> int:
        return 0

    def entry(self, shard: ShardKey) -> SimpleNamespace:
        return SimpleNamespace(state=self.state)

    async def wish(self, shard: ShardKey, node: int | None) -> None:
        self.wished.append(shard)


def play(cluster: Slow) -> Tally:
    """A minute of load and moves in virtual time; then all calls have ended."""
    tally, world = Tally(), World(0)
    load = Load(cast(Processes, cluster), tally, Random(1), rate=60.0)

    async def whole() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run())
            group.create_task(load.move())
            await asyncio.sleep(SECONDS)
            load.end()
        assert load.waiting == 0

    try:
        world.run(whole(), world.process("chaos"))
    finally:
        world.close()
    return tally


def test_a_room_that_does_not_answer_gets_no_more_calls() -> None:
    cluster = Slow(answer_s=5.0)
    tally = play(cluster)
    assert LINE < cluster.longest <= TANGLED + 3, "one tangle may add three calls to a room"
    assert tally.held_back > 100
    assert tally.outcomes["ok"] == cluster.made > 1_000, "and those that left get more again"


def test_a_cluster_that_is_quick_gets_all_calls() -> None:
    cluster = Slow(answer_s=0.001)
    tally = play(cluster)
    assert tally.held_back == 0
    assert cluster.longest < LINE
    assert all(tally.calls[kind] for kind in ("ask", "tell", "nested", "event-sourced"))


def test_a_fault_brings_mail_however_long_the_line_is() -> None:
    """Whoever is frozen must have work to do when it goes on."""
    cluster, world = Slow(answer_s=1.0), World(0)
    load = Load(cast(Processes, cluster), Tally(), Random(1), rate=60.0)

    async def whole() -> None:
        load.burst(2 * LINE, ["r1"])
        pouring = asyncio.ensure_future(load.pour(["r2"], 0.5))
        await asyncio.sleep(0.6)
        assert cluster.lines["r1"] == 2 * LINE
        assert cluster.lines["r2"] > LINE
        load.keep_busy("r1", 0.1)
        await asyncio.sleep(0.1)
        assert cluster.lines["r1"] == 2 * LINE + 1
        load.end()
        await pouring
        await load.run()

    try:
        world.run(whole(), world.process("chaos"))
    finally:
        world.close()


def test_a_move_that_was_not_taken_back_is_left_to_itself() -> None:
    """And so are those that it may wait for: a wish for them would undo what keeps it."""
    cluster, world = Slow(answer_s=0.001), World(0)
    load = Load(cast(Processes, cluster), Tally(), Random(1), rate=60.0)

    async def whole() -> None:
        moving = asyncio.ensure_future(load.move())
        cluster.state = "moving"
        await asyncio.sleep(SECONDS)
        stuck = len(cluster.wished)
        assert stuck > 0
        await asyncio.sleep(SECONDS)
        assert len(cluster.wished) == stuck, "nothing moves any more, so nothing is wished"
        cluster.state = "serving"
        await asyncio.sleep(SECONDS)
        assert len(dict.fromkeys(cluster.wished[stuck:])) == len(load.hot)
        load.end()
        await moving
        await load.run()

    try:
        world.run(whole(), world.process("chaos"))
    finally:
        world.close()
