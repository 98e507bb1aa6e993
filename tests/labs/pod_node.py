"""A node of entities whose deaths pods prove, as a process of its own.

    POD_NAME=… POD_NAMESPACE=… POD_UID=… python pod_node.py STORE KUBECONFIG METRICS

It leaves on SIGTERM.
"""

from __future__ import annotations

import asyncio
import os
import sys

from domicile import Entity, Node, Settings, handler


class Till(Entity, name="till"):
    """Counts in memory, so a new home would be noticed."""

    def __init__(self) -> None:
        self.total = 0

    @handler
    async def add(self, amount: int) -> int:
        self.total += amount
        return self.total


def settings(kubeconfig: str, http: str = "") -> Settings:
    """Short timings; nothing but proof frees shards."""
    return Settings(
        shards=6, ttl_s=3.0, link_timeout_s=2.0, fencing="health", http=http,
        health=f"kubernetes://?kubeconfig={kubeconfig}",
    )  # fmt: skip


async def main(store: str, kubeconfig: str, http: str) -> None:
    found = settings(kubeconfig, http)
    name = os.environ["POD_NAME"]
    async with Node(store, entities=[Till], node_id=name, settings=found) as node:
        await node.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
