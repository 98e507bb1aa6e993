"""The store on a Redis or Valkey server (S1–S7, S11), and its watches.

Each call is one run of one script, so one round trip. Watches share one connection that waits for
the change log, whose entries are the revisions. The store belongs to one event loop.

Redis is consistent on one server, never across a failover or a restore. Clients notice lost
commits afterwards, also if newer ones took their numbers: each revision has a random tag (S5).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from math import isfinite
from random import Random
from typing import Any, NamedTuple

from domicile.concurrency.task_set import TaskSet
from domicile.core.state.txn import (
    Change,
    Changes,
    Condition,
    Item,
    Listing,
    Outcome,
    Unknown,
    Write,
)
from domicile.errors import ConfigError, StoreError, StoreRewound, StoreUnavailable
from domicile.ports.findings import Finding
from domicile.ports.meter import Meter, NoMeter
from domicile.stores.redis.calls import (
    KEPT_COMMITS,
    LogEntry,
    ScriptAnswer,
    ScriptCalls,
    bounds,
    entry_of,
    item_of,
    ttl_s,
    ttl_us,
)
from domicile.stores.redis.findings import server_findings
from domicile.stores.redis.server import RedisAddress, RedisServer
from domicile.stores.redis.thread_client import RedisLeaseClient
from domicile.stores.redis.ticks import TICK_S, TickPace
from domicile.stores.threaded import LoopThreadedStore

log = logging.getLogger("domicile")

BLOCK_S = 10.0
"""Seconds that the server keeps the question for new commits open. Then the store's history is
compared. A process that renews a lease learns sooner of a rewind, and that store time stands."""

PAGE = 64
"""Commits that are read at once."""

TAIL_COMMITS = 256
TAIL_BYTES = 4 * 1024 * 1024
"""I6: most commits, and most bytes of them, that watches need not read again."""


class RedisStore:
    """Implements `domicile.ports.store.Store`. It connects at the first call.

    `by` names this process in the log. A call ends within about `op_timeout_s`. With `reads_only`
    no call writes: this process ends no expired lease and does not advance store time. Without
    `creates` no store is made where none is: reads find nothing, writes fail.
    """

    def __init__(
        self,
        address: RedisAddress,
        *,
        by: str = "",
        kept_commits: int = KEPT_COMMITS,
        op_timeout_s: float = 5.0,
        meter: Meter | None = None,
        random: Random | None = None,
        reads_only: bool = False,
        creates: bool = True,
    ) -> None:
        if kept_commits < 1:
            raise ValueError(f"kept_commits is {kept_commits}; keep at least one commit")
        if not (isfinite(op_timeout_s) and op_timeout_s > 0):
            raise ValueError(f"op_timeout_s is {op_timeout_s}; it must be above 0")
        self.address = address
        # The nodes of a store that is there have warned already, and `findings` says it, too.
        self.server = RedisServer(address, op_timeout_s, tells=creates)
        self._by, self._op_timeout_s = by, op_timeout_s
        self._meter = NoMeter() if meter is None else meter
        self._reads_only = reads_only
        self._calls = ScriptCalls(
            self.server, address.keys, by=by, kept_commits=kept_commits, reads_only=reads_only,
            creates=creates, seen=self._saw, rewound=self._went_back,
        )  # fmt: skip
        self._pace = TickPace(Random() if random is None else random)
        self._tasks = TaskSet[None](f"redis {address.shown}")
        self._ticking: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self._watches: dict[_Watch, None] = {}
        self._tail = LogTail()
        self._sides: dict[bytes, tuple[int, LoopThreadedStore]] = {}
        """The thread sides by prefix, with the number of rewinds that were known to each."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def get(self, key: bytes) -> Item | None:
        """As `Store.get`."""
        answer = await self._ask("get", key)
        raw = answer.results[0] if answer.results else None
        return None if raw is None else item_of(key, raw)

    async def list(self, prefix: bytes) -> Listing:
        """As `Store.list`."""
        answer = await self._ask("list", *bounds(prefix))
        keys, raw = answer.results or ((), ())
        items = [item_of(key, item) for key, item in zip(keys, raw, strict=True)]
        return Listing(answer.revision, tuple(items))

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        """As `Store.commit`. A commit that changes nothing does not raise the revision."""
        self._check_writes()
        outcome = await self._calls.commit(conditions, writes)
        if isinstance(outcome, Unknown):
            self._meter.count("store.unknown")
        return outcome

    async def grant(self, lease: str, ttl_s: float) -> float:
        """As `Store.grant`."""
        answer = await self._write("grant", lease, ttl_us(lease, ttl_s))
        return _ttl(answer)

    async def renew(self, lease: str) -> float | None:
        """As `Store.renew`."""
        answer = await self._write("renew", lease)
        return None if answer.status == "gone" else _ttl(answer)

    async def revoke(self, lease: str) -> None:
        """As `Store.revoke`."""
        await self._write("revoke", lease)

    @property
    def tick_s(self) -> float:
        """As `NeedsTicks.tick_s`."""
        return TICK_S

    async def tick(self) -> None:
        """As `NeedsTicks.tick`."""
        await self._write("tick")

    async def compact(self, revision: int) -> None:
        """Forget the changes up to a revision: a watch from before it must list again."""
        await self._write("compact", str(revision))

    async def state(self) -> ScriptAnswer:
        """Revision and time, the numbers of keys, leases and kept commits, the revision up to which
        commits are forgotten, the wall clock in microseconds, and leases that have expired."""
        return await self._ask("state")

    async def findings(self) -> Sequence[Finding]:
        """As `InspectableStore.findings`."""
        state = await self.state()
        return server_findings(await self.server.look(), state)

    def watch(self, prefix: bytes, from_revision: int) -> AsyncIterator[Changes]:
        """As `Store.watch`."""
        return _Watch(self, prefix, from_revision, self._calls.generation)

    def beside(self, prefix: bytes = b"") -> LoopThreadedStore:
        """As `OffersThreads.beside`: a second client on a loop of its own, one for each prefix."""
        self._check_open()
        generation = self._calls.generation
        before = self._sides.get(prefix)
        if before is not None and before[0] == generation:
            return before[1]
        if before is not None:
            before[1].close()
        self._loop = asyncio.get_running_loop()
        make = partial(
            RedisLeaseClient, self.address, self._by, self._op_timeout_s, self._calls.known,
            seen=lambda answer: self._soon(lambda: self._saw(answer)),
            rewound=lambda error: self._soon(self._look_back),
        )  # fmt: skip
        made = LoopThreadedStore(make, prefix, f"domicile-redis {self._by}")
        self._sides[prefix] = generation, made
        return made

    async def close(self) -> None:
        """Close the connections and end the watches. Leases stay until they expire."""
        self._closed = True
        self._break(StoreUnavailable(f"the store {self.address.shown} was closed; make another"))
        for _, side in self._sides.values():
            side.close()
        await self._tasks.close()
        await self.server.close()

    async def _write(self, operation: str, *values: str | bytes) -> ScriptAnswer:
        self._check_writes()
        return await self._calls.sure(operation, *values)

    async def _ask(self, operation: str, *values: str | bytes) -> ScriptAnswer:
        self._check_open()
        return await self._calls.sure(operation, *values)

    def _check_writes(self) -> None:
        self._check_open()
        if self._reads_only:
            raise StoreUnavailable(
                f"the store {self.address.shown} was opened for reading only; nothing was written"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"the store {self.address.shown} is closed; make another one")

    # what the thread side has learned

    def _soon(self, callback: Callable[[], None]) -> None:
        """Do something on the store's loop; called in the thread that renews."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _look_back(self) -> None:
        """The thread side saw a rewind: see whether it concerns what is known here, too (S5)."""
        if not self._closed:
            self._tasks.spawn(self._compare())

    async def _compare(self) -> None:
        # What is wrong is told to the watches.
        with suppress(StoreError, ConfigError):
            await self.state()

    # store time

    def _saw(self, answer: ScriptAnswer) -> None:
        self._pace.saw(answer.age_s)
        if self._pace.ticks and self._ticking is None and not (self._reads_only or self._closed):
            self._ticking = self._tasks.spawn(self._tick())

    async def _tick(self) -> None:
        """Advance store time while no other process does, as when nobody leads (S4)."""
        try:
            while self._pace.ticks:
                await asyncio.sleep(self._pace.wait_s())
                answer = await self._write("tick")
                self._pace.ticked(answer.age_s)
        except (StoreError, ConfigError) as error:
            # The next answer of the store says whether this process must tick again.
            log.debug("store time is not advanced for now: %s", error)
            self._pace.ticks = False
        finally:
            self._ticking = None

    # watches

    def wait(self, watch: _Watch) -> None:
        """A watch has seen all commits; call its `changed` when there are new ones."""
        self._check_open()
        self._watches[watch] = None
        if self._following is None:
            self._tail.clear()
            self._following = self._tasks.spawn(self._follow())

    def leave(self, watch: _Watch) -> None:
        """A watch no longer waits."""
        self._watches.pop(watch, None)

    async def entries_after(self, revision: int, generation: int) -> tuple[Sequence[LogEntry], int]:
        """Commits after a revision, read from the server."""
        self._check_open()
        return await self._calls.entries_after(revision, PAGE, generation)

    def recent(self, prefix: bytes, seen: int, generation: int) -> WatchedEntries | None:
        """Commits after a revision, if all of them are known here."""
        current = generation == self._calls.generation
        return self._tail.after(prefix, seen) if current else None

    async def _follow(self) -> None:
        """Wait for new commits until no watch has waited for a while."""
        task = asyncio.current_task()
        try:
            async with self.server.listen() as connection:
                await self._begin_tail()
                quiet = False
                while not (quiet and not self._watches):
                    quiet = not await self._hear(connection)
                # Before the connection is closed: a watch that comes now needs another task.
                self._following = None
        except StoreError as error:
            self._meter.count("store.watches_broken", len(self._watches))
            self._break(error)
        except Exception as error:
            # A watch that nobody wakes would wait for ever.
            log.exception("the log of the store %s can't be followed", self.address.shown)
            self._break(StoreUnavailable(f"the log can't be followed ({error}); it is asked again"))
        finally:
            if self._following is task:
                self._following = None

    async def _hear(self, connection: Any) -> bool:
        """Take the commits that come within `BLOCK_S`; False if there were none."""
        block_ms, after = round(BLOCK_S * 1000), f"{self._tail.upto}-0"
        async with asyncio.timeout(BLOCK_S + self._op_timeout_s):
            await connection.send_command(
                "XREAD", "COUNT", PAGE, "BLOCK", block_ms, "STREAMS", self.address.keys[6], after,
                check_health=False,
            )  # fmt: skip
            raw: Any = await connection.read_response()
        if raw is None:
            # Commits of another history might never be reported: their numbers may be lower.
            await self.state()
            return False
        for entry in [entry_of(*each) for each in raw[0][1]]:
            if not self._tail.add(entry):
                # XREAD says nothing of trimming, nor of another history.
                await self._begin_tail()
                break
        self._wake()
        return True

    async def _begin_tail(self) -> None:
        answer = await self.state()
        self._tail.begin(answer.revision, answer.tag)
        self._wake()

    def _wake(self) -> None:
        for watch in tuple(self._watches):
            watch.changed()

    def _break(self, error: StoreError) -> None:
        for watch in tuple(self._watches):
            watch.break_off(error)

    def _went_back(self, error: StoreRewound) -> None:
        self._meter.count("store.rewound")
        self._break(error)
        self._tail.clear()
        following, self._following = self._following, None
        if following is not None and following is not asyncio.current_task():
            following.cancel()


class WatchedEntries(NamedTuple):
    """Changes under a prefix, and the revision up to which they are all."""

    changes: Sequence[Changes]
    upto: int
    more: bool = False
    """Whether the server had more commits than were read at once."""


class LogTail:
    """The newest commits of one history, without a gap."""

    def __init__(self) -> None:
        self.upto = -1
        self._since = 0
        self._tag: str = ""
        self._bytes = 0
        self._entries: deque[LogEntry] = deque()

    def clear(self) -> None:
        """Know nothing."""
        self.begin(-1, "")

    def begin(self, revision: int, tag: str) -> None:
        """Know all commits after this revision."""
        self.upto = self._since = revision
        self._tag, self._bytes = tag, 0
        self._entries.clear()

    def add(self, entry: LogEntry) -> bool:
        """Take the next commit; False if it does not follow the last one."""
        if entry.changes.revision != self.upto + 1 or entry.before != self._tag:
            return False
        self._entries.append(entry)
        self.upto, self._tag = entry.changes.revision, entry.tag
        self._bytes += entry.size_bytes
        while len(self._entries) > TAIL_COMMITS or self._bytes > TAIL_BYTES:
            oldest = self._entries.popleft()
            self._bytes -= oldest.size_bytes
            self._since = oldest.changes.revision
        return True

    def after(self, prefix: bytes, seen: int) -> WatchedEntries | None:
        """All changes under a prefix after a revision; None if they are not all known."""
        if not self._since <= seen <= self.upto:
            return None
        # Revisions have no gap, so a watch that is behind by three looks at three commits.
        newer = len(self._entries) - (self.upto - seen)
        entries = [self._entries[n] for n in range(newer, len(self._entries))]
        return WatchedEntries(_under(prefix, entries), self.upto)


def _under(prefix: bytes, entries: Sequence[LogEntry]) -> list[Changes]:
    found: list[Changes] = []
    for entry in entries:
        inside = [change for change in entry.changes.changes if change.key.startswith(prefix)]
        if inside:
            found.append(Changes(entry.changes.revision, tuple[Change, ...](inside)))
    return found


class _Watch:
    """An iterator without a task: commits that it has not seen stay in the server's log."""

    def __init__(self, store: RedisStore, prefix: bytes, seen: int, generation: int) -> None:
        self._store = store
        self._prefix = prefix
        self._seen = seen
        self._generation = generation
        self._found: deque[Changes] = deque()
        self._follows = False
        self._missed = False
        self._error: StoreError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._read = False

    def __aiter__(self) -> AsyncIterator[Changes]:
        return self

    async def __anext__(self) -> Changes:
        if self._read:
            raise RuntimeError("this watch is already being read; start a second watch instead")
        self._read = True
        try:
            while not self._found:
                await self._look()
        finally:
            self._read = False
        found = self._found.popleft()
        self._seen = found.revision
        return found

    async def _look(self) -> None:
        """Take new commits; if there are none, wait until there may be some."""
        self._check()
        self._missed = False
        self._store.wait(self)
        try:
            # The first time from the server, which knows which commits it has forgotten.
            found = self._recent() if self._follows else None
            if found is None:
                entries, upto = await self._store.entries_after(self._seen, self._generation)
                changes = _under(self._prefix, entries)
                found = WatchedEntries(changes, upto, len(entries) >= PAGE)
                self._follows = True
            if not found.changes:
                self._seen = max(self._seen, found.upto)
                if not (found.more or self._missed or self._error):
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        except StoreError as error:
            self._error = self._error or error
            raise
        finally:
            self._waiter = None
            self._store.leave(self)
        self._check()
        if found.changes:
            self._found.extend(found.changes)

    def _recent(self) -> WatchedEntries | None:
        return self._store.recent(self._prefix, self._seen, self._generation)

    def _check(self) -> None:
        if self._error is not None:
            # A new object each time: raising one twice would chain its tracebacks.
            raise type(self._error)(*self._error.args)

    def changed(self) -> None:
        """Continue if new commits concern this watch; otherwise they count as seen."""
        if self._waiter is None:
            self._missed = True
            return
        if self._waiter.done():
            return
        found = self._recent()
        if found is None or found.changes:
            self._waiter.set_result(None)
        else:
            self._seen = found.upto

    def break_off(self, error: StoreError) -> None:
        """End with an error, now and at every later call. Commits that were found are dropped: they
        belong to a lost history (S5), or the next watch finds them again."""
        self._error = error
        self._found.clear()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _ttl(answer: ScriptAnswer) -> float:
    return ttl_s(answer.results[0])
