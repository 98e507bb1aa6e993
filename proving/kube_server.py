"""A kube-apiserver with an etcd of its own, which can be killed and frozen; no kubelet is needed.

Used by `proving.chaos`, by benchmarks and by tests. The program comes from the cache of built
servers (`make kube-apiserver` puts it there), etcd from a wheel or from PATH. etcd keeps every
revision and the API server notes every write, so `proving.kube_commits` can tell what was committed
when. Whoever starts a server stops it.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import ssl
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from domicile.kube.certificates import made_certificates
from proving.etcd_server import EtcdServer, free_ports
from proving.freezing import freeze

VERSION = "1.36.3"
READY_S = 300.0
NAMESPACE = "default"
TOKEN = "token-admin"
STORES = count()
"""Each store has a name of its own."""

WRITES = ("create", "update", "patch", "delete")
AUDIT = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["ResponseStarted"],
    "rules": [
        {
            "level": "RequestResponse", "verbs": list(WRITES), "namespaces": [NAMESPACE],
            "resources": [{"resources": ["configmaps"]}],
        },
        {"level": "None"},
    ],
}  # fmt: skip


class NoKubernetes(Exception):
    """No API server can be started here; the text says why."""


def api_server_program() -> Path:
    """The built kube-apiserver."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    program = cache / "domicile" / "servers" / f"kube-apiserver-{VERSION}" / "kube-apiserver"
    if not program.exists():
        raise NoKubernetes(f"no kube-apiserver {VERSION} in the cache: make kube-apiserver")
    return program


class KubernetesServer:
    """One API server and its etcd, from `start` to `stop`."""

    def __init__(self, *more: str) -> None:
        self._program, self._more = api_server_program(), more
        self.etcd = EtcdServer()
        self.home = Path(tempfile.mkdtemp(prefix="domicile-kube-"))
        self.audit = self.home / "audit.log"
        (self.port,) = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._authorities = b""
        self._kills = 0

    # start and end

    def start(self) -> None:
        """Start what does not run, and wait until the API server is ready."""
        if not self._authorities:
            self._make_files()
        if not self._runs(self.etcd.process):
            self.etcd.start()
        if not self._runs(self._process):
            self._launch()
        until = time.monotonic() + READY_S
        while not self._ready():
            assert self._process is not None
            log = self.home / "api.log"
            assert self._process.poll() is None, log.read_text(errors="replace")[-3_000:]
            assert time.monotonic() < until, "the API server did not get ready"
            time.sleep(0.05)

    def stop(self) -> None:
        """End both and remove their files."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self.etcd.stop()
        shutil.rmtree(self.home, ignore_errors=True)

    def pids(self) -> list[int]:
        """The process of the API server, and that of etcd."""
        assert self._process is not None
        return [self._process.pid, *self.etcd.pids()]

    # faults

    def kill(self) -> None:
        """End one of the two at once, as a crash does: the API server, the next time etcd."""
        self._kills += 1
        if self._kills % 2:
            assert self._process is not None
            self._process.kill()
            self._process.wait()
        else:
            self.etcd.kill()

    def freeze(self) -> None:
        """Stop both as they are."""
        freeze(*self.pids())

    def thaw(self) -> None:
        """Let them go on."""
        for pid in self.pids():
            os.kill(pid, signal.SIGCONT)

    # what it is asked

    def new_database(self) -> str:
        """The URL of an empty store."""
        config = self._kubeconfig(self.port)
        return f"kubernetes://{NAMESPACE}?kubeconfig={config}&store=store{next(STORES)}"

    def behind(self, url: str, port: int) -> str:
        """The URL by which a proxy at a port is asked for a store."""
        return url.replace(str(self._config_path(self.port)), str(self._kubeconfig(port)))

    @property
    def kubeconfig(self) -> Path:
        """A kubeconfig of the administrator."""
        return self._kubeconfig(self.port)

    def ask(self, path: str, *, method: str = "GET", body: object = None) -> Any:
        """What the API server answers to the administrator; not for use in an event loop."""
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"},
            method=method,
        )
        context = ssl.create_default_context(cadata=self._authorities.decode())
        with urllib.request.urlopen(request, timeout=120, context=context) as answer:
            text = answer.read().decode()
        return json.loads(text) if text.startswith("{") else text

    # inside

    @staticmethod
    def _runs(process: subprocess.Popen[bytes] | None) -> bool:
        return process is not None and process.poll() is None

    def _make_files(self) -> None:
        made = made_certificates(["127.0.0.1", "localhost"], datetime.now(UTC))
        self._authorities = made.authorities
        (self.home / "api.crt").write_bytes(made.certificate)
        (self.home / "api.key").write_bytes(made.key)
        key = rsa.generate_private_key(65537, 2048)
        (self.home / "sa.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
        (self.home / "tokens.csv").write_text(f"{TOKEN},admin,admin,system:masters\n")
        (self.home / "audit.json").write_text(json.dumps(AUDIT))

    def _launch(self) -> None:
        home, etcd = self.home, f"http://{self.etcd.address}"
        command: Sequence[str] = [
            str(self._program), "--etcd-servers", etcd, "--bind-address", "127.0.0.1",
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
            "--storage-media-type", "application/json", "--etcd-compaction-interval", "0",
            "--audit-policy-file", str(home / "audit.json"), "--audit-log-path", str(self.audit),
            *self._more,
        ]  # fmt: skip
        with (home / "api.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def _ready(self) -> bool:
        with suppress(OSError, ValueError):
            ready = self.ask("/readyz") == "ok"
            return ready and bool(self.ask(f"/api/v1/namespaces/{NAMESPACE}"))
        return False

    def _config_path(self, port: int) -> Path:
        return self.home / f"kubeconfig-{port}"

    def _kubeconfig(self, port: int) -> Path:
        path = self._config_path(port)
        cluster = {
            "server": f"https://127.0.0.1:{port}",
            "certificate-authority-data": base64.b64encode(self._authorities).decode(),
        }
        found = {
            "current-context": "x",
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
        }
        if not path.exists():
            path.write_text(json.dumps(found))
        return path
