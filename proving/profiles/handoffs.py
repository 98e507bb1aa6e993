"""Faults of hand-offs: nodes that learn of a move late, out of step, or not at all.

Each one sends a shard on its way with mail of one sender, and slows down just those ways and
watches that let two of the nodes know different things for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from domicile.core.handoff.tables import Phase
from domicile.core.ids import ShardKey
from domicile.errors import DomicileError
from domicile.testing.sim.calls import Faults
from domicile.testing.sim.node import SimNode
from proving.fault_plan import Mischief
from proving.profiles.links import cut
from proving.seed_result import NODES
from proving.workload import Room

if TYPE_CHECKING:
    from domicile.entity.model.client import Client

LOOK_S = 0.003
"""How often a script looks whether a step of a hand-off is reached."""


@dataclass(frozen=True)
class Scene:
    """A hand-off to be disturbed: its shard, a room, its owner, a sender, and where it is to go."""

    m: Mischief
    shard: ShardKey
    room: str
    owner: SimNode
    sender: SimNode
    elsewhere: int

    def tell(self, count: int, pause: float = 0.0) -> None:
        """The sender keeps the room busy for a pause, if any, and tells it more behind that."""
        row = partial(self.m.load.row, id=self.room, pause=pause, count=count)
        self.m.load.inside(self.sender.index, row)

    async def wish(self, node: int | None) -> None:
        """Wish the shard to a node, or take that back."""
        await self.m.sim.wish(self.shard, node)

    async def until(self, condition: Callable[[], bool], limit_s: float = 2.0) -> bool:
        """Whether a condition came to hold in time; closer looks than those of the plan."""
        deadline = self.m.sim.world.now + limit_s
        while not condition() and self.m.faulty and self.m.sim.world.now < deadline:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        return condition()

    def phase(self) -> Phase | None:
        """The shard's phase at its owner, looked up without touching anything."""
        life = None if self.owner.node is None else self.owner.node.life
        host = None if life is None else life.runtime.hosts.get(self.shard)
        return None if host is None else host.owner.phase

    def is_at(self, node: SimNode) -> bool:
        """Whether the stored entry names a node as the shard's home."""
        entry = self.m.sim.entry(self.shard)
        return entry.state == "serving" and bool(entry.owner) and entry.owner == node.incarnation

    @contextmanager
    def slow(self, *ways: tuple[SimNode, SimNode], by_s: float) -> Generator[None, None, None]:
        """Directions between nodes that are slow for a while."""
        network, names = self.m.sim.network, [(one.name, other.name) for one, other in ways]
        for (one, _), way in zip(ways, names, strict=True):
            self.m.sim.note_fault("slow", one)
            network.slow_way(*way, by_s)
        try:
            yield
        finally:
            for (one, _), way in zip(ways, names, strict=True):
                self.m.sim.note_fault("fast", one)
                network.slow_way(*way, 0.0)

    @contextmanager
    def lagging(
        self, node: SimNode, by_s: float, call_s: float = 0.0
    ) -> Generator[None, None, None]:
        """A node whose watch of the store lags, and whose calls to it take longer; not twice."""
        faults = node.store
        if faults is None or faults in self.m.lagging:
            yield
            return
        self.m.lagging[faults] = None
        usual = faults.watch_delay_s, faults.delay_s
        faults.watch_delay_s = (by_s, by_s)
        if call_s:
            faults.delay_s = (call_s / 2, call_s)
        try:
            yield
        finally:
            faults.watch_delay_s, faults.delay_s = usual
            del self.m.lagging[faults]


Script = Callable[[Scene, Random], Coroutine[Any, Any, None]]
"""What is done to a hand-off, step by step."""


def _scene(m: Mischief, random: Random) -> Scene | None:
    """A hot shard whose owner runs and does not lead, and a sender that is neither."""
    leader = m.leader()
    if leader is None or not m.faulty:
        return None
    shards = list(m.hot)
    random.shuffle(shards)
    up = [node for node in m.up() if node.index < NODES]
    for shard in shards:
        entry = m.sim.entry(shard)
        owner = next((n for n in up if n.incarnation == entry.owner and n is not leader), None)
        senders = [node for node in up if node is not owner]
        if owner is None or entry.state != "serving" or not senders:
            continue
        room, sender = random.choice(m.hot[shard]), random.choice(senders)
        elsewhere = random.choice([node.index for node in up if node is not owner] or [0])
        return Scene(m, shard, room, owner, sender, elsewhere)
    return None


def _play(m: Mischief, random: Random, kind: str, script: Script) -> None:
    scene = _scene(m, random)
    if scene is None:
        cut(m, random)
        return
    what = f"shard {scene.shard.shard} of node {scene.owner.index}, mail of {scene.sender.index}"
    m.note(kind, what)
    m.load.inside(-1, lambda _: script(scene, random))


def lone_return(m: Mischief, random: Random) -> None:
    """A cut returns one message alone, and more arrives once the move is taken back (H7, H9)."""
    _play(m, random, "lone return", _return_one)


async def _return_one(scene: Scene, random: Random) -> None:
    by_s = random.uniform(0.1, 0.4)
    with scene.slow((scene.owner, scene.sender), by_s=by_s), scene.lagging(scene.sender, by_s):
        scene.tell(1, pause=random.uniform(0.08, 0.2))
        await asyncio.sleep(random.uniform(0.01, 0.04))
        await scene.wish(scene.elsewhere)
        await scene.until(lambda: scene.phase() is Phase.DRAINING, 0.2)
        await scene.wish(None)
        await scene.until(lambda: scene.phase() is Phase.OPEN, 0.2)
        for _ in range(3):
            scene.tell(random.randint(1, 2))
            await asyncio.sleep(random.uniform(0.001, 0.02))
        await asyncio.sleep(by_s)


