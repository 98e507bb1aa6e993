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
import commit_gate
import etcd_lab
import msgspec
import postgres_lab
import psycopg
import redis_lab
from backends_lab import installed
from commit_gate import CommitGate
from late_proxy import LateProxy
from redis.exceptions import RedisError
from replica_databases import Database, Session, database

from domicile import Unavailable, connect, connect_sync
from domicile.backends.wiring import open_whole_store
from domicile.core.ids import Incarnation
from domicile.core.state.txn import At, Put
from domicile.errors import StoreError
from domicile.failover.clients.asyncpg import follow_asyncpg
from domicile.failover.clients.psycopg import follow_psycopg_sync
from domicile.failover.clients.redis import follow_redis, follow_redis_sync
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
from domicile.stores.commit_log import QueuedCommit
from domicile.stores.namespace import Namespace
from domicile.testing.processes.member_signals import pause
from proving.etcd_server import ROOTS
from proving.freezing import freeze

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

CROWD = 100
CROWD_PACE_S = 0.5
"""So many clients of one server, and how long each waits between two writes."""

FAILED = (
    OSError, TimeoutError, RedisError, asyncpg.PostgresError, asyncpg.InterfaceError, Unavailable,
    psycopg.Error,
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


@dataclass(frozen=True)
class Written:
    """A state of the group, as the store's history has it."""

    by: str
    """The server whose agent wrote it."""
    state: GroupState


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
    to_store: LateProxy | None = None
    """Between its agent and the store, where the store is a server."""
    to_server: LateProxy | None = None
    """Between the other servers and this one. Clients of the test go past it."""
    gate: CommitGate | None = None
    """Holds its agent at one step of a change of primary."""

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

    def stops_at(self, *points: str) -> None:
        """Hold its agent at these points as soon as it gets there; nowhere else."""
        assert self.gate is not None, "give the group gates"
        self.gate.hold(*points)

    def goes_on(self) -> None:
        """Hold its agent no longer."""
        assert self.gate is not None, "give the group gates"
        self.gate.release()

    def stands_at(self, point: str) -> bool:
        """Whether its present agent is held there now."""
        assert self.gate is not None, "give the group gates"
        return self.gate.has(point, self.pid("agent"))

    def told(self, point: str) -> list[str]:
        """What became of its commits that were held there."""
        assert self.gate is not None, "give the group gates"
        return self.gate.told(point)

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
        self._environ = dict(os.environ)
        self._begun = 0
        self._whole = open_whole_store(store, by="test")
        self._namespace = Namespace(self._whole.store, "domicile")

    def machine(self, name: str) -> Machine:
        return next(one for one in self.machines if one.name == name)

    def others(self, name: str) -> list[Machine]:
        return [one for one in self.machines if one.name != name]

    def put_gates(self) -> None:
        """Agents go through gates to the store from now on."""
        site = self.home / "site"
        installed(site, "gated", Path(commit_gate.__file__).read_text(), commit_gate.SCHEME)
        self._environ["PYTHONPATH"] = str(site)
        for machine in self.machines:
            machine.gate = CommitGate(machine.home / "gate")

    def open_proxies(self, *, between: bool) -> None:
        """`between`: also between servers."""
        parts = urlsplit(self.store)
        for machine in self.machines:
            if parts.hostname:
                assert parts.port
                machine.to_store = LateProxy(parts.hostname, parts.port).start()
            if between:
                machine.to_server = LateProxy("127.0.0.1", machine.port).start()

    # processes

    def write_settings(self, machine: Machine) -> None:
        machine.home.mkdir(exist_ok=True)
        server = self.database.settings(machine.home, machine.number, machine.port)
        store = machine.own_store or self.store
        if machine.to_store is not None:
            store = store.replace(f":{urlsplit(store).port}/", f":{machine.to_store.port}/")
        if machine.gate is not None:
            store = machine.gate.url(store)
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
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.home, env=self._environ,
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

        The main process of each, which is returned, and then the processes that it has. Not those
        of another one that the guard has started in its place meanwhile.
        """
        file = self._whole.backend.sqlite_file(self.store)
        mains: list[int] = []
        for one in of:
            mains.append(machine.pid(one))
            if one == "server":
                # It has no lock of the store. All of it stops before its guard notices.
                all_of_it = machine.pids(one)
                machine.stopped += all_of_it
                await asyncio.to_thread(freeze, *all_of_it)
                continue
            done: set[int] = set()
            while (found := machine.pids(one))[:1] == mains[-1:]:
                left = [pid for pid in found if pid not in done]
                if not left:
                    break
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

    async def history(self) -> list[Written]:
        """Every state that the group has had, the oldest first, and whose agent wrote it."""
        return [
            Written(commit.by, decode_group_record(value, GroupState))
            for commit in await self.commits()
            for key, value, _ in commit.puts
            if key.endswith(b"/" + state_key(GROUP))
        ]

    async def commits(self) -> list[QueuedCommit]:
        """All that was written into the store, by whom, since the group began."""
        found = await asyncio.to_thread(self._whole.backend.commits, self.store, self._begun)
        assert found is not None, "this store keeps no commits"
        return found

    async def begin(self) -> None:
        """Before the first process: the store's history of this group begins here."""
        self._begun = (await self._namespace.list(group_prefix(GROUP))).revision

    async def members(self) -> list[ServerRecord]:
        listing = await self._namespace.list(servers_prefix(GROUP))
        return [decode_group_record(item.value, ServerRecord) for item in listing.items]

    async def receipts(self) -> list[LossReceipt]:
        listing = await self._namespace.list(group_prefix(GROUP) + b"receipt/")
        return [decode_group_record(item.value, LossReceipt) for item in listing.items]

    async def gone(self, incarnation: Incarnation) -> float:
        """When an agent's record was first seen to be gone: others may elect from then on."""
        found: list[float] = []

        async def absent() -> bool:
            with suppress(StoreError):
                if incarnation not in {one.incarnation for one in await self.members()}:
                    found.append(monotonic())
            return bool(found)

        await self.until(absent, f"the record of {incarnation} is gone")
        return found[0]

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

    async def fed_by(self, primary: str) -> None:
        """Wait until, by the servers' own word, one is a primary and all others are fed by it."""
        source = self.machine(primary)
        port = int(source.address.rpartition(":")[2])

        async def right() -> bool:
            found: dict[str, int] = {}
            for one in self.machines:
                with suppress(OSError, TimeoutError, asyncpg.PostgresError):
                    found[one.name] = await self.database.fed_by(one.port, one.host)
            wanted = {one.name: 0 if one is source else port for one in self.machines}
            return found == wanted

        await self.until(right, f"all servers say that {primary} feeds them")

    async def pace_s(self) -> float:
        """How long this machine now takes to start a small program and let it end."""
        began = monotonic()
        await self.status()
        return monotonic() - began

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
            if machine.gate is not None:
                machine.gate.release()
            for proxy in (machine.to_store, machine.to_server):
                if proxy is not None:
                    await proxy.late()
                    await proxy.all()
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
                        writing = self._tasks.create_task(self.write(machine.name, session))
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

    async def write(self, server: str, session: Session) -> bool:
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


class Crowd:
    """A hundred sessions of one server with a transaction open in each, and a hundred that write.

    They stay with their server, and never connect again. What they write counts as the writer's.
    """

    def __init__(self, group: ReplicaGroup, machine: Machine, *, first: int = 0) -> None:
        """`first`: the number of its first transaction, so that no two crowds write one key."""
        self._group, self._machine, self._first = group, machine, first
        self._open: list[tuple[str, Session]] = []
        self._writing: list[asyncio.Task[None]] = []
        self._acked = [0] * CROWD
        self._last = [0.0] * CROWD

    async def __aenter__(self) -> Crowd:
        for number in range(CROWD):
            session = await self._machine.session()
            key = f"w{9_000_000 + self._first + number}"
            await session.begin(key)
            self._open.append((key, session))
        for number in range(CROWD):
            session = await self._machine.session()
            self._writing.append(asyncio.create_task(self._keep_writing(number, session)))
        await self._group.until(lambda: all(self._acked), "each of a hundred has written")
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._writing:
            task.cancel()
        await asyncio.gather(*self._writing, return_exceptions=True)
        for _, session in self._open:
            session.close()

    async def _keep_writing(self, number: int, session: Session) -> None:
        writer = self._group.writer
        try:
            while not session.over:
                if await writer.write(self._machine.name, session):
                    self._acked[number] += 1
                    self._last[number] = writer.acked[-1].after
                await asyncio.sleep(CROWD_PACE_S)
        finally:
            session.close()

    @property
    def keys(self) -> set[str]:
        """What the open transactions would write."""
        return {key for key, _ in self._open}

    async def committed(self) -> list[str]:
        """The open transactions that can be committed now."""
        done: list[str] = []
        for key, session in self._open:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(5.0):
                    if await session.commit():
                        done.append(key)
            session.close()
        return done

    def wrote_after(self, at: float) -> list[int]:
        """Those of the hundred that had an answer after a time."""
        return [number for number, last in enumerate(self._last) if last > at]


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


class FollowingThread(FollowingClient):
    """The same through the helpers for threads; each write in a thread of its own."""

    async def run(self) -> None:
        client = await asyncio.to_thread(connect_sync, self._group.store)
        orders = client.group(GROUP)
        block: Any
        if self._group.database.name == "postgresql":
            block = follow_psycopg_sync(
                orders, "user=app dbname=postgres sslmode=disable", max_size=2
            )
        else:
            block = follow_redis_sync(orders, max_connections=2)
        used = await asyncio.to_thread(block.__enter__)

        def write(key: str) -> None:
            if self._group.database.name == "postgresql":
                used.execute("INSERT INTO public.kept VALUES (%s)", (key,))
            else:
                used.set(key, "1")

        try:
            await self._keep_writing(lambda key: asyncio.to_thread(write, key))
        finally:
            # Also after a cancellation: a thread that writes is waited for.
            await asyncio.shield(asyncio.to_thread(block.__exit__, None, None, None))
            await asyncio.shield(asyncio.to_thread(client.close))


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


StoreName = Literal["sqlite", "etcd", "postgresql", "redis"]


def store_url(name: StoreName, home: Path) -> str:
    """A store of a new group's own; skips the test by name where its server can't be had."""
    if name == "etcd":
        return f"etcd://127.0.0.1:{etcd_lab.scenario_server().port}/replica{next(ROOTS)}?log=true"
    if name == "postgresql":
        return postgres_lab.shared_server().new_database()
    if name == "redis":
        return redis_lab.shared().new_database()
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
    gated: bool = False,
) -> AsyncIterator[ReplicaGroup]:
    """A group whose servers run; all is gone at the end. `more`: settings of all servers.

    `between`: the servers reach each other through proxies. `started`: how many of them run.
    `network`: another one than this machine's own, with a store of its own. `gated`: agents can be
    held at one step of a change of primary.
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
    if gated:
        group.put_gates()
    await group.begin()
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
