"""What the scenarios of coordination and routing share: entities, readers of a history, a spy.

Everything here observes. It reads what the store was given and what the meter noted, and decides
nothing for the cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from domicile import Entity, Node, handler
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.state.keys import MAP, parse_block_key
from domicile.core.state.shardmap import BLOCK_SIZE, Entry, decode_block
from domicile.core.state.txn import Changes, Condition, Item, Listing, Outcome, Write
from domicile.ports.store import Store
from domicile.testing import Event, Sim
from domicile.testing.sim.simulated import judge

T = TypeVar("T")


class Diary(Entity, name="diary"):
    """Keeps its lines in memory and knows how often it was started at this home."""

    def __init__(self) -> None:
        self.starts = 0
        self.started_at = 0.0
        self.lines: list[str] = []

    async def on_start(self) -> None:
        self.starts += 1
        self.started_at = asyncio.get_running_loop().time()

    @handler
    async def write(self, line: str) -> int:
        self.lines.append(line)
        return len(self.lines)

    @handler
    async def read(self) -> list[str]:
        return self.lines

    @handler
    async def birth(self) -> tuple[int, float]:
        """How often it was started here, and when."""
        return self.starts, self.started_at

    @handler
    async def nap(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return self.epoch


class Stored(NamedTuple):
    """A map entry that a commit changed; `position` is that commit's in the history."""

    position: int
    at: float
    by: str
    shard: ShardKey
    before: Entry
    entry: Entry


def stored(sim: Sim) -> list[Stored]:
    """Every change of a map entry so far, in the order of commits."""
    found: list[Stored] = []
    known: dict[ShardKey, Entry] = {}
    for position, event in enumerate(sim.history.events):
        if event.kind != "commit":
            continue
        for key, value, _lease in event.fields["puts"]:
            if not key.startswith(MAP):
                continue
            role, number = parse_block_key(key)
            for index, entry in enumerate(decode_block(value).entries):
                shard = ShardKey(role, number * BLOCK_SIZE + index)
                before = known.get(shard, Entry())
                if entry != before:
                    known[shard] = entry
                    by = event.fields["by"]
                    found.append(Stored(position, event.at, by, shard, before, entry))
    return found


def moves(sim: Sim) -> list[Stored]:
    """The changes that began a move."""
    return [change for change in stored(sim) if change.entry.state == "moving"]


def first(sim: Sim, kind: str, wanted: Callable[[dict[str, Any]], bool]) -> int:
    """The position of the first such event."""
    for position, event in enumerate(sim.history.events):
        if event.kind == kind and wanted(event.fields):
            return position
    raise AssertionError(f"no such {kind!r} event")


def of_shard(sim: Sim, shard: ShardKey, *kinds: str) -> list[tuple[int, Event]]:
    """The events of one shard, with their positions."""
    return [
        (position, event)
        for position, event in enumerate(sim.history.events)
        if event.kind in kinds and (event.fields["role"], event.fields["shard"]) == shard
    ]


def traffic(sim: Sim, kind: str) -> dict[tuple[str, str], list[int]]:
    """The numbers of messages that `submit` or `start` tells of, by sender and entity, in order."""
    found: dict[tuple[str, str], list[int]] = {}
    for event in sim.history.of(kind):
        sender = event.fields["inc" if kind == "submit" else "sender"]
        found.setdefault((sender, event.fields["id"]), []).append(event.fields["n"])
    return found


def incarnation(sim: Sim, node: int) -> Incarnation:
    """A node's incarnation, which must stand."""
    found = sim.nodes[node].incarnation
    assert found is not None, f"node {node} is not registered"
    return found


def ids_at(sim: Sim, node: int, count: int) -> list[str]:
    """Ids of diaries that are at home at a node, each in a shard of its own."""
    found: dict[ShardKey, str] = {}
    for number in range(1_000):
        shard = sim.shard(Diary, f"d{number}")
        if shard not in found and sim.owner(Diary, f"d{number}") == node:
            found[shard] = f"d{number}"
            if len(found) == count:
                return list(found.values())
    raise AssertionError(f"node {node} is home to only {len(found)} shards")


def one_id_per_shard(sim: Sim) -> dict[ShardKey, str]:
    """A diary in every shard."""
    found: dict[ShardKey, str] = {}
    number = 0
    while len(found) < sim.settings.shards:
        found.setdefault(sim.shard(Diary, f"d{number}"), f"d{number}")
        number += 1
    return found


async def inside(sim: Sim, node: int, work: Callable[[Node], Coroutine[Any, Any, T]]) -> T:
    """The result of work done in a node's own process."""
    results: list[T] = []
    errors: list[Exception] = []

    async def run(node: Node) -> None:
        try:
            results.append(await work(node))
        except Exception as error:
            errors.append(error)

    sim.spawn(node, run)
    await sim.wait_until(lambda: bool(results or errors), timeout_s=120)
    if errors:
        raise errors[0]
    return results[0]


def from_the_start(
    sim: Sim, body: Callable[[Sim, Awaitable[Sim]], Coroutine[Any, Any, None]]
) -> None:
    """Run a body beside the start of a cluster; it gets what to await until all are served."""

    async def main() -> None:
        await body(sim, asyncio.ensure_future(sim.__aenter__()))

    try:
        sim.world.run(main(), sim.loop)
        judge(sim)
    finally:
        sim.close()


class Access(NamedTuple):
    """A call that reached the store."""

    by: str
    call: str
    key: bytes


def spy_on_store(sim: Sim) -> list[Access]:
    """The calls of all processes that start from now on, as they reach the store."""
    accesses: list[Access] = []
    client = sim.servers.store.client

    def spied(by: str) -> Store:
        return _Spied(client(by), by, accesses)

    sim.servers.store.client = spied  # type: ignore[method-assign]
    return accesses


class _Spied:
    """A store that notes who asks for what."""

    def __init__(self, store: Store, by: str, accesses: list[Access]) -> None:
        self._store, self._by, self._accesses = store, by, accesses

    def _note(self, call: str, key: bytes) -> None:
        self._accesses.append(Access(self._by, call, key))

    async def get(self, key: bytes) -> Item | None:
        self._note("get", key)
        return await self._store.get(key)

    async def list(self, prefix: bytes) -> Listing:
        self._note("list", prefix)
        return await self._store.list(prefix)

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        for write in writes:
            self._note("commit", write.key)
        return await self._store.commit(conditions, writes)

    async def grant(self, lease: str, ttl_s: float) -> float:
        self._note("grant", lease.encode())
        return await self._store.grant(lease, ttl_s)

    async def renew(self, lease: str) -> float | None:
        self._note("renew", lease.encode())
        return await self._store.renew(lease)

    async def revoke(self, lease: str) -> None:
        self._note("revoke", lease.encode())
        await self._store.revoke(lease)

    def watch(self, prefix: bytes, from_revision: int) -> AsyncIterator[Changes]:
        self._note("watch", prefix)
        return self._store.watch(prefix, from_revision)

    async def close(self) -> None:
        await self._store.close()
