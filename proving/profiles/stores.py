"""Faults of the store: out of reach, put back to a backup, forgetful; answers that get lost."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from random import Random

from domicile.core.hashing import shard_of
from domicile.core.ids import EntityKey, ShardKey
from domicile.entity.model.client import Client
from domicile.errors import DomicileError
from proving.fault_plan import Mischief
from proving.seed_result import NODES
from proving.workload import Ledger


def outage(m: Mischief, random: Random) -> None:
    """One node does not reach the store."""
    victim = m.victim(random)
    if victim is not None:
        lasts_s = random.uniform(0.5, 9.0)
        m.note("outage", f"of the store for node {victim.index} for {lasts_s:.2f} s")
        m.sim.cut_store(victim.index)
        m.later(lasts_s, m.sim.heal)


def watch(m: Mischief, random: Random) -> None:
    """Watches lag, and some break."""
    m.note("watch")
    for process in m.sim.nodes:
        if process.store is not None and random.random() < 0.6:
            process.store.watch_delay_s = (0.0, random.uniform(0.0, 0.3))
            if random.random() < 0.5:
                process.store.break_watch()


def lost_replies(m: Mischief, random: Random) -> None:
    """Commits happen and nobody hears of it; requests arrive after they were given up (S1)."""
    m.note("lost replies")
    m.sim.note_fault("lost replies")
    for process in m.sim.nodes:
        if process.store is not None and process.journal is not None:
            process.store.lost_reply = random.choice((0.0, 0.1, 0.3))
            process.journal.lost_reply = random.choice((0.0, 0.1, 0.3))
            process.store.late_request = random.choice((0.0, 0.1, 0.3))
            process.journal.late_request = random.choice((0.0, 0.1, 0.3))
            process.journal.lost_request = random.choice((0.0, 0.1, 0.3))


def unknown(m: Mischief, random: Random) -> None:
    """Outcomes of the store are unknown: some commits landed, some did not (S1)."""
    m.note("unknown")
    m.sim.note_fault("lost replies")
    touched = [process.store for process in m.sim.nodes if process.store is not None]
    for faults in touched:
        faults.lost_request = random.choice((0.0, 0.1, 0.4))
        faults.lost_reply = random.choice((0.0, 0.1, 0.4))

    def over() -> None:
        for faults in touched:
            faults.lost_request = faults.lost_reply = 0.0

    m.later(random.uniform(1.0, 5.0), over)


def whole_outage(m: Mischief, random: Random) -> None:
    """Nobody reaches the store, for moments or for longer than any lease lives."""
    running = random.random() < 0.5
    lasts_s = random.choice((random.uniform(0.2, 4.0), random.uniform(5.0, 12.0)))
    kind = "store away" if running else "store down"
    m.note(kind, f"for {lasts_s:.2f} s")
    m.sim.store_outage(running=running)
    m.later(lasts_s, m.sim.store_back)


def rewind(m: Mischief, random: Random) -> None:
    """A backup takes the store's place (S5); sometimes after an outage."""
    back_s = random.choice((random.uniform(0.0, 1.0), random.uniform(1.0, 12.0)))

    def happen() -> None:
        gone_s = m.sim.rewind(min(back_s, m.sim.world.now - m.load.began_at))
        m.note("rewind", f"by {gone_s:.2f} s")
        m.sim.store_back()

    if random.random() < 0.3:
        m.sim.store_outage(running=random.random() < 0.5)
        m.later(random.uniform(0.1, 8.0), m.go_on(happen))
    else:
        happen()


def forgotten_home(m: Mischief, random: Random) -> None:
    """A backup that knows nothing of a ledger's last home, though the journal does (J1)."""
    id = random.choice(m.load.rooms)
    number = shard_of(EntityKey("ledger", id), m.sim.settings.shards)
    m.note("forgotten home", f"of shard {number}")
    m.load.inside(-1, lambda _: _forget(m, random, id, ShardKey("default", number)))


async def _forget(m: Mischief, random: Random, id: str, shard: ShardKey) -> None:
    began_at = m.sim.world.now
    await m.sim.wish(shard, random.randrange(NODES))
    await asyncio.sleep(random.uniform(0.1, 0.6))
    await _write(m, id)
    if not m.faulty:
        return
    m.sim.rewind(m.sim.world.now - began_at + random.uniform(0.0, 0.5))
    # At once, when its shard has a home again, and in the calm: by then it must go well.
    for pause_s in (random.uniform(0.0, 3.0), random.uniform(6.0, 9.0), random.uniform(15.0, 25.0)):
        await asyncio.sleep(pause_s)
        await _write(m, id)


