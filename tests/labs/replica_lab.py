"""Groups of real servers under `domicile replica run`, with verbs for faults, and a writer.

The writer is independent of Domicile: it speaks to each server on connections of its own, whatever
the group's state says, and numbers its writes. So it sees which server acknowledges what, and when.
Each server's agent may reach the store, and the other servers this server, through a proxy that a
test can cut or slow down.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import asyncpg
import etcd_lab
import msgspec
import postgres_lab
from redis.exceptions import RedisError
from replica_databases import Database, Session, database

from domicile import Unavailable, connect
from domicile.backends.wiring import open_whole_store
from domicile.core.state.txn import At, Put
from domicile.errors import StoreError
from domicile.failover.clients.asyncpg import follow_asyncpg
from domicile.failover.clients.redis import follow_redis
from domicile.failover.records import (
    GroupConfig,
    GroupPhase,
    GroupState,
    LossReceipt,
    ServerRecord,
    config_key,
    decode_group_record,
    encode_group_record,
    group_prefix,
    servers_prefix,
    state_key,
)
from domicile.stores.namespace import Namespace
from domicile.testing.processes.member_signals import pause
from domicile.testing.suites.byte_proxy import ByteProxy
from proving.etcd_server import ROOTS

GROUP = "orders"
TTL_S = 3.0

PATIENCE_S = 300.0
"""The machine may be busy; what is slow but right passes."""

ANSWER_S = 0.4
"""After this time without an answer the writer goes on in another session; it reads on in this."""

MOST_LATE = 100
"""So many sessions whose answers are late are kept, per server."""

PULSE_S = 0.005
PULSES = 5
"""A busy machine hands over an answer late: it may have arrived so many pulses before."""

PACE_S = 0.004
AGAIN_S = 0.05
"""Between two writes to one server: after one that it took, and after another."""

FAILED = (
    OSError, TimeoutError, RedisError, asyncpg.PostgresError, asyncpg.InterfaceError, Unavailable,
)  # fmt: skip
"""What a write through a helper of the product may raise."""


@dataclass(frozen=True)
class Acked:
    """A write that a server acknowledged."""

    key: str
    server: str
    after: float
    before: float
    """Its answer arrived between these times."""


@dataclass
class Seen:
    """A state in which somebody serves, as the observer first saw it."""

    epoch: int
    server: str
    at: float
    not_before: float
    """It was announced after this time: a read that began then did not see it yet."""


def wrong_answers(acked: Sequence[Acked], serving: Sequence[Seen]) -> list[str]:
    """Acknowledgements of a server that arrived while another one was the announced primary."""
    found: list[str] = []
    for one in acked:
        before = [seen for seen in serving if seen.at < one.after]
        if not before or before[-1].server == one.server:
            continue
        # A later announcement of its server may have come before it, not seen yet.
        later = serving[len(before) :]
        if not any(seen.server == one.server and seen.not_before < one.before for seen in later):
            found.append(f"{one.key} by {one.server} in epoch {before[-1].epoch}")
    return found


class _Signalled:
    """As much of a process as `pause` needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def send_signal(self, kind: int) -> None:
        os.kill(self.pid, kind)