def parked(m: Mischief, random: Random) -> None:
    """Mail is stamped by entries that its owner does not know, and flushed before it does (H8)."""
    _play(m, random, "parked", _park)


async def _park(scene: Scene, random: Random) -> None:
    leader = scene.m.leader() or scene.owner
    by_s = random.uniform(0.4, 0.9)
    ways = [(leader, scene.owner)]
    if random.random() < 0.5:
        ways.append((scene.owner, scene.sender))
    with scene.slow(*ways, by_s=by_s), scene.lagging(scene.owner, by_s, random.uniform(0.3, 0.6)):
        scene.tell(random.randint(1, 3))
        await asyncio.sleep(random.uniform(0.01, 0.05))
        await scene.wish(scene.elsewhere)
        await asyncio.sleep(random.uniform(0.03, 0.1))
        await scene.wish(None)
        for _ in range(2):
            await asyncio.sleep(random.uniform(0.02, 0.08))
            scene.tell(random.randint(1, 3))
        await asyncio.sleep(random.uniform(0.01, 0.1))
        await scene.wish(scene.elsewhere)
        for _ in range(4):
            await asyncio.sleep(random.uniform(0.05, 0.3))
            scene.tell(random.randint(1, 2))
        await scene.until(lambda: not scene.is_at(scene.owner), 2.0)
        scene.tell(2)
    await scene.wish(None)


def missed(m: Mischief, random: Random) -> None:
    """A sender hears nothing of a move that is taken back, until its mail is returned (H3)."""
    _play(m, random, "missed move", _miss)


async def _miss(scene: Scene, random: Random) -> None:
    m, faults = scene.m, scene.sender.store
    with scene.slow((scene.owner, scene.sender), by_s=random.uniform(0.3, 0.6)):
        scene.tell(random.randint(1, 4), pause=random.uniform(0.08, 0.2))
        await asyncio.sleep(random.uniform(0.01, 0.03))
        if not isinstance(faults, Faults) or not scene.sender.up:
            return
        m.sim.note_fault("outage", scene.sender)
        faults.cut = True
        await scene.wish(scene.elsewhere)
        await scene.until(lambda: scene.phase() is Phase.DRAINING, 0.2)
        await scene.wish(None)
        await scene.until(lambda: scene.phase() is Phase.OPEN, 0.2)
        # What it missed can't be made up for one by one: it has to list again.
        m.sim.compact()
        faults.cut = False
        faults.break_watch()
        m.sim.note_fault("back", scene.sender)
        for _ in range(4):
            await asyncio.sleep(random.uniform(0.05, 0.2))
            scene.tell(random.randint(1, 2))


def late_release(m: Mischief, random: Random) -> None:
    """Releases reach the leader when their shard has come back to the node that sent them (H10)."""
    _play(m, random, "late release", _release_late)


async def _release_late(scene: Scene, random: Random) -> None:
    leader = scene.m.leader()
    if leader is None:
        return
    with scene.slow((scene.owner, leader), by_s=random.uniform(1.2, 2.4)):
        scene.tell(random.randint(0, 3))
        await scene.wish(scene.elsewhere)
        if await scene.until(lambda: not scene.is_at(scene.owner), 1.0):
            await scene.until(partial(scene.is_at, scene.m.sim.nodes[scene.elsewhere]), 5.0)
            await scene.wish(scene.owner.index)
            await scene.until(lambda: scene.is_at(scene.owner), 2.0)
            scene.tell(random.randint(1, 4))
            await asyncio.sleep(random.uniform(1.0, 2.0))
    await scene.wish(None)


def overdue(m: Mischief, random: Random) -> None:
    """A handler outlasts the drain deadline, so its owner asks to keep the shard (H10, H11)."""
    _play(m, random, "overdue drain", _outlast)


async def _outlast(scene: Scene, random: Random) -> None:
    deadline_s = scene.m.sim.settings.drain_deadline_s
    scene.tell(random.randint(0, 2), pause=deadline_s + random.uniform(0.1, 1.5))
    await asyncio.sleep(random.uniform(0.01, 0.05))
    await scene.wish(scene.elsewhere)
    await scene.until(lambda: scene.phase() is Phase.DRAINING, 1.0)
    for _ in range(3):
        await asyncio.sleep(random.uniform(0.0, deadline_s / 3))
        scene.tell(random.randint(1, 2))
    if await scene.until(lambda: scene.phase() is Phase.OPEN, deadline_s + 2.0):
        for _ in range(3):
            scene.tell(random.randint(1, 2))
            await asyncio.sleep(random.uniform(0.0, 0.02))
        if random.random() < 0.4:
            # As soon as it is back, it is wished away again.
            await scene.wish(None)
            await asyncio.sleep(random.uniform(0.0, 0.3))
            await scene.wish(scene.elsewhere)
            scene.tell(1)
    await asyncio.sleep(random.uniform(0.5, 2.0))
    await scene.wish(None)


def clinging(m: Mischief, random: Random) -> None:
    """Handlers that hold on to their cancellation run everywhere when a backup is put back (L4)."""
    if not m.faulty:
        return
    m.note("clinging")
    for ids in m.hot.values():
        m.load.inside(-1, partial(_cling, ids[0], ids[1], random.uniform(1.0, 4.0)))

    def happen() -> None:
        m.note("rewind", f"by {m.sim.rewind(0.0):.2f} s")

    m.later(random.uniform(0.1, 0.8), m.go_on(happen))


async def _cling(id: str, friend: str, cleaning_s: float, client: Client) -> None:
    with suppress(DomicileError):
        await client.ref(Room, id).tell(Room.cling, 2.0, cleaning_s, friend)
