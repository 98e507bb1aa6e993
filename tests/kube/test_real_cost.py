"""KR-10 on a real kube-apiserver: what a sharder takes does not grow with its objects (K5).

`make bench-rings` measures the same with 100,000 objects.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from domicile.kubeapi.kinds import RINGS
from proving.benchmarks.rings_parts import (
    RING,
    InstanceProcess,
    SharderProcess,
    ring_bench,
    status_bytes,
    until,
)
from proving.kube_server import KubernetesServer, NoKubernetes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")

FEW, MANY, LATE = 500, 5_000, 50
GROWTH_BYTES = 5 * 1024 * 1024


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
def test_a_sharder_takes_no_more_memory_with_ten_times_the_objects(
    server: KubernetesServer,
) -> None:
    async def body() -> None:
        async with ring_bench(server) as bench, AsyncExitStack() as stack:
            few = [f"few-{number}" for number in range(FEW)]
            bench.fill(few, [""] * FEW)
            stack.callback(InstanceProcess(server, "a", 15, "idle").end, signal.SIGTERM)
            sharder = SharderProcess(server)
            stack.callback(sharder.stop)

            async def assigned(count: int) -> bool:
                return await sharder.counted("assignments") >= count

            await until(lambda: assigned(FEW), "each of the few has its instance")
            before = status_bytes(sharder.pid, "VmHWM")
            # Those of the walk's end show that it has gone over all of the others.
            many = [f"many-{number}" for number in range(MANY)]
            last = [f"z-{number}" for number in range(LATE)]
            bench.fill([*many, *last], ["a"] * MANY + [""] * LATE)
            again = {"metadata": {"annotations": {"example.com/walk": "again"}}}
            await bench.client.patch(RINGS, RING, merge=again)
            await until(lambda: assigned(FEW + LATE), "a walk has found those that are new")
            grown = status_bytes(sharder.pid, "VmHWM") - before
            assert await bench.spread() == {"a": FEW + MANY + LATE}
            assert grown <= GROWTH_BYTES, f"{grown / 1024 / 1024:.1f} MiB more"

    asyncio.run(body())
