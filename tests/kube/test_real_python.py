"""The client for Python controllers, with kopf and as a plain loop, in one ring (KR-12); what a
sharder asks of the API server (KR-09)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from kube_lab import GROUP, SITES, ApiServer, SharderProcess, install_websites, started, until
from ring_judge import judge_audit

from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.errors import KubeNotFound
from domicile.kubeapi.kinds import LEASES, RINGS
from domicile.ops.ring import look_at_ring

LABS = Path(__file__).parents[1] / "labs"
PREFIX = "alpha.sharding.timebertt.dev/"
LABEL = "shard.alpha.sharding.timebertt.dev/websites"
DRAIN = "drain.alpha.sharding.timebertt.dev/websites"
OBJECTS = 16


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    for one in started(tmp_path):
        asyncio.run(install_websites(one))
        yield one


class Instance:
    """An instance as a process: an operator of kopf, or a plain loop."""

    def __init__(self, server: ApiServer, home: Path, name: str, *, kopf: bool) -> None:
        acts, self.log = home / f"{name}.acts", home / f"{name}.log"
        acts.touch()
        config = str(server.kubeconfig_of(name))
        environment = {**os.environ}
        if kopf:
            program = str(LABS / "kopf_operator.py")
            command = [sys.executable, "-m", "kopf", "run", "-A", program]
            environment |= {"KUBECONFIG": config, "POD_NAME": name, "ACTS": str(acts)}
            environment |= {"DURATION_S": "4"}
        else:
            program = str(LABS / "ring_instance.py")
            command = [sys.executable, program, config, name, str(acts), "4"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    async def leave(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(self.process.wait, 60)
        assert code == 0, self.log.read_text(errors="replace")[-3000:]

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


async def at_rest(client: KubeClient, *names: str) -> bool:
    seen = await look_at_ring(client, "websites")
    with_objects = sorted(name for name, one in seen["instances"].items() if one["objects"])
    resting = not seen["unassigned_count"] and not seen["draining_count"]
    return resting and with_objects == sorted(names)


def acknowledged(audited: list[dict[str, Any]], user: str) -> int:
    """Patches by which an instance let go of an object: both labels in one, with a version."""
    found = 0
    for one in audited:
        if one["user"]["username"] != user or one["verb"] != "patch":
            continue
        body = one.get("requestObject") or {}
        if isinstance(body, list):  # a JSON patch: both labels, and the version that was read
            paths = [step["path"] for step in body if step["op"] == "remove"]
            both = [name.replace("/", "~1") for name in (LABEL, DRAIN)]
            if all(any(path.endswith(name) for path in paths) for name in both):
                versions = [step for step in body if step["path"] == "/metadata/resourceVersion"]
                assert versions, "it counts only if nothing has changed"
                found += one["responseStatus"]["code"] == 200
            continue
        metadata = body.get("metadata") or {}
        labels = metadata.get("labels") or {}
        if LABEL in labels and DRAIN in labels:
            assert labels[LABEL] is None
            assert labels[DRAIN] is None
            assert metadata.get("resourceVersion"), "it counts only if nothing has changed"
            found += one["responseStatus"]["code"] == 200
    return found


def asked(audited: list[dict[str, Any]], user: str) -> list[str]:
    """What a user listed and watched of the ring's objects."""
    return [
        one["requestURI"]
        for one in audited
        if one["user"]["username"] == user
        and one["verb"] in ("list", "watch")
        and (one.get("objectRef") or {}).get("resource") == "websites"
    ]


@pytest.mark.scenario("KR-12", "KR-09")
def test_kopf_and_a_plain_loop_share_a_ring(server: ApiServer, tmp_path: Path) -> None:
    asyncio.run(share(server, tmp_path))


async def share(server: ApiServer, home: Path) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(server.client())
        spec = {"resources": [{"group": GROUP, "resource": "websites"}]}
        await client.create(RINGS, {"metadata": {"name": "websites"}, "spec": spec})
        sharder = SharderProcess(server, home, "sharder-1", user="sharder-1")
        stack.callback(sharder.process.kill)
        running: dict[str, Instance] = {}

        def start(name: str, *, kopf: bool) -> None:
            running[name] = Instance(server, home, name, kopf=kopf)
            stack.callback(running[name].end)

        start("a", kopf=True)

        async def available() -> bool:
            return (await client.get(RINGS, "websites")).status.available_shards == 1

        await until(available, "the operator of kopf is there")
        for number in range(OBJECTS):
            await client.create(SITES, {"metadata": {"name": f"site-{number}"}}, "default")
        await until(lambda: at_rest(client, "a"), "it has everything")

        # Each kind of instance lets go of objects for the other kind.
        start("b", kopf=False)
        await until(lambda: at_rest(client, "a", "b"), "the plain loop has its part")
        start("c", kopf=True)
        await until(lambda: at_rest(client, "a", "b", "c"), "so has another operator")

        # Leases of 4 s are kept for longer than they last.
        async def renewed() -> dict[str, str]:
            found = (await client.list(LEASES, labels=f"{PREFIX}controllerring=websites")).items
            return {one.metadata.name: one.spec.renew_time or "" for one in found}

        seen: dict[str, set[str]] = {name: set() for name in running}

        async def kept() -> bool:
            for name, at in (await renewed()).items():
                seen[name].add(at)
            return all(len(times) >= 6 for times in seen.values())

        await until(kept, "each renews its Lease")
        assert await at_rest(client, "a", "b", "c")

        for name in ("b", "a", "c"):
            await running[name].leave()
        for name in running:
            try:
                holder = (await client.get(LEASES, name, "default")).spec.holder_identity
            except KubeNotFound:
                continue
            assert holder != name, "it gave its Lease back"
        assert sharder.stop() == 0
    audited = server.audited()
    verdict = judge_audit(audited, ("a", "b", "c"))
    assert not verdict.wrong, verdict.wrong[:10]
    for name in ("a", "b"):
        assert acknowledged(audited, name), f"{name} let go of none"
    for name in running:
        uris = asked(audited, name)
        assert uris
        for uri in uris:
            assert f"labelSelector={LABEL}={name}" in unquote(uri), uri

    # A sharder keeps the Leases of its rings, not those of the whole cluster, and its own.
    for one in audited:
        about = (one.get("objectRef") or {}).get("resource")
        mine = one["user"]["username"] == "sharder-1" and one["verb"] in ("list", "watch")
        if about == "leases" and mine:
            assert "controllerring=websites" in unquote(one["requestURI"]), one["requestURI"]

    # KR-09: the sharder watches none of them. It lists metadata alone, from the server's cache.
    uris = asked(audited, "sharder-1")
    assert uris
    for uri in uris:
        assert "watch=" not in uri
        assert "resourceVersion=0" in uri, uri
    for one in audited:
        mine = one["user"]["username"] == "sharder-1" and one["verb"] == "list"
        if mine and (one.get("objectRef") or {}).get("resource") == "websites":
            assert one["responseObject"]["kind"] == "PartialObjectMetadataList"
