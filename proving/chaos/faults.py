"""The faults of a chaos run that strike anywhere: each strikes, waits, and mends what it broke.

Those that wait for a certain step are in `proving.chaos.targeted`. Run by
`proving.chaos.round`, several at once. They use the verbs of `Processes` only. What they
strike is drawn from the seed; when exactly it hits is up to the machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import combinations
from random import Random

from domicile.testing.processes.cluster import Processes
from domicile.testing.processes.fault_proxy import CLIENT
from domicile.testing.processes.member_signals import standing_still
from domicile.testing.processes.node_process import HarnessError, NodeProcess
from proving.chaos.load import STAND_S, Load
from proving.chaos.tally import Tally

LEAST_UP = 2
"""So many nodes besides a victim stay untouched."""

LOOK_S = 0.05
JOIN_S = 2.0
BURST = 80
TRIES = 4
AGAIN_S = (0.5, 1.5)
STEPS_S = (-3_600.0, -30.0, 30.0, 3_600.0, 86_400.0)


class Chaos:
    """What the faults of one round share."""

    def __init__(self, cluster: Processes, tally: Tally, load: Load, *, scale: float) -> None:
        self.cluster, self.tally, self.load = cluster, tally, load
        self.scale = scale
        """How long faults last, compared to a round of full length."""
        self.calm = asyncio.Event()
        """Set when everything is to be mended."""
        self.network = asyncio.Lock()
        self.disk = asyncio.Lock()
        self.rolling = asyncio.Lock()
        self.writing = asyncio.Lock()
        """Held by whoever holds the store's write lock: nobody can be frozen then (S9)."""
        self.touched: dict[int, None] = {}
        """Nodes that a fault is at work on; nobody else may."""
        self.aimed: dict[int, None] = {}
        """Nodes that take part in what a fault is aimed at; nobody else may touch them either."""
        self._started: dict[int, float] = {}

    async def lasts(self, low_s: float, high_s: float, random: Random) -> None:
        """A while, or until the calm."""
        with suppress(TimeoutError):
            seconds = random.uniform(low_s, high_s) * self.scale
            await asyncio.wait_for(self.calm.wait(), seconds)

    def ready(self, node: NodeProcess) -> bool:
        """Whether a node runs, has joined, and no fault is at work on it.

        One that has only just joined may not be ready for a signal that asks it to leave.
        """
        started = self._started.get(node.index, float("-inf"))
        joined = self.joined(node) and self.cluster.now() > started + JOIN_S
        return joined and not self.taken(node.index)

    def taken(self, node: int) -> bool:
        """Whether a node is some fault's business."""
        return node in self.touched or node in self.aimed

    def joined(self, node: NodeProcess) -> bool:
        """Whether the process in a place runs and the store knows it."""
        inc = node.incarnation
        return node.up and inc is not None and self.cluster.incarnation(node.index) == inc

    def free(self) -> list[NodeProcess]:
        """The nodes that are ready."""
        return [node for node in self.cluster.nodes if self.ready(node)]

    async def until_ready(self, node: int) -> bool:
        """Whether a node got ready before the calm."""
        process = self.cluster.nodes[node]
        # A look at other processes: nobody could set an event there.
        while not self.ready(process) and not self.calm.is_set():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        return not self.calm.is_set()

    async def victim(self, random: Random) -> int | None:
        """A node to strike; None if the calm begins before one can be spared."""
        while not self.calm.is_set():
            free = self.free()
            # Those that a fault is aimed at are there, but for one of them at times.
            if free and len(free) + len(self.aimed) > LEAST_UP:
                leader = self.cluster.leader()
                chosen: int | None = random.choice(free).index
                if leader in [node.index for node in free] and random.random() < 0.3:
                    chosen = leader
                assert chosen is not None
                self.touched[chosen] = None
                return chosen
            await asyncio.sleep(LOOK_S)
        return None

    async def freeze(self, node: int) -> bool:
        """Stop a process; False if it has ended by itself."""
        async with self.writing:
            if not self.cluster.nodes[node].up:
                return False
            self.cluster.freeze(node)
            return True

    def thaw(self, node: int) -> None:
        """Let it go on, if it is there."""
        if self.cluster.nodes[node].up:
            self.cluster.thaw(node)

    def struck(self, kind: str) -> None:
        """A fault has struck: said after its effect, for a kind that only tried counts nothing."""
        self.tally.faults[kind] += 1

    def start_again(self, node: int) -> None:
        """A new process in a place that has none."""
        if not self.cluster.nodes[node].up:
            self.tally.restarts += 1
            self._started[node] = self.cluster.now()
            self.cluster.start(node)


