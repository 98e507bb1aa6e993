"""Faults of single processes: killed, frozen, stopped, and writes that outlive them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from random import Random

from domicile.errors import DomicileError
from domicile.testing.sim.node import SimNode
from proving.fault_plan import Mischief
from proving.seed_result import leading, seen
from proving.workload import Ledger


def crash(m: Mischief, random: Random) -> None:
    """SIGKILL, and another process in its place after a while."""
    victim = m.victim(random)
    if victim is not None:
        m.note("crash", f"node {victim.index}")
        m.sim.crash(victim.index)
        m.later(random.uniform(0.5, 9.0), partial(m.restart, victim.index))


def freeze(m: Mischief, random: Random) -> None:
    """SIGSTOP, for shorter or longer than a lease."""
    freeze_node(m, random, None)


def freeze_node(m: Mischief, random: Random, victim: SimNode | None) -> None:
    """The same for a certain node, if it runs."""
    if victim is None or not victim.up or victim.index in m.sleepers:
        victim = m.victim(random)
    if victim is not None:
        long = random.random() < 0.6
        pause_s = random.uniform(5.0, 9.0) if long else random.uniform(0.05, 4.5)
        stand_still(m, "freeze past the lease" if long else "freeze", victim, pause_s)


def freeze_for_long(m: Mischief, random: Random) -> None:
    """SIGSTOP for much longer than any lease lives."""
    victim = m.victim(random)
    if victim is not None:
        stand_still(m, "long freeze", victim, random.uniform(9.0, 16.0))


def freeze_leader(m: Mischief, random: Random) -> None:
    """The same for whoever coordinates now."""
    for process in m.sim.nodes:
        if leading(process):
            if process.index in m.sleepers:
                return
            # Mostly about as long as its leader lease, while its node lease may just hold.
            pause_s = random.uniform(*random.choice(((4.2, 5.2), (4.2, 5.2), (0.1, 9.0))))
            stand_still(m, "leader frozen", process, pause_s)
            return


def stand_still(m: Mischief, kind: str, victim: SimNode, pause_s: float) -> None:
    """Freeze a node for a while."""
    m.note(kind, f"node {victim.index} for {pause_s:.2f} s")
    m.sim.freeze(victim.index)
    m.sleepers[victim.index] = None
    m.later(pause_s, partial(m.wake, victim.index))


def stop(m: Mischief, random: Random) -> None:
    """SIGTERM: an orderly leave (H14), among faults."""
    victim = m.victim(random)
    if victim is not None and ask_to_stop(m, victim):
        m.note("stop", f"node {victim.index}")
        m.later(random.uniform(4.0, 12.0), partial(m.restart, victim.index))


def ask_to_stop(m: Mischief, victim: SimNode) -> bool:
    """Tell a node to leave; whether there was somebody to tell."""
    if victim.stopping is None or victim.loop is None:
        return False
    m.sim.note_fault("stop", victim)
    victim.loop.post(victim.stopping.set)
    return True


def stalled_write(m: Mischief, random: Random) -> None:
    """A journal write that outlives its writer: it commits, or not, as its home is lost."""
    shard = random.choice(list(m.hot))
    id = random.choice(m.hot[shard])
    ledger = m.sim.shard(Ledger, id)

    def struck() -> None:
        entry = m.sim.entry(ledger)
        for process in m.up():
            if process.incarnation == entry.owner:
                m.note("stalled write", f"and crash of node {process.index}")
                m.sim.crash(process.index)
                m.later(random.uniform(8.0, 12.0), partial(m.restart, process.index))

    m.sim.servers.stall(random.uniform(4.5, 8.0), m.go_on(struck))
    for _ in range(2):
        m.sim.loop.post(partial(_write, m, id))


def _write(m: Mischief, id: str) -> None:
    task = asyncio.get_running_loop().create_task(_write_twice(m, id))
    task.add_done_callback(seen)


async def _write_twice(m: Mischief, id: str) -> None:
    for _ in range(2):
        with suppress(DomicileError):
            await m.load.note_down(m.sim, id, "", refused=False)


def deposed(m: Mischief, random: Random) -> None:
    """The leader key is another's before the leader hears of it, and its own lease stands (C1)."""
    leader = m.leader()
    if leader is not None and leader.index not in m.sleepers and m.faulty:
        m.note("deposed", f"node {leader.index}")
        m.load.inside(-1, lambda _: _depose(m, random, leader))


async def _depose(m: Mischief, random: Random, leader: SimNode) -> None:
    faults = leader.store
    if faults is None:
        return
    m.sim.note_fault("outage", leader)
    faults.cut = True
    await m.sim.depose()
    others = [node for node in m.sim.nodes if node is not leader]
    await m.until(lambda: any(map(leading, others)), 2.5)
    await asyncio.sleep(random.uniform(0.0, 0.3))
    # What it missed can't be made up for one by one: it sees a key of another, and never none.
    m.sim.compact()
    faults.cut = False
    faults.break_watch()
    m.sim.note_fault("back", leader)
