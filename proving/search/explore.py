"""The search itself: every state once, the shortest way to whatever is wrong.

`explore` goes breadth first through all states, and then asks of each whether everything can
still come to its end without another fault. `walk` follows random ways through scenarios that
are too large for that. Both raise `Violation` with the way that led there.
"""

from __future__ import annotations

import gc
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from proving.search.machines import Machines
from proving.search.scenario import Scenario, Violation
from proving.search.traffic import Action
from proving.search.world import SELDOM, World

MAX_WAY = 2_000
"""I6: no way through these small worlds is longer; more means that it runs in circles."""


class Explored(NamedTuple):
    """What an exploration saw."""

    states: int
    transitions: int
    depth: int
    ends: int
    """States in which nothing is left to do."""
    faults: dict[str, int]
    """How many states follow directly from each kind of fault."""
    complete: bool


def explore(
    scenario: Scenario, limit: int = 2_000_000, report: Callable[[int, int], None] | None = None
) -> Explored:
    """Breadth first, up to a number of states. `report` hears now and then how far it is."""
    collecting = gc.isenabled()
    gc.disable()  # millions of tuples and not one cycle
    try:
        return _explore(scenario, limit, report)
    finally:
        if collecting:
            gc.enable()


def _explore(scenario: Scenario, limit: int, report: Callable[[int, int], None] | None) -> Explored:
    first = World(Machines(scenario))
    seen: dict[bytes, int] = {first.key(): 0}
    came, how, depth = array("i", [-1]), list[Action]([("begin",)]), array("H", [0])
    todo: deque[World] = deque([first])
    back_from, back_to = array("i"), array("i")
    settled = bytearray()
    faults: dict[str, int] = {}
    transitions = ends = number = 0
    while todo and len(came) < limit:
        world = todo.popleft()
        why = world.settled()
        settled.append(not why)
        leads_on = False
        for action in world.enabled():
            after = world.copy()
            try:
                after.take(action)
            except Violation as bad:
                raise Violation(f"{bad}\nafter:\n{_way(came, how, number, action)}") from bad
            key = after.key()
            reached = seen.get(key)
            if reached == number:
                continue
            transitions += 1
            leads_on = True
            if reached is None:
                reached = seen[key] = len(came)
                todo.append(after)
                came.append(number)
                how.append(action)
                depth.append(depth[number] + 1)
                if report is not None and reached % 5_000 == 0:
                    report(reached, depth[reached])
            if action[0] in SELDOM:
                name = _fault(action)
                faults[name] = faults.get(name, 0) + 1
            else:
                back_from.append(reached)
                back_to.append(number)
        if not leads_on:
            ends += 1
        if not leads_on and why:
            raise Violation(f"stuck: {why}\nafter:\n{_way(came, how, number)}")
        number += 1
    if not todo:
        trap = _trap(len(came), back_from, back_to, settled)
        if trap >= 0:
            raise Violation(f"stuck: no way leads to an end from here:\n{_way(came, how, trap)}")
    faults = dict(sorted(faults.items()))
    return Explored(len(came), transitions, max(depth), ends, faults, not todo)


def walk(scenario: Scenario, seeds: Sequence[int]) -> Explored:
    """One random run to its end for each seed."""
    machines = Machines(scenario)
    steps = longest = 0
    faults: dict[str, int] = {}
    for seed in seeds:
        random, world, way = Random(seed), World(machines), list[Action]()
        try:
            while actions := _leading_on(world):
                way.append(random.choice(actions))
                world.take(way[-1])
                if way[-1][0] in SELDOM:
                    faults[_fault(way[-1])] = faults.get(_fault(way[-1]), 0) + 1
                if len(way) > MAX_WAY:
                    raise Violation(f"it runs in circles: {world.settled()}")
            if world.settled():
                raise Violation(f"stuck: {world.settled()}")
        except Violation as bad:
            shown = "\n".join(f"  {_show(action)}" for action in way)
            raise Violation(f"seed {seed}: {bad}\nafter:\n{shown}") from bad
        steps += len(way)
        longest = max(longest, len(way))
    return Explored(steps, steps, longest, len(seeds), dict(sorted(faults.items())), False)


def _leading_on(world: World) -> list[Action]:
    """Steps that change something; none once all is settled and only faults are left."""
    key, out, calm = world.key(), list[Action](), True
    for action in world.enabled():
        if action[0] in ("release", "tick", "reread"):
            after = world.copy()
            after.take(action)
            if after.key() == key:
                continue
        calm = calm and action[0] in SELDOM
        out.append(action)
    return [] if calm and not world.settled() else out


def _trap(count: int, back_from: array[int], back_to: array[int], settled: bytearray) -> int:
    """The first state from which no step but a fault leads towards a settled one, or -1."""
    heads = array("i", [-1]) * count
    links = array("i", bytes(4 * len(back_from)))
    for index, state in enumerate(back_from):
        links[index], heads[state] = heads[state], index
    good = bytearray(settled)
    todo = [state for state in range(count) if good[state]]
    while todo:
        index = heads[todo.pop()]
        while index >= 0:
            before = back_to[index]
            if not good[before]:
                good[before] = 1
                todo.append(before)
            index = links[index]
    return good.find(0)


def _fault(action: Action) -> str:
    return f"commit unknown, {action[3]}" if action[0] == "unknown" else _NAMES[action[0]]


_NAMES = {
    "again": "Released again", "crash": "crash", "deposed": "leader deposed", "die": "leader dies",
    "hold": "overdue Flushed", "lose": "link lost", "relist": "watch broken",
    "untold": "Told lost",
}  # fmt: skip


def _way(came: array[int], how: list[Action], number: int, *last: Action) -> str:
    way = list(last)
    while number > 0:
        way.append(how[number])
        number = came[number]
    return "\n".join(f"  {_show(action)}" for action in reversed(way))


def _show(action: Action) -> str:
    return " ".join(map(str, action))
