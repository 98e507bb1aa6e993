"""The faults of a chaos run that are aimed at a step: of a hand-off, an election or a renewal.

Run by `proving.chaos.round`, among those of `proving.chaos.faults`. Windows of a
few milliseconds are hardly ever hit at random; here a shard is sent on its way, under load, and
what takes part in that is struck while it goes on. A fault never strikes outside of its own locks,
and mends everything, whatever the cluster did meanwhile. It counts only if what it waits for came.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

from domicile.core.ids import ShardKey
from domicile.testing.processes.fault_proxy import CLIENT
from proving.chaos.faults import LOOK_S, RANDOM, Chaos, Fault, until

SLOW_S = 0.25
"""How late mail of the client is on a slow link: a move takes less."""

LATE_S = 0.5
"""How late a member that lags learns of anything; a renewal can still be answered in time."""

MOVED_S = 2.0
"""The longest that a fault waits for what it has begun."""


@dataclass(frozen=True, slots=True)
class Aim:
    """A hand-off that may begin: a hot shard, its home, and another one; the leader is neither."""

    shard: ShardKey
    rooms: list[str]
    owner: int
    to: int
    leader: int


def _aims(chaos: Chaos) -> list[Aim]:
    free = [node.index for node in chaos.free()]
    leader = chaos.cluster.leader()
    if leader is None or chaos.taken(leader):
        return []
    found: list[Aim] = []
    for shard, rooms in chaos.load.hot.items():
        entry = chaos.cluster.entry(shard)
        owner = chaos.load.home(rooms[0])
        if shard in chaos.load.reserved or entry.state != "serving" or owner not in free:
            continue
        others = [node for node in free if node not in (owner, leader)]
        if owner != leader and others:
            found += [Aim(shard, rooms, owner, to, leader) for to in others]
    return found


@asynccontextmanager
async def _aimed(chaos: Chaos, random: Random) -> AsyncGenerator[Aim | None]:
    """The network to itself, and a hand-off that nobody else disturbs; None if it gets calm."""
    while not chaos.calm.is_set():
        async with chaos.network:
            aims = [] if chaos.calm.is_set() else _aims(chaos)
            if aims:
                aim = random.choice(aims)
                async with _taking(chaos, aim):
                    yield aim
                return
        # Others may use the network meanwhile.
        await asyncio.sleep(LOOK_S)
    yield None


@asynccontextmanager
async def _taking(chaos: Chaos, aim: Aim) -> AsyncGenerator[None]:
    chaos.aimed.update(dict.fromkeys((aim.owner, aim.to, aim.leader)))
    chaos.load.reserved[aim.shard] = None
    try:
        yield
    finally:
        chaos.cluster.heal()
        chaos.aimed.clear()
        chaos.load.reserved.pop(aim.shard, None)


def _moved(chaos: Chaos, aim: Aim) -> Callable[[], bool]:
    return lambda: chaos.load.home(aim.rooms[0]) == aim.to


def _moving(chaos: Chaos, aim: Aim) -> Callable[[], bool]:
    return lambda: chaos.cluster.entry(aim.shard).state == "moving"


def _pour(chaos: Chaos, aim: Aim, seconds: float) -> asyncio.Task[None]:
    return asyncio.ensure_future(chaos.load.pour(aim.rooms[:1], seconds))


async def slow_move(chaos: Chaos, random: Random) -> None:
    """A move, taken back and begun again, while a sender's mail is long on its way (H5, H7)."""
    async with _aimed(chaos, random) as aim:
        if aim is None:
            return
        load, begun = chaos.load, 0
        chaos.cluster.delay(CLIENT, SLOW_S, to=aim.owner)
        pouring = _pour(chaos, aim, 2.6)
        for _ in range(3):
            load.keep_busy(aim.rooms[1], 0.45)
            await asyncio.sleep(SLOW_S + 0.05)
            await load.wish(aim.shard, aim.to)
            begun += await until(_moving(chaos, aim), 0.3)
            await asyncio.sleep(random.uniform(0.0, 0.1))
            await load.wish(aim.shard, None)
            await asyncio.sleep(0.2)
        await load.wish(aim.shard, aim.to)
        await pouring
        begun += await until(_moved(chaos, aim), MOVED_S)
        if begun > 1:
            chaos.struck("slow move")


