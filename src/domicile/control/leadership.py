"""One leadership: a coordinator, its leader lease, and the tasks that carry out its effects.

Made by the elected control plane once the leader key is won, and thrown away with everything it
knows when it ends (C1). It must never act past the deadline of its lease (L1), nor after the guard
said no.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from random import Random
from typing import Any

from domicile.concurrency.task_set import TaskSet
from domicile.control.strategy_runner import StrategyRunner
from domicile.core.coordinator.custom_strategy import CUSTOM
from domicile.core.coordinator.events import (
    AskProbe,
    AskStrategy,
    Changed,
    Commit,
    CommitDone,
    CoordinatorEffect,
    CoordinatorEvent,
    Listed,
    ReadBack,
    Reread,
    Resign,
    StoreReturned,
    StrategyAnswered,
    Tell,
    Tick,
)
from domicile.core.coordinator.machine import Coordinator
from domicile.core.ids import Incarnation
from domicile.core.lease.keeper import LeaseKeeper, Renewal
from domicile.core.lease.lease import Lease, LeaseState
from domicile.core.machines import Arm
from domicile.core.state.txn import Changes, Listing, Outcome, Unknown
from domicile.core.wire import Ping, Probe, Told, ToOwner
from domicile.errors import StoreError
from domicile.membership.store_calls import StoreCalls
from domicile.membership.task_renewer import keep_renewing
from domicile.ports.clock import Clock, Timer
from domicile.ports.meter import Meter
from domicile.settings import Settings

log = logging.getLogger("domicile")

PING_S = 1.0
"""How often a leader asks every node whether it is there (C7), unless silence means something
sooner."""

RETRY_S = 0.05
"""How soon a store call that failed is tried again."""

FAILED = "it failed"
"""Why a leadership ended that should not be tried again soon."""

BACKLOG = 10_000
"""I6: commits that may pass while the first listing is under way."""


class Leadership:
    """Leads from construction until `end`. `run` owns all of its tasks."""

    def __init__(
        self,
        *,
        calls: StoreCalls,
        clock: Clock,
        meter: Meter,
        settings: Settings,
        random: Random,
        me: Incarnation,
        guard: Callable[[], bool],
        send: Callable[[Incarnation, ToOwner], None],
        nodes: Callable[[], Sequence[Incarnation]],
        strategy: str | StrategyRunner,
        lease: Lease,
        lease_id: str,
        revision: int,
    ) -> None:
        self._calls, self._clock, self._meter = calls, clock, meter
        self._settings, self._random, self._me = settings, random, me
        self._guard, self._send, self._nodes = guard, send, nodes
        self._lease, self._lease_id = lease, lease_id
        self._advisor = None if isinstance(strategy, str) else strategy
        self._coordinator: Coordinator | None = Coordinator(
            me, revision, settings, random, strategy if isinstance(strategy, str) else CUSTOM
        )
        self.reason = ""
        """Why it ended."""
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: TaskSet[None] | None = None
        self._tick: Timer | None = None
        self._deadline: Timer | None = None
        self._inbox: deque[CoordinatorEvent] = deque()
        self._stepping = False
        self._backlog: list[Changes] | None = []
        self._pings = 0
        meter.event("leading", inc=me, revision=revision)

    def check(self) -> bool:
        """Whether this leadership still stands; compared on every use, never by a timer alone."""
        if self._coordinator is None:
            return False
        if not self._guard():
            self.end("fenced")
            return False
        if self._lease.check(self._clock.now()) is not LeaseState.HELD:
            self.end("the leader lease was not renewed in time")
            return False
        return True

    @property
    def step(self) -> str:
        """What the coordinator does now."""
        return "over" if self._coordinator is None else self._coordinator.doing

    def end(self, reason: str) -> None:
        """Lead no longer, from this moment; what was known is discarded (C1)."""
        if self._coordinator is None:
            return
        self._coordinator = None
        self.reason = reason
        self._inbox.clear()
        self._backlog = None
        for timer in (self._tick, self._deadline):
            if timer is not None:
                timer.cancel()
        if not self._over.done():
            self._over.set_result(None)
        self._meter.count("leader.ended")
        self._meter.event("deposed", inc=self._me, reason=reason)

    async def run(self) -> None:
        """Lead until it ends."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks: TaskSet[None] = TaskSet("domicile-leader", group)
                self._tasks = tasks
                self._spawn(self._list())
                self._spawn(self._keep_renewing())
                self._spawn(self._keep_pinging())
                self._on_deadline()
                try:
                    await self._over
                finally:
                    tasks.cancel()
        finally:
            self.end("stopped")

    # events in

    def on_listing(self, listing: Listing) -> None:
        """The member listed the store again."""
        if self._backlog is None:
            self.feed(Listed(listing))

    def on_changes(self, changes: Changes) -> None:
        """The watch brought a commit; before the first listing it waits for that (C2)."""
        if self._backlog is None:
            self.feed(Changed(changes))
            return
        self._backlog.append(changes)
        if len(self._backlog) > BACKLOG:
            self.end("the store changes faster than it can be listed")

    def feed(self, event: CoordinatorEvent) -> None:
        """Step the coordinator; what its effects cause in turn comes after them."""
        self._inbox.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._inbox:
                event = self._inbox.popleft()
                if not self.check() or self._coordinator is None:
                    self._inbox.clear()
                    return
                for effect in self._step(self._coordinator, event):
                    self._perform(effect)
        finally:
            self._stepping = False

    def _step(
        self, coordinator: Coordinator, event: CoordinatorEvent
    ) -> Sequence[CoordinatorEffect]:
        try:
            return coordinator.step(event, self._clock.now())
        except Exception:
            # What breaks a coordinator must not end the node that it runs in, nor the next one's.
            log.exception("the coordinator failed on %s and gives up", type(event).__name__)
            self._meter.count("leader.failed")
            self.end(FAILED)
            return ()

    def ping(self, nodes: Sequence[Incarnation]) -> None:
        """Ask nodes whether they are there."""
        if not self.check():
            return
        self._pings += 1
        for node in nodes:
            if node != self._me:
                self._send(node, Ping(self._pings))

    # effects out

    def _perform(self, effect: CoordinatorEffect) -> None:
        match effect:
            case Commit():
                self._spawn(self._commit(effect))
            case ReadBack():
                self._spawn(self._read_back(effect))
            case Tell():
                self._tell(effect)
            case AskProbe(voter, node):
                self._send(voter, Probe(node))
            case AskStrategy():
                self._spawn(self._consult(effect))
            case Arm(at):
                if self._tick is not None:
                    self._tick.cancel()
                self._tick = self._clock.call_at(at, lambda: self.feed(Tick()))
            case Resign(reason):
                self.end(reason)

    def _tell(self, tell: Tell) -> None:
        if not self.check():
            return
        (role, shard), entry = tell.shard, tell.entry
        self._meter.event(
            "told",
            inc=self._me,
            to=tell.to,
            role=role,
            shard=shard,
            owner=entry.owner,
            epoch=entry.epoch,
            state=entry.state,
            change=entry.change,
        )
        self._send(tell.to, Told(role, shard, entry))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """A child of `run`. Bounded: one commit or read per block, and three loops (H12)."""
        if self._tasks is None or self._over.done():
            work.close()
            return
        self._tasks.spawn(work)

    # tasks

    async def _commit(self, commit: Commit) -> None:
        if not self.check():
            return
        outcome: Outcome = Unknown()
        try:
            call = self._calls.store.commit(commit.conditions, commit.writes)
            outcome = await self._calls.bounded(call)
        except StoreError:
            self._meter.count("leader.commit_unknown")
        self.feed(CommitDone(commit.txn, outcome))

    async def _read_back(self, read: ReadBack) -> None:
        while self.check():
            try:
                item = await self._calls.bounded(self._calls.store.get(read.key))
            except StoreError:
                await asyncio.sleep(self._retry_s())
                continue
            self.feed(Reread(read.txn, item))
            return

    async def _consult(self, consult: AskStrategy) -> None:
        assert self._advisor is not None, "only a user's function is consulted"
        self.feed(StrategyAnswered(consult.situation, await self._advisor.ask(consult.situation)))

    async def _list(self) -> None:
        """C2: everything at one revision, then what the watch brought after it."""
        while self.check():
            try:
                listing = await self._calls.bounded(self._calls.store.list(b""))
            except StoreError:
                await asyncio.sleep(self._retry_s())
                continue
            backlog, self._backlog = self._backlog or [], None
            self.feed(Listed(listing))
            for changes in backlog:
                self.feed(Changed(changes))
            return

    async def _keep_renewing(self) -> None:
        keeper = LeaseKeeper(
            self._settings.renew_s, self._random, self._clock.now(), from_answer=True
        )
        renew = partial(self._renew, keeper)
        await keep_renewing(keeper, self._clock, stands=self.check, renew=renew)

    async def _renew(self, keeper: LeaseKeeper, sent_at: float) -> Renewal:
        """Keep the leader lease; only acknowledged renewals count, from when they were sent."""
        try:
            ttl_s = await self._calls.bounded(self._calls.store.renew(self._lease_id))
        except StoreError:
            return Renewal.UNANSWERED
        if ttl_s is None:
            why = "the leader lease is gone"
            self._lease.refused(self._clock.now(), why)
            self.end(why)
            return Renewal.REFUSED
        # The old deadline is compared first: a renewal that returns past it is too late.
        if self.check():
            self._lease.acknowledged(sent_at, ttl_s, self._clock.now())
        away_since = keeper.away_since
        if away_since is not None and sent_at - away_since >= self._settings.settle_s:
            self.feed(StoreReturned())
        return Renewal.ACKNOWLEDGED

    async def _keep_pinging(self) -> None:
        # Several pings in the shortest silence that has consequences (C6, C7).
        pause_s = min(PING_S, self._settings.evict_after_s / 4, self._settings.heard_s / 2)
        while self.check():
            self.ping(self._nodes())
            await asyncio.sleep(pause_s)

    def _on_deadline(self) -> None:
        if self.check():
            self._deadline = self._clock.call_at(self._lease.valid_until, self._on_deadline)

    def _retry_s(self) -> float:
        return RETRY_S * (1 + self._random.random())
