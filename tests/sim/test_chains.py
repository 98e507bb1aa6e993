"""DX-16: handlers that wait on handlers, while the shards of both are being handed over.

A gate holds the first handlers until their shards drain; then the nested asks go out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from domicile import CallCycle, CallTooDeep, Entity, Settings, handler
from domicile.core.ids import ShardKey
from domicile.testing import Event, Sim, simulated

WAVE_S = 0.25
"""N5: the first wave. What N3 covers must not need it."""

SOON_S = 3.0
"""Far below the drain deadline of 10 s."""


WORK_S = 0.03
"""How long the last of a chain works: the others' asks arrive while everybody still waits."""


class Gate:
    """Shared by all nodes of a run; closed until the test opens it."""

    def __init__(self) -> None:
        self.is_open = True

    async def passed(self) -> None:
        while not self.is_open:  # noqa: ASYNC110 - set from outside of this event loop
            await asyncio.sleep(0.001)


GATE = Gate()


@asynccontextmanager
async def gate() -> AsyncGenerator[Mapping[type[Any], Any]]:
    yield {Gate: GATE}


class Hop(Entity, name="hop"):
    """Asks the rest of a path, one entity after the other."""

    @handler
    async def mark(self) -> None:
        pass

    @handler
    async def walk(self, path: list[str], mark: bool = False) -> list[str]:
        await self.resource(Gate).passed()
        if not path:
            await asyncio.sleep(WORK_S)
            return [self.id]
        then = self.ref(Hop, path[0])
        if mark:
            await then.tell(Hop.mark)
        return [self.id, *await then.ask(Hop.walk, path[1:])]

    @handler
    async def walk_in_circles(self, path: list[str]) -> str:
        await self.resource(Gate).passed()
        try:
            return await self.ref(Hop, path[0]).ask(Hop.walk_in_circles, path[1:])
        except CallCycle:
            return f"cycle seen by {self.id}"

    @handler
    async def descend(self, depth: int) -> int:
        if depth == 0:
            return 1
        try:
            return 1 + await self.ref(Hop, f"deep-{depth}").ask(Hop.descend, depth - 1)
        except CallTooDeep:
            return 1


CHAINS = simulated(
    entities=[Hop], nodes=3, seeds=8, settings=Settings(shards=3), resources=gate
)  # fmt: skip

HOMES = {"x": 0, "y": 1, "z": 2}
"""Entities are called after their shard: x1 and x2 live in shard 0, at home on node 0."""


def names(sim: Sim) -> dict[str, str]:
    """Ids that fall into the shard that their short name says."""
    found: dict[str, str] = {}
    for letter, number in HOMES.items():
        for place in (1, 2, 3):
            short = f"{letter}{place}"
            tries = (f"{short}-{n}" for n in range(1_000))
            found[short] = next(id for id in tries if sim.shard(Hop, id).shard == number)
    return found


def shard(letter: str) -> ShardKey:
    return ShardKey("default", HOMES[letter])


def home(sim: Sim, key: ShardKey) -> str:
    return sim.entry(key).owner


async def settle(sim: Sim) -> None:
    """Every shard at the home that `HOMES` says."""
    for letter, node in HOMES.items():
        await sim.wish(shard(letter), node)
    await sim.wait_until(
        lambda: (
            sim.settled()
            and all(home(sim, shard(s)) == sim.nodes[n].incarnation for s, n in HOMES.items())
        )
    )


def phase(sim: Sim, kind: str, key: ShardKey, epoch: int) -> Event:
    """The one event of a hand-off step."""
    [found] = [
        event
        for event in sim.history.of(kind)
        if (event.fields["shard"], event.fields["epoch"]) == (key.shard, epoch)
    ]
    return found


def starts(sim: Sim, id: str, method: str = "walk") -> list[Event]:
    return [
        event
        for event in sim.history.of("start")
        if event.fields["id"] == id and event.fields["method"] == method
    ]


