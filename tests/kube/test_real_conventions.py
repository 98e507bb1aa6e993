"""What a ring shows and what it leaves alone, on a real API server: conditions, states of Leases,
the webhook's calls, namespaces, and instances that know nothing but the conventions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
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
from xxhash import xxh64_intdigest

from domicile.kube.controller import RingController
from domicile.kube.hashring import BoundedRing, object_key
from domicile.kube.member import Ring
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.errors import KubeNotFound, KubeRefused
from domicile.kubeapi.kinds import (
    CONFIG_MAPS,
    EVENTS,
    LEASES,
    NAMESPACES,
    RINGS,
    WEBHOOKS,
    ApiKind,
)
from domicile.kubeapi.objects import PartialObject, micro_time
from domicile.ops.ring import look_at_ring

PREFIX = "alpha.sharding.timebertt.dev/"
STATE = f"{PREFIX}state"
TAKER = "shardlease-controller"

POLICY = "ValidatingAdmissionPolicy"
POLICIES, BINDINGS = (
    ApiKind("admissionregistration.k8s.io", "v1", plural, kind, False, PartialObject)
    for plural, kind in (
        ("validatingadmissionpolicies", POLICY),
        ("validatingadmissionpolicybindings", f"{POLICY}Binding"),
    )
)


PROBE = "probe"
"""An object that shows whether the webhook answers. A walk may find it, too."""


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


@asynccontextmanager
async def no_lease_can_be_taken(client: KubeClient) -> AsyncGenerator[None]:
    """The API server refuses it to everybody, by a policy."""
    rule = {"apiGroups": ["coordination.k8s.io"], "apiVersions": ["v1"], "resources": ["leases"],
            "operations": ["CREATE", "UPDATE"]}  # fmt: skip
    refused = f"!has(object.spec.holderIdentity) || object.spec.holderIdentity != '{TAKER}'"
    policy = {"failurePolicy": "Fail", "matchConstraints": {"resourceRules": [rule]},
              "validations": [{"expression": refused}]}  # fmt: skip
    name = {"name": "untaken"}
    await client.create(POLICIES, {"metadata": name, "spec": policy})
    bound = {"policyName": "untaken", "validationActions": ["Deny"]}
    await client.create(BINDINGS, {"metadata": name, "spec": bound})

    async def in_force() -> bool:
        body = {"metadata": {"name": "probe"}, "spec": {"holderIdentity": TAKER}}
        try:
            await client.create(LEASES, body, "default")
        except KubeRefused:
            return True
        await client.delete(LEASES, "probe", "default")
        return False

    await until(in_force, "the policy is in force")
    yield
    await client.delete(BINDINGS, "untaken")
    await client.delete(POLICIES, "untaken")


async def condition(client: KubeClient, ring: str) -> dict[str, str]:
    found = (await client.get(RINGS, ring)).status.conditions
    return {one.type: f"{one.status} {one.reason}" for one in found}


async def webhook_works(client: KubeClient, ring: str) -> bool:
    made = await client.create(SITES, {"metadata": {"name": PROBE}}, "default")
    await client.delete(SITES, PROBE, "default")
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


@pytest.mark.scenario("KR-02", "KR-07")
def test_an_instance_by_conventions_alone_lives_and_dies(server: ApiServer, tmp_path: Path) -> None:
    """Instances that no code of ours renews: one is there for long, one falls silent, one leaves.
    The wall clock of the silent one is a day ahead, which must not count (K1)."""

    async def body() -> None:
        async with ring_of(server, tmp_path, "bare") as (client, _):
            label, drain = f"shard.{PREFIX}bare", f"drain.{PREFIX}bare"
            await announce(client, "bare", "stays")
            await until(lambda: webhook_works(client, "bare"), "the webhook answers")
            async with no_lease_can_be_taken(client):
                tomorrow = micro_time(datetime.now(UTC) + timedelta(days=1))
                await announce(
                    client, "bare", "silent", leaseDurationSeconds=8, renewTime=tomorrow
                )  # fmt: skip
                began = asyncio.get_running_loop().time()
                await until(lambda: both(client), "both are in the ring", 60)
                given: dict[str, str] = {}
                for number in range(12):
                    made = await client.create(
                        SITES, {"metadata": {"name": f"site-{number}"}}, "default"
                    )
                    given[made.metadata.name] = made.metadata.label(label)
                # It is late, and then it is uncertain. That is no reason to move anything (K2).
                assert set(given.values()) == {"silent", "stays"}
                await until(lambda: shows(client, "uncertain"), "it is uncertain")
                assert asyncio.get_running_loop().time() - began >= 16.0
                await until(lambda: refused(2), "its Lease could not be taken, twice")
                assert await shows(client, "uncertain")
                assert await owners(client) == given
                assert not moved()

            await until(lambda: gone(client), "the orphaned Lease is deleted", 300)
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
            seen = [one for one in dict.fromkeys(states) if one]
            assert seen == ["ready", "expired", "uncertain", "dead"]
            assert set((await owners(client)).values()) == {"stays"}
            assert taken()
            assert moved()
            assert taken()[0] < moved()[0], "the Lease is taken, then objects move"

            # A third one by conventions: what it gets is drained, and let go of by hand.
            await announce(client, "bare", "third")

            async def drained() -> list[Any]:
                found = (await client.list(SITES)).items
                return [one for one in found if one.metadata.has_label(drain)]

            await until(drained, "the sharder asks for objects")
            for one in await drained():
                assert one.metadata.label(label) == "stays"
                after = await client.patch(
                    SITES,
                    one.metadata.name,
                    "default",
                    merge={"metadata": {"labels": {label: None, drain: None}}},
                    resource_version=one.metadata.resource_version,
                )
                assert after.metadata.label(label) == "third"

            # It gives its Lease of 600 s back: its objects do not wait for that to end.
            left = {"spec": {"holderIdentity": ""}}
            await client.patch(LEASES, "third", "default", merge=left)
            await until(lambda: all_at_the_one_that_stays(client), "they move at once")

    async def shows(client: KubeClient, state: str) -> bool:
        return (await client.get(LEASES, "silent", "default")).metadata.label(STATE) == state

    async def owners(client: KubeClient) -> dict[str, str]:
        found = (await client.list(SITES, "default")).items
        return {one.metadata.name: one.metadata.label(f"shard.{PREFIX}bare") for one in found}

    async def all_at_the_one_that_stays(client: KubeClient) -> bool:
        drains = (await client.list(SITES, labels=f"drain.{PREFIX}bare")).items
        return not drains and set((await owners(client)).values()) == {"stays"}

    async def gone(client: KubeClient) -> bool:
        try:
            await client.get(LEASES, "silent", "default")
        except KubeNotFound:
            return True
        return False

    async def both(client: KubeClient) -> bool:
        seen = await look_at_ring(client, "bare")
        return [one["state"] for one in seen["instances"].values()].count("ready") >= 2

    def takes() -> list[Any]:
        return [
            one for one in server.audited()
            if one.get("objectRef", {}).get("name") == "silent" and one["verb"] == "patch"
            and TAKER in str(one.get("requestObject", {}).get("spec"))
        ]  # fmt: skip

    async def refused(times: int) -> bool:
        return len([one for one in takes() if one["responseStatus"]["code"] == 422]) >= times

    def taken() -> list[int]:
        return versions(takes())

    def moved() -> list[int]:
        return versions(
            one for one in server.audited()
            if one.get("objectRef", {}).get("resource") == "websites" and one["verb"] == "patch"
            and one["user"]["username"] == SHARDER
        )  # fmt: skip

    def versions(entries: Iterable[Any]) -> list[int]:
        return sorted(
            int(one["responseObject"]["metadata"]["resourceVersion"])
            for one in entries
            if one["responseStatus"]["code"] < 300
        )

    asyncio.run(body())


def upstream_owner(key: str, instances: Sequence[str]) -> str:
    """The instance by the wire's own rule: xxh64, 100 tokens each, the first one at or after."""
    tokens = sorted(
        (xxh64_intdigest(f"{name}{number}".encode()), name)
        for name in instances
        for number in range(100)
    )
    at = xxh64_intdigest(key.encode())
    return next((name for token, name in tokens if token >= at), tokens[0][1])


