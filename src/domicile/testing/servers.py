"""The store and the journal as a simulated process sees them: servers behind a faulty network.

A call travels to the server, runs there as a task of the server's process, and its answer
travels back: a caller that crashes, freezes or gives up does not stop what it asked for. Built
by the simulator; nothing here may touch a server's state other than through its port.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from random import Random
from typing import Any, TypeVar

from domicile.core.ids import EntityKey
from domicile.core.txn import Changes, Condition, Item, Listing, Outcome, Unknown, Write
from domicile.errors import StoreError, StoreUnavailable
from domicile.persist.memory import MemoryJournal
from domicile.ports.journal import (
    Append,
    Appended,
    Claim,
    Journal,
    JournalUnknown,
    Refusal,
    Stored,
)
from domicile.ports.meter import Meter
from domicile.ports.store import Store
from domicile.stores.memory import MemoryStore
from domicile.testing.clock import SimClock
from domicile.testing.loop import SimLoop, SimulationError, World

T = TypeVar("T")

OP_TIMEOUT_S = 1.5
WATCH_WINDOW = 1_000
"""Batches under way to a caller that takes none; one more breaks the watch (I6)."""


class Faults:
    """What the network between one process and one server does now. Change it at any time.

    `delay_s` is the range of each way's delay, `slow` multiplies it, `watch_delay_s` is a range
    added for watches. `lost_request`, `lost_reply` and `late_request` are probabilities of each
    call; a late request arrives after its caller has given it up.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._cut = False
        self._watches: dict[_RemoteWatch, None] = {}
        self.delay_s = (0.0002, 0.001)
        self.watch_delay_s = (0.0, 0.0)
        self.slow = 1.0
        self.lost_request = 0.0
        self.lost_reply = 0.0
        self.late_request = 0.0

    @property
    def cut(self) -> bool:
        """Nothing passes either way. Watches that stand when it begins never recover."""
        return self._cut

    @cut.setter
    def cut(self, cut: bool) -> None:
        self._cut = cut
        if cut:
            for watch in tuple(self._watches):
                watch.silence()

    def break_watch(self) -> None:
        """Every watch raises `StoreUnavailable` now; what was under way to it is dropped."""
        for watch in tuple(self._watches):
            watch.break_off("its connection was reset")

    def delay(self) -> float:
        """A delay for one way of a call."""
        low, high = self.delay_s
        return (low + (high - low) * self._random.random()) * self.slow

    def request_delay(self) -> float:
        """A delay for a call's way to the server; sometimes longer than its caller waits (S1)."""
        if self.late_request > 0 and self._random.random() < self.late_request:
            return self.delay() + OP_TIMEOUT_S * (1 + self._random.random())
        return self.delay()

    def watch_delay(self) -> float:
        """A delay for one batch of a watch."""
        low, high = self.watch_delay_s
        return self.delay() + (low + (high - low) * self._random.random()) * self.slow

    def loses_request(self) -> bool:
        """Whether a request that is sent now gets lost."""
        return self._cut or (self.lost_request > 0 and self._random.random() < self.lost_request)

    def loses_reply(self) -> bool:
        """Whether a reply that is sent now gets lost."""
        return self._cut or (self.lost_reply > 0 and self._random.random() < self.lost_reply)

    def opened(self, watch: _RemoteWatch) -> None:
        """A watch stands from now on."""
        self._watches[watch] = None

    def closed(self, watch: _RemoteWatch) -> None:
        """A watch ended."""
        self._watches.pop(watch, None)


