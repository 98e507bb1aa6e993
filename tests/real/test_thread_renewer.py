"""Renewal in a thread beside the loop, against a store whose every answer a test decides."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import pytest
from member_lab import Tampered

from domicile.core.ids import Incarnation
from domicile.core.lease.lease import LeaseState
from domicile.core.state.cluster_view import ViewChange
from domicile.core.state.keys import node_key
from domicile.core.state.records import ClientRecord, NodeRecord, decode_record, encode_record
from domicile.core.state.txn import At, Changes, Committed, Conflict, Item, Listing, Outcome, Put
from domicile.errors import StoreRewound, StoreUnavailable
from domicile.membership.clock import SystemClock
from domicile.membership.member import Member
from domicile.membership.record_kinds import ProcessRecord, kind_of, marked_leaving
from domicile.membership.thread_renewer import ThreadRenewer
from domicile.ports.store import Kept, ThreadedStore
from domicile.settings import Settings
from domicile.stores.memory.store import MemoryStore

ME = Incarnation("a" * 32)
KEY = node_key(ME)
SHORT = Settings(ttl_s=2.0)
WAIT_S = 60.0


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 2 * WAIT_S))


def wait_here(condition: Callable[[], bool]) -> None:
    """Block the calling thread, the loop's own, until another thread has done something."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.002)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - another thread makes it true
            await asyncio.sleep(0.002)


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("domicile-node-")]


def in_a_fork(count: Callable[[], int]) -> int:
    """What a forked child finds."""
    child = os.fork()
    if child == 0:
        os._exit(count())
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


class Side:
    """Implements `ThreadedStore`. Answers at once with what the store holds, or as a test says."""

    def __init__(self, store: Held) -> None:
        self.store = store
        self.asked = 0
        self.rewrites: list[tuple[int, bool]] = []
        self.pending: list[Future[Kept]] | None = None
        """Set: nothing is answered, but by the test."""
        self.answer: Callable[[], Kept] = self.found
        self.loses = 0
        """How many rewrites lose against somebody else's."""

    def found(self) -> Kept:
        return Kept(SHORT.ttl_s, self.store.item)

    def keep(self, lease: str, key: bytes) -> Future[Kept]:
        assert (lease, key) == (f"node-{ME}", KEY)
        assert threading.current_thread() is not threading.main_thread()
        self.asked += 1
        future: Future[Kept] = Future()
        if self.pending is not None:
            self.pending.append(future)
            return future
        try:
            future.set_result(self.answer())
        except Exception as error:
            future.set_exception(error)
        return future

    def rewrite(self, key: bytes, revision: int, value: bytes, lease: str) -> Future[Outcome]:
        item = self.store.item
        assert item is not None
        future: Future[Outcome] = Future()
        if self.loses:
            self.loses -= 1
            self.store.item = Item(KEY, item.value, item.created, item.revision + 1)
            future.set_result(Conflict(key))
        elif item.revision != revision:
            future.set_result(Conflict(key))
        else:
            self.store.item = Item(KEY, value, item.created, revision + 1)
            self.rewrites.append((revision, decode_record(value, NodeRecord).stalled))
            future.set_result(Committed(revision + 1))
        return future


class Held(Tampered):
    """A store that can be asked from beside the loop; there it shows `item` as the record.

    The leases themselves are of no account: here they run on.
    """

    item: Item | None = None
    sides = 0

    async def grant(self, lease: str, ttl_s: float) -> float:
        await self.target.grant(lease, 600.0)
        return ttl_s

    def beside(self, prefix: bytes = b"") -> ThreadedStore | None:
        assert prefix == b""
        self.sides += 1
        return self.side

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store.client("n"))
        self.side = Side(self)


class Counts:
    """A meter for one loop: it must not be counted on by other threads."""

    def __init__(self) -> None:
        self.home = threading.get_ident()
        self.totals: Counter[str] = Counter()
        self.events: list[tuple[str, dict[str, Any]]] = []

    def count(self, name: str, value: int = 1) -> None:
        assert threading.get_ident() == self.home
        self.totals[name] += value

    def event(self, kind: str, /, **fields: Any) -> None:
        self.events.append((kind, fields))


