"""What a test can do to a simulated cluster: the faults among the verbs of `Sim`.

Base of `Sim`, which owns everything that a fault breaks. Each verb must note what it did in the
history, so that checkers know when the cluster was disturbed.
"""

from __future__ import annotations

from collections.abc import Sequence

from domicile.core.ids import ShardKey
from domicile.core.state.keys import LEADER_KEY
from domicile.core.state.txn import Delete
from domicile.testing.actions import Verbs
from domicile.testing.history import History
from domicile.testing.sim.calls import Faults
from domicile.testing.sim.clock import Machine
from domicile.testing.sim.network import SimNetwork
from domicile.testing.sim.node import SimNode
from domicile.testing.sim.sandbox import SimulationError
from domicile.testing.sim.servers import Servers


class SimFaults(Verbs):
    """Faults. Nodes are numbered from 0."""

    nodes: list[SimNode]
    network: SimNetwork
    servers: Servers
    history: History
    store: Faults

    def crash(self, node: int) -> None:
        """SIGKILL: nothing of the process ever runs again."""
        process = self._up(node)
        assert process.loop is not None
        self.note_fault("crash", process)
        process.loop.kill()
        self.network.kill(process.name)

    def freeze(self, node: int) -> None:
        """SIGSTOP: the process stops while its sockets fill and its lease runs out."""
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
        """Nothing passes from one node to another; the other direction works.

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

    def linger(self, one: int, other: int, lingers_s: float) -> None:
        """Break the connections between two nodes; the accepting end notices it late.

        Packets under way on the old connection then arrive after those of the new one.
        """
        self.note_fault("linger", self._slot(one))
        self.network.linger(self._slot(one).name, self._slot(other).name, lingers_s)

    def duplicate(self, one: int, other: int) -> int:
        """Repeat the connections between two nodes, as a middlebox might; returns how many."""
        self.note_fault("duplicate", self._slot(one))
        return self.network.duplicate(self._slot(one).name, self._slot(other).name)

    # the store as a whole

    def store_outage(self, *, running: bool = False) -> None:
        """No process reaches the store until `store_back`.

        Its process is down, so nothing expires meanwhile. With `running` it is only out of reach,
        and leases run out.
        """
        self.note_fault("outage")
        self.servers.outage(running=running)

    def store_back(self) -> None:
        """End a `store_outage`."""
        self.note_fault("back")
        self.servers.back()

    def rewind(self, seconds: float) -> float:
        """The store loses its newest commits, as when a backup is put back (S5).

        It goes back by at least so many seconds, to the newest backup that is old enough; returns
        by how many. Every process has to notice that and begin again.
        """
        self.note_fault("rewind")
        return self.servers.rewind(seconds)

    def compact(self) -> None:
        """The store drops all changes so far: a watch from before must list again."""
        self.servers.store.compact(self.servers.store.revision)

    def raise_fence(self, shard: ShardKey) -> None:
        """Raise the journal's fence of a shard above the store's epoch, as an operator might.

        Its home notices that with its next write: nothing is committed, and the shard needs a newer
        epoch (J2).
        """
        self.note_fault("raised fence")
        self.servers.raise_fence(shard)

    def repeat_claim(self, shard: ShardKey) -> None:
        """The claim that holds a shard arrives at the journal once more, as one sent again may.

        Nothing may follow from it: only a claim of a higher epoch changes a fence (J1, J4). This is
        not a fault.
        """
        self.servers.repeat_claim(shard)

    def hold_row(self, shard: ShardKey, seconds: float) -> None:
        """Another transaction holds a shard's fence row in the journal, as a user's own may (J10).

        Batches of several shards leave the shard out meanwhile; one of its own waits. This is not a
        fault.
        """
        self.servers.hold_row(shard, seconds)

    async def depose(self) -> None:
        """Delete the leader key under a leader that lives, as an operator might.

        Another node may win it while the old leader has heard nothing: its lease stands (C1).
        """
        self.note_fault("deposed")
        await self._write(Delete(LEADER_KEY))

    # clocks

    def step_store_clock(self, seconds: float) -> None:
        """Set the store's wall clock forward, or back if negative (S4). This is not a fault."""
        self.servers.wall_s += seconds
        self.history.event("stepped", node=None, by=seconds)

    def step_clock(self, node: int, seconds: float) -> None:
        """Set the wall clock of a node's machine forward, or back if negative."""
        self._slot(node).machine.wall_s += seconds
        self.history.event("stepped", node=node, by=seconds)

    def skew(self, node: int, offset_s: float = 0.0, rate: float = 1.0) -> None:
        """Give a node's machine clocks of its own, from its next process on.

        The clock of leases shows `offset_s` more than the world's, and runs at `rate` (A1: within
        0.1 % of 1); the wall clock is ahead by as much. A process's clock never jumps (A2), so a
        running process must be stopped or crashed first.
        """
        process = self._slot(node)
        if process.up:
            raise SimulationError(
                f"node {node} is running and its clock can't jump: crash or stop it, then skew "
                "and start it; for the wall clock alone there is `step_clock`"
            )
        process.machine = Machine(offset_s, rate, offset_s)

    # slow paths

    def slow(self, node: int, extra_s: float) -> None:
        """Everything from and to a node takes this much longer; 0 ends it."""
        self.note_fault("slow" if extra_s else "fast", self._slot(node))
        self.network.slow(self._slot(node).name, extra_s)

    def slow_way(self, one: int, other: int, extra_s: float) -> None:
        """Everything from one node to another takes this much longer; 0 ends it."""
        self.note_fault("slow" if extra_s else "fast", self._slot(one))
        self.network.slow_way(self._slot(one).name, self._slot(other).name, extra_s)

    # inside

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

    def note_fault(self, fault: str, process: SimNode | None = None) -> None:
        """Tell the checkers of a fault."""
        self.history.event(
            "fault",
            fault=fault,
            node=None if process is None else process.index,
            inc=None if process is None else process.incarnation,
        )
