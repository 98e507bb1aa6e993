"""The tutorial's manifests on a real API server, and its operator with exactly those rights."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from kube_lab import (
    GROUP,
    OPERATOR,
    SHARDER,
    ApiServer,
    SharderProcess,
    apply_all,
    printed_manifests,
    started,
    until,
)  # fmt: skip

from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.credentials import find_credentials
from domicile.kubeapi.errors import KubeError, KubeNotFound, KubeRefused
from domicile.kubeapi.http_exchange import HttpExchange
from domicile.kubeapi.kinds import LEASES, RINGS, ApiKind
from domicile.kubeapi.objects import PartialObject
from domicile.ops.ring import look_at_ring

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial" / "sharded-kopf-operator.md"
BLOCK = re.compile(r"^```(?P<kind>yaml|python)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
OBJECTS = 9


class Site(PartialObject, frozen=True):
    """An object of the tutorial's kind."""

    status: Any = None


SITES = ApiKind(GROUP, "v1", "websites", "Website", True, Site)


def blocks(kind: str) -> list[str]:
    found = BLOCK.finditer(PAGE.read_text(encoding="utf-8"))
    return [one["text"] for one in found if one["kind"] == kind]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    yield from started(tmp_path_factory.mktemp("kube"))


async def applied(client: KubeClient, text: str) -> bool:
    """Apply it, unless its kind or its namespace is not served yet."""
    try:
        await apply_all(client, text)
    except KubeError:
        return False
    return True


async def granted(server: ApiServer, user: str) -> bool:
    """Whether the authorizer knows of the user's roles, for the cluster and for a namespace."""
    found = find_credentials(str(server.kubeconfig_of(user)))
    async with KubeClient(HttpExchange(found), timeout_s=60.0) as client:
        try:
            await client.list(RINGS)
            where = "default" if user == OPERATOR else "sharding-system"
            await client.get(LEASES, "none", where)
        except KubeNotFound:
            return True
        except KubeRefused:
            return False
    return True


@pytest.mark.scenario("KR-12", partial=True)
def test_the_operator_of_the_tutorial_needs_no_other_rights(
    server: ApiServer, tmp_path: Path
) -> None:
    asyncio.run(follow_the_tutorial(server, tmp_path))


async def follow_the_tutorial(server: ApiServer, home: Path) -> None:
    kind, ring, operator = blocks("yaml")
    (program,) = blocks("python")
    (home / "websites.py").write_text(program)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(server.client())
        for text in (kind, printed_manifests(), ring, operator):
            await until(lambda text=text: applied(client, text), f"this is applied: {text}")
        for user in (OPERATOR, SHARDER):
            await until(lambda user=user: granted(server, user), f"the rights of {user} are known")
        asked = len(server.audited())
        sharder = SharderProcess(server, home, "sharder-1", user=SHARDER)
        stack.callback(sharder.process.kill)
        operators: dict[str, subprocess.Popen[bytes]] = {}

        def start(name: str) -> None:
            environment = {
                **os.environ, "KUBECONFIG": str(server.kubeconfig_of(OPERATOR)), "POD_NAME": name,
            }  # fmt: skip
            command = [
                sys.executable, "-m", "kopf", "run", "--all-namespaces", str(home / "websites.py"),
            ]  # fmt: skip
            with (home / f"{name}.log").open("wb") as log:
                one = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            operators[name] = one
            stack.callback(one.wait)
            stack.callback(one.kill)

        def said(name: str) -> str:
            return (home / f"{name}.log").read_text(errors="replace")

        async def at_rest(*names: str) -> bool:
            assert all(one.poll() is None for one in operators.values()), [*map(said, operators)]
            seen = await look_at_ring(client, "websites")
            having = {name for name, one in seen["instances"].items() if one["objects"]}
            return having == {*names} and not (seen["unassigned_count"] or seen["draining_count"])

        start("websites-a")
        for number in range(OBJECTS):
            await client.create(SITES, {"metadata": {"name": f"site-{number}"}}, "default")
        await until(lambda: at_rest("websites-a"), "the first replica has all")

        async def handled() -> bool:
            found = (await client.list(SITES)).items
            return all(((one.status or {}).get("create") or {}).get("message") for one in found)

        await until(handled, "all objects are handled")
        start("websites-b")
        await until(lambda: at_rest("websites-a", "websites-b"), "two replicas share")
        for name, one in operators.items():
            one.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(one.wait, 60) == 0, said(name)[-3000:]
        assert sharder.stop() == 0
    refused = [
        (entry["user"]["username"], entry["verb"], entry["requestURI"])
        for entry in server.audited()[asked:]
        if (entry.get("responseStatus") or {}).get("code") == 403
        and entry["user"]["username"] in (OPERATOR, SHARDER)
    ]
    assert not refused, refused[:10]