async def asleep(chaos: Chaos, random: Random) -> None:
    """An owner that learns of its shard's move long after its senders did (H8)."""
    async with _aimed(chaos, random) as aim:
        if aim is None:
            return
        load, cluster = chaos.load, chaos.cluster
        if not cluster.nodes[aim.owner].up:
            return
        # The flush arrives before the owner knows, what it returns then after the next home is.
        cluster.delay(CLIENT, 0.6 * LATE_S, to=aim.owner)
        cluster.partition(aim.leader, aim.owner, one_way=True)
        cluster.lag(aim.owner, LATE_S)
        for _ in range(25):
            load.keep_busy(aim.rooms[0], 0.05)
        pouring = _pour(chaos, aim, 2.0)
        await asyncio.sleep(0.6 * LATE_S + 0.05)
        await load.wish(aim.shard, aim.to)
        if await until(lambda: cluster.phase(aim.owner, aim.shard) != "open", MOVED_S, LOOK_S):
            chaos.struck("asleep")
        # From here on it must be quick; only its answers to the client stay slow.
        cluster.heal()
        cluster.delay(CLIENT, 0.6 * LATE_S, to=aim.owner)
        await pouring
        await until(_moved(chaos, aim), MOVED_S)


async def unheard(chaos: Chaos, random: Random) -> None:
    """An owner frozen until its senders no longer wait for it, in a move that comes twice (H5)."""
    async with _aimed(chaos, random) as aim:
        if aim is None:
            return
        load, hold_s = chaos.load, chaos.cluster.settings.hold_timeout_s
        chaos.cluster.delay(CLIENT, SLOW_S, to=aim.owner)
        pouring = _pour(chaos, aim, hold_s + 1.0)
        await asyncio.sleep(SLOW_S / 2)
        frozen, begun = await chaos.freeze(aim.owner), 0
        try:
            await load.wish(aim.shard, aim.to)
            begun += await until(_moving(chaos, aim), 0.3)
            await asyncio.sleep(0.05)
            await load.wish(aim.shard, None)
            await asyncio.sleep(hold_s + 0.05)
            await load.wish(aim.shard, aim.to)
            begun += await until(_moving(chaos, aim), 0.3)
            await asyncio.sleep(0.05)
            if frozen and begun > 1:
                chaos.struck("unheard")
        finally:
            chaos.thaw(aim.owner)
        await pouring
        await until(_moved(chaos, aim), MOVED_S)


async def severed(chaos: Chaos, random: Random) -> None:
    """A shard moves while a sender with mail for it has no connection to its owner (H4)."""
    async with _aimed(chaos, random) as aim:
        if aim is None:
            return
        pouring = _pour(chaos, aim, 1.5)
        await asyncio.sleep(0.1)
        chaos.cluster.cut(CLIENT, aim.owner)
        chaos.cluster.partition(CLIENT, aim.owner)
        await asyncio.sleep(random.uniform(0.2, 0.5))
        await chaos.load.wish(aim.shard, aim.to)
        if await until(_moved(chaos, aim), 1.0) or _moving(chaos, aim)():
            chaos.struck("severed")
        await asyncio.sleep(0.1)
        chaos.cluster.heal()
        await pouring


async def crossed(chaos: Chaos, random: Random) -> None:
    """A release that crosses the order to stay, and leads to the same home again (H11, C4)."""
    async with _aimed(chaos, random) as aim:
        if aim is None:
            return
        chaos.cluster.delay(aim.owner, SLOW_S, to=aim.leader)
        await chaos.load.wish(aim.shard, aim.to)
        released = await until(
            lambda: chaos.cluster.phase(aim.owner, aim.shard) == "released", MOVED_S
        )
        await chaos.load.wish(aim.shard, aim.owner)
        if released:
            chaos.struck("crossed")
        await asyncio.sleep(3 * SLOW_S)


async def hostage(chaos: Chaos, random: Random) -> None:
    """A node that nobody reaches, though it reaches the store, until it is evicted (C5, C6)."""
    async with _aimed(chaos, random) as aim:
        if aim is None:
            return
        cluster, settings = chaos.cluster, chaos.cluster.settings
        incarnation = cluster.incarnation(aim.owner)
        if incarnation is None:
            return
        others = [CLIENT, *(node.index for node in cluster.nodes if node.index != aim.owner)]
        cluster.partition([aim.owner], others)

        def evicted() -> bool:
            return cluster.status(incarnation) in ("evicted", None)

        # Where only proof of death counts nobody is evicted (C9), however long this takes.
        if await until(evicted, settings.evict_after_s + 4.0) or settings.fencing == "health":
            chaos.struck("hostage")
        if random.random() < 0.5:
            cluster.heal()
        # As long as it may take a node to learn that it was given up, and others to act on it.
        more_s = settings.ttl_s + 1.0
        await chaos.lasts(more_s / chaos.scale, (more_s + 1.0) / chaos.scale, random)


