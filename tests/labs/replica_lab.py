"""Groups of real servers under `domicile replica run`, with verbs for faults, and a writer.

The writer is independent of Domicile: it speaks to each server on connections of its own, whatever
the group's state says, and numbers its writes. So it sees who acknowledges what, and when.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
from valkey_lab import program

from domicile.backends.wiring import open_whole_store
from domicile.core.state.txn import At, Put
from domicile.errors import StoreError
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

GROUP = "orders"
TTL_S = 3.0

PATIENCE_S = 120.0
"""The machine may be busy; what is slow but right passes."""

ANSWER_S = 0.4
"""A write that is not answered within this time counts as not acknowledged."""


LAG_S = 5.0
"""The most by which the observer of a busy machine is late."""


@dataclass(frozen=True)
class Acked:
    """A write that a server acknowledged."""

    key: str
    server: str
    sent_at: float
    acked_at: float


@dataclass
class Seen:
    """A state in which somebody serves, as the observer first saw it."""

    epoch: int
    server: str
    at: float


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
    port: int
    home: Path
    run: subprocess.Popen[bytes] | None = None
    stopped: list[int] = field(default_factory=list[int])

    @property
    def state(self) -> Path:
        return self.home / self.name

    @property
    def file(self) -> Path:
        return self.home / f"{self.name}.toml"

    @property
    def log(self) -> str:
        return (self.home / f"{self.name}.log").read_text()

    def pid(self, of: str) -> int:
        """Of its `guard`, `agent` or `server`; 0: it does not live."""
        try:
            if of == "server":
                found = int((self.home / f"data-{self.name}" / "pid").read_text())
            else:
                found = int((self.state / f"{of}.lock").read_text())
        except (FileNotFoundError, ValueError):
            return 0
        return found if lives(found) else 0

    def send(self, of: str, kind: signal.Signals) -> int:
        """A signal to its guard, agent or server; which process got it."""
        found = self.pid(of)
        assert found, f"{self.name} has no {of}: {self.log}"
        os.kill(found, kind)
        return found


class ReplicaGroup:
    """Some machines and their store, until the end of `replica_group`'s block."""

    def __init__(self, home: Path, count: int, store: str, more: str) -> None:
        self.home, self.store, self.more = home, store, more
        self.machines = [Machine(f"orders-{n}", free_port(), home) for n in range(1, count + 1)]
        self.serving: list[Seen] = []
        self.writer = Writer(self)
        self._whole = open_whole_store(store, by="test")
        self._namespace = Namespace(self._whole.store, "domicile")

    def machine(self, name: str) -> Machine:
        return next(one for one in self.machines if one.name == name)

    def others(self, name: str) -> list[Machine]:
        return [one for one in self.machines if one.name != name]

    # processes

    def write_settings(self, machine: Machine, *, store: str | None = None) -> None:
        bin = program()
        assert bin is not None
        data = self.home / f"data-{machine.name}"
        data.mkdir(exist_ok=True)
        # No persistence: a server that was killed comes back empty (FO-16).
        command = [
            str(bin), "--port", str(machine.port), "--bind", "127.0.0.1", "--dir", str(data),
            "--save", "", "--pidfile", str(data / "pid"), "--repl-diskless-sync-delay", "0",
            "--repl-ping-replica-period", "1",
        ]  # fmt: skip
        machine.file.write_text(
            f'store = "{store or self.store}"\n'
            f'group = "{GROUP}"\n'
            f'driver = "valkey"\n'
            f'id = "{machine.name}"\n'
            f'state = "{machine.state}"\n'
            f"ttl_s = {TTL_S}\n{self.more}\n"
            f"[server]\n"
            f'url = "redis://127.0.0.1:{machine.port}"\n'
            f"command = {msgspec.json.encode(command).decode()}\n"
        )

    def start(self, machine: Machine, what: str = "run") -> subprocess.Popen[bytes]:
        """`domicile replica run`, or one of its halves."""
        if not machine.file.exists():
            self.write_settings(machine)
        with (self.home / f"{machine.name}.log").open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "domicile", "replica", what, str(machine.file)],
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
        """SIGSTOP, but not while it holds the write lock of a store that is a file."""
        database = self._whole.backend.sqlite_file(self.store)
        found = [machine.pid(one) for one in of]
        for pid in found:
            machine.stopped.append(pid)
            stopped: Any = _Signalled(pid)
            paused = await asyncio.to_thread(pause, stopped, database)
            assert paused, f"{machine.name} can't be stopped"
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

    async def whole(self, epoch: int = 1) -> GroupState:
        """Wait until an epoch is served, and all others follow with all that the primary has."""
        found: list[GroupState] = []

        async def level() -> bool:
            state = await self.serves(epoch)
            members = {one.server: one for one in await self.members()}
            found[:] = [state]
            return len(members) == len(self.machines) and all(
                one.follows == state.primary_server and one.position.epoch == state.epoch
                for one in members.values()
                if one.server != state.primary_server
            )

        await self.until(level, "all follow the primary")
        return found[0]

    def told(self) -> str:
        return "\n".join(f"--- {one.name}\n{one.log}" for one in self.machines if one.run)

    async def observe(self) -> None:
        """Note when each primary was first seen to be announced."""
        while True:
            with suppress(StoreError):
                state = await self.state()
                if state is not None and state.phase is GroupPhase.SERVING:
                    last = self.serving[-1] if self.serving else None
                    if last is None or (last.epoch, last.server) != (
                        state.epoch, state.primary_server,
                    ):  # fmt: skip
                        self.serving.append(Seen(state.epoch, state.primary_server, monotonic()))
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        for machine in self.machines:
            for pid in machine.stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
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


