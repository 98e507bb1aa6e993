"""The items and leases of a memory store. Every change is one commit in its log.

Only `domicile.stores.memory.store` calls this module. Leases run on a clock that never jumps, or on
store time made from a wall clock, as in a store without such a clock (S4). Nothing here may change
an item without a commit in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite

from domicile.core.state.txn import (
    Absent,
    At,
    Change,
    Committed,
    Condition,
    Conflict,
    Item,
    Listing,
    Put,
    Write,
    check_limits,
)
from domicile.ports.clock import Clock, Timer
from domicile.ports.meter import Meter
from domicile.stores.memory.log import MemoryLog
from domicile.stores.storetime import StoreTime

TICK_S = 0.2
"""S4: seconds after which store time advances if no call advances it; less than `MAX_TICK_S`."""

SOON_S = 1e-6
"""The shortest wait for a lease's end: rounding must not make it 0."""


@dataclass(slots=True)
class StoredLease:
    """A timed right. Valid while `now < deadline`."""

    id: str
    ttl_s: float
    deadline: float
    keys: dict[bytes, None] = field(default_factory=dict[bytes, None])


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything in a store at one moment, as a backup would hold it."""

    revision: int
    now: float
    items: dict[bytes, Item]
    leases: tuple[StoredLease, ...]


class Data:
    """What is stored now."""

    def __init__(
        self, clock: Clock, meter: Meter, log: MemoryLog, wall: Callable[[], float] | None
    ) -> None:
        self._clock = clock
        self._meter = meter
        self._log = log
        self._wall = wall
        self._time = StoreTime(0.0 if wall is None else wall())
        self._items: dict[bytes, Item] = {}
        self._attached: dict[bytes, StoredLease] = {}
        self._leases: dict[str, StoredLease] = {}
        self._due_at = inf
        self._timer: Timer | None = None
        self._timer_at = inf
        self._halted = False

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
        """As `Store.commit`. A commit that changes nothing does not raise the revision."""
        check_limits(conditions, writes)
        self.expire_due()
        conflict = self.conflict(conditions, writes)
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
        deadline = self.expire_due() + ttl_s
        lease = self._leases.get(lease_id)
        if lease is None:
            self._leases[lease_id] = StoredLease(lease_id, ttl_s, deadline)
        else:
            lease.ttl_s, lease.deadline = ttl_s, deadline
        self._due_at = min(self._due_at, deadline)
        self._arm()
        return ttl_s

    def renew(self, lease_id: str) -> float | None:
        """As `Store.renew`."""
        now = self.expire_due()
        lease = self._leases.get(lease_id)
        if lease is None:
            return None
        lease.deadline = now + lease.ttl_s
        return lease.ttl_s

    def revoke(self, lease_id: str) -> None:
        """As `Store.revoke`."""
        self.expire_due()
        lease = self._leases.get(lease_id)
        if lease is not None:
            self._end(lease)

    # time

    def expire_due(self) -> float:
        """End the expired leases (S3), before every answer, because the timer may be late.

        Returns the time now, on the clock of the leases.
        """
        now = self._now()
        if now < self._due_at:
            return now
        due = [lease for lease in self._leases.values() if lease.deadline <= now]
        due.sort(key=lambda lease: lease.deadline)
        for lease in due:
            self._end(lease)
        # A renewal does not change `_due_at`. So this may find no expired lease, and then only
        # computes the next end.
        self._due_at = min([lease.deadline for lease in self._leases.values()], default=inf)
        self._arm()
        return now

    def halt(self) -> None:
        """The store's process stops: its time stops, and no lease expires."""
        self._halted = True

    def go_on(self) -> None:
        """The store's process runs again. Store time counts one tick for the time between (S4)."""
        if self._halted:
            self._halted = False
            self.expire_due()
            self._arm()

    def _now(self) -> float:
        if self._wall is None:
            return self._clock.now()
        if not self._halted:
            self._time = self._time.advanced(self._wall())
        return self._time.now_s

    def _arm(self) -> None:
        if self._due_at == inf or self._halted:
            return
        if self._wall is None:
            at = self._due_at
        else:
            wait_s = min(TICK_S, max(SOON_S, self._due_at - self._time.now_s))
            at = self._clock.now() + wait_s
        if at < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = at
            self._timer = self._clock.call_at(at, self._look)

    def _look(self) -> None:
        self._timer, self._timer_at = None, inf
        if not self._halted:
            self.expire_due()
            self._arm()

    # backups

    def snapshot(self) -> Snapshot:
        """What is stored now."""
        now = self.expire_due()
        leases = [replace(lease, keys=dict(lease.keys)) for lease in self._leases.values()]
        return Snapshot(self._log.revision, now, dict(self._items), tuple(leases))

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot. Each lease gets the remaining time that it had then."""
        later_s = self._now() - snapshot.now
        self._items = dict(snapshot.items)
        self._leases = {
            lease.id: StoredLease(lease.id, lease.ttl_s, lease.deadline + later_s, dict(lease.keys))
            for lease in snapshot.leases
        }
        self._attached = {key: lease for lease in self._leases.values() for key in lease.keys}
        self._due_at = min([lease.deadline for lease in self._leases.values()], default=inf)
        self._log.rewind(snapshot.revision)
        self._meter.event(
            "rewound",
            revision=snapshot.revision,
            history=self._log.history,
            items=[(key, item.value) for key, item in self._items.items()],
        )
        self._arm()

    # inside

    def _end(self, lease: StoredLease) -> None:
        del self._leases[lease.id]
        deletes = list(lease.keys)
        if deletes:
            self._log.publish([self._delete(key) for key in deletes])
            self._meter.event("expire", revision=self._log.revision, deletes=deletes)

    def conflict(
        self, conditions: Sequence[Condition], writes: Sequence[Write] = ()
    ) -> bytes | None:
        """The key of the first condition that does not hold, or of a write under a lease that is
        gone."""
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
