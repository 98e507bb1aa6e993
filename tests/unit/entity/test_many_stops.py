"""Entities of draining shards are stopped so many per turn of the event loop (H10)."""

from __future__ import annotations

import asyncio

import pytest

from domicile import Entity, Settings, handler
from domicile.entity.hosting.stop_budget import STOPS_PER_TURN, StopBudget
from domicile.testing import Sim, simulated


class Pile:
    """Something with so much to stop."""

    def __init__(self, stops: StopBudget, count: int, log: list[str], name: str) -> None:
        self._stops, self._left, self._log, self._name = stops, count, log, name

    def go_on(self) -> bool:
        while self._left:
            if not self._stops.take():
                return False
            self._left -= 1
            self._log.append(self._name)
        return True


def test_so_many_per_turn_and_one_pile_after_the_other() -> None:
    async def main() -> None:
        log: list[str] = []
        stops = StopBudget(asyncio.get_running_loop(), lambda: True)
        for name in ("a", "b"):
            pile = Pile(stops, 2 * STOPS_PER_TURN, log, name)
            if not pile.go_on():
                stops.later(pile.go_on)
        assert log == ["a"] * STOPS_PER_TURN
        turns: list[int] = []
        while len(log) < 4 * STOPS_PER_TURN:
            await asyncio.sleep(0)
            turns.append(len(log))
        assert turns == [2 * STOPS_PER_TURN, 3 * STOPS_PER_TURN, 4 * STOPS_PER_TURN]
        assert log == ["a"] * (2 * STOPS_PER_TURN) + ["b"] * (2 * STOPS_PER_TURN)
        await asyncio.sleep(0)
        assert stops.take(), "and then anew"

    asyncio.run(main())


def test_a_node_that_lost_its_lease_stops_nothing_more() -> None:
    async def main() -> None:
        log: list[str] = []
        lives = True

        def guard() -> bool:
            return lives

        stops = StopBudget(asyncio.get_running_loop(), guard)
        pile = Pile(stops, 2 * STOPS_PER_TURN, log, "a")
        assert not pile.go_on()
        stops.later(pile.go_on)
        lives = False
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(log) == STOPS_PER_TURN

    asyncio.run(main())


class Guest(Entity, name="guest"):
    """Does nothing."""

    @handler
    async def hello(self) -> None:
        """At once."""


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What was left of the allowance of each turn in which entities were stopped."""
    found: list[int] = []
    turned = StopBudget._turned

    def counted(stops: StopBudget) -> None:
        found.append(stops._left)
        turned(stops)

    monkeypatch.setattr(StopBudget, "_turned", counted)
    return found


@simulated(entities=[Guest], nodes=2, seeds=1, settings=Settings(shards=2))
async def test_the_loop_turns_while_a_shard_with_many_entities_stops(
    sim: Sim, turns: list[int]
) -> None:
    await sim.wait_until(sim.settled)
    for number in range(8 * STOPS_PER_TURN):
        await sim.ref(Guest, f"g{number}").ask(Guest.hello)
    life = sim.node(1).life
    assert life is not None
    residents = life.runtime.residents
    had = residents.count
    assert had > 2 * STOPS_PER_TURN
    turns.clear()
    await sim.stop(1)
    assert residents.count == 0
    assert len(turns) > had // STOPS_PER_TURN


@simulated(entities=[Guest], nodes=3, seeds=2, settings=Settings(shards=6))
async def test_of_a_home_that_is_gone_nothing_is_known(sim: Sim) -> None:
    await sim.wait_until(sim.settled)
    for number in range(60):
        await sim.ref(Guest, f"g{number}").ask(Guest.hello)
    life = sim.client_life
    assert life is not None
    known = life.runtime.sending._outflow.homes
    gone = sim.nodes[1].incarnation
    assert gone in known
    sim.crash(1)
    await sim.wait_until(sim.settled)
    await sim.advance(1.0)
    assert gone not in known
    assert len(known) == 2
