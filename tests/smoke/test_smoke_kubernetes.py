"""Smoke, on a real API server: a sharder with two instances of a controller, the death of a pod,
and a cluster whose store it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from kube_lab import GROUP, SITES, ApiServer, SharderProcess, install_websites, started, until
from smoke_lab import a_process_is_killed

from domicile.core.ids import Incarnation
from domicile.kube.member import Ring
from domicile.kube.pod_health import OwnPod, PodHealth
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.kinds import MACHINES, PODS, RINGS
from domicile.ports.health import Verdict

LABEL = "shard.alpha.sharding.timebertt.dev/websites"
OBJECTS = 8


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    yield from started(tmp_path)


async def instance(server: ApiServer, name: str, done: dict[str, str]) -> None:
    """A controller that notes what it was given."""

    async def reconcile(_: KubeClient, one: Any) -> None:
        done[one.metadata.name] = name

    async with server.client() as client:
        ring = Ring("websites").member(client, instance=name, namespace="default", unique_name=True)
        async with ring as member:
            await member.run(reconcile, GROUP, "websites")


async def objects_are_shared(server: ApiServer, client: KubeClient, home: Path) -> None:
    await install_websites(server)
    resources = [{"group": GROUP, "resource": "websites"}]
    ring = {"metadata": {"name": "websites"}, "spec": {"resources": resources}}
    await client.create(RINGS, ring)
    async with AsyncExitStack() as stack:
        sharder = SharderProcess(server, home, "sharder-1")
        stack.callback(sharder.stop)
        done: dict[str, str] = {}
        tasks = [asyncio.ensure_future(instance(server, name, done)) for name in ("a", "b")]

        async def end() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

        stack.push_async_callback(end)

        async def shared() -> bool:
            assert not any(task.done() for task in tasks)
            return (await client.get(RINGS, "websites")).status.available_shards == 2

        await until(shared, "two instances are available")

        async def answers() -> bool:
            probe = await client.create(SITES, {"metadata": {"name": "probe"}}, "default")
            await client.delete(SITES, "probe", "default")
            return bool(probe.metadata.label(LABEL))

        await until(answers, "the webhook answers")
        owners: dict[str, str] = {}
        for number in range(OBJECTS):
            body = {"metadata": {"name": f"site-{number}"}}
            made = await client.create(SITES, body, "default")
            owners[made.metadata.name] = made.metadata.label(LABEL)
        assert set(owners.values()) <= {"a", "b"}

        async def worked_on() -> bool:
            return all(done.get(name) == owner for name, owner in owners.items())

        await until(worked_on, "each instance works on its objects")


async def a_pod_dies(client: KubeClient) -> None:
    dead, judge = Incarnation("d" * 32), "judge"
    places: dict[str, str] = {}
    for name in ("dies", judge):
        await client.create(MACHINES, {"metadata": {"name": f"machine-of-{name}"}})
        containers = [{"name": "node", "image": "x"}]
        spec = {"nodeName": f"machine-of-{name}", "containers": containers}
        made = await client.create(PODS, {"metadata": {"name": name}, "spec": spec}, "default")
        own = OwnPod("default", name, made.metadata.uid)
        health = PodHealth(client, lambda own=own: own)
        places[name] = await health.find_place()
    health.placed(dead, places["dies"])
    running = asyncio.ensure_future(health.run(lambda: None, lambda: 3))

    async def cost_is_told() -> bool:
        found = (await client.get(PODS, judge, "default")).metadata
        return found.annotation("controller.kubernetes.io/pod-deletion-cost") == "3"

    async def is_dead() -> bool:
        return health.verdict(dead) is Verdict.DEAD

    try:
        await until(cost_is_told, "the deletion cost is told")
        assert not await is_dead()
        state = {"terminated": {"exitCode": 137}}
        status = {"name": "node", "state": state, "restartCount": 0, "ready": False,
                  "image": "x", "imageID": "x"}  # fmt: skip
        said = {"status": {"phase": "Failed", "containerStatuses": [status]}}
        await client.patch(PODS, "dies", "default", merge=said, subresource="status")
        await until(is_dead, "the watch proves it")
        assert "pod default/dies" in health.evidence(dead)
    finally:
        running.cancel()
        await asyncio.wait((running,))


def test_objects_are_shared_and_a_dead_pod_is_proved(server: ApiServer, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with server.client() as client:
            await objects_are_shared(server, client, tmp_path)
            await a_pod_dies(client)

    asyncio.run(scenario())


def test_a_killed_process_is_replaced(server: ApiServer) -> None:
    asyncio.run(a_process_is_killed(f"kubernetes://default?kubeconfig={server.kubeconfig}"))
