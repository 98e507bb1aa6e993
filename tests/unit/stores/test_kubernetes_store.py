"""The store of Kubernetes on the API server in memory: the contract of stores, and more (S8)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from kubernetes_store_lab import Unthreaded, fake_kubernetes_stores

from domicile.backends.kubernetes import KUBERNETES
from domicile.backends.wiring import check_urls
from domicile.core.state.txn import Absent, Put, Unknown
from domicile.errors import ConfigError, StoreUnavailable
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.exchange import ApiAnswer, ApiRequest
from domicile.settings import CLOCK_DRIFT
from domicile.stores.kubernetes.address import KubernetesAddress, parse_kubernetes_url
from domicile.stores.kubernetes.client import KubernetesClient
from domicile.stores.kubernetes.objects import GrantedLease
from domicile.stores.kubernetes.observed import ObservedLeases
from domicile.stores.kubernetes.store import KubernetesStore
from domicile.testing.kube import FakeExchange
from domicile.testing.suites.store import StoreContract, Stores, put


class TestOnTheApiServerInMemory(StoreContract):
    one_key = True
    ttl_s = 30.0
    slack_s = 0.1
    patience_s = 60.0

    def open(self) -> AbstractAsyncContextManager[Stores]:
        return fake_kubernetes_stores()


def test_a_lease_that_was_renewed_unseen_is_not_ended() -> None:
    """S8: who has missed a renewal finds the Lease unchanged for its ttl, and must not end it."""

    async def main() -> None:
        async with fake_kubernetes_stores() as stores:
            holder, other = stores.client("a"), stores.client("b")
            assert isinstance(other, KubernetesStore)
            ttl_s = await holder.grant("l", 30.0)
            await put(holder, b"k", b"", "l")
            (stored,) = stores.server.objects("leases", "coordination.k8s.io")
            metadata = stored["metadata"]
            missed = GrantedLease(metadata["name"], "l", ttl_s, metadata["resourceVersion"])
            assert await holder.renew("l") == ttl_s
            assert not await other.use().end_lease(missed)
            assert await holder.renew("l") == ttl_s
            assert await other.get(b"k") is not None

    asyncio.run(main())


def test_a_lease_ends_after_its_own_ttl_since_it_was_seen_to_change() -> None:
    leases = ObservedLeases()
    leases.changed(GrantedLease("n", "l", 6.0, "5"), 100.0)
    leases.changed(GrantedLease("n", "l", 6.0, "5"), 104.0)
    assert leases.due(106.0) == []
    assert [lease.version for lease in leases.due(106.0 + 6.0 * CLOCK_DRIFT)] == ["5"]
    leases.changed(GrantedLease("n", "l", 6.0, "7"), 106.0)
    assert leases.due(112.0) == []
    assert leases.next_at == 106.0 + 6.0 * (1 + CLOCK_DRIFT)
    assert leases.listed([], 107.0) == ["n"]
    assert leases.due(200.0) == []


def test_a_404_that_is_not_the_api_servers_proves_no_absence() -> None:
    """C4: absence frees shards, so a proxy that finds nothing must not mean it."""

    async def main() -> None:
        async with fake_kubernetes_stores() as stores:
            store = stores.client("a")
            await put(store, b"k", b"")
            stores.server.answers_nothing = True
            with pytest.raises(StoreUnavailable, match="not the API server's"):
                await store.get(b"k")
            with pytest.raises(StoreUnavailable, match="not the API server's"):
                await store.commit([Absent(b"k")], [Put(b"w", b"")])
            stores.server.answers_nothing = False
            assert await store.get(b"k") is not None

    asyncio.run(main())


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("kubernetes://", "names no namespace"),
        ("kubernetes://Bank", "names no namespace"),
        ("kubernetes://bank?ttl=3", "unknown option 'ttl'"),
        ("kubernetes://bank?context=", "must have a value for context="),
        ("kubernetes://bank?store=A", "store='A'"),
    ],
)
def test_a_url_that_is_wrong_is_refused(url: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        parse_kubernetes_url(url)


def test_a_durable_entity_needs_a_journal_with_a_name() -> None:
    assert KUBERNETES.default_journal("kubernetes://bank") is None
    with pytest.raises(ConfigError, match="journal="):
        check_urls("kubernetes://bank", None, ["Account"])


class _Closable:
    """Implements `ApiExchange`. As the library for HTTP, it sends nothing once it is closed."""

    def __init__(self, inner: FakeExchange) -> None:
        self._inner, self._closed = inner, False
        self.server = inner.server
        self.before_answer: Callable[[ApiRequest], Awaitable[None]] | None = None

    @asynccontextmanager
    async def open(self, request: ApiRequest) -> AsyncGenerator[ApiAnswer, None]:
        if self._closed:
            raise RuntimeError("Cannot send a request, as the client has been closed.")
        async with self._inner.open(request) as answer:
            if self.before_answer is not None:
                await self.before_answer(request)
            yield answer

    async def close(self) -> None:
        self._closed = True


def test_a_store_that_is_closed_during_a_call_is_unavailable() -> None:
    """A node that leaves closes its store while its lease is still being given back."""

    async def main() -> None:
        async with fake_kubernetes_stores() as stores:
            for call in ("revoke", "commit"):
                exchange = _Closable(stores.server.exchange(call))
                store = Unthreaded(
                    KubernetesAddress("default"),
                    lambda exchange=exchange: KubeClient(exchange, timeout_s=0.5),  # type: ignore[misc]
                    now=lambda: 0.0, by=call,
                )  # fmt: skip
                await store.grant(call, 30.0)

                async def close(
                    request: ApiRequest,
                    call: str = call,
                    exchange: _Closable = exchange,
                    client: KubernetesClient = store.use(),  # noqa: B008
                ) -> None:
                    # Between the two requests of the call.
                    if request.method == ("DELETE" if call == "revoke" else "GET"):
                        exchange.before_answer = None
                        await client.close()

                exchange.before_answer = close
                if call == "revoke":
                    with pytest.raises(StoreUnavailable, match="closed during a call"):
                        await store.revoke(call)
                else:
                    outcome = await store.commit([], [Put(b"k", b"", call)])
                    assert isinstance(outcome, Unknown)
                await store.close()

    asyncio.run(main())
