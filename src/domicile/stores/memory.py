"""The reference store: everything in one process's memory, nothing survives it.

Simulations, tests and single-process programs share one `MemoryStore` and give each process a
`client` of it. It must never answer in a way that a store over a network could not.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

from domicile.core.txn import (
    Absent,
    At,
    Change,
    Changes,
    Committed,
    Condition,
    Conflict,
    Item,
    Listing,
    Outcome,
    Put,
    Write,
    check_limits,
)
from domicile.errors import StoreRewound, StoreUnavailable, WatchCompacted
from domicile.ports.clock import Clock, Timer
from domicile.ports.meter import Meter, NoMeter
from domicile.ports.store import Store

KEPT_COMMITS = 10_000


@dataclass(slots=True)
class _Lease:
    """A timed right. Alive while `now < deadline`."""

    id: str
    ttl_s: float
    deadline: float
    keys: dict[bytes, None] = field(default_factory=dict[bytes, None])


class MemoryStore:
    """A store that processes share. `client(by)` is one process's face of it.

    The last `kept_commits` commits can be watched from; older ones are compacted away.
    """

    def __init__(
        self, clock: Clock, meter: Meter | None = None, *, kept_commits: int = KEPT_COMMITS
    ) -> None:
        if kept_commits < 1:
            raise ValueError(f"kept_commits is {kept_commits}; keep at least one commit")
        self._log = _Log(kept_commits)
        self._data = _Data(clock, NoMeter() if meter is None else meter, self._log)

    def client(self, by: str) -> Store:
        """A face of this store for one process, which `commit` events name `by`."""
        return _Client(self._data, self._log, by)

    def peek(self, key: bytes) -> Item | None:
        """What a key holds now, for tests and tools in the same process."""
        return self._data.get(key)

    @property
    def revision(self) -> int:
        """The revision of the newest commit; 0 before the first."""
        return self._log.revision

    def compact(self, revision: int) -> None:
        """Forget the changes up to a revision: a watch from before it must list again."""
        self._log.compact(revision)


class _Log:
    """The newest commits, one for each revision up to `revision`, and who waits for the next."""

    def __init__(self, kept_commits: int) -> None:
        self.revision = 0
        self._kept_commits = kept_commits
        self._commits: deque[Changes] = deque()
        self._waiting: dict[_Watch, asyncio.Future[None]] = {}

    def publish(self, changes: Sequence[Change]) -> None:
        """Make changes the next revision."""
        self.revision += 1
        self._commits.append(Changes(self.revision, tuple(changes)))
        if len(self._commits) > self._kept_commits:
            self._commits.popleft()
        for watch, waiter in self._waiting.items():
            if not watch.skips(changes, self.revision) and not waiter.done():
                waiter.set_result(None)

    def compact(self, revision: int) -> None:
        """Forget up to a revision."""
        while self._commits and self._commits[0].revision <= revision:
            self._commits.popleft()

    def after(self, seen: int, prefix: bytes) -> Changes | int:
        """The first changes under a prefix after revision `seen`; if none, the newest revision."""
        if seen > self.revision:
            raise StoreRewound(
                f"a watch from revision {seen} is ahead of the store at {self.revision}: "
                "its history went back; drop what was learned from it and list again"
            )
        first = self.revision - len(self._commits)
        if seen < first:
            raise WatchCompacted(
                f"changes after revision {seen} are kept only from {first + 1} on; "
                "list again and watch from the listing's revision"
            )
        for index in range(seen - first, len(self._commits)):
            commit = self._commits[index]
            inside = _under(prefix, commit.changes)
            if inside:
                return Changes(commit.revision, inside)
        return self.revision

    async def wait(self, watch: _Watch) -> None:
        """Until a commit touches what a watch that has seen all is for, or `wake`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[watch] = waiter
        try:
            await waiter
        finally:
            del self._waiting[watch]

    def wake(self, client: _Client) -> None:
        """Let the watches of a client look again."""
        for watch, waiter in self._waiting.items():
            if watch.client is client and not waiter.done():
                waiter.set_result(None)