Fault = Callable[[Chaos, Random], Awaitable[None]]


def insistent(kind: str, fault: Fault) -> Fault:
    """A fault that is tried again, a few times, if there was nothing to strike."""

    async def strike(chaos: Chaos, random: Random) -> None:
        before = chaos.tally.faults[kind]
        for _ in range(TRIES):
            await fault(chaos, random)
            if chaos.tally.faults[kind] > before or chaos.calm.is_set():
                return
            await chaos.lasts(*AGAIN_S, random)

    return strike


async def kill(chaos: Chaos, random: Random) -> None:
    """SIGKILL, sometimes two at once; started again soon."""
    victims = [await chaos.victim(random)]
    if random.random() < 0.2 and len(chaos.free()) > LEAST_UP:
        victims.append(await chaos.victim(random))
    found = [node for node in victims if node is not None]
    for node in found:
        chaos.cluster.kill(node)
        chaos.struck("kill")
    await chaos.lasts(0.0, 4.0, random)
    for node in found:
        chaos.start_again(node)
        chaos.touched.pop(node, None)


async def _freeze(chaos: Chaos, random: Random, kind: str, low_s: float, high_s: float) -> None:
    node = await chaos.victim(random)
    if node is None:
        return
    # With handlers suspended and sockets full, so that the guards have something to refuse (L3).
    chaos.load.burst(BURST)
    chaos.load.burst(BURST, chaos.load.rooms_at(node))
    await chaos.lasts(0.0, 0.1, random)
    process = chaos.cluster.nodes[node].process
    if random.random() < 0.6 and process is not None:
        await chaos.load.stand_still(node, BURST)
        await until(lambda: standing_still(process.pid), STAND_S + 0.1)
    try:
        if await chaos.freeze(node):
            chaos.struck(kind)
            chaos.load.burst(BURST)
            chaos.load.burst(BURST, chaos.load.rooms_at(node))
            await chaos.lasts(low_s, high_s, random)
    finally:
        chaos.thaw(node)
        chaos.touched.pop(node, None)


async def until(condition: Callable[[], bool], limit_s: float, tick_s: float = LOOK_S / 10) -> bool:
    """Until it holds, or for so long; whether it does."""
    deadline = asyncio.get_running_loop().time() + limit_s
    # A look at another process: nobody could set an event there.
    while not (holds := condition()) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(tick_s)
    return holds


async def freeze(chaos: Chaos, random: Random) -> None:
    """SIGSTOP and SIGCONT: within the lease, or past its deadline but before it runs out, so that
    nobody else knows and the sockets stay full."""
    settings = chaos.cluster.settings
    if random.random() < 0.5:
        await _freeze(chaos, random, "freeze", 0.1, settings.ttl_s)
        return
    late_s = (settings.ttl_s - settings.margin_s) / chaos.scale
    await _freeze(chaos, random, "freeze", late_s, late_s + settings.margin_s / chaos.scale)


async def long_freeze(chaos: Chaos, random: Random) -> None:
    """The same, past the lease, however short the round is."""
    past_s = chaos.cluster.settings.ttl_s / chaos.scale
    await _freeze(chaos, random, "long freeze", past_s, past_s + 3.0)


async def _disturb(chaos: Chaos, random: Random, kind: str, strike: Callable[[], object]) -> None:
    """A fault of the network. They take turns, so that one `heal` ends one of them.

    It struck unless it says False.
    """
    async with chaos.network:
        if chaos.calm.is_set() or strike() is False:
            return
        chaos.struck(kind)
        if kind in ("partition", "one way") and random.random() < 0.3:
            chaos.cluster.delay(random.choice(_indices(chaos)), 0.05, jitter_s=0.05)
            chaos.struck("delay")
        try:
            await chaos.lasts(0.3, 4.0, random)
        finally:
            chaos.cluster.heal()


def _indices(chaos: Chaos) -> list[int]:
    return [node.index for node in chaos.cluster.nodes]


async def partition(chaos: Chaos, random: Random) -> None:
    """Two sides, of any sizes; the client is on either."""
    ends = [CLIENT, *_indices(chaos)]
    random.shuffle(ends)
    size = random.randint(1, len(ends) - 1)
    await _disturb(
        chaos, random, "partition", lambda: chaos.cluster.partition(ends[:size], ends[size:])
    )


async def one_way(chaos: Chaos, random: Random) -> None:
    """Some can't reach others, who reach them."""
    ends = [CLIENT, *_indices(chaos)]
    random.shuffle(ends)
    deaf = random.randint(1, 2)
    others = ends[deaf:] if random.random() < 0.5 else ends[deaf : deaf + 2]
    sides = [ends[:deaf], others]
    random.shuffle(sides)
    await _disturb(chaos, random, "one way", lambda: chaos.cluster.partition(*sides, one_way=True))


