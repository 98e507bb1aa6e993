"""An instance acts on what an object controls only while the object is its own (K3, K7)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from domicile.errors import ConfigError
from domicile.kube.member import Ring, RingMember
from domicile.kube.owner_calls import OwnerCalls
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.kinds import CONFIG_MAPS, LEASES
from domicile.kubeapi.objects import OwnerReference
from domicile.testing.kube import FakeApiServer
from domicile.testing.sim.clock import SimClock
from domicile.testing.sim.loop import World

GROUP = "example.com"
RING = Ring("websites")


def owner_of(name: str, kind: str = "Website") -> dict[str, Any]:
    return {
        "apiVersion": f"{GROUP}/v1", "kind": kind, "name": name, "uid": "u", "controller": True,
    }  # fmt: skip


def put(server: FakeApiServer, plural: str, name: str, shard: str, **metadata: Any) -> None:
    group = "" if plural == "configmaps" else GROUP
    labels = {RING.shard_label: shard}
    server.put(plural, {"metadata": {"name": name, "labels": labels, **metadata}}, group)


class Member:
    """An instance `a` with a controller for websites and one for configmaps."""

    def __init__(self, server: FakeApiServer, member: RingMember) -> None:
        self.server, self.member = server, member
        self.begun: list[str] = []
        self.go_on = asyncio.Event()

    async def reconcile(self, _: KubeClient, one: Any) -> None:
        self.begun.append(one.metadata.name)
        await self.go_on.wait()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(120):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    def labels(self, name: str) -> dict[str, str]:
        found = self.server.objects("websites", GROUP)
        (labels,) = [
            one["metadata"].get("labels") for one in found if one["metadata"]["name"] == name
        ]
        return labels or {}

    async def ask(self, name: str) -> None:
        """What the sharder does to have an object let go of."""
        admin = KubeClient(self.server.exchange("admin"))
        kind = await admin.discover(GROUP, "websites")
        merge = {"metadata": {"labels": {RING.drain_label: "true"}}}
        await admin.patch(kind, name, "default", merge=merge)


def run(
    body: Callable[[Member], Coroutine[Any, Any, None]],
    before: Callable[[FakeApiServer], None],
    controlled: str = "configmaps",
) -> None:
    world = World(1)
    server = FakeApiServer(random=world.stream("server"))
    server.serve(GROUP, "websites", "Website")
    server.serve(GROUP, "pages", "Page")
    resources = [
        {
            "group": GROUP, "resource": "websites",
            "controlledResources": [{"group": "", "resource": "configmaps"}],
        },
        {"group": GROUP, "resource": "pages"},
    ]  # fmt: skip
    ring = {"metadata": {"name": "websites"}, "spec": {"resources": resources}}
    server.put("controllerrings", ring, "sharding.timebertt.dev")
    before(server)
    loop = world.process("test")

    async def main() -> None:
        client = KubeClient(server.exchange("a"), random=world.stream("client"))
        member = RING.member(
            client,
            instance="a",
            namespace="default",
            clock=SimClock(world, loop),
            random=world.stream("member"),
        )
        async with member:
            one = Member(server, member)
            group = "" if controlled == "configmaps" else GROUP
            work = [
                asyncio.ensure_future(member.run(one.reconcile, GROUP, "websites")),
                asyncio.ensure_future(member.run(one.reconcile, group, controlled)),
            ]
            await body(one)
            for task in work:
                task.cancel()
            await asyncio.wait(work)

    try:
        world.run(main(), loop)
        assert not world.errors
    finally:
        world.close()


@pytest.mark.scenario("KR-08", partial=True)
def test_calls_for_objects_of_one_name_keep_the_lease_each() -> None:
    """What an object controls often has its name: one call that ends says nothing of the other."""
    world = World(1)
    server = FakeApiServer(random=world.stream("server"))
    server.serve(GROUP, "websites", "Website")
    server.serve(GROUP, "pages", "Page")
    resources = [{"group": GROUP, "resource": one} for one in ("websites", "pages")]
    ring = {"metadata": {"name": "websites"}, "spec": {"resources": resources}}
    server.put("controllerrings", ring, "sharding.timebertt.dev")
    put(server, "websites", "home", "a")
    put(server, "pages", "home", "a")
    loop = world.process("test")
    begun: list[str] = []
    over = asyncio.Event()

    async def obedient(_: KubeClient, one: Any) -> None:
        begun.append("website")
        await asyncio.Event().wait()

    async def stubborn(_: KubeClient, one: Any) -> None:
        begun.append("page")
        while not over.is_set():
            with suppress(asyncio.CancelledError):
                await over.wait()

    async def main() -> None:
        client = KubeClient(server.exchange("a"), random=world.stream("client"))
        member = RING.member(
            client, instance="a", namespace="default", clock=SimClock(world, loop),
            random=world.stream("member"),
        )  # fmt: skip
        async with member:
            work = [
                asyncio.ensure_future(member.run(obedient, GROUP, "websites")),
                asyncio.ensure_future(member.run(stubborn, GROUP, "pages")),
            ]
            while len(begun) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            for task in work:
                task.cancel()
            await asyncio.wait(work)
        assert not over.is_set()
        (lease,) = server.objects("leases", LEASES.group)
        assert lease["spec"]["holderIdentity"] == "a", "given back while a call is at work"
        over.set()
        await asyncio.sleep(1)

    try:
        world.run(main(), loop)
        assert not world.errors
    finally:
        world.close()


@pytest.mark.scenario("KR-08", "KR-12", partial=True)
def test_an_owner_is_let_go_of_after_calls_for_what_it_controls() -> None:
    def before(server: FakeApiServer) -> None:
        put(server, "websites", "home", "a")
        put(server, "configmaps", "page", "a", ownerReferences=[owner_of("home")])

    async def body(one: Member) -> None:
        await one.until(lambda: sorted(one.begun) == ["home", "page"])
        one.begun.clear()
        await one.ask("home")
        # Its own call ends; the one for the page goes on.
        await asyncio.sleep(20)
        assert RING.shard_label in one.labels("home")
        one.go_on.set()
        await one.until(lambda: RING.shard_label not in one.labels("home"))
        # The page is labelled as before: nothing is done with it until the sharder moves it.
        put(one.server, "configmaps", "late", "a", ownerReferences=[owner_of("home")])
        await asyncio.sleep(60)
        assert "late" not in one.begun

    run(body, before)


def test_what_another_instances_object_controls_is_left_alone_until_the_owner_comes() -> None:
    def before(server: FakeApiServer) -> None:
        put(server, "websites", "home", "b")
        put(server, "configmaps", "page", "a", ownerReferences=[owner_of("home")])

    async def body(one: Member) -> None:
        one.go_on.set()
        await asyncio.sleep(30)
        assert one.begun == []
        admin = KubeClient(one.server.exchange("admin"))
        kind = await admin.discover(GROUP, "websites")
        merge = {"metadata": {"labels": {RING.shard_label: "a"}}}
        await admin.patch(kind, "home", "default", merge=merge)
        await one.until(lambda: "page" in one.begun)

    run(body, before)


def test_what_an_owner_controlled_that_is_gone_is_worked_on() -> None:
    """So that it can be cleared up."""

    def before(server: FakeApiServer) -> None:
        put(server, "configmaps", "page", "a", ownerReferences=[owner_of("gone")])

    async def body(one: Member) -> None:
        await one.until(lambda: one.begun == ["page"])

    run(body, before)


def test_an_object_with_an_instance_in_its_own_right_does_not_wait_for_its_owner() -> None:
    def before(server: FakeApiServer) -> None:
        put(server, "websites", "home", "b")
        put(server, "pages", "page", "a", ownerReferences=[owner_of("home")])

    async def body(one: Member) -> None:
        await one.until(lambda: one.begun == ["page"])

    run(body, before, controlled="pages")


def test_an_owner_that_the_ring_does_not_share_out_is_an_error() -> None:
    def before(server: FakeApiServer) -> None:
        put(server, "configmaps", "page", "a", ownerReferences=[owner_of("x", "Other")])

    async def body(one: Member) -> None:
        owner = OwnerReference(api_version=f"{GROUP}/v1", kind="Other", name="x", controller=True)
        with pytest.raises(ConfigError, match="Other x controls the object"):
            await one.member.has_owner(owner, "default")
        await asyncio.sleep(30)
        assert one.begun == []

    run(body, before)


def test_no_call_begins_while_an_owner_is_let_go_of() -> None:
    async def body() -> None:
        calls = OwnerCalls()
        assert calls.begin("x")
        assert calls.begin("x")
        entered = asyncio.Event()

        async def let_go() -> None:
            async with calls.stopped("x"), calls.stopped("x"):
                entered.set()
                assert not calls.begin("x")

        going = asyncio.ensure_future(let_go())
        await asyncio.sleep(0)
        assert not calls.begin("x")
        assert calls.begin("y")
        calls.end("x")
        await asyncio.sleep(0)
        assert not entered.is_set()
        calls.end("x")
        await going
        assert entered.is_set()
        assert calls.begin("x")

    asyncio.run(body())


def test_a_let_go_that_is_given_up_lets_calls_begin_again() -> None:
    async def body() -> None:
        calls = OwnerCalls()
        assert calls.begin("x")

        async def let_go() -> None:
            async with calls.stopped("x"):
                raise AssertionError("a call is at work")

        going = asyncio.ensure_future(let_go())
        await asyncio.sleep(0)
        going.cancel()
        await asyncio.wait((going,))
        assert calls.begin("x")
        calls.end("x")
        calls.end("x")
        async with asyncio.timeout(1), calls.stopped("x"):
            pass

    asyncio.run(body())


def test_metadata_alone_is_read() -> None:
    async def body(one: Member) -> None:
        one.server.put("configmaps", {"metadata": {"name": "x"}, "data": {"a": "b"}})
        client = KubeClient(one.server.exchange("admin"))
        assert (await client.get(CONFIG_MAPS, "x", "default")).data == {"a": "b"}
        found = await client.get_metadata(CONFIG_MAPS, "x", "default")
        assert (found.kind, found.metadata.name) == ("PartialObjectMetadata", "x")

    run(body, lambda _: None)
