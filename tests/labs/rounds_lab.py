"""What the scenarios of rounds, stops and outages share: an entity, a steady load, readers.

The readers decide nothing for the cluster: they look at the store, at what was committed and at
what the meter noted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise

from manager_lab import Stored, incarnation, of_shard, stored, traffic

from domicile import Client, Entity, handler
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.state.keys import LEADER_KEY, NODES
from domicile.core.state.records import LeaderRecord, NodeRecord, decode_record
from domicile.testing import Sim

ROLE = "default"


class Clerk(Entity, name="clerk"):
    """Answers at once or after a nap, with the epoch it works in, and takes a while to stop."""

    async def on_stop(self) -> None:
        await asyncio.sleep(0.02)

    @handler
    async def note(self) -> int:
        return self.epoch

    @handler
    async def nap(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return self.epoch


def shards(sim: Sim) -> list[ShardKey]:
    """All shards of the role."""
    return [ShardKey(ROLE, number) for number in range(sim.settings.shards)]


def clerks(sim: Sim) -> dict[ShardKey, str]:
    """A clerk in every shard."""
    found: dict[ShardKey, str] = {}
    number = 0
    while len(found) < sim.settings.shards:
        found.setdefault(sim.shard(Clerk, f"c{number}"), f"c{number}")
        number += 1
    return dict(sorted(found.items()))


def clerks_at(sim: Sim, *nodes: int) -> dict[ShardKey, str]:
    """A clerk in every shard that is at home on one of these nodes."""
    homes = [incarnation(sim, node) for node in nodes]
    return {shard: id for shard, id in clerks(sim).items() if sim.entry(shard).owner in homes}


def leader(sim: Sim) -> int | None:
    """The node that the store names as coordinator."""
    item = sim.servers.store.peek(LEADER_KEY)
    if item is None:
        return None
    found = decode_record(item.value, LeaderRecord).incarnation
    return next((node.index for node in sim.nodes if node.up and node.incarnation == found), None)


def acting(sim: Sim) -> int:
    """The node that coordinates; there must be one."""
    found = leader(sim)
    assert found is not None, "nobody coordinates"
    return found


def loads(sim: Sim) -> dict[int, int]:
    """How many shards each running node that may be home is home to."""
    owners = [sim.entry(shard).owner for shard in shards(sim)]
    return {
        node.index: owners.count(node.incarnation)
        for node in sim.nodes
        if node.up and not node.manager and node.incarnation is not None
    }


def changes_of(sim: Sim, shard: ShardKey, after: int = -1) -> list[Stored]:
    """The changes of one shard's entry that were committed after a position of the history."""
    return [change for change in stored(sim) if change.shard == shard and change.position > after]


def steps(changes: Iterable[Stored]) -> list[tuple[str, Incarnation, int]]:
    """State, owner and epoch of each change."""
    return [(change.entry.state, change.entry.owner, change.entry.epoch) for change in changes]


def registered_at(sim: Sim, node: Incarnation) -> tuple[int, float]:
    """Position and time of the commit that made a node's record."""
    return _record_at(sim, node, "up")


def leaving_at(sim: Sim, node: Incarnation) -> tuple[int, float]:
    """Position and time of the commit that says that a node leaves."""
    return _record_at(sim, node, "leaving")


def _record_at(sim: Sim, node: Incarnation, status: str) -> tuple[int, float]:
    for position, event in enumerate(sim.history.events):
        if event.kind == "commit":
            for key, value, _ in event.fields["puts"]:
                if key == NODES + node.encode():
                    record = decode_record(value, NodeRecord)
                    if record.status == status:
                        return position, event.at
    raise AssertionError(f"no record of {node} that is {status}")


def gone_at(sim: Sim, node: Incarnation) -> tuple[int, float]:
    """Position and time at which a node's record went."""
    for position, event in enumerate(sim.history.events):
        if event.kind in ("commit", "expire") and NODES + node.encode() in event.fields["deletes"]:
            return position, event.at
    raise AssertionError(f"the record of {node} is still there")


