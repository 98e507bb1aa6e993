"""A whole cluster in one process and virtual time.

Every node is a simulated process with its own event loop; the store and the journal are servers
behind a network with delays and faults; the test itself talks to the cluster as a client. The
same seed gives the same history, event for event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Self, TypeVar

from domicile.config import Settings
from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.shardmap import BLOCK_SIZE, Entry, block_key, decode_block
from domicile.core.strategies import Strategy
from domicile.entity.define import Entity, entity_type
from domicile.entity.ref import Outbound
from domicile.life import Backends, Life, Lives, Plan
from domicile.node import Node
from domicile.persist.eventsourced import EventSourced
from domicile.ports.store import Store
from domicile.testing.clock import SimClock
from domicile.testing.health import SimLocks
from domicile.testing.history import History
from domicile.testing.loop import SimLoop, SimulationError, World
from domicile.testing.network import SimNetwork
from domicile.testing.servers import Faults, Servers
from domicile.testing.verbs import Verbs
from domicile.transports.link import PROTOCOLS

S = TypeVar("S")
Ev = TypeVar("Ev")

POLL_S = 0.005
START_S = 60.0


class SimNode:
    """One node of a simulated cluster: a slot that processes come and go in."""

    def __init__(self, index: int, candidate: bool, *, manager: bool = False) -> None:
        self.index = index
        self.name = f"manager-{index}" if manager else f"node-{index}"
        self.candidate = candidate
        self.manager = manager
        self.version = ""
        self.capacity = 1.0
        self.protocols = PROTOCOLS
        self.runs = 0
        self.loop: SimLoop | None = None
        self.node: Node | None = None
        self.store: Faults | None = None
        self.journal: Faults | None = None
        self.stopping: asyncio.Event | None = None
        self.done = False

    @property
    def up(self) -> bool:
        """Whether its process lives, frozen or not."""
        return self.loop is not None and not self.loop.dead and not self.done

    @property
    def incarnation(self) -> Incarnation | None:
        """The registered incarnation, if there is one."""
        life = None if self.node is None else self.node.life
        return None if life is None else life.me


class Sim(Verbs):
    """The cluster as a test sees it. Nodes are numbered from 0."""

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
    ) -> None:
        self.seed = seed
        self._strategy = strategy
        self._locks = SimLocks() if locks else None
        self._rough = rough
        self.world = World(seed)
        self.history = History(self.world.clock)
        self.random = self.world.stream("test")
        self.settings = Settings() if settings is None else settings
        self._entities = list(entities)
        self._resources = resources
        self.servers = Servers(self.world, self.history)
        self.network = SimNetwork(self.world, self.history, self.world.stream("network"))
        self.nodes = [
            SimNode(index, index in candidates if candidates is not None else not managers)
            for index in range(nodes)
        ]
        self.nodes += [SimNode(nodes + number, True, manager=True) for number in range(managers)]
        self.loop = self.world.process("client")
        self.store = self.servers.faults("client store")
        self._lives = Lives()
        self._operator = self.servers.remote_store(
            self.loop, "operator", self.servers.faults("operator")
        )

    # the cluster's life

    async def __aenter__(self) -> Self:
        """Start every node and the test's own client; returns once all shards are served."""
        for node in self.nodes:
            self._launch(node)
        await self._lives.start(
            self._backends("client", self.loop, self.store, self.servers.faults("client journal")),
            Plan("domicile", "", {}, {}, self.settings, False),
        )
        await self.wait_until(self.settled, timeout_s=START_S)
        if self._rough:
            Roughness(self).begin()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Nothing to hand over: a simulated cluster just ends."""

    def close(self) -> None:
        """End the world; nothing of it runs afterwards."""
        self.history.closed = True
        self.world.close()

    def settled(self) -> bool:
        """Every shard of every role is served by a process that lives and has opened it."""
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

    # faults

    def crash(self, node: int) -> None:
        """SIGKILL: nothing of the process ever runs again."""
        process = self._up(node)
        assert process.loop is not None
        self.note_fault("crash", process)
        process.loop.kill()
        self.network.kill(process.name)

    def freeze(self, node: int) -> None:
        """SIGSTOP: it stands still while its sockets fill and its lease runs out."""
        process = self._up(node)
        assert process.loop is not None
        self.note_fault("freeze", process)
        process.loop.freeze()

    def thaw(self, node: int) -> None:
        """SIGCONT."""
        process = self._up(node)
        assert process.loop is not None
        self.note_fault("thaw", process)
        process.loop.thaw()

    def partition(self, *sides: Sequence[int]) -> None:
        """Nodes of different sides cannot reach each other; all reach the store."""
        self.note_fault("partition", None)
        self.network.partition([[self._slot(index).name for index in side] for side in sides])

    def heal(self) -> None:
        """End every partition and every cut from the store."""
        self.note_fault("heal", None)
        self.network.heal()
        for process in self.nodes:
            if process.store is not None:
                process.store.cut = False
        self.store.cut = False

    def block(self, one: int, other: int) -> None:
        """Nothing passes from one node to another, though it does the other way round.

        -1 is the test's own client.
        """
        self.note_fault("block", self._slot(max(one, other)))
        self.network.block(self._name(one), self._name(other))

    def cut(self, one: int, other: int) -> None:
        """Break the connections between two nodes; links reconnect."""
        self.note_fault("cut", self._slot(one))
        self.network.cut(self._slot(one).name, self._slot(other).name)

    def cut_client(self, node: int) -> None:
        """Break the test's own connections to a node."""
        self.note_fault("cut", self._slot(node))
        self.network.cut("client", self._slot(node).name)

    def cut_store(self, node: int) -> None:
        """Cut a node off the store until `heal`."""
        process = self._up(node)
        assert process.store is not None
        self.note_fault("outage", process)
        process.store.cut = True

    # operations

    def start(self, node: int, *, version: str | None = None) -> None:
        """Start a process in a slot whose process is gone; another incarnation."""
        process = self._slot(node)
        if process.up:
            raise SimulationError(f"node {node} is running: crash or stop it first")
        if version is not None:
            process.version = version
        self._launch(process)

    def add(self, *, version: str = "", capacity: float = 1.0, candidate: bool = True) -> int:
        """Start one more node; its number."""
        process = SimNode(len(self.nodes), candidate)
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
        """What the store says of a shard now."""
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
        return [kind.__domicile_events__.decode(data) for data in self.servers.journal.peek(key)]

    def node(self, index: int) -> Node:
        """A node, to send from; only inside tasks of its own process (see `spawn`)."""
        node = self._up(index).node
        assert node is not None
        return node

    @property
    def client_life(self) -> Life | None:
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
        """What the node in a slot calls itself."""
        return self._slot(node).name

    def _outbound(self) -> Outbound:
        return self._lives

    def _operator_store(self) -> Store:
        return self._operator

    def _name(self, index: int) -> str:
        return "client" if index == -1 else self._slot(index).name

    def _slot(self, index: int) -> SimNode:
        if not 0 <= index < len(self.nodes):
            raise SimulationError(f"no node {index}: they are 0 to {len(self.nodes) - 1}")
        return self.nodes[index]

    def _up(self, index: int) -> SimNode:
        process = self._slot(index)
        if not process.up:
            raise SimulationError(f"node {index} is not running")
        return process

    def _process_of(self, incarnation: Incarnation) -> SimNode | None:
        if incarnation:
            for process in self.nodes:
                if process.incarnation == incarnation:
                    return process
        return None

    def note_fault(self, fault: str, process: SimNode | None = None) -> None:
        """Tell the checkers that something was done to the cluster."""
        self.history.event(
            "fault",
            fault=fault,
            node=None if process is None else process.index,
            inc=None if process is None else process.incarnation,
        )

    def _backends(self, name: str, loop: SimLoop, store: Faults, journal: Faults) -> Backends:
        return Backends(
            store=self.servers.remote_store(loop, name, store),
            transport=lambda: self.network.transport(loop, name),
            journal=self.servers.remote_journal(loop, journal),
            clock=SimClock(self.world, loop),
            meter=self.history,
            random=self.world.stream(f"process {loop.name}"),
            health=None if self._locks is None else self._locks.of(loop),
        )

    def _launch(self, process: SimNode) -> None:
        process.runs += 1
        process.done = False
        run = f"{process.name}.{process.runs}"
        loop = process.loop = self.world.process(run)
        store = process.store = self.servers.faults(f"{run} store")
        journal = process.journal = self.servers.faults(f"{run} journal")
        node = process.node = Node(
            "sim://",
            entities=[] if process.manager else self._entities,
            resources=self._resources,
            candidate=process.candidate,
            version=process.version,
            capacity=process.capacity,
            strategy=self._strategy,
            settings=self.settings,
            node_id=process.name,
            backends=lambda: self._backends(process.name, loop, store, journal),
        )

        async def live() -> None:
            process.stopping = asyncio.Event()
            async with node:
                await process.stopping.wait()
            process.done = True

        loop.create_task(live(), name=run)


