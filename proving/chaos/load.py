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
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from random import Random

from domicile.core.ids import ShardKey
from domicile.entity.model.entity import Entity
from domicile.entity.model.handlers import handler
from domicile.entity.model.ref import Ref
from domicile.errors import (
    DomicileError,
    HandlerFailed,
    MaybeExecuted,
    NotExecuted,
    Rejection,
    StoreError,
)
from domicile.membership.clock import SystemClock
from domicile.testing.processes.cluster import Processes
from domicile.testing.processes.node_process import HarnessError
from proving.chaos.tally import Tally
from proving.workload import ENTITIES, Ledger, Room, rooms_by_shard


class Stander(Entity, name="stander"):
    """Stops its own process, where no signal from outside would: in the middle of a turn."""

    @handler
    async def stand_still(self, pid: int, until: float) -> None:
        """Until somebody continues it; not at all where nobody would: in another process, to which
        this entity moved meanwhile, or if this comes late."""
        if sys.platform != "win32" and os.getpid() == pid and SystemClock().now() < until:
            os.kill(pid, signal.SIGSTOP)


MIXED: tuple[type[Entity], ...] = (*ENTITIES, Stander)
PATIENCE_S = 10.0
"""How long a call may take: no less than what liveness is judged by (L)."""

HOT = 8
"""Shards that the load is for; they move all the time."""

ROOMS = 4
LEDGERS = 12
MOVE_S = (0.1, 0.6)
CROWD = 24
CROWDED = 2
"""How many messages a shard gets while it moves, and for how many of its rooms."""

TANGLES = 8
"""One in so many of them comes with asks that wait for each other."""

LINE = 12
TANGLED = 24
"""Calls without an answer from which on a room gets no more of them, or no more tangles, but for
those of a fault. What takes long then does so by the cluster, not by a machine that is too slow for
this load. With fewer tangles a lack of waves (N5) hardly shows."""

KEYS = 50
POUR_S = 0.006
STAND_S = 0.4
"""How late a node may still be told to stand still."""

LOOKED = 200


_Call = Callable[[], Awaitable[object]]


