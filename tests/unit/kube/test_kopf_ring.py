"""What a kopf operator in a ring is told about its handlers."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import kopf
import pytest
from http_lab import served
from kopf._cogs.clients.errors import APINotFoundError

from domicile.errors import ConfigError, Fenced
from domicile.kube.kopf import ring
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.credentials import Credentials
from domicile.kubeapi.http_exchange import HttpExchange
from domicile.kubeapi.kinds import ApiKind
from domicile.kubeapi.objects import PartialObject

SITES = ApiKind("example.com", "v1", "websites", "Website", True, PartialObject)


def test_handlers_of_kinds_outside_the_ring_are_named() -> None:
    registry = kopf.OperatorRegistry()
    made = ring("websites", instance="a", registry=registry)

    @kopf.on.create("example.com", "v1", "websites", registry=registry)
    @kopf.on.event("websites", registry=registry)
    @kopf.on.update(kopf.EVERYTHING, registry=registry)
    @kopf.index("secrets", registry=registry)
    async def shared(**_: object) -> None: ...

    assert made.unshared([SITES]) == []

    @kopf.on.create("example.com", "v1", "planets", registry=registry)
    async def planet(**_: object) -> None: ...

    @kopf.timer("nodes", interval=5.0, registry=registry)
    async def count(**_: object) -> None: ...

    @kopf.on.event("", "v1", "pods", registry=registry)
    async def pod(**_: object) -> None: ...

    named = made.unshared([SITES])
    assert sorted(one.partition(" ")[0].rpartition(".")[2] for one in named) == [
        "count",
        "planet",
        "pod",
    ]
    assert "planets" in next(one for one in named if ".planet " in one)


CHILDREN = ApiKind("", "v1", "configmaps", "ConfigMap", True, PartialObject)


@pytest.mark.parametrize("how", ["event", "update", "everything", "timer", "daemon"])
def test_handlers_of_what_the_rings_objects_control_are_refused(how: str) -> None:
    """K7: they move without being asked for, and nobody knows when kopf has done with one."""
    registry = kopf.OperatorRegistry()
    made = ring("websites", instance="a", registry=registry)
    decorator = {
        "event": kopf.on.event("", "v1", "configmaps", registry=registry),
        "update": kopf.on.update("configmaps", registry=registry),
        "everything": kopf.on.create(kopf.EVERYTHING, registry=registry),
        "timer": made.timer("configmaps", interval=5.0),
        "daemon": kopf.daemon("configmaps", registry=registry),
    }[how]

    @kopf.on.create("example.com", "v1", "websites", registry=registry)
    @kopf.index("configmaps", registry=registry)
    async def shared(**_: object) -> None: ...

    made.check_handlers(CHILDREN, main=False)

    async def handler(**_: object) -> None: ...

    decorator(handler)
    with pytest.raises(ConfigError, match="moves without asking"):
        made.check_handlers(CHILDREN, main=False)


def test_a_write_is_checked_again_when_its_connection_is_there() -> None:
    async def scenario() -> None:
        async with served() as server:
            asked: list[bool] = []

            def guard() -> None:
                asked.append(True)
                if len(asked) % 2 == 0:
                    raise Fenced("the Lease is over")

            made = ring("websites", instance="a", registry=kopf.OperatorRegistry())
            made._credentials = Credentials(server.url)
            made._member = SimpleNamespace(guard=guard, selector="mine")  # type: ignore[assignment]
            session = (await made._login()).aiohttp_session
            # On a connection that has to be made, and on one that is there.
            for _ in range(2):
                with pytest.raises(Fenced):
                    await session.patch(f"{server.url}/late")
                async with session.get(f"{server.url}/read") as answer:
                    assert answer.status == 200
            await session.close()
            assert len(asked) == 4
            assert b"/late" not in server.received

    asyncio.run(scenario())


@pytest.mark.scenario("KR-12", partial=True)
def test_an_object_is_let_go_of_after_the_writes_that_are_on_their_way() -> None:
    """K7: what a timer returned is sent by kopf after the timer has ended, without a version."""

    async def scenario() -> None:
        async with served() as server:
            made = ring("websites", instance="a", registry=kopf.OperatorRegistry())
            made._credentials = Credentials(server.url)
            made._member = SimpleNamespace(  # type: ignore[assignment]
                guard=lambda: None, selector="mine", instance="a",
                owns=lambda metadata: metadata.label(made.ring.shard_label) == "a",
            )  # fmt: skip
            made._resources = {("example.com", "websites"): "v1"}
            session = (await made._login()).aiohttp_session
            where = f"{server.url}/apis/example.com/v1/namespaces/default/websites"

            async def write(name: str) -> None:
                (await session.patch(f"{where}/{name}", json={"status": {}})).release()

            async def let_go(version: str) -> int:
                labels = {made.ring.shard_label: "a", made.ring.drain_label: "true"}
                made._without_labels({"metadata": {"resourceVersion": version, "labels": labels}})
                headers = {"Content-Type": "application/json-patch+json"}
                answer = await session.patch(f"{where}/one", json=[], headers=headers)
                answer.release()
                return answer.status

            held = asyncio.Event()
            server.hold = held
            late = asyncio.ensure_future(write("one"))
            while b"/one" not in server.received:  # noqa: ASYNC110
                await asyncio.sleep(0)
            going = asyncio.ensure_future(let_go("7"))
            while not made._gone:  # noqa: ASYNC110
                await asyncio.sleep(0)
            server.hold = None
            await write("other")  # answered while the first one is held
            assert server.received.count(b"PATCH") == 2, "it waits for the write to this object"
            assert not going.done()
            with pytest.raises(APINotFoundError):
                await write("one")
            held.set()
            await late
            assert await going == 200
            assert server.received.count(b"PATCH") == 3
            with pytest.raises(APINotFoundError):
                await write("one")

            # An event may be older than that; what the object is now counts.
            made._client = KubeClient(HttpExchange(Credentials(server.url)))

            async def seen(shard: str) -> None:
                shown = json.dumps({"metadata": {"labels": {made.ring.shard_label: shard}}})
                length = f"Content-Length: {len(shown)}"
                server.answers = [f"HTTP/1.1 200 OK\r\n{length}\r\n\r\n{shown}".encode()]
                await made._let_go(
                    uid="u", labels={made.ring.shard_label: "a"}, patch=kopf.Patch(), type=None,
                    resource=SITES, name="one", namespace="default",
                )  # fmt: skip

            await seen("b")
            with pytest.raises(APINotFoundError):
                await write("one")
            await seen("a")
            await write("one")
            # One that the API server refused changes nothing, unless an earlier one is in doubt.
            no, broken = (
                f"HTTP/1.1 {status} No\r\nContent-Length: 2\r\n\r\n{{}}".encode()
                for status in (422, 504)
            )
            server.answers = [no]
            assert await let_go("9") == 422
            await write("one")
            server.answers = [broken, no]
            assert [await let_go("9"), await let_go("9")] == [504, 422]
            with pytest.raises(APINotFoundError):
                await write("one")
            await made._client.close()
            await session.close()

    asyncio.run(scenario())
