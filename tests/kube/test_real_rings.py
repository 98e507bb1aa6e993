"""Controller rings on a real API server: webhook, leases, moves, as `domicile ring` runs them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from kube_lab import GROUP, SITES, ApiServer, SharderProcess, install_websites, started, until

from domicile.errors import Fenced
from domicile.kube.hashring import HashRing, object_key
from domicile.kube.member import Ring, RingMember
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.errors import KubeConflict, KubeRefused
from domicile.kubeapi.kinds import CONFIG_MAPS, LEASES, RINGS
from domicile.kubeapi.objects import PartialObject
from domicile.ops.ring import look_at_ring

LABEL = "shard.alpha.sharding.timebertt.dev/websites"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    for one in started(tmp_path_factory.mktemp("kube")):
        asyncio.run(install_websites(one))
        yield one


async def make_site(client: KubeClient, number: int) -> PartialObject:
    return await client.create(SITES, {"metadata": {"name": f"site-{number}"}}, "default")


class Instance:
    """A controller in this process, with a client of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.done: dict[str, int] = {}
        self.member: RingMember | None = None

    async def run(self, server: ApiServer) -> None:
        async def reconcile(_: KubeClient, one: Any) -> None:
            self.done[one.metadata.name] = self.done.get(one.metadata.name, 0) + 1

        async with server.client() as client:
            member = Ring("websites").member(
                client, instance=self.name, namespace="default", unique_name=True
            )
            self.member = member
            async with member:
                await member.run(reconcile, GROUP, "websites")


async def spread(client: KubeClient) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in (await client.list(SITES)).items:
        owner = one.metadata.label(LABEL)
        counts[owner] = counts.get(owner, 0) + 1
    return counts


@pytest.mark.scenario("KR-01", "KR-02", "KR-05", "KR-07", "KR-08", "KR-09", partial=True)
@pytest.mark.scenario("KR-03", "KR-04", "KR-06")
def test_a_ring_from_its_first_instance_to_its_last(server: ApiServer, tmp_path: Path) -> None:
    asyncio.run(whole_life(server, tmp_path))


async def whole_life(server: ApiServer, home: Path) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(server.client())
        tasks: dict[str, asyncio.Task[None]] = {}
        instances: dict[str, Instance] = {}

        def start(name: str) -> None:
            instances[name] = Instance(name)
            tasks[name] = asyncio.ensure_future(instances[name].run(server))

        async def stop(name: str) -> None:
            tasks[name].cancel()
            await asyncio.wait((tasks.pop(name),))

        async def stop_all() -> None:
            for name in list(tasks):
                await stop(name)

        stack.push_async_callback(stop_all)
        with pytest.raises(KubeRefused, match="63 characters"):
            await client.create(RINGS, {"metadata": {"name": "r" * 64}, "spec": {}})
        spec = {
            "resources": [
                {
                    "group": GROUP,
                    "resource": "websites",
                    "controlledResources": [{"group": "", "resource": "configmaps"}],
                }
            ]
        }
        await client.create(RINGS, {"metadata": {"name": "websites"}, "spec": spec})
        first = SharderProcess(server, home, "sharder-1")
        stack.callback(first.stop)
        start("a")
        start("b")

        async def available(count: int) -> bool:
            ring = await client.get(RINGS, "websites")
            return ring.status.available_shards == count

        await until(lambda: available(2), "two instances are available")

        async def labelled() -> bool:
            made = await client.create(SITES, {"metadata": {"generateName": "x-"}}, "default")
            await client.delete(SITES, made.metadata.name, "default")
            probe = await client.create(SITES, {"metadata": {"name": "probe"}}, "default")
            await client.delete(SITES, "probe", "default")
            return bool(probe.metadata.label(LABEL)) and not made.metadata.label(LABEL)

        await until(labelled, "the webhook answers")
        ring = HashRing(("a", "b"))
        for number in range(30):
            site = await make_site(client, number)
            key = object_key(GROUP, "Website", "default", site.metadata.name)
            assert site.metadata.label(LABEL) == ring.owner(key)
            owner = {
                "apiVersion": f"{GROUP}/v1", "kind": "Website", "name": site.metadata.name,
                "uid": site.metadata.uid, "controller": True,
            }  # fmt: skip
            child = {"metadata": {"generateName": "child-", "ownerReferences": [owner]}}
            made = await client.create(CONFIG_MAPS, child, "default")
            assert made.metadata.label(LABEL) == site.metadata.label(LABEL)

        async def all_done() -> bool:
            seen = {name for one in instances.values() for name in one.done}
            return len([name for name in seen if name.startswith("site-")]) == 30

        await until(all_done, "each object was seen by its instance")

        start("c")

        async def settled(*names: str) -> bool:
            seen = await look_at_ring(client, "websites")
            instances_with = [n for n, one in seen["instances"].items() if one["objects"]]
            return (
                sorted(instances_with) == sorted(names)
                and not seen["unassigned_count"]
                and not seen["draining_count"]
            )

        await until(lambda: settled("a", "b", "c"), "objects moved to the new instance")
        drained = [
            one
            for one in server.audited()
            if one["verb"] == "patch" and one["objectRef"].get("resource") == "websites"
            and "drain.alpha" in str(one.get("requestObject"))
        ]  # fmt: skip
        assert drained, "objects of living instances are drained first"

        await stop("c")
        await until(lambda: settled("a", "b"), "objects of one that left moved at once", 20)

        # The webhook is away: requests succeed, and the next walk assigns.
        assert first.stop() == 0
        orphan = await make_site(client, 100)
        assert orphan.metadata.label(LABEL) == ""
        second = SharderProcess(server, home, "sharder-2")
        stack.callback(second.stop)
        await until(lambda: settled("a", "b"), "the next walk assigned it")
        leases = {one.metadata.name: one for one in (await client.list(LEASES)).items}
        assert leases["a"].metadata.label("alpha.sharding.timebertt.dev/state") == "ready"

        # The sharders list metadata from the cache, and watch no object of the ring (KR-09).
        for one in server.audited():
            if "domicile" not in one.get("userAgent", "") or one["verb"] not in ("list", "watch"):
                continue
            uri = one["requestURI"]
            if "/websites" in uri and "labelSelector=shard.alpha" not in uri and "/apis/exa" in uri:
                assert one["verb"] == "list" or "labelSelector" in uri, uri
        assert second.stop() == 0


