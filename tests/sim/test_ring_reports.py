"""What people are told of a ring, in virtual time: its status, events, its webhook, its walks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rings_lab import DRAIN, GROUP, LABEL, RING, Rings

from domicile.kube.conventions import GROUP as RING_GROUP
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.exchange import ApiRequest
from domicile.kubeapi.kinds import NAMESPACES, RINGS, WEBHOOKS, ApiKind
from domicile.kubeapi.objects import ControllerRing, PartialObject
from domicile.testing.kube import ApiFault

SITES = ApiKind(GROUP, "v1", "websites", "Website", True, PartialObject)


def admin(rings: Rings) -> KubeClient:
    return KubeClient(rings.server.exchange("admin"), random=rings.world.stream("admin"))


def ring_of(rings: Rings) -> dict[str, Any]:
    (found,) = rings.server.objects("controllerrings", RING_GROUP)
    return found


def message(rings: Rings) -> str:
    conditions = ring_of(rings).get("status", {}).get("conditions") or [{"message": ""}]
    said: str = conditions[0]["message"]
    return said


def events(rings: Rings, reason: str) -> list[str]:
    return [
        one["message"] for one in rings.server.objects("events") if one.get("reason") == reason
    ]  # fmt: skip


def walks(rings: Rings) -> int:
    """How often all objects of the ring were listed."""
    return sum(
        request.method == "GET" and request.path.endswith("/websites")
        and "labelSelector" not in request.query and client.startswith("sharder")
        for client, request in rings.server.requests
    )  # fmt: skip


async def settled(rings: Rings, *names: str) -> None:
    rings.sharder("sharder-1")
    for name in names:
        rings.instance(name)
    await rings.until(lambda: len(rings.leases()) == len(names) + 1)
    for number in range(rings.objects):
        await rings.add(number, child=False)
    await rings.until(lambda: rings.at_rest(list(names)))
    await rings.until(lambda: message(rings) == f"{len(names)} instances")


def test_the_status_speaks_of_the_latest_spec() -> None:
    """A change that alters neither the counts nor anything that goes wrong is observed too."""

    async def body(rings: Rings) -> None:
        await settled(rings, "a")
        merge = {"spec": {"namespaceSelector": {"matchLabels": {}}}}
        after = await admin(rings).patch(RINGS, RING, merge=merge)
        assert after.metadata.generation == 2
        await rings.until(lambda: ring_of(rings)["status"]["observedGeneration"] == 2, 30)
        (condition,) = ring_of(rings)["status"]["conditions"]
        assert condition["observedGeneration"] == 2
        writes = len(rings.server.log)
        await asyncio.sleep(3)
        told = [one for one in rings.server.log[writes:] if one.plural == "controllerrings"]
        assert not told, "what has not changed is not written again"

    Rings(1, objects=3).run(body)


def kept_objects(rings: Rings) -> list[str]:
    return [name for name, labels in rings.websites().items() if DRAIN in labels]


async def keep_objects(rings: Rings) -> None:
    """An instance that lets go of nothing: it is known by its Lease alone."""
    labels = {f"alpha.{RING_GROUP}/controllerring": RING}
    spec = {"holderIdentity": "keeps", "leaseDurationSeconds": 600, "renewTime": "x"}
    lease = {"metadata": {"name": "keeps", "labels": labels}, "spec": spec}
    rings.server.put("leases", lease, "coordination.k8s.io")
    rings.sharder("sharder-1")
    await rings.until(lambda: "domicile-sharder" in rings.leases())
    for number in range(rings.objects):
        await rings.add(number, child=False)
    await rings.until(lambda: rings.at_rest(["keeps"]))
    await asyncio.sleep(2)  # older than any list
    rings.instance("b")


def test_what_was_not_let_go_of_is_told_until_it_is() -> None:
    async def body(rings: Rings) -> None:
        await keep_objects(rings)
        await rings.until(lambda: "not let go of in time" in message(rings))
        assert events(rings, "DrainOverdue")
        client = KubeClient(rings.server.exchange("keeps"), random=rings.world.stream("keeps"))
        for name in kept_objects(rings):
            free = {"metadata": {"labels": {DRAIN: None, LABEL: None}}}
            await client.patch(SITES, name, "default", merge=free)
        await rings.until(lambda: message(rings) == "2 instances", 60)

    Rings(1, objects=6).run(body)


def failing(
    rings: Rings, part: str, until: float, fault: ApiFault
) -> Callable[[str, ApiRequest], ApiFault | None]:
    def decide(client: str, request: ApiRequest) -> ApiFault | None:
        concerned = request.writes and part in request.path and client.startswith("sharder")
        return fault if concerned and rings.world.now < until else None

    return decide


def test_a_status_that_could_not_be_written_is_written_later() -> None:
    async def body(rings: Rings) -> None:
        for fault in (ApiFault.BROKEN, ApiFault.UNREACHABLE):
            rings.server.faults = failing(
                rings, f"/{RING}/status", rings.world.now + 40, fault
            )  # fmt: skip
            if fault is ApiFault.BROKEN:
                rings.sharder("sharder-1")
                rings.instance("a")
                await rings.until(lambda: message(rings) == "1 instances", 120)
            else:
                rings.instance("b")
                await rings.until(lambda: message(rings) == "2 instances", 120)

    Rings(1, objects=3).run(body)


def test_an_event_that_could_not_be_written_is_written_later() -> None:
    async def body(rings: Rings) -> None:
        until = rings.world.now + 150
        rings.server.faults = failing(rings, "/events", until, ApiFault.UNREACHABLE)
        await keep_objects(rings)
        await rings.until(lambda: bool(events(rings, "DrainOverdue")), 250)
        assert rings.world.now >= until
        kept = kept_objects(rings)
        await rings.until(lambda: len(events(rings, "DrainOverdue")) == len(kept), 60)

    Rings(1, objects=6).run(body)


def test_what_goes_wrong_is_an_event_of_the_ring() -> None:
    async def body(rings: Rings) -> None:
        await settled(rings, "a")
        assert not events(rings, "ReconciliationFailed")
        good = ring_of(rings)["spec"]
        merge: dict[str, Any] = {"spec": {"resources": [{"group": GROUP, "resource": "planets"}]}}
        await admin(rings).patch(RINGS, RING, merge=merge)
        await rings.until(lambda: bool(events(rings, "ReconciliationFailed")), 60)
        assert "planets" in events(rings, "ReconciliationFailed")[0]
        (told, *_) = [
            one for one in rings.server.objects("events") if one["reason"] == "ReconciliationFailed"
        ]
        assert told["involvedObject"]["kind"] == "ControllerRing"
        assert told["involvedObject"]["uid"] == ring_of(rings)["metadata"]["uid"]
        await rings.until(lambda: "planets" in message(rings), 60)
        await admin(rings).patch(RINGS, RING, merge={"spec": good})
        await rings.until(lambda: message(rings) == "1 instances", 120)
        assert len(events(rings, "ReconciliationFailed")) == 1, "once, however often it is tried"

    Rings(1, objects=3).run(body)


def test_a_lease_of_too_long_a_duration_is_an_event() -> None:
    async def body(rings: Rings) -> None:
        await settled(rings, "a")
        labels = {f"alpha.{RING_GROUP}/controllerring": RING}
        spec = {"holderIdentity": "long", "leaseDurationSeconds": 3600, "renewTime": "x"}
        lease = {"metadata": {"name": "long", "labels": labels}, "spec": spec}
        rings.server.put("leases", lease, "coordination.k8s.io")
        await rings.until(lambda: bool(events(rings, "LeaseTooLong")), 30)

    Rings(1, objects=3).run(body)


def test_only_a_change_of_the_rings_namespaces_is_followed_by_a_walk() -> None:
    async def body(rings: Rings) -> None:
        await settled(rings, "a")
        await asyncio.sleep(10)
        client, before = admin(rings), walks(rings)
        for number in range(3):
            rings.server.put("namespaces", {"metadata": {"name": f"kube-system{number}"}})
        await rings.until(lambda: walks(rings) > before, 10)
        await asyncio.sleep(10)
        before = walks(rings)
        for number in range(3):
            noise = {"metadata": {"labels": {"seen": str(number)}}}
            await client.patch(NAMESPACES, f"kube-system{number}", merge=noise)
            await client.delete(NAMESPACES, f"kube-system{number}")
        rings.server.put("namespaces", {"metadata": {"name": "sharding-system"}})
        await asyncio.sleep(30)
        assert walks(rings) == before

    Rings(1, objects=3).run(body)


def test_a_webhook_that_somebody_changed_or_deleted_is_restored() -> None:
    async def body(rings: Rings) -> None:
        await settled(rings, "a")
        client, name = admin(rings), f"controllerring-{RING}"

        def policies() -> list[str]:
            found = rings.server.objects(
                "mutatingwebhookconfigurations", "admissionregistration.k8s.io"
            )
            return [one["webhooks"][0]["failurePolicy"] for one in found]

        assert policies() == ["Ignore"]
        step = {"op": "replace", "path": "/webhooks/0/failurePolicy", "value": "Fail"}
        await client.patch(WEBHOOKS, name, operations=[step])
        assert policies() == ["Fail"]
        await rings.until(lambda: policies() == ["Ignore"], 320)
        await client.delete(WEBHOOKS, name)
        await rings.until(lambda: policies() == ["Ignore"], 320)

    Rings(1, objects=3).run(body)


def test_the_status_of_the_ring_is_decoded_as_it_was_written() -> None:
    async def body(rings: Rings) -> None:
        await settled(rings, "a", "b")
        ring: ControllerRing = await admin(rings).get(RINGS, RING)
        assert (ring.status.shards, ring.status.available_shards) == (2, 2)
        (ready,) = ring.status.conditions
        assert (ready.type, ready.status, ready.reason) == (
            "Ready", "True", "ReconciliationSucceeded",
        )  # fmt: skip
        assert ready.last_transition_time

    Rings(1, objects=3).run(body)
