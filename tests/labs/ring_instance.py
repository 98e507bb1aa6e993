"""An instance of the ring `websites` as a process of its own, for tests on a real API server.

    python ring_instance.py KUBECONFIG NAME ACTS DURATION_S [controlled]

It writes to each of its objects, at the beginning and at the end of a piece of work. With the last
argument these are websites and the configmaps that they control. Then it makes such configmaps,
too, while it works on a website. Each moment at which it was still allowed to act goes into the
file ACTS, by the machine's clock, taken before the check. An instance that loses its Lease begins
anew, as a pod does. SIGTERM makes it leave.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from typing import Any

from domicile.errors import Fenced
from domicile.kube.member import Ring
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.credentials import find_credentials
from domicile.kubeapi.errors import KubeConflict, KubeNotFound
from domicile.kubeapi.http_exchange import HttpExchange
from domicile.kubeapi.kinds import CONFIG_MAPS, ApiKind
from domicile.kubeapi.objects import PartialObject

SITES = ApiKind("example.com", "v1", "websites", "Website", True, PartialObject)
AGAIN_S = float(os.environ.get("DOMICILE_RING_AGAIN_S", "3"))
MADE = "example.com/made"
"""Annotation of a website: how many configmaps were made for it."""

MOST_MADE, MADE_CHANCE = 4, 0.1
SITE_STEPS, CHILD_STEPS = 8, 40
"""How many times 0.05 s a piece of work may take."""


class Instance:
    """One process; each of its lives is a member."""

    def __init__(self, name: str, acts: int, *, controlled: bool) -> None:
        self._name, self._acts, self._controlled = name, acts, controlled
        self._runs = 0
        self._last: dict[str, float] = {}

    def _acting(self, run: int, one: str, member: Any) -> None:
        at = time.monotonic()
        member.guard()
        line = {"instance": self._name, "run": f"{os.getpid()}-{run}", "object": one, "at": at}
        os.write(self._acts, json.dumps(line).encode() + b"\n")

    async def life(self, client: KubeClient, duration_s: int) -> None:
        ring = Ring("websites")
        member = ring.member(
            client,
            instance=self._name,
            namespace="default",
            duration_s=duration_s,
            unique_name=True,
        )

        async def on_site(writer: KubeClient, one: Any) -> float | None:
            return await reconcile(writer, SITES, one, SITE_STEPS)

        async def on_child(writer: KubeClient, one: Any) -> float | None:
            return await reconcile(writer, CONFIG_MAPS, one, CHILD_STEPS)

        async def reconcile(
            writer: KubeClient, kind: ApiKind[Any], one: Any, steps: int
        ) -> float | None:
            name = one.metadata.name
            waits = self._last.get(name, 0.0) + AGAIN_S - time.monotonic()
            if waits > 0:
                return waits
            self._last[name] = time.monotonic()
            self._runs += 1
            run, version = self._runs, one.metadata.resource_version
            made = int(one.metadata.annotation(MADE) or 0)
            few = self._controlled and kind is SITES and made < MOST_MADE
            makes = few and random.random() < MADE_CHANCE
            noted = {MADE: str(made + makes)} if kind is SITES else {}
            for step in ("begin", "end"):
                self._acting(run, name, member)
                try:
                    written = await writer.patch(
                        kind,
                        name,
                        one.metadata.namespace,
                        merge={"metadata": {"annotations": {"example.com/step": step, **noted}}},
                        resource_version=version,
                    )
                except KubeConflict:
                    return 0.1
                except KubeNotFound:
                    return None
                version = written.metadata.resource_version
                if step == "begin":
                    for _ in range(random.randrange(1, steps)):
                        await asyncio.sleep(0.05)
                        self._acting(run, name, member)
                    if makes:
                        await writer.create(CONFIG_MAPS, child_of(one), one.metadata.namespace)
            return AGAIN_S

        async with member:
            print("joined", flush=True)
            try:
                async with asyncio.TaskGroup() as work:
                    work.create_task(member.run(on_site, SITES.group, SITES.plural, workers=8))
                    if self._controlled:
                        work.create_task(member.run(on_child, "", "configmaps", workers=16))
            except* Fenced:
                pass


def child_of(site: PartialObject) -> dict[str, Any]:
    """What a website controls; it gets its name when it is made."""
    owner = {
        "apiVersion": SITES.api_version, "kind": SITES.kind, "name": site.metadata.name,
        "uid": site.metadata.uid, "controller": True,
    }  # fmt: skip
    return {"metadata": {"generateName": f"{site.metadata.name}-", "ownerReferences": [owner]}}


async def main(kubeconfig: str, name: str, acts: int, duration_s: int, *more: str) -> None:
    instance = Instance(name, acts, controlled="controlled" in more)
    exchange = HttpExchange(find_credentials(kubeconfig))
    async with KubeClient(exchange, timeout_s=10.0) as client:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        stopped = asyncio.ensure_future(stop.wait())
        while not stop.is_set():
            life = asyncio.ensure_future(instance.life(client, duration_s))
            await asyncio.wait((life, stopped), return_when=asyncio.FIRST_COMPLETED)
            life.cancel()
            await asyncio.wait((life,))
            if not life.cancelled():
                with suppress(Fenced):
                    life.result()


if __name__ == "__main__":
    with open(sys.argv[3], "ab", buffering=0) as file:
        asyncio.run(main(sys.argv[1], sys.argv[2], file.fileno(), int(sys.argv[4]), *sys.argv[5:]))
