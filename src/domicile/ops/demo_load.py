"""The entities of the demo's cluster, and the load on it.

Node processes import the entities, too, so nothing here may draw. Tallies check the order of their
messages themselves; the history's checkers judge it again, independently.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from domicile.client import ConnectedClient, connect
from domicile.entity.model.client import Client
from domicile.entity.model.entity import Entity
from domicile.entity.model.handlers import handler
from domicile.errors import DomicileError, MaybeExecuted, NotExecuted
from domicile.settings import Settings
from domicile.testing.processes.recorder import FileRecorder

TALLIES = tuple(f"tally-{number}" for number in range(48))
ROOMS = tuple(f"room-{number}" for number in range(16))
SENDERS = 3
PER_SECOND = 120
"""Messages per second that each sender sends."""

IN_FLIGHT = 512
RETRY_S = 0.02
LEFT_S = 15.0


class Seen(msgspec.Struct, frozen=True):
    """A tally's answer: how often it was added to, since when, and what came out of order."""

    count: int
    start: str
    wrong: int


class Tally(Entity, name="demo.tally"):
    """Adds up, in memory only, and notices numbers that come twice or out of order."""

    count: int = 0
    wrong: int = 0

    async def on_start(self) -> None:
        """Begin empty, with a mark that no other start has."""
        self.start = f"{self.random.getrandbits(64):016x}"
        self.last: dict[str, int] = {}

    @handler
    async def add(self, lane: str, number: int) -> Seen:
        """Add one number of a lane; the numbers of a lane rise."""
        if number <= self.last.get(lane, 0):
            self.wrong += 1
        self.last[lane] = number
        self.count += 1
        return Seen(self.count, self.start, self.wrong)

    @handler
    async def look(self) -> Seen:
        """Answer without adding."""
        return Seen(self.count, self.start, self.wrong)


class DemoRoom(Entity, name="demo.room"):
    """Sleeps, then asks a tally: so its own node is the sender of that message."""

    asked: int = 0

    @handler
    async def talk(self, seconds: float, tally: str) -> int:
        """The number of talks so far; an unreachable tally is not a failure of this handler."""
        await asyncio.sleep(seconds)
        self.asked += 1
        try:
            lane = f"{self.id}@{self.epoch}"
            await self.ref(Tally, tally).ask(Tally.add, lane, self.asked)
        except (NotExecuted, MaybeExecuted):
            return -self.asked
        return self.asked


class SenderRecorder(FileRecorder):
    """Also knows which incarnation it records: order is promised per incarnation (I5)."""

    incarnation = ""

    def event(self, kind: str, /, **fields: Any) -> None:
        """Append an event."""
        if kind == "life":
            self.incarnation = fields["inc"]
        super().event(kind, **fields)


