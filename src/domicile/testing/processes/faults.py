"""What a test can do to a cluster of real processes: the faults among the verbs of `Processes`.

Base of `Processes`, which owns everything that a fault breaks. Each verb must note what it did, so
that checkers know when the cluster was disturbed. It returns once it is done.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import apsw
from msgspec.structs import replace

from domicile.core.ids import Incarnation
from domicile.testing.actions import Verbs
from domicile.testing.history import Event
from domicile.testing.processes.environment import Surroundings
from domicile.testing.processes.fault_proxy import CLIENT, OPEN, STORE, Rule, Way
from domicile.testing.processes.member_signals import pause, resume
from domicile.testing.processes.node_process import HarnessError, NodeProcess
from domicile.testing.processes.switches import Levers

REAP_S = 10.0
FILLER = "filler"
PIECE_BYTES = 65_536
TRUNCATE_MS = 2_000

Side = int | Sequence[int]


class RealFaults(Verbs):
    """Faults. Nodes are numbered from 0; -1 is the test's own client, -2 the server of a store that
    has a host of its own, if that makes sense."""

    nodes: list[NodeProcess]
    _events: list[Event]
    _stood: list[tuple[float, float]]
    _now: Callable[[], float]
    _surroundings: Surroundings | None
    _levers: Levers | None
    _stalling: apsw.Connection | None

    # processes

    def crash(self, node: int) -> None:
        """SIGKILL: nothing of the process ever runs again."""
        self._kill(self._up(node))

    def kill(self, node: int) -> None:
        """The same as `crash`."""
        self.crash(node)

    def freeze(self, node: int) -> None:
        """SIGSTOP: all threads of the process stop while its lease runs out.

        Never in the middle of a write to the store: that would stop every node (S9).
        """
        process = self._up(node)
        at = self._now()
        if not pause(process.process, self._database):
            raise HarnessError(f"node {node} does not stop")
        process.frozen = True
        self.note_fault("freeze", process, at)

    def thaw(self, node: int) -> None:
        """SIGCONT."""
        process = self._up(node)
        self.note_fault("thaw", process)
        process.frozen = False
        resume(process.process)

    # the network

    def partition(self, *sides: Side, one_way: bool = False) -> None:
        """Processes of different sides cannot reach each other; all reach the store, unless it is
        on a side (-2).

        Packets are lost silently, also those of open connections. With `one_way` there are two
        sides, and nothing passes from the first to the second.
        """
        groups = [[side] if isinstance(side, int) else list(side) for side in sides]
        if len(groups) < 2 or (one_way and len(groups) != 2):
            raise HarnessError("a partition has two sides or more, in one direction exactly two")
        self._check_ends([index for group in groups for index in group])
        ways = [
            (one, other)
            for n, group in enumerate(groups)
            for m, others in enumerate(groups)
            for one in group
            for other in others
            if n != m and (n < m or not one_way)
        ]
        fault = "block" if one_way else "partition"
        self._change(fault, ways, lambda rule: replace(rule, cut=True))

    def block(self, one: int, other: int) -> None:
        """Nothing passes from one process to another; the other direction works."""
        self.partition(one, other, one_way=True)

    def delay(
        self, node: int, delay_s: float, *, jitter_s: float = 0.0, to: int | None = None
    ) -> None:
        """Delay what a node sends and gets; with `to` only what these two exchange."""
        self._change(
            "delay",
            self._ways(node, to),
            lambda rule: replace(rule, delay_s=delay_s, jitter_s=jitter_s),
        )

    def loss(self, node: int, share: float, *, to: int | None = None) -> None:
        """A share of the pieces that a node sends and gets meets a loss; `to` as for `delay`.

        A stream has no holes, so a loss shows as TCP shows it: bytes stall for up to 1.5 s, the
        connection is cut, or new ones are refused or hang for up to 2 s, at random by the seed.
        """
        if not 0 <= share <= 1:
            raise HarnessError(f"share={share} must be from 0 to 1")
        self._change("loss", self._ways(node, to), lambda rule: replace(rule, loss=share))

    def cut(self, one: int, other: int) -> int:
        """Break the connections between two processes, which may reconnect; returns how many
        broke."""
        self.note_fault("cut", self._slot(max(one, other)))
        return self._net().break_off(one, other)

    def cut_store(self, node: int) -> None:
        """Cut a node off the store until `heal`: every store call of it fails, but it reaches its
        peers."""
        self._embedded("cut_store")
        process = self._up(node)
        self.note_fault("outage", process)
        self._pulled().cut(node, True)

    def lag(self, node: int, lag_s: float) -> None:
        """Delay a node's view of what others stored by `lag_s`, up to 2.5 s, until `heal`."""
        self._embedded("lag")
        process = self._up(node)
        self.note_fault("lag", process)
        self._pulled().lag(node, lag_s)

    def heal(self) -> None:
        """End every partition, delay and loss, and every cut from the store and lag behind it."""
        for process in self.nodes:
            self._pulled().cut(process.index, False)
            self._pulled().lag(process.index, 0.0)
        if self._surroundings is not None:
            self._surroundings.heal()
        self.note_fault("heal")

    # the machine

    def clock_step(self, by_s: float) -> None:
        """Step the wall clock of all nodes, as an operator or NTP would.

        The embedded store counts from the machine's boot, which no step moves (S4), so leases must
        not notice. The step changes what a real one changes in these processes: `time.time()`, log
        lines, an entity's `now()`, the age of lock files. The machine itself keeps its time.
        """
        self._pulled().step_wall(by_s)
        self._events.append(Event(self._now(), "stepped", {"node": None, "by": by_s}))

    def fill_disk(self) -> None:
        """Leave no room for the store: its writes fail until `free_disk`.

        With `disk_bytes`, as root, its disk is really full. Otherwise the nodes get SQLite's answer
        "full" by simulation, and the test's own client does not.
        """
        database = self._embedded("fill_disk")
        self.note_fault("full")
        disk = self._disk
        if disk is None:
            self._pulled().fill(True)
            return
        # SQLite could go on using the disk space that its log already has.
        connection = apsw.Connection(str(database))
        try:
            connection.set_busy_timeout(TRUNCATE_MS)
            with contextlib.suppress(apsw.Error):
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # pyright: ignore[reportUnknownMemberType]
            _fill(disk / FILLER)
        finally:
            connection.close(force=True)

    def free_disk(self) -> None:
        """End `fill_disk`."""
        disk = self._disk
        if disk is None:
            self._pulled().fill(False)
        else:
            (disk / FILLER).unlink(missing_ok=True)
        self.note_fault("free")

    def stall_store(self) -> None:
        """Hold the store's only write lock: every write waits, until `unstall_store`."""
        if self._stalling is not None:
            raise HarnessError("the store is stalled already")
        connection = apsw.Connection(str(self._embedded("stall_store")))
        self.note_fault("stall")
        try:
            connection.set_busy_timeout(TRUNCATE_MS)
            connection.execute("BEGIN IMMEDIATE")  # pyright: ignore[reportUnknownMemberType]
        except apsw.Error as error:
            connection.close(force=True)
            self.note_fault("flow")
            raise HarnessError(f"the store could not be stalled: {error}") from error
        self._stalling = connection

    def unstall_store(self) -> None:
        """End `stall_store`; does nothing if the store is not stalled."""
        connection, self._stalling = self._stalling, None
        if connection is not None:
            connection.execute("ROLLBACK")  # pyright: ignore[reportUnknownMemberType]
            connection.close(force=True)
            self.note_fault("flow")

    @property
    def disk_is_real(self) -> bool:
        """Whether `fill_disk` fills a real disk."""
        return self._disk is not None

    # operations

    async def restart(self, node: int, *, version: str | None = None) -> None:
        """Let a node leave in an orderly way (H14), and start another process in its place."""
        await self.stop(node)
        if version is not None:
            self._slot(node).version = version
        self.start(node)

    async def roll(self, version: str | None = None, *, timeout_s: float = 60.0) -> None:
        """A rolling update: every node in turn leaves and comes back with the next version.

        The next node leaves once the one before it has joined and every shard has a home. Places
        whose process is gone are skipped.
        """
        version = next_version(self.nodes) if version is None else version
        for process in self.nodes:
            if process.manager or not process.up or process.frozen:
                continue
            node, before = process.index, self.incarnation(process.index)
            await self.restart(node, version=version)

            def joined(node: int = node, before: Incarnation | None = before) -> bool:
                return self.incarnation(node) not in (None, before) and self.settled()

            await self.wait_until(joined, timeout_s=timeout_s)

    def note_fault(
        self,
        fault: str,
        process: NodeProcess | None = None,
        at: float | None = None,
        until: float | None = None,
    ) -> None:
        """Tell the checkers of a fault; `until` if it has ended."""
        fields: dict[str, Any] = {
            "fault": fault,
            "node": None if process is None else process.index,
            "inc": None if process is None else self._known_incarnation(process),
        }
        if until is not None:
            fields["until"] = until
        self._events.append(Event(self._now() if at is None else at, "fault", fields))

    def note_standstill(self, since: float, until: float) -> None:
        """Tell when the store's server did nothing at all: it was stopped, or did not run."""
        self._stood.append((since, until))

    # inside

    def _change(self, fault: str, ways: Sequence[Way], change: Callable[[Rule], Rule]) -> None:
        net = self._net()
        # Effects may show before all paths are changed, so the fault is noted first.
        self.note_fault(fault)
        for index in dict.fromkeys(end for way in ways if STORE in way for end in way if end >= 0):
            self.note_fault("outage", self._slot(index))
        net.set({way: change(net.rules.get(way, OPEN)) for way in ways})

    def _ways(self, node: int, to: int | None) -> list[Way]:
        ends = self._net().everyone() if to is None else (to,)
        self._check_ends([node, *ends])
        pairs = [(node, other) for other in ends if other != node]
        return [*pairs, *((other, one) for one, other in pairs)]

    def _check_ends(self, ends: Sequence[int]) -> None:
        for index in ends:
            if index == STORE and self._net().store is None:
                raise HarnessError(
                    "the store has no host of its own: give store= a function that starts its "
                    "server in one"
                )
            if index not in (CLIENT, STORE):
                self._slot(index)

    def _net(self) -> Surroundings:
        if self._surroundings is None or not self._surroundings.kind:
            raise HarnessError('this cluster has no network of its own: say network="auto"')
        return self._surroundings

    def _pulled(self) -> Levers:
        if self._levers is None:
            raise HarnessError("the cluster is not running: enter it with `async with` first")
        return self._levers

    @property
    def _disk(self) -> Path | None:
        return None if self._surroundings is None else self._surroundings.disk

    def _kill(self, process: NodeProcess) -> None:
        assert process.process is not None
        # Effects may show before the process is reaped, so the fault has the time of the signal.
        at = self._now()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.process.pid, signal.SIGKILL)
        process.process.wait(REAP_S)
        self.note_fault("crash", process, at)

    @abstractmethod
    def start(self, node: int) -> None:
        """Start a process in a place whose process is gone."""

    @abstractmethod
    async def stop(self, node: int) -> None:
        """Let a node leave."""

    @abstractmethod
    async def wait_until(self, condition: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
        """Check again and again until a condition holds."""

    @abstractmethod
    def settled(self) -> bool:
        """Whether every shard has an open home."""

    @abstractmethod
    def incarnation(self, node: int) -> Incarnation | None:
        """The incarnation under which a node is registered."""

    def _embedded(self, verb: str) -> Path:
        """The SQLite file of the store; raises `HarnessError` if the store is not in one."""
        path = self._database
        if path is None:
            raise HarnessError(
                f"{verb} needs a store in a SQLite file: leave out store=, or do it to the store's "
                "own server"
            )
        return path

    @property
    @abstractmethod
    def _database(self) -> Path | None: ...

    @abstractmethod
    def _slot(self, index: int) -> NodeProcess: ...

    @abstractmethod
    def _up(self, index: int) -> NodeProcess: ...

    @abstractmethod
    def _known_incarnation(self, process: NodeProcess) -> Incarnation | None: ...


def _fill(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = PIECE_BYTES
        while size:
            try:
                os.write(file, bytes(size))
            except OSError:
                size //= 2
    finally:
        os.close(file)


def next_version(nodes: Sequence[NodeProcess]) -> str:
    """A version that is newer than every version of whole numbers or of PEP 440."""
    numbers = [re.match(r"[0-9]+", node.version) for node in nodes]
    return str(max((int(number[0]) for number in numbers if number), default=1) + 1)