async def walk_while_moving(
    sim: Sim, moves: Mapping[str, int], paths: Sequence[Sequence[str]], *, mark: bool = False
) -> float:
    """Start the paths, have shards move, let the handlers go on; the seconds that took.

    Every entity of a moving shard must have run at its old home, and the shards must have moved
    for good afterwards.
    """
    GATE.is_open = True
    await settle(sim)
    ids = names(sim)
    epochs = {letter: sim.entry(shard(letter)).epoch for letter in HOMES}
    GATE.is_open = False
    async with asyncio.TaskGroup() as group:
        walks = [
            group.create_task(
                sim.ref(Hop, ids[path[0]]).ask(Hop.walk, [ids[hop] for hop in path[1:]], mark)
            )
            for path in paths
        ]
        await sim.wait_until(lambda: all(starts(sim, ids[path[0]]) for path in paths))
        for letter, node in moves.items():
            await sim.wish(shard(letter), node)

        def drains() -> bool:
            return len([event for event in sim.history.of("draining") if moving(event)]) == len(
                moves
            )

        def moving(event: Event) -> bool:
            return any(
                (event.fields["shard"], event.fields["epoch"]) == (HOMES[letter], epochs[letter])
                for letter in moves
            )

        await sim.wait_until(drains, timeout_s=2)
        assert all(sim.entry(shard(letter)).state == "moving" for letter in moves)
        opened_at = sim.world.now
        GATE.is_open = True
    took_s = sim.world.now - opened_at
    for path, walk in zip(paths, walks, strict=True):
        assert walk.result() == [ids[hop] for hop in path]
    await sim.wait_until(
        lambda: all(home(sim, shard(s)) == sim.nodes[n].incarnation for s, n in moves.items()),
        timeout_s=SOON_S,
    )
    for letter in moves:
        assert sim.entry(shard(letter)).epoch == epochs[letter] + 1
        draining = phase(sim, "draining", shard(letter), epochs[letter])
        released = phase(sim, "released", shard(letter), epochs[letter])
        assert draining.at < opened_at < released.at < opened_at + SOON_S
        for hop in [hop for path in paths for hop in path[1:] if hop[0] == letter]:
            for event in starts(sim, ids[hop]):
                assert event.fields["epoch"] == epochs[letter], f"{hop} waited for the new home"
                assert draining.at < event.at <= released.at
    assert not sim.history.counts["drain.overdue"]
    return took_s


@pytest.mark.scenario("DX-16")
@CHAINS
async def test_an_ask_within_a_draining_shard_is_answered_at_once(sim: Sim) -> None:
    assert await walk_while_moving(sim, {"x": 1}, [["x1", "x2"]]) < WAVE_S


@pytest.mark.scenario("DX-16")
@pytest.mark.parametrize("mark", [False, True], ids=["asks", "tells and asks"])
@CHAINS
async def test_two_draining_shards_that_ask_each_other_do_not_wait_for_each_other(
    sim: Sim, mark: bool
) -> None:
    paths = [["x1", "y1"], ["y2", "x2"]]
    assert await walk_while_moving(sim, {"x": 1, "y": 0}, paths, mark=mark) < WAVE_S
    for callee in ("y1", "x2") if mark else ():
        [marked], [asked] = starts(sim, names(sim)[callee], "mark"), starts(sim, names(sim)[callee])
        assert marked.fields["n"] < asked.fields["n"]
        assert marked.at <= asked.at


@pytest.mark.scenario("DX-16")
@pytest.mark.parametrize(
    "paths",
    [
        [["x1", "y1", "x2"], ["y2", "x3"]],
        [["x1", "z1", "y1"], ["y2", "x2"]],
        [["x1", "y1", "z1", "x2"], ["y2", "z2", "y3"]],
    ],
    ids=["there and back", "through a third shard", "crosswise through a third shard"],
)
@CHAINS
async def test_longer_chains_through_draining_shards_go_on(
    sim: Sim, paths: list[list[str]]
) -> None:
    assert await walk_while_moving(sim, {"x": 1, "y": 0}, paths) < WAVE_S


