"""One incarnation's right to act: its lease and its own record, and what ends it (L1, L3, L5).

It is the base of `domicile.membership.member.Member`, which feeds it what the store says about
both. The thread renewer (`membership.thread_renewer`) may renew for a node, so that a node with a
blocked loop keeps its shards for a limited time (DX-10). Then two threads change the lease and the
own record, both only under `_lock`. Without the lock, a renewal that was checked before a fence
could count after the fence, and a fenced incarnation would act again (L5). The other thread must
never call what belongs to the loop.

Reading takes no lock, because every message passes a guard. `Lease.valid` reads the state, then the
deadline; each read is atomic (a single reference). If an extension or a fence happens between the
two reads, the answer is that of the moment just before or just after it; no guard can know more. So
the next guard sees a fence from the other thread, even if the loop was blocked meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Generic, Protocol

import msgspec

from domicile.core.lease.keeper import Renewal
from domicile.core.lease.lease import FOREVER_S, Lease, LeaseState
from domicile.core.state.cluster_view import ViewChange
from domicile.core.state.txn import Changes, Item, Listing
from domicile.errors import StoreRewound, StoreUnavailable
from domicile.membership.record_kinds import R, RecordKind
from domicile.membership.store_calls import MemberStoreCalls
from domicile.ports.clock import Clock, Timer
from domicile.ports.meter import Meter
from domicile.ports.store import Kept, Store
from domicile.settings import Settings

log = logging.getLogger("domicile")


class MemberEvents(Protocol):
    """The callbacks of a member's owner. The member calls them on its event loop, except
    `on_renewed`. They must not block.

    For each listing or change the facts come first, then the raw form. After `on_fenced` no other
    callback follows.
    """

    def on_fact(self, fact: ViewChange) -> None:
        """Something in the cluster changed."""
        ...

    def on_listing(self, listing: Listing) -> None:
        """The whole store, at the start and after a gap in the watch."""
        ...

    def on_changes(self, changes: Changes) -> None:
        """What one commit changed."""
        ...

    def on_renewed(self) -> None:
        """The lease is valid until `Member.lease.valid_until`. May be called in another thread."""
        ...

    def on_fenced(self, reason: str) -> None:
        """This incarnation is over: stop everything, then call `revoke` (L4, L5). Called once."""
        ...


class LeaseHolder(Generic[R]):
    """What guards compare and renewals extend. `R` is the type of the own record."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        meter: Meter,
        settings: Settings,
        random: Random,
        record: R,
        kind: RecordKind[R],
        events: MemberEvents,
    ) -> None:
        self._clock, self._meter, self._settings = clock, meter, settings
        self._events = events
        self._record = record
        self._own_revision = 0
        self.kind = kind
        self.incarnation = kind.incarnation(record)
        self._key = kind.key(self.incarnation)
        self.lease_id = kind.lease_id(self.incarnation)
        self.lease = Lease(settings.margin_s, settings.stop_budget_s)
        self.rewound = False
        """Whether this incarnation was fenced because the store lost commits (S5)."""
        self._endless = settings.fencing == "health"
        self._over = asyncio.Event()
        self._calls = MemberStoreCalls(store, settings.op_timeout_s, random, self._over)
        self._deadline: Timer | None = None
        self._told = False
        self._silent = False
        """Whether the log says that the store does not answer renewals."""
        self._lock = threading.Lock()
        self._home = threading.get_ident()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def record(self) -> R:
        """The own record as last stored; a node's record names the granted ttl (C5)."""
        return self._record

    def guard(self) -> bool:
        """Whether this incarnation may act now. The first time it may not, fence it (L3)."""
        now = self._clock.now()
        if self.lease.valid(now):
            return True
        with self._lock:
            state = self.lease.check(now)
        if state is LeaseState.HELD:
            # An acknowledgement came between the two reads: it is late, but it counts (L1).
            return True
        self._meter.count("guard.refused")
        self._notice()
        return False

    def fence(self, reason: str) -> None:
        """End this incarnation now (L5). Does nothing if it is already fenced or has left."""
        with self._lock:
            self.lease.refused(self._clock.now(), reason)
        self._notice()

    def _notice(self) -> None:
        """If fenced, notify the owner on its event loop. Guards already refuse before that."""
        if self.lease.state is LeaseState.FENCED:
            self._on_loop(self._fenced)

    def _on_loop(self, callback: Callable[[], None]) -> None:
        if threading.get_ident() == self._home or self._loop is None:
            callback()
            return
        with suppress(RuntimeError):  # the loop is closed, so there is no owner to notify
            self._loop.call_soon_threadsafe(callback)

    def _fenced(self) -> None:
        if self._told:
            return
        self._told = True
        self._finish()
        self._meter.count("lease.fenced")
        self._meter.event("fenced", inc=self.incarnation, reason=self.lease.reason)
        self._events.on_fenced(self.lease.reason)

    def _finish(self) -> None:
        self._over.set()
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _renewed(self, sent_at: float, ttl_s: float) -> None:
        self._meter.event(
            "renewed",
            inc=self.incarnation,
            sent_at=sent_at,
            ttl=ttl_s,
            margin=self._settings.margin_s,
        )
        if self._silent:
            self._silent = False
            log.info("the store answers again: lease %s is renewed", self.lease_id)
        self._events.on_renewed()

    def _watch_deadline(self) -> None:
        # After a pause a timer alone is late; the timer only serves an idle process (L3).
        self._deadline = None
        if self.guard() and self.lease.valid_until < FOREVER_S:
            self._deadline = self._clock.call_at(self.lease.valid_until, self._watch_deadline)

    # Also called by the thread renewer

    def own(self) -> tuple[R, int]:
        """The own record as last stored, and its revision."""
        with self._lock:
            return self._record, self._own_revision

    def kept(self, sent_at: float, kept: Kept, floor: int) -> Renewal:
        """A renewal was answered. If the lease or the own record is gone: fence, `REFUSED` (L1)."""
        if kept.ttl_s is None:
            self.fence("the store refused the renewal: the lease is gone")
            return Renewal.REFUSED
        if not self._check_own(kept.item, floor):
            return Renewal.REFUSED
        ttl_s = self._count_ttl(kept.ttl_s)
        with self._lock:
            counts = self.lease.acknowledged(sent_at, ttl_s, self._clock.now())
            counts = counts and self.lease.state is LeaseState.HELD
        if counts:
            self._renewed(sent_at, ttl_s)
        return Renewal.ACKNOWLEDGED

    def unanswered(self, error: StoreUnavailable) -> None:
        """A renewal had no answer. The log says so once for each time that the store is away."""
        if self._silent:
            return
        self._silent = True
        left_s = self.lease.valid_until - self._clock.now()
        ends = "" if self._endless else f", which ends in {left_s:.1f} s"
        log.warning("the store does not renew lease %s%s: %s", self.lease_id, ends, error)

    def stands(self, record: R, revision: int) -> None:
        """The own record was stored."""
        with self._lock:
            if revision < self._own_revision:
                return
            self._record, self._own_revision = record, revision
        if threading.get_ident() == self._home:
            # Only on the loop: it may still have to check a listing that was read before (S5).
            self._calls.newest = max(self._calls.newest, revision)

    def lapsed(self) -> None:
        """The deadline has passed: fence, if no guard has noticed that yet (L4)."""
        with self._lock:
            self.lease.check(self._clock.now())
        self._notice()

    def went_back(self, error: StoreRewound) -> None:
        """The store lost commits (S5)."""
        self.rewound = True
        self.fence(f"store rewound: {error}")

    def tally(self, name: str) -> None:
        """Count something, on the loop: a meter need not be thread-safe."""
        self._on_loop(lambda: self._meter.count(name))

    def _check_own(self, item: Item | None, floor: int) -> bool:
        """Take the own record as just read; if it is gone or evicted, fence and return False (L1).

        `floor` is the revision at which the record was known before the read was requested.
        """
        record = self._own(item)
        if item is None or record is None:
            return False
        if item.revision < floor:
            error = f"own record is of {item.revision}, it was written at {floor}"
            self.went_back(StoreRewound(error))
            return False
        self.stands(record, item.revision)
        return True

    def _own(self, item: Item | None) -> R | None:
        if item is None:
            self.fence("the own record is gone")
            return None
        try:
            record = self.kind.decode(item.value)
        except msgspec.MsgspecError as error:
            self.fence(f"the own record cannot be read: {error}")
            return None
        why = self.kind.evicted(record)
        if why:
            self.fence(why)
            return None
        return record

    def _count_ttl(self, ttl_s: float) -> float:
        # A leader waits for the ttl in the record before it removes an evicted node (C5). A store
        # may extend a lease beyond that (S2); the validity here must not become longer.
        if self._endless:
            return FOREVER_S
        return min(ttl_s, self.kind.longest_ttl_s(self._record))
