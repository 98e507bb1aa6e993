"""What the commands print is accepted by a real API server, and its rights are the ones needed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from kube_lab import ApiServer, apply_all, started, until

from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.exchange import ApiRequest
from domicile.kubeapi.kinds import NAMESPACES


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    yield from started(tmp_path_factory.mktemp("kube"))


def printed(*more: str) -> str:
    command = [
        sys.executable, "-m", "domicile", "kubernetes", "manifests", "shop", "--app", "shop:node",
        "--image", "shop:1", "--store", "etcd://etcd:2379", "--version", "2.1.0", *more,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


async def may(
    client: KubeClient,
    verb: str,
    resource: str,
    name: str = "",
    *,
    group: str = "",
    namespace: str = "",
) -> bool:
    """Whether the printed account may do that, as the API server's authorizer says."""
    attributes = {"verb": verb, "group": group, "resource": resource, "name": name}
    if resource == "pods":
        namespace = "default"
    if namespace:
        attributes["namespace"] = namespace
    body: dict[str, Any] = {
        "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
        "spec": {"user": "system:serviceaccount:default:shop", "resourceAttributes": attributes},
    }  # fmt: skip
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    headers = {"Content-Type": "application/json"}
    request = ApiRequest("POST", path, {}, headers, json.dumps(body).encode())
    async with client._exchange.open(request) as answer:  # pyright: ignore[reportPrivateUsage]
        found = json.loads(b"".join([piece async for piece in answer.chunks()]))
    allowed: bool = found["status"]["allowed"]
    return allowed


@pytest.mark.parametrize("workload", ["Deployment", "StatefulSet"])
def test_the_manifests_of_entities_are_accepted_and_suffice(
    server: ApiServer, workload: str
) -> None:
    async def scenario() -> None:
        async with server.client() as client:

            async def ready() -> bool:
                found = [one.metadata.name for one in (await client.list(NAMESPACES)).items]
                return "default" in found and "kube-system" in found

            await until(ready, "the first namespaces are there")
            text = printed("--workload", workload)
            await apply_all(client, text)
            await apply_all(client, text)  # and again, as an update

            async def granted() -> bool:
                return await may(client, "watch", "pods")

            await until(granted, "the rights are known to the authorizer", 30.0)
            for verb in ("get", "list", "patch"):
                assert await may(client, verb, "pods"), verb
            assert await may(client, "get", "nodes", "m1")
            assert await may(client, "get", "namespaces", "kube-system")
            assert not await may(client, "get", "namespaces", "default")
            assert not await may(client, "list", "nodes")
            assert not await may(client, "delete", "pods")
            assert not await may(client, "get", "secrets")

    asyncio.run(scenario())


def test_pods_may_use_a_store_of_kubernetes(server: ApiServer) -> None:
    """Every verb by which the store reads and writes, in its namespace and in no other."""

    async def scenario() -> None:
        async with server.client() as client:
            await client.create(NAMESPACES, {"metadata": {"name": "bank"}})

            async def applied() -> bool:
                return "default" in [
                    one.metadata.name for one in (await client.list(NAMESPACES)).items
                ]

            await until(applied, "the first namespaces are there")
            await apply_all(client, printed("--store", "kubernetes://bank"))

            async def all_granted() -> bool:
                return all([
                    await may(client, verb, resource, group=group, namespace="bank")
                    for group, resource, verbs in (
                        ("", "configmaps", ("get", "list", "watch", "create", "update", "delete")),
                        (
                            "coordination.k8s.io", "leases",
                            ("get", "list", "watch", "create", "patch", "delete"),
                        ),
                    )
                    for verb in verbs
                ])  # fmt: skip

            await until(all_granted, "the rights are known to the authorizer", 30.0)
            assert not await may(client, "get", "configmaps", namespace="default")
            assert not await may(client, "get", "secrets", namespace="bank")
            assert not await may(client, "list", "configmaps")

    asyncio.run(scenario())
