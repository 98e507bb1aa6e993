"""An instance lets go of many objects at a time, also while its workers are busy (K3)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from domicile.kube.controller import LET_GO_AT_A_TIME, Key, KeyedQueue
from domicile.kube.member import Ring, RingMember
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.exchange import ApiAnswer, ApiExchange, ApiRequest
from domicile.kubeapi.objects import ObjectMeta
from domicile.testing.kube import FakeApiServer
from domicile.testing.sim.clock import SimClock
from domicile.testing.sim.loop import World

GROUP = "example.com"
RING = Ring("websites")
MANY = 3 * LET_GO_AT_A_TIME


class CountingExchange:
    """Counts the patches of websites that are on their way."""

    def __init__(self, exchange: ApiExchange) -> None:
        self._exchange = exchange
        self.server = exchange.server
        self.now = self.most = 0

    def open(self, request: ApiRequest) -> AbstractAsyncContextManager[ApiAnswer]:
        return self._counted(request)

    @asynccontextmanager
    async def _counted(self, request: ApiRequest) -> AsyncGenerator[ApiAnswer, None]:
        counts = request.method == "PATCH" and "websites" in request.path
        self.now += counts
        self.most = max(self.most, self.now)
        try:
            async with self._exchange.open(request) as answer:
                yield answer
        finally:
            self.now -= counts

    async def close(self) -> None:
        await self._exchange.close()


class Site:
    """An instance `a` with one worker, and its objects."""

    def __init__(self, server: FakeApiServer, exchange: CountingExchange) -> None:
        self._server, self.exchange = server, exchange
        self.begun: list[str] = []
        self.go_on = asyncio.Event()

    async def reconcile(self, _: KubeClient, one: Any) -> None:
        self.begun.append(one.metadata.name)
        await self.go_on.wait()

    def labels(self) -> dict[str, dict[str, str]]:
        return {
            one["metadata"]["name"]: one["metadata"].get("labels") or {}
            for one in self._server.objects("websites", GROUP)
        }

    def held(self) -> list[str]:
        """The objects that name the instance."""
        return [name for name, labels in self.labels().items() if RING.shard_label in labels]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(120):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.05)


def put(server: FakeApiServer, name: str, *, drain: bool) -> None:
    labels = {RING.shard_label: "a"}
    if drain:
        labels[RING.drain_label] = "true"
    server.put("websites", {"metadata": {"name": name, "labels": labels}}, GROUP)


def run(
    body: Callable[[Site], Coroutine[Any, Any, None]], before: Callable[[FakeApiServer], None]
) -> None:
    world = World(1)
    server = FakeApiServer(random=world.stream("server"))
    server.serve(GROUP, "websites", "Website")
    ring = {
        "metadata": {"name": "websites"},
        "spec": {"resources": [{"group": GROUP, "resource": "websites"}]},
    }
    server.put("controllerrings", ring, "sharding.timebertt.dev")
    before(server)
    loop = world.process("test")

    async def main() -> None:
        exchange = CountingExchange(server.exchange("a"))
        member = RING.member(
            KubeClient(exchange, random=world.stream("client")),
            instance="a",
            namespace="default",
            clock=SimClock(world, loop),
            random=world.stream("member"),
            unique_name=True,
        )
        async with member:
            one = Site(server, exchange)
            work = asyncio.ensure_future(
                member.run(one.reconcile, GROUP, "websites", workers=1, settle_s=1.0)
            )
            await body(one)
            work.cancel()
            await asyncio.wait((work,))

    try:
        world.run(main(), loop)
        assert not world.errors
    finally:
        world.close()


@pytest.mark.scenario("KR-08", "KR-12", partial=True)
def test_objects_are_let_go_of_while_the_only_worker_is_busy() -> None:
    def before(server: FakeApiServer) -> None:
        put(server, "busy", drain=False)
        for number in range(MANY):
            put(server, f"wait-{number}", drain=False)

    async def body(one: Site) -> None:
        await one.until(lambda: one.begun)
        (busy,) = one.begun
        admin = KubeClient(one.exchange)
        kind = await admin.discover(GROUP, "websites")
        merge = {"metadata": {"labels": {RING.drain_label: "true"}}}
        for name in one.held():
            await admin.patch(kind, name, "default", merge=merge)
        await one.until(lambda: one.held() == [busy])
        # Its own call is at work: it waits for that, however long it takes (K3).
        await asyncio.sleep(60)
        assert one.held() == [busy]
        one.go_on.set()
        await one.until(lambda: not one.held())
        assert one.begun == [busy], "nothing is worked on that is asked for"

    run(body, before)


def test_so_many_objects_are_let_go_of_at_a_time_and_no_more() -> None:
    def before(server: FakeApiServer) -> None:
        for number in range(MANY):
            put(server, f"site-{number}", drain=True)
        server.delay_s = (0.5, 0.5)

    async def body(one: Site) -> None:
        await one.until(lambda: not one.held())
        assert one.exchange.most == LET_GO_AT_A_TIME

    run(body, before)


def test_an_object_that_comes_back_before_the_answer_is_worked_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The webhook names the same instance if the other one is gone by then. The watch may tell that
    before the answer is there."""

    def before(server: FakeApiServer) -> None:
        put(server, "back", drain=True)

    let_go = RingMember.let_go

    async def let_go_and_get_back(self: RingMember, kind: Any, metadata: ObjectMeta) -> bool:
        assert await let_go(self, kind, metadata)
        merge = {"metadata": {"labels": {RING.shard_label: "a"}}}
        back = await self.client.patch(kind, metadata.name, metadata.namespace, merge=merge)
        (controller,) = self.controllers

        def version() -> str:
            one = controller.objects.get((metadata.namespace, metadata.name))
            return "" if one is None else one.metadata.resource_version

        while version() != back.metadata.resource_version:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return True

    monkeypatch.setattr(RingMember, "let_go", let_go_and_get_back)

    async def body(one: Site) -> None:
        await one.until(lambda: one.begun == ["back"])

    run(body, before)


def test_an_object_that_is_no_longer_asked_for_while_it_waits_is_worked_on() -> None:
    async def body() -> None:
        asked = {("", "x"): True, ("", "y"): True}
        queue = KeyedQueue(lambda key: asked[key])
        queue.add(("", "x"))
        queue.add(("", "y"))
        asked["", "x"] = False
        queue.add(("", "x"))
        assert await taken(queue) == [("", "x")]
        assert await taken(queue, first=True) == [("", "y")]

    asyncio.run(body())


def test_a_key_is_in_one_hand_at_a_time() -> None:
    async def body() -> None:
        asked = {("", "x"): False}
        queue = KeyedQueue(lambda key: asked[key])
        queue.add(("", "x"))
        assert await taken(queue) == [("", "x")]
        asked["", "x"] = True
        queue.add(("", "x"))
        assert await taken(queue, first=True) == []
        queue.done(("", "x"))
        assert await taken(queue) == []
        assert await taken(queue, first=True) == [("", "x")]

    asyncio.run(body())


async def taken(queue: KeyedQueue, *, first: bool = False) -> list[Key]:
    """What can be taken at once."""
    found: list[Key] = []
    while True:
        waiting = asyncio.ensure_future(queue.take_first() if first else queue.take())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if not waiting.done():
            waiting.cancel()
            return found
        found.append(waiting.result())
