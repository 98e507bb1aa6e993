"""The store of clusters that have nothing but a Kubernetes API server (S8).

`KubernetesStore` makes its connections at the first call and must be used on one event loop. A
commit promises one written key (`one_key`). Leases end by the clocks of the processes that observe
them: while none runs, none ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from math import isfinite
from random import Random
from weakref import WeakSet

from domicile.core.state.txn import Changes, Condition, Item, Listing, Outcome, Write
from domicile.errors import StoreError, StoreUnavailable
from domicile.kubeapi.client import KubeClient
from domicile.stores.kubernetes.address import KubernetesAddress
from domicile.stores.kubernetes.client import KubernetesClient, KubernetesHistory
from domicile.stores.kubernetes.ending import LeaseEnding
from domicile.stores.kubernetes.watch import watched
from domicile.stores.threaded import LoopThreadedStore


class KubernetesStore:
    """Implements `domicile.ports.store.Store` on the ConfigMaps and Leases of one namespace.

    `connect` makes a client of the API server on the running loop. `now` is a clock that counts
    suspended time; leases are judged by it. A call ends within about `op_timeout_s`.
    """

    one_key = True
    """As `MayWriteOneKey.one_key`."""

    def __init__(
        self,
        address: KubernetesAddress,
        connect: Callable[[], KubeClient],
        *,
        now: Callable[[], float],
        by: str = "",
        op_timeout_s: float = 5.0,
        reads_only: bool = False,
    ) -> None:
        if not (isfinite(op_timeout_s) and op_timeout_s > 0):
            raise ValueError(f"op_timeout_s is {op_timeout_s}; it must be above 0")
        self.address, self._connect, self._now = address, connect, now
        self._by, self._op_timeout_s = by, op_timeout_s
        self._reads_only = reads_only
        self.history = KubernetesHistory(address.shown)
        self._client: KubernetesClient | None = None
        self._ending: LeaseEnding | None = None
        self._watches: WeakSet[_Watch] = WeakSet()
        self._sides: dict[tuple[bytes, int], LoopThreadedStore] = {}
        self.closed = False

    async def get(self, key: bytes) -> Item | None:
        """As `Store.get`."""
        return await self.use().get(key)

    async def list(self, prefix: bytes) -> Listing:
        """As `Store.list`."""
        return await self.use().list(prefix)

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        """As `Store.commit`, of one key (S8)."""
        return await self.use().commit(conditions, writes)

    async def grant(self, lease: str, ttl_s: float) -> float:
        """As `Store.grant`."""
        client = self.use()
        self.observe()
        return await client.grant(lease, ttl_s)

    async def renew(self, lease: str) -> float | None:
        """As `Store.renew`."""
        return await self.use().renew(lease)

    async def revoke(self, lease: str) -> None:
        """As `Store.revoke`. Its keys disappear one after the other."""
        await self.use().revoke(lease)

    def watch(self, prefix: bytes, from_revision: int) -> AsyncIterator[Changes]:
        """As `Store.watch`."""
        self.use()
        self.observe()
        return _Watch(self, prefix, from_revision)

    def beside(self, prefix: bytes = b"") -> LoopThreadedStore:
        """As `OffersThreads.beside`: a second client, with connections of its own."""
        self.use()
        generation = self.history.generation
        known = self._sides.get((prefix, generation))
        if known is not None:
            return known
        for key in [key for key in self._sides if key[1] != generation]:
            self._sides.pop(key).close()
        make = partial(self._made, fixed=True)
        side = LoopThreadedStore(make, prefix, f"domicile-store-keep {self._by}")
        self._sides[(prefix, generation)] = side
        return side

    async def close(self) -> None:
        """Close the connections, end the watches and the threads. Leases go on until another
        process sees that they expired."""
        self.closed = True
        for watch in tuple(self._watches):
            watch.break_off(self._closed_error())
        for side in self._sides.values():
            side.close()
        self._sides.clear()
        if self._ending is not None:
            await self._ending.close()
        if self._client is not None:
            await self._client.close()

    def use(self) -> KubernetesClient:
        """The client, unless this store is closed."""
        if self.closed:
            raise self._closed_error()
        if self._client is None:
            self._client = self._made(fixed=False)
        return self._client

    @property
    def waiting_watches(self) -> int:
        """How many watches are being read."""
        return len(self._watches)

    @property
    def ending(self) -> LeaseEnding | None:
        """The part that ends Leases, if it runs."""
        return self._ending

    def observe(self) -> LeaseEnding | None:
        """Take part in ending Leases from now on; None for a tool that only reads."""
        if self._ending is None and not self._reads_only:
            self._ending = LeaseEnding(self.use(), self._now)
            self._ending.start()
        return self._ending

    def reads(self, watch: _Watch) -> None:
        """A watch waits from now on."""
        self._watches.add(watch)

    def leaves(self, watch: _Watch) -> None:
        """A watch waits no more."""
        self._watches.discard(watch)

    def _made(self, *, fixed: bool) -> KubernetesClient:
        return KubernetesClient(
            self._connect(), self.address, self.history, self._op_timeout_s, by=self._by,
            fixed=fixed,
        )  # fmt: skip

    def _closed_error(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"the store's client {self.address.shown} is closed; make another one"
        )


class _Watch:
    """An iterator over `watched`, which a task reads: a wait that is cancelled loses nothing."""

    def __init__(self, store: KubernetesStore, prefix: bytes, from_revision: int) -> None:
        self._store = store
        self._prefix, self._from = prefix, from_revision
        self.passed = from_revision
        """The newest revision that it has seen, bookmarks included."""
        self._source: AsyncGenerator[Changes, None] | None = None
        self._next: asyncio.Task[Changes] | None = None
        self._error: StoreError | None = None

    def __aiter__(self) -> AsyncIterator[Changes]:
        return self

    async def __anext__(self) -> Changes:
        self._raise_broken()
        if self._source is None:
            self._source = watched(self._store.use(), self._prefix, self._from, self._saw, Random())
        if self._next is None:
            self._next = asyncio.ensure_future(_after(self._source))
        self._store.reads(self)
        try:
            changes = await asyncio.shield(self._next)
        except asyncio.CancelledError:
            if self._next.cancelled():
                self._raise_broken()
            raise
        except StoreError as error:
            self._error = error
            raise
        self._next = None
        self._store.leaves(self)
        return changes

    def _raise_broken(self) -> None:
        if self._error is not None:
            # A new object each time: raising one twice would chain its tracebacks.
            raise type(self._error)(*self._error.args) from None

    def break_off(self, error: StoreError) -> None:
        """End it: its reader is told."""
        if self._error is None:
            self._error = error
        if self._next is not None:
            self._next.cancel()

    def __del__(self) -> None:
        # A reader that was cancelled drops its watch, and no call would end the request.
        task = self._next
        if task is not None and not task.done():
            with suppress(RuntimeError):  # the loop has ended, and the task with it
                task.get_loop().call_soon_threadsafe(task.cancel)

    def _saw(self, revision: int) -> None:
        self.passed = revision


async def _after(source: AsyncGenerator[Changes, None]) -> Changes:
    return await anext(source)
