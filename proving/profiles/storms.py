"""Restart storms: many processes at once, all of them, and the coordinator again and again."""

from __future__ import annotations

import asyncio
from functools import partial
from random import Random

from proving.fault_plan import Mischief
from proving.profiles.nodes import ask_to_stop


def several(m: Mischief, random: Random) -> None:
    """Two to four nodes are killed at one moment."""
    _storm(m, random, "several crash", random.randint(2, 4))


def all_at_once(m: Mischief, random: Random) -> None:
    """Every node is killed at one moment."""
    _storm(m, random, "all crash", len(m.sim.nodes))


def _storm(m: Mischief, random: Random, kind: str, count: int) -> None:
    up = [node for node in m.sim.nodes if node.up]
    victims = random.sample(up, min(count, len(up)))
    m.note(kind, f"nodes {sorted(node.index for node in victims)}")
    together = random.random() < 0.4
    back_s = random.uniform(0.05, 6.0)
    for victim in victims:
        m.sleepers.pop(victim.index, None)
        m.sim.crash(victim.index)
        delay_s = back_s if together else random.uniform(0.05, 8.0)
        m.later(delay_s, partial(m.restart, victim.index))


def flapping(m: Mischief, random: Random) -> None:
    """One node is killed again as soon as it is back, several times."""
    victim = m.victim(random)
    if victim is not None:
        m.note("flapping", f"node {victim.index}")
        m.spawn(_flap(m, random, victim.index, random.randint(2, 5)))


async def _flap(m: Mischief, random: Random, index: int, times: int) -> None:
    for _ in range(times):
        if not m.faulty:
            return
        if m.sim.nodes[index].up and index not in m.sleepers:
            m.sim.crash(index)
        await asyncio.sleep(random.uniform(0.05, 1.5))
        m.restart(index)
        await asyncio.sleep(random.choice((random.uniform(0.0, 0.05), random.uniform(0.05, 2.0))))


def leaders(m: Mischief, random: Random) -> None:
    """Whoever coordinates is killed, and its successor, and the next one."""
    if m.leader() is not None:
        m.note("leaders crash")
        m.spawn(_depose(m, random, random.randint(2, 4)))


async def _depose(m: Mischief, random: Random, times: int) -> None:
    for _ in range(times):
        if not await m.until(lambda: m.leader() is not None, 10.0):
            return
        leader = m.leader()
        if leader is None or leader.index in m.sleepers or not m.faulty:
            return
        await asyncio.sleep(random.choice((0.0, random.uniform(0.0, 1.0))))
        if leader.up and leader.index not in m.sleepers:
            m.sim.crash(leader.index)
            m.later(random.uniform(0.3, 4.0), partial(m.restart, leader.index))


def stops(m: Mischief, random: Random) -> None:
    """Two nodes leave at the same time (H14)."""
    up = m.up()
    if len(up) < 4:
        return
    pair = random.sample(up, 2)
    m.note("two stop", f"nodes {sorted(node.index for node in pair)}")
    for victim in pair:
        if ask_to_stop(m, victim):
            m.later(random.uniform(4.0, 12.0), partial(m.restart, victim.index))
