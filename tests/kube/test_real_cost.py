"""KR-10 on a real kube-apiserver: what a sharder takes does not grow with its objects (K5).

`make bench-rings` measures more of it, and compares.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from domicile.kubeapi.kinds import CONFIG_MAPS, LEASES, RINGS
from proving.benchmarks.rings_parts import (
    RING,
    SHARED,
    InstanceProcess,
    RingBench,
    SharderProcess,
    forget_most,
    ring_bench,
    status_bytes,
    until,
)
from proving.kube_server import KubernetesServer, NoKubernetes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")

SIZES = (1_000, 10_000, 100_000)
LATE = 50
CREATES = 200
RENEWALS = 4
MIB = 1024 * 1024
GROWTH_MIB, MOST_MIB = 5, 90
CPU_FACTOR, CPU_LEAST_S = 3, 0.2
"""Processor time differs with what else a machine does, but not by much. Objects are 100 times as
many."""


@dataclass
class Cost:
    """What a sharder took with so many objects."""

    most_mib: float
    """While it walked over all of them."""
    idle_s: float
    """Processor time while nothing changed but an instance's Lease."""
    creating_s: float
    """Processor time for new objects."""


@pytest.fixture
def server() -> Iterator[KubernetesServer]:
    try:
        made = KubernetesServer()
    except NoKubernetes as error:
        pytest.skip(str(error))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.mark.scenario("KR-10")
def test_a_sharder_takes_no_more_with_a_hundred_times_the_objects(
    server: KubernetesServer,
) -> None:
    async def body() -> None:
        async with ring_bench(server) as bench, AsyncExitStack() as stack:
            stack.callback(InstanceProcess(server, "a", 15, "idle").end, signal.SIGTERM)
            sharder = SharderProcess(server)
            stack.callback(sharder.stop)
            await until(lambda: bench.available(1), "an instance is there")
            costs: list[Cost] = []
            there = 0
            for size in SIZES:
                costs.append(await cost(bench, sharder, size, size - there))
                there = sum((await bench.spread()).values())
                assert await bench.spread() == {"a": there}
            few = costs[0]
            for one in costs:
                assert one.most_mib <= min(MOST_MIB, few.most_mib + GROWTH_MIB), costs
                assert one.idle_s <= CPU_FACTOR * few.idle_s + CPU_LEAST_S, costs
                assert one.creating_s <= CPU_FACTOR * few.creating_s + CPU_LEAST_S, costs
            print(costs)

    asyncio.run(body())


async def cost(bench: RingBench, sharder: SharderProcess, size: int, more: int) -> Cost:
    """Make so many objects more, have all of them walked over, then let it rest, then ask it."""
    names = [f"m-{size}-{number}" for number in range(more - LATE)]
    # Those of the walk's end show that it has gone over all of the others.
    late = [f"z-{size}-{number}" for number in range(LATE)]
    await asyncio.to_thread(bench.fill, names + late, ["a"] * len(names) + [""] * LATE)
    forget_most(sharder.pid)
    assigned = await sharder.counted("assignments")
    again = {"metadata": {"annotations": {"example.com/walk": str(size)}}}
    await bench.client.patch(RINGS, RING, merge=again)

    async def walked() -> bool:
        return await sharder.counted("assignments") >= assigned + LATE

    await until(walked, f"a walk has found the new ones among {size}", 1.0)
    most_mib = status_bytes(sharder.pid, "VmHWM") / MIB
    before = await rest(bench, sharder)
    await rest(bench, sharder)
    idle_s, before = sharder.cpu_s() - before, sharder.cpu_s()
    for number in range(CREATES):
        made = {"metadata": {"name": f"c-{size}-{number}"}}
        await bench.client.create(CONFIG_MAPS, made, SHARED)
    return Cost(most_mib, idle_s, sharder.cpu_s() - before)


async def rest(bench: RingBench, sharder: SharderProcess) -> float:
    """Wait for some renewals of the instance's Lease; then what the sharder has used so far."""
    seen: dict[str | None, None] = {}

    async def renewed() -> bool:
        seen[(await bench.client.get(LEASES, "a", "default")).spec.renew_time] = None
        return len(seen) > RENEWALS

    await until(renewed, "the instance renews its Lease", 0.5)
    return sharder.cpu_s()
