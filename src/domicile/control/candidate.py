"""A candidate for the leader key: it campaigns when the key is absent, and leads once it has won.

Made by the elected control plane, which feeds it what the watch and the links bring and owns
`run()`. When to try is decided by `core.coordinator.election`; a `Leadership` does the leading. It
must never decide about shards itself, nor act past the validity of its own leader lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from random import Random

from domicile.control.driver import FAILED
from domicile.control.leadership import Leadership
from domicile.control.strategy_runner import StrategyRunner
from domicile.core.coordinator.election import RANK_STEP_S, campaign_at, eligible
from domicile.core.coordinator.events import ClusterEvent
from domicile.core.coordinator.eviction import UNREACHED
from domicile.core.ids import Incarnation
from domicile.core.lease.lease import Lease
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.keys import LEADER_KEY, KeyFamily, classify, node_key
from domicile.core.state.records import LeaderRecord, encode_record
from domicile.core.state.txn import (
    Absent,
    Changes,
    Committed,
    Listing,
    Present,
    Put,
    Unknown,
)
from domicile.core.wire import ToOwner
from domicile.errors import StoreError
from domicile.membership.store_calls import StoreCalls
from domicile.ports.clock import Clock
from domicile.ports.meter import Meter
from domicile.ports.store import Store
from domicile.settings import Settings
from domicile.taglog import TaggedLog

log = TaggedLog()

REREAD_S = 0.05
"""How soon a read that failed is tried again."""

STAND_BACK_S = 1.0
"""How long others may take to see that a leader gave up, beside their ranks (C6)."""


class Candidate:
    """One incarnation's part in the election, and its leaderships one after the other."""

    def __init__(
        self,
        *,
        store: Store,
        clock: Clock,
        meter: Meter,
        settings: Settings,
        random: Random,
        me: Incarnation,
        node_id: str,
        view: ClusterView,
        guard: Callable[[], bool],
        send: Callable[[Incarnation, ToOwner], None],
        candidate: bool,
        strategy: str | StrategyRunner = "least_shards",
    ) -> None:
        self._calls = StoreCalls(store, settings.op_timeout_s)
        self._clock, self._meter = clock, meter
        self._settings, self._random = settings, random
        self._me, self._node_id, self._guard, self._send = me, node_id, guard, send
        self._campaigns, self._aside = candidate, False
        self._strategy = strategy
        self._view = view
        self._absent_since: float | None = None
        self._retry_at = float("-inf")
        self._lease_id = ""
        self.owed: dict[str, None] = {}
        """Leader leases that the store was not told are over."""
        self.leadership: Leadership | None = None
        """The present term, if this process won the leader key; it may have to end any moment."""
        self._waiter: asyncio.Future[None] | None = None

    @property
    def leading(self) -> bool:
        """Whether this process is the acting coordinator now."""
        return self.leadership is not None and self.leadership.check()

    @property
    def status(self) -> str:
        """What this process does as a coordinator now, for people and for tallies."""
        return "following" if self.leadership is None else self.leadership.doing

    # fed by the plane

    def on_listing(self, listing: Listing) -> None:
        """The member listed the store, at first or again."""
        self._see_leader()
        if self.leadership is not None:
            self.leadership.on_listing(listing)
        self._wake()

    def on_changes(self, changes: Changes) -> None:
        """The member's watch brought a commit."""
        families = [classify(change.key) for change in changes.changes]
        if KeyFamily.LEADER in families:
            self._see_leader()
        if self.leadership is not None:
            if KeyFamily.NODE in families:
                self._greet(self.leadership, changes.revision)
            self.leadership.on_changes(changes)
        if KeyFamily.LEADER in families or KeyFamily.NODE in families:
            self._wake()

    def feed(self, event: ClusterEvent) -> None:
        """Something for the acting coordinator; nothing happens if this process is none."""
        if self.leadership is not None:
            self.leadership.feed(event)

    def stop_campaigning(self) -> None:
        """Lead on if this node leads, but do not campaign again."""
        self._campaigns = False
        self._wake()

    def stand_aside(self) -> None:
        """This node is about to leave (H14): it leads on if it does, and tries again only while
        no node stays that could. If all leave at once, one must still lead until all let go."""
        self._aside = True
        self._wake()

    async def resign(self) -> None:
        """Stop leading and give the leader key back (H14). Harmless if it was not held."""
        self.stop_campaigning()
        if self.leadership is not None:
            self.leadership.end("resigned")
        await self._drop_lease()

    # the owned task

    async def run(self) -> None:
        """Campaign and lead until cancelled, fenced, or done with campaigning.

        Start it once the node has joined: to a guard that says no it ends at once (L5).
        """
        while await self._turn():
            leadership = await self._campaign()
            if leadership is not None:
                self.leadership = leadership
                log.info("coordinating from now on", extra={"node": self._node_id})
                try:
                    await leadership.run()
                finally:
                    self.leadership = None
                    if leadership.reason in (UNREACHED, FAILED):
                        # Long enough for every other candidate to try first (C1), no longer: if
                        # all of them are silent, a cluster without any leader is worse (C9).
                        others_s = RANK_STEP_S * len(self._candidates())
                        self._retry_at = self._clock.now() + STAND_BACK_S + others_s
                    log.info("no longer coordinating", extra={"node": self._node_id})
            await self._drop_lease()

    async def _turn(self) -> bool:
        """Wait until this node may campaign; False if it never will again."""
        while self._campaigns and self._guard():
            at = self._campaign_at()
            if at is not None and at <= self._clock.now():
                return True
            await self._wait(at)
        return False

    def _campaign_at(self) -> float | None:
        at = campaign_at(self._me, self._candidates(), self._absent_since)
        return None if at is None else max(at, self._retry_at)

    def _candidates(self) -> dict[Incarnation, int]:
        role = self._settings.coordinator_role
        staying = {
            node: self._view.created[node]
            for node, record in self._view.nodes.items()
            if eligible(record, role) and not (self._aside and node == self._me)
        }
        if staying or not self._aside:
            return staying
        return {
            node: self._view.created[node]
            for node, record in self._view.nodes.items()
            if eligible(record, role, leaving=True)
        }

    async def _campaign(self) -> Leadership | None:
        """Try once for the leader key; a leadership if it was won."""
        now = self._clock.now()
        self._retry_at = now + RANK_STEP_S * (1 + self._random.random())
        self._lease_id = f"leader-{self._me}-{self._random.getrandbits(64):016x}"
        try:
            grant = self._calls.store.grant(self._lease_id, self._settings.ttl_s)
            ttl_s = await self._calls.bounded(grant)
        except StoreError:
            return None
        lease = Lease(self._settings.margin_s, stop_budget_s=0.0)
        lease.granted(now, ttl_s, self._clock.now())
        revision = await self._take_key(lease)
        if revision == 0 or not self._campaigns or not self._guard():
            return None
        return Leadership(
            calls=self._calls,
            clock=self._clock,
            meter=self._meter,
            settings=self._settings,
            random=self._random,
            me=self._me,
            guard=self._guard,
            send=self._send,
            nodes=lambda: tuple(self._view.nodes),
            strategy=self._strategy,
            lease=lease,
            lease_id=self._lease_id,
            revision=revision,
        )

    async def _take_key(self, lease: Lease) -> int:
        """The revision of the leader key if it is ours now, else 0."""
        value = encode_record(LeaderRecord(self._me, self._node_id))
        outcome = await self._calls.try_commit(
            (Absent(LEADER_KEY), Present(node_key(self._me))),
            (Put(LEADER_KEY, value, self._lease_id),),
        )
        if isinstance(outcome, Committed):
            return outcome.revision
        # S1. A commit that lands after this look finds its lease revoked and is refused.
        while isinstance(outcome, Unknown) and lease.valid(self._clock.now()):
            try:
                item = await self._calls.bounded(self._calls.store.get(LEADER_KEY))
            except StoreError:
                await asyncio.sleep(REREAD_S * (1 + self._random.random()))
                continue
            return item.revision if item is not None and item.value == value else 0
        return 0

    async def _drop_lease(self) -> None:
        """Revoke the leader lease, once; if the store is away it is owed."""
        lease_id = self._lease_id
        if not lease_id:
            return
        self.owed[lease_id] = None
        with suppress(StoreError):
            await self._calls.bounded(self._calls.store.revoke(lease_id))
            self.owed.pop(lease_id, None)
        if self._lease_id == lease_id:
            self._lease_id = ""

    # what the watch says

    def _greet(self, leadership: Leadership, revision: int) -> None:
        """Ask nodes that registered at this revision whether they are there (C7)."""
        fresh = [node for node, created in self._view.created.items() if created == revision]
        if fresh:
            leadership.ping(fresh)

    def _see_leader(self) -> None:
        if self._view.leader_revision:
            self._absent_since = None
        elif self._absent_since is None:
            self._absent_since = self._clock.now()

    async def _wait(self, at: float | None) -> None:
        """Until something changed or a time has come."""
        self._waiter = asyncio.get_running_loop().create_future()
        timer = None if at is None else self._clock.call_at(at, self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