@pytest.mark.scenario("KR-15")
def test_labels_and_hashes_are_those_of_the_wire(server: ApiServer, tmp_path: Path) -> None:
    """Instance a is ours; b and c are known by their Leases alone. What a sharder of others would
    have written is written by hand."""
    assert xxh64_intdigest(b"a0") == 0xF095E781A7125E70
    names = ("a", "b", "c")
    assert upstream_owner("/Secret/default/foo", names) == "b"
    assert upstream_owner("/ConfigMap//x", names) == "a"

    def wanted(name: str) -> str:
        return upstream_owner(f"{GROUP}/Website/default/{name}", names)

    async def body() -> None:
        async with (
            ring_of(server, tmp_path, "wire") as (client, _),
            AsyncExitStack() as stack,
        ):
            label, drain = f"shard.{PREFIX}wire", f"drain.{PREFIX}wire"
            handled: dict[str, None] = {}

            async def reconcile(_: KubeClient, one: Any) -> None:
                handled[one.metadata.name] = None

            async def run() -> None:
                async with Ring("wire").member(client, instance="a", unique_name=True) as member:
                    await member.run(reconcile, GROUP, "websites")

            async def end(task: asyncio.Task[None]) -> None:
                task.cancel()
                await asyncio.wait((task,))

            stack.push_async_callback(end, asyncio.ensure_future(run()))
            for name in ("b", "c"):
                await announce(client, "wire", name)

            async def there() -> bool:
                return (await client.get(RINGS, "wire")).status.available_shards == 3

            await until(there, "three instances are there")
            await until(lambda: webhook_works(client, "wire"), "the webhook answers")
            # Ours writes what theirs would.
            made = [
                await client.create(SITES, {"metadata": {"name": f"site-{number}"}}, "default")
                for number in range(40)
            ]
            given = {one.metadata.name: one.metadata.label(label) for one in made}
            assert given == {name: wanted(name) for name in given}
            assert set(given.values()) == set(names)
            # Ours understands what theirs has written: an object's instance.
            mine = next(f"given-{n}" for n in range(99) if wanted(f"given-{n}") == "a")
            labels = {label: "a"}
            await client.create(SITES, {"metadata": {"name": mine, "labels": labels}}, "default")

            async def worked_on() -> bool:
                return {mine, *(name for name, at in given.items() if at == "a")} <= handled.keys()

            await until(worked_on, "our instance works on its objects")
            assert all(wanted(name) == "a" for name in handled)
            # And that it is to let go: both labels in one patch, by the version that was read.
            asks = {"metadata": {"labels": {drain: "true"}}}
            asked = await client.patch(SITES, mine, "default", merge=asks)

            async def let_go() -> bool:
                found = (await client.get(SITES, mine, "default")).metadata
                return not found.has_label(drain) and found.label(label) == "a"

            await until(let_go, "it lets go, and gets it back")
            both = {label: None, drain: None}
            version = asked.metadata.resource_version
            meant = {"metadata": {"labels": both, "resourceVersion": version}}
            assert meant in [one.get("requestObject") for one in server.audited()]

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
            # Without a name at admission it is left to a walk. The sharder's own patch is not
            # reviewed, though the object had no instance before.
            unnamed = await client.create(SITES, {"metadata": {"generateName": "x-"}}, "default")
            assert not unnamed.metadata.label(label)
            await called(1, "a new object without a name")
            again = {"metadata": {"annotations": {"example.com/walk": "again"}}}
            await client.patch(RINGS, "hooked", merge=again)

            async def assigned() -> bool:
                found = await client.get(SITES, unnamed.metadata.name, "default")
                return found.metadata.label(label) == "only"

            await until(assigned, "a walk has found it")
            await called(0, "an assignment by the sharder")
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
