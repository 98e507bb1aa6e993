"""Calls to the store that end in time: the only module that puts a deadline on them.

`StoreCalls` is for all callers above the stores: members, leaders, and the store tasks of an
incarnation. `MemberStoreCalls` adds what a member needs to wait until an outage ends. Neither may
ever report a write without an answer as done or as failed: its outcome is unknown (S1).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import TypeVar

from domicile.core.state.txn import Committed, Condition, Outcome, Put, Unknown, Write, singly
from domicile.errors import StoreError, StoreUnavailable
from domicile.ports.store import Store, writes_one_key

BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 0.5
TELLING_FAILURES = 5
"""Failed reads, or failed writes, in a row after which the log says why; it says so once."""

log = logging.getLogger("domicile")

T = TypeVar("T")


class StoreCalls:
    """Store calls of one caller. Each takes at most `op_timeout_s` and fails with `StoreError`."""

    def __init__(self, store: Store, op_timeout_s: float) -> None:
        self.store = store
        self._op_timeout_s = op_timeout_s

    async def bounded(self, call: Awaitable[T]) -> T:
        """Await one call, or several as one awaitable; `StoreUnavailable` if it takes too long."""
        try:
            async with asyncio.timeout(self._op_timeout_s):
                return await call
        except TimeoutError as error:
            raise StoreUnavailable(
                f"the store did not answer within {self._op_timeout_s:g} s; it is asked again"
            ) from error

    async def try_commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        """One commit; `Unknown` instead of any error: the caller reads again (S1)."""
        try:
            return await self.bounded(self.store.commit(conditions, writes))
        except StoreError:
            return Unknown()

    async def commit_each(
        self, conditions: Sequence[Condition], writes: Sequence[Write]
    ) -> Outcome:
        """One commit; in a store that writes one key at a time, one for each write (S8).

        They go in the order of the writes and stop at the first that is refused or unanswered,
        which is the outcome. The caller chooses an order that is safe wherever it stops.
        """
        if not writes_one_key(self.store):
            return await self.bounded(self.store.commit(conditions, writes))
        outcome: Outcome = Unknown()
        for held, one in singly(conditions, writes):
            outcome = await self.bounded(self.store.commit(held, one))
            if not isinstance(outcome, Committed):
                break
        return outcome


class MemberStoreCalls(StoreCalls):
    """Store calls of one incarnation, which repeats reads until it is over.

    `StoreRewound` is never retried: a store that lost commits ends the incarnation (S5).
    """

    def __init__(
        self, store: Store, op_timeout_s: float, random: Random, over: asyncio.Event
    ) -> None:
        super().__init__(store, op_timeout_s)
        self.newest = 0
        """The highest revision that this incarnation has seen from the store (S5)."""
        self._random = random
        self._over = over
        self._unwritten = 0

    async def read(self, call: Callable[[], Awaitable[T]]) -> T:
        """Read until it succeeds; `StoreUnavailable` only after the incarnation is over."""
        failures = 0
        while True:
            try:
                return await self.bounded(call())
            except StoreUnavailable as error:
                if self._over.is_set():
                    raise
                failures += 1
                if failures == TELLING_FAILURES:
                    log.warning("the store can't be read, it is asked again: %s", error)
            await self.pause(failures)

    async def commit(self, condition: Condition, put: Put) -> Outcome:
        """One conditional write; `Unknown` if there is no answer: the caller reads again (S1)."""
        try:
            outcome = await self.bounded(self.store.commit([condition], [put]))
        except StoreUnavailable as error:
            self.not_written(error)
            return Unknown()
        self._unwritten = 0
        if isinstance(outcome, Committed):
            self.newest = max(self.newest, outcome.revision)
        return outcome

    def not_written(self, error: StoreUnavailable) -> None:
        """A write failed, and the caller will repeat it."""
        self._unwritten += 1
        if self._unwritten == TELLING_FAILURES:
            text = "the store takes no write of this process, it is asked again: %s"
            log.warning(text, error)

    async def pause(self, failures: int) -> None:
        """Wait before the next try; the wait grows with the number of failures."""
        most_s = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** min(failures, 8))
        await asyncio.sleep(self._random.uniform(BACKOFF_MIN_S, most_s))
