"""What a ring shows and what it leaves alone, on a real API server: conditions, states of Leases,
the webhook's calls, namespaces, and instances that know nothing but the conventions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from kube_lab import (
    GROUP,
    SHARDER,
    SITES,
    ApiServer,
    SharderProcess,
    install_websites,
    started,
    until,
)

from domicile.kube.controller import RingController
from domicile.kube.hashring import BoundedRing, HashRing, object_key
from domicile.kube.member import Ring
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.errors import KubeNotFound, KubeRefused
from domicile.kubeapi.kinds import CONFIG_MAPS, EVENTS, LEASES, NAMESPACES, RINGS, WEBHOOKS
from domicile.kubeapi.objects import micro_time
from domicile.ops.ring import look_at_ring

PREFIX = "alpha.sharding.timebertt.dev/"
STATE = f"{PREFIX}state"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    for one in started(tmp_path_factory.mktemp("kube")):
        asyncio.run(install_websites(one))
        yield one


@asynccontextmanager
async def ring_of(
    server: ApiServer, home: Path, name: str, *more: str, **spec: Any
) -> AsyncGenerator[tuple[KubeClient, SharderProcess]]:
    """A ring, a sharder and a client; no trace of them afterwards."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(server.client())
        resources = spec.pop("resources", [{"group": GROUP, "resource": "websites"}])
        annotations = spec.pop("annotations", {})
        body = {
            "metadata": {"name": name, "annotations": annotations},
            "spec": {"resources": resources, **spec},
        }
        await client.create(RINGS, body)
        stack.push_async_callback(forget, client, name)
        sharder = SharderProcess(server, home, "sharder-1", *more, user=SHARDER)
        stack.callback(sharder.stop)
        yield client, sharder
        for one in (await client.list(SITES)).items:
            await client.delete(SITES, one.metadata.name, one.metadata.namespace)


async def forget(client: KubeClient, ring: str) -> None:
    """Delete a ring, and what the garbage collector would delete: none runs here."""
    await client.delete(RINGS, ring)
    with suppress(KubeNotFound):
        await client.delete(WEBHOOKS, f"controllerring-{ring}")
    for one in (await client.list(LEASES, "default", labels=f"{PREFIX}controllerring")).items:
        with suppress(KubeNotFound):
            await client.delete(LEASES, one.metadata.name, "default")


async def announce(client: KubeClient, ring: str, name: str, **spec: Any) -> None:
    """An instance as any program would announce it: a Lease with the ring's label."""
    await client.create(
        LEASES,
        {
            "metadata": {"name": name, "labels": {f"{PREFIX}controllerring": ring}},
            "spec": {
                "holderIdentity": name, "leaseDurationSeconds": 600,
                "renewTime": micro_time(datetime.now(UTC)), **spec,
            },
        },
        "default",
    )  # fmt: skip


async def condition(client: KubeClient, ring: str) -> dict[str, str]:
    found = (await client.get(RINGS, ring)).status.conditions
    return {one.type: f"{one.status} {one.reason}" for one in found}


async def webhook_works(client: KubeClient, ring: str) -> bool:
    body = {"metadata": {"name": "probe"}}
    made = await client.create(SITES, body, "default")
    await client.delete(SITES, "probe", "default")
    return bool(made.metadata.label(f"shard.{PREFIX}{ring}"))


