"""What operators do to a healthy cluster: updates, scaling, drains, stops and rollbacks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from domicile.testing.sim.node import SimNode
from proving.fault_plan import Mischief
from proving.profiles.nodes import ask_to_stop

if TYPE_CHECKING:
    from proving.profile import Profile

MOST_NODES = 9
LEAST_NODES = 3
STOP_S = 15.0
"""How long an operator waits for a node to leave before killing it."""


def prepare(load: Profile) -> None:
    """Everybody runs the first version."""
    for process in load.sim.nodes:
        process.version = "1"


def surge(m: Mischief, random: Random) -> None:
    """A new version comes node by node: one more is started, then an old one leaves."""
    if _begin(m):
        version = _newest(m) + 1
        m.note("surge", f"to version {version}")
        m.spawn(_release(m, _surge(m, random, str(version), random.randint(1, 4))))


def in_place(m: Mischief, random: Random) -> None:
    """A new version comes node by node: each is stopped and started again."""
    if _begin(m):
        version = _newest(m) + 1
        m.note("in-place update", f"to version {version}")
        m.spawn(_release(m, _in_place(m, random, str(version), random.randint(1, 4))))


def rollback(m: Mischief, random: Random) -> None:
    """An older version takes the place of the newest, all over."""
    newest = _newest(m)
    if newest > 1 and _begin(m):
        m.note("rollback", f"to version {newest - 1}")
        m.spawn(_release(m, _in_place(m, random, str(newest - 1), 5, of=str(newest))))


def scale_out(m: Mischief, random: Random) -> None:
    """One or two more nodes."""
    count = random.randint(1, 2)
    if len(m.up()) + count <= MOST_NODES:
        m.note("scale out", f"by {count}")
        for _ in range(count):
            m.sim.add(version=str(_newest(m)))


def scale_in(m: Mischief, random: Random) -> None:
    """A node leaves for good."""
    up = m.up()
    if len(up) > LEAST_NODES:
        victim = random.choice(up)
        if ask_to_stop(m, victim):
            m.note("scale in", f"node {victim.index}")
            m.retired[victim.index] = None


def drain(m: Mischief, random: Random) -> None:
    """A node is to be emptied, and for a while it is."""
    up = [node for node in m.up() if node.index not in m.drained]
    if len(up) > LEAST_NODES:
        victim = random.choice(up)
        m.note("drain", f"node {victim.index}")
        m.spawn(_drain(m, victim.index, random.uniform(0.5, 6.0)))


async def _drain(m: Mischief, index: int, lasts_s: float) -> None:
    m.drained[index] = None
    await m.sim.drain(index)
    await m.until(lambda: False, lasts_s)
    await m.undrain(index)


def _begin(m: Mischief) -> bool:
    """Whether no other update is under way."""
    if m.updating:
        return False
    m.updating = True
    return True


async def _release(m: Mischief, work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    finally:
        m.updating = False


async def _surge(m: Mischief, random: Random, version: str, count: int) -> None:
    for _ in range(count):
        old = [node for node in m.up() if node.version != version]
        if not old or not m.faulty or len(m.up()) >= MOST_NODES:
            return
        fresh = m.sim.nodes[m.sim.add(version=version)]
        await m.until(partial(_registered, fresh), 5.0)
        victim = random.choice(old)
        m.retired[victim.index] = None
        await _leave(m, victim)


async def _in_place(
    m: Mischief, random: Random, version: str, count: int, of: str | None = None
) -> None:
    for _ in range(count):
        old = [node for node in m.up() if (node.version == of if of else node.version != version)]
        if not old or not m.faulty or len(m.up()) < LEAST_NODES:
            return
        victim = random.choice(old)
        await _leave(m, victim)
        if not victim.up:
            m.sim.start(victim.index, version=version)
        await asyncio.sleep(random.uniform(0.0, 1.0))


async def _leave(m: Mischief, victim: SimNode) -> None:
    """SIGTERM, and SIGKILL if that takes too long."""
    if ask_to_stop(m, victim) and not await m.until(lambda: not victim.up, STOP_S) and m.faulty:
        m.sim.crash(victim.index)


def _registered(node: SimNode) -> bool:
    return bool(node.incarnation)


def _newest(m: Mischief) -> int:
    return max(int(process.version or "1") for process in m.sim.nodes)


def two_stop(m: Mischief, random: Random) -> None:
    """Two nodes leave at once, and come back."""
    up = m.up()
    if len(up) > LEAST_NODES + 1:
        pair = random.sample(up, 2)
        m.note("two stop", f"nodes {sorted(node.index for node in pair)}")
        for victim in pair:
            if ask_to_stop(m, victim):
                m.later(random.uniform(4.0, 12.0), partial(m.restart, victim.index))
