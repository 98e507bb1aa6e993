"""A member in a simulated process of its own, with a store that a test can tamper with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from domicile.core.ids import Incarnation
from domicile.core.state.cluster_view import ViewChange
from domicile.core.state.keys import node_key
from domicile.core.state.records import NodeRecord, decode_record, encode_record
from domicile.core.state.txn import Changes, Condition, Item, Listing, Outcome, Put, Write
from domicile.membership.member import Member
from domicile.membership.record_kinds import ProcessRecord, kind_of
from domicile.ports.clock import Timer
from domicile.ports.store import Store
from domicile.settings import Settings
from domicile.testing.history import History
from domicile.testing.sim.clock import SimClock
from domicile.testing.sim.loop import World
from domicile.testing.sim.servers import Servers

SETTINGS = Settings()

T = TypeVar("T")


class Tampered:
    """A store whose single calls a test can count and replace."""

    def __init__(self, target: Store) -> None:
        self.target = target
        self.calls: list[str] = []
        self.on_commit: Callable[[Sequence[Write]], Coroutine[Any, Any, Outcome]] | None = None
        self.on_grant: Callable[[str], Coroutine[Any, Any, float]] | None = None
        self.on_renew: Callable[[str], Coroutine[Any, Any, float | None]] | None = None
        self.on_watch: Callable[[bytes, int], AsyncIterator[Changes]] | None = None
        self.ttl_s: float | None = None

    async def get(self, key: bytes) -> Item | None:
        self.calls.append("get")
        return await self.target.get(key)

    async def list(self, prefix: bytes) -> Listing:
        self.calls.append("list")
        return await self.target.list(prefix)

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        self.calls.append("commit")
        if self.on_commit is not None:
            return await self.on_commit(writes)
        return await self.target.commit(conditions, writes)

    async def grant(self, lease: str, ttl_s: float) -> float:
        self.calls.append("grant")
        if self.on_grant is not None:
            return await self.on_grant(lease)
        return await self.target.grant(lease, self.ttl_s or ttl_s)

    async def renew(self, lease: str) -> float | None:
        self.calls.append("renew")
        if self.on_renew is not None:
            return await self.on_renew(lease)
        return await self.target.renew(lease)

    async def revoke(self, lease: str) -> None:
        self.calls.append("revoke")
        await self.target.revoke(lease)

    def watch(self, prefix: bytes, from_revision: int) -> AsyncIterator[Changes]:
        self.calls.append("watch")
        if self.on_watch is not None:
            return self.on_watch(prefix, from_revision)
        return self.target.watch(prefix, from_revision)

    async def close(self) -> None:
        await self.target.close()


class Skipping(SimClock):
    """A clock that a test can move on while the loop's timers do not notice."""

    skipped_s = 0.0

    def now(self) -> float:
        return super().now() + self.skipped_s

    def wall(self) -> datetime:
        return super().wall()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        return super().call_at(when - self.skipped_s, callback)


class Process:
    """One simulated process with a member, and everything the member said."""

    def __init__(
        self,
        lab: Lab,
        name: str,
        record: ProcessRecord | None = None,
        shards: dict[str, int] | None = None,
    ) -> None:
        self.loop = lab.world.process(name)
        self.clock = Skipping(lab.world, self.loop)
        self.faults = lab.servers.faults(name)
        self.store = Tampered(lab.servers.remote_store(self.loop, name, self.faults))
        self.incarnation = Incarnation(name * 4)
        if record is None:
            record = NodeRecord(
                name, self.incarnation, f"{name}:1", ("default",), ("cart",), SETTINGS.ttl_s
            )
        self.facts: list[ViewChange] = []
        self.listings: list[Listing] = []
        self.changes: list[Changes] = []
        self.fenced: list[tuple[float, str]] = []
        self.member = Member(
            store=self.store,
            clock=self.clock,
            meter=lab.history,
            settings=SETTINGS,
            random=lab.world.stream(name),
            record=record,
            kind=kind_of(record),
            shards={"default": 64} if shards is None else shards,
            events=self,
        )

    def on_fact(self, fact: ViewChange) -> None:
        assert not self.fenced
        self.facts.append(fact)

    def on_listing(self, listing: Listing) -> None:
        assert not self.fenced
        self.listings.append(listing)

    def on_changes(self, changes: Changes) -> None:
        assert not self.fenced
        self.changes.append(changes)

    def on_renewed(self) -> None:
        pass

    def on_fenced(self, reason: str) -> None:
        self.fenced.append((self.clock.now(), reason))

    async def live(self) -> bool:
        joined = await self.member.join()
        if joined:
            await self.member.run()
        return joined

    def start(self) -> asyncio.Task[bool]:
        return self.loop.create_task(self.live())


async def done(task: asyncio.Task[T]) -> T:
    """What became of a task of another process, which cannot be awaited from here."""
    over = asyncio.Event()
    task.add_done_callback(lambda _: over.set())
    await over.wait()
    return task.result()


class Lab:
    """A world with servers; the test itself is one more process."""

    def __init__(self, seed: int = 1) -> None:
        self.world = World(seed)
        self.history = History(lambda: self.world.now)
        self.servers = Servers(self.world, self.history)
        self.backend = self.servers.store.client("test")

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        loop = self.world.process("test")
        try:
            self.world.run(main, loop)
        finally:
            self.world.close()
        assert not self.world.errors

    async def item(self, process: Process) -> Item | None:
        """A process's record, as the store has it."""
        return await self.backend.get(node_key(process.incarnation))

    def renewals(self, process: Process) -> list[float]:
        mine = process.incarnation
        events = self.history.of("renewed")
        return [event.fields["sent_at"] for event in events if event.fields["inc"] == mine]


def evict(item: Item) -> Put:
    record = decode_record(item.value, NodeRecord)
    return Put(item.key, encode_record(msgspec.structs.replace(record, status="evicted")))


async def nothing_to_see(prefix: bytes, from_revision: int) -> AsyncIterator[Changes]:
    await asyncio.get_running_loop().create_future()
    yield Changes(0, ())
