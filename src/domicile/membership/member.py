"""One incarnation as a member of the cluster: registration, renewal, and its view of the store.

A node or client owns one `Member` per incarnation, runs its `run()` as a task, and asks `guard()`
before every turn, resumption and flush (L3). After a fence a member must never renew, register or
act again: a fence ends the incarnation (L5). What it sees in the store goes to the owner's
`MemberEvents`, in the store's order, from within the watch.

Under `fencing = "health"` it has no deadline and continues during a store outage. It ends only when
it reads that its record is gone or evicted (C9, I7).

If the store can be called from any thread, the thread renewer renews for a node. So a node with a
blocked loop keeps its shards for a limited time (DX-10).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from random import Random

from domicile.core.ids import ShardKey
from domicile.core.lease.keeper import LeaseKeeper, Renewal
from domicile.core.lease.lease import LeaseState
from domicile.core.state.agreement import NO_JOURNALS
from domicile.core.state.cluster_view import ClusterView, Unreadable, ViewChange
from domicile.core.state.records import TypeRecord
from domicile.core.state.shardmap import Entry, ShardMap
from domicile.core.state.txn import (
    Absent,
    At,
    Changes,
    Committed,
    Conflict,
    Listing,
    Put,
    Unknown,
)
from domicile.errors import StoreRewound, StoreUnavailable, WatchCompacted
from domicile.membership.config_agreement import (
    NO_TYPES,
    agree_on_config,
    check_moved,
    check_protocols,
)
from domicile.membership.lease_holder import LeaseHolder, MemberEvents
from domicile.membership.record_kinds import R, RecordKind
from domicile.membership.registration import Leased, Registration, Unleased
from domicile.membership.task_renewer import keep_renewing
from domicile.membership.thread_renewer import ThreadRenewer
from domicile.ports.clock import Clock
from domicile.ports.meter import Meter
from domicile.ports.store import Kept, OffersThreads, Store
from domicile.settings import Settings

PAUSE_CHANGES = 4
"""Changed keys after which the watch lets the event loop turn: a few milliseconds of CPU time."""


class Member(LeaseHolder[R]):
    """One incarnation of a node, a client or another holder of a record under a lease.

    `join`, then `run` until fenced or left. `kind` says what differs between kinds of records.

    `turned_at` says when the event loop last turned; without it the loop itself renews. `journals`
    compares this process's journal with what the store knows, and says which history each role has.
    """

    def __init__(
        self,
        *,
        store: Store,
        clock: Clock,
        meter: Meter,
        settings: Settings,
        random: Random,
        record: R,
        kind: RecordKind[R],
        shards: Mapping[str, int],
        types: Mapping[str, TypeRecord] = NO_TYPES,
        protocols: tuple[int, int] = (1, 1),
        tokens: tuple[str, ...] = (),
        events: MemberEvents,
        turned_at: Callable[[], float] | None = None,
        journals: Callable[[ClusterView], Awaitable[Mapping[str, str]]] | None = None,
    ) -> None:
        super().__init__(store, clock, meter, settings, random, record, kind, events)
        self._store = store
        self._random = random
        self._shards, self._types, self._protocols = shards, types, protocols
        self._tokens = tokens
        self._turned_at, self._journals = turned_at, journals
        self.members = ClusterView()
        self._sent_at = 0.0
        self._may_stand = False
        self._unsure = False
        """Whether a write of the own record may still reach the store later (S1)."""
        self.asked = False
        """Whether this member ever asked the store for a lease, so that the store may have one."""
        self._registration: Registration = (
            Unleased(self._calls)
            if kind.hosts and self._endless
            else Leased(self._calls, self.lease_id, settings.ttl_s)
        )

    @property
    def map(self) -> ShardMap:
        """The newest entry of each shard that this process knows."""
        return self.members.map

    @property
    def revision(self) -> int:
        """The store revision up to which this member has seen all changes."""
        return self.members.revision

    # Joining and leaving

    def amend(self, change: Callable[[R], R]) -> None:
        """Change the own record before `join`."""
        assert not self._may_stand, "a record that may be stored is changed by `rewrite`"
        self._record = change(self._record)

    async def join(self, listen: Callable[[], Awaitable[str]] | None = None) -> bool:
        """Read the store, agree on `config`, register. Waits while the store is unavailable.

        `listen` opens a node's port before it registers, and returns its address (SM-02). False if
        the incarnation was fenced before it was registered: begin again with a new incarnation.
        Raises `ConfigError` if this process does not fit the cluster.
        """
        try:
            await self._relist()
            self.kind.check(self._record, self.members)
            check_moved(self.members)
            check_protocols(self.members, self._protocols)
            journals = NO_JOURNALS
            if self._journals is not None:
                journals = await self._journals(self.members)
            await agree_on_config(
                self._calls, self.members, self._shards, self._types, self._tokens, journals,
                hosts=self.kind.hosts,
            )  # fmt: skip
            if listen is not None:
                self._record = self.kind.listening(self._record, await listen())
            failures = 0
            while not self._over.is_set() and not await self._register():
                failures += 1
                await self._calls.pause(failures)
            if not self._over.is_set():
                self._watch_deadline()
            if failures:
                # The store may have lost commits meanwhile, and another caller in this process may
                # have got that error.
                await self._relist()
        except StoreRewound as error:
            self.went_back(error)
        except StoreUnavailable:
            # Only once fenced or left: until then `MemberStoreCalls.read` tries again.
            pass
        return not self._over.is_set()

    async def _register(self) -> bool:
        """One try; True if the record is stored and the lease is held."""
        sent_at = self._clock.now()
        try:
            if not self._may_stand:
                self.asked = True
                ttl_s = await self._registration.take()
            else:
                # The record may have been stored and have expired. Peers then take this
                # incarnation as ended, so it must not register again (A5).
                renewed = await self._registration.keep()
                if renewed is None:
                    self.fence("the lease ran out before registration was confirmed")
                    return False
                ttl_s = renewed
            record = self.kind.granted(self._record, self._registration.recorded(ttl_s))
            put = Put(self._key, self.kind.encode(record), self._registration.lease)
            outcome = await self._calls.commit(Absent(self._key), put)
            self._may_stand = self._may_stand or not isinstance(outcome, Conflict)
            self._unsure = self._unsure or isinstance(outcome, Unknown)
            if isinstance(outcome, Committed):
                self.stands(record, outcome.revision)
            else:
                floor = self._own_revision
                item = await self._calls.bounded(self._store.get(self._key))
                if item is None or not self._check_own(item, floor):
                    return False
                self._may_stand = True
        except StoreUnavailable as error:
            self._calls.not_written(error)
            return False
        ttl_s = self._count_ttl(ttl_s)
        with self._lock:
            self.lease.granted(sent_at, ttl_s, self._clock.now())
        if self.lease.state is not LeaseState.HELD:
            return False
        self._sent_at = sent_at
        self._renewed(sent_at, ttl_s)
        return True

    async def rewrite(self, change: Callable[[R], R]) -> bool:
        """Change the own record under the same lease; `change` may be applied several times.

        False if fenced meanwhile, or if the store took longer than `drain_deadline_s` (I6).
        """
        assert self._own_revision, "join first"
        try:
            async with asyncio.timeout(self._settings.drain_deadline_s):
                return await self._rewrite(change)
        except TimeoutError:
            return False
        except StoreUnavailable:
            # Only once fenced or left: until then `MemberStoreCalls.read` tries again.
            return False
        except StoreRewound as error:
            self.went_back(error)
            return False

    async def _rewrite(self, change: Callable[[R], R]) -> bool:
        failures = 0
        while not self._over.is_set():
            before, revision = self.own()
            record = change(before)
            if record == before:
                return True
            put = Put(self._key, self.kind.encode(record), self._registration.lease)
            outcome = await self._calls.commit(At(self._key, revision), put)
            if isinstance(outcome, Committed):
                self.stands(record, outcome.revision)
                return True
            failures += 1
            await self._calls.pause(failures)
            floor = self._own_revision
            self._check_own(await self._calls.read(lambda: self._store.get(self._key)), floor)
        return False

    async def leave(self) -> bool:
        """Give the lease back, after everything has stopped (H14). If fenced, only `revoke`."""
        if self.lease.state in (LeaseState.UNREGISTERED, LeaseState.HELD):
            # The guard must refuse before the store can free the shards.
            with self._lock:
                self.lease.left(self._clock.now())
            self._finish()
            self._meter.event("ended", inc=self.incarnation)
        return await self.revoke()

    async def revoke(self) -> bool:
        """Remove the own record, after a fence and after everything stopped (L5).

        False if the store did not answer in a few tries. A lease then expires; without a lease,
        others must learn that this incarnation is dead (`Health.let_go`).
        """
        assert self.lease.state is not LeaseState.HELD, "revoking before the stop makes two homes"
        with self._lock:
            self.lease.left(self._clock.now())
        self._finish()
        return await self._registration.remove(self._key, self._own_revision, self._unsure)

    # Running

    async def run(self) -> None:
        """Renew the lease and follow the store until fenced or left."""
        self._loop = asyncio.get_running_loop()
        beside = self._beside()
        try:
            async with asyncio.TaskGroup() as group:
                tasks: list[asyncio.Task[None]] = []
                if beside is not None:
                    beside.start()
                    courtesy = self._keep_giving_way(beside)
                    tasks.append(group.create_task(courtesy, name=f"courtesy {self.lease_id}"))
                else:
                    renewal = self._keep_renewing()
                    tasks.append(group.create_task(renewal, name=f"renew {self.lease_id}"))
                watch = self._keep_watching()
                tasks.append(group.create_task(watch, name=f"watch {self.lease_id}"))
                await self._over.wait()
                for task in tasks:
                    task.cancel()
        finally:
            # Also after a cancellation: no thread may outlive its member.
            if beside is not None:
                beside.stop()

    def _beside(self) -> ThreadRenewer[R] | None:
        """The thread renewer, if this member can have one."""
        store, turned_at = self._store, self._turned_at
        lease = self._registration.lease
        if lease is None or turned_at is None or not isinstance(store, OffersThreads):
            return None
        side = store.beside()
        if side is None:
            return None
        return ThreadRenewer(
            self, side, clock=self._clock, settings=self._settings, random=self._random,
            lease=lease, key=self._key, sent_at=self._sent_at, turned_at=turned_at,
        )  # fmt: skip

    async def _keep_giving_way(self, beside: ThreadRenewer[R]) -> None:
        """Make sure that a loop which is never idle does not keep the thread from renewing."""
        while not self._over.is_set():
            again_at = beside.give_way()
            await asyncio.sleep(again_at - self._clock.now())

    async def _keep_renewing(self) -> None:
        keeper = LeaseKeeper(self._settings.renew_s, self._random, self._sent_at)
        await keep_renewing(
            keeper, self._clock, stands=lambda: not self._over.is_set(), renew=self._renew
        )

    async def _renew(self, sent_at: float) -> Renewal:
        """One renewal, unless the deadline has passed (L1)."""
        if not self.guard():
            return Renewal.REFUSED
        renewal = await self._ask_to_renew(sent_at)
        if renewal is Renewal.ACKNOWLEDGED:
            self.guard()
        else:
            self._meter.count("lease.unacknowledged")
        return renewal

    async def _ask_to_renew(self, sent_at: float) -> Renewal:
        floor = self._own_revision
        try:
            kept = await self._calls.bounded(self._keep())
        except StoreUnavailable as error:
            self.unanswered(error)
            return Renewal.UNANSWERED
        except StoreRewound as error:
            self.went_back(error)
            return Renewal.REFUSED
        return self.kept(sent_at, kept, floor)

    async def _keep(self) -> Kept:
        """Renew, then read the own record: a renewal counts only if the record exists (L1)."""
        ttl_s = await self._registration.keep()
        return Kept(ttl_s, None if ttl_s is None else await self._store.get(self._key))

    async def _keep_watching(self) -> None:
        failures = taken = 0
        compacted = False
        while not self._over.is_set():
            try:
                if compacted:
                    known, floor = dict(self.map), self._own_revision
                    listing = await self._calls.bounded(self._store.list(b""))
                    if not self.guard():
                        return
                    self._take_listing(listing, known, floor)
                    compacted = False
                changes = self._store.watch(b"", self.revision)
                try:
                    async for change in changes:
                        failures = 0
                        self._take_changes(change)
                        if self._over.is_set():
                            return
                        taken += len(change.changes)
                        if taken >= PAUSE_CHANGES:
                            # The watch may have many more at hand, which other work must not wait
                            # for: a commit of the map is up to 64 shards that open here.
                            taken = 0
                            await asyncio.sleep(0)
                finally:
                    await _close(changes)
            except WatchCompacted:
                compacted = True
            except StoreUnavailable:
                self._meter.count("store.watch_lost")
            except StoreRewound as error:
                self.went_back(error)
                return
            failures += 1
            await self._calls.pause(failures)

    # What the store says

    async def _relist(self) -> None:
        known, floor = dict(self.map), self._own_revision
        self._take_listing(await self._calls.read(lambda: self._store.list(b"")), known, floor)

    def _take_listing(self, listing: Listing, known: Mapping[ShardKey, Entry], floor: int) -> None:
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
            if not self._check_own(next(own, None), floor):
                return
        self._deliver(self.members.load(listing))
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

    def _deliver(self, facts: list[ViewChange]) -> None:
        for fact in facts:
            if self._over.is_set():
                return
            if isinstance(fact, Unreadable):
                self._meter.count("store.unreadable")
            self._events.on_fact(fact)
        if self.members.moved is not None and self.lease.state is LeaseState.HELD:
            # A process that registered while the copy began must not act here any more (I1).
            self.fence("the cluster is being moved to another store")


async def _close(watch: AsyncIterator[Changes]) -> None:
    # The port asks only for an iterator; an iterator that holds a connection may offer this.
    close: Callable[[], Awaitable[None]] | None = getattr(watch, "aclose", None)
    if close is not None:
        await close()