def served_at(sim: Sim, shard: ShardKey, after: int) -> tuple[float, float, Incarnation]:
    """When a shard got its next home, when that opened it, and who it is."""
    change = next(c for c in changes_of(sim, shard, after) if c.entry.state == "serving")
    opened = next(
        event
        for _, event in of_shard(sim, shard, "open")
        if (event.fields["inc"], event.fields["epoch"]) == (change.entry.owner, change.entry.epoch)
    )
    return change.at, opened.at, change.entry.owner


def assert_one_owner_per_epoch(sim: Sim) -> None:
    """I1(a), read off the commits: epochs rise by one, and each belongs to one incarnation."""
    by_epoch: dict[tuple[ShardKey, int], Incarnation] = {}
    for shard in shards(sim):
        epochs = [0]
        for change in changes_of(sim, shard):
            entry = change.entry
            assert by_epoch.setdefault((shard, entry.epoch), entry.owner) == entry.owner
            if entry.epoch != epochs[-1]:
                epochs.append(entry.epoch)
        assert all(later == earlier + 1 for earlier, later in pairwise(epochs))
        for _, event in of_shard(sim, shard, "open", "start"):
            assert by_epoch[shard, event.fields["epoch"]] == event.fields["inc"]


class Load:
    """Asks without a pause, and tells between them, from a client and from inside nodes."""

    def __init__(
        self, sim: Sim, ids: Iterable[str], *, timeout_s: float = 30.0, pause_s: float = 0.1
    ) -> None:
        self._sim, self._ids = sim, list(ids)
        self._timeout_s, self._pause_s = timeout_s, pause_s
        self._over = False
        self._running = 0
        self.asked = 0
        self.failures: list[str] = []
        self.slowest_s = 0.0

    def begin(self, nodes: Sequence[int] = (), *, client: bool = True) -> None:
        """One sender for each clerk in the client and in each of these nodes."""
        for id in self._ids:
            if client:
                self._running += 1
                self._sim.loop.create_task(self._talk(self._sim, id))
            for node in nodes:
                self._running += 1
                self._sim.spawn(node, partial(self._talk, id=id))

    async def end(self) -> None:
        """Let everybody finish."""
        self._over = True
        await self._sim.wait_until(lambda: not self._running, timeout_s=self._timeout_s + 5)

    async def _talk(self, source: Client, id: str) -> None:
        ref = source.ref(Clerk, id).options(timeout_s=self._timeout_s)
        try:
            while not self._over:
                began_at = self._sim.world.now
                await ref.tell(Clerk.note)
                await ref.ask(Clerk.note)
                self.asked += 1
                self.slowest_s = max(self.slowest_s, self._sim.world.now - began_at)
                await asyncio.sleep(self._pause_s)
        except Exception as error:
            self.failures.append(f"{id}: {error!r}")
        finally:
            self._running -= 1


def assert_nothing_lost(sim: Sim) -> None:
    """Everything that was sent ran, once and in the order of sending, and every ask succeeded."""
    outcomes = [event.fields for event in sim.history.of("outcome")]
    assert [fields for fields in outcomes if fields["outcome"] != "ok"] == []
    assert not list(sim.history.of("lost"))
    submitted, started = traffic(sim, "submit"), traffic(sim, "start")
    assert started == submitted


def returned(sim: Sim, by: Incarnation, after: int = -1) -> dict[tuple[str, str, int], int]:
    """Messages that a node sent back (sender, id, number), and where in the history."""
    return {
        (event.fields["sender"], event.fields["id"], event.fields["n"]): position
        for position, event in enumerate(sim.history.events)
        if event.kind == "return" and event.fields["inc"] == by and position > after
    }


def homes(sim: Sim) -> Mapping[ShardKey, tuple[str, Incarnation, int]]:
    """State, owner and epoch of every shard now."""
    found = {shard: sim.entry(shard) for shard in shards(sim)}
    return {shard: (entry.state, entry.owner, entry.epoch) for shard, entry in found.items()}
