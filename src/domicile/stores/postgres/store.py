"""The coordination store in a PostgreSQL database (S1–S7, S10).

`PostgresStore` has two connections: one writes, one reads and hears of commits by NOTIFY. Every
call is one call of a function in the database (`schema`). NOTIFY is a hint, the table of changes is
the truth: a hint that gets lost is made good by the next renewal. Store time advances while it is
asked (S4): the acting coordinator ticks, and clients tick while nobody does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from itertools import groupby
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

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
from domicile.errors import (
    ConfigError,
    DomicileError,
    StoreError,
    StoreRewound,
    StoreUnavailable,
    WatchCompacted,
)
from domicile.ports.findings import Finding
from domicile.ports.meter import Meter, NoMeter
from domicile.ports.store import Kept
from domicile.stores.key_range import above
from domicile.stores.postgres.client import Records, StoreClient, StoreServer
from domicile.stores.postgres.history import KnownPast
from domicile.stores.postgres.schema import (
    CHANNEL,
    COMPACT,
    GET,
    GRANT,
    LIST,
    LOG,
    REVOKE,
)
from domicile.stores.postgres.standby import STALE_S, TICK_S, StandbyTicker, StoreAge
from domicile.stores.threaded import LoopThreadedStore

if TYPE_CHECKING:
    from domicile.postgres.sessions import RawConnection

log = logging.getLogger("domicile")

KEPT_COMMITS = 10_000
BATCH_ROWS = 256
"""About how many changes are read at once."""

PULSE_S = 2.0
"""Seconds without an answer of the store after which a client that watches asks it something."""

AT_ONCE = -1.0
"""As the gap of a tick: whenever the last one was."""


class WatchedRows(NamedTuple):
    """What a watch reads: changes, complete up to a revision, and the newest of the store."""

    changes: tuple[Changes, ...]
    upto: int
    newest: int


class PostgresStore:
    """Implements `domicile.ports.store.Store`. It connects at the first call.

    `shown` is the URL without secrets, for texts. `by` names this process in the log of the store,
    which keeps the newest `kept_commits`. A call ends within about `op_timeout_s`. Commits that
    only concern keys under `unhurried` notify nobody: watches find them with the next commit or
    renewal, in order. With `reads_only` nothing is created, and a read does not fail if this user
    may not end a lease that has expired. Without `creates` tables must be there.
    """

    tick_s = TICK_S
    """As `NeedsTicks.tick_s`."""

    def __init__(
        self,
        url: str,
        *,
        shown: str,
        by: str = "",
        kept_commits: int = KEPT_COMMITS,
        op_timeout_s: float = 5.0,
        meter: Meter | None = None,
        unhurried: bytes = b"",
        reads_only: bool = False,
        creates: bool = True,
    ) -> None:
        if kept_commits < 1:
            raise ValueError(f"kept_commits is {kept_commits}; keep at least one commit")
        if not (isfinite(op_timeout_s) and op_timeout_s > 0):
            raise ValueError(f"op_timeout_s is {op_timeout_s}; it must be above 0")
        self._shown, self._by = shown, by
        self._reads_only, self._op_timeout_s = reads_only, op_timeout_s
        self._meter = NoMeter() if meter is None else meter
        self._server = StoreServer(url, shown, op_timeout_s, creates=creates and not reads_only)
        self._known = KnownPast(shown, self._noticed)
        self._generation = 0
        self._kept_commits, self._unhurried = kept_commits, unhurried
        self._writer: StoreClient | None = None
        self._reader: StoreClient | None = None
        self._standby = StandbyTicker(self._tick_if_stale)
        self._threaded: dict[bytes, tuple[int, LoopThreadedStore]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watches: dict[_Watch, None] = {}
        self._watched = asyncio.Event()
        self._pulse: asyncio.Task[None] | None = None
        self._heard_at = time.monotonic()
        self.hints, self.hinted = 0, 0
        """How often the store was heard of, and the newest revision that it then had."""
        self._closed = False

    async def get(self, key: bytes) -> Item | None:
        """As `Store.get`."""
        (row,) = await self._read(GET, key)
        return None if row["key"] is None else _item(row)

    async def list(self, prefix: bytes) -> Listing:
        """As `Store.list`."""
        state, *rows = await self._read(LIST, prefix, above(prefix))
        return Listing(state["newest"], tuple([_item(row) for row in rows]))

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        """As `Store.commit`. A commit that changes nothing does not raise the revision."""
        outcome = await self._writes().commit(self._generation, conditions, writes)
        if isinstance(outcome, Unknown):
            self._meter.count("store.unknown")
        return outcome

    async def grant(self, lease: str, ttl_s: float) -> float:
        """As `Store.grant`."""
        if not (isfinite(ttl_s) and ttl_s > 0):
            raise ValueError(f"the ttl of lease {lease!r} is {ttl_s} s; it must be above 0")
        await self._writes().ask(self._generation, GRANT, lease, float(ttl_s))
        return float(ttl_s)

    async def renew(self, lease: str) -> float | None:
        """As `Store.renew`. It also finds hints that were lost, and time that stands still."""
        kept, newest, age = await self._reads().keep(self._generation, lease, b"")
        self._heard(newest, age)
        return kept.ttl_s

    async def revoke(self, lease: str) -> None:
        """As `Store.revoke`."""
        await self._writes().ask(self._generation, REVOKE, lease)

    def watch(self, prefix: bytes, from_revision: int) -> AsyncIterator[Changes]:
        """As `Store.watch`."""
        return _Watch(self, prefix, from_revision, self._generation)

    def beside(self, prefix: bytes = b"") -> LoopThreadedStore | None:
        """As `OffersThreads.beside`: one for each prefix and history."""
        self._check_open()
        self._loop = asyncio.get_running_loop()
        generation, threaded = self._threaded.get(prefix, (-1, None))
        if threaded is not None and generation == self._generation:
            return threaded
        if threaded is not None:
            threaded.close()
        generation = self._generation

        def make() -> _LeaseClient:
            return _LeaseClient(self, generation)

        threaded = LoopThreadedStore(make, prefix, f"domicile-store-lease {self._by}")
        self._threaded[prefix] = generation, threaded
        return threaded

    async def tick(self) -> None:
        """As `NeedsTicks.tick`."""
        newest, _ = await self._writes().tick(self._generation, leads=True)
        self._woken(newest)

    async def compact(self, revision: int) -> None:
        """Forget the changes up to a revision: a watch from before it must list again."""
        await self._writes().ask(self._generation, COMPACT, revision)

    async def prepare(self) -> None:
        """Make the tables, or bring them up to date; every first call does it, too."""
        await self._writes().ask(self._generation, GET, b"")

    async def findings(self) -> Sequence[Finding]:
        """As `InspectableStore.findings`, on a session of its own; also where no store is."""
        self._check_open()
        return await self._server.look()

    async def close(self) -> None:
        """Close the connections and end the watches. Leases stay until they expire."""
        self._closed = True
        self._break(StoreUnavailable(f"the store {self._shown} was closed; make another one"))
        for _, threaded in self._threaded.values():
            threaded.close()
        await self._standby.close()
        if self._pulse is not None:
            self._pulse.cancel()
            await asyncio.gather(self._pulse, return_exceptions=True)
        for client in (self._writer, self._reader):
            if client is not None:
                await client.close()

    # for watches

    async def changes(self, prefix: bytes, seen: int, generation: int) -> WatchedRows:
        """The first changes after a revision."""
        state, *rows = await self._read(
            LOG, seen, prefix, above(prefix), BATCH_ROWS, generation=generation
        )
        if seen > state["newest"]:
            raise StoreRewound(
                f"a watch from revision {seen} is ahead of the store {self._shown} at "
                f"{state['newest']}: its history went back; drop what was learned from it and "
                "list again"
            )
        if seen < state["trimmed"]:
            raise WatchCompacted(
                f"changes after revision {seen} are kept only from {state['trimmed'] + 1} on; "
                "list again and watch from the listing's revision"
            )
        commits = groupby(rows, lambda row: int(row["revision"]))
        found = [Changes(revision, tuple(map(_change, group))) for revision, group in commits]
        return WatchedRows(tuple(found), state["upto"], state["newest"])

    def waits(self, watch: _Watch) -> bool:
        """A watch has seen all commits and waits for the next; False: the connection is lost."""
        if self._reader is None or not self._reader.connected:
            return False
        self._watches[watch] = None
        self._watched.set()
        if self._pulse is None:
            self._pulse = asyncio.create_task(self._keep_asking(), name="domicile-store-pulse")
        return True

    def leaves(self, watch: _Watch) -> None:
        """A watch no longer waits."""
        self._watches.pop(watch, None)
        if not self._watches:
            self._watched.clear()

    # inside

    def lease_client(self) -> StoreClient:
        """A client for the thread that renews, made and used on that thread's loop."""
        return self._client(self._server.connect, lambda: None)

    def kept(self, newest: int, age: StoreAge) -> None:
        """The thread that renews has got an answer; called in that thread."""
        self._soon(lambda: self._heard(newest, age, ticks=False))

    @property
    def known(self) -> KnownPast:
        """What is known of the past, for the thread that renews."""
        return self._known

    async def _read(self, sql: str, *values: object, generation: int | None = None) -> Records:
        """Read; if a lease has expired, end it and read again (S3)."""
        generation = self._generation if generation is None else generation
        rows = await self._reads().ask(generation, sql, *values)
        if not rows[0]["due"]:
            return rows
        try:
            await self._writes().tick(generation, leads=False, gap_s=AT_ONCE)
        except (StoreUnavailable, ConfigError):
            if not self._reads_only:
                raise
            return rows
        return await self._reads().ask(generation, sql, *values)

    def _reads(self) -> StoreClient:
        self._check_open()
        if self._reader is None:
            self._loop = asyncio.get_running_loop()
            self._reader = self._client(self._connect_reader, self._lost)
        return self._reader

    def _writes(self) -> StoreClient:
        self._check_open()
        if self._writer is None:
            self._loop = asyncio.get_running_loop()
            self._writer = self._client(self._server.connect, lambda: None)
        return self._writer

    def _client(self, open: Callable[[float], Any], lost: Callable[[], None]) -> StoreClient:
        return StoreClient(
            self._server, self._known, open, lost,
            by=self._by, kept_commits=self._kept_commits, op_timeout_s=self._op_timeout_s,
            unhurried=self._unhurried,
        )  # fmt: skip

    async def _connect_reader(self, left_s: float) -> RawConnection:
        connection = await self._server.connect(left_s)
        try:
            await connection.add_listener(CHANNEL, self._notified)
        except BaseException:
            connection.terminate()
            raise
        connection.add_termination_listener(self._ended)
        return connection

    def _ended(self, connection: object) -> None:
        self._lost()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"the store {self._shown} is closed; make another one")

    def _notified(self, *about: object) -> None:
        self._heard_at = time.monotonic()
        self._woken(int(str(about[-1])))

    def _heard(self, newest: int, age: StoreAge, *, ticks: bool = True) -> None:
        self._heard_at = time.monotonic()
        self._woken(newest)
        if ticks and not self._closed:
            self._standby.saw(age)

    def _woken(self, newest: int) -> None:
        self.hints, self.hinted = self.hints + 1, max(self.hinted, newest)
        for watch in tuple(self._watches):
            watch.changed(newest)

    async def _tick_if_stale(self) -> StoreAge:
        newest, age = await self._writes().tick(self._generation, leads=False)
        self._woken(newest)
        return age

    async def _keep_asking(self) -> None:
        """While watches wait and nothing else asks: find lost hints, and time that stands still."""
        while True:
            await self._watched.wait()
            rest_s = self._heard_at + PULSE_S - time.monotonic()
            if rest_s > 0:
                await asyncio.sleep(rest_s)
                continue
            self._heard_at = time.monotonic()
            # What is wrong is noticed by those who need an answer.
            with suppress(DomicileError):
                newest, age = await self._reads().tick(self._generation, leads=False, gap_s=STALE_S)
                self._heard(newest, age)

    def _lost(self) -> None:
        if self._watches:
            self._break(
                StoreUnavailable(
                    f"the connection to the store {self._shown} was lost; watch again from the "
                    "last revision seen"
                )
            )

    def _noticed(self) -> None:
        """A rewind was noticed, perhaps in another thread."""
        error = StoreRewound(
            f"the store {self._shown} went back to an older state; drop what was learned from it "
            "and list again"
        )
        generation = self._known.generation
        self._soon(lambda: self._rewound(generation, error))

    def _rewound(self, generation: int, error: StoreError) -> None:
        self._generation = max(self._generation, generation)
        self.hinted = 0
        self._meter.count("store.rewound")
        self._break(error)

    def _break(self, error: StoreError) -> None:
        self._meter.count("store.watches_broken", len(self._watches))
        for watch in tuple(self._watches):
            watch.break_off(error)

    def _soon(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not self._loop.is_closed():
                raise


class _Watch:
    """An iterator without a task: commits that it has not seen yet stay in the store's log."""

    def __init__(self, store: PostgresStore, prefix: bytes, seen: int, generation: int) -> None:
        self._store, self._prefix, self._seen = store, prefix, seen
        self._generation = generation
        self._found: deque[Changes] = deque()
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

    @property
    def waits(self) -> bool:
        """Whether it has seen all commits and waits for the next."""
        return self._waiter is not None and not self._waiter.done()

    async def _look(self) -> None:
        """Take new commits; if there are none, wait until there may be some."""
        self._check()
        hints = self._store.hints
        try:
            read = await self._store.changes(self._prefix, self._seen, self._generation)
        except StoreError as error:
            self._error = error
            raise
        self._check()
        self._found.extend(read.changes)
        if read.changes:
            return
        self._seen = max(self._seen, read.upto)
        # There may be more: too much for one read, or hinted at while this watch did not wait.
        hinted = self._store.hints != hints and self._store.hinted > self._seen
        if self._seen >= read.newest and not hinted:
            await self._wait()
            self._check()

    async def _wait(self) -> None:
        if not self._store.waits(self):
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
            self._store.leaves(self)

    def _check(self) -> None:
        if self._error is not None:
            # A new object each time: raising one twice would chain its tracebacks.
            raise type(self._error)(*self._error.args)

    def changed(self, newest: int) -> None:
        """The store has commits up to a revision; they may concern this watch."""
        if newest > self._seen and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def break_off(self, error: StoreError) -> None:
        """End with an error, now and at every later call."""
        self._error = error
        self._found.clear()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _LeaseClient:
    """Implements `LeaseClient`: one connection, on the loop of the thread that renews."""

    def __init__(self, store: PostgresStore, generation: int) -> None:
        self._store, self._generation = store, generation
        self._client = store.lease_client()
        self._standby = StandbyTicker(self._tick)

    async def keep(self, lease: str, key: bytes) -> Kept:
        kept, newest, age = await self._client.keep(self._generation, lease, key)
        self._store.kept(newest, age)
        self._standby.saw(age)
        return kept

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        return await self._client.commit(self._generation, conditions, writes)

    async def close(self) -> None:
        await self._standby.close()
        await self._client.close()

    async def _tick(self) -> StoreAge:
        _, age = await self._client.tick(self._generation, leads=False)
        return age


def _change(row: Any) -> Change:
    return Change(row["key"], None if row["value"] is None else _item(row))


def _item(row: Any) -> Item:
    return Item(row["key"], row["value"], row["created"], row["revision"])
