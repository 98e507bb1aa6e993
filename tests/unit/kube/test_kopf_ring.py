"""What a kopf operator in a ring is told about its handlers."""

from __future__ import annotations

import kopf

from domicile.kube.kopf import ring
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
