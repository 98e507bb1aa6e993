"""A member of a ring beside its API server in memory, as a process that may be ended (L4).

    python ring_member_program.py KIND WHAT

KIND is `member` or `ranges`. WHAT its one call does: `block` the event loop for ever; work in a
`thread` for ever; work in a `slow-thread` until the call is cancelled; wait in `async` for ever.
Except for `block` the member leaves while the call runs. Then the program prints who holds the
Lease, and ends.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any

from domicile.kube.member import Ring
from domicile.kubeapi.client import KubeClient
from domicile.testing.kube import FakeApiServer

RING = Ring("websites")
FOREVER_S = 3600.0


async def main(kind: str, what: str) -> None:
    server = FakeApiServer()
    server.serve("example.com", "websites", "Website")
    labels = {RING.shard_label: "a"}
    server.put("websites", {"metadata": {"name": "home", "labels": labels}}, "example.com")
    began, over = asyncio.Event(), threading.Event()

    async def reconcile(_: KubeClient, __: Any) -> None:
        began.set()
        match what:
            case "block":
                time.sleep(FOREVER_S)  # noqa: ASYNC251 - what is to be stopped
            case "thread":
                await asyncio.to_thread(time.sleep, FOREVER_S)
            case "slow-thread":
                try:
                    await asyncio.to_thread(over.wait)
                except asyncio.CancelledError:
                    over.set()
                    raise
            case _:
                await asyncio.Event().wait()

    client = KubeClient(server.exchange("a"))
    made = RING.member if kind == "member" else RING.ranges
    member = made(
        client, instance="a", namespace="default", duration_s=3, unique_name=True, ends_process=True
    )
    async with member:
        work = asyncio.ensure_future(member.run(reconcile, "example.com", "websites", settle_s=0.5))
        await began.wait()
        work.cancel()
        await asyncio.wait((work,))
    (lease,) = (
        one
        for one in server.objects("leases", "coordination.k8s.io")
        if one["metadata"]["name"] == "a"
    )
    print(f"held by {lease['spec']['holderIdentity'] or 'nobody'}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
