"""What the benchmark of rings runs: a server with a ring, its sharder, and instances as processes.

    python -m proving.benchmarks.rings_parts KUBECONFIG NAME DURATION_S [idle]

is an instance whose controller does nothing with its objects; with `idle` it has no controller.
SIGTERM makes it leave. Objects are ConfigMaps; those in the namespace `plain` do not belong to the
ring.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import TypeVar
from urllib.parse import urlencode
from urllib.request import Request, urlopen
from uuid import uuid4

import yaml

from domicile.errors import Fenced
from domicile.kube.conventions import RING_LABEL, drain_label, shard_label
from domicile.kube.hashring import HashRing, object_key
from domicile.kube.member import Ring
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.credentials import find_credentials
from domicile.kubeapi.errors import KubeError
from domicile.kubeapi.http_exchange import HttpExchange
from domicile.kubeapi.kinds import CONFIG_MAPS, LEASES, NAMESPACES, RINGS
from proving.benchmarks.kept import tell
from proving.benchmarks.processes import cpu_s
from proving.etcd_server import free_ports
from proving.kube_server import KubernetesServer

RING = "bench"
SHARED, PLAIN, SYSTEM = "shared", "plain", "sharding-system"
SHARD, DRAIN = shard_label(RING), drain_label(RING)
PATIENCE_S = 1_200.0
PUTS = 100
"""Objects of one transaction of etcd."""

T = TypeVar("T")


class Unable(Exception):
    """What cannot be measured here, and why."""


async def until(met: Callable[[], Awaitable[object]], what: str, gap_s: float = 0.1) -> float:
    """When a condition held."""
    ends = monotonic() + PATIENCE_S
    while not await met():
        if monotonic() > ends:
            raise Unable(f"not within {PATIENCE_S:g} s: {what}")
        await asyncio.sleep(gap_s)
    return monotonic()


def status_bytes(pid: int, name: str) -> int:
    """A figure of /proc/PID/status, in bytes: `VmRSS` now, `VmHWM` the most since `forget_most`."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    if found is None:
        raise Unable(f"the kernel does not tell {name}")
    return int(found[1]) * 1024


def forget_most(pid: int) -> None:
    """Have `VmHWM` count from now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


class SharderProcess:
    """`domicile ring sharder`."""

    def __init__(self, server: KubernetesServer) -> None:
        port, http = free_ports(2)
        self._http, self._log = f"127.0.0.1:{http}", server.home / "sharder.log"
        command = [
            sys.executable, "-m", "domicile", "ring", "sharder", "--kubeconfig",
            str(server.kubeconfig), "--namespace", SYSTEM, "--listen", f"127.0.0.1:{port}",
            "--url", f"https://127.0.0.1:{port}", "--http", self._http, "--log-level", "warning",
        ]  # fmt: skip
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "POD_NAME": "sharder"}
            )

    @property
    def pid(self) -> int:
        """The id of its process."""
        if self._process.poll() is not None:
            raise Unable(f"the sharder ended: {self._log.read_text(errors='replace')[-2000:]}")
        return self._process.pid

    def cpu_s(self) -> float:
        """What it has used of processors so far."""
        return cpu_s(self.pid)

    async def counted(self, name: str) -> int:
        """One of its counters."""

        def read() -> str:
            with suppress(OSError), urlopen(f"http://{self._http}/metrics", timeout=30) as answer:
                return str(answer.read().decode())
            return ""

        text = await asyncio.to_thread(read)
        found = re.findall(rf"^controller_sharding_{name}_total(?:\{{.*\}})? (\S+)$", text, re.M)
        return sum(int(float(one)) for one in found)

    def stop(self) -> None:
        """End it."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class InstanceProcess:
    """This module as a process."""

    def __init__(self, server: KubernetesServer, name: str, duration_s: int, *more: str) -> None:
        self.name = name
        command = [sys.executable, "-m", "proving.benchmarks.rings_parts",
                   str(server.kubeconfig), name, str(duration_s), *more]  # fmt: skip
        with (server.home / f"instance-{name}.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def end(self, number: int) -> None:
        """Send it a signal, and wait until it is gone."""
        self._process.send_signal(number)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RingBench:
    """A server with the ring `bench` and a client of its administrator."""

    def __init__(self, server: KubernetesServer, client: KubeClient) -> None:
        self.server, self.client = server, client

    async def install(self) -> None:
        """What `domicile ring install` prints, the namespaces, and the ring."""
        command = [sys.executable, "-m", "domicile", "ring", "install", "--resource", "/configmaps"]
        printed = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, check=True
        )
        for manifest in yaml.safe_load_all(printed.stdout):
            group, _, _ = manifest["apiVersion"].rpartition("/")
            kind = await self.client.discover(group, manifest["kind"].lower() + "s")
            await self.client.apply(kind, manifest, manager="bench")
        for name in (SHARED, PLAIN):
            await self.client.create(NAMESPACES, {"metadata": {"name": name}})

        async def served() -> bool:
            with suppress(KubeError):
                await self.client.list(RINGS)
                return True
            return False

        await until(served, "the kind ControllerRing is served")
        selector = {"matchLabels": {"kubernetes.io/metadata.name": SHARED}}
        spec = {"resources": [{"group": "", "resource": "configmaps"}],
                "namespaceSelector": selector}  # fmt: skip
        await self.client.create(RINGS, {"metadata": {"name": RING}, "spec": spec})

    def fill(self, names: Sequence[str], labels: Sequence[str]) -> None:
        """Objects, put into etcd beside the API server, which sees them as any others.

        So many through the API server would take it many minutes. One with an empty label has no
        instance.
        """
        for part in batched(list(zip(names, labels, strict=True)), PUTS):
            asked = {"success": [{"request_put": _stored(*one)} for one in part]}
            request = Request(
                f"http://{self.server.etcd.address}/v3/kv/txn", json.dumps(asked).encode()
            )
            with urlopen(request, timeout=60) as answer:
                answer.read()

    async def left(self, name: str) -> None:
        """The Lease of an instance that gave it back. Without one the sharder would wait for 600 s:
        a Lease that nobody saw may have been deleted while its holder acts."""
        metadata = {"name": name, "labels": {RING_LABEL: RING}}
        spec = {"holderIdentity": "", "leaseDurationSeconds": 1}
        await self.client.create(LEASES, {"metadata": metadata, "spec": spec}, "default")

    async def some(self, labels: str) -> bool:
        """Whether an object has such labels."""
        query = urlencode({"labelSelector": labels, "limit": 1})
        path = f"/api/v1/namespaces/{SHARED}/configmaps?{query}"
        found = await asyncio.to_thread(self.server.ask, path)
        return bool(found["items"])

    async def spread(self) -> dict[str, int]:
        """How many objects each instance has, as a stream of metadata; "" for none."""
        counts: dict[str, int] = {}
        async for one in self.client.stream_metadata(CONFIG_MAPS, SHARED):
            owner = one.metadata.label(SHARD)
            counts[owner] = counts.get(owner, 0) + 1
        return counts

    async def available(self, count: int) -> bool:
        """Whether the ring's status says so many instances."""
        return (await self.client.get(RINGS, RING)).status.available_shards == count