@pytest.mark.scenario("KR-01")
def test_a_ring_is_validated_and_reports(server: ApiServer, tmp_path: Path) -> None:
    async def body() -> None:
        one = {"group": GROUP, "resource": "websites"}
        wrong: list[dict[str, Any]] = [
            {"metadata": {"name": "r" * 64}, "spec": {"resources": [one]}},
            {"metadata": {"name": "twice"}, "spec": {"resources": [one, one]}},
            {"metadata": {"name": "nothing"}, "spec": {"resources": [{"group": GROUP}]}},
        ]
        async with server.client() as client:
            for refused in wrong:
                with pytest.raises(KubeRefused):
                    await client.create(RINGS, refused)
        async with ring_of(server, tmp_path, "first") as (client, _):

            async def shown(shards: int, available: int, ready: str) -> bool:
                status = (await client.get(RINGS, "first")).status
                seen = (await condition(client, "first")).get("Ready")
                return (status.shards, status.available_shards, seen) == (shards, available, ready)

            good = "True ReconciliationSucceeded"
            await announce(client, "first", "x1")
            await announce(client, "first", "x2", holderIdentity="")
            await until(lambda: shown(2, 1, good), "two instances, one of them gone")
            generation = (await client.get(RINGS, "first")).metadata.generation
            assert (await client.get(RINGS, "first")).status.observed_generation == generation
            missing: dict[str, Any] = {
                "spec": {"resources": [{"group": "example.com", "resource": "planets"}]}
            }
            await client.patch(RINGS, "first", merge=missing)
            bad = "False ReconciliationFailed"
            await until(lambda: shown(2, 1, bad), "a resource that nobody serves is told")
            await client.patch(RINGS, "first", merge={"spec": {"resources": [one]}})
            await until(lambda: shown(2, 1, good), "it is well again")

    asyncio.run(body())


@pytest.mark.scenario("KR-02", "KR-07", "KR-15")
def test_an_instance_by_conventions_alone_lives_and_dies(server: ApiServer, tmp_path: Path) -> None:
    """Two instances that no code of ours renews: one is there for long, one falls silent. Its wall
    clock is a day ahead, which must not count (K1)."""

    async def body() -> None:
        async with ring_of(server, tmp_path, "bare") as (client, _):
            label = f"shard.{PREFIX}bare"
            await announce(client, "bare", "stays")
            await until(lambda: webhook_works(client, "bare"), "the webhook answers")
            tomorrow = micro_time(datetime.now(UTC) + timedelta(days=1))
            await announce(
                client, "bare", "silent", leaseDurationSeconds=8, renewTime=tomorrow
            )  # fmt: skip
            began = asyncio.get_running_loop().time()
            ring = HashRing(("silent", "stays"))
            await until(lambda: both(client), "both are in the ring", 60)
            expected: dict[str, str] = {}
            given: dict[str, str] = {}
            for number in range(12):
                body = {"metadata": {"name": f"site-{number}"}}
                made = await client.create(SITES, body, "default")
                # The wire's own hash decides, whatever program computes it.
                key = object_key(GROUP, "Website", "default", f"site-{number}")
                expected[f"site-{number}"] = ring.owner(key)
                given[f"site-{number}"] = made.metadata.label(label)
            seen_now = (await client.get(LEASES, "silent", "default")).metadata.label(STATE)
            assert seen_now in ("ready", "expired"), "too slow a machine: it is gone already"
            assert given == expected
            assert set(given.values()) == {"silent", "stays"}

            async def gone() -> bool:
                try:
                    await client.get(LEASES, "silent", "default")
                except KubeNotFound:
                    return True
                return False

            await until(gone, "the orphaned Lease is deleted", 300)
            assert asyncio.get_running_loop().time() - began >= 76.0
            written = [
                one for one in server.audited()
                if one.get("objectRef", {}).get("resource") == "leases"
                and one["objectRef"].get("name") == "silent"
                and one["user"]["username"] == SHARDER and one["responseStatus"]["code"] < 300
            ]  # fmt: skip
            assert written[-1]["verb"] == "delete", "it is deleted because it is orphaned"
            states = [
                str(one["responseObject"]["metadata"]["labels"].get(STATE, ""))
                for one in written[:-1]
            ]
            # The sharder takes an uncertain Lease at once, so its label may be refused.
            order = ["ready", "expired", "uncertain", "dead"]
            seen = [one for one in dict.fromkeys(states) if one]
            assert [one for one in order if one in seen] == seen
            assert {"ready", "expired", "dead"} <= set(seen)
            owners = {one.metadata.label(label) for one in (await client.list(SITES)).items}
            assert owners == {"stays"}
            taken = [
                one for one in server.audited()
                if one.get("objectRef", {}).get("name") == "silent" and one["verb"] == "patch"
                and "shardlease-controller" in str(one.get("requestObject", {}).get("spec"))
            ]  # fmt: skip
            moved = [
                one for one in server.audited()
                if one.get("objectRef", {}).get("resource") == "websites" and one["verb"] == "patch"
                and one["user"]["username"] == SHARDER
            ]  # fmt: skip
            assert taken
            assert moved
            assert versions(taken)[0] < versions(moved)[0], "the Lease is taken, then objects move"

            # A third one by conventions: what it gets is drained, and let go of by hand.
            await announce(client, "bare", "third")

            async def drained() -> list[Any]:
                found = (await client.list(SITES)).items
                return [one for one in found if one.metadata.has_label(f"drain.{PREFIX}bare")]

            await until(drained, "the sharder asks for objects")
            for one in await drained():
                assert one.metadata.label(label) == "stays"
                labels = {label: None, f"drain.{PREFIX}bare": None}
                after = await client.patch(
                    SITES,
                    one.metadata.name,
                    "default",
                    merge={"metadata": {"labels": labels}},
                    resource_version=one.metadata.resource_version,
                )
                assert after.metadata.label(label) == "third"

    async def both(client: KubeClient) -> bool:
        seen = await look_at_ring(client, "bare")
        return [one["state"] for one in seen["instances"].values()].count("ready") >= 2

    def versions(entries: list[Any]) -> list[int]:
        return sorted(
            int(one["responseObject"]["metadata"]["resourceVersion"])
            for one in entries
            if one["responseStatus"]["code"] < 300
        )

    asyncio.run(body())


