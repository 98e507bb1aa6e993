"""Pods and machines as proof of death, on a real API server: `fencing="health"` (SM-08, C9).

Nodes of entities are processes on an embedded store. Their pods and machines are objects only: the
test says what a kubelet would say.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from kube_lab import ApiServer, started, until
from pod_node import Till

from domicile import DomicileError, Settings, connect
from domicile.backends.wiring import open_whole_store
from domicile.core.hashing import shard_of
from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.keys import dead_key
from domicile.core.state.shardmap import Entry
from domicile.entity.model.client import Client
from domicile.kube.pod_proof import OUT_OF_SERVICE
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.errors import KubeNotFound
from domicile.kubeapi.kinds import MACHINES, NAMESPACES, PODS
from domicile.stores.namespace import Namespace
from proving.etcd_server import free_ports

SHARDS = 6
LAB = Path(__file__).parents[1] / "labs" / "pod_node.py"
RUNS: dict[str, Any] = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
ENDED: dict[str, Any] = {"terminated": {"exitCode": 137}}
IDS = [f"t{number}" for number in range(24)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    yield from started(tmp_path_factory.mktemp("kube"))


def status(phase: str, state: dict[str, Any]) -> dict[str, Any]:
    container = {
        "name": "node", "state": state, "restartCount": 0, "ready": phase == "Running",
        "image": "x", "imageID": "x",
    }  # fmt: skip
    return {"status": {"phase": phase, "containerStatuses": [container]}}


class Cluster:
    """Three nodes, each in a pod of its own on a machine of its own."""

    def __init__(self, server: ApiServer, kube: KubeClient, home: Path) -> None:
        self._server, self.kube, self._home = server, kube, home
        self.url = f"sqlite:////{str(home).lstrip('/')}/store.db"
        self.store = Namespace(open_whole_store(self.url, by="test").store, "domicile")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.metrics: dict[str, str] = {}

    async def start(self, name: str) -> None:
        await self.kube.create(MACHINES, {"metadata": {"name": f"machine-{name}"}})
        spec = {
            "nodeName": f"machine-{name}", "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "node", "image": "x"}],
        }  # fmt: skip
        made = await self.kube.create(PODS, {"metadata": {"name": name}, "spec": spec}, "default")
        await self.say(name, "Running", RUNS)
        pod = {"POD_NAME": name, "POD_NAMESPACE": "default", "POD_UID": made.metadata.uid}
        self.metrics[name] = f"127.0.0.1:{free_ports(1)[0]}"
        config = str(self._server.kubeconfig_of("admin"))
        with (self._home / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, str(LAB), self.url, config, self.metrics[name]],
                env={**os.environ, **pod}, stdout=log, stderr=log,
            )  # fmt: skip

    async def say(self, name: str, phase: str, state: dict[str, Any]) -> None:
        """What the kubelet would report."""
        said = status(phase, state)
        await self.kube.patch(PODS, name, "default", merge=said, subresource="status")

    async def view(self) -> ClusterView:
        found = ClusterView()
        found.load(await self.store.list(b""))
        return found

    async def entries(self) -> list[Entry]:
        shards = (await self.view()).map
        return [shards.get(ShardKey("default", number)) for number in range(SHARDS)]

    async def incarnations(self) -> dict[str, Incarnation]:
        return {one.node: one.incarnation for one in (await self.view()).nodes.values()}

    async def shared_by(self, *names: str) -> bool:
        """Whether these nodes serve everything, each its part."""
        known = await self.incarnations()
        owners = [entry.owner for entry in await self.entries()]
        fair = all(owners.count(known.get(name, "")) == SHARDS // len(names) for name in names)
        return fair and len(owners) == SHARDS

    async def suspected(self) -> float:
        """How often senders reported a node, as all living nodes count."""
        total = 0.0
        for name, process in self.processes.items():
            if process.poll() is None and name not in self.frozen:
                total += await asyncio.to_thread(_suspected, self.metrics[name])
        return total

    frozen: tuple[str, ...] = ()

    def freeze(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGSTOP)
        self.frozen = (name,)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def thaw(self) -> None:
        for name in self.frozen:
            self.processes[name].send_signal(signal.SIGCONT)
        self.frozen = ()

    def stop(self) -> None:
        self.thaw()
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()


def _suspected(at: str) -> float:
    try:
        with urlopen(f"http://{at}/metrics", timeout=30) as answer:
            shown: bytes = answer.read()
    except OSError:
        return 0.0  # it has just been killed
    lines = [line for line in shown.decode().splitlines() if "node_suspected" in line]
    return sum(float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#"))


@asynccontextmanager
async def cluster_on(server: ApiServer, home: Path) -> AsyncGenerator[tuple[Cluster, Client]]:
    async with server.client() as kube:

        async def served() -> bool:
            return bool([one async for one in kube.stream_metadata(NAMESPACES)])

        await until(served, "the namespaces are served")
        await until(lambda: _there(kube, "kube-system", "default"), "the first namespaces")
        cluster = Cluster(server, kube, home)
        try:
            for name in ("a", "b", "c"):
                await cluster.start(name)
            await until(lambda: cluster.shared_by("a", "b", "c"), "three nodes share everything")
            async with connect(cluster.url, settings=Settings(link_timeout_s=2.0)) as client:
                yield cluster, client
        finally:
            cluster.stop()
            await cluster.store.close()


async def _there(kube: KubeClient, *names: str) -> bool:
    found = [one.metadata.name for one in (await kube.list(NAMESPACES)).items]
    return all(name in found for name in names)


async def at(cluster: Cluster, client: Client, name: str) -> list[str]:
    """Ids of entities whose home is a node; each has run."""
    found = []
    mine = (await cluster.incarnations())[name]
    entries = await cluster.entries()
    for id in IDS:
        if entries[shard_of(EntityKey("till", id), SHARDS)].owner == mine:
            assert await client.ref(Till, id).ask(Till.add, 1) >= 1
            found.append(id)
    assert found, f"no entity of {IDS} lives at {name}"
    return found


async def tried(client: Client, id: str) -> None:
    """An ask that may fail: its sender then reports the node."""
    with suppress(DomicileError):
        await client.ref(Till, id).options(timeout_s=5.0).ask(Till.add, 100)


@pytest.mark.scenario("SM-08")
def test_only_a_proof_by_pod_or_machine_frees_a_silent_nodes_shards(
    server: ApiServer, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with cluster_on(server, tmp_path) as (cluster, client):
            leader = (await cluster.view()).leader
            assert leader is not None
            silent, second = (one for one in ("a", "b", "c") if one != leader.node)
            homes = {name: await at(cluster, client, name) for name in (silent, second)}
            before = await cluster.entries()

            # A sender reports it. Its pod runs, so nothing changes, however often it is reported.
            cluster.freeze(silent)
            reports = await cluster.suspected()

            async def reported() -> bool:
                await tried(client, homes[silent][0])
                assert await cluster.entries() == before, "a report alone is no proof"
                return await cluster.suspected() >= reports + 3

            await until(reported, "senders report the silent node")
            assert await cluster.entries() == before
            cluster.thaw()

            async def answers() -> bool:
                with suppress(DomicileError):
                    total = await client.ref(Till, homes[silent][0]).ask(Till.add, 1)
                    assert total % 100 >= 2, "it lost its memory"
                    return True
                return False

            await until(answers, "it goes on")
            assert await cluster.entries() == before

            # The process is dead, and nothing proves it: the kubelet has not said so yet.
            dead = (await cluster.incarnations())[silent]
            cluster.kill(silent)
            reports = await cluster.suspected()
            await until(reported, "senders report the dead node")
            assert await cluster.entries() == before
            await cluster.say(silent, "Failed", ENDED)
            rest = [name for name in ("a", "b", "c") if name != silent]
            await until(lambda: cluster.shared_by(*rest), "its shards are placed", 20.0)
            evidence = await cluster.store.get(dead_key(dead))
            assert evidence is not None
            assert f"pod default/{silent} (uid ".encode() in evidence.value
            assert b"is Failed: all of its containers have terminated" in evidence.value
            assert await client.ref(Till, homes[silent][0]).ask(Till.add, 1) == 1

            # The pod is gone, by force, and that alone is no proof either.
            dead = (await cluster.incarnations())[second]
            before = await cluster.entries()
            homes[second] = await at(cluster, client, second)
            cluster.kill(second)
            await cluster.kube.delete(PODS, second, "default")
            with pytest.raises(KubeNotFound):
                await cluster.kube.get(PODS, second, "default")
            reports = await cluster.suspected()
            homes[silent] = homes[second]
            await until(reported, "senders report the node whose pod is gone")
            assert await cluster.entries() == before
            taint = {"key": OUT_OF_SERVICE, "value": "nodeshutdown", "effect": "NoExecute"}
            machine = f"machine-{second}"
            await cluster.kube.patch(MACHINES, machine, merge={"spec": {"taints": [taint]}})
            await until(lambda: cluster.shared_by(leader.node), "one node has everything", 20.0)
            evidence = await cluster.store.get(dead_key(dead))
            assert evidence is not None
            assert OUT_OF_SERVICE.encode() in evidence.value

    asyncio.run(scenario())