@dataclass
class Machine:
    """One server, its guard and its agent."""

    name: str
    number: int
    port: int
    home: Path
    """Its own folder."""
    database: Database
    run: subprocess.Popen[bytes] | None = None
    stopped: list[int] = field(default_factory=list[int])
    host: str = "127.0.0.1"
    """Where clients of the test reach its server."""
    inner: str = "127.0.0.1"
    """Where the other servers reach it."""
    within: tuple[str, ...] = ()
    """What its commands begin with."""
    own_store: str = ""
    """The store's URL for its agent, if that is another one than the test's."""
    to_store: ByteProxy | None = None
    """Between its agent and the store, where the store is a server."""
    to_server: ByteProxy | None = None
    """Between the other servers and this one. Clients of the test go past it."""

    @property
    def state(self) -> Path:
        return self.home / "agent"

    @property
    def file(self) -> Path:
        return self.home / f"{self.name}.toml"

    @property
    def address(self) -> str:
        return f"{self.inner}:{self.to_server.port if self.to_server else self.port}"

    @property
    def log(self) -> str:
        return (self.home / "log").read_text()

    def pids(self, of: str) -> list[int]:
        """Of its `guard`, `agent` or `server`, the main one first: those that live."""
        if of == "server":
            return [one for one in self.database.pids(self.home) if lives(one)]
        with suppress(FileNotFoundError, ValueError):
            found = int((self.state / f"{of}.lock").read_text())
            return [found] if lives(found) else []
        return []

    def pid(self, of: str) -> int:
        """Of its `guard`, `agent` or `server`; 0: it does not live."""
        return next(iter(self.pids(of)), 0)

    def send(self, of: str, kind: signal.Signals) -> int:
        """A signal to its guard, agent or server; which process got it."""
        found = self.pid(of)
        assert found, f"{self.name} has no {of}: {self.log}"
        os.kill(found, kind)
        return found

    def thaw(self) -> None:
        """Let go on what was stopped."""
        for pid in self.stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.stopped.clear()

    def keys(self) -> Awaitable[set[str]]:
        """The keys that its server has."""
        return self.database.keys(self.port, self.host)

    def session(self) -> Awaitable[Session]:
        """A client's connection to its server."""
        return self.database.session(self.port, self.host)


