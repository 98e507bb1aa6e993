"""Faults of journals: late or lost answers, rows that others hold, claims that come again."""

from __future__ import annotations

import asyncio
from functools import partial
from random import Random

from domicile.core.hashing import shard_of
from domicile.core.ids import EntityKey, ShardKey
from domicile.testing.sim.node import SimNode
from proving.desks import burst, desks_of
from proving.fault_plan import Mischief
from proving.seed_result import NODES

USUAL_S = (0.0002, 0.001)
"""How long a way to the journal takes without a fault."""


def slow_commits(m: Mischief, random: Random) -> None:
    """What the journal is asked, and what it answers, takes long."""
    m.note("slow commits")
    delay_s = random.choice((0.03, 0.1, 0.3))
    touched = [process.journal for process in m.sim.nodes if process.journal is not None]
    for faults in touched:
        faults.delay_s = (delay_s / 3, delay_s)

    def over() -> None:
        for faults in touched:
            faults.delay_s = USUAL_S

    m.later(random.uniform(1.0, 4.0), over)


def unsure(m: Mischief, random: Random) -> None:
    """Outcomes of writes are unknown: some landed, some did not, some land later (J4)."""
    m.note("unsure writes")
    m.sim.note_fault("lost replies")
    touched = [process.journal for process in m.sim.nodes if process.journal is not None]
    for faults in touched:
        faults.lost_request = random.choice((0.0, 0.2, 0.4))
        faults.lost_reply = random.choice((0.0, 0.2, 0.4))
        faults.late_request = random.choice((0.0, 0.3, 0.6))

    def over() -> None:
        for faults in touched:
            faults.lost_request = faults.lost_reply = faults.late_request = 0.0

    m.later(random.uniform(2.0, 6.0), over)


def repeated_claims(m: Mischief, random: Random) -> None:
    """As `unsure`, and claims arrive again and again (J4)."""
    unsure(m, random)
    m.note("repeated claims")
    for _ in range(40):
        m.later(random.uniform(0.5, 5.0), partial(m.sim.repeat_claim, _shard(m, random)[0]))


def busy_shards(m: Mischief, random: Random) -> None:
    """Other transactions hold rows that batches need (J3, J10)."""
    m.note("busy shards")
    for _ in range(random.randint(1, 4)):
        shard, id = _shard(m, random)
        m.sim.hold_row(shard, random.uniform(0.05, 1.2))
        m.later(random.uniform(0.0, 0.1), partial(_write, m, random, [id]))


def claim_behind_a_row(m: Mischief, random: Random) -> None:
    """A fence is raised while somebody holds its row, and its home writes on behind that (J2)."""
    shard, id = _shard(m, random)
    m.note("waiting claim", f"for shard {shard.shard}")
    _write(m, random, [id])
    for after_s in (0.1, 0.25):
        m.later(after_s + random.uniform(0.0, 0.1), partial(_write, m, random, [id]))
    m.later(0.02, partial(m.sim.hold_row, shard, random.uniform(0.4, 1.0)))
    m.later(0.06, partial(m.sim.raise_fence, shard))


def raised_fence(m: Mischief, random: Random) -> None:
    """A fence is raised just before its home writes to several shards at once (J3)."""
    ids = _neighbours(m)
    if ids:
        m.load.inside(-1, lambda _: _raise(m, random, ids))


async def _raise(m: Mischief, random: Random, ids: list[str]) -> None:
    _write(m, random, ids)
    await asyncio.sleep(random.uniform(0.3, 0.6))
    if not m.faulty:
        return
    shard = _shard_of(m, random.choice(ids))
    m.note("raised fence", f"of shard {shard.shard}")
    m.sim.raise_fence(shard)
    await asyncio.sleep(0.003)
    for _ in range(2):
        _write(m, random, ids)
        await asyncio.sleep(random.uniform(0.0, 0.02))


def crash_in_commit(m: Mischief, random: Random) -> None:
    """A process is killed while its writes are on their way; its callers send their keys again
    (J6)."""
    victim = m.victim(random)
    if victim is not None and victim.journal is not None:
        m.load.inside(-1, lambda _: _crash(m, random, victim))


async def _crash(m: Mischief, random: Random, victim: SimNode) -> None:
    faults = victim.journal
    assert faults is not None
    delay_s = random.uniform(0.05, 0.3)
    faults.delay_s = (delay_s / 2, delay_s)
    for _ in range(3):
        _write(m, random, _desks_at(m, victim))
        await asyncio.sleep(random.uniform(0.0, 2 * delay_s))
    if m.faulty and victim.up and victim.index not in m.sleepers:
        m.note("crash in commit", f"of node {victim.index}")
        m.sim.crash(victim.index)
        m.later(random.uniform(0.5, 9.0), partial(m.restart, victim.index))
    faults.delay_s = USUAL_S


def late_settling(m: Mischief, random: Random) -> None:
    """A batch is lost, its home dies before its question about that arrives, and by then the next
    home has written batches of its own (J4)."""
    victim = m.victim(random)
    if victim is not None and victim.journal is not None:
        m.load.inside(-1, lambda _: _settle_late(m, random, victim))


async def _settle_late(m: Mischief, random: Random, victim: SimNode) -> None:
    faults = victim.journal
    assert faults is not None
    m.note("late settling", f"by node {victim.index}")
    m.sim.note_fault("lost replies")
    faults.lost_request = 1.0
    ids = _desks_at(m, victim)
    _write(m, random, ids)
    await asyncio.sleep(random.uniform(0.1, 0.4))
    faults.lost_request, faults.late_request = 0.0, 1.0
    await asyncio.sleep(random.uniform(1.3, 1.7))
    faults.late_request = 0.0
    if not m.faulty or not victim.up or victim.index in m.sleepers:
        return
    m.sim.crash(victim.index)
    m.later(random.uniform(2.0, 9.0), partial(m.restart, victim.index))
    for _ in range(8):
        await asyncio.sleep(0.2)
        _write(m, random, ids)


def _write(m: Mischief, random: Random, ids: list[str]) -> None:
    if m.faulty:
        burst(m.load, random, random.randrange(-1, NODES), ids)


def _shard(m: Mischief, random: Random) -> tuple[ShardKey, str]:
    """The shard of some desk, and that desk."""
    id = random.choice(desks_of(m.load))
    return _shard_of(m, id), id


def _shard_of(m: Mischief, id: str) -> ShardKey:
    return ShardKey("default", shard_of(EntityKey("desk", id), m.sim.settings.shards))


def _desks_at(m: Mischief, home: SimNode) -> list[str]:
    """The desks that live at a node."""
    return [
        id for id in desks_of(m.load) if m.sim.entry(_shard_of(m, id)).owner == home.incarnation
    ]


def _neighbours(m: Mischief) -> list[str]:
    """The desks of the node that has desks in most shards; none if no node has two such shards."""
    best: list[str] = []
    most = 1
    for node in m.up():
        ids = _desks_at(m, node)
        shards = {_shard_of(m, id) for id in ids}
        if len(shards) > most:
            best, most = ids, len(shards)
    return best
