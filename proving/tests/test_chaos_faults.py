"""A fault of a chaos run counts once it has had its effect, and is tried again if it had none."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import cast

import pytest

from domicile.core.ids import ShardKey
from domicile.settings import Settings
from domicile.testing.processes.cluster import Processes
from domicile.testing.processes.node_process import HarnessError
from domicile.testing.sim.loop import World
from proving.chaos.faults import RANDOM, TRIES, Chaos, Fault, cut, freeze, restart
from proving.chaos.load import Load, Stander
from proving.chaos.tally import Tally
from proving.chaos.targeted import AIMED

SHARD = ShardKey("default", 3)
OWNER, LEADER, NODES = 1, 0, 5


@dataclass
class Place:
    """A node that may end at any time."""

    index: int
    up: bool = True
    process: None = None
    version: str = ""

    @property
    def incarnation(self) -> str:
        return f"inc-{self.index}"


@dataclass
class Town:
    """The verbs and questions of `Processes`: what faults do works, or all of it is in vain."""

    works: bool = True
    nodes: list[Place] = field(default_factory=lambda: [Place(index) for index in range(NODES)])
    settings: Settings = field(default_factory=Settings)
    home: int = OWNER
    moving: bool = False
    done: Counter[str] = field(default_factory=Counter[str])

    def settle(self) -> None:
        """Everyone is there again, and the shard at its first home."""
        self.home, self.moving = OWNER, False
        for place in self.nodes:
            place.up = True

    def now(self) -> float:
        return 100.0

    def leader(self) -> int:
        return LEADER

    def incarnation(self, node: int) -> str:
        return self.nodes[node].incarnation

    def entry(self, shard: ShardKey) -> SimpleNamespace:
        return SimpleNamespace(state="moving" if self.moving else "serving")

    def phase(self, node: int, shard: ShardKey) -> str:
        return "released" if self.moving else "open"

    def status(self, incarnation: str) -> str:
        return "evicted" if self.works and self.done["partition"] else "up"

    def cut(self, one: int, other: int) -> int:
        self.done["cut"] += 1
        return int(self.works and -1 in (one, other))

    def up(self, node: int) -> None:
        if not self.nodes[node].up:
            raise HarnessError(f"node {node} is not running")

    def kill(self, node: int) -> None:
        self.up(node)
        self.nodes[node].up = False

    def start(self, node: int) -> None:
        self.nodes[node].up = True

    async def stop(self, node: int) -> None:
        self.kill(node)
        if not self.works:
            raise HarnessError("it exited with 1")

    def freeze(self, node: int) -> None:
        self.up(node)

    thaw = cut_store = freeze

    def lag(self, node: int, lag_s: float) -> None:
        self.up(node)

    def partition(self, *sides: object, one_way: bool = False) -> None:
        self.done["partition"] += 1

    def delay(self, node: int, delay_s: float, *, to: int) -> None:
        self.done["delay"] += 1

    def heal(self) -> None:
        self.done["heal"] += 1

    stall_store = unstall_store = heal


class Calls:
    """The load as faults use it: wishes are granted at once, or never; bursts may be deadly."""

    def __init__(self, town: Town) -> None:
        self.town = town
        self.hot = {SHARD: ["a", "b"]}
        self.reserved = Reserved(town)
        self.dying = 0

    def home(self, room: str) -> int:
        return self.town.home

    def rooms_at(self, node: int) -> list[str]:
        return []

    def burst(self, count: int, rooms: object = ()) -> None:
        """Everyone ends under it, so many times."""
        for place in self.town.nodes:
            place.up = self.dying <= 0
        self.dying -= 1

    async def stand_still(self, node: int, count: int) -> None:
        pass

    async def pour(self, rooms: object, seconds: float) -> None:
        pass

    def keep_busy(self, room: str, seconds: float) -> None:
        pass

    async def wish(self, shard: ShardKey, node: int | None) -> None:
        if self.town.works:
            self.town.moving = node is not None
            self.town.home = OWNER if node is None else node


class Reserved(dict[ShardKey, None]):
    """Where nothing works, those whom a fault aims at end as soon as it has aimed."""

    def __init__(self, town: Town) -> None:
        super().__init__()
        self.town = town

    def __setitem__(self, shard: ShardKey, value: None) -> None:
        super().__setitem__(shard, value)
        for place in self.town.nodes:
            place.up = self.town.works


def strike(fault: Fault, town: Town, *, dying: int = 0) -> Chaos:
    """Strike once, in virtual time; now and then all is well again, and then calm."""
    calls = Calls(town)
    calls.dying = dying
    chaos = Chaos(cast(Processes, town), Tally(), cast(Load, calls), scale=1.0)
    world = World(0)

    async def whole() -> None:
        await fault(chaos, Random(1))

    for at in (20.0, 40.0):
        world.call_at(world.now + at, town.settle)
    world.call_at(world.now + 60.0, chaos.calm.set)
    try:
        world.run(whole(), world.process("chaos"))
    finally:
        world.close()
    return chaos


@pytest.mark.parametrize("kind", AIMED)
def test_an_aimed_fault_counts_if_what_it_waits_for_comes(kind: str) -> None:
    assert strike(AIMED[kind], Town()).tally.faults[kind] > 0


@pytest.mark.parametrize("kind", AIMED)
def test_an_aimed_fault_that_met_nothing_does_not_count(kind: str) -> None:
    chaos = strike(AIMED[kind], Town(works=False))
    assert chaos.tally.faults.total() == 0
    assert chaos.aimed == {}, "and everything is mended"


def test_nobody_is_evicted_where_only_proof_of_death_counts() -> None:
    town = Town(settings=Settings(fencing="health"))
    town.status = lambda incarnation: "up"  # type: ignore[method-assign]
    assert strike(AIMED["hostage"], town).tally.faults["hostage"] == 1


def test_a_cut_of_no_connection_does_not_count() -> None:
    town = Town(works=False)
    assert strike(cut, town).tally.faults["cut"] == 0
    assert strike(cut, Town()).tally.faults["cut"] > 0, "some pair has a connection: it is found"
    before = town.done["cut"]
    assert strike(RANDOM["cut"], town).tally.faults["cut"] == 0
    pairs = (NODES + 1) * NODES // 2
    assert TRIES * pairs <= town.done["cut"] - before <= TRIES * 8 * pairs, "tried again, not on"


def test_a_node_that_ended_before_its_freeze_does_not_count() -> None:
    chaos = strike(freeze, Town(), dying=2)
    assert chaos.tally.faults["freeze"] == 0
    assert chaos.touched == {}


def test_a_restart_counts_once_it_is_done() -> None:
    assert strike(restart, Town()).tally.faults["restart"] == 1
    town = Town(works=False)
    tally = Tally()
    with pytest.raises(HarnessError, match="an orderly stop failed"):
        strike(lambda chaos, random: restart(_with(chaos, tally), random), town)
    assert tally.faults["restart"] == 0


def _with(chaos: Chaos, tally: Tally) -> Chaos:
    chaos.tally = tally
    return chaos


def test_what_struck_nothing_is_tried_again() -> None:
    """All ended under the bursts before the freeze; somebody starts them again, and it strikes."""
    assert strike(RANDOM["freeze"], Town(), dying=2).tally.faults["freeze"] == 1


def test_nobody_stands_still_where_nobody_would_continue_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its shard may move between the order and its start: that stopped another node for good."""
    stopped: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, sent: stopped.append((pid, sent)))
    late, soon = 0.0, float("inf")
    for pid, until in ((os.getpid(), late), (os.getpid() + 1, soon)):
        asyncio.run(Stander().stand_still(pid, until))
    assert stopped == []
    asyncio.run(Stander().stand_still(os.getpid(), soon))
    assert stopped == [(os.getpid(), signal.SIGSTOP)]
