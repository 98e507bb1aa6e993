"""A whole cluster in one process and virtual time.

Tests use it. Every node is a simulated process with its own event loop. The store and the journal
are servers behind a network with delays and faults. The test itself is a client of the cluster. The
same seed must give the same history, event for event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Self, TypeVar

from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.placement.strategies import Strategy, forget
from domicile.core.state.keys import block_key
from domicile.core.state.shardmap import BLOCK_SIZE, Entry, decode_block
from domicile.core.state.txn import Condition, Outcome, Unknown, Write
from domicile.entity.model.entity import Entity, entity_type
from domicile.entity.model.ref import Outbound
from domicile.errors import ConfigError, StoreRewound
from domicile.incarnation.context import Backends, Identity
from domicile.incarnation.incarnation import RunningIncarnation
from domicile.incarnation.supervisor import Supervisor
from domicile.node import Node
from domicile.persist.eventsourced import EventSourced
from domicile.persist.forgettable import Vault, vault_key
from domicile.ports.store import Store
from domicile.settings import Settings
from domicile.testing.actions import LENIENT
from domicile.testing.history import History
from domicile.testing.sim.background_faults import Roughness
from domicile.testing.sim.calls import Faults
from domicile.testing.sim.clock import Machine
from domicile.testing.sim.faults import SimFaults
from domicile.testing.sim.health import SimLocks
from domicile.testing.sim.loop import SimLoop, World
from domicile.testing.sim.network import SimNetwork
from domicile.testing.sim.node import SimNode
from domicile.testing.sim.remote import RemoteStore
from domicile.testing.sim.sandbox import SimulationError
from domicile.testing.sim.servers import Servers
from domicile.testing.sim.threads import InlineThreads

S = TypeVar("S")
Ev = TypeVar("Ev")

# Pytest shows the lines of a test, not those that run it; `--full-trace` shows all.
__tracebackhide__ = True

POLL_S = 0.005
START_S = 60.0


class Sim(SimFaults):
    """The cluster as a test sees it. Nodes are numbered from 0.

    `homes` names, for nodes that cannot be home to all entities, those to which they can. With
    `one_key` the store commits one key at a time, as one of Kubernetes does (S8).
    """

    def __init__(
        self,
        seed: int,
        *,
        entities: Sequence[type[Entity]],
        nodes: int = 3,
        settings: Settings | None = None,
        resources: Callable[[], AbstractAsyncContextManager[Mapping[type[Any], Any]]] | None = None,
        candidates: Sequence[int] | None = None,
        managers: int = 0,
        strategy: str | Strategy = "least_shards",
        rough: bool = False,
        locks: bool = False,
        homes: Mapping[int, Sequence[type[Entity]]] | None = None,
        one_key: bool = False,
    ) -> None:
        # What earlier simulations left of plans would make pauses fewer than in a fresh process.
        forget()
        self.seed = seed
        self._strategy = strategy
        self._locks = SimLocks() if locks else None
        self._rough = rough
        self.world = World(seed)
        self.history = History(self.world.clock)
        self.random = self.world.stream("test")
        self.settings = LENIENT if settings is None else settings
        self._entities = list(entities)
        self._resources = resources
        self.history.one_key = one_key
        self.servers = Servers(self.world, self.history, one_key=one_key)
        self.network = SimNetwork(self.world, self.history, self.world.stream("network"))
        self.nodes = [
            SimNode(index, index in candidates if candidates is not None else not managers)
            for index in range(nodes)
        ]
        self.nodes += [SimNode(nodes + number, True, manager=True) for number in range(managers)]
        for index, kinds in (homes or {}).items():
            if not 0 <= index < nodes:
                raise ConfigError(
                    f"homes names node {index}, but there are {nodes}: give those that come later "
                    "their entities by sim.add(entities=[...])"
                )
            self.nodes[index].entities = kinds
        self.loop = self.world.process("client")
        self.machine = Machine()
        """The clocks of the test's own client; change them before the cluster starts."""
        self.store = self.servers.store_faults("client store")
        self._lives = Supervisor()
        self._operator = _Operator(
            self.servers.remote_store(self.loop, "operator", self.servers.store_faults("operator"))
        )

    # start and end

    async def __aenter__(self) -> Self:
        """Start every node and the test's own client; returns once all shards are served.

        Without nodes nothing is waited for: the test adds them.
        """
        self.servers.keep_backups()
        for node in self.nodes:
            self._launch(node)
        await self._lives.start(
            self._backends(
                "client",
                self.loop,
                self.machine,
                self.store,
                self.servers.faults("client journal"),
            ),
            Identity("domicile", "", {}, {}, self.settings, False),
        )
        if self.nodes:
            await self.wait_until(self.settled, timeout_s=START_S)
        if self._rough:
            Roughness(self, self.world).begin()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """A simulated cluster ends without handing over."""

    def close(self) -> None:
        """End the simulated world; nothing of it runs afterwards."""
        self.history.closed = True
        self.world.close()

    def settled(self) -> bool:
        """Whether every shard of every role is served by a live process that has opened it."""
        for role in {entity_type(kind).role: None for kind in self._entities}:
            for number in range(self.settings.shards):
                shard = ShardKey(role, number)
                entry = self.entry(shard)
                home = self._process_of(entry.owner)
                if entry.state != "serving" or home is None or not home.up or home.node is None:
                    return False
                life = home.node.life
                host = None if life is None else life.runtime.hosts.get(shard)
                if host is None or host.owner.epoch != entry.epoch:
                    return False
        return True

    # operations

    def start(
        self,
        node: int,
        *,
        version: str | None = None,
        entities: Sequence[type[Entity]] | None = None,
    ) -> None:
        """Start a process in a slot whose process is gone; it is another incarnation.

        From now on it is home to `entities`, if given.
        """
        process = self._slot(node)
        if process.up:
            raise SimulationError(f"node {node} is running: crash or stop it first")
        if entities is not None:
            process.entities = entities
        if version is not None:
            process.version = version
        self._launch(process)

    def add(
        self,
        *,
        version: str = "",
        capacity: float = 1.0,
        candidate: bool = True,
        entities: Sequence[type[Entity]] | None = None,
    ) -> int:
        """Start one more node; returns its number. It is home to `entities`, if given."""
        process = SimNode(len(self.nodes), candidate)
        process.entities = entities
        process.version, process.capacity = version, capacity
        self.nodes.append(process)
        self._launch(process)
        return process.index

    async def stop(self, node: int) -> None:
        """SIGTERM: the node leaves in an orderly way (H14)."""
        process = self._up(node)
        assert process.loop is not None
        assert process.stopping is not None
        process.loop.post(process.stopping.set)
        await self.wait_until(lambda: process.done or not process.up, timeout_s=60)

    async def advance(self, seconds: float) -> None:
        """Let virtual time pass."""
        await asyncio.sleep(seconds)

    async def wait_until(self, condition: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
        """Let virtual time pass until a condition holds."""
        deadline = self.world.now + timeout_s
        while not condition():
            if self.world.now >= deadline:
                raise AssertionError(f"the condition did not hold within {timeout_s:g} s (virtual)")
            await asyncio.sleep(POLL_S)

    # questions

    def entry(self, shard: ShardKey) -> Entry:
        """The stored entry of a shard now."""
        item = self.servers.store.peek(block_key(shard.role, shard.shard // BLOCK_SIZE))
        if item is None:
            return Entry()
        return decode_block(item.value).entries[shard.shard % BLOCK_SIZE]

    def owner(self, kind: type[Entity], id: str) -> int:
        """The node that the store names as home of an entity."""
        shard = self.shard(kind, id)
        process = self._process_of(self.entry(shard).owner)
        if process is None:
            raise SimulationError(f"shard {shard.role}/{shard.shard} has no owner that is running")
        return process.index

    def events(self, kind: type[EventSourced[S, Ev]], id: str) -> list[Ev]:
        """The journaled events of an entity."""
        key = EntityKey(entity_type(kind).name, id)
        vault = Vault(self.random)
        vault.refill(self.servers.journal.peek(vault_key(key)))
        with vault.open():
            return [
                kind.__domicile_events__.decode(data) for data in self.servers.journal.peek(key)
            ]

    def node(self, index: int) -> Node:
        """A node, to send from; only inside tasks of its own process (see `spawn`)."""
        node = self._up(index).node
        assert node is not None
        return node

    @property
    def client_life(self) -> RunningIncarnation | None:
        """The incarnation of the test's own client."""
        return self._lives.current

    def spawn(self, index: int, work: Callable[[Node], Any]) -> None:
        """Run `await work(node)` inside a node's process."""
        process = self._up(index)
        assert process.loop is not None
        assert process.node is not None
        process.loop.create_task(work(process.node))

    # inside

    def node_id(self, node: int) -> str:
        """The node id of the node in a slot."""
        return self._slot(node).name

    def _outbound(self) -> Outbound:
        return self._lives

    def _operator_store(self) -> Store:
        return self._operator

    def _process_of(self, incarnation: Incarnation) -> SimNode | None:
        if incarnation:
            for process in self.nodes:
                if process.incarnation == incarnation:
                    return process
        return None

    def _backends(
        self, name: str, loop: SimLoop, machine: Machine, store: Faults, journal: Faults
    ) -> Backends:
        return Backends(
            store=self.servers.remote_store(loop, name, store),
            transport=lambda: self.network.transport(loop, name),
            journal=self.servers.remote_journal(loop, journal),
            clock=machine.clock(self.world, loop),
            meter=machine.meter(self.history, self.settings.drain_deadline_s),
            random=self.world.stream(f"process {loop.name}"),
            health=None if self._locks is None else self._locks.of(loop),
            threads=InlineThreads(),
        )

    def _entities_of(self, process: SimNode) -> Sequence[type[Entity]]:
        own = process.entities
        return [] if process.manager else self._entities if own is None else own

    def _launch(self, process: SimNode) -> None:
        process.runs += 1
        process.done = False
        run = f"{process.name}.{process.runs}"
        machine = process.machine
        loop = process.loop = self.world.process(run)
        store = process.store = self.servers.store_faults(f"{run} store")
        journal = process.journal = self.servers.faults(f"{run} journal")
        node = process.node = Node(
            "sim://",
            entities=self._entities_of(process),
            resources=self._resources,
            candidate=process.candidate,
            version=process.version,
            capacity=process.capacity,
            strategy=self._strategy,
            settings=self.settings,
            node_id=process.name,
            _protocols=process.protocols,
            backends=lambda: self._backends(process.name, loop, machine, store, journal),
        )

        async def live() -> None:
            process.stopping = asyncio.Event()
            async with node:
                await process.stopping.wait()
            process.done = True

        loop.create_task(live(), name=run)


class _Operator:
    """The operator's access to the store: what it knew before a rewind does not matter."""

    def __init__(self, store: RemoteStore) -> None:
        self.get, self.list, self.watch = store.get, store.list, store.watch
        self.grant, self.renew, self.revoke = store.grant, store.renew, store.revoke
        self.close, self.one_key = store.close, store.one_key
        self._commit = store.commit

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        """As `Store.commit`; a write that meets another history is tried again."""
        try:
            return await self._commit(conditions, writes)
        except StoreRewound:
            return Unknown()