@dataclass
class Process:
    """One member, and what it said."""

    settings: Settings = SHORT
    record: NodeRecord | ClientRecord | None = None
    turns: bool = True
    fenced: list[tuple[int, str]] = field(default_factory=list)
    renewed: int = 0

    def __post_init__(self) -> None:
        self.clock = SystemClock()
        self.meter = Counts()
        self.store = Held(MemoryStore(self.clock))
        self.turned_at = self.clock.now()
        record = self.record or NodeRecord("n", ME, "n:1", ("r",), (), self.settings.ttl_s)
        self.member = Member(
            store=self.store,
            clock=self.clock,
            meter=self.meter,
            settings=self.settings,
            random=Random(1),
            record=record,
            kind=kind_of(record),
            shards={} if self.record else {"r": 4},
            events=self,
            turned_at=self._turned_at,
        )

    def _turned_at(self) -> float:
        if self.turns:
            self.turned_at = self.clock.now()
        return self.turned_at

    def on_fact(self, fact: ViewChange) -> None: ...

    def on_listing(self, listing: Listing) -> None: ...

    def on_changes(self, changes: Changes) -> None: ...

    def on_renewed(self) -> None:
        self.renewed += 1

    def on_fenced(self, reason: str) -> None:
        self.fenced.append((threading.get_ident(), reason))

    @asynccontextmanager
    async def running(self, steps: int = 5) -> AsyncIterator[asyncio.Task[None]]:
        assert await self.member.join()
        self.store.item = await self.store.get(self.member._key)
        task = asyncio.ensure_future(self.member.run())
        for _ in range(steps):
            await asyncio.sleep(0)
        try:
            yield task
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            assert not threads(), "no thread outlives its member"


@pytest.fixture
def process() -> Process:
    return Process()


def test_a_blocked_loop_is_renewed_on(process: Process) -> None:
    async def main() -> None:
        async with process.running():
            await wait_until(lambda: process.store.side.asked > 0)
            asked, began = process.store.side.asked, process.clock.now()
            wait_here(lambda: process.clock.now() > began + 1.5 * SHORT.ttl_s)
            assert process.store.side.asked > asked + 3
            assert process.member.guard()
            assert not process.fenced
            assert process.renewed > 3
            renewals = [fields for kind, fields in process.meter.events if kind == "renewed"]
            assert renewals[-1]["sent_at"] > began + SHORT.ttl_s

    run(main())


def test_a_loop_that_does_not_turn_is_not_renewed_and_loses_its_lease(process: Process) -> None:
    process.settings = Settings(ttl_s=2.0, stall_limit_s=0.5)
    process.__post_init__()

    async def main() -> None:
        process.turns = False
        async with process.running() as running:
            began = process.clock.now()
            wait_here(lambda: process.member.lease.state is LeaseState.FENCED)
            assert process.store.side.asked <= 1
            sent = [fields["sent_at"] for kind, fields in process.meter.events if kind == "renewed"]
            assert process.clock.now() >= sent[-1] + SHORT.ttl_s - SHORT.margin_s
            assert sent[-1] < began + 0.5
            assert not process.member.guard(), "seen by the next guard of a loop that was blocked"
            await running
            assert process.fenced == [(threading.get_ident(), "deadline passed")]
            assert process.meter.totals["lease.stalled"] == 1

    run(main())


def test_a_loop_that_turns_again_in_time_keeps_its_lease(process: Process) -> None:
    process.settings = Settings(ttl_s=4.0, stall_limit_s=0.5)
    process.__post_init__()

    async def main() -> None:
        process.turns = False
        async with process.running():
            await wait_until(lambda: process.meter.totals["lease.stalled"] == 1)
            asked = process.store.side.asked
            process.turns = True
            await wait_until(lambda: process.store.side.asked > asked)
            assert process.member.guard()
            assert not process.fenced

    run(main())


def test_validity_counts_from_the_sending(process: Process) -> None:
    async def main() -> None:
        process.store.side.pending = []
        async with process.running():
            before = process.clock.now()
            await wait_until(lambda: bool(process.store.side.pending))
            after = process.clock.now()
            await asyncio.sleep(0.1)
            (future,) = process.store.side.pending or []
            future.set_result(process.store.side.found())
            await wait_until(lambda: process.renewed == 2)
            sent_at = process.member.lease.valid_until - SHORT.ttl_s + SHORT.margin_s
            assert before <= sent_at <= after

    run(main())


def evicted(process: Process) -> Kept:
    item = process.store.item
    assert item is not None
    record = msgspec.structs.replace(decode_record(item.value, NodeRecord), status="evicted")
    return Kept(2.0, Item(KEY, encode_record(record), item.created, item.revision + 1))