def wanted(names: Collection[str], instances: Collection[str]) -> list[str]:
    """The instance that each object belongs to, by the plain hash ring."""
    ring = HashRing(sorted(instances))
    return [ring.owner(object_key("", "ConfigMap", SHARED, name)) for name in names]


def _stored(name: str, label: str) -> dict[str, str]:
    """The request that puts a ConfigMap, as the API server stores one that a client has made."""
    written = {
        "manager": "bench", "operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1",
        "time": "2026-01-01T00:00:00Z", "fieldsV1": {"f:data": {".": {}, "f:text": {}}},
    }  # fmt: skip
    metadata = {
        "name": name, "namespace": SHARED, "uid": str(uuid4()), "managedFields": [written],
        "creationTimestamp": "2026-01-01T00:00:00Z", "labels": {SHARD: label} if label else {},
    }  # fmt: skip
    found = {"kind": "ConfigMap", "apiVersion": "v1", "metadata": metadata,
             "data": {"text": "x" * 200}}  # fmt: skip
    parts = f"/registry/configmaps/{SHARED}/{name}", json.dumps(found)
    key, value = (base64.b64encode(part.encode()).decode() for part in parts)
    return {"key": key, "value": value}


def batched(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Parts of a sequence, the last one shorter."""
    for first in range(0, len(items), size):
        yield items[first : first + size]


@asynccontextmanager
async def ring_bench(server: KubernetesServer) -> AsyncIterator[RingBench]:
    """The parts of a cell on a server that runs."""
    found = find_credentials(str(server.kubeconfig))
    async with KubeClient(HttpExchange(found), timeout_s=60.0) as client:
        bench = RingBench(server, client)
        await bench.install()
        tell("  the ring is installed")
        yield bench


async def instance(kubeconfig: str, name: str, duration_s: int, *, idle: bool) -> None:
    """One instance with a controller that does nothing, or with none."""

    async def reconcile(_: KubeClient, one: object) -> None:
        del one

    async with KubeClient(HttpExchange(find_credentials(kubeconfig)), timeout_s=30.0) as client:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        stopped = asyncio.ensure_future(stop.wait())
        while not stop.is_set():
            member = Ring(RING).member(
                client,
                instance=name,
                namespace="default",
                duration_s=duration_s,
                unique_name=True,  # as a pod of a Deployment
            )
            async with member:
                work = member.wait_lost() if idle else member.run(
                    reconcile, "", "configmaps", workers=8
                )  # fmt: skip
                running = asyncio.ensure_future(work)
                await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
                running.cancel()
                await asyncio.wait((running,))
                if not running.cancelled():
                    with suppress(Fenced):  # it begins anew, as a pod does
                        running.result()


if __name__ == "__main__":
    asyncio.run(instance(sys.argv[1], sys.argv[2], int(sys.argv[3]), idle="idle" in sys.argv[4:]))