async def cut(chaos: Chaos, random: Random) -> None:
    """Connections break, of several pairs one after the other; links go on."""
    pairs = list(combinations([CLIENT, *_indices(chaos)], 2))
    for _ in range(random.randint(1, 8)):
        # Not every pair has a connection, and some may have lost theirs to another fault.
        if any(chaos.cluster.cut(*pair) for pair in random.sample(pairs, len(pairs))):
            chaos.struck("cut")
        await chaos.lasts(0.0, 0.3, random)


async def delay(chaos: Chaos, random: Random) -> None:
    """A node with a slow network, or two that are far from each other."""
    one, other = random.sample(_indices(chaos), 2)
    slow_s = random.choice((0.005, 0.05, 0.3))
    to = other if random.random() < 0.5 else None
    await _disturb(
        chaos, random, "delay", lambda: chaos.cluster.delay(one, slow_s, jitter_s=slow_s, to=to)
    )


async def loss(chaos: Chaos, random: Random) -> None:
    """A node with a bad network, or two with a bad one between them."""
    one, other = random.sample(_indices(chaos), 2)
    share = random.choice((0.01, 0.05, 0.3))
    to = other if random.random() < 0.5 else None
    await _disturb(chaos, random, "loss", lambda: chaos.cluster.loss(one, share, to=to))


async def clock_step(chaos: Chaos, random: Random) -> None:
    """The wall clock jumps."""
    chaos.cluster.clock_step(random.choice(STEPS_S))
    chaos.struck("clock step")


async def full_disk(chaos: Chaos, random: Random) -> None:
    """The store can't write, for long enough to cost all leases or not."""
    ttl_s = chaos.cluster.settings.ttl_s
    low_s = 0.2 if random.random() < 0.6 else ttl_s / chaos.scale
    async with chaos.disk:
        if chaos.calm.is_set():
            return
        chaos.cluster.fill_disk()
        chaos.struck("full disk")
        try:
            await chaos.lasts(low_s, max(1.5 * ttl_s, low_s + 1.0), random)
        finally:
            chaos.cluster.free_disk()


async def store_cut(chaos: Chaos, random: Random) -> None:
    """A node does not reach the store, but all the others."""
    node = await chaos.victim(random)
    if node is None:
        return

    def strike() -> bool:
        up = chaos.cluster.nodes[node].up
        if up:
            chaos.cluster.cut_store(node)
        return up

    try:
        await _disturb(chaos, random, "store cut", strike)
    finally:
        chaos.touched.pop(node, None)


async def restart(chaos: Chaos, random: Random) -> None:
    """A node leaves in an orderly way and comes back."""
    node = await chaos.victim(random)
    if node is not None and await _replace(chaos, node):
        chaos.struck("restart")


async def roll(chaos: Chaos, random: Random) -> None:
    """A rolling update, one node after the other, among all the rest.

    It struck once two versions are there; in a short round the calm may come before the last one.
    """
    async with chaos.rolling:
        if chaos.calm.is_set():
            return
        known = [int(node.version or "1") for node in chaos.cluster.nodes]
        version = str(max(known) + 1)
        order = _indices(chaos)
        random.shuffle(order)
        begun = False
        for node in order:
            if not await chaos.until_ready(node):
                return
            chaos.touched[node] = None
            chaos.cluster.nodes[node].version = version
            if await _replace(chaos, node) and not begun:
                begun = True
                chaos.struck("roll")


async def _replace(chaos: Chaos, node: int) -> bool:
    """Whatever happens to the one that leaves, another one comes; whether there was one."""
    up = chaos.cluster.nodes[node].up
    try:
        if up:
            await chaos.cluster.stop(node)
    except HarnessError as error:
        raise HarnessError(f"an orderly stop failed: {error}") from error
    finally:
        chaos.touched.pop(node, None)
    chaos.start_again(node)
    return up


_RANDOM: dict[str, Fault] = {
    "kill": kill,
    "freeze": freeze,
    "long freeze": long_freeze,
    "partition": partition,
    "one way": one_way,
    "cut": cut,
    "delay": delay,
    "loss": loss,
    "clock step": clock_step,
    "full disk": full_disk,
    "store cut": store_cut,
    "restart": restart,
    "roll": roll,
}
RANDOM = {kind: insistent(kind, fault) for kind, fault in _RANDOM.items()}
"""Those that strike anywhere, in the order of `KINDS`; even a short run has to see each of them."""