async def deaf_leader(chaos: Chaos, random: Random) -> None:
    """A leader that does not reach one node, which all others reach (C6, C9)."""
    async with _aimed(chaos, random) as aim:
        if aim is None:
            return
        settings, nodes = chaos.cluster.settings, chaos.cluster.nodes
        if not (nodes[aim.leader].up and nodes[aim.owner].up):
            return
        # Only a connection that is known to be broken can be given up in the end.
        chaos.cluster.cut(aim.leader, aim.owner)
        chaos.cluster.partition(aim.leader, aim.owner)
        chaos.struck("deaf leader")
        long_s = max(settings.evict_after_s, settings.link_timeout_s) + 1.0
        await chaos.lasts(long_s / chaos.scale, (long_s + 1.0) / chaos.scale, random)


async def stale_leader(chaos: Chaos, random: Random) -> None:
    """A leader that lags behind the store, and a new owner that dies before it is one (C4)."""
    async with _aimed(chaos, random) as aim:
        if aim is None:
            return
        load, cluster = chaos.load, chaos.cluster
        load.keep_busy(aim.rooms[1], 0.4)
        await asyncio.sleep(0.05)
        await load.wish(aim.shard, aim.to)
        moving = await until(_moving(chaos, aim), 0.5)
        lags = cluster.nodes[aim.leader].up
        if lags:
            cluster.lag(aim.leader, LATE_S)
        if cluster.nodes[aim.to].up:
            cluster.kill(aim.to)
            if moving and lags:
                chaos.struck("stale leader")
        await asyncio.sleep(1.0)
        chaos.start_again(aim.to)


async def cut_leader(chaos: Chaos, random: Random) -> None:
    """A leader that loses the store between the two commits of a move (S1, I3)."""
    async with _aimed(chaos, random) as aim:
        if aim is None:
            return
        load = chaos.load
        load.keep_busy(aim.rooms[1], 0.3)
        await asyncio.sleep(0.05)
        await load.wish(aim.shard, aim.to)
        moving = await until(_moving(chaos, aim), 0.5)
        if chaos.cluster.nodes[aim.leader].up:
            chaos.cluster.cut_store(aim.leader)
            if moving:
                chaos.struck("cut leader")
        await asyncio.sleep(random.uniform(0.5, 1.2))


async def contest(chaos: Chaos, random: Random) -> None:
    """The leader dies, and a candidate that lags still sees none when there is one (C1)."""
    async with _aimed(chaos, random) as aim:
        if aim is None:
            return
        cluster = chaos.cluster
        late = random.choice([aim.owner, aim.to])
        if not (cluster.nodes[late].up and cluster.nodes[aim.leader].up):
            return
        cluster.lag(late, LATE_S)
        cluster.kill(aim.leader)
        chaos.struck("contest")
        # Until its turn has come by what it knows, and some moves later.
        await asyncio.sleep(4 * LATE_S)
        chaos.start_again(aim.leader)


async def slow_store(chaos: Chaos, random: Random) -> None:
    """Renewals that are answered late, and none after them (L1)."""
    async with chaos.disk, _aimed(chaos, random) as aim:
        if aim is None:
            return
        cluster, settings = chaos.cluster, chaos.cluster.settings
        async with chaos.writing:
            cluster.stall_store()
            try:
                await asyncio.sleep(0.85 * settings.op_timeout_s)
            finally:
                cluster.unstall_store()
        await asyncio.sleep(0.05)
        if cluster.nodes[aim.owner].up:
            cluster.cut_store(aim.owner)
            chaos.struck("slow store")
        rooms = chaos.load.rooms_at(aim.owner) or aim.rooms
        await chaos.load.pour(rooms, settings.ttl_s + 0.3)


def _repeated(fault: Fault, times: int) -> Fault:
    """What is short, and needs several to be right at once, is tried more than once."""

    async def strike(chaos: Chaos, random: Random) -> None:
        for _ in range(times):
            if not chaos.calm.is_set():
                await fault(chaos, random)

    return strike


AIMED: dict[str, Fault] = {
    "slow move": slow_move,
    "asleep": _repeated(asleep, 2),
    "unheard": _repeated(unheard, 2),
    "severed": severed,
    "crossed": _repeated(crossed, 2),
    "hostage": hostage,
    "deaf leader": deaf_leader,
    "stale leader": stale_leader,
    "cut leader": cut_leader,
    "contest": _repeated(contest, 2),
    "slow store": slow_store,
}

FAULTS: dict[str, Fault] = {**RANDOM, **AIMED}
"""Every kind, in the order of `KINDS`."""
