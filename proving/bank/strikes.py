"""The faults of the bank: nodes are killed and frozen, shards move, the journal's server dies.

Run by `proving.bank.round`. Each strike mends what it broke. Strikes at nodes come one after the
other; those at the journal and the moves go on beside them. What is struck is drawn from the seed;
when exactly it hits is up to the machine.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

from domicile import DomicileError
from domicile.core.ids import NOBODY, Incarnation
from domicile.testing import Processes
from domicile.testing.processes.member_signals import standing_still
from domicile.testing.processes.node_process import HarnessError, NodeProcess
from proving.bank.account import Account
from proving.bank.probe import figures_of
from proving.postgres_server import PostgresServer

LOOK_S = 0.002
TRIES = 60
"""How often a process is stopped, to be in the middle of a write, before the strike goes on as it
is."""

LATE_TRIES = 200
SEVERAL = 2
"""Batches of a node on their way, of which not all can have their rows yet."""

JOIN_S = 30.0
LAST_S = 1.5
"""How long a freeze goes on after the lease, at most."""

_WRITER = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 120, 1, 0)
"""Asks for the holder of the byte that SQLite locks in the -shm file for its only writer."""


def write_lock_holder(journal: Path) -> int | None:
    """The process that writes to a SQLite file now.

    A process that has the file open by SQLite must not call this: it would lose its own locks.
    """
    try:
        with Path(f"{journal}-shm").open("r+b") as file:
            kind, _, _, _, pid = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, _WRITER))
    except OSError:
        return None
    return None if kind == fcntl.F_UNLCK else int(pid)


_HOLD = """
import apsw, sys
connection = apsw.Connection(sys.argv[1])
connection.set_busy_timeout(10_000)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.readline()
connection.execute("ROLLBACK")
"""
"""A process that holds the lock of a SQLite file until its stdin ends."""


class Strikes:
    """All faults of one round. `journal` is the SQLite file, `server` the PostgreSQL server."""

    def __init__(
        self,
        cluster: Processes,
        accounts: Sequence[str],
        counts: Counter[str],
        random: Random,
        *,
        journal: Path | None,
        server: PostgresServer | None,
        look: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._cluster, self._accounts, self._counts = cluster, accounts, counts
        self._random, self._journal, self._server = random, journal, server
        self._look = look
        """Has somebody look at every account."""
        self._calm = asyncio.Event()
        self._at_the_server = asyncio.Lock()
        """Held by a strike that needs the sessions of the server, or ends them."""
        self._drained: int | None = None

    def end(self) -> None:
        """No new strikes."""
        self._calm.set()

    # lanes

    async def strike_nodes(self) -> None:
        """All kinds in turn, shuffled anew each time; the rarest moments come first."""
        kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "freeze in a write": self._freeze_in_a_write,
            "kill in a commit": self._kill_in_a_commit,
            "kill in a stall": self._kill_in_a_stall,
            "late batch": self._late_batch,
            "kill": self._kill,
            "freeze": self._freeze,
            "restart": self._restart,
            "drain": self._drain,
        }
        first = True
        while not self._calm.is_set():
            deck = self._random.sample(list(kinds), len(kinds))
            if first:
                deck.sort(key=list(kinds).index)
                first = False
            for kind in deck:
                if self._calm.is_set():
                    return
                await self._tend()
                with suppress(HarnessError):  # a process that ended meanwhile can't be struck
                    await kinds[kind]()
                await self._while(self._random.uniform(0.1, 1.0))

    async def strike_journal(self) -> None:
        """The server is killed, and is frozen for longer than nodes wait for an answer."""
        server = self._server
        if server is None:
            return
        while not self._calm.is_set():
            await self._while(self._random.uniform(3.0, 7.0))
            async with self._at_the_server:
                if self._calm.is_set():
                    return
                if self._random.random() < 0.5:
                    await asyncio.to_thread(server.kill)
                    self._counts["journal kills"] += 1
                    await self._while(self._random.uniform(0.0, 1.0))
                    await asyncio.to_thread(server.start)
                else:
                    await asyncio.to_thread(server.freeze)
                    self._counts["journal freezes"] += 1
                    await self._while(self._random.uniform(0.2, 3.0))
                    await asyncio.to_thread(server.thaw)

    async def move_shards(self) -> None:
        """Wishes for homes of the accounts' shards, all the time."""
        cluster = self._cluster
        while not self._calm.is_set():
            shard = cluster.shard(Account, self._random.choice(self._accounts))
            before = cluster.entry(shard)
            with suppress(DomicileError):
                await cluster.wish(shard, self._random.randrange(len(cluster.nodes)))
            await self._while(self._random.uniform(0.1, 0.6))
            after = cluster.entry(shard)
            self._counts["moves"] += after.owner != before.owner and after.epoch > before.epoch

    async def mend(self) -> None:
        """Everything runs again: what a strike that was broken off has left."""
        self.end()
        if self._server is not None:
            await asyncio.to_thread(self._server.thaw)
            if not self._server.up:
                await asyncio.to_thread(self._server.start)
        if self._drained is not None:
            await self._cluster.undrain(self._drained)
        for node in self._cluster.nodes:
            if node.up and node.frozen:
                self._cluster.thaw(node.index)
        await self._tend()

    # strikes at nodes

    async def _kill(self) -> None:
        node = self._victim()
        self._end_process(node)
        await self._while(self._random.uniform(0.0, 1.0))
        self._start(node)

    async def _kill_in_a_commit(self) -> None:
        node = self._victim()
        await self._stop_when(node, self._writes)
        self._end_process(node)
        await self._while(self._random.uniform(0.0, 0.5))
        self._start(node)

    async def _kill_in_a_stall(self) -> None:
        """While its commits wait, and everybody looks at what they may not see yet (J5)."""
        node = self._victim()
        looking: asyncio.Task[None] | None = None
        async with self._stalled(node):
            await self._while(self._random.uniform(0.02, 0.15))
            looking = asyncio.create_task(self._look())
            await self._while(self._random.uniform(0.1, 0.3))
            if node.up:
                self._end_process(node)
                self._counts["kills in a stall"] += 1
        self._start(node)
        await looking

    @asynccontextmanager
    async def _stalled(self, node: NodeProcess) -> AsyncGenerator[None]:
        """Nothing that a node sends to its journal is committed; what was sent may get lost."""
        server = self._server
        if server is None:
            holder = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _HOLD, str(self._journal),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            assert holder.stdin is not None
            assert holder.stdout is not None
            await holder.stdout.readline()
            try:
                yield
            finally:
                holder.stdin.close()
                await holder.wait()
            return
        assert node.process is not None
        sessions = await asyncio.to_thread(server.sessions_of, node.process.pid)
        for session in sessions:
            _signal(session, signal.SIGSTOP)
        try:
            yield
        finally:
            # They end before they read on, as sessions of a client that is gone do in the end.
            for session in sessions:
                _signal(session, signal.SIGTERM)
                _signal(session, signal.SIGCONT)

    def _end_process(self, node: NodeProcess) -> None:
        # Stopped first, so that what is seen of it is what it is killed with.
        self._stop(node)
        self._counts["kills"] += 1
        self._counts["kills in a commit"] += self._writes(node)
        self._cluster.kill(node.index)

    async def _freeze(self) -> None:
        """With a batch on its way that holds no lock: it goes on when the lease is over."""
        node = self._victim()
        await self._stop_when(node, lambda one: self._writes(one) and not self._holds(one))
        self._counts["freezes"] += 1
        await self._past_the_lease()
        self._thaw(node)

    async def _freeze_in_a_write(self) -> None:
        """Inside a SQLite write, so that others must end it (J3); else with a batch on its way."""
        node = self._victim()
        inside = self._holds if self._journal is not None else self._writes
        self._counts["freezes in a write"] += await self._stop_when(node, inside)
        self._counts["freezes"] += 1
        await self._past_the_lease()
        if not node.up:
            self._counts["ended by others (J3)"] += 1
        self._thaw(node)

    async def _late_batch(self) -> None:
        """A batch that its session takes up only when another node has claimed the shard (J2)."""
        server = self._server
        if server is None:
            await self._freeze()
            return
        async with self._at_the_server:
            await self._late_batch_at(server)

    async def _late_batch_at(self, server: PostgresServer) -> None:
        node = self._victim()
        assert node.process is not None
        owner = self._cluster.incarnation(node.index)
        sessions = await asyncio.to_thread(server.sessions_of, node.process.pid)
        for session in sessions:
            _signal(session, signal.SIGSTOP)
        try:
            # The first may have its rows already: then a claim waits for it, as it must.
            for _ in range(LATE_TRIES):
                if self._in_flight(node) >= SEVERAL or not node.up:
                    break
                await asyncio.sleep(LOOK_S)
            self._stop(node)
            self._counts["freezes"] += 1
            self._counts["late batches"] += bool(sessions) and self._in_flight(node) >= SEVERAL
            await self._past_the_lease()
            with suppress(AssertionError):
                await self._cluster.wait_until(lambda: self._is_replaced(owner), timeout_s=JOIN_S)
            # The new homes claim with the first message, and there are messages all the time.
            await self._while(self._random.uniform(0.3, LAST_S))
        finally:
            for session in sessions:
                _signal(session, signal.SIGCONT)
        # The answers are there when the node wakes up.
        await self._while(self._random.uniform(0.2, 0.6))
        self._thaw(node)

    async def _restart(self) -> None:
        node = self._victim()
        await self._cluster.stop(node.index)
        self._counts["restarts"] += 1
        self._start(node)

    async def _drain(self) -> None:
        node = self._victim()
        self._drained = node.index
        with suppress(DomicileError):
            await self._cluster.drain(node.index)
            self._counts["drains"] += 1
            await self._while(self._random.uniform(0.5, 2.0))
            await self._cluster.undrain(node.index)
            self._drained = None

    # inside

    def _victim(self) -> NodeProcess:
        up = [node for node in self._cluster.nodes if node.up and not node.frozen]
        if len(up) < 2:
            raise HarnessError("too few nodes run")
        return self._random.choice(up)

    def _is_replaced(self, owner: Incarnation | None) -> bool:
        """Whether no account has its home there any more."""
        shards = {self._cluster.shard(Account, account) for account in self._accounts}
        return self._calm.is_set() or all(
            self._cluster.entry(shard).owner not in (owner, NOBODY) for shard in shards
        )

    def _in_flight(self, node: NodeProcess) -> int:
        """How many batches of a node are on their way to the journal."""
        if node.process is None:
            return 0
        return figures_of(self._cluster.directory, node.process.pid)["in flight"]

    def _writes(self, node: NodeProcess) -> bool:
        return self._in_flight(node) > 0

    def _holds(self, node: NodeProcess) -> bool:
        """Whether a node holds the lock of the SQLite journal."""
        if self._journal is None or node.process is None:
            return False
        return write_lock_holder(self._journal) == node.process.pid

    def _stop(self, node: NodeProcess) -> None:
        if node.up and not node.frozen:
            self._cluster.freeze(node.index)

    async def _stop_when(self, node: NodeProcess, moment: Callable[[NodeProcess], bool]) -> bool:
        """Stop a node again and again until the moment is right; in the end in any."""
        for number in range(TRIES):
            self._stop(node)
            process = node.process
            if process is None or moment(node) or self._calm.is_set():
                return process is not None and standing_still(process.pid) and moment(node)
            if number < TRIES - 1:
                self._thaw(node)
                await asyncio.sleep(LOOK_S * (1 + self._random.random()))
        return False

    def _thaw(self, node: NodeProcess) -> None:
        if node.up and node.frozen:
            self._cluster.thaw(node.index)

    def _start(self, node: NodeProcess) -> None:
        if not node.up:
            self._counts["processes started again"] += 1
            self._cluster.start(node.index)

    async def _past_the_lease(self) -> None:
        await self._while(self._cluster.settings.ttl_s + self._random.uniform(0.3, LAST_S))

    async def _tend(self) -> None:
        """Every place has a process that the store knows, or one that is about to join."""
        for node in self._cluster.nodes:
            self._start(node)
        with suppress(AssertionError):
            await self._cluster.wait_until(self._joined, timeout_s=JOIN_S)

    def _joined(self) -> bool:
        nodes = self._cluster.nodes
        return all(not node.up or self._cluster.incarnation(node.index) for node in nodes)

    async def _while(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._calm.wait()


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
