"""A simulated replicated database: one log, asynchronous replication, histories with contents.

`domicile.testing.groups.group` builds the servers. A server does what real ones do: a replica goes
on following without its agent, a frozen server does late what was asked of it, a crash may cost an
asynchronous server its newest entries, and a session that is open goes on writing until somebody
ends it. It knows nothing of epochs, except in what it records for the checkers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import NamedTuple

from domicile.failover.driver import SavedLoss, ServerFacts, ServerNotes
from domicile.failover.records import WriteQuorum
from domicile.failover.sync_set import InUse, holds
from domicile.testing.sim.calls import fail, settle
from domicile.testing.sim.loop import SimLoop, World

REPLICATION_S = (0.004, 0.03)
"""How long an entry takes to a replica, or its confirmation back."""

CALL_S = (0.0005, 0.004)
"""How long an agent's call takes."""

PATIENCE_S = 0.5
"""After which an agent gives a call up."""

FULL_COPY_S = 0.3
"""How long a full synchronization takes."""


class LogEntry(NamedTuple):
    """One entry: the history in which it was written, and the write's number."""

    history: str
    write: int
    """Of a client; negative for the mark of an epoch."""


@dataclass
class Accepted:
    """A write that a server took, for the checkers."""

    at: float
    server: str
    epoch: int
    write: int
    late: bool
    """Within the moment after a wake in which the guard has not run yet (F2)."""


@dataclass
class GroupLog:
    """What happened in a group. The checkers read this, and the store's own record."""

    accepted: list[Accepted] = field(default_factory=lambda: list[Accepted]())
    acknowledged: dict[int, float] = field(default_factory=lambda: dict[int, float]())
    given_up: list[tuple[float, str, tuple[int, ...]]] = field(
        default_factory=lambda: list[tuple[float, str, tuple[int, ...]]]()
    )
    """Writes that a server saved before it followed another primary."""
    crashed: list[tuple[float, str, tuple[int, ...]]] = field(
        default_factory=lambda: list[tuple[float, str, tuple[int, ...]]]()
    )
    """Writes that a server lost in a crash, before it had them on disk."""


def saved_at(at: float, server: str) -> str:
    """Where a receipt says that a simulated server saved what it gave up then."""
    return f"memory of {server} at {at:.9f}"


@dataclass
class _Waiting:
    """A write that waits for its quorum."""

    offset: int
    write: int
    answer: Callable[[bool], None]


