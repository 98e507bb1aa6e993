"""A thread that renews a process's lease even while its event loop is blocked (L1, DX-10).

Only `domicile.membership.member` makes it, for stores that can be called from any thread. It knows
only when the loop last turned. After `stall_limit_s` without a turn it stops renewing, and the
lease expires. It must never call what belongs to the loop: it passes its results to the
`LeaseHolder`, whose methods take a lock, and the guards read them there (L3).

A busy loop can keep a thread from running. CPython gives the interpreter lock to another thread
after that thread has waited 5 ms without a break. A loop releases the lock for a moment at each
system call. Each release restarts the 5 ms, and the loop takes the lock back before the other
thread is awake. So the loop calls `give_way` if a renewal is late, and pauses until it is done.
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
    notice_s,
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
"""I6: most seconds that a loop waits for the end of this thread, which never waits long itself."""

REST_S = 0.0005
"""Seconds of one pause of the loop."""

AGAIN_S = 0.05
"""Least seconds until the loop checks again."""


class ThreadRenewer(Generic[R]):
    """The thread. `start` it after registration; `stop` ends it and may be called at any time."""

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
        self._notice_s = notice_s(settings.evict_after_s, settings.link_timeout_s)
        self._stalled = False
        self._over = False
        self._rested = 0
        self._rested_for = 0.0
        self._bell = threading.Event()
        # A daemon: a process that did not finish its loop can still exit.
        self._thread = threading.Thread(target=self._run, name=f"domicile-{lease}", daemon=True)

    def start(self) -> None:
        """Renew from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Stop renewing; the thread has ended when this returns. It does not wait for the store."""
        self._over = True
        self._bell.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)

    def give_way(self) -> float:
        """Called by the loop: pause if the renewal is late. Returns when to call this again."""
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
                # This renewal does not count (L1), but the next may succeed. If none does, the
                # lease expires and a new incarnation begins (L5).
                log.exception("a renewal of lease %s failed, it is tried again", self._lease)
                now = self._clock.now()
                self._keeper.ended(Renewal.UNANSWERED, now, now)
                self._wait(self._keeper.due - self._clock.now())

    def _act(self) -> bool:
        """Check the clock and the loop once; False if there is nothing left to renew."""
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
        self._wait(next_look(now, due, valid_until, self._notice_s) - now)
        return True

    def _renew(self, sent_at: float) -> Renewal:
        # The record that is read is compared with the revision at the time of the request: the
        # loop may rewrite the record meanwhile.
        _, floor = self._standing.own()
        try:
            kept = self._answer(self._store.keep(self._lease, self._key))
        except StoreUnavailable as error:
            self._standing.tally("lease.unacknowledged")
            self._standing.unanswered(error)
            return Renewal.UNANSWERED
        except StoreRewound as error:
            self._standing.went_back(error)
            return Renewal.REFUSED
        return self._standing.kept(sent_at, kept, floor)

    def _say_whether_it_turns(self) -> None:
        """C6: tell peers that get no answer whether this node's loop is blocked."""
        record, revision = self._standing.own()
        still = stands_still(self._clock.now(), self._turned_at(), self._notice_s)
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
        # Otherwise the next renewal reads the stored record, and the thread tries again.
        if isinstance(outcome, Committed):
            self._standing.stands(said, outcome.revision)

    def _give_up(self, now: float) -> None:
        if not self._stalled:
            self._stalled = True
            self._standing.tally("lease.stalled")
            log.error(
                "the event loop has not turned for %.1f s (stall_limit_s=%g): lease %s is not "
                "renewed any more and ends in %.1f s. Then a node loses its shards, and a client "
                "what it waits for. Let blocking work run in a thread",
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
        """The store's answer; `StoreUnavailable` if there is none in time, or after `stop`."""
        future.add_done_callback(lambda _: self._bell.set())
        deadline = self._clock.now() + self._settings.op_timeout_s
        while not (future.done() or self._over):
            left_s = deadline - self._clock.now()
            if left_s <= 0:
                break
            self._wait(left_s)
        if not future.done():
            # The outcome of the call is unknown, so the call does not count (L1).
            raise StoreUnavailable("the store did not answer in time; it is asked again")
        return future.result()

    def _wait(self, seconds: float) -> None:
        self._bell.wait(seconds)
        self._bell.clear()