class ReplicaGroup:
    """Some machines and their store, until the end of `replica_group`'s block."""

    def __init__(self, home: Path, count: int, store: str, more: str, database: Database) -> None:
        self.home, self.store, self.more, self.database = home, store, more, database
        self.machines = [
            Machine(f"orders-{n}", n, free_port(), home / f"{n}", database)
            for n in range(1, count + 1)
        ]
        self.serving: list[Seen] = []
        self.writer = Writer(self)
        self._whole = open_whole_store(store, by="test")
        self._namespace = Namespace(self._whole.store, "domicile")

    def machine(self, name: str) -> Machine:
        return next(one for one in self.machines if one.name == name)

    def others(self, name: str) -> list[Machine]:
        return [one for one in self.machines if one.name != name]

    def open_proxies(self, *, between: bool) -> None:
        """`between`: also between servers."""
        parts = urlsplit(self.store)
        for machine in self.machines:
            if parts.hostname:
                assert parts.port
                machine.to_store = ByteProxy(parts.hostname, parts.port).start()
            if between:
                machine.to_server = ByteProxy("127.0.0.1", machine.port).start()

    # processes

    def write_settings(self, machine: Machine) -> None:
        machine.home.mkdir(exist_ok=True)
        server = self.database.settings(machine.home, machine.number, machine.port)
        store = machine.own_store or self.store
        if machine.to_store is not None:
            store = store.replace(f":{urlsplit(store).port}/", f":{machine.to_store.port}/")
        timings = {"ttl_s": f"{TTL_S}"}
        for line in self.more.splitlines():
            name, _, value = line.partition(" = ")
            timings[name] = value
        machine.file.write_text(
            f'store = "{store}"\n'
            f'group = "{GROUP}"\n'
            f'driver = "{self.database.name}"\n'
            f'id = "{machine.name}"\n'
            f'state = "{machine.state}"\n'
            + "".join(f"{name} = {value}\n" for name, value in timings.items())
            + f'[server]\naddress = "{machine.address}"\n{server}'
        )

    def start(self, machine: Machine, what: str = "run") -> subprocess.Popen[bytes]:
        """`domicile replica run`, or one of its halves."""
        if not machine.file.exists():
            self.write_settings(machine)
        with (machine.home / "log").open("ab") as out:
            process = subprocess.Popen(
                [*machine.within, sys.executable, "-m", "domicile", "replica", what,
                 str(machine.file)],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.home,
            )  # fmt: skip
        if what == "run":
            machine.run = process
        return process

    async def kill(self, machine: Machine) -> None:
        """SIGKILL of everything of one machine."""
        agent = machine.pid("agent")
        assert machine.run is not None
        machine.run.kill()
        if agent:
            with suppress(ProcessLookupError):
                os.kill(agent, signal.SIGKILL)
        await asyncio.to_thread(machine.run.wait)
        machine.run = None
        await self.until(lambda: not machine.pid("server"), "the killed guard's server is gone")

    async def freeze(self, machine: Machine, *of: str) -> list[int]:
        """SIGSTOP, but not while it holds the write lock of a store that is a file.

        The main process of each, which is returned, and then the processes that it has.
        """
        file = self._whole.backend.sqlite_file(self.store)
        mains: list[int] = []
        for one in of:
            mains.append(machine.pid(one))
            done: set[int] = set()
            while left := [pid for pid in machine.pids(one) if pid not in done]:
                done.add(left[0])
                machine.stopped.append(left[0])
                stopped: Any = _Signalled(left[0])
                with suppress(ProcessLookupError):
                    paused = await asyncio.to_thread(pause, stopped, file)
                    assert paused or not lives(left[0]), f"{machine.name} can't be stopped"
        return mains

    async def domicile(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`domicile replica ...` on the store."""
        return await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "domicile", "replica", *words, self.store],
            capture_output=True, text=True, cwd=self.home, check=False,
        )  # fmt: skip

    async def status(self) -> dict[str, Any]:
        """What `domicile replica status` tells of the group."""
        said = await self.domicile("status", GROUP, "--json")
        found: dict[str, Any] = json.loads(said.stdout)[0]
        return found

    # what is stored

    async def state(self) -> GroupState | None:
        item = await self._namespace.get(state_key(GROUP))
        return None if item is None else decode_group_record(item.value, GroupState)

    async def members(self) -> list[ServerRecord]:
        listing = await self._namespace.list(servers_prefix(GROUP))
        return [decode_group_record(item.value, ServerRecord) for item in listing.items]

    async def receipts(self) -> list[LossReceipt]:
        listing = await self._namespace.list(group_prefix(GROUP) + b"receipt/")
        return [decode_group_record(item.value, LossReceipt) for item in listing.items]

    async def change_config(self, **changes: Any) -> None:
        item = await self._namespace.get(config_key(GROUP))
        assert item is not None
        config = decode_group_record(item.value, GroupConfig)
        config = msgspec.structs.replace(config, **changes)
        put = Put(config_key(GROUP), encode_group_record(config))
        await self._namespace.commit([At(config_key(GROUP), item.revision)], [put])

    async def change_state(self, change: Callable[[GroupState], GroupState]) -> None:
        item = await self._namespace.get(state_key(GROUP))
        assert item is not None
        changed = change(decode_group_record(item.value, GroupState))
        put = Put(state_key(GROUP), encode_group_record(changed))
        await self._namespace.commit([At(state_key(GROUP), item.revision)], [put])

    async def until(self, met: Callable[[], Any], what: str) -> None:
        """Wait for a condition, which may be a coroutine function."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    found = met()
                    if asyncio.iscoroutine(found):
                        found = await found
                    if found:
                        return
                    assert not self._refused(), f"settings were refused\n{self.told()}"
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not within {PATIENCE_S:g} s: {what}\n{self.told()}") from None

    async def serves(self, epoch: int, *, by: str = "") -> GroupState:
        """Wait until an epoch of at least this number is served, and clients can write."""
        found: list[GroupState] = []

        async def served() -> bool:
            state = await self.state()
            if state is None or state.phase is not GroupPhase.SERVING or state.epoch < epoch:
                return False
            found[:] = [state]
            return (not by or state.primary_server == by) and any(
                one.server == state.primary_server and one.role == "primary"
                for one in await self.members()
            )

        await self.until(served, f"epoch {epoch} is served {by}")
        return found[0]

    async def whole(self, epoch: int = 1, *, of: int | None = None) -> GroupState:
        """Wait until an epoch is served, and all others follow with all that the primary has.

        `of`: how many servers the group has now; else all.
        """
        found: list[GroupState] = []

        async def level() -> bool:
            state = await self.serves(epoch)
            members = {one.server: one for one in await self.members()}
            found[:] = [state]
            return len(members) == (of or len(self.machines)) and all(
                one.follows == state.primary_server and one.position.epoch == state.epoch
                for one in members.values()
                if one.server != state.primary_server
            )

        await self.until(level, "all follow the primary")
        return found[0]

    def _refused(self) -> bool:
        return any(one.run is not None and one.run.poll() == 2 for one in self.machines)

    def told(self) -> str:
        return "\n".join(f"--- {one.name}\n{one.log}" for one in self.machines if one.run)

    async def observe(self) -> None:
        """Note when each primary was first seen to be announced."""
        not_before = 0.0
        while True:
            began = monotonic()
            with suppress(StoreError):
                state = await self.state()
                if state is not None and state.phase is GroupPhase.SERVING:
                    last = self.serving[-1] if self.serving else None
                    if last is None or (last.epoch, last.server) != (
                        state.epoch, state.primary_server,
                    ):  # fmt: skip
                        self.serving.append(
                            Seen(state.epoch, state.primary_server, monotonic(), not_before)
                        )
                not_before = began
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        for machine in self.machines:
            machine.thaw()
            for proxy in (machine.to_store, machine.to_server):
                if proxy is not None:
                    await proxy.delay(0.0)
                    await proxy.release()
        for machine in self.machines:
            if machine.run is not None:
                machine.run.terminate()
        for machine in self.machines:
            if machine.run is not None:
                try:
                    await asyncio.to_thread(machine.run.wait, 60)
                except subprocess.TimeoutExpired:
                    machine.run.kill()
                    machine.run.wait()
        await self._whole.store.close()
        for machine in self.machines:
            for proxy in (machine.to_store, machine.to_server):
                if proxy is not None:
                    await proxy.close()


class Writer:
    """Writes to all servers at once, each on one session for as long as that works."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self.acked: list[Acked] = []
        self.open: dict[str, str] = {}
        """Writes of which nobody knows whether they happened, with their servers."""
        self.numbers = 0
        self.goes_no_more = False
        self._pulses = deque([monotonic()], maxlen=PULSES)
        self.goes = asyncio.Event()
        """Cleared, it sends nothing."""
        self.goes.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._beat())
            for machine in self._group.machines:
                task = tasks.create_task(self._keep_writing(machine))
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.goes_no_more = True

    async def _beat(self) -> None:
        while True:
            self._pulses.append(monotonic())
            await asyncio.sleep(PULSE_S)

    async def _keep_writing(self, machine: Machine) -> None:
        late: dict[asyncio.Task[bool], Session] = {}
        while True:
            with suppress(OSError, TimeoutError):
                session = await machine.session()
                try:
                    while not session.over:
                        await self.goes.wait()
                        writing = self._tasks.create_task(self._write(machine.name, session))
                        await asyncio.wait([writing], timeout=ANSWER_S)
                        if not writing.done():
                            # A server that stood still may answer when it goes on.
                            late[writing] = session
                            break
                        await asyncio.sleep(PACE_S if writing.result() else AGAIN_S)
                finally:
                    if session not in late.values():
                        session.close()
            for ended in [one for one in late if one.done()]:
                late.pop(ended).close()
            if len(late) > MOST_LATE:
                next(iter(late)).cancel()
            await asyncio.sleep(AGAIN_S)

    async def _write(self, server: str, session: Session) -> bool:
        """Whether the server acknowledged; False also if nobody knows."""
        self.numbers += 1
        key = f"w{self.numbers:07d}"
        self.open[key] = server
        sent_at = monotonic()
        try:
            done = await session.write(key)
        except (OSError, TimeoutError):
            session.close()
            return False
        del self.open[key]
        if done:
            self.acked.append(Acked(key, server, max(sent_at, self._pulses[0]), monotonic()))
        return done

    async def goes_on(self, server: str, number: int) -> None:
        """Wait until a server has acknowledged so many more writes."""
        before = self.count(server)

        def enough() -> bool:
            assert not self.goes_no_more, "the writer has ended"
            return self.count(server) >= before + number

        await self._group.until(enough, f"{server} takes writes")

    def count(self, server: str = "") -> int:
        """How many writes were acknowledged, by one server or by all."""
        return sum(not server or one.server == server for one in self.acked)

    def wrong(self) -> list[str]:
        """As `wrong_answers`."""
        return wrong_answers(self.acked, self._group.serving)

    async def missing(self, machine: Machine) -> set[str]:
        """Acknowledged writes that a server does not have."""
        acked = {one.key for one in self.acked}
        return acked - await machine.keys()


class FollowingClient:
    """A program that writes through the product's helper, and repeats nothing by itself.

    Its keys begin with w5 or a greater digit, so that they are nobody else's.
    """

    def __init__(self, group: ReplicaGroup, number: int) -> None:
        self._group, self._number = group, number
        self.acked: list[str] = []
        self.failed: list[str] = []
        """Writes for which the program got an error, whatever became of them."""
        self.longest_s = 0.0

    async def goes_on(self, number: int) -> None:
        """Wait until so many more of its writes were acknowledged."""
        goal = len(self.acked) + number
        await self._group.until(lambda: len(self.acked) >= goal, "the client writes on")

    async def run(self) -> None:
        async with connect(self._group.store) as client:
            orders = client.group(GROUP)
            if self._group.database.name == "postgresql":
                async with follow_asyncpg(
                    orders, user="app", database="postgres", ssl=False, max_size=2
                ) as pool:
                    insert = "INSERT INTO public.kept VALUES ($1)"
                    await self._keep_writing(lambda key: pool.execute(insert, key))
            else:
                async with follow_redis(orders, max_connections=2) as redis:
                    await self._keep_writing(lambda key: redis.set(key, "1"))

    async def _keep_writing(self, write: Callable[[str], Awaitable[Any]]) -> None:
        for number in itertools.count():
            key, began = f"w{5 + self._number}{number:06d}", monotonic()
            try:
                await write(key)
            except FAILED as error:
                self.failed.append(f"{key}: {error!r}")
            else:
                self.acked.append(key)
            self.longest_s = max(self.longest_s, monotonic() - began)
            await asyncio.sleep(PACE_S)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Network(Protocol):
    """Where the processes of a group are, if not on this machine's own network."""

    store: str
    """The store's URL for the test."""

    def place(self, machines: list[Machine]) -> None:
        """Say of each machine where it is."""
        ...


StoreName = Literal["sqlite", "etcd", "postgresql"]


def store_url(name: StoreName, home: Path) -> str:
    """A store of a new group's own; skips the test by name where its server can't be had."""
    if name == "etcd":
        return f"etcd://127.0.0.1:{etcd_lab.scenario_server().port}/replica{next(ROOTS)}"
    if name == "postgresql":
        return postgres_lab.shared_server().new_database()
    return f"sqlite:///{home}/store.db"


@asynccontextmanager
async def replica_group(
    count: int = 3,
    *,
    kind: str = "valkey",
    store: StoreName = "sqlite",
    more: str = "",
    between: bool = False,
    started: int | None = None,
    network: Network | None = None,
) -> AsyncIterator[ReplicaGroup]:
    """A group whose servers run; all is gone at the end. `more`: settings of all servers.

    `between`: the servers reach each other through proxies. `started`: how many of them run.
    `network`: another one than this machine's own, with a store of its own.
    """
    used = database(kind)
    home = Path(tempfile.mkdtemp(prefix="domicile-group-"))
    home.chmod(0o755)  # noqa: ASYNC240
    url = await asyncio.to_thread(store_url, store, home) if network is None else network.store
    group = ReplicaGroup(home, count, url, more, used)
    if network is None:
        group.open_proxies(between=between)
    else:
        network.place(group.machines)
    watching = asyncio.create_task(group.observe())
    try:
        running = group.machines[:started]
        for machine in running:
            group.start(machine)
        if running:
            await group.whole(of=len(running))
        yield group
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        await group.close()
        shutil.rmtree(home, ignore_errors=True)


def play(scenario: Callable[[ReplicaGroup], Any], count: int = 3, **how: Any) -> None:
    """Run one scenario in a group to which the writer writes; then judge what it saw."""

    async def main() -> None:
        async with replica_group(count, **how) as group:
            writing = asyncio.create_task(group.writer.run())
            try:
                await scenario(group)
            except BaseException:
                print(group.told())
                if writing.done() and not writing.cancelled():
                    # That is why it does not go on.
                    writing.result()
                raise
            finally:
                writing.cancel()
                await asyncio.wait([writing])
            if not writing.cancelled():
                writing.result()
            assert not group.writer.wrong()

    asyncio.run(main())