class SimDatabase:
    """One server, up or down, with what it has on disk."""

    def __init__(
        self, world: World, name: str, peers: dict[str, SimDatabase], record: GroupLog
    ) -> None:
        self._world, self._peers, self._record = world, peers, record
        self._random: Random = world.stream(f"database {name}")
        self.name = name
        self.log: list[LogEntry] = []
        self.up = True
        self.frozen = False
        self.woken_until = 0.0
        self.runs = 1
        self.histories = 0
        self.history = f"{name}-0"
        self.follows = ""
        self.feeds = False
        """Whether replicas may copy from it: not from a server that nobody made primary."""
        self.open_epoch = 0
        self.in_use: InUse | None = None
        self.acknowledged: dict[str, int] = {}
        self.blocked: dict[str, None] = {}
        """Servers that this one can't reach."""
        self.slow = 1.0
        self._waiting: list[_Waiting] = []
        self._late: deque[Callable[[], None]] = deque()
        self._pull_number = 0
        self._whole_at = 0
        """Up to where a full synchronization under way must come; 0: there is none."""

    @property
    def run(self) -> str:
        """Id of this run of the process."""
        return f"{self.name}-run-{self.runs}"

    def peer(self, name: str) -> SimDatabase:
        """Another server of the group."""
        return self._peers[name]

    def delay(self, range_s: tuple[float, float]) -> float:
        """A delay on the way from or to this server."""
        return self._random.uniform(*range_s) * self.slow

    def soon(self, do: Callable[[], None]) -> None:
        """Something reaches the process: at once, or when it is thawed, or never if it is down."""
        if self.frozen:
            self._late.append(do)
        elif self.up:
            do()

    # clients

    def write(self, number: int, answer: Callable[[bool], None]) -> None:
        """A client's write on a session that is open: taken, refused, or never answered."""
        if not self.open_epoch:
            answer(False)
            return
        self.log.append(LogEntry(self.history, number))
        late = self._world.now < self.woken_until
        self._record.accepted.append(
            Accepted(self._world.now, self.name, self.open_epoch, number, late)
        )
        if self.in_use is None:
            self._record.acknowledged.setdefault(number, self._world.now)
            answer(True)
        else:
            self._waiting.append(_Waiting(len(self.log), number, answer))
            self._release()

    def _release(self) -> None:
        """Acknowledge what the quorum has."""
        if self.in_use is None:
            return
        waiting: list[_Waiting] = []
        for one in self._waiting:
            if holds(self.in_use.quorum, one.offset, self.acknowledged):
                self._record.acknowledged.setdefault(one.write, self._world.now)
                one.answer(True)
            else:
                waiting.append(one)
        self._waiting = waiting

    # what the driver and the guard do

    def open(self, epoch: int, quorum: WriteQuorum | None) -> None:
        """Accept writes."""
        self.open_epoch = epoch
        self.feeds = True
        if quorum is None:
            self.in_use = None
        elif self.in_use is None or self.in_use.quorum != quorum:
            self.in_use = InUse(quorum, len(self.log))
        self._release()

    def refuse(self) -> None:
        """Refuse writes, end sessions: their writes are never acknowledged."""
        self.open_epoch = 0
        self._waiting.clear()

    def stand(self) -> None:
        """Refuse writes and follow nobody."""
        self.refuse()
        self._unfollow()
        self.feeds = False
        self.in_use = None
        self.acknowledged.clear()

    def promote(self, epoch: int) -> None:
        """A new history, with a mark of its epoch as first entry."""
        self.stand()
        self.histories += 1
        self.history = f"{self.name}-{self.histories}"
        self.log.append(LogEntry(self.history, -epoch))
        self.feeds = True

    def give_up(self, kept: int) -> None:
        """Forget what is beyond an offset."""
        del self.log[kept:]

    def follow(self, primary: str) -> None:
        """Follow a server, from now on and whatever it is then."""
        self.refuse()
        if self.follows != primary:
            self._unfollow()
            self.follows = primary
            self._pull(self._pull_number)

    def _unfollow(self) -> None:
        self.follows = ""
        self._pull_number += 1

    # replication

    def _reaches(self, other: SimDatabase) -> bool:
        return not (
            self.frozen
            or other.frozen
            or not other.up
            or not other.feeds
            or other.name in self.blocked
            or self.name in other.blocked
        )

    def _pull(self, number: int) -> None:
        """Ask the primary for more, and again for as long as this server follows it."""
        if number != self._pull_number or not self.up:
            return
        primary = self._peers[self.follows]
        wait_s = self.delay(REPLICATION_S)
        if self._reaches(primary):
            wait_s += self._copy(primary)
        self._world.call_at(self._world.now + wait_s, partial(self._pull, number))

    def _copy(self, primary: SimDatabase) -> float:
        mine = len(self.log)
        known = mine <= len(primary.log) and (
            not mine or self.log[-1].history == primary.log[mine - 1].history
        )
        if not known:
            # A full synchronization: the data goes, and comes again after a while.
            self.log.clear()
            self.history = primary.history
            self._whole_at = len(primary.log)
            return FULL_COPY_S
        self.history = primary.history
        self.log += primary.log[mine : mine + 5]
        if len(self.log) >= self._whole_at:
            self._whole_at = 0
        at = self._world.now + self.delay(REPLICATION_S)
        self._world.call_at(at, partial(primary.confirmed, self.name, len(self.log), primary.run))
        return 0.0

    def confirmed(self, by: str, offset: int, run: str) -> None:
        """A replica says what it has."""
        if self.up and not self.frozen and self.run == run:
            self.acknowledged[by] = max(offset, self.acknowledged.get(by, 0))
            self._release()

    # faults

    def crash(self, lost: int) -> None:
        """The process ends; the newest entries that were not on disk are gone."""
        if not self.up:
            return
        kept = len(self.log) - min(lost, len(self.log))
        gone = tuple(entry.write for entry in self.log[kept:] if entry.write > 0)
        if gone:
            self._record.crashed.append((self._world.now, self.name, gone))
        del self.log[kept:]
        self.stand()
        self.up = self.frozen = False
        self._late.clear()

    def start(self) -> None:
        """A new process, which comes up fenced (F3)."""
        if not self.up:
            self.up = True
            self.runs += 1

    def freeze(self) -> None:
        """SIGSTOP."""
        self.frozen = self.up

    def thaw(self, guard_s: float) -> None:
        """SIGCONT: what has arrived is done before any guard can run."""
        if not self.frozen:
            return
        self.frozen = False
        self.woken_until = self._world.now + guard_s
        while self._late and not self.frozen:
            self._late.popleft()()

    def facts(self) -> ServerFacts:
        """What a driver sees."""
        syncing = self._whole_at > 0
        return ServerFacts(
            up=True,
            run=self.run,
            open_epoch=self.open_epoch,
            follows=self.follows,
            offset=len(self.log),
            empty=not self.log,
            native=self.history,
            fit=not syncing,
            why="it is being synchronized" if syncing else "",
            in_use=self.in_use,
            acknowledged=dict(self.acknowledged),
        )