class Roughness:
    """Small seeded faults that a program should not notice, for as long as a run lasts."""

    def __init__(self, sim: Sim) -> None:
        self._sim = sim
        self._random = sim.world.stream("roughness")

    def begin(self) -> None:
        """From now on: uneven delays, lost replies of the store, broken connections."""
        sim, random = self._sim, self._random
        sim.network.jitter_s = random.choice((0.0, 0.005, 0.02))
        sim.network.skew_s = random.choice((0.0, 0.03))
        for process in sim.nodes:
            if process.store is not None:
                process.store.watch_delay_s = (0.0, random.choice((0.0, 0.01, 0.05)))
                process.store.lost_reply = random.choice((0.0, 0.02))
        self._next()

    def _next(self) -> None:
        delay_s = self._random.uniform(0.2, 2.0)
        self._sim.world.call_at(self._sim.world.now + delay_s, self._strike)

    def _strike(self) -> None:
        sim, random = self._sim, self._random
        node = random.choice(sim.nodes)
        kind = random.choice(("cut", "cut client", "watch"))
        if kind == "cut":
            sim.cut(node.index, random.choice(sim.nodes).index)
        elif kind == "cut client":
            sim.cut_client(node.index)
        elif node.store is not None:
            node.store.break_watch()
        self._next()