def raised_fence(m: Mischief, random: Random) -> None:
    """A journal's fence is raised while the shard's home writes on (J2)."""
    id = random.choice(m.load.rooms)
    shard = ShardKey("default", shard_of(EntityKey("ledger", id), m.sim.settings.shards))
    m.load.inside(-1, lambda _: _raise(m, random, id, shard))


async def _raise(m: Mischief, random: Random, id: str, shard: ShardKey) -> None:
    # Once before, so that its home has claimed it: else it is the claim that is refused (J1).
    await _write(m, id)
    if not m.faulty:
        return
    m.note("raised fence", f"of shard {shard.shard}")
    m.sim.raise_fence(shard)
    for pause_s in (random.uniform(0.0, 1.0), random.uniform(6.0, 9.0), random.uniform(15.0, 25.0)):
        await asyncio.sleep(pause_s)
        await _write(m, id)


async def _write(m: Mischief, id: str) -> None:
    with suppress(DomicileError):
        await m.load.note_down(m.sim, id, "", refused=False)


def compaction(m: Mischief, random: Random) -> None:
    """The store forgets its changes just when watches broke, so that they must list again."""
    m.note("compaction")
    for process in m.sim.nodes:
        if process.store is not None and random.random() < 0.7:
            process.store.watch_delay_s = (0.0, random.uniform(0.0, 0.2))
            process.store.break_watch()
    if random.random() < 0.3:
        m.sim.store.break_watch()
    m.later(random.choice((0.0, random.uniform(0.0, 0.3))), m.sim.compact)


def forgotten_homes(m: Mischief, random: Random) -> None:
    """As `forgotten_home`, after several moves: the journal is ahead by several epochs (J1)."""
    id = random.choice(m.load.rooms)
    number = shard_of(EntityKey("ledger", id), m.sim.settings.shards)
    m.note("forgotten homes", f"of shard {number}")
    m.load.inside(-1, lambda _: _forget_several(m, random, id, ShardKey("default", number)))


async def _forget_several(m: Mischief, random: Random, id: str, shard: ShardKey) -> None:
    began_at, epoch = m.sim.world.now, m.sim.entry(shard).epoch
    for node in random.sample(range(NODES), random.randint(2, 4)):
        await m.sim.wish(shard, node)
        await asyncio.sleep(random.uniform(0.1, 0.4))
        await _write(m, id)
    await m.sim.wish(shard, None)
    if not m.faulty or m.sim.entry(shard).epoch <= epoch:
        return
    m.sim.rewind(m.sim.world.now - began_at + random.uniform(0.0, 0.5))
    for pause_s in (random.uniform(0.0, 3.0), random.uniform(6.0, 9.0), random.uniform(15.0, 25.0)):
        await asyncio.sleep(pause_s)
        await _write(m, id)


def busy_fence(m: Mischief, random: Random) -> None:
    """A fence is raised in a shard with a reader that takes its time: it drains by itself, and
    what a sender has for it comes back though no entry says that it moves (J1, H3)."""
    id = random.choice(m.load.rooms)
    shard = ShardKey("default", shard_of(EntityKey("ledger", id), m.sim.settings.shards))
    entry = m.sim.entry(shard)
    senders = [node.index for node in m.up() if node.incarnation != entry.owner]
    if senders:
        sender = random.choice([*senders, -1])
        m.load.inside(-1, lambda _: _raise_busy(m, random, id, shard, sender))


async def _raise_busy(m: Mischief, random: Random, id: str, shard: ShardKey, sender: int) -> None:
    await _write(m, id)
    if not m.faulty:
        return
    m.note("busy fence", f"of shard {shard.shard}")
    pause_s = random.uniform(0.2, 0.8)
    m.load.inside(sender, partial(_read, id=id, pause_s=pause_s))
    await asyncio.sleep(random.uniform(0.01, 0.05))
    m.sim.raise_fence(shard)
    for _ in range(random.randint(3, 8)):
        m.load.inside(sender, partial(_note, m, id))
        await asyncio.sleep(random.uniform(0.005, 0.1))


async def _read(client: Client, id: str, pause_s: float) -> None:
    with suppress(DomicileError):
        await client.ref(Ledger, id).ask(Ledger.read, pause_s)


async def _note(m: Mischief, id: str, client: Client) -> None:
    with suppress(DomicileError):
        await m.load.note_down(client, id, "", refused=False)