class Writer:
    """Writes to all servers at once, each on one session for as long as that works."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self.acked: list[Acked] = []
        self.numbers = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for machine in self._group.machines:
                tasks.create_task(self._keep_writing(machine))

    async def _keep_writing(self, machine: Machine) -> None:
        while True:
            with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", machine.port)
                try:
                    while await self._write(machine.name, reader, writer):  # noqa: ASYNC110
                        await asyncio.sleep(0.002)
                finally:
                    writer.close()
            await asyncio.sleep(0.02)

    async def _write(
        self, server: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        self.numbers += 1
        key = f"w{self.numbers:07d}"
        sent_at = monotonic()
        writer.write(b"*3\r\n$3\r\nSET\r\n$8\r\n%s\r\n$1\r\n1\r\n" % key.encode())
        async with asyncio.timeout(ANSWER_S):
            line = await reader.readline()
        if line == b"+OK\r\n":
            self.acked.append(Acked(key, server, sent_at, monotonic()))
        return line[:1] in (b"+", b"-")

    def wrong(self) -> list[str]:
        """Writes that a server acknowledged although another one had been announced before they
        were sent."""
        found: list[str] = []
        for one in self.acked:
            before = [seen for seen in self._group.serving if seen.at < one.sent_at]
            after = [seen for seen in self._group.serving if seen.at >= one.sent_at]
            # Or the write was held back until its server became primary.
            held = after and after[0].server == one.server and after[0].at < one.acked_at + LAG_S
            if before and before[-1].server != one.server and not held:
                found.append(f"{one.key} by {one.server} in epoch {before[-1].epoch}")
        return found

    async def missing(self, machine: Machine) -> set[str]:
        """Acknowledged writes that a server does not have."""
        has = set((await command(machine.port, "KEYS", "w*")).split())
        return {one.key for one in self.acked} - has


async def command(port: int, *words: str) -> str:
    """One command on a connection of its own; its answer without types, one word per line."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        parts = "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
        writer.write(f"*{len(words)}\r\n{parts}".encode())
        async with asyncio.timeout(30.0):
            return await _reply(reader)
    finally:
        writer.close()


async def _reply(reader: asyncio.StreamReader) -> str:
    head = (await reader.readline()).decode().rstrip()
    if head[:1] == "$":
        size = int(head[1:])
        return "" if size < 0 else (await reader.readexactly(size + 2)).decode()[:-2]
    if head[:1] == "*":
        return "\n".join([await _reply(reader) for _ in range(int(head[1:]))])
    return head[1:]


def saved_keys(receipts: list[LossReceipt]) -> set[str]:
    """The writer's keys in what servers saved before they gave it up."""
    found: set[str] = set()
    for one in receipts:
        words = Path(one.saved).read_bytes().split(b"\r\n")
        found |= {word.decode() for word in words if len(word) == 8 and word[:1] == b"w"}
    return found


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


@asynccontextmanager
async def replica_group(
    count: int = 3, *, store: str | None = None, more: str = "", started: bool = True
) -> AsyncIterator[ReplicaGroup]:
    """A group whose servers run; all is gone at the end."""
    home = Path(tempfile.mkdtemp(prefix="domicile-group-"))
    group = ReplicaGroup(home, count, store or f"sqlite:///{home}/store.db", more)
    watching = asyncio.create_task(group.observe())
    try:
        if started:
            for machine in group.machines:
                group.start(machine)
            await group.whole()
        yield group
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        await group.close()
        shutil.rmtree(home)
