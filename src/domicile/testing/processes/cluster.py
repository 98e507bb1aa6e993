"""A cluster of real node processes on one store, as a test sees it.

The verbs are those of the simulator, `domicile.testing.sim.cluster`, but time is real; the faults
among them are in `domicile.testing.processes.faults`. Every process records what it does; `history`
merges the records for the checkers. Nothing of a cluster may outlive the test process, even if that
is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal, Self

import apsw
import msgspec

from domicile.backends.registry import shown_url, store_backend
from domicile.backends.sqlite import sqlite_url
from domicile.backends.wiring import open_backends, open_whole_store
from domicile.config import token_of
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.state.shardmap import Entry
from domicile.entity.model.entity import Entity, catalogue, entity_type
from domicile.entity.model.ref import Outbound
from domicile.errors import ConfigError, StoreError
from domicile.incarnation.context import Identity
from domicile.incarnation.supervisor import Supervisor
from domicile.membership.clock import SystemClock
from domicile.ports.store import Store, writes_one_key
from domicile.settings import Settings
from domicile.stores.commit_log import QueuedCommit
from domicile.stores.namespace import Namespace
from domicile.testing.actions import LENIENT
from domicile.testing.checkers.reading import STARVED
from domicile.testing.history import Event, History
from domicile.testing.processes.environment import Network, StoreHost, Surroundings
from domicile.testing.processes.faults import REAP_S, RealFaults
from domicile.testing.processes.history import merge
from domicile.testing.processes.member_process import (
    ImportPath,
    MemberPlan,
    Place,
    import_path,
    loop_factory,
)
from domicile.testing.processes.node_process import HarnessError, NodeProcess
from domicile.testing.processes.pulse import feel
from domicile.testing.processes.recorder import FileRecorder, RecordReader
from domicile.testing.processes.store_view import StoreView
from domicile.testing.processes.switches import Levers

CLUSTER = "domicile"
POLL_S = 0.01
START_S = 120.0
EXIT_S = 3.0
"""Seconds for processes to leave when the whole cluster ends; then they are killed."""

STORE = "store.db"
_RUN = "from domicile.testing.processes.member_process import main; main()"


class Processes(RealFaults):
    """The cluster as a test sees it. Nodes are numbered from 0.

    `entities` must be importable by other processes. `candidates` are the nodes that may
    coordinate: all of them, or none if there are `managers`, which are numbered after the nodes and
    take the same verbs. Without a `directory` everything is in a temporary one, which is removed
    unless the body of `async with` raises. `record=False` writes no history: then `settled` relies
    on the store alone, and `history` has only the store's commits and the faults.

    `network` puts every node behind a fault proxy, so that the network can be disturbed: in a
    network namespace each (`namespaces`, needs root), at loopback addresses of their own
    (`loopback`), or whichever is possible (`auto`). `disk_bytes` puts the store on a disk of that
    size, if there are namespaces. Random losses are drawn from `seed`. `journal` is that of the
    nodes.

    `store` is the URL of a store that is empty and that other processes can reach; without it the
    cluster has an embedded one of its own. `history` needs a store with a log of its commits, or
    `commits`, which returns those that are new since its last call. A store that is no SQLite file
    can't be stalled, cut off, slowed down or filled from here. With `store_at` each node has a URL
    of its own, so that a test can put a proxy in its way to `store`. As root, `store` may be a
    function: it starts a server in the host that it is given, a network namespace, and returns the
    URL; `partition` and its kin then know that host as -2. As root, nodes may see the file `hosts`
    as their /etc/hosts; write to it, but do not replace it.

    The history also says when the machine did not let the test's process run, so that the checkers
    blame nobody for leases that were lost by that; not with `feels_starving=False`.
    """

    def __init__(
        self,
        entities: Sequence[type[Entity]],
        *,
        nodes: int = 3,
        settings: Settings | None = None,
        loop: Literal["asyncio", "uvloop"] = "asyncio",
        candidates: Sequence[int] | None = None,
        managers: int = 0,
        directory: Path | None = None,
        record: bool = True,
        network: Network | None = None,
        disk_bytes: int = 0,
        journal: str | None = None,
        seed: int = 0,
        store: str | Callable[[StoreHost], str] | None = None,
        store_at: Callable[[int], str] | None = None,
        commits: Callable[[], Sequence[QueuedCommit]] | None = None,
        hosts: Path | None = None,
        feels_starving: bool = True,
    ) -> None:
        if nodes < 1:
            raise ConfigError(f"nodes={nodes} must be at least 1")
        if managers < 0:
            raise ConfigError(f"managers={managers} must not be negative")
        if isinstance(store, str):
            _check_given(store, disk_bytes)
        elif store is not None and network not in ("auto", "namespaces"):
            raise ConfigError(
                'a store in a host of its own needs network namespaces: say network="auto"'
            )
        catalogue(entities)
        loop_factory(loop)
        self._entities = list(entities)
        self._imports = [import_path(kind) for kind in entities]
        self.settings = LENIENT if settings is None else settings
        self.nodes = [
            NodeProcess(index, index in candidates if candidates is not None else not managers)
            for index in range(nodes)
        ]
        self.nodes += [NodeProcess(nodes + n, True, manager=True) for n in range(managers)]
        self._loop_name = loop
        self._given = directory
        self._given_store = store if isinstance(store, str) else None
        self._starts_store = None if isinstance(store, str) else store
        self._store_at, self._hosts, self._reads_commits = store_at, hosts, commits
        self._record = record
        self._directory: Path | None = None
        self._network: Network | None = network
        self._disk_bytes, self._seed = disk_bytes, seed
        self._journal = journal
        self._surroundings: Surroundings | None = None
        self._levers: Levers | None = None
        self._stalling: apsw.Connection | None = None
        self._now = SystemClock().now
        self._lives = Supervisor()
        self._feels_starving = feels_starving
        self._feeling: asyncio.Task[None] | None = None
        self._client_recorder: FileRecorder | None = None
        self._operator: Store | None = None
        self._view: StoreView | None = None
        self._readers: dict[Path, RecordReader] = {}
        self._events: list[Event] = []
        self._stood: list[tuple[float, float]] = []
        self._phases: dict[tuple[Incarnation, str, int], tuple[str, int]] = {}
        self._commits: dict[int, QueuedCommit] = {}
        self._keeps_log = True
        self._ended = False

    @property
    def directory(self) -> Path:
        """The directory of store, logs and records. Further `*.events` files join the history."""
        if self._directory is None:
            raise HarnessError("the cluster is not started: enter it with `async with` first")
        return self._directory

    @property
    def store(self) -> str:
        """The URL of the store, for further nodes and clients."""
        return self._given_store or sqlite_url((self._disk or self.directory) / STORE)

    # start and end

    async def __aenter__(self) -> Self:
        """Start every node and the test's own client; returns once all shards are served."""
        if self._directory is not None:
            raise HarnessError("this cluster was started already; make another one")
        if self._given is None:
            self._directory = Path(tempfile.mkdtemp(prefix="domicile-"))
        else:
            self._directory = self._given.absolute()
            self._directory.mkdir(parents=True, exist_ok=True)
        try:
            await self._surround()
            for node in self.nodes:
                self._launch(node)
            self._operator = Namespace(open_whole_store(self.store, by="operator").store, CLUSTER)
            self._view = StoreView(self._operator, self._now)
            await self._view.start()
            if self._record:
                self._client_recorder = FileRecorder(self.directory / "client.events")
            wired = open_backends(
                self.store, cluster=CLUSTER, settings=self.settings, meter=self._client_recorder
            )
            if self._feels_starving:
                self._feeling = asyncio.create_task(
                    feel(self._now, time.process_time, self._starved), name="domicile-pulse"
                )
            plan = Identity(CLUSTER, "", {}, {}, self.settings, False, token=token_of(None))
            await self._lives.start(wired, plan)
            await self.wait_until(self._stands, timeout_s=START_S)
        except BaseException as error:
            await self._end(error)
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        """End all processes: by SIGTERM, and by SIGKILL those that do not leave in time."""
        await self._end(next((one for one in exc if isinstance(one, BaseException)), None))

    def settled(self) -> bool:
        """Whether every shard of every role is served by a live process that has opened it."""
        self._collect()
        for role in {entity_type(kind).role: None for kind in self._entities}:
            for number in range(self.settings.shards):
                entry = self.entry(ShardKey(role, number))
                home = self._process_of(entry.owner)
                if entry.state != "serving" or home is None or not home.up:
                    return False
                phase = self._phases.get((entry.owner, role, number))
                if self._record and phase != ("open", entry.epoch):
                    return False
        return True

    # operations

    def start(self, node: int) -> None:
        """Start a process in a place whose process is gone; it is another incarnation."""
        process = self._slot(node)
        if process.up:
            raise HarnessError(f"node {node} is running: crash or stop it first")
        self._launch(process)

    async def stop(self, node: int) -> None:
        """SIGTERM: the node leaves in an orderly way (H14); returns once its process is gone."""
        process = self._up(node)
        assert process.process is not None
        if process.frozen:
            raise HarnessError(f"node {node} is frozen and can't leave: thaw it first")
        process.process.send_signal(signal.SIGTERM)
        settings = self.settings
        limit_s = settings.drain_deadline_s + settings.linger_s + 3 * settings.op_timeout_s + REAP_S
        await self.wait_until(lambda: not process.up, timeout_s=limit_s)
        code = process.process.returncode
        if code:
            raise HarnessError(
                f"node {node} ended with exit code {code} when asked to leave; its log ends:\n"
                f"{process.log_tail()}"
            )

    async def wait_until(self, condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
        """Check again and again until a condition holds."""
        deadline = self._now() + timeout_s
        while not condition():
            if self._now() >= deadline:
                raise AssertionError(
                    f"the condition did not hold within {timeout_s:g} s; {self._situation()}"
                )
            await asyncio.sleep(POLL_S)

    # questions

    def entry(self, shard: ShardKey) -> Entry:
        """The stored entry of a shard; like all answers here it may be a moment old."""
        return self._looked().members.map.get(shard)

    def owner(self, kind: type[Entity], id: str) -> int:
        """The node that the store names as home of an entity."""
        shard = self.shard(kind, id)
        process = self._process_of(self.entry(shard).owner)
        if process is None or not process.up:
            raise HarnessError(f"shard {shard.role}/{shard.shard} has no owner that is running")
        return process.index

    def leader(self) -> int | None:
        """The node that the store names as coordinator, if its process is alive."""
        record = self._looked().members.leader
        process = None if record is None else self._process_of(record.incarnation)
        return None if process is None or not process.up else process.index

    def phase(self, node: int, shard: ShardKey) -> str:
        """The last phase that a node recorded for a shard: open, draining, released or closed."""
        incarnation = self._known_incarnation(self._slot(node))
        if incarnation is None:
            return "closed"
        return self._phases.get((incarnation, shard.role, shard.shard), ("closed", 0))[0]

    def status(self, incarnation: Incarnation) -> str | None:
        """The status in an incarnation's record: up, leaving or evicted; None if it is gone."""
        record = self._looked().members.nodes.get(incarnation)
        return None if record is None else record.status

    def incarnation(self, node: int) -> Incarnation | None:
        """The newest incarnation of a node's live process that has a record in the store."""
        process = self._slot(node)
        return self._registered(process) if process.up else None

    def counts(self, node: int) -> Counter[str]:
        """The counters of the newest process in a place; they may be 0.2 s old."""
        self._collect()
        reader = self._slot(node).reader
        return Counter() if reader is None else Counter(reader.counts)

    def now(self) -> float:
        """The machine's clock, which stamps the events."""
        return self._now()

    def note_quiet(self) -> None:
        """Tell the checkers that no fault is active or will come: from now on liveness is
        judged."""
        self._events.append(Event(self._now(), "quiet", {}))

    @property
    def recorded(self) -> Sequence[Event]:
        """The events that all processes recorded so far, unordered; without the store's commits."""
        self._collect()
        return self._events

    def collect(self) -> None:
        """Read the records, and the commits before the store drops them."""
        self._collect()
        self._collect_commits()

    def history(self) -> History:
        """The events of all processes, the store and the faults up to now, for `check`."""
        # Files are read one after the other, so a commit would be seen without its causes.
        until = math.inf if self._ended else self._now()
        self.collect()
        if not self._keeps_log:
            raise HarnessError(
                f"history needs a store that keeps a log of its commits, which "
                f"{shown_url(self.store)} does not"
            )
        totals: Counter[str] = Counter()
        for reader in self._readers.values():
            totals.update(reader.counts)
        ordered = [self._commits[revision] for revision in sorted(self._commits)]
        if self._reads_commits is None and ordered and ordered[-1].revision > len(ordered):
            raise HarnessError(
                "the store has forgotten some of its commits before they were collected: call "
                "collect() every few thousand moves"
            )
        seen = {} if self._view is None else self._view.seen
        merged = merge(ordered, self._events, totals, CLUSTER, until, seen, self._stood)
        merged.one_key = self._operator is not None and writes_one_key(self._operator)
        return merged

    # inside

    def node_id(self, node: int) -> str:
        """The node id of the node in a place."""
        return self._slot(node).name

    def _outbound(self) -> Outbound:
        return self._lives

    def _operator_store(self) -> Store:
        assert self._operator is not None, "the cluster is not started"
        return self._operator

    @property
    def _database(self) -> Path | None:
        return store_backend(self.store).sqlite_file(self.store)

    async def _surround(self) -> None:
        self._levers = Levers(self.directory / "levers")
        if self._network is None:
            return
        self._surroundings = Surroundings(
            self.directory, len(self.nodes),
            network=self._network, disk_bytes=self._disk_bytes, seed=self._seed,
            store=self._starts_store is not None,
        )  # fmt: skip
        await asyncio.to_thread(self._surroundings.start)
        host = self._surroundings.store
        if self._starts_store is not None and host is not None:
            self._given_store = await asyncio.to_thread(self._starts_store, host)
            _check_given(self._given_store, self._disk_bytes)

    def _looked(self) -> StoreView:
        if self._view is None:
            raise HarnessError("the cluster is not started: enter it with `async with` first")
        return self._view

    def _slot(self, index: int) -> NodeProcess:
        if not 0 <= index < len(self.nodes):
            raise HarnessError(f"no node {index}: they are 0 to {len(self.nodes) - 1}")
        return self.nodes[index]

    def _up(self, index: int) -> NodeProcess:
        process = self._slot(index)
        if not process.up:
            raise HarnessError(f"node {index} is not running; its log ends:\n{process.log_tail()}")
        return process

    def _process_of(self, incarnation: Incarnation) -> NodeProcess | None:
        record = self._looked().members.nodes.get(incarnation)
        if record is not None:
            for process in self.nodes:
                if process.name == record.node and self._registered(process) == incarnation:
                    return process
        return None

    def _registered(self, process: NodeProcess) -> Incarnation | None:
        members = self._looked().members
        mine = [
            incarnation
            for incarnation, record in members.nodes.items()
            if record.node == process.name and incarnation not in process.earlier
        ]
        return max(mine, key=members.created.__getitem__) if mine else None

    def _known_incarnation(self, process: NodeProcess) -> Incarnation | None:
        """The incarnation that a fault concerns, by its own records if there are any."""
        self._collect()
        if self._record or self._view is None:
            return process.incarnation
        return self._registered(process)

    def _stands(self) -> bool:
        registered = [self.incarnation(self._up(node.index).index) for node in self.nodes]
        return None not in registered and self.settled()

    def _situation(self) -> str:
        gone = [process for process in self.nodes if not process.up]
        if not gone:
            return "all processes are running"
        return "\n".join(
            f"{process.name} is not running; its log ends:\n{process.log_tail()}"
            for process in gone
        )

    def _launch(self, process: NodeProcess) -> None:
        process.runs += 1
        process.frozen = False
        process.incarnation = None
        if self._view is not None:
            # The record of a killed process may stay for a while.
            nodes = self._looked().members.nodes
            process.earlier = frozenset(
                incarnation for incarnation, record in nodes.items() if record.node == process.name
            )
        run = f"{process.name}.{process.runs}"
        place = self._surroundings.places[process.index] if self._surroundings else Place("", "")
        records = self.directory / f"{run}.events" if self._record else None
        process.log = self.directory / f"{run}.log"
        process.reader = None if records is None else self._reader(records)
        plan = MemberPlan(
            parent=os.getpid(),
            index=process.index,
            store=self.store if self._store_at is None else self._store_at(process.index),
            cluster=CLUSTER,
            node_id=process.name,
            candidate=process.candidate,
            manager=process.manager,
            entities=self._imports_of(process),
            settings=asdict(self.settings),
            loop=self._loop_name,
            protocols=process.protocols,
            records=None if records is None else str(records),
            sys_path=[entry or str(Path.cwd()) for entry in sys.path],
            place=place,
            version=process.version,
            journal=self._journal,
            levers=str(self.directory / "levers"),
            hosts="" if self._hosts is None else str(self._hosts.absolute()),
        )
        planned = self.directory / f"{run}.json"
        planned.write_bytes(msgspec.json.encode(plan))
        with process.log.open("wb") as log:
            process.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _RUN, str(planned)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(plan.sys_path)},
            )

    def _imports_of(self, process: NodeProcess) -> list[ImportPath]:
        kinds = process.entities
        return self._imports if kinds is None else [import_path(kind) for kind in kinds]

    # what the processes leave behind

    def _reader(self, path: Path) -> RecordReader:
        return self._readers.setdefault(path, RecordReader(path))

    def _collect(self) -> None:
        """Read what was recorded since the last look."""
        if self._ended:
            return
        for path in self.directory.glob("*.events"):
            self._reader(path)
        for reader in self._readers.values():
            for event in reader.more():
                self._events.append(event)
                fields = event.fields
                if event.kind in ("open", "draining", "released", "closed"):
                    home = (fields["inc"], fields["role"], fields["shard"])
                    self._phases[home] = (event.kind, fields["epoch"])
                elif event.kind == "life" and fields["hosts"]:
                    for process in self.nodes:
                        if process.reader is reader:
                            process.incarnation = fields["inc"]

    def _collect_commits(self) -> None:
        if not self._ended:
            after = max(self._commits, default=0)
            read = self._reads_commits
            found = read() if read else store_backend(self.store).commits(self.store, after)
            self._keeps_log = found is not None
            self._commits.update((commit.revision, commit) for commit in found or ())

    # the end

    async def _end(self, error: BaseException | None) -> None:
        """End everything; nothing runs afterwards, whatever happens."""
        self.unstall_store()
        self.note_fault("shutdown")
        try:
            if self._lives.started:
                await self._lives.stop()
            await self._leave()
        finally:
            for process in self.nodes:
                if process.up:
                    self._kill(process)
            await self._feel_no_more()
            await self._let_go()
        self._collect()
        # If the test failed, an error of a broken store must not hide that failure.
        with contextlib.suppress(StoreError) if error else contextlib.nullcontext():
            self._collect_commits()
        self._ended = True
        await asyncio.to_thread(self._abandon, keep=error is not None or self._given is not None)
        if error is not None:
            error.add_note(f"logs, records and the store of the processes are in {self.directory}")
        elif self._given is None:
            await asyncio.to_thread(shutil.rmtree, self.directory)

    def _starved(self, since: float, until: float) -> None:
        self.note_fault(STARVED, at=since, until=until)

    async def _feel_no_more(self) -> None:
        if self._feeling is not None:
            self._feeling.cancel()
            await asyncio.wait([self._feeling])

    def _abandon(self, *, keep: bool) -> None:
        """Leave the cluster's environment; a disk of its own is removed, but its files may stay."""
        disk = self._disk
        if keep and disk is not None:
            for path in disk.glob(f"{STORE}*"):
                if path.is_file():
                    with contextlib.suppress(OSError):
                        shutil.copy(path, self.directory)
        if self._surroundings is not None:
            self._surroundings.close()
            self._surroundings = None
        if self._levers is not None:
            self._levers.close()
            self._levers = None

    async def _let_go(self) -> None:
        if self._view is not None:
            await self._view.close()
        if self._operator is not None:
            await self._operator.close()
        if self._client_recorder is not None:
            self._client_recorder.close()

    async def _leave(self) -> None:
        for process in self.nodes:
            if process.up and process.process is not None and not process.frozen:
                process.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + EXIT_S
        while time.monotonic() < deadline:
            if not any(process.up and not process.frozen for process in self.nodes):
                return
            await asyncio.sleep(POLL_S)


def _check_given(store: str, disk_bytes: int) -> None:
    if store_backend(store).reach == "process":
        raise ConfigError(
            f"store={store!r} lives inside one process: name one that other processes can reach, "
            "or leave it out for an embedded one"
        )
    if disk_bytes:
        raise ConfigError(
            f"disk_bytes={disk_bytes} is for the cluster's own embedded store: leave out store="
        )