def rewound(process: Process) -> Kept:
    raise StoreRewound("an older file is in its place")


def older(process: Process) -> Kept:
    item = process.store.item
    assert item is not None
    return Kept(2.0, Item(KEY, item.value, item.created, item.revision - 1))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda process: Kept(None, None), "the lease is gone"),
        (lambda process: Kept(2.0, None), "the own record is gone"),
        (lambda process: Kept(2.0, Item(KEY, b"{", 1, 9)), "cannot be read"),
        (evicted, "evicted by the leader"),
        (rewound, "an older file is in its place"),
        (older, "store rewound"),
    ],
)
def test_what_ends_an_incarnation_is_seen_by_the_next_guard_of_a_blocked_loop(
    process: Process, answer: Callable[[Process], Kept], reason: str
) -> None:
    async def main() -> None:
        async with process.running() as running:
            assert process.member.guard()
            process.store.side.answer = lambda: answer(process)
            wait_here(lambda: process.member.lease.state is LeaseState.FENCED)
            assert not process.fenced, "told on the loop only"
            assert not process.member.guard()
            await running
            ((thread, why),) = process.fenced
            assert thread == threading.get_ident()
            assert reason in why
            assert process.member.rewound == (answer in (rewound, older))
            assert process.member.lease.valid_until <= process.clock.now()

    run(main())


def test_an_idle_loop_hears_of_it_without_a_guard(process: Process) -> None:
    async def main() -> None:
        async with process.running() as running:
            process.store.side.answer = lambda: Kept(2.0, None)
            await running
            assert [reason for _, reason in process.fenced] == ["the own record is gone"]

    run(main())


def test_an_answer_that_is_missing_counts_for_nothing(process: Process) -> None:
    async def main() -> None:
        async with process.running() as running:
            process.store.side.pending = []
            await running
            assert [reason for _, reason in process.fenced] == ["deadline passed"]
            assert process.renewed == 1, "the registration's"
            assert process.meter.totals["lease.unacknowledged"] >= 1
            assert len(process.store.side.pending or []) >= 2, "asked again and again"

    run(main())


def test_a_store_that_is_away_is_asked_again(process: Process) -> None:
    async def main() -> None:
        def away() -> Kept:
            raise StoreUnavailable("its disk is full")

        process.store.side.answer = away
        async with process.running():
            await wait_until(lambda: process.meter.totals["lease.unacknowledged"] == 2)
            process.store.side.answer = process.store.side.found
            await wait_until(lambda: process.renewed == 2)
            assert process.member.guard()

    run(main())


