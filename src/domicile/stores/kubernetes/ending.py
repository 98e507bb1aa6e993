"""Ends the Leases that this process sees unchanged for their ttl, and deletes their keys (S8).

The store starts it with the first call that needs it. Every process of a cluster does this, so it
needs no leader; the API server lets one delete each Lease. The Lease goes first: that is final, and
its keys follow, one after the other, by this process or, if it stops meanwhile, by another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from random import Random

from domicile.errors import StoreError
from domicile.kubeapi.errors import KubeConflict, KubeError, KubeNotFound
from domicile.kubeapi.follow import ObjectChanged, ObjectRemoved, ObjectsListed, follow
from domicile.kubeapi.kinds import LEASES
from domicile.stores.kubernetes.client import KubernetesClient
from domicile.stores.kubernetes.objects import leases_labels, read_lease
from domicile.stores.kubernetes.observed import ObservedLeases

log = logging.getLogger("domicile")

SWEEP_S = 30.0
"""Seconds between two looks for keys whose Lease is gone, left over by a process that stopped."""

AGAIN_S = 0.5
"""After a failure it is tried again so soon."""

STAGGER_S = 0.2
"""All processes see the same end. Each waits up to so long, so that most find it done."""


class LeaseEnding:
    """One process's part in ending Leases."""

    def __init__(
        self, client: KubernetesClient, now: Callable[[], float], random: Random | None = None
    ) -> None:
        self._client, self._now = client, now
        self._random = Random() if random is None else random
        self.leases = ObservedLeases()
        self.listed = asyncio.Event()
        """Set once the Leases were listed for the first time."""
        self._orphans: dict[str, None] = {}
        self._woken = asyncio.Event()
        self._tasks: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, on the running loop; again does nothing."""
        if self._tasks is None:
            self._tasks = asyncio.create_task(self._run(), name="domicile-kubernetes-leases")

    async def close(self) -> None:
        """Stop."""
        task, self._tasks = self._tasks, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def pass_once(self) -> None:
        """End what has ended by now, and delete the keys of what is gone."""
        now = self._now()
        for lease in self.leases.due(now):
            if await self._client.end_lease(lease):
                self.leases.gone(lease.name)
                self._orphans[lease.name] = None
            else:
                self.leases.refused(lease, self._now())
        for name in tuple(self._orphans):
            await self._client.delete_keys_of(name)
            self._orphans.pop(name, None)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(self._end())

    async def _follow(self) -> None:
        address = self._client.address
        seen = follow(
            self._client.kube, LEASES, address.namespace, labels=leases_labels(address.store)
        )
        async with aclosing(seen) as changes:
            async for change in changes:
                now = self._now()
                match change:
                    case ObjectsListed(items):
                        leases = [lease for one in items if (lease := read_lease(one)) is not None]
                        self._gone(self.leases.listed(leases, now))
                        self.listed.set()
                    case ObjectRemoved(found):
                        self.leases.gone(found.metadata.name)
                        self._gone([found.metadata.name])
                    case ObjectChanged(found):
                        lease = read_lease(found)
                        if lease is not None:
                            self.leases.changed(lease, now)
                self._woken.set()

    def _gone(self, names: list[str]) -> None:
        self._orphans.update(dict.fromkeys(names))

    async def _end(self) -> None:
        sweep_at = self._now()
        while True:
            self._woken.clear()
            try:
                if self._now() >= sweep_at:
                    await self._client.delete_keys_of("")
                    sweep_at = self._now() + SWEEP_S * self._random.uniform(0.8, 1.2)
                await self.pass_once()
                wait_s = min(self.leases.next_at, sweep_at) - self._now()
            except (StoreError, KubeConflict, KubeNotFound) as error:
                log.debug("leases that have ended are still there: %s", error)
                wait_s = AGAIN_S
            except KubeError:
                log.exception("leases that have ended are still there")
                wait_s = AGAIN_S
            stagger_s = self._random.uniform(0.0, STAGGER_S)
            try:
                async with asyncio.timeout(max(0.0, wait_s) + stagger_s):
                    await self._woken.wait()
                    await asyncio.sleep(stagger_s)
            except TimeoutError:
                pass