@pytest.mark.scenario("DX-16")
@CHAINS
async def test_a_drain_that_waits_behind_a_busy_entity_elsewhere_ends_with_a_wave(sim: Sim) -> None:
    # x1 waits in z1's mailbox behind a handler that waits for y1, which asks into the draining
    # shard of x1: the node of y1 cannot know who waits at z1, only the waves of N5 help.
    took_s = await walk_while_moving(sim, {"x": 1}, [["x1", "z1"], ["z1", "y1", "x2"]])
    assert WAVE_S / 2 < took_s < SOON_S
    assert len(starts(sim, names(sim)["z1"])) == 2


@pytest.mark.scenario("DX-16")
@CHAINS
async def test_a_drain_that_waits_in_line_behind_its_own_caller_ends_at_once(sim: Sim) -> None:
    # x1 waits in z1's mailbox behind a handler that asks into the draining shard of x1: the
    # node of z1 sees who waits in line there, and what must finish first.
    assert await walk_while_moving(sim, {"x": 1}, [["x1", "z1"], ["z1", "x2"]]) < WAVE_S
    assert len(starts(sim, names(sim)["z1"])) == 2


@pytest.mark.scenario("DX-16")
@pytest.mark.parametrize("path", [["x1", "x1"], ["x1", "y1", "x1"], ["x1", "y1", "z1", "y1"]])
@CHAINS
async def test_a_call_cycle_is_reported_at_once(sim: Sim, path: list[str]) -> None:
    GATE.is_open = True
    await settle(sim)
    ids = names(sim)
    asked_at = sim.world.now
    reply = await sim.ref(Hop, ids[path[0]]).ask(
        Hop.walk_in_circles, [ids[hop] for hop in path[1:]]
    )
    assert reply == f"cycle seen by {ids[path[-2]]}"
    assert sim.world.now - asked_at < 0.1
    for hop in dict.fromkeys(path):
        assert len(starts(sim, ids[hop], "walk_in_circles")) == 1


@pytest.mark.scenario("DX-16")
@CHAINS
async def test_a_call_cycle_through_draining_shards_is_reported_at_once(sim: Sim) -> None:
    GATE.is_open = True
    await settle(sim)
    ids = names(sim)
    GATE.is_open = False
    circle = [ids["y1"], ids["x1"]]
    asking = asyncio.ensure_future(sim.ref(Hop, ids["x1"]).ask(Hop.walk_in_circles, circle))
    await sim.wait_until(lambda: bool(starts(sim, ids["x1"], "walk_in_circles")))
    await sim.wish(shard("x"), 1)
    await sim.wish(shard("y"), 0)
    await sim.wait_until(lambda: sim.entry(shard("x")).state == "moving")
    await sim.advance(WAVE_S / 5)
    opened_at = sim.world.now
    GATE.is_open = True
    assert await asking == f"cycle seen by {ids['y1']}"
    assert sim.world.now - opened_at < WAVE_S / 2
    assert len(starts(sim, ids["x1"], "walk_in_circles")) == 1
    await sim.wait_until(sim.settled, timeout_s=SOON_S)


@pytest.mark.scenario("DX-16")
@CHAINS
async def test_a_chain_deeper_than_sixteen_is_refused(sim: Sim) -> None:
    first = sim.ref(Hop, "deep-root")
    assert await first.ask(Hop.descend, 16) == 17
    began = len(list(sim.history.of("start")))
    asked_at = sim.world.now
    # The seventeenth handler would be the seventeenth to wait: its ask is not sent.
    assert await first.ask(Hop.descend, 40) == 17
    assert len(list(sim.history.of("start"))) - began == 17
    assert sim.world.now - asked_at < 0.5
