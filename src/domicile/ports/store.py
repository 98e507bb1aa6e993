"""The coordination store (S1–S9), modelled on etcd.

Strongly consistent, with a store-wide rising revision. `domicile.testing.suites` defines what
an implementation must do; `domicile.stores.memory.store` is the reference.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol, runtime_checkable

from domicile.core.state.txn import Changes, Condition, Item, Listing, Outcome, Write


class Store(Protocol):
    """What Domicile needs of a store. Every call may raise `StoreUnavailable`."""

    async def get(self, key: bytes) -> Item | None:
        """The item under a key, linearizably."""
        ...

    async def list(self, prefix: bytes) -> Listing:
        """All items under a prefix at one revision."""
        ...

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        """All writes, if all conditions hold, atomically. A lost reply is `Unknown`, not an error.

        A `Put` under a lease that is gone is a `Conflict` on its key.
        """
        ...

    async def grant(self, lease: str, ttl_s: float) -> float:
        """Start a lease under an id that the caller chose; returns the real ttl. A second grant
        renews it."""
        ...

    async def renew(self, lease: str) -> float | None:
        """The real ttl counted from now, or None if the lease is gone (S3)."""
        ...

    async def revoke(self, lease: str) -> None:
        """End a lease; what is attached to it disappears in one commit."""
        ...

    def watch(self, prefix: bytes, from_revision: int) -> AsyncIterator[Changes]:
        """Every later change (revision > from_revision) under a prefix, in order, none skipped.

        Raises `WatchCompacted` if that is no longer possible, `StoreUnavailable` if the
        connection is lost: resume from the last revision seen.
        """
        ...

    async def close(self) -> None:
        """Close the connections. Leases go on until they expire."""
        ...


class Kept(NamedTuple):
    """The result of a renewal: the ttl counted from it (None: the lease is gone), and an item."""

    ttl_s: float | None
    item: Item | None


class ThreadedStore(Protocol):
    """The part of a store for a thread that keeps a lease while the event loop is blocked.

    Its methods may be called from any thread and return at once; the futures are completed in
    threads of the store, with the errors of `Store`. It belongs to the history that was known when
    it was made: after a rewind every call raises `StoreRewound` (S5).
    """

    def keep(self, lease: str, key: bytes) -> Future[Kept]:
        """Renew a lease and, after that, read a key (L1)."""
        ...

    def rewrite(self, key: bytes, revision: int, value: bytes, lease: str) -> Future[Outcome]:
        """Replace a value under a lease if it is still at that revision; 0: at any revision."""
        ...


@runtime_checkable
class OffersThreads(Protocol):
    """A store that can also be asked outside the event loop; few can."""

    def beside(self, prefix: bytes = b"") -> ThreadedStore | None:
        """The `ThreadedStore` for the keys under a prefix; None if there is none.

        Called on the event loop.
        """
        ...


@runtime_checkable
class MayWriteOneKey(Protocol):
    """A store that says whether its commits promise one written key only (S8)."""

    @property
    def one_key(self) -> bool:
        """Whether a commit writes one key, and compares the revision of no other.

        That other keys are absent or present is looked up before the write: it is no more than a
        hint, unless it is final, as the end of an incarnation's record is.
        """
        ...


def writes_one_key(store: Store) -> bool:
    """Whether a commit to this store writes one key only (S8); most stores write several."""
    return isinstance(store, MayWriteOneKey) and store.one_key


@runtime_checkable
class NeedsTicks(Protocol):
    """A store whose time only advances while it is asked (S4). The acting coordinator ticks it.

    Without ticks no lease ends. A client that sees that nobody ticks does it meanwhile.
    """

    @property
    def tick_s(self) -> float:
        """Seconds between two ticks, at most `MAX_TICK_S`; 0: this one needs none."""
        ...

    async def tick(self) -> None:
        """Let the store's time advance, and the leases end that have expired (S3)."""
        ...