class _Data:
    """Items and leases. Every change is one commit in the log."""

    def __init__(self, clock: Clock, meter: Meter, log: _Log) -> None:
        self._clock = clock
        self._meter = meter
        self._log = log
        self._items: dict[bytes, Item] = {}
        self._attached: dict[bytes, _Lease] = {}
        self._leases: dict[str, _Lease] = {}
        self._timer: Timer | None = None
        self._timer_at = inf

    def get(self, key: bytes) -> Item | None:
        """As `Store.get`."""
        self.expire_due()
        return self._items.get(key)

    def scan(self, prefix: bytes) -> Listing:
        """As `Store.list`."""
        self.expire_due()
        items = self._items
        keys = sorted([key for key in items if key.startswith(prefix)])
        return Listing(self._log.revision, tuple([items[key] for key in keys]))

    def commit(
        self, by: str, conditions: Sequence[Condition], writes: Sequence[Write]
    ) -> Committed | Conflict:
        """As `Store.commit`. Writes that change nothing raise no revision."""
        check_limits(conditions, writes)
        self.expire_due()
        conflict = self._conflict(conditions, writes)
        if conflict is not None:
            return Conflict(conflict)
        revision = self._log.revision + 1
        changes: list[Change] = []
        puts: list[tuple[bytes, bytes, str | None]] = []
        deletes: list[bytes] = []
        for write in writes:
            if isinstance(write, Put):
                changes.append(self._put(write, revision))
                puts.append((write.key, write.value, write.lease))
            elif write.key in self._items:
                changes.append(self._delete(write.key))
                deletes.append(write.key)
        if changes:
            self._log.publish(changes)
            self._meter.event("commit", by=by, revision=revision, puts=puts, deletes=deletes)
        return Committed(self._log.revision)

    def grant(self, lease_id: str, ttl_s: float) -> float:
        """As `Store.grant`."""
        if not (isfinite(ttl_s) and ttl_s > 0):
            raise ValueError(f"the ttl of lease {lease_id!r} is {ttl_s} s; it must be above 0")
        self.expire_due()
        deadline = self._clock.now() + ttl_s
        lease = self._leases.get(lease_id)
        if lease is None:
            self._leases[lease_id] = _Lease(lease_id, ttl_s, deadline)
        else:
            lease.ttl_s, lease.deadline = ttl_s, deadline
        self._arm(deadline)
        return ttl_s

    def renew(self, lease_id: str) -> float | None:
        """As `Store.renew`."""
        self.expire_due()
        lease = self._leases.get(lease_id)
        if lease is None:
            return None
        lease.deadline = self._clock.now() + lease.ttl_s
        return lease.ttl_s

    def revoke(self, lease_id: str) -> None:
        """As `Store.revoke`."""
        self.expire_due()
        lease = self._leases.get(lease_id)
        if lease is not None:
            self._end(lease)

    def expire_due(self) -> None:
        """End what has run out (S3): before every answer, because the timer may be late."""
        now = self._clock.now()
        if now < self._timer_at:
            return
        due = [lease for lease in self._leases.values() if lease.deadline <= now]
        due.sort(key=lambda lease: lease.deadline)
        for lease in due:
            self._end(lease)
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, inf
        if self._leases:
            self._arm(min([lease.deadline for lease in self._leases.values()]))

    def _arm(self, deadline: float) -> None:
        # A renewal leaves an early timer standing: it finds nothing due and arms the next.
        if deadline < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = deadline
            self._timer = self._clock.call_at(deadline, self.expire_due)

    def _end(self, lease: _Lease) -> None:
        del self._leases[lease.id]
        deletes = list(lease.keys)
        if deletes:
            self._log.publish([self._delete(key) for key in deletes])
            self._meter.event("expire", revision=self._log.revision, deletes=deletes)

    def _conflict(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> bytes | None:
        for condition in conditions:
            item = self._items.get(condition.key)
            if isinstance(condition, At):
                holds = item is not None and item.revision == condition.revision
            else:
                holds = (item is None) == isinstance(condition, Absent)
            if not holds:
                return condition.key
        for write in writes:
            lease_id = write.lease if isinstance(write, Put) else None
            if lease_id is not None and lease_id not in self._leases:
                return write.key
        return None

    def _put(self, put: Put, revision: int) -> Change:
        before = self._items.get(put.key)
        created = revision if before is None else before.created
        item = Item(put.key, put.value, created, revision)
        self._items[put.key] = item
        self._detach(put.key)
        if put.lease is not None:
            lease = self._leases[put.lease]
            lease.keys[put.key] = None
            self._attached[put.key] = lease
        return Change(put.key, item)

    def _delete(self, key: bytes) -> Change:
        del self._items[key]
        self._detach(key)
        return Change(key, None)

    def _detach(self, key: bytes) -> None:
        lease = self._attached.pop(key, None)
        if lease is not None:
            del lease.keys[key]


class _Watch:
    """An iterator without a task: what it has not seen yet stays in the store's log."""

    def __init__(self, client: _Client, prefix: bytes, seen: int) -> None:
        self.client = client
        self._prefix = prefix
        self._seen = seen
        self._waits = False

    def __aiter__(self) -> AsyncIterator[Changes]:
        return self

    async def __anext__(self) -> Changes:
        if self._waits:
            raise RuntimeError("this watch is already being read; start a second watch instead")
        while True:
            self.client.use().expire_due()
            found = self.client.log.after(self._seen, self._prefix)
            if isinstance(found, Changes):
                self._seen = found.revision
                return found
            self._seen = found
            self._waits = True
            try:
                await self.client.log.wait(self)
            finally:
                self._waits = False

    def skips(self, changes: Sequence[Change], revision: int) -> bool:
        """Whether a commit is of no concern: it then counts as seen, and may be compacted."""
        if self._seen != revision - 1 or _under(self._prefix, changes):
            return False
        self._seen = revision
        return True


class _Client:
    """One process's face of a `MemoryStore`. Implements `Store`."""

    def __init__(self, data: _Data, log: _Log, by: str) -> None:
        self.log = log
        self._data = data
        self._by = by
        self._closed = False

    def use(self) -> _Data:
        """The data, unless this client is closed."""
        if self._closed:
            raise StoreUnavailable(f"the store client of {self._by} is closed; make another one")
        return self._data

    async def get(self, key: bytes) -> Item | None:
        return self.use().get(key)

    async def list(self, prefix: bytes) -> Listing:
        return self.use().scan(prefix)

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        return self.use().commit(self._by, conditions, writes)

    async def grant(self, lease: str, ttl_s: float) -> float:
        return self.use().grant(lease, ttl_s)

    async def renew(self, lease: str) -> float | None:
        return self.use().renew(lease)

    async def revoke(self, lease: str) -> None:
        self.use().revoke(lease)

    def watch(self, prefix: bytes, from_revision: int) -> AsyncIterator[Changes]:
        return _Watch(self, prefix, from_revision)

    async def close(self) -> None:
        self._closed = True
        self.log.wake(self)


def _under(prefix: bytes, changes: Sequence[Change]) -> tuple[Change, ...]:
    return tuple([change for change in changes if change.key.startswith(prefix)])
