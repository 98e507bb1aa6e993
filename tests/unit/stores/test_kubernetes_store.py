"""The contract of stores on the API server in memory, and on a memory store of single keys (S8)."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from kubernetes_store_lab import fake_kubernetes_stores

from domicile.testing.suites.store import StoreContract, Stores


class TestOnTheApiServerInMemory(StoreContract):
    one_key = True
    ttl_s = 30.0
    slack_s = 0.1
    patience_s = 60.0

    def open(self) -> AbstractAsyncContextManager[Stores]:
        return fake_kubernetes_stores()
