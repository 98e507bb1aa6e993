"""A simulated replicated database: one log, asynchronous replication, histories with contents.

`domicile.testing.groups.group` builds the servers. A server does what real ones do: a replica goes
on following without its agent, a frozen server does late what was asked of it, a crash may cost an
asynchronous server its newest entries, and a session that is open goes on writing until somebody
ends it, even if the server is gone. It knows nothing of epochs, except in what it records for the
checkers.

A replica follows an address, not a server. There are two kinds. A *cascading* one, as PostgreSQL,
takes entries from whatever server it finds there, but only behind its own last entry. The other
kind, as Valkey, would take a whole copy, so a primary has a *ticket* for its followers, and feeds
nobody else.
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
    copied_over: list[tuple[float, str, tuple[int, ...]]] = field(
        default_factory=lambda: list[tuple[float, str, tuple[int, ...]]]()
    )
    """Writes that a server dropped by itself: it found other data at its primary's address."""
    needless: list[tuple[float, str, tuple[int, ...]]] = field(
        default_factory=lambda: list[tuple[float, str, tuple[int, ...]]]()
    )
    """Writes that a server saved as lost, although the primary that it then followed has them."""
    promoted: list[Promotion] = field(default_factory=lambda: list[Promotion]())


class Promotion(NamedTuple):
    """A server began a history of its own, for the checkers."""

    at: float
    server: str
    epoch: int
    offset: int
    """What it had just before."""


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
        self,
        world: World,
        name: str,
        peers: dict[str, SimDatabase],
        record: GroupLog,
        *,
        cascades: bool = False,
    ) -> None:
        self._world, self._peers, self._record = world, peers, record
        self._cascades = cascades
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
        self.ticket = ""
        """What its followers show; empty: nobody made it primary, or it follows now."""
        self._shows = ""
        """The ticket of the primary that it was told to follow."""
        self.dismissed = False
        """Whether it can't be opened any more without a promotion."""
        self.orphans = False
        """Whether sessions live on although the server is gone: they write until they are ended."""
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
        elif self.answers:
            do()

    @property
    def answers(self) -> bool:
        """Whether somebody takes what is sent: the server, or a session that outlives it."""
        return self.up or self.orphans

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
        """Accept writes, unless its epoch is over."""
        if self.dismissed:
            return
        self.open_epoch = epoch
        if quorum is None:
            self.in_use = None
        elif self.in_use is None or self.in_use.quorum != quorum:
            self.in_use = InUse(quorum, len(self.log))
        self._release()

    def refuse(self) -> None:
        """Refuse writes, end sessions: their writes are never acknowledged."""
        self.open_epoch = 0
        self.orphans = False
        self._waiting.clear()

    def stand(self) -> None:
        """Refuse writes and follow nobody."""
        self.refuse()
        self._unfollow()
        self.in_use = None
        self.acknowledged.clear()

    def promote(self, epoch: int) -> None:
        """A new history, with a mark of its epoch as first entry."""
        self.stand()
        self.dismissed = False
        self._record.promoted.append(Promotion(self._world.now, self.name, epoch, len(self.log)))
        self.histories += 1
        self.history = f"{self.name}-{self.histories}"
        self.log.append(LogEntry(self.history, -epoch))
        self.ticket = f"{self.run}, {self.history}"

    def dismiss(self) -> None:
        """Its epoch is over. One that does not cascade is a replica of nobody then."""
        self.stand()
        if not self._cascades:
            self.ticket, self.dismissed = "", True

    def save(self, kept: int) -> tuple[int, ...]:
        """The writes beyond an offset.

        A server that does not cascade becomes primary of itself, with a history of its own, before
        it gives anything to anybody. It admits no follower from then on.
        """
        if not self._cascades:
            self.ticket = ""
            self.histories += 1
            self.history = f"{self.name}-{self.histories}"
        return tuple(entry.write for entry in self.log[kept:] if entry.write > 0)

    def give_up(self, kept: int) -> None:
        """Forget what is beyond an offset."""
        del self.log[kept:]

    def follow(self, primary: str) -> None:
        """Follow a server, from now on and whatever it is then."""
        self.refuse()
        self.ticket, self._shows = "", self._peers[primary].ticket
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
            or not (self._cascades or self._told_to_follow(other))
            or other.name in self.blocked
            or self.name in other.blocked
        )

    def _told_to_follow(self, other: SimDatabase) -> bool:
        """Whether it is still the primary that this server was told to follow."""
        return bool(other.ticket) and other.ticket == self._shows

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
        if not known and self._cascades and not self._told_to_follow(primary):
            return 0.0
        if not known:
            gone = tuple(entry.write for entry in self.log if entry.write > 0)
            had = {entry.write: None for entry in primary.log}
            gone = tuple(write for write in gone if write not in had)
            if gone:
                self._record.copied_over.append((self._world.now, self.name, gone))
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

    def crash(self, lost: int, *, orphans: bool = False) -> None:
        """The process ends; the newest entries that were not on disk are gone.

        `orphans`: the sessions that are open live on, and go on writing.
        """
        if not self.up:
            return
        kept = len(self.log) - min(lost, len(self.log))
        gone = tuple(entry.write for entry in self.log[kept:] if entry.write > 0)
        if gone:
            self._record.crashed.append((self._world.now, self.name, gone))
        del self.log[kept:]
        open_epoch, in_use, waiting = self.open_epoch, self.in_use, list(self._waiting)
        frozen = self.frozen
        self.stand()
        self.ticket = ""
        self.up = self.frozen = False
        self._late.clear()
        if orphans and open_epoch:
            self.open_epoch, self.in_use, self._waiting = open_epoch, in_use, waiting
            # Sessions that stand still do so until they are woken.
            self.orphans, self.frozen = True, frozen

    def start(self) -> None:
        """A new process, which comes up fenced (F3): whoever starts it ends what is left."""
        if not self.up:
            self.refuse()
            self.up, self.frozen = True, False
            self._late.clear()
            self.runs += 1

    def freeze(self) -> None:
        """SIGSTOP."""
        self.frozen = self.answers

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
        self._saved: tuple[int, ...] = ()

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

    async def get_ready(self) -> None:
        """As `ReplicaDriver.get_ready`. There is nothing to do beforehand."""
        await self.call(lambda: None)

    async def drain(self) -> None:
        """As `ReplicaDriver.drain`."""
        await self.call(self._database.refuse)

    async def dismiss(self) -> None:
        """As `ReplicaDriver.dismiss`."""
        await self.call(self._database.dismiss)

    async def save(self, kept: int) -> SavedLoss:
        """As `ReplicaDriver.save`."""
        where: list[str] = []

        def keep() -> None:
            now, name = self._world.now, self._database.name
            self._saved = self._database.save(kept)
            self._record.given_up.append((now, name, self._saved))
            where.append(saved_at(now, name))

        await self.call(keep)
        return SavedLoss(len(self._saved), where[-1])

    async def follow(self, address: str, kept: int) -> None:
        """As `ReplicaDriver.follow`."""
        database = self._database
        primary = database.peer(address)
        if not (primary.up and primary.ticket):
            raise ConnectionError(f"{address} is no primary: nobody can follow it yet")

        def begin() -> None:
            if database.follows != address:
                database.stand()
                self._check_saved(primary)
                database.give_up(kept)
            database.follow(address)

        await self.call(begin)
        goal: list[int] = []
        while True:
            facts = await self.look()
            if not goal:
                goal.append(len(primary.log))
            if facts.offset >= goal[0] and facts.native == primary.history:
                return
            await asyncio.sleep(0.02)

    def _check_saved(self, primary: SimDatabase) -> None:
        """F10: what was just saved as lost is nothing that the primary has."""
        had = {entry.write: None for entry in primary.log}
        needless = tuple(write for write in self._saved if write in had)
        if needless:
            self._record.needless.append((self._world.now, self._database.name, needless))
        self._saved = ()

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
