"""The store of clusters over many machines: etcd (S12), by its API over gRPC.

`EtcdStore` makes its connections at the first call and must be used on one event loop. All keys lie
under `<root>/clusters/`. etcd's own time ends leases. A change of etcd's leader makes all leases
last longer, never shorter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import isfinite

from domicile.core.state.txn import Changes, Condition, Item, Listing, Outcome, Write
from domicile.errors import StoreError, StoreUnavailable
from domicile.ports.findings import Finding
from domicile.ports.meter import Meter, NoMeter
from domicile.stores.etcd.address import EtcdAddress
from domicile.stores.etcd.client import EtcdClient, EtcdProcess, prefix_end
from domicile.stores.etcd.findings import cluster_findings
from domicile.stores.etcd.history import EtcdHistory
from domicile.stores.etcd.leases import LeaseNumbers
from domicile.stores.etcd.survey import asked_about
from domicile.stores.etcd.watch import EtcdWatch
from domicile.stores.threaded import LoopThreadedStore


class EtcdStore:
    """Implements `domicile.ports.store.Store` on an etcd cluster.

    `by` names this process and decides which server it asks first. A call ends within about
    `op_timeout_s`. `cluster` is the one whose keys the user of the URL may read; empty: all.
    """

    def __init__(
        self,
        address: EtcdAddress,
        *,
        by: str = "",
        cluster: str = "",
        op_timeout_s: float = 5.0,
        meter: Meter | None = None,
    ) -> None:
        if not (isfinite(op_timeout_s) and op_timeout_s > 0):
            raise ValueError(f"op_timeout_s is {op_timeout_s}; it must be above 0")
        self.data = address.data
        self.history = EtcdHistory(address.shown, self._noticed)
        self._numbers = LeaseNumbers()
        self._meter = NoMeter() if meter is None else meter
        look_at = address.data + (f"{cluster}/".encode() if cluster else b"")
        self._process = EtcdProcess(
            address, self.history, self._numbers, self._meter, by, look_at, op_timeout_s
        )
        self.client = EtcdClient(self._process)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[EtcdWatch, None] = {}
        self._sides: dict[tuple[bytes, int], LoopThreadedStore] = {}
        self._closed = False

    async def get(self, key: bytes) -> Item | None:
        """As `Store.get`."""
        return await self._use().get(key)

    async def list(self, prefix: bytes) -> Listing:
        """As `Store.list`."""
        return await self._use().list(prefix)

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        """As `Store.commit`. A commit that changes nothing does not raise the revision."""
        return await self._use().commit(conditions, writes)

    async def grant(self, lease: str, ttl_s: float) -> float:
        """As `Store.grant`. etcd counts whole seconds and has a least ttl; the answer is real."""
        return await self._use().grant(lease, ttl_s)

    async def renew(self, lease: str) -> float | None:
        """As `Store.renew`."""
        return await self._use().renew(lease)

    async def revoke(self, lease: str) -> None:
        """As `Store.revoke`."""
        await self._use().revoke(lease)

    async def findings(self) -> Sequence[Finding]:
        """As `InspectableStore.findings`: each server of the URL is asked by itself."""
        self._use()
        connections = self.client.connections
        return cluster_findings(await asked_about(connections, self.data, prefix_end(self.data)))

    def watch(self, prefix: bytes, from_revision: int) -> AsyncIterator[Changes]:
        """As `Store.watch`."""
        return EtcdWatch(self, prefix, from_revision)

    def beside(self, prefix: bytes = b"") -> LoopThreadedStore:
        """As `OffersThreads.beside`: a second client, with connections of its own."""
        self._use()
        generation = self.history.generation
        known = self._sides.get((prefix, generation))
        if known is not None:
            return known
        for key in [key for key in self._sides if key[1] != generation]:
            self._sides.pop(key).close()
        # A meter need not be thread-safe.
        make = partial(EtcdClient, replace(self._process, meter=NoMeter()), generation)
        name = f"domicile-store-keep {self._process.by}"
        side = self._sides[(prefix, generation)] = LoopThreadedStore(make, prefix, name)
        return side

    async def close(self) -> None:
        """Close the connections, end the watches and the threads. Leases go on until they
        expire."""
        self._closed = True
        error = self._closed_error()
        for watch in tuple(self._waiting):
            watch.break_off(error)
        for side in self._sides.values():
            side.close()
        self._sides.clear()
        await self.client.close()

    def wait(self, watch: EtcdWatch) -> None:
        """As `WatchOwner.wait`."""
        self._use()
        self._waiting[watch] = None

    def leave(self, watch: EtcdWatch) -> None:
        """As `WatchOwner.leave`."""
        self._waiting.pop(watch, None)

    def _use(self) -> EtcdClient:
        if self._closed:
            raise self._closed_error()
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self.client

    def _closed_error(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"the store's client {self._process.address.shown} is closed; make another one"
        )

    def _noticed(self) -> None:
        """A client on some event loop has found a rewind."""
        self._numbers.clear()
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop has ended, and with it all watches
            self._loop.call_soon_threadsafe(self._break_watches)

    def _break_watches(self) -> None:
        self._meter.count("store.rewound")
        error: StoreError = self.history.error()
        self._meter.count("store.watches_broken", len(self._waiting))
        for watch in tuple(self._waiting):
            watch.break_off(error)
