"""A thread that renews a node's lease beside the event loop (L1, DX-10).

Made by `domicile.membership.member` alone, for stores that can be asked from any thread. Of the
loop it knows one thing: when it last turned. Once that is longer ago than `stall_limit_s` it renews
no more, and the lease runs out. It must never call what belongs to the loop: what it learns goes to
the `LeaseHolder`, whose methods for it take a lock, and from there to the guards (L3).

A busy loop can keep a thread from running. CPython hands its lock over when a thread has waited for
it for 5 ms in one go; a loop that lets go of it for the instant of each system call, several times
in that time, starts the wait anew each time and takes the lock back before the other one is awake.
So the loop calls `give_way` whenever a renewal is late, and rests until it is through.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from random import Random
from typing import Generic, TypeVar

from domicile.core.lease.blocked_loop import (
    LATE_S,
    Step,
    next_look,
    rests,
    stands_still,
    step,
)
from domicile.core.lease.keeper import LeaseKeeper, Renewal
from domicile.core.state.txn import Committed
from domicile.errors import StoreRewound, StoreUnavailable
from domicile.membership.lease_holder import LeaseHolder
from domicile.membership.record_kinds import R
from domicile.ports.clock import Clock
from domicile.ports.store import ThreadedStore
from domicile.settings import Settings

log = logging.getLogger("domicile")

T = TypeVar("T")

STOP_S = 1.0
"""I6: how long a loop waits for the end of a thread that never waits for anything itself."""

REST_S = 0.0005
"""How long one rest of the loop is."""

AGAIN_S = 0.05
"""How soon the loop looks again."""


class ThreadRenewer(Generic[R]):
    """The thread. `start` it once registered; `stop` ends it and may be called at any time."""

    def __init__(
        self,
        standing: LeaseHolder[R],
        store: ThreadedStore,
        *,
        clock: Clock,
        settings: Settings,
        random: Random,
        lease: str,
        key: bytes,
        sent_at: float,
        turned_at: Callable[[], float],
    ) -> None:
        self._standing, self._store = standing, store
        self._clock, self._settings = clock, settings
        self._lease, self._key = lease, key
        self._turned_at = turned_at
        self._keeper = LeaseKeeper(settings.renew_s, random, sent_at)
        self._stalled = False
        self._over = False
        self._rested = 0
        self._rested_for = 0.0
        self._bell = threading.Event()
        # A daemon: a process that never ran its loop to an end can still exit.
        self._thread = threading.Thread(target=self._run, name=f"domicile-{lease}", daemon=True)

    def start(self) -> None:
        """Renew from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Renew no more; the thread is gone when this returns. It waits for no store."""
        self._over = True
        self._bell.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def give_way(self) -> float:
        """For the loop: rest for a moment if the renewal is late. When to ask this again."""
        due = self._keeper.due
        if due != self._rested_for:
            self._rested_for, self._rested = due, 0
        for _ in range(rests(self._clock.now(), due, self._rested)):
            if self._keeper.due != due or self._over:
                break
            self._rested += 1
            time.sleep(REST_S)
        return max(self._keeper.due + LATE_S, self._clock.now() + AGAIN_S)

    def _run(self) -> None:
        while not self._over:
            try:
                if not self._act():
                    return
            except Exception:
                # It counts for nothing (L1), but the next one may go well; if none does, the lease
                # runs out and a new life begins (L5).
                log.exception("a renewal of lease %s failed, it is tried again", self._lease)
                now = self._clock.now()
                self._keeper.ended(Renewal.UNANSWERED, now, now)
                self._wait(self._keeper.due - self._clock.now())

    def _act(self) -> bool:
        """One look at the clock and the loop; False when there is nothing left to renew."""
        settings, now = self._settings, self._clock.now()
        match step(
            now=now,
            turned_at=self._turned_at(),
            due=self._keeper.due,
            valid_until=self._standing.lease.valid_until,
            stall_limit_s=settings.stall_limit_s,
        ):
            case Step.LAPSED:
                self._standing.lapsed()
                return False
            case Step.STALLED:
                self._give_up(now)
            case Step.RENEW:
                self._go_on()
                self._keeper.ended(self._renew(now), now, self._clock.now())
            case Step.WAIT:
                pass
        if not self._over:
            self._say_whether_it_turns()
        now = self._clock.now()
        due, valid_until = self._keeper.due, self._standing.lease.valid_until
        self._wait(next_look(now, due, valid_until, settings.evict_after_s) - now)
        return True

    def _renew(self, sent_at: float) -> Renewal:
        # What a read finds is compared with what was stored when it was asked for: meanwhile the
        # loop may have rewritten the record.
        _, floor = self._standing.own()
        try:
            kept = self._answer(self._store.keep(self._lease, self._key))
        except StoreUnavailable:
            self._standing.tally("lease.unacknowledged")
            return Renewal.UNANSWERED
        except StoreRewound as error:
            self._standing.went_back(error)
            return Renewal.REFUSED
        return self._standing.kept(sent_at, kept, floor)

    def _say_whether_it_turns(self) -> None:
        """C6: peers that get no answer must know whether this node is a hostage or just busy."""
        record, revision = self._standing.own()
        still = stands_still(self._clock.now(), self._turned_at(), self._settings.evict_after_s)
        said = self._standing.kind.stalled(record, still)
        if said == record or self._stalled:
            return
        value = self._standing.kind.encode(said)
        try:
            outcome = self._answer(self._store.rewrite(self._key, revision, value, self._lease))
        except StoreUnavailable:
            return
        except StoreRewound as error:
            self._standing.went_back(error)
            return
        # Otherwise the next renewal reads what is stored, and it is tried again.
        if isinstance(outcome, Committed):
            self._standing.stands(said, outcome.revision)

    def _give_up(self, now: float) -> None:
        if not self._stalled:
            self._stalled = True
            self._standing.tally("lease.stalled")
            log.error(
                "the event loop has not turned for %.1f s (stall_limit_s=%g): lease %s is not "
                "renewed any more and ends in %.1f s, then others take the shards. Let blocking "
                "work run in a thread",
                now - self._turned_at(),
                self._settings.stall_limit_s,
                self._lease,
                self._standing.lease.valid_until - now,
            )

    def _go_on(self) -> None:
        if self._stalled:
            self._stalled = False
            log.warning("the event loop turns again: lease %s is renewed again", self._lease)

    def _answer(self, future: Future[T]) -> T:
        """What the store says in time; `StoreUnavailable` if it says nothing, or at `stop`."""
        future.add_done_callback(lambda _: self._bell.set())
        deadline = self._clock.now() + self._settings.op_timeout_s
        while not (future.done() or self._over):
            left_s = deadline - self._clock.now()
            if left_s <= 0:
                break
            self._wait(left_s)
        if not future.done():
            # It is known to nobody what becomes of it, so it counts for nothing (L1).
            raise StoreUnavailable("the store did not answer in time; it is asked again")
        return future.result()

    def _wait(self, seconds: float) -> None:
        self._bell.wait(seconds)
        self._bell.clear()
