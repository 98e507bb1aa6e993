"""Store and journal behind the simulated network: what gets through, what gets lost, and how."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import pytest

from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.state.txn import MAX_VALUE_BYTES, Changes, Committed, Put, Unknown
from domicile.errors import StoreRewound, StoreUnavailable, WatchCompacted
from domicile.ports.journal import (
    Batch,
    Claim,
    JournalUnknown,
    JournalWrite,
    Recovered,
    StoredReply,
    Wanted,
    Written,
)
from domicile.testing.history import History
from domicile.testing.sim.clock import SimClock
from domicile.testing.sim.loop import SimLoop, World
from domicile.testing.sim.remote import WATCH_WINDOW
from domicile.testing.sim.servers import Servers

CLAIM = Claim(ShardKey("default", 1), 0, 1, Incarnation("a" * 32))
ENTITY = EntityKey("Account", "a")


def one_write(number: int, seq: int, inbox: tuple[tuple[str, bytes | None], ...] = ()) -> Batch:
    return Batch(number, (CLAIM,), (JournalWrite(CLAIM.shard, ENTITY, seq, (b"1",), inbox),))


class Bench:
    """One caller process, one driver process, both servers."""

    def __init__(self, seed: int = 0) -> None:
        self.world = World(seed)
        self.history = History(lambda: self.world.now)
        self.servers = Servers(self.world, self.history)
        self.loop = self.world.process("caller")
        self.faults = self.servers.faults("caller")
        self.store = self.servers.remote_store(self.loop, "caller", self.faults)
        self.journal = self.servers.remote_journal(self.loop, self.faults)
        self.driver = self.world.process("driver")

    async def direct(self, key: bytes, value: bytes = b"") -> int:
        """A commit that crosses no network."""
        outcome = await self.servers.store.client("direct").commit([], [Put(key, value)])
        assert isinstance(outcome, Committed)
        return outcome.revision

    def until(self, moment: float) -> Coroutine[Any, Any, None]:
        return asyncio.sleep(moment - self.world.now)


def run(
    scenario: Callable[[Bench], Coroutine[Any, Any, None]],
    *,
    driven: bool = False,
    seed: int = 0,
) -> Bench:
    """Run a scenario in the caller's process, or in the driver's if it harms the caller."""
    bench = Bench(seed)
    try:
        bench.world.run(scenario(bench), bench.driver if driven else bench.loop)
        assert bench.world.errors == []
    finally:
        bench.world.close()
    return bench


def test_a_call_takes_a_delay_each_way() -> None:
    async def scenario(bench: Bench) -> None:
        start = bench.world.now
        assert await bench.store.commit([], [Put(b"k", b"v")]) == Committed(1)
        assert 0.0004 <= bench.world.now - start <= 0.002
        item = await bench.store.get(b"k")
        assert item is not None
        assert item.value == b"v"
        assert (await bench.store.list(b"")).items == (item,)
        assert await bench.store.grant("l", 3.0) == 3.0
        assert await bench.store.renew("l") == 3.0
        await bench.store.revoke("l")
        assert await bench.store.renew("l") is None
        bench.faults.slow = 100.0
        start = bench.world.now
        await bench.store.get(b"k")
        assert 0.04 <= bench.world.now - start <= 0.2

    run(scenario)


def test_calls_overtake_each_other() -> None:
    orders = set()
    for seed in range(12):

        async def scenario(bench: Bench) -> None:
            async with asyncio.TaskGroup() as tasks:
                for n in range(3):
                    tasks.create_task(bench.store.commit([], [Put(b"%d" % n, b"")]))

        bench = run(scenario, seed=seed)
        orders.add(tuple(event.fields["puts"][0][0] for event in bench.history.of("commit")))
    assert len(orders) > 2


def test_an_error_of_the_server_reaches_the_caller() -> None:
    async def scenario(bench: Bench) -> None:
        with pytest.raises(ValueError, match="MAX_VALUE_BYTES"):
            await bench.store.commit([], [Put(b"k", bytes(MAX_VALUE_BYTES + 1))])

    run(scenario)


def test_a_lost_reply_is_unknown_and_the_commit_happened() -> None:
    async def scenario(bench: Bench) -> None:
        start = bench.world.now
        bench.faults.lost_reply = 1.0
        assert await bench.store.commit([], [Put(b"k", b"v")]) == Unknown()
        assert bench.world.now - start == pytest.approx(1.5)
        with pytest.raises(StoreUnavailable):
            await bench.store.get(b"k")
        bench.faults.lost_reply = 0.0
        assert await bench.store.get(b"k") is not None

    run(scenario)


@pytest.mark.parametrize("fault", ["lost_request", "cut"])
def test_a_lost_request_is_unknown_and_nothing_happened(fault: str) -> None:
    async def scenario(bench: Bench) -> None:
        setattr(bench.faults, fault, True)
        assert await bench.store.commit([], [Put(b"k", b"v")]) == Unknown()
        with pytest.raises(StoreUnavailable, match="did not answer caller"):
            await bench.store.renew("l")
        setattr(bench.faults, fault, False)
        assert await bench.store.get(b"k") is None

    run(scenario)


def test_a_cut_stops_the_reply_that_is_under_way() -> None:
    async def scenario(bench: Bench) -> None:
        bench.faults.delay_s = (0.1, 0.1)
        commit = asyncio.create_task(bench.store.commit([], [Put(b"k", b"v")]))
        await asyncio.sleep(0.15)
        bench.faults.cut = True
        assert await commit == Unknown()
        bench.faults.cut = False
        assert await bench.store.get(b"k") is not None

    run(scenario)


def test_what_a_killed_or_impatient_caller_asked_for_still_happens() -> None:
    async def scenario(bench: Bench) -> None:
        async def impatient() -> None:
            async with asyncio.timeout(0.0001):
                await bench.store.commit([], [Put(b"impatient", b"")])

        async def killed() -> None:
            await bench.store.commit([], [Put(b"killed", b"")])
            raise AssertionError("a dead process hears nothing")

        task = bench.loop.create_task(impatient())
        await asyncio.sleep(0.01)
        assert isinstance(task.exception(), TimeoutError)
        bench.loop.create_task(killed())
        await asyncio.sleep(0.0001)
        bench.loop.kill()
        await asyncio.sleep(1)
        listing = await bench.servers.store.client("direct").list(b"")
        assert [item.key for item in listing.items] == [b"impatient", b"killed"]

    run(scenario, driven=True)


def test_a_frozen_caller_finds_the_answer_before_its_timeout() -> None:
    async def scenario(bench: Bench) -> None:
        task = bench.loop.create_task(bench.store.commit([], [Put(b"k", b"")]))
        await asyncio.sleep(0.0001)
        bench.loop.freeze()
        await asyncio.sleep(60)
        assert not task.done()
        bench.loop.thaw()
        await asyncio.sleep(0.001)
        assert task.result() == Committed(1)

    run(scenario, driven=True)


def test_a_lease_runs_out_in_the_servers_time() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.store.grant("l", 3.0)
        await bench.store.commit([], [Put(b"k", b"", "l")])
        await asyncio.sleep(10)

    bench = run(scenario)
    commit, expire = bench.history.events
    assert expire.kind == "expire"
    assert 2.998 <= expire.at - commit.at <= 3.0


def test_batches_of_a_watch_keep_their_order() -> None:
    async def scenario(bench: Bench) -> None:
        bench.faults.watch_delay_s = (0.0, 0.5)
        watch = bench.store.watch(b"", 0)
        first = asyncio.create_task(following(watch, 100))
        for n in range(100):
            await bench.direct(b"%d" % n)
            await asyncio.sleep(0.001)
        assert [changes.revision for changes in await first] == list(range(1, 101))

    run(scenario)


async def following(watch: Any, count: int) -> list[Changes]:
    return [await anext(watch) for _ in range(count)]


def test_a_broken_watch_raises_at_once_and_resumes_without_a_gap() -> None:
    async def scenario(bench: Bench) -> None:
        bench.faults.delay_s = (0.01, 0.01)
        watch = bench.store.watch(b"", 0)
        await bench.direct(b"1")
        seen = (await anext(watch)).revision
        await bench.direct(b"2")
        await asyncio.sleep(0.001)
        before = bench.world.now
        bench.faults.break_watch()
        with pytest.raises(StoreUnavailable, match="resume"):
            await anext(watch)
        assert bench.world.now == before
        with pytest.raises(StoreUnavailable):
            await anext(watch)
        assert (await anext(bench.store.watch(b"", seen))).revision == seen + 1

    run(scenario)


def test_a_cut_silences_watches_for_good() -> None:
    async def scenario(bench: Bench) -> None:
        watch = bench.store.watch(b"", 0)
        await bench.direct(b"1")
        assert (await anext(watch)).revision == 1
        start = bench.world.now
        bench.faults.cut = True
        await bench.direct(b"2")
        await asyncio.sleep(0.2)
        bench.faults.cut = False
        await bench.direct(b"3")
        with pytest.raises(StoreUnavailable):
            await anext(watch)
        assert bench.world.now == pytest.approx(start + 1.5)
        resumed = bench.store.watch(b"", 1)
        assert [changes.revision for changes in await following(resumed, 2)] == [2, 3]

    run(scenario)


@pytest.mark.parametrize("fault", ["lost_request", "cut"])
def test_a_watch_that_never_reached_the_store_says_so(fault: str) -> None:
    async def scenario(bench: Bench) -> None:
        setattr(bench.faults, fault, True)
        start = bench.world.now
        with pytest.raises(StoreUnavailable):
            await anext(bench.store.watch(b"", 0))
        assert bench.world.now == pytest.approx(start + 1.5)

    run(scenario)


def test_a_compacted_watch_says_so() -> None:
    async def scenario(bench: Bench) -> None:
        for key in (b"1", b"2", b"3"):
            await bench.direct(key)
        bench.servers.store.compact(2)
        with pytest.raises(WatchCompacted):
            await anext(bench.store.watch(b"", 1))
        assert (await anext(bench.store.watch(b"", 2))).revision == 3

    run(scenario)


@pytest.mark.parametrize("watched", [True, False])
def test_a_rewind_is_heard_by_every_watch_whoever_hears_of_it_first(watched: bool) -> None:
    async def scenario(bench: Bench) -> None:
        backup = bench.servers.store.snapshot()
        await bench.direct(b"k")
        watch = bench.store.watch(b"", 1)
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.01)
        if not watched:
            bench.faults.watch_delay_s = (5.0, 5.0)
        bench.servers.store.rewind(backup)
        for _ in range(3):
            await bench.direct(b"l")
        if not watched:
            # The new history is ahead of what was seen of the old one, and still it shows (S5).
            with pytest.raises(StoreRewound):
                await bench.store.get(b"k")
        heard_at = bench.world.now
        with pytest.raises(StoreRewound):
            await waiting
        assert bench.world.now - heard_at < 0.01
        with pytest.raises(StoreRewound):
            await anext(watch)
        assert (await bench.store.list(b"")).revision == 3
        assert (await anext(bench.store.watch(b"", 2))).revision == 3

    run(scenario)


def test_a_commit_that_was_under_way_at_a_rewind_does_not_happen() -> None:
    async def scenario(bench: Bench) -> None:
        bench.faults.delay_s = (0.5, 0.5)
        backup = bench.servers.store.snapshot()
        commit = asyncio.ensure_future(bench.store.commit([], [Put(b"k", b"")]))
        await asyncio.sleep(0.1)
        bench.servers.store.rewind(backup)
        with pytest.raises(StoreRewound):
            await commit
        assert bench.servers.store.peek(b"k") is None

    run(scenario)


@pytest.mark.parametrize("running", [True, False])
def test_an_outage_concerns_every_way_to_the_store_and_later_ones(running: bool) -> None:
    async def scenario(bench: Bench) -> None:
        faults = bench.servers.store_faults("one")
        store = bench.servers.remote_store(bench.loop, "one", faults)
        await store.grant("l", 3.0)
        await store.commit([], [Put(b"k", b"", "l")])
        watch = asyncio.ensure_future(anext(store.watch(b"", 1)))
        await asyncio.sleep(0.01)
        bench.servers.outage(running=running)
        late = bench.servers.remote_store(bench.loop, "two", bench.servers.store_faults("two"))
        for one in (store, late):
            with pytest.raises(StoreUnavailable):
                await one.get(b"k")
        with pytest.raises(StoreUnavailable):
            await watch
        faults.cut = False
        assert faults.cut, "a heal does not bring the store back"
        await asyncio.sleep(3.0)
        bench.servers.back()
        for one in (store, late):
            item = await one.get(b"k")
            assert (item is None) is running, "a store that is down expires nobody (S4)"

    run(scenario)


def test_a_reader_that_takes_nothing_is_cut_off_at_the_window() -> None:
    async def scenario(bench: Bench) -> None:
        watch = bench.store.watch(b"", 0)
        await bench.direct(b"k")
        await anext(watch)
        for _ in range(WATCH_WINDOW + 5):
            await bench.direct(b"k")
        await asyncio.sleep(1)
        seen = await following(watch, WATCH_WINDOW)
        assert [changes.revision for changes in seen] == list(range(2, WATCH_WINDOW + 2))
        with pytest.raises(StoreUnavailable, match="gave it up"):
            await anext(watch)
        assert (await anext(bench.store.watch(b"", WATCH_WINDOW + 1))).revision == WATCH_WINDOW + 2

    run(scenario)


def test_what_piled_up_for_a_frozen_caller_is_read_after_the_thaw() -> None:
    async def scenario(bench: Bench) -> None:
        task = bench.loop.create_task(following(bench.store.watch(b"", 0), 3))
        await asyncio.sleep(0.01)
        bench.loop.freeze()
        for key in (b"1", b"2", b"3"):
            await bench.direct(key)
            await asyncio.sleep(1)
        bench.faults.cut = True
        await asyncio.sleep(10)
        bench.loop.thaw()
        await asyncio.sleep(0.001)
        assert [changes.revision for changes in task.result()] == [1, 2, 3]

    run(scenario, driven=True)


def test_a_closed_remote_store_refuses() -> None:
    async def scenario(bench: Bench) -> None:
        waiting = asyncio.create_task(following(bench.store.watch(b"", 0), 1))
        await asyncio.sleep(0.01)
        await bench.store.close()
        with pytest.raises(StoreUnavailable):
            await waiting
        with pytest.raises(StoreUnavailable, match="closed"):
            await bench.store.get(b"k")

    run(scenario)


def test_the_journal_answers_across_the_network() -> None:
    async def scenario(bench: Bench) -> None:
        assert await bench.journal.claim([CLAIM]) == [None]
        one = one_write(1, 0, inbox=(("tx", b"r"),))
        assert await bench.journal.write(one) == [Written(1, 1)]
        assert await bench.journal.settle(one) == [Written(1, 1)]
        found = Recovered((b"1",), 1, False, keys=("tx",))
        assert await bench.journal.recover([Wanted(ENTITY)], 100) == [found]
        assert await bench.journal.inbox([(ENTITY, "tx")]) == [StoredReply(b"r")]

    run(scenario)


def test_a_lost_journal_reply_is_unknown_and_can_be_settled() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.journal.claim([CLAIM])
        bench.faults.lost_reply = 1.0
        with pytest.raises(JournalUnknown, match="settle a batch"):
            await bench.journal.write(one_write(1, 0))
        bench.faults.lost_reply = 0.0
        assert await bench.journal.settle(one_write(1, 0)) == [Written(1, 1)]
        bench.faults.lost_request = 1.0
        with pytest.raises(JournalUnknown):
            await bench.journal.write(one_write(2, 1))
        bench.faults.lost_request = 0.0
        assert await bench.journal.settle(one_write(2, 1)) == [None]

    run(scenario)


def test_a_claim_waits_for_a_dead_owners_write() -> None:
    async def scenario(bench: Bench) -> None:
        other = bench.servers.remote_journal(bench.driver, bench.servers.faults("driver"))
        await bench.servers.journal.claim([CLAIM])
        bench.loop.create_task(bench.journal.write(one_write(1, 0)))
        bench.faults.delay_s = (0.0, 0.0)
        await asyncio.sleep(0)
        bench.loop.kill()
        await asyncio.sleep(0.001)
        newer = Claim(CLAIM.shard, 0, 2, Incarnation("b" * 32))
        assert await other.claim([newer]) == [None]
        assert bench.servers.journal.peek(ENTITY) == (b"1",)

    bench = run(scenario, driven=True)
    kinds = [(event.kind, event.fields["epoch"]) for event in bench.history.events]
    assert kinds == [("claim", 1), ("append", 1), ("claim", 2)]


def test_the_same_seed_gives_the_same_history() -> None:
    async def scenario(bench: Bench) -> None:
        bench.faults.lost_reply = bench.faults.lost_request = 0.2
        await bench.servers.journal.claim([CLAIM])
        async with asyncio.TaskGroup() as tasks:
            for n in range(20):
                tasks.create_task(bench.store.commit([], [Put(b"%d" % n, b"")]))
        for n in range(5):
            seq = len(bench.servers.journal.peek(ENTITY))
            try:
                await bench.journal.write(one_write(n + 1, seq))
            except JournalUnknown:
                continue

    digests = [run(scenario, seed=seed).history.digest() for seed in (1, 2, 1)]
    assert digests[0] == digests[2] != digests[1]


def test_a_clock_shows_the_worlds_time_and_its_timers_freeze() -> None:
    calls: list[tuple[str, float]] = []

    async def scenario(bench: Bench) -> None:
        loop: SimLoop = bench.loop
        clock = SimClock(bench.world, loop)
        assert clock.now() == bench.world.now == 1000.0
        assert clock.wall() == datetime(2026, 1, 1, 0, 16, 40, tzinfo=UTC)
        clock.call_at(1005.0, lambda: calls.append(("timer", clock.now())))
        clock.call_at(1005.0, lambda: calls.append(("cancelled", clock.now()))).cancel()
        loop.freeze()
        await asyncio.sleep(7.0)
        assert clock.now() == 1007.0
        assert calls == []
        loop.thaw()
        await asyncio.sleep(0.001)

    run(scenario, driven=True)
    assert calls == [("timer", 1007.0)]