class Load:
    """Several senders at work, and the outcome of each ask."""

    def __init__(self, store: str, settings: Settings, directory: Path, seed: int) -> None:
        self.asks = 0
        self.tells = 0
        self.refused = 0
        self.outcomes: Counter[str] = Counter()
        self.starts: dict[str, dict[str, None]] = {}
        self.wrong: dict[tuple[str, str], int] = {}
        self._stopping = False
        self._open: dict[asyncio.Task[None], None] = {}
        self._numbers: Counter[tuple[str, str]] = Counter()
        self._senders: list[tuple[ConnectedClient, SenderRecorder, Random]] = []
        for number in range(SENDERS):
            recorder = SenderRecorder(directory / f"sender-{number}.events")
            client = connect(store, settings=settings, meter=recorder)
            self._senders.append((client, recorder, Random(f"{seed}/{number}")))

    @property
    def answered(self) -> int:
        """Asks that were answered."""
        return self.outcomes["answered"]

    @property
    def restarted(self) -> int:
        """How often a tally was found to have started again, empty."""
        return sum(len(starts) - 1 for starts in self.starts.values())

    @property
    def out_of_order(self) -> int:
        """Numbers that tallies got twice or out of order, over all their starts."""
        return sum(self.wrong.values())

    @property
    def unresolved(self) -> int:
        """Asks without any outcome so far."""
        return self.asks - sum(self.outcomes.values())

    async def run(self) -> None:
        """Send until stopped, wait for every outcome, and let the senders leave."""
        try:
            async with asyncio.TaskGroup() as group:
                for client, recorder, random in self._senders:
                    group.create_task(self._sender(client, recorder, random))
        finally:
            for _, recorder, _ in self._senders:
                recorder.close()

    def stop(self) -> None:
        """Send nothing more."""
        self._stopping = True

    async def _sender(
        self, client: ConnectedClient, recorder: SenderRecorder, random: Random
    ) -> None:
        loop = asyncio.get_running_loop()
        async with client:
            due = loop.time()
            while not self._stopping:
                due = max(due + 1 / PER_SECOND, loop.time() - 0.2)
                await asyncio.sleep(due - loop.time())
                if len(self._open) < IN_FLIGHT:
                    self._one(client, recorder, random)
            mine = list(self._open)
            if mine:
                await asyncio.wait(mine, timeout=LEFT_S)

    def _one(self, client: ConnectedClient, recorder: SenderRecorder, random: Random) -> None:
        kind = random.choices(("add", "tell", "talk"), (6, 2, 2))[0]
        tally = random.choice(TALLIES)
        if kind == "talk":
            room, seconds = random.choice(ROOMS), random.uniform(0.005, 0.05)
            work = self._talk(client, room, seconds, tally)
        else:
            work = self._add(client, recorder, tally, ask=kind == "add")
        task = asyncio.get_running_loop().create_task(work)
        self._open[task] = None
        task.add_done_callback(lambda done: self._open.pop(done, None))

    async def _add(
        self, client: ConnectedClient, recorder: SenderRecorder, tally: str, *, ask: bool
    ) -> None:
        lane = recorder.incarnation
        self._numbers[lane, tally] += 1
        number, ref = self._numbers[lane, tally], client.ref(Tally, tally)
        if ask:
            self.asks += 1
            try:
                self._saw(tally, await ref.ask(Tally.add, lane, number))
            except DomicileError as error:
                self._failed(error)
        else:
            self.tells += 1
            try:
                await ref.tell(Tally.add, lane, number)
            except DomicileError:
                self.refused += 1

    async def _talk(self, client: ConnectedClient, room: str, seconds: float, tally: str) -> None:
        self.asks += 1
        try:
            await client.ref(DemoRoom, room).ask(DemoRoom.talk, seconds, tally)
        except DomicileError as error:
            self._failed(error)
        else:
            self.outcomes["answered"] += 1

    async def look(self, client: Client) -> None:
        """Ask every tally for its final state."""
        for tally in TALLIES:
            self._note(tally, await counted_answer(client, tally))

    def _saw(self, tally: str, seen: Seen) -> None:
        self.outcomes["answered"] += 1
        self._note(tally, seen)

    def _note(self, tally: str, seen: Seen) -> None:
        self.starts.setdefault(tally, {})[seen.start] = None
        self.wrong[tally, seen.start] = max(seen.wrong, self.wrong.get((tally, seen.start), 0))

    def _failed(self, error: DomicileError) -> None:
        if isinstance(error, NotExecuted):
            self.outcomes["not executed"] += 1
        elif isinstance(error, MaybeExecuted):
            self.outcomes["maybe executed"] += 1
        else:
            self.outcomes["failed"] += 1


async def counted_answer(client: Client, tally: str) -> Seen:
    """Ask one tally again and again until it answers."""
    while True:
        try:
            return await client.ref(Tally, tally).options(timeout_s=1.0).ask(Tally.look)
        except (NotExecuted, MaybeExecuted):
            await asyncio.sleep(RETRY_S)
