"""Faults of the network between nodes: connections broken, blocked, slow, lingering, repeated."""

from __future__ import annotations

import asyncio
from functools import partial
from random import Random

from domicile.core.ids import ShardKey
from proving.fault_plan import Mischief
from proving.seed_result import NODES, SETTINGS


def cut(m: Mischief, random: Random) -> None:
    """Connections between two processes break once; links reconnect."""
    one, other, _ = m.pair(random)
    m.note("cut", f"{_name(one)} from {_name(other)}")
    if other < 0:
        m.sim.cut_client(one)
    else:
        m.sim.cut(one, other)


def partition(m: Mischief, random: Random) -> None:
    """One or two nodes and the others do not reach each other."""
    everyone = list(range(NODES))
    random.shuffle(everyone)
    size = random.randint(1, 2)
    lasts_s = random.uniform(0.5, 8.0)
    m.note("partition", f"nodes {everyone[:size]} from the others for {lasts_s:.2f} s")
    m.sim.partition(everyone[:size], everyone[size:])
    m.later(lasts_s, m.sim.heal)


def block(m: Mischief, random: Random) -> None:
    """One direction between two nodes is dead for a while."""
    one, other = m.two_nodes(random)
    lasts_s = random.uniform(*random.choice(((1.2, 4.5), (0.5, 8.0))))
    m.note("block", f"{_name(one)} to {_name(other)} for {lasts_s:.2f} s")
    m.sim.block(one, other)
    m.later(lasts_s, m.sim.heal)


def long_block(m: Mischief, random: Random) -> None:
    """One direction is dead for longer than it takes to evict a node (C6)."""
    one, other = m.two_nodes(random)
    lasts_s = random.uniform(9.0, 16.0)
    m.note("long block", f"{_name(one)} to {_name(other)} for {lasts_s:.2f} s")
    m.sim.block(one, other)
    m.later(lasts_s, m.sim.heal)


def unheard(m: Mischief, random: Random) -> None:
    """Nobody hears a node, or it hears nobody, or both; it keeps renewing its lease (C6)."""
    victim = m.victim(random)
    if victim is None:
        return
    how = random.choice(("mute", "deaf", "both"))
    lasts_s = random.uniform(7.0, 16.0)
    m.note("unheard", f"node {victim.index} is {how} for {lasts_s:.2f} s")
    spared = random.choice((-1, -1, random.randrange(NODES)))
    for other in range(len(m.sim.nodes)):
        if other in (victim.index, spared):
            continue
        if how != "deaf":
            m.sim.block(victim.index, other)
        if how != "mute":
            m.sim.block(other, victim.index)
    m.later(lasts_s, m.sim.heal)


def slow(m: Mischief, random: Random) -> None:
    """A node's network and its way to the store get slow, until the calm."""
    process = random.choice(m.sim.nodes)
    m.note("slow", f"node {process.index}")
    # A broken connection takes several round trips to stand again, within the hold timeout.
    m.sim.network.slow(process.name, random.uniform(0.005, 0.06))
    if process.store is not None:
        process.store.slow = random.uniform(1, 50)


def slow_way(m: Mischief, random: Random) -> None:
    """One direction between two nodes gets slow, up to longer than a hold timeout."""
    one, other = m.two_nodes(random)
    extra_s = random.choice((random.uniform(0.05, 0.4), random.uniform(0.8, 2.5)))
    m.note("slow way", f"{_name(one)} to {_name(other)} by {extra_s:.2f} s")
    names = m.sim.nodes[one].name, m.sim.nodes[other].name
    m.sim.note_fault("slow", m.sim.nodes[one])
    m.sim.network.slow_way(*names, extra_s)
    m.later(random.uniform(1.0, 6.0), lambda: m.sim.network.slow_way(*names, 0.0))


def linger(m: Mischief, random: Random) -> None:
    """A broken connection goes on delivering after its successor stands."""
    one, other = m.two_nodes(random)
    lingers_s = random.uniform(0.05, 4.0)
    m.note("linger", f"{_name(one)} and {_name(other)} for {lingers_s:.2f} s")
    m.sim.linger(one, other, lingers_s)