class _Wire:
    """The way from one process to one server and back."""

    def __init__(
        self,
        world: World,
        loop: SimLoop,
        server: SimLoop,
        faults: Faults,
        op_timeout_s: float,
        may_wait: bool = True,
    ) -> None:
        self.may_wait = may_wait
        self.world = world
        self.loop = loop
        self.server = server
        self.faults = faults
        self.op_timeout_s = op_timeout_s

    async def call(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the server answers; `TimeoutError` if nothing came back in time."""
        answer: asyncio.Future[T] = self.loop.create_future()
        timer = self.loop.call_later(self.op_timeout_s, _fail, answer, TimeoutError())
        self.request(partial(self._run, start, answer))
        try:
            return await answer
        finally:
            timer.cancel()

    def request(self, arrive: Callable[[], object]) -> bool:
        """Have the server's process do something, if the network lets it through."""
        if self.faults.loses_request():
            return False
        at = self.world.now + self.faults.request_delay()
        self.world.call_at(at, partial(self._deliver, arrive))
        return True

    def _deliver(self, arrive: Callable[[], object]) -> None:
        if self.faults.cut:
            return
        if self.may_wait:
            self.server.post(arrive)
        else:
            arrive()

    def _run(self, start: Callable[[], Coroutine[Any, Any, T]], answer: asyncio.Future[T]) -> None:
        if not self.may_wait:
            self._run_at_once(start(), answer)
            return
        task = self.server.create_task(start())
        task.add_done_callback(partial(self._done, answer))

    def _run_at_once(self, work: Coroutine[Any, Any, T], answer: asyncio.Future[T]) -> None:
        """Without a task: the work of this server never waits for anything."""
        try:
            work.send(None)
        except StopIteration as stop:
            self._reply(partial(_settle, answer, stop.value))
        except Exception as error:
            self._reply(partial(_fail, answer, error))
        else:
            work.close()
            raise SimulationError("a call of this server waited; say may_wait=True")

    def _done(self, answer: asyncio.Future[T], task: asyncio.Task[T]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._reply(partial(_settle, answer, task.result()))
        else:
            self._reply(partial(_fail, answer, error))

    def _reply(self, settle: Callable[[], object]) -> None:
        if not self.faults.loses_reply():
            self.world.call_at(self.world.now + self.faults.delay(), partial(self._return, settle))

    def _return(self, settle: Callable[[], object]) -> None:
        if not self.faults.cut:
            self.loop.post(settle)


def _settle(answer: asyncio.Future[T], value: T) -> None:
    if not answer.done():
        answer.set_result(value)


def _fail(answer: asyncio.Future[Any], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)


class RemoteStore:
    """A process's way to a store. Implements `Store`; what gets lost shows as the port says."""

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
    ) -> None:
        self._wire = _Wire(world, loop, server, faults, op_timeout_s, may_wait)
        self._backend = backend
        self._watches: dict[_RemoteWatch, None] = {}
        self._closed = False

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
        try:
            return await self._wire.call(commit)
        except TimeoutError:
            return Unknown()

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
        return _RemoteWatch(self._wire, source, self._watches)

    async def close(self) -> None:
        """End the watches and refuse further calls."""
        self._closed = True
        for watch in tuple(self._watches):
            watch.break_off("the store client was closed")

    async def _call(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._check_open()
        try:
            return await self._wire.call(start)
        except TimeoutError:
            raise StoreUnavailable(
                f"the store did not answer {self._wire.loop.name} within "
                f"{self._wire.op_timeout_s} s; try again"
            ) from None

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable(
                f"the store client of {self._wire.loop.name} is closed; make another one"
            )


class _RemoteWatch:
    """A watch whose batches cross the network in order. Broken once, it stays broken."""

    def __init__(
        self,
        wire: _Wire,
        source: Callable[[], AsyncIterator[Changes]],
        standing: dict[_RemoteWatch, None],
    ) -> None:
        self._wire = wire
        self._source = source
        self._standing = standing
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
        self._wire = _Wire(world, loop, server, faults, op_timeout_s)
        self._backend = backend

    async def claim(self, claim: Claim) -> Refusal | None:
        """As `Journal.claim`."""
        return await self._call(partial(self._backend.claim, claim))

    async def append(self, claim: Claim, append: Append) -> Appended | Refusal:
        """As `Journal.append`."""
        return await self._call(partial(self._backend.append, claim, append))

    async def appended(self, claim: Claim, append_id: str) -> Appended | None:
        """As `Journal.appended`."""
        return await self._call(partial(self._backend.appended, claim, append_id))

    async def read(self, entity: EntityKey) -> tuple[bytes, ...]:
        """As `Journal.read`."""
        return await self._call(partial(self._backend.read, entity))

    async def inbox(self, entity: EntityKey, key: str) -> Stored | None:
        """As `Journal.inbox`."""
        return await self._call(partial(self._backend.inbox, entity, key))

    async def close(self) -> None:
        """Nothing to let go of."""

    async def _call(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return await self._wire.call(start)
        except TimeoutError:
            raise JournalUnknown(
                f"the journal did not answer {self._wire.loop.name} within "
                f"{self._wire.op_timeout_s} s; look a write up by its append id"
            ) from None


class Servers:
    """A store and a journal in processes of their own, reporting to one meter."""

    def __init__(self, world: World, meter: Meter) -> None:
        self._world = world
        self._pauses = world.stream("journal pauses")
        self._stall: tuple[float, Callable[[], None]] | None = None
        self.store_loop = world.process("store")
        self.journal_loop = world.process("journal")
        self.store = MemoryStore(SimClock(world, self.store_loop), meter)
        self.journal = MemoryJournal(meter, self._pause)

    def faults(self, name: str) -> Faults:
        """The faults of one process on its way to one server, seeded by that name."""
        return Faults(self._world.stream(f"faults {name}"))

    def remote_store(self, loop: SimLoop, by: str, faults: Faults) -> RemoteStore:
        """The store as a process sees it; `by` names it in `commit` events."""
        store = self.store.client(by)
        return RemoteStore(self._world, loop, self.store_loop, store, faults, may_wait=False)

    def remote_journal(self, loop: SimLoop, faults: Faults) -> RemoteJournal:
        """The journal as a process sees it."""
        return RemoteJournal(self._world, loop, self.journal_loop, self.journal, faults)

    def stall(self, seconds: float, began: Callable[[], None]) -> None:
        """The next write to the journal stands still in the middle of its transaction."""
        self._stall = (seconds, began)

    async def _pause(self) -> None:
        stall, self._stall = self._stall, None
        if stall is None:
            await asyncio.sleep(self._pauses.uniform(0.0001, 0.002))
        else:
            seconds, began = stall
            began()
            await asyncio.sleep(seconds)
