"""The store and the journal as a simulated process sees them: servers behind a faulty network.

Built by the simulator's servers. Nothing here may touch a server's state other than through its
port.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from domicile.core.ids import EntityKey, ShardKey
from domicile.core.state.txn import Changes, Condition, Item, Listing, Outcome, Unknown, Write
from domicile.errors import StoreError, StoreRewound, StoreUnavailable
from domicile.ports.journal import (
    SCAN_BYTES,
    Batch,
    Claim,
    ClaimAnswer,
    EventPage,
    Journal,
    JournalUnknown,
    Recovered,
    Remembered,
    StoredReply,
    Wanted,
    WriteRefused,
    Written,
)
from domicile.ports.store import Store, writes_one_key
from domicile.testing.sim.calls import OP_TIMEOUT_S, Faults, Wire
from domicile.testing.sim.loop import SimLoop, World

T = TypeVar("T")

WATCH_WINDOW = 1_000
"""Batches under way to a caller that takes none; one more breaks the watch (I6)."""


class RemoteStore:
    """A process's way to a store. Implements `Store`; what gets lost shows as the port says.

    It knows which history it speaks of. Once it has heard that the store has another one, its
    watches end with `StoreRewound` and what is called afterwards belongs to the new one (S5);
    `renew_face` gives it a backend of that.
    """

    def __init__(
        self,
        world: World,
        loop: SimLoop,
        server: SimLoop,
        backend: Store,
        faults: Faults,
        *,
        op_timeout_s: float = OP_TIMEOUT_S,
        may_wait: bool = True,
        renew_face: Callable[[], Store] | None = None,
    ) -> None:
        self._wire = Wire(world, loop, server, faults, op_timeout_s, may_wait)
        self._backend = backend
        self._renew_face = renew_face
        self._watches: dict[RemoteWatch, None] = {}
        self._closed = False

    @property
    def one_key(self) -> bool:
        """As `MayWriteOneKey.one_key`."""
        return writes_one_key(self._backend)

    async def get(self, key: bytes) -> Item | None:
        """As `Store.get`."""
        return await self._call(partial(self._backend.get, key))

    async def list(self, prefix: bytes) -> Listing:
        """As `Store.list`."""
        return await self._call(partial(self._backend.list, prefix))

    async def commit(self, conditions: Sequence[Condition], writes: Sequence[Write]) -> Outcome:
        """As `Store.commit`."""
        self._check_open()
        # The request is what was asked at the time of the call, whatever the caller does next.
        commit = partial(self._backend.commit, tuple(conditions), tuple(writes))
        backend = self._backend
        try:
            return await self._wire.call(commit)
        except TimeoutError:
            return Unknown()
        except StoreRewound as error:
            self._rewound(backend, error)
            raise

    async def grant(self, lease: str, ttl_s: float) -> float:
        """As `Store.grant`."""
        return await self._call(partial(self._backend.grant, lease, ttl_s))

    async def renew(self, lease: str) -> float | None:
        """As `Store.renew`."""
        return await self._call(partial(self._backend.renew, lease))

    async def revoke(self, lease: str) -> None:
        """As `Store.revoke`."""
        await self._call(partial(self._backend.revoke, lease))

    def watch(self, prefix: bytes, from_revision: int) -> AsyncIterator[Changes]:
        """As `Store.watch`."""
        self._check_open()
        source = partial(self._backend.watch, prefix, from_revision)
        heard = partial(self._rewound, self._backend)
        return RemoteWatch(self._wire, source, self._watches, heard)

    async def close(self) -> None:
        """End the watches and refuse further calls."""
        self._closed = True
        for watch in tuple(self._watches):
            watch.break_off("the store client was closed")

    async def _call(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._check_open()
        backend = self._backend
        try:
            return await self._wire.call(start)
        except TimeoutError:
            raise StoreUnavailable(
                f"the store did not answer {self._wire.loop.name} within "
                f"{self._wire.op_timeout_s} s; try again"
            ) from None
        except StoreRewound as error:
            self._rewound(backend, error)
            raise

    def _rewound(self, backend: Store, error: StoreRewound) -> None:
        """The first to hear of it sees to it that all do."""
        if self._renew_face is not None and self._backend is backend:
            self._backend = self._renew_face()
            for watch in tuple(self._watches):
                watch.end(error)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable(
                f"the store client of {self._wire.loop.name} is closed; make another one"
            )


class RemoteWatch:
    """A watch whose batches cross the network in order. Broken once, it stays broken."""

    def __init__(
        self,
        wire: Wire,
        source: Callable[[], AsyncIterator[Changes]],
        standing: dict[RemoteWatch, None],
        rewound: Callable[[StoreRewound], None],
    ) -> None:
        self._wire = wire
        self._source = source
        self._standing = standing
        self._rewound = rewound
        self._started = False
        self._silent = False
        self._broken = False
        self._pump: asyncio.Task[None] | None = None
        self._last_arrival = 0.0
        self._under_way = 0
        self._arrived: deque[Changes] = deque()
        self._error: StoreError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> AsyncIterator[Changes]:
        return self

    async def __anext__(self) -> Changes:
        if self._waiter is not None:
            raise RuntimeError("this watch is already being read; start a second watch instead")
        if not self._started:
            self._start()
        while not self._arrived:
            if self._error is not None:
                # A new object each time: raising one twice would chain its tracebacks.
                raise type(self._error)(*self._error.args)
            self._waiter = self._wire.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._under_way -= 1
        return self._arrived.popleft()

    def silence(self) -> None:
        """Nothing arrives any more; the caller notices after a while."""
        if not self._silent:
            self._silent = True
            self._stop_pump()
            world = self._wire.world
            world.call_at(
                world.now + self._wire.op_timeout_s,
                partial(self._wire.loop.post, partial(self._fail, _lost("it fell silent"))),
            )

    def break_off(self, why: str) -> None:
        """Nothing arrives any more, and the caller learns it now."""
        self._silent = self._broken = True
        self._stop_pump()
        self._arrived.clear()
        self._wire.loop.post(partial(self._fail, _lost(why)))

    def end(self, error: StoreError) -> None:
        """What is under way to it is dropped, and this is what its caller learns."""
        self._arrived.clear()
        self._fail(error)

    def _start(self) -> None:
        self._started = True
        self._standing[self] = None
        self._wire.faults.opened(self)
        if not self._wire.request(self._open):
            self.silence()

    # In the server's process.

    def _open(self) -> None:
        if not self._silent:
            self._pump = self._wire.server.create_task(self._serve())

    async def _serve(self) -> None:
        try:
            async for changes in self._source():
                if self._wire.loop.dead or self._under_way == WATCH_WINDOW:
                    break
                self._under_way += 1
                self._send(partial(self._arrive, changes))
            self._send(partial(self._fail, _lost("the server gave it up")))
        except StoreError as error:
            self._send(partial(self._fail, error))

    def _send(self, arrive: Callable[[], object]) -> None:
        # Never before an earlier batch: a watch keeps order, whatever the delays.
        world = self._wire.world
        at = max(self._last_arrival, world.now + self._wire.faults.watch_delay())
        self._last_arrival = at
        world.call_at(at, partial(self._deliver, arrive))

    def _deliver(self, arrive: Callable[[], object]) -> None:
        if not self._silent:
            self._wire.loop.post(arrive)

    def _stop_pump(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
            self._pump = None

    # In the caller's process.

    def _arrive(self, changes: Changes) -> None:
        if not self._broken:
            self._arrived.append(changes)
            self._wake()

    def _fail(self, error: StoreError) -> None:
        if self._error is None:
            self._silent = self._broken = True
            self._stop_pump()
            self._error = error
            self._standing.pop(self, None)
            self._wire.faults.closed(self)
            self._wake()
            if isinstance(error, StoreRewound):
                self._rewound(error)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _lost(why: str) -> StoreUnavailable:
    return StoreUnavailable(f"the watch was lost: {why}; resume from the last revision seen")


class RemoteJournal:
    """A process's way to a journal. Implements `Journal`; what gets lost is `JournalUnknown`."""

    def __init__(
        self,
        world: World,
        loop: SimLoop,
        server: SimLoop,
        backend: Journal,
        faults: Faults,
        *,
        op_timeout_s: float = OP_TIMEOUT_S,
    ) -> None:
        self._wire = Wire(world, loop, server, faults, op_timeout_s)
        self._backend = backend

    async def claim(self, claims: Sequence[Claim], *, wait: bool = True) -> Sequence[ClaimAnswer]:
        """As `Journal.claim`."""
        return await self._call(partial(self._backend.claim, tuple(claims), wait=wait))

    async def write(self, batch: Batch) -> Sequence[Written | WriteRefused]:
        """As `Journal.write`."""
        return await self._call(partial(self._backend.write, batch))

    async def settle(self, batch: Batch) -> Sequence[Written | WriteRefused | None]:
        """As `Journal.settle`."""
        return await self._call(partial(self._backend.settle, batch))

    async def recover(self, wanted: Sequence[Wanted], max_bytes: int) -> Sequence[Recovered]:
        """As `Journal.recover`."""
        return await self._call(partial(self._backend.recover, tuple(wanted), max_bytes))

    async def inbox(self, asked: Sequence[tuple[EntityKey, str]]) -> Sequence[StoredReply | None]:
        """As `Journal.inbox`."""
        return await self._call(partial(self._backend.inbox, tuple(asked)))

    async def scan(
        self, shard: ShardKey, after: int, limit: int, max_bytes: int = SCAN_BYTES
    ) -> EventPage:
        """As `Journal.scan`."""
        return await self._call(partial(self._backend.scan, shard, after, limit, max_bytes))

    async def remembered(
        self, shard: ShardKey, after: Remembered | None, limit: int
    ) -> Sequence[Remembered]:
        """As `Journal.remembered`."""
        return await self._call(partial(self._backend.remembered, shard, after, limit))

    async def history(self) -> str:
        """As `Journal.history`."""
        return await self._call(self._backend.history)

    async def close(self) -> None:
        """Nothing to let go of."""

    async def _call(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return await self._wire.call(start)
        except TimeoutError:
            raise JournalUnknown(
                f"the journal did not answer {self._wire.loop.name} within "
                f"{self._wire.op_timeout_s} s; settle a batch"
            ) from None