class SimReplicaDriver:
    """Implements `ReplicaDriver` for an agent's process, whose calls travel to the server."""

    def __init__(
        self, world: World, loop: SimLoop, database: SimDatabase, record: GroupLog
    ) -> None:
        self._world, self._loop, self._database = world, loop, database
        self._record = record
        self._last_at = 0.0

    async def call(self, do: Callable[[], object], *, answers: bool = True) -> None:
        """One call, in the order of the calls before it; `TimeoutError` without an answer."""
        database = self._database
        answer: asyncio.Future[None] = self._loop.create_future()
        timer = self._loop.call_later(PATIENCE_S, fail, answer, TimeoutError("no answer"))

        def arrive() -> None:
            if not database.up:
                self._loop.post(partial(fail, answer, ConnectionError("it does not run")))
                return
            database.soon(run)

        def run() -> None:
            do()
            back = self._world.now + database.delay(CALL_S)
            self._world.call_at(back, lambda: self._loop.post(partial(settle, answer, None)))

        # One connection: no call overtakes another one.
        self._last_at = max(self._last_at, self._world.now + database.delay(CALL_S))
        self._world.call_at(self._last_at, arrive)
        try:
            await answer
        finally:
            timer.cancel()

    async def look(self) -> ServerFacts:
        """As `ReplicaDriver.look`."""
        found: list[ServerFacts] = []
        await self.call(lambda: found.append(self._database.facts()))
        return found[0]

    async def stand(self) -> None:
        """As `ReplicaDriver.stand`."""
        await self.call(self._database.stand)

    async def drain(self) -> None:
        """As `ReplicaDriver.drain`."""
        await self.call(self._database.refuse)

    async def dismiss(self) -> None:
        """As `ReplicaDriver.dismiss`. Nothing waits here."""
        await self.call(self._database.stand)

    async def save(self, kept: int) -> SavedLoss:
        """As `ReplicaDriver.save`."""
        writes: list[int] = []

        where: list[str] = []

        def keep() -> None:
            now, name = self._world.now, self._database.name
            writes[:] = [entry.write for entry in self._database.log[kept:] if entry.write > 0]
            self._record.given_up.append((now, name, tuple(writes)))
            where.append(saved_at(now, name))

        await self.call(keep)
        return SavedLoss(len(writes), where[-1])

    async def follow(self, address: str, kept: int) -> None:
        """As `ReplicaDriver.follow`."""
        database = self._database

        def begin() -> None:
            if database.follows != address:
                database.stand()
                database.give_up(kept)
                database.follow(address)

        await self.call(begin)
        goal: list[int] = []
        while True:
            facts = await self.look()
            primary = database.peer(address)
            if not goal:
                goal.append(len(primary.log))
            if facts.offset >= goal[0] and facts.native == primary.history:
                return
            await asyncio.sleep(0.02)

    async def promote(self, epoch: int) -> None:
        """As `ReplicaDriver.promote`."""
        await self.call(partial(self._database.promote, epoch))

    async def close(self) -> None:
        """As `ReplicaDriver.close`."""


class SimNoteBook:
    """Implements `NoteBook`: notes on a machine's disk."""

    def __init__(self, server: str, folder: str = "") -> None:
        self._notes = ServerNotes(server, folder=folder)

    def load(self) -> ServerNotes:
        """As `NoteBook.load`."""
        return self._notes

    async def save(self, notes: ServerNotes) -> None:
        """As `NoteBook.save`."""
        await asyncio.sleep(0.001)
        self._notes = notes