async def webhook_calls(server: ApiServer) -> int:
    """How often the API server has called the ring's webhook, by its own count."""
    shown = await server.text("/metrics")
    found = re.findall(r"^apiserver_admission_webhook_request_total{(.*)} (\d+)", shown, re.M)
    return sum(int(count) for labels, count in found if "sharder.sharding" in labels)


@pytest.mark.scenario("KR-05")
def test_the_webhook_is_called_for_nothing_else(server: ApiServer, tmp_path: Path) -> None:
    async def body() -> None:
        async with ring_of(server, tmp_path, "hooked") as (client, _):
            await announce(client, "hooked", "only")
            await until(lambda: webhook_works(client, "hooked"), "the webhook answers")
            label = f"shard.{PREFIX}hooked"
            calls = [await webhook_calls(server)]

            async def called(times: int, what: str) -> None:
                calls.append(await webhook_calls(server))
                assert calls[-1] - calls[-2] == times, what

            await client.create(CONFIG_MAPS, {"metadata": {"name": "other"}}, "default")
            await called(0, "a kind that is not the ring's")
            await client.create(SITES, {"metadata": {"name": "one"}}, "default")
            await called(1, "a new object")
            merge = {"metadata": {"annotations": {"a": "b"}}}
            await client.patch(SITES, "one", "default", merge=merge)
            await called(0, "a change of an object that has an instance")
            free = {"metadata": {"labels": {label: None}}}
            after = await client.patch(SITES, "one", "default", merge=free)
            assert after.metadata.label(label) == "only"
            await called(1, "the removal of its instance")
            await client.delete(SITES, "one", "default")
            await called(0, "a deletion")

    asyncio.run(body())


@pytest.mark.scenario("KR-13", partial=True)
def test_namespaces_are_selected_by_their_labels(server: ApiServer, tmp_path: Path) -> None:
    async def body() -> None:
        selector = {"matchLabels": {"shared": "yes"}}
        async with ring_of(server, tmp_path, "chosen", namespaceSelector=selector) as (client, _):
            label = f"shard.{PREFIX}chosen"
            await announce(client, "chosen", "only")
            for name, labels in (("inside", {"shared": "yes"}), ("outside", {})):
                await client.create(NAMESPACES, {"metadata": {"name": name, "labels": labels}})

            async def assigned(namespace: str, name: str) -> bool:
                found = await client.get(SITES, name, namespace)
                return found.metadata.label(label) == "only"

            for namespace in ("inside", "outside"):
                await client.create(SITES, {"metadata": {"name": "before"}}, namespace)
            await until(lambda: assigned("inside", "before"), "a chosen namespace")
            assert not await assigned("outside", "before")
            # A change of the labels is seen at once, without waiting for the next full walk.
            merge = {"metadata": {"labels": {"shared": "yes"}}}
            await client.patch(NAMESPACES, "outside", merge=merge)
            await until(lambda: assigned("outside", "before"), "a namespace that is chosen now")

    asyncio.run(body())