class Load:
    """Calls to one cluster, and wishes for moves beside them, until told to end."""

    def __init__(self, cluster: Processes, tally: Tally, random: Random, rate: float) -> None:
        self._cluster, self._tally, self._random = cluster, tally, random
        self._gap_s = 1.0 / rate
        shards = cluster.settings.shards
        self.hot = rooms_by_shard(random, shards, min(HOT, shards), ROOMS)
        # One of each shard, then another one of each: calls upwards come back to where they began.
        self._rooms = [ids[row] for row in range(ROOMS) for ids in self.hot.values()]
        self.reserved: dict[ShardKey, None] = {}
        """Hot shards that a fault moves; they get no wishes from here."""
        self._left: dict[ShardKey, ShardKey] = {}
        """Hot shards that get no wishes until another, or they themselves, have moved."""
        self._over = asyncio.Event()
        self._calls: dict[asyncio.Task[None], None] = {}
        self._lines: Counter[str] = Counter()

    def end(self) -> None:
        """No new calls."""
        self._over.set()

    def burst(self, count: int, rooms: Sequence[str] = ()) -> None:
        """Many calls at once: whoever stops now has work to do when it goes on."""
        for _ in range(count):
            self._begin(self._random, self._random.choice(rooms) if rooms else "", in_line=False)

    async def stand_still(self, node: int, count: int) -> None:
        """Stop a node in the middle of a turn, with so many messages right behind."""
        cluster, ids = self._cluster, (f"s{number}" for number in range(LOOKED))
        id = next((id for id in ids if self._home(Stander, id) == node), None)
        rooms = self.rooms_at(node)
        process = cluster.nodes[node].process
        if id is None or process is None:
            return
        stander, until = cluster.ref(Stander, id), cluster.now() + STAND_S
        # All of it begins in one turn, so that one frame brings it: what follows in the turn that
        # stands still must not go on when the deadline has passed (L3).
        order = asyncio.ensure_future(stander.tell(Stander.stand_still, process.pid, until))
        self.burst(count, rooms)
        with suppress(DomicileError):
            await order

    def rooms_at(self, node: int) -> list[str]:
        """The rooms whose home a node is."""
        return [room for room in self._rooms if self.home(room) == node]

    async def pour(self, rooms: Sequence[str], seconds: float, *, slow: bool = False) -> None:
        """Mail for some rooms without a pause, so that something is always on its way."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while loop.time() < until and not self._over.is_set():
            self._begin(self._random, self._random.choice(rooms), slow=slow, in_line=False)
            await self._while(POUR_S)

    def keep_busy(self, room: str, seconds: float) -> None:
        """Have a handler run for so long, so that its shard can't let go at once."""
        call = self._room(room).ask
        self._keep([room], "ask", lambda: call(Room.think, seconds))

    def home(self, room: str) -> int | None:
        """The node that is home to a room; None between two homes."""
        return self._home(Room, room)

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
            free = [shard for shard in self.hot if self._free(shard)]
            if not free:
                await self._while(MOVE_S[0])
                continue
            shard = random.choice(free)
            home = self.home(self.hot[shard][0])
            tangled = self._tangle(shard, random)
            await self._while(random.random() * 0.06)
            crowd = asyncio.ensure_future(self._crowd(shard, random))
            await self.wish(shard, random.randrange(len(cluster.nodes)))
            if random.random() < 0.6:
                await self._while(random.random() ** 2 * 0.2)
                # To where it is just leaving, or to wherever.
                await self.wish(shard, home if random.random() < 0.5 else None)
            else:
                self._left.update(dict.fromkeys(tangled, shard))
            await crowd
            await self._while(random.uniform(*MOVE_S))

    def _free(self, shard: ShardKey) -> bool:
        """Whether it gets a wish. A move that is not taken back has to end by itself, and those in
        its tangle stay where they are: wishes for them would undo it, whatever it waits for."""
        until = self._left.get(shard)
        if until is not None and self._cluster.entry(until).state != "moving":
            del self._left[shard]
        return shard not in self.reserved and shard not in self._left

    async def _crowd(self, shard: ShardKey, random: Random) -> None:
        """Mail for one shard, some of it slow, while its move begins and may be taken back."""
        rooms = self.hot[shard][:CROWDED]
        for number in range(CROWD):
            self._begin(random, random.choice(rooms), slow=number % 6 == 0)
            if number % TANGLES == 0:
                self._tangle(shard, random)
            await self._while(random.random() * 0.01)

    def _tangle(self, shard: ShardKey, random: Random) -> tuple[ShardKey, ...]:
        """One handler of a shard waits for a room elsewhere, behind one that asks into that shard
        by a third: no chain says so (N5), and a drain that waits for the first waits for all. The
        shards that take part."""
        first, *_, last = self.hot[shard]
        away, far = random.sample([other for other in self.hot if other != shard], 2)
        middle, third = self.hot[away][1], self.hot[far][2]
        if not self._full([first, middle, third, last], TANGLED):
            for room, path in [(middle, [third, last]), (first, [middle]), (first, [last])]:
                self._relay(room, path, random.uniform(0.01, 0.12))
        return shard, away, far

    async def wish(self, shard: ShardKey, node: int | None) -> None:
        """Wish a shard's home, or take that back; in vain while the store takes nothing."""
        with suppress(StoreError, DomicileError):
            await self._cluster.wish(shard, node)

    async def _while(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)

    def _begin(
        self, random: Random, room: str = "", *, slow: bool = False, in_line: bool = True
    ) -> None:
        """One call; none if it is to stand in line, and that is full."""
        if room:
            rooms, kind, call = self._mail(random, room, slow=slow)
        else:
            rooms, kind, call = self._call(random)
        if not in_line or not self._full(rooms, LINE):
            self._keep(rooms, kind, call)

    def _full(self, rooms: Sequence[str], most: int) -> bool:
        full = any(self._lines[room] >= most for room in rooms)
        self._tally.held_back += full
        return full

    def _keep(self, rooms: Sequence[str], kind: str, call: _Call) -> None:
        """Make a call to the first of these rooms, which keeps all of them busy; not in the end."""
        if self._over.is_set():
            return

        def over(task: asyncio.Task[None]) -> None:
            del self._calls[task]
            self._lines.subtract(rooms)

        task = asyncio.get_running_loop().create_task(self._counted(kind, call), name="chaos-call")
        self._calls[task] = None
        self._lines.update(rooms)
        task.add_done_callback(over)

    def _room(self, id: str) -> Ref[Room]:
        return self._cluster.ref(Room, id).options(timeout_s=PATIENCE_S)

    def _relay(self, room: str, path: list[str], seconds: float) -> None:
        call = self._room(room).ask
        self._keep([room, *path], "nested", lambda: call(Room.relay, seconds, path))

    def _mail(self, random: Random, id: str, *, slow: bool) -> tuple[list[str], str, _Call]:
        room, seconds = self._room(id), random.random() * 0.08
        if slow:
            return [id], "ask", lambda: room.ask(Room.think, seconds)
        if random.random() < 0.5:
            return [id], "tell", lambda: room.tell(Room.note, 3)
        return [id], "ask", lambda: room.ask(Room.note, 4)

    def _call(self, random: Random) -> tuple[list[str], str, _Call]:
        id = random.choice(self._rooms)
        room, chosen, long = self._room(id), random.random(), random.random()
        if chosen < 0.25:
            return [id], "ask", lambda: room.ask(Room.note, 1)
        if chosen < 0.35:
            return [id], "ask", lambda: room.ask(Room.think, long**4 * 0.3)
        if chosen < 0.4:
            return [id], "ask", lambda: room.ask(Room.peek, long * 0.02)
        if chosen < 0.65:
            return [id], "tell", lambda: room.tell(Room.note, 2)
        if chosen < 0.85:
            # Upwards only: rooms that wait for each other in a circle would be a bug of theirs.
            chosen_rooms = random.sample(range(len(self._rooms)), random.randint(2, 4))
            first, *path = (self._rooms[number] for number in sorted(chosen_rooms))
            there = self._room(first)
            return [first, *path], "nested", lambda: there.ask(Room.relay, long * 0.01, path)
        ledger = self._cluster.ref(Ledger, f"l{random.randrange(LEDGERS)}")
        ledger = ledger.options(timeout_s=PATIENCE_S)
        if random.random() < 0.3:
            return [], "event-sourced", lambda: ledger.ask(Ledger.total)
        keyed = ledger.options(key=f"k{random.randrange(KEYS)}")
        ledger = keyed if random.random() < 0.5 else ledger
        what = random.randrange(-1, 1_000)
        return [], "event-sourced", lambda: ledger.ask(Ledger.note, what)

    async def _counted(self, kind: str, call: _Call) -> None:
        outcomes = self._tally.outcomes
        try:
            self._tally.calls[kind] += 1
            await call()
            outcomes["ok"] += 1
        except Rejection:
            outcomes["rejected"] += 1
        except HandlerFailed:
            outcomes["failed"] += 1
        except MaybeExecuted:
            outcomes["maybe executed"] += 1
        except NotExecuted:
            outcomes["not executed"] += 1
