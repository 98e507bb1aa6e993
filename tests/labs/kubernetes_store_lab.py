"""Clients of a Kubernetes store on the API server in memory, for the contract of stores.

The clock by which its clients judge leases is the lab's: `advance` moves it once every client has
seen what was renewed, and has the ended leases ended. So a slow machine ends no lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.exchange import ApiRequest
from domicile.ports.store import Store
from domicile.stores.kubernetes.address import KubernetesAddress
from domicile.stores.kubernetes.store import KubernetesStore
from domicile.testing.kube import ApiFault, FakeApiServer

OP_TIMEOUT_S = 5.0


class Unthreaded(KubernetesStore):
    """The API server in memory belongs to one event loop."""

    def beside(self, prefix: bytes = b"") -> None:  # type: ignore[override]
        return None


class FakeKubernetesStores:
    """Implements the verbs of `domicile.testing.suites.store.Stores`."""

    def __init__(self) -> None:
        self.server = FakeApiServer(delay_s=(0.0, 0.0))
        self.server.faults = self._fault
        self.stores: dict[str, KubernetesStore] = {}
        self.now = 1_000.0
        self._away = False
        self._loses: dict[str, None] = {}

    def client(self, by: str) -> Store:
        made = Unthreaded(
            KubernetesAddress("default"),
            lambda: KubeClient(self.server.exchange(by), timeout_s=0.5),
            now=lambda: self.now,
            by=by,
            op_timeout_s=OP_TIMEOUT_S,
        )
        self.stores[by] = made
        return made

    async def advance(self, seconds: float) -> None:
        await self.settled()
        self.now += seconds
        await self._end_leases()

    async def compact(self, revision: int) -> None:
        self.server.compact(revision)

    async def outage(self) -> None:
        self._away = True
        self.server.break_watches()

    async def restore(self) -> None:
        self._away = False
        await self.settled()
        await self._end_leases()

    async def lose_next_reply(self, client: Store) -> None:
        self._loses[self._name(client)] = None

    async def slow(self, seconds: float) -> None:
        self.server.delay_s = (seconds / 2, seconds / 2)

    async def break_watches(self, client: Store) -> None:
        self.server.break_watches()

    async def settled(self) -> None:
        """Until every watch, and every client's view of the leases, has seen all there is."""
        while not self._away and not self._all_seen():  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    def _all_seen(self) -> bool:
        leases = {
            one["metadata"]["name"]: one["metadata"]["resourceVersion"]
            for one in self.server.objects("leases", "coordination.k8s.io")
        }
        wanted = sum(one.waiting_watches + (one.ending is not None) for one in self._running())
        if self.server.open_watches < wanted:
            return False
        for store in self._running():
            ending = store.ending
            if ending is not None and ending.leases.versions != leases:
                return False
        return self.server.watches_idle

    async def _end_leases(self) -> None:
        if self._away:
            return
        for store in self._running():
            if store.ending is not None:
                await store.ending.pass_once()

    def _fault(self, client: str, request: ApiRequest) -> ApiFault | None:
        if self._away:
            return ApiFault.UNREACHABLE
        if client in self._loses and request.writes and "/configmaps" in request.path:
            del self._loses[client]
            return ApiFault.UNANSWERED
        return None

    def _running(self) -> list[KubernetesStore]:
        return [store for store in self.stores.values() if not store.closed]

    def _name(self, client: Store) -> str:
        return next(name for name, store in self.stores.items() if store is client)


@asynccontextmanager
async def fake_kubernetes_stores() -> AsyncIterator[FakeKubernetesStores]:
    """A fresh server and its clients."""
    stores = FakeKubernetesStores()
    try:
        yield stores
    finally:
        for store in stores.stores.values():
            await store.close()
