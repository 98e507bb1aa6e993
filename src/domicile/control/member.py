"""One incarnation's standing in the cluster: registration, renewal, and its view of the store.

A node or client owns one `Member` per incarnation, runs its `run()` as a task, and compares
`guard()` before every turn, resumption and flush (L3). It must never renew, register or act
again once fenced: a fence ends the incarnation (L5). What it sees in the store goes to the
owner's `MemberEvents`, in the store's order, from within the watch.

Under `fencing = "health"` it has no deadline and works on while the store is away: it is over
only once it reads that its record is gone or evicted (C9, I7).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from random import Random
from typing import Protocol

import msgspec

from domicile.config import Settings
from domicile.control.agree import NO_TYPES, Calls, agree, check_protocols
from domicile.control.registration import Leased, Registration, Unleased
from domicile.core.ids import ShardKey, client_key, node_key
from domicile.core.lease import FOREVER_S, Lease, LeaseState
from domicile.core.members import Fact, Members, Unreadable
from domicile.core.records import (
    ClientRecord,
    NodeRecord,
    TypeRecord,
    decode_record,
    encode_record,
)
from domicile.core.shardmap import Entry, ShardMap
from domicile.core.txn import (
    Absent,
    At,
    Changes,
    Committed,
    Conflict,
    Item,
    Listing,
    Put,
    Unknown,
)
from domicile.errors import ConfigError, StoreRewound, StoreUnavailable, WatchCompacted
from domicile.ports.clock import Clock, Timer
from domicile.ports.meter import Meter
from domicile.ports.store import Store

JITTER = 0.1


class MemberEvents(Protocol):
    """What the owner of a member hears. Called on its event loop; must not block.

    Of each listing or change the facts come first, then the raw form. Nothing but the end of
    the current call follows `on_fenced`.
    """

    def on_fact(self, fact: Fact) -> None:
        """Something in the cluster is new."""
        ...

    def on_listing(self, listing: Listing) -> None:
        """The whole store, at the start and after a gap in the watch."""
        ...

    def on_changes(self, changes: Changes) -> None:
        """What one commit changed."""
        ...

    def on_renewed(self) -> None:
        """The lease now runs until `Member.lease.valid_until`."""
        ...

    def on_fenced(self, reason: str) -> None:
        """This incarnation is over: stop everything, then `revoke` (L4, L5). Called once."""
        ...


class Member:
    """One incarnation of a node or client. `join`, then `run` until fenced or left."""

    def __init__(
        self,
        *,
        store: Store,
        clock: Clock,
        meter: Meter,
        settings: Settings,
        random: Random,
        record: NodeRecord | ClientRecord,
        shards: Mapping[str, int],
        types: Mapping[str, TypeRecord] = NO_TYPES,
        protocols: tuple[int, int] = (1, 1),
        events: MemberEvents,
    ) -> None:
        self._store = store
        self._clock = clock
        self._meter = meter
        self._settings = settings
        self._random = random
        self._record: NodeRecord | ClientRecord = record
        self._shards, self._types, self._protocols = shards, types, protocols
        self._events = events
        node = isinstance(record, NodeRecord)
        make_key = node_key if node else client_key
        self._key = make_key(record.incarnation)
        self.incarnation = record.incarnation
        self.lease_id = f"{'node' if node else 'client'}-{record.incarnation}"
        self.lease = Lease(settings.margin_s, settings.stop_budget_s)
        self.members = Members()
        self._own_revision = 0
        self._sent_at = 0.0
        self._may_stand = False
        self._unsure = False
        """Whether a write of the own record may still arrive, however late (S1)."""
        self.rewound = False
        """Whether it was fenced because the store lost commits (S5)."""
        self.asked = False
        """Whether the store was ever asked for a lease, so that it may have one."""
        self._over = asyncio.Event()
        self._calls = Calls(store, settings.op_timeout_s, random, self._over)
        # A client is home to nothing, and a dead one must not stay in the store for good.
        self._endless = settings.fencing == "health"
        self._registration: Registration = (
            Unleased(self._calls)
            if node and self._endless
            else Leased(self._calls, self.lease_id, settings.ttl_s)
        )
        self._deadline: Timer | None = None
        self._told = False

    @property
    def record(self) -> NodeRecord | ClientRecord:
        """The own record as last stored; its `ttl_s` is the granted one (C5)."""
        return self._record

    @property
    def map(self) -> ShardMap:
        """Who is home to which shard, as far as known here."""
        return self.members.map

    @property
    def revision(self) -> int:
        """The store revision up to which everything was seen."""
        return self.members.revision

    # Standing

    def guard(self) -> bool:
        """Whether this incarnation may act now; the first time it may not, it is fenced (L3)."""
        now = self._clock.now()
        if self.lease.valid(now):
            return True
        self._meter.count("guard.refused")
        if self.lease.check(now) is LeaseState.FENCED:
            self._fenced()
        return False

    def fence(self, reason: str) -> None:
        """End this incarnation now (L5). Does nothing if it is fenced or has left already."""
        self.lease.refused(self._clock.now(), reason)
        if self.lease.state is LeaseState.FENCED:
            self._fenced()

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
        self._events.on_renewed()

    def _watch_deadline(self) -> None:
        # A timer alone is late after a pause; it only serves a process that is idle (L3).
        self._deadline = None
        if self.guard() and self.lease.valid_until < FOREVER_S:
            self._deadline = self._clock.call_at(self.lease.valid_until, self._watch_deadline)

    # Joining and leaving

    async def join(self, listen: Callable[[], Awaitable[str]] | None = None) -> bool:
        """Read the store, agree on `config`, register. Waits out outages of the store.

        `listen` opens a node's port before it registers, and gives its address (SM-02).
        False if the incarnation was fenced before it stood: begin again with a new one.
        Raises `ConfigError` if this process does not fit the cluster.
        """
        try:
            await self._relist()
            self._check_roles()
            check_protocols(self.members, self._protocols)
            await agree(self._calls, self.members, self._shards, self._types)
            if listen is not None and isinstance(self._record, NodeRecord):
                self._record = msgspec.structs.replace(self._record, address=await listen())
            failures = 0
            while not self._over.is_set() and not await self._register():
                failures += 1
                await self._calls.pause(failures)
            if not self._over.is_set():
                self._watch_deadline()
            if failures:
                # The store may have gone back meanwhile, and another caller in this process be
                # the one that was told.
                await self._relist()
        except StoreRewound as error:
            self._rewound(error)
        except StoreUnavailable:
            # Only once fenced or left: until then `Calls.read` tries again.
            pass
        return not self._over.is_set()

    def _check_roles(self) -> None:
        """SM-28: nobody takes the node id of a running node to serve other roles."""
        mine = self._record
        other = self.members.clash(mine) if isinstance(mine, NodeRecord) else None
        if other is not None and isinstance(mine, NodeRecord):
            raise ConfigError(
                f"node id {mine.node!r} is registered with {_roles(other)} at {other.address}, "
                f"this process has {_roles(mine)}: start it under another node_id, or stop the "
                "other one first (if it has died, its record goes soon or by `declare-dead`)"
            )

    async def _register(self) -> bool:
        """One try; True once the record stands and the lease is held."""
        sent_at = self._clock.now()
        try:
            if not self._may_stand:
                self.asked = True
                ttl_s = await self._registration.take()
            else:
                # The record may have stood and expired; peers then count this incarnation as
                # gone for good, so it must not stand up again (A5).
                renewed = await self._registration.keep()
                if renewed is None:
                    self.fence("the lease ran out before registration was confirmed")
                    return False
                ttl_s = renewed
            record = self._record
            if isinstance(record, NodeRecord):
                record_ttl_s = self._registration.recorded(ttl_s)
                record = msgspec.structs.replace(record, ttl_s=record_ttl_s)
            put = Put(self._key, encode_record(record), self._registration.lease)
            outcome = await self._calls.commit(Absent(self._key), put)
            self._may_stand = self._may_stand or not isinstance(outcome, Conflict)
            self._unsure = self._unsure or isinstance(outcome, Unknown)
            if isinstance(outcome, Committed):
                self._stands(record, outcome.revision)
            else:
                item = await self._calls.bounded(self._store.get(self._key))
                if item is None or not self._check_own(item):
                    return False
                self._may_stand = True
        except StoreUnavailable:
            return False
        ttl_s = self._count_ttl(ttl_s)
        self.lease.granted(sent_at, ttl_s, self._clock.now())
        if self.lease.state is not LeaseState.HELD:
            return False
        self._sent_at = sent_at
        self._renewed(sent_at, ttl_s)
        return True

    async def set_status(self, status: str) -> bool:
        """Rewrite the own record's status under the same lease.

        False if fenced meanwhile, or if the store took longer than a drain may (I6).
        """
        assert isinstance(self._record, NodeRecord), "a client's record has no status"
        assert self._own_revision, "join first"
        try:
            async with asyncio.timeout(self._settings.drain_deadline_s):
                return await self._rewrite(status)
        except TimeoutError:
            return False
        except StoreUnavailable:
            # Only once fenced or left: until then `Calls.read` tries again.
            return False
        except StoreRewound as error:
            self._rewound(error)
            return False

    async def _rewrite(self, status: str) -> bool:
        failures = 0
        while not self._over.is_set():
            record = self._record
            assert isinstance(record, NodeRecord)
            if record.status == status:
                return True
            record = msgspec.structs.replace(record, status=status)
            put = Put(self._key, encode_record(record), self._registration.lease)
            outcome = await self._calls.commit(At(self._key, self._own_revision), put)
            if isinstance(outcome, Committed):
                self._stands(record, outcome.revision)
                return True
            failures += 1
            await self._calls.pause(failures)
            self._check_own(await self._calls.read(lambda: self._store.get(self._key)))
        return False

    async def leave(self) -> bool:
        """Give the lease back, once everything has stopped (H14); as `revoke` otherwise."""
        if self.lease.state in (LeaseState.UNREGISTERED, LeaseState.HELD):
            # The guard closes before the store can free the shards.
            self.lease.left(self._clock.now())
            self._finish()
            self._meter.event("ended", inc=self.incarnation)
        return await self.revoke()

    async def revoke(self) -> bool:
        """Have the own record gone, after a fence and after everything stopped (L5).

        False if the store did not answer in a few tries. A lease then runs out by itself; without
        one others must learn that this incarnation is dead (`Health.let_go`).
        """
        assert self.lease.state is not LeaseState.HELD, "revoking before the stop makes two homes"
        self.lease.left(self._clock.now())
        self._finish()
        return await self._registration.remove(self._key, self._own_revision, self._unsure)

    # Running

    async def run(self) -> None:
        """Renew the lease and follow the store until fenced or left."""
        async with asyncio.TaskGroup() as group:
            renewal = group.create_task(self._keep_renewing(), name=f"renew {self.lease_id}")
            watch = group.create_task(self._keep_watching(), name=f"watch {self.lease_id}")
            await self._over.wait()
            renewal.cancel()
            watch.cancel()

    async def _keep_renewing(self) -> None:
        renew_s = self._settings.renew_s
        due = self._sent_at + renew_s * self._jitter()
        while not self._over.is_set():
            await asyncio.sleep(max(0.0, due - self._clock.now()))
            if not self.guard():
                return
            sent_at = self._clock.now()
            if await self._renew(sent_at):
                due = sent_at + renew_s * self._jitter()
            else:
                self._meter.count("lease.unacknowledged")
                due = sent_at + renew_s / 4

    def _jitter(self) -> float:
        return self._random.uniform(1 - JITTER, 1 + JITTER)

    async def _renew(self, sent_at: float) -> bool:
        """One renewal; True if it was acknowledged. An unanswered one counts for nothing (L1)."""
        item: Item | None = None
        try:
            async with asyncio.timeout(self._settings.op_timeout_s):
                ttl_s = await self._registration.keep()
                if ttl_s is not None:
                    item = await self._store.get(self._key)
        except (TimeoutError, StoreUnavailable):
            return False
        except StoreRewound as error:
            self._rewound(error)
            return False
        if ttl_s is None:
            self.fence("the store refused the renewal: the lease is gone")
            return False
        if not self._check_own(item):
            return False
        ttl_s = self._count_ttl(ttl_s)
        if self.lease.acknowledged(sent_at, ttl_s, self._clock.now()):
            self._renewed(sent_at, ttl_s)
        self.guard()
        return True

    async def _keep_watching(self) -> None:
        failures = 0
        compacted = False
        while not self._over.is_set():
            try:
                if compacted:
                    known = dict(self.map)
                    listing = await self._calls.bounded(self._store.list(b""))
                    if not self.guard():
                        return
                    self._take_listing(listing, known)
                    compacted = False
                changes = self._store.watch(b"", self.revision)
                try:
                    async for change in changes:
                        failures = 0
                        self._take_changes(change)
                        if self._over.is_set():
                            return
                finally:
                    await _close(changes)
            except WatchCompacted:
                compacted = True
            except StoreUnavailable:
                self._meter.count("store.watch_lost")
            except StoreRewound as error:
                self._rewound(error)
                return
            failures += 1
            await self._calls.pause(failures)

    # What the store says

    async def _relist(self) -> None:
        known = dict(self.map)
        self._take_listing(await self._calls.read(lambda: self._store.list(b"")), known)

    def _take_listing(self, listing: Listing, known: Mapping[ShardKey, Entry]) -> None:
        if listing.revision < self._calls.newest:
            raise StoreRewound(
                f"listed revision {listing.revision} after {self._calls.newest} had been seen"
            )
        contradiction = self.members.contradiction(listing, known)
        if contradiction:
            raise StoreRewound(contradiction)
        self._calls.newest = listing.revision
        if self._own_revision:
            own = (item for item in listing.items if item.key == self._key)
            if not self._check_own(next(own, None)):
                return
        self._deliver(self.members.relist(listing))
        if not self._over.is_set():
            self._events.on_listing(listing)

    def _take_changes(self, changes: Changes) -> None:
        if not self.guard():
            return
        if changes.revision <= self.revision:
            if changes.revision < self.revision:
                raise StoreRewound(
                    f"watched revision {changes.revision} after {self.revision} had been seen"
                )
            return
        self._calls.newest = max(self._calls.newest, changes.revision)
        for change in changes.changes:
            if change.key == self._key and self._own(change.item) is None:
                return
        self._deliver(self.members.apply(changes))
        if not self._over.is_set():
            self._events.on_changes(changes)

    def _deliver(self, facts: list[Fact]) -> None:
        for fact in facts:
            if self._over.is_set():
                return
            if isinstance(fact, Unreadable):
                self._meter.count("store.unreadable")
            self._events.on_fact(fact)

    def _check_own(self, item: Item | None) -> bool:
        """Take the own record as just read; False, and fenced, if it no longer stands (L1)."""
        record = self._own(item)
        if item is None or record is None:
            return False
        if item.revision < self._own_revision:
            error = f"own record is of {item.revision}, it was written at {self._own_revision}"
            self._rewound(StoreRewound(error))
            return False
        self._stands(record, item.revision)
        return True

    def _own(self, item: Item | None) -> NodeRecord | ClientRecord | None:
        if item is None:
            self.fence("the own record is gone")
            return None
        try:
            if isinstance(self._record, ClientRecord):
                return decode_record(item.value, ClientRecord)
            record = decode_record(item.value, NodeRecord)
        except msgspec.MsgspecError as error:
            self.fence(f"the own record cannot be read: {error}")
            return None
        if record.status == "evicted":
            self.fence("evicted by the leader")
            return None
        return record

    def _stands(self, record: NodeRecord | ClientRecord, revision: int) -> None:
        if revision >= self._own_revision:
            self._record, self._own_revision = record, revision
            self._calls.newest = max(self._calls.newest, revision)

    def _count_ttl(self, ttl_s: float) -> float:
        # A leader waits for the ttl in the record before it removes an evicted node (C5), so a
        # store that extends a lease beyond that (S2) must not lengthen the validity here.
        if self._endless:
            return FOREVER_S
        record = self._record
        return min(ttl_s, record.ttl_s) if isinstance(record, NodeRecord) else ttl_s

    def _rewound(self, error: StoreRewound) -> None:
        self.rewound = True
        self.fence(f"store rewound: {error}")


def _roles(record: NodeRecord) -> str:
    names = ", ".join(map(repr, record.roles))
    return f"role {names}" if len(record.roles) == 1 else f"roles {names}" if names else "no roles"


async def _close(watch: AsyncIterator[Changes]) -> None:
    # The port asks for no more than an iterator; one that holds a connection may offer this.
    close: Callable[[], Awaitable[None]] | None = getattr(watch, "aclose", None)
    if close is not None:
        await close()
