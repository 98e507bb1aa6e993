"""The mixed load of a chaos run: asks, tells, nested asks and event-sourced calls, at a set pace.

Entities are those of the simulator's campaign. Whether they were served right is read off the
history alone; a call that fails here is only counted by its kind. Journals of real processes are in
memory, each process has its own: what is stored is lost when a shard moves, and I2 and I4 are not
judged.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from random import Random

from domicile.control.clock import SystemClock
from domicile.core.ids import ShardKey
from domicile.entity.define import Entity, handler
from domicile.errors import (
    DomicileError,
    HandlerFailed,
    MaybeExecuted,
    NotExecuted,
    Rejection,
    StoreError,
)
from domicile.testing.chaos.tally import Tally
from domicile.testing.processes import HarnessError, Processes
from domicile.testing.workload import ENTITIES, Ledger, Room, rooms_by_shard


class Stander(Entity, name="stander"):
    """Stops its own process, where no signal from outside would: in the middle of a turn."""

    @handler
    async def stand_still(self, until: float) -> None:
        """Until somebody continues it; not at all if this comes late, when nobody would."""
        if sys.platform != "win32" and SystemClock().now() < until:
            os.kill(os.getpid(), signal.SIGSTOP)


MIXED: tuple[type[Entity], ...] = (*ENTITIES, Stander)
PATIENCE_S = 6.0
HOT = 8
"""Shards that the load is for; they move all the time."""

ROOMS = 4
LEDGERS = 12
MOVE_S = (0.1, 0.6)
CROWD = 24
CROWDED = 2
"""How many messages a shard gets while it moves, and for how many of its rooms."""

KEYS = 50
STAND_S = 0.4
"""How late a node may still be told to stand still."""

LOOKED = 200


class Load:
    """Calls to one cluster, and wishes for moves beside them, until told to end."""

    def __init__(self, cluster: Processes, tally: Tally, random: Random, rate: float) -> None:
        self._cluster, self._tally, self._random = cluster, tally, random
        self._gap_s = 1.0 / rate
        shards = cluster.settings.shards
        self.hot = rooms_by_shard(random, shards, min(HOT, shards), ROOMS)
        self._rooms = [id for ids in self.hot.values() for id in ids]
        self._over = asyncio.Event()
        self._calls: dict[asyncio.Task[None], None] = {}

    def end(self) -> None:
        """No new calls."""
        self._over.set()

    def burst(self, count: int, rooms: Sequence[str] = ()) -> None:
        """Many calls at once: whoever stops now has work to do when it goes on."""
        for _ in range(0 if self._over.is_set() else count):
            self._begin(self._random, self._random.choice(rooms) if rooms else "")

    async def stand_still(self, node: int, count: int) -> None:
        """Stop a node in the middle of a turn, with so many messages right behind."""
        cluster, ids = self._cluster, (f"s{number}" for number in range(LOOKED))
        id = next((id for id in ids if self._home(Stander, id) == node), None)
        rooms = [room for room in self._rooms if self._home(Room, room) == node]
        with suppress(DomicileError):
            if id is not None:
                await cluster.ref(Stander, id).tell(Stander.stand_still, cluster.now() + STAND_S)
                self.burst(count, rooms)

    def _home(self, kind: type[Entity], id: str) -> int | None:
        try:
            return self._cluster.owner(kind, id)
        except HarnessError:
            return None  # between two homes

    @property
    def waiting(self) -> int:
        """Calls that are not answered yet."""
        return len(self._calls)

    async def run(self) -> None:
        """Call, at the pace, whatever became of the earlier ones; then wait for all of them."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not self._over.is_set():
            self._begin(self._random)
            due = max(due + self._random.uniform(0.5, 1.5) * self._gap_s, loop.time() - 1.0)
            await self._while(due - loop.time())
        while self._calls:
            await asyncio.wait(list(self._calls))

    async def move(self) -> None:
        """Wish homes of hot shards, crowded ones, and take many wishes back under way."""
        cluster, random = self._cluster, self._random
        while not self._over.is_set():
            shard = random.choice(list(self.hot))
            crowd = asyncio.ensure_future(self._crowd(shard, random))
            await self._wish(shard, random.randrange(len(cluster.nodes)))
            if random.random() < 0.6:
                await self._while(random.random() ** 2 * 0.2)
                await self._wish(shard, None)
            await crowd
            await self._while(random.uniform(*MOVE_S))

    async def _crowd(self, shard: ShardKey, random: Random) -> None:
        """Mail for one shard, some of it slow, while its move begins and may be taken back."""
        rooms = self.hot[shard][:CROWDED]
        for number in range(CROWD):
            self._begin(random, random.choice(rooms), slow=number % 6 == 0)
            await self._while(random.random() * 0.01)

    async def _wish(self, shard: ShardKey, node: int | None) -> None:
        with suppress(StoreError, DomicileError):
            await self._cluster.wish(shard, node)

    async def _while(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)

    def _begin(self, random: Random, room: str = "", *, slow: bool = False) -> None:
        work = self._one(random, room, slow=slow)
        task = asyncio.get_running_loop().create_task(work, name="chaos-call")
        self._calls[task] = None
        task.add_done_callback(self._calls.pop)

    def _mail(self, random: Random, id: str, *, slow: bool) -> tuple[str, Awaitable[object]]:
        room = self._cluster.ref(Room, id).options(timeout_s=PATIENCE_S)
        if slow:
            return "ask", room.ask(Room.think, random.random() * 0.08)
        if random.random() < 0.5:
            return "tell", room.tell(Room.note, 3)
        return "ask", room.ask(Room.note, 4)

    def _call(self, random: Random) -> tuple[str, Awaitable[object]]:
        room = self._cluster.ref(Room, random.choice(self._rooms)).options(timeout_s=PATIENCE_S)
        chosen = random.random()
        if chosen < 0.25:
            return "ask", room.ask(Room.note, 1)
        if chosen < 0.35:
            return "ask", room.ask(Room.think, random.random() ** 4 * 0.3)
        if chosen < 0.4:
            return "ask", room.ask(Room.peek, random.random() * 0.02)
        if chosen < 0.65:
            return "tell", room.tell(Room.note, 2)
        if chosen < 0.85:
            # Upwards only: rooms that wait for each other in a circle would be a bug of theirs.
            chosen_rooms = random.sample(range(len(self._rooms)), random.randint(2, 4))
            first, *path = (self._rooms[number] for number in sorted(chosen_rooms))
            room = self._cluster.ref(Room, first).options(timeout_s=PATIENCE_S)
            return "nested", room.ask(Room.relay, random.random() * 0.01, path)
        ledger = self._cluster.ref(Ledger, f"l{random.randrange(LEDGERS)}")
        ledger = ledger.options(timeout_s=PATIENCE_S)
        if random.random() < 0.3:
            return "event-sourced", ledger.ask(Ledger.total)
        if random.random() < 0.5:
            ledger = ledger.options(key=f"k{random.randrange(KEYS)}")
        return "event-sourced", ledger.ask(Ledger.note, random.randrange(-1, 1_000))

    async def _one(self, random: Random, room: str, *, slow: bool) -> None:
        outcomes = self._tally.outcomes
        try:
            kind, call = self._mail(random, room, slow=slow) if room else self._call(random)
            self._tally.calls[kind] += 1
            await call
            outcomes["ok"] += 1
        except Rejection:
            outcomes["rejected"] += 1
        except HandlerFailed:
            outcomes["failed"] += 1
        except MaybeExecuted:
            outcomes["maybe executed"] += 1
        except NotExecuted:
            outcomes["not executed"] += 1
