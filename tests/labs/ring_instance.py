"""An instance of the ring `websites` as a process of its own, for tests on a real API server.

    python ring_instance.py KUBECONFIG NAME ACTS DURATION_S

It writes to each of its objects, at the beginning and at the end of a piece of work. Each moment at
which it was still allowed to act goes into the file ACTS, by the machine's clock, taken before the
check. An instance that loses its Lease begins anew, as a pod does. SIGTERM makes it leave.
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
from domicile.kubeapi.kinds import ApiKind
from domicile.kubeapi.objects import PartialObject

SITES = ApiKind("example.com", "v1", "websites", "Website", True, PartialObject)
AGAIN_S = 3.0


class Instance:
    """One process; each of its lives is a member."""

    def __init__(self, name: str, acts: int) -> None:
        self._name, self._acts = name, acts
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
            client, instance=self._name, namespace="default", duration_s=duration_s
        )

        async def reconcile(writer: KubeClient, one: Any) -> float | None:
            name = one.metadata.name
            waits = self._last.get(name, 0.0) + AGAIN_S - time.monotonic()
            if waits > 0:
                return waits
            self._last[name] = time.monotonic()
            self._runs += 1
            run, version = self._runs, one.metadata.resource_version
            for step in ("begin", "end"):
                self._acting(run, name, member)
                try:
                    written = await writer.patch(
                        SITES,
                        name,
                        one.metadata.namespace,
                        merge={"metadata": {"annotations": {"example.com/step": step}}},
                        resource_version=version,
                    )
                except KubeConflict:
                    return 0.1
                except KubeNotFound:
                    return None
                version = written.metadata.resource_version
                if step == "begin":
                    for _ in range(random.randrange(1, 8)):
                        await asyncio.sleep(0.05)
                        self._acting(run, name, member)
            return AGAIN_S

        async with member:
            print("joined", flush=True)
            await member.run(reconcile, SITES.group, SITES.plural, workers=8)


async def main(kubeconfig: str, name: str, acts: int, duration_s: int) -> None:
    instance = Instance(name, acts)
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
        asyncio.run(main(sys.argv[1], sys.argv[2], file.fileno(), int(sys.argv[4])))