@pytest.mark.scenario("KR-11")
def test_each_of_three_instances_has_a_third(server: ApiServer, tmp_path: Path) -> None:
    async def body() -> None:
        level = {"domicile.dev/hash": "bounded"}
        async with (
            ring_of(server, tmp_path, "thirds", annotations=level) as (client, _),
            AsyncExitStack() as stack,
        ):
            for number in range(300):
                await client.create(SITES, {"metadata": {"name": f"site-{number}"}}, "default")
            handled: dict[str, dict[str, None]] = {}
            controllers: dict[str, RingController] = {}

            async def run(name: str) -> None:
                async def reconcile(_: KubeClient, one: Any) -> None:
                    handled.setdefault(name, {})[one.metadata.name] = None

                async with Ring("thirds").member(client, instance=name, unique_name=True) as member:
                    made = RingController(member, reconcile, GROUP, "websites")
                    controllers[name] = made
                    await made.run()

            async def end(task: asyncio.Task[None]) -> None:
                task.cancel()
                await asyncio.wait((task,))

            for name in ("t1", "t2", "t3"):
                stack.push_async_callback(end, asyncio.ensure_future(run(name)))

            async def rests() -> bool:
                sizes = [len(one.objects) for one in controllers.values()]
                seen = await look_at_ring(client, "thirds")
                counts = [one["objects"] for one in seen["instances"].values()]
                resting = not seen["draining_count"] and not seen["unassigned_count"]
                return resting and sum(sizes) == 300 and sorted(sizes) == sorted(counts)

            await until(rests, "each has its part", 180)
            ring = BoundedRing(("t1", "t2", "t3"))
            for name, one in controllers.items():
                assert 90 <= len(one.objects) <= 110
                keys = [object_key(GROUP, "Website", *key) for key in one.objects]
                assert {ring.owner(key) for key in keys} == {name}
            for name, one in controllers.items():
                assert {key[1] for key in one.objects} <= handled[name].keys()

    asyncio.run(body())


def test_an_object_that_is_kept_is_told_in_an_event(server: ApiServer, tmp_path: Path) -> None:
    async def body() -> None:
        async with ring_of(server, tmp_path, "kept", "--drain-deadline", "2") as (client, sharder):
            await announce(client, "kept", "keeps")
            await until(lambda: webhook_works(client, "kept"), "the webhook answers")
            for number in range(6):
                await client.create(SITES, {"metadata": {"name": f"kept-{number}"}}, "default")
            await announce(client, "kept", "waits")

            async def told() -> bool:
                found = (await client.list(EVENTS, "default")).items
                return any(one.metadata.name.startswith("domicile-drainoverdue-") for one in found)

            await until(told, "an event tells of the object")
            owners = {
                one.metadata.label(f"shard.{PREFIX}kept")
                for one in (await client.list(SITES)).items
            }
            assert owners == {"keeps"}, "it is never moved behind its instance's back"
            status = (await client.get(RINGS, "kept")).status.conditions[0]
            assert "not let go of in time" in status.message
            uid = (await client.get(RINGS, "kept")).metadata.uid
            shown = await asyncio.to_thread(sharder.metrics)
            for name in (
                "controller_sharding_assignments_total",
                "controller_sharding_drains_total",
                "controller_sharding_ring_calculations_total",
                'shard="keeps",controllerring="kept",state="ready"} 1',
                f'_controllerring_status_shards{{controllerring="kept",uid="{uid}"}} 2',
            ):
                assert name in shown

    asyncio.run(body())
