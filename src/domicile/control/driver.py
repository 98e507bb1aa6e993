"""Drives a machine `step(event, now) -> effects` whose decisions are commits to the store.

A subclass is one term of office of one machine: `Leadership` drives a coordinator. The driver owns
what all such machines share: the inbox, the timer, the lease that permits it to act, the listing
and the changes of the store, and the tasks that commit and read. The subclass carries out what only
its own machine wants. A driver must never act past the deadline of its lease (L1), nor after the
guard said no, and what it knew is discarded with it (C1).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from random import Random
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from domicile.concurrency.task_set import TaskSet
from domicile.core.coordinator.events import (
    Changed,
    Commit,
    CommitDone,
    DriverEffect,
    DriverEvent,
    Listed,
    ReadBack,
    Reread,
    Resign,
    StoreReturned,
    Tick,
)
from domicile.core.lease.keeper import LeaseKeeper, Renewal
from domicile.core.lease.lease import Lease, LeaseState
from domicile.core.machines import Arm
from domicile.core.state.txn import Changes, Listing, Outcome, Unknown
from domicile.errors import StoreError
from domicile.membership.store_calls import StoreCalls
from domicile.membership.task_renewer import keep_renewing
from domicile.ports.clock import Clock, Timer
from domicile.ports.meter import Meter
from domicile.settings import Settings

RETRY_S = 0.05
"""How soon a store call that failed is tried again."""

FAILED = "it failed"
"""Why a term ended that should not be tried again soon."""

BACKLOG = 10_000
"""I6: commits that may pass while the first listing is under way."""

E = TypeVar("E")
F = TypeVar("F")
E_contra = TypeVar("E_contra", contravariant=True)
F_co = TypeVar("F_co", covariant=True)


class Machine(Protocol[E_contra, F_co]):
    """A pure machine: its own events and effects beside those that every driver knows."""

    @property
    def doing(self) -> str:
        """What it does now, for people and for tallies."""
        ...

    def step(self, event: E_contra | DriverEvent, now: float) -> Sequence[F_co | DriverEffect]:
        """Take one event; what is to be done, in order."""
        ...


class MachineDriver(ABC, Generic[E, F]):
    """Drives from construction until `end`. `run` owns all of its tasks."""

    _office: ClassVar[str]
    """What it is, in the names of its tasks and in texts about its lease."""

    def __init__(
        self,
        machine: Machine[E, F],
        *,
        calls: StoreCalls,
        clock: Clock,
        meter: Meter,
        settings: Settings,
        random: Random,
        guard: Callable[[], bool],
        lease: Lease,
        lease_id: str,
    ) -> None:
        self._calls, self._clock, self._meter = calls, clock, meter
        self._settings, self._random, self._guard = settings, random, guard
        self._lease, self._lease_id = lease, lease_id
        self._machine: Machine[E, F] | None = machine
        self.reason = ""
        """Why it ended."""
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: TaskSet[None] | None = None
        self._tick: Timer | None = None
        self._deadline: Timer | None = None
        self._inbox: deque[E | DriverEvent] = deque()
        self._stepping = False
        self._backlog: list[Changes] | None = []

    # what a subclass adds

    @abstractmethod
    def _carry_out(self, effect: F) -> None:
        """Do what only this machine wants."""

    def _more_tasks(self) -> Iterable[Coroutine[Any, Any, None]]:
        """What else shall run for as long as it drives."""
        return ()

    @abstractmethod
    def _unanswered(self) -> None:
        """The outcome of a commit is unknown. To be counted."""

    @abstractmethod
    def _failed(self, event: E | DriverEvent) -> None:
        """The machine raised, which is to be logged and counted; the driver ends next."""

    @abstractmethod
    def _ended(self, reason: str) -> None:
        """It has just ended. To be counted."""

    # its right to act

    def check(self) -> bool:
        """Whether it may still act; compared on every use, never by a timer alone."""
        if self._machine is None:
            return False
        if not self._guard():
            self.end("fenced")
            return False
        if self._lease.check(self._clock.now()) is not LeaseState.HELD:
            self.end(f"the {self._office} lease was not renewed in time")
            return False
        return True

    @property
    def doing(self) -> str:
        """What the machine does now."""
        return "over" if self._machine is None else self._machine.doing

    def end(self, reason: str) -> None:
        """Act no longer, from this moment; what was known is discarded (C1)."""
        if self._machine is None:
            return
        self._machine = None
        self.reason = reason
        self._inbox.clear()
        self._backlog = None
        for timer in (self._tick, self._deadline):
            if timer is not None:
                timer.cancel()
        if not self._over.done():
            self._over.set_result(None)
        self._ended(reason)

    async def run(self) -> None:
        """Drive until it ends."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks: TaskSet[None] = TaskSet(f"domicile-{self._office}", group)
                self._tasks = tasks
                for work in (self._list(), self._keep_renewing(), *self._more_tasks()):
                    self._spawn(work)
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

    def feed(self, event: E | DriverEvent) -> None:
        """Step the machine; what its effects cause in turn comes after them."""
        self._inbox.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._inbox:
                event = self._inbox.popleft()
                if not self.check() or self._machine is None:
                    self._inbox.clear()
                    return
                for effect in self._step(self._machine, event):
                    self._perform(effect)
        finally:
            self._stepping = False

    def _step(self, machine: Machine[E, F], event: E | DriverEvent) -> Sequence[F | DriverEffect]:
        try:
            return machine.step(event, self._clock.now())
        except Exception:
            # What breaks a machine must not end the node that it runs in, nor the next one's.
            self._failed(event)
            self.end(FAILED)
            return ()

    # effects out

    def _perform(self, effect: F | DriverEffect) -> None:
        match effect:
            case Commit():
                self._spawn(self._commit(effect))
            case ReadBack():
                self._spawn(self._read_back(effect))
            case Arm(at):
                if self._tick is not None:
                    self._tick.cancel()
                self._tick = self._clock.call_at(at, lambda: self.feed(Tick()))
            case Resign(reason):
                self.end(reason)
            case _:
                self._carry_out(effect)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """A child of `run`. Bounded: one commit or read per block, and a few loops (H12)."""
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
            self._unanswered()
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
        """Keep the lease; only acknowledged renewals count, from when they were sent."""
        try:
            ttl_s = await self._calls.bounded(self._calls.store.renew(self._lease_id))
        except StoreError:
            return Renewal.UNANSWERED
        if ttl_s is None:
            why = f"the {self._office} lease is gone"
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

    def _on_deadline(self) -> None:
        if self.check():
            self._deadline = self._clock.call_at(self._lease.valid_until, self._on_deadline)

    def _retry_s(self) -> float:
        return RETRY_S * (1 + self._random.random())