@pytest.mark.scenario("KR-07", partial=True)
def test_a_lease_is_lost_by_a_take_and_by_deletion(server: ApiServer) -> None:
    async def body() -> None:
        async with server.client() as client:
            ring = Ring("lonely")
            for change in ("take", "delete"):
                async with ring.member(
                    client, instance=f"x-{change}", namespace="default", unique_name=True
                ) as one:
                    one.guard()
                    lease = await client.get(LEASES, one.instance, "default")
                    assert lease.spec.holder_identity == one.instance
                    if change == "delete":
                        await client.delete(LEASES, one.instance, "default")
                    else:
                        await until(lambda: taken(client, one.instance), "the Lease is taken")
                    async with asyncio.timeout(60):
                        await one.wait_lost()
                    with pytest.raises(Fenced):
                        one.guard()
                    with pytest.raises(Fenced):
                        await one.client.delete(CONFIG_MAPS, "x", "default")

    async def taken(client: KubeClient, name: str) -> bool:
        lease = await client.get(LEASES, name, "default")
        with suppress(KubeConflict):
            await client.patch(
                LEASES,
                name,
                "default",
                merge={"spec": {"holderIdentity": "shardlease-controller"}},
                resource_version=lease.metadata.resource_version,
            )
            return True
        return False

    asyncio.run(body())


def test_errors_of_the_real_server(server: ApiServer) -> None:
    async def body() -> None:
        async with server.client() as client:
            with pytest.raises(KubeRefused, match=r"get configmaps default/none.*404"):
                await client.get(CONFIG_MAPS, "none", "default")
            made = await client.create(CONFIG_MAPS, {"metadata": {"name": "cas"}}, "default")
            version = made.metadata.resource_version
            await client.patch(CONFIG_MAPS, "cas", "default", merge={"data": {"a": "b"}})
            step = {"op": "replace", "path": "/data/a", "value": "c"}
            stale = (
                client.patch(
                    CONFIG_MAPS, "cas", "default", merge={"data": {}}, resource_version=version
                ),
                client.patch(
                    CONFIG_MAPS, "cas", "default", operations=[step], resource_version=version
                ),
                client.delete(CONFIG_MAPS, "cas", "default", resource_version=version),
            )
            for one in stale:
                with pytest.raises(KubeConflict):
                    await one
            names = [one.metadata.name async for one in client.stream_metadata(CONFIG_MAPS)]
            assert "cas" in names

    asyncio.run(body())
    assert re.search(r"resourceVersion=0", server.audit.read_text())