def duplicate(m: Mischief, random: Random) -> None:
    """Connections arrive twice, at once or after they were broken."""
    one, other = m.two_nodes(random)
    m.note("duplicate", f"{_name(one)} and {_name(other)}")
    m.sim.duplicate(one, other)
    if random.random() < 0.5:
        again = partial(m.sim.duplicate, one, other)
        m.later(random.uniform(0.0, 0.3), again)
        m.sim.cut(one, other)


def late_answers(m: Mischief, random: Random) -> None:
    """Answers to a flush that come after the sender gave up on it, and flushed again (H5)."""
    owner, sender, shard = m.pair(random)
    if owner == sender or not m.faulty:
        return
    m.note("late answers", f"between {_name(owner)} and {_name(sender)}")
    m.load.inside(-1, lambda _: _hold_back(m, random, owner, sender, shard))


async def _hold_back(m: Mischief, random: Random, owner: int, sender: int, shard: ShardKey) -> None:
    room = random.choice(m.hot[shard])
    elsewhere = random.choice([node for node in range(NODES) if node != owner])
    row = partial(m.load.row, id=room, pause=0.0, count=3)
    m.load.inside(sender, row)
    await asyncio.sleep(random.uniform(0.005, 0.02))
    m.sim.block(*random.choice(((owner, sender), (sender, owner))))
    await m.sim.wish(shard, elsewhere)
    await asyncio.sleep(random.uniform(0.02, 0.2))
    await m.sim.wish(shard, None)
    await asyncio.sleep(SETTINGS.hold_timeout_s + random.uniform(0.0, 0.3))
    m.load.inside(sender, row)
    await asyncio.sleep(random.uniform(0.0, 0.05))
    await m.sim.wish(shard, elsewhere)
    await asyncio.sleep(random.uniform(0.05, 0.3))
    m.load.inside(sender, row)
    await asyncio.sleep(random.uniform(0.0, 0.2))
    m.sim.heal()


def late_owner(m: Mischief, random: Random) -> None:
    """An owner hears of a move after a sender does, and its answers take long (H8)."""
    owner, sender, shard = m.pair(random)
    if sender < 0 or sender == owner:
        sender = random.choice([node for node in range(NODES) if node != owner])
    leader = m.leader()
    if leader is None or leader.index == owner or not m.faulty:
        cut(m, random)
        return
    m.note("late owner", f"{_name(owner)}, with mail of {_name(sender)}")
    of_owner, of_sender = m.sim.nodes[owner].name, m.sim.nodes[sender].name
    slow_ways = ((leader.name, of_owner), (of_owner, of_sender))
    m.load.inside(-1, lambda _: _hear_late(m, random, owner, sender, shard, slow_ways))


async def _hear_late(
    m: Mischief,
    random: Random,
    owner: int,
    sender: int,
    shard: ShardKey,
    slow_ways: tuple[tuple[str, str], ...],
) -> None:
    room = random.choice(m.hot[shard])
    store = m.sim.nodes[owner].store
    usual = (0.0, 0.0) if store is None else store.watch_delay_s
    m.sim.note_fault("slow", m.sim.nodes[owner])
    for way in slow_ways:
        m.sim.network.slow_way(*way, random.uniform(0.3, 0.6))
    lags = store is not None and store not in m.lagging
    if store is not None and lags:
        m.lagging[store] = None
        late_s = random.uniform(0.1, 0.3)
        store.watch_delay_s = (late_s, late_s)
    pause_s = random.uniform(0.1, 0.3)
    m.load.inside(sender, partial(m.load.row, id=room, pause=pause_s, count=8))
    await asyncio.sleep(random.uniform(0.005, 0.03))
    await m.sim.wish(shard, random.choice([node for node in range(NODES) if node != owner]))
    for _ in range(3):
        await asyncio.sleep(random.uniform(0.03, 0.15))
        m.load.inside(sender, partial(m.load.row, id=room, pause=0.0, count=3))
    await asyncio.sleep(1.0)
    await m.sim.wish(shard, None)
    for way in slow_ways:
        m.sim.network.slow_way(*way, 0.0)
    if store is not None and lags:
        store.watch_delay_s = usual
        del m.lagging[store]


def _name(index: int) -> str:
    return "the client" if index < 0 else f"node {index}"