def test_what_nobody_expected_costs_a_renewal_and_not_the_lease(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        def broken() -> Kept:
            raise SystemError("bad argument to internal function")

        process.store.side.answer = broken
        async with process.running():
            await wait_until(lambda: process.store.side.asked == 2)
            assert process.renewed == 1, "the registration's"
            process.store.side.answer = process.store.side.found
            await wait_until(lambda: process.renewed == 2)
            assert process.member.guard()
        assert caplog.text.count("it is tried again") == 2

    run(main())


def test_what_nobody_expected_time_and_again_costs_the_lease(process: Process) -> None:
    async def main() -> None:
        def broken() -> Kept:
            raise SystemError("bad argument to internal function")

        async with process.running() as running:
            process.store.side.answer = broken
            await running
            assert [reason for _, reason in process.fenced] == ["deadline passed"]

    run(main())


def test_an_acknowledgement_that_comes_after_a_fence_brings_nothing_back(process: Process) -> None:
    async def main() -> None:
        process.store.side.pending = []
        async with process.running():
            await wait_until(lambda: bool(process.store.side.pending))
            process.member.fence("for a test")
            for future in process.store.side.pending or []:
                future.set_result(process.store.side.found())
            wait_here(lambda: not threads())
            assert process.member.lease.state is LeaseState.FENCED
            assert not process.member.guard()
            assert process.renewed == 1

    run(main())


def test_a_fence_and_an_acknowledgement_at_once_end_fenced() -> None:
    """L5: the thread may be switched between any two of its steps."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(150):
            process = Process()
            member, lease = process.member, process.member.lease
            lease.granted(process.clock.now(), 2.0, process.clock.now())
            member._own_revision = 1
            value = encode_record(member.record)
            over = threading.Event()
            kept = Kept(2.0, Item(KEY, value, 1, 1))

            def renew(
                member: Member[ProcessRecord] = member, kept: Kept = kept, over: Any = over
            ) -> None:
                while not over.is_set():
                    member.kept(SystemClock().now(), kept, 1)

            thread = threading.Thread(target=renew)
            thread.start()
            try:
                while process.renewed < 3:
                    pass
                member.fence("for a test")
                states = [lease.state for _ in range(200)]
            finally:
                over.set()
                thread.join()
            assert {*states, lease.state} == {LeaseState.FENCED}
            assert not lease.valid(process.clock.now())
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("steps", range(12))
def test_cancelled_at_any_point_it_leaves_no_thread(process: Process, steps: int) -> None:
    """Nor does it wait for a store that does not answer."""

    async def main() -> None:
        process.store.side.pending = []
        async with process.running(steps) as running:
            if steps > 6:
                await wait_until(lambda: bool(process.store.side.pending))
            running.cancel()

    run(main())


def test_it_leaves_without_a_thread(process: Process) -> None:
    async def main() -> None:
        async with process.running() as running:
            await wait_until(lambda: process.renewed > 1)
            assert threads() == [f"domicile-node-{ME}"]
            assert await process.member.leave()
            await running
            assert not threads()
            assert not process.fenced

    run(main())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_has_no_such_thread(process: Process) -> None:
    async def main() -> None:
        async with process.running():
            assert threads()
            assert in_a_fork(lambda: len(threads())) == 0

    run(main())


def test_it_says_that_it_stands_still_and_that_it_goes_on(process: Process) -> None:
    async def main() -> None:
        side = process.store.side
        side.loses = 2
        async with process.running():
            process.turns = False
            wait_here(lambda: bool(side.rewrites))
            assert [stalled for _, stalled in side.rewrites] == [True]
            assert process.member.guard()
            process.turns = True
            wait_here(lambda: len(side.rewrites) == 2)
            assert [stalled for _, stalled in side.rewrites] == [True, False]
            record = process.member.record
            assert isinstance(record, NodeRecord)
            wait_here(lambda: process.member.own()[1] == side.rewrites[-1][0] + 1)
            assert not process.fenced

    run(main())


def test_a_record_that_was_read_before_it_was_rewritten_is_no_rewind(process: Process) -> None:
    async def main() -> None:
        side = process.store.side
        side.pending = []
        async with process.running():
            await wait_until(lambda: bool(side.pending))
            answer = side.found()
            record, revision = process.member.own()
            process.member.stands(record, revision + 1)
            (side.pending or []).pop().set_result(answer)
            await wait_until(lambda: process.renewed == 2)
            assert process.member.own()[1] == revision + 1
            assert not process.fenced

    run(main())


def test_the_status_is_rewritten_over_what_the_thread_wrote(process: Process) -> None:
    async def main() -> None:
        async with process.running():
            record, revision = process.member.own()
            assert isinstance(record, NodeRecord)
            stalled = msgspec.structs.replace(record, stalled=True)
            put = Put(KEY, encode_record(stalled), f"node-{ME}")
            outcome = await process.store.commit([At(KEY, revision)], [put])
            assert isinstance(outcome, Committed)
            process.member.stands(stalled, outcome.revision)
            assert await process.member.rewrite(marked_leaving)
            item = await process.store.get(KEY)
            assert item is not None
            stored = decode_record(item.value, NodeRecord)
            assert (stored.status, stored.stalled) == ("leaving", True)

    run(main())


@pytest.mark.parametrize(
    "process",
    [Process(record=ClientRecord(ME)), Process(settings=Settings(fencing="health"))],
    ids=["client", "health"],
)
def test_who_has_no_shards_or_no_lease_needs_no_thread_to_renew(process: Process) -> None:
    process.__post_init__()
    if isinstance(process.member.record, ClientRecord):
        process.member._turned_at = None  # as a client's life does

    async def main() -> None:
        async with process.running():
            await wait_until(lambda: process.renewed >= 1)
            assert not threads()
            assert not process.store.sides

    run(main())


def test_the_loop_makes_room_for_the_thread_all_the_time(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    give_way = ThreadRenewer.give_way

    def counted(renewals: ThreadRenewer) -> float:
        asked.append(threading.get_ident())
        return give_way(renewals)

    monkeypatch.setattr(ThreadRenewer, "give_way", counted)

    async def main() -> None:
        async with process.running():
            await wait_until(lambda: len(asked) >= 3 and process.renewed >= 3)
        assert {*asked} == {threading.get_ident()}, "the loop's own thread"

    run(main())
