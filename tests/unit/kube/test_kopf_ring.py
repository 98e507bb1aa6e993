"""What a kopf operator in a ring is told about its handlers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import kopf
import pytest
from http_lab import served

from domicile.errors import ConfigError, Fenced
from domicile.kube.kopf import ring
from domicile.kubeapi.credentials import Credentials
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
