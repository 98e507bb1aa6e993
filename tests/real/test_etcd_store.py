"""The store of clusters over many machines, on real etcd servers: the whole contract, and what only
etcd can do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from etcd_lab import EtcdStores, etcd_lab

from domicile.testing.suites.store import StoreContract


class TestEtcdStore(StoreContract):
    ttl_s = 3.0
    slack_s = 1.5
    races = 2
    patience_s = 60.0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[EtcdStores]:
        async with etcd_lab() as stores:
            yield stores

    def test_renewals_that_race_with_the_end_of_a_lease_agree(self) -> None:
        # Time is real: what passes may be late by the slack, and must stay below a second ttl.
        self.ttl_s, self.races = 12.0, 1
        super().test_renewals_that_race_with_the_end_of_a_lease_agree()
