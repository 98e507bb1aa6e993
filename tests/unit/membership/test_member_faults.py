"""Renewal, fencing and the watch of a member while network, store and process misbehave."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import NoReturn

import msgspec
import pytest
from member_lab import SETTINGS, Lab, Process, done, evict, nothing_to_see

from domicile.core.ids import Incarnation
from domicile.core.state.cluster_view import NodeGone, Unreadable, ViewChange
from domicile.core.state.keys import node_key
from domicile.core.state.records import NodeRecord, encode_record
from domicile.core.state.txn import Change, Changes, Delete, Put
from domicile.errors import StoreUnavailable, WatchCompacted
from domicile.stores.memory.store import MemoryStore
from domicile.testing.sim.clock import SimClock
from domicile.testing.sim.remote import RemoteStore


@pytest.fixture
def lab() -> Lab:
    return Lab()


@pytest.fixture
def node(lab: Lab) -> Process:
    return Process(lab, "n1")


def test_renewals_keep_it_up_at_a_jittered_pace(lab: Lab, node: Process) -> None:
    async def main() -> None:
        node.start()
        await asyncio.sleep(60)
        assert node.member.guard()
        gaps = [after - before for before, after in pairwise(lab.renewals(node))]
        assert len(gaps) > 30
        assert all(0.9 * SETTINGS.renew_s - 1e-6 <= gap <= 1.1 * SETTINGS.renew_s for gap in gaps)
        assert max(gaps) - min(gaps) > 0.05

    lab.run(main())


def test_validity_counts_from_the_sending(lab: Lab, node: Process) -> None:
    sent_at: list[float] = []

    async def note(lease: str) -> float | None:
        sent_at.append(lab.world.now)
        return await node.store.target.renew(lease)

    async def main() -> None:
        node.faults.delay_s = (0.3, 0.3)
        node.store.on_renew = note
        node.start()
        await asyncio.sleep(20)
        acknowledged = len(lab.renewals(node)) - 1
        valid_until = sent_at[acknowledged - 1] + SETTINGS.ttl_s - SETTINGS.margin_s
        assert node.member.lease.valid_until == pytest.approx(valid_until)

    lab.run(main())


def test_a_renewal_that_is_not_acknowledged_counts_for_nothing(lab: Lab, node: Process) -> None:
    """L1: the store renewed all along, but nobody here knows."""

    async def unanswered(lease: str) -> float | None:
        await node.store.target.renew(lease)
        raise StoreUnavailable("its answer was lost")

    async def main() -> None:
        task = node.start()
        await asyncio.sleep(10)
        node.store.on_renew = unanswered
        await asyncio.sleep(0)
        sent = lab.renewals(node)[-1]
        assert await done(task) is True
        ((at, reason),) = node.fenced
        assert at == pytest.approx(sent + SETTINGS.ttl_s - SETTINGS.margin_s)
        assert reason == "deadline passed"
        await asyncio.sleep(SETTINGS.margin_s * 2)
        assert await lab.item(node) is not None, "the store would have waited"

    lab.run(main())


def test_the_log_says_once_that_the_store_is_away_and_that_it_is_back(
    lab: Lab, node: Process, caplog: pytest.LogCaptureFixture
) -> None:
    """Else it says that a lease ended, and nobody knows why."""
    asked: list[float] = []

    async def unanswered(lease: str) -> float | None:
        asked.append(lab.world.now)
        raise StoreUnavailable("its disk is full")

    async def main() -> None:
        node.start()
        for _ in range(2):
            node.store.on_renew = unanswered
            while len(asked) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            asked.clear()
            node.store.on_renew = None
            known = len(lab.renewals(node))
            while len(lab.renewals(node)) == known:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert node.member.guard()

    with caplog.at_level("INFO", "domicile"):
        lab.run(main())
    told = [one.message for one in caplog.records if "the store" in one.message]
    assert len(told) == 4
    lease = node.member.lease_id
    for away, back in (told[:2], told[2:]):
        assert away.startswith(f"the store does not renew lease {lease}, which ends in ")
        assert away.endswith(" s: its disk is full")
        assert back == f"the store answers again: lease {lease} is renewed"


@pytest.mark.parametrize("call", ["grant", "commit"])
def test_the_log_says_once_why_a_process_does_not_join(
    lab: Lab, node: Process, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """Reads may go on meanwhile, as in an etcd that is full."""
    asked: list[float] = []

    async def refused(_: object) -> NoReturn:
        asked.append(lab.world.now)
        raise StoreUnavailable("its disk is full")

    async def main() -> None:
        setattr(node.store, f"on_{call}", refused)
        node.start()
        while len(asked) < 20:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        setattr(node.store, f"on_{call}", None)
        while not node.member.guard():  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    lab.run(main())
    told = [one.message for one in caplog.records if "disk is full" in one.message]
    assert told == ["the store takes no write of this process, it is asked again: its disk is full"]


def test_a_renewal_counts_only_with_the_own_record_read_after_it(lab: Lab, node: Process) -> None:
    """L1: a lease alone proves nothing: an evicted node's is renewed, too."""
    order: list[str] = []

    async def note(lease: str) -> float | None:
        before = len(node.store.calls)
        ttl_s = await node.store.target.renew(lease)
        assert node.store.calls[before:] == [], "the record was read before the lease"
        order.append("renewed")
        return ttl_s

    async def main() -> None:
        node.store.on_watch = nothing_to_see
        task = node.start()
        await asyncio.sleep(1)
        node.store.on_renew = note
        item = await lab.item(node)
        assert item is not None
        await lab.backend.commit([], [evict(item)])
        counted = len(lab.renewals(node))
        await done(task)
        assert order == ["renewed"]
        assert len(lab.renewals(node)) == counted
        assert [reason for _, reason in node.fenced] == ["evicted by the leader"]

    lab.run(main())


def test_a_shorter_ttl_than_granted_counts(lab: Lab, node: Process) -> None:
    async def shorter(lease: str) -> float | None:
        ttl_s = await node.store.target.renew(lease)
        return None if ttl_s is None else ttl_s / 2

    async def main() -> None:
        node.start()
        await asyncio.sleep(0.5)
        node.store.on_renew = shorter
        await asyncio.sleep(20)
        assert node.member.guard()
        until = lab.renewals(node)[-1] + SETTINGS.ttl_s / 2 - SETTINGS.margin_s
        assert node.member.lease.valid_until == pytest.approx(until)

    lab.run(main())


def test_an_outage_fences_at_the_deadline_and_before_the_store_expires_it(
    lab: Lab, node: Process
) -> None:
    async def main() -> None:
        task = node.start()
        await asyncio.sleep(10)
        node.faults.cut = True
        sent = lab.renewals(node)[-1]
        assert await done(task) is True
        assert lab.renewals(node)[-1] == sent
        ((at, reason),) = node.fenced
        assert at == pytest.approx(sent + SETTINGS.ttl_s - SETTINGS.margin_s)
        assert reason == "deadline passed"
        assert await lab.item(node) is not None
        assert not node.member.guard()
        assert len(node.fenced) == 1
        assert [event.fields["inc"] for event in lab.history.of("fenced")] == [node.incarnation]

    lab.run(main())


def test_a_short_outage_costs_nothing(lab: Lab, node: Process) -> None:
    async def main() -> None:
        node.start()
        await asyncio.sleep(10)
        node.faults.cut = True
        await asyncio.sleep(2.5)
        node.faults.cut = False
        await asyncio.sleep(10)
        assert node.member.guard()
        assert not node.fenced

    lab.run(main())


def test_a_failed_renewal_is_repeated_soon_but_not_at_once(lab: Lab, node: Process) -> None:
    tries: list[float] = []

    async def fail(lease: str) -> float | None:
        tries.append(lab.world.now)
        raise StoreUnavailable("test")

    async def main() -> None:
        task = node.start()
        await asyncio.sleep(0.5)
        node.store.on_renew = fail
        await done(task)
        gaps = [after - before for before, after in pairwise(tries)]
        assert len(gaps) >= 5
        assert all(gap == pytest.approx(SETTINGS.renew_s / 4) for gap in gaps)

    lab.run(main())


def test_the_guard_compares_and_does_not_wait_for_a_timer(lab: Lab, node: Process) -> None:
    async def main() -> None:
        node.start()
        await asyncio.sleep(0.5)
        assert node.member.guard()
        node.clock.skipped_s = SETTINGS.ttl_s
        assert not node.member.guard()
        assert not node.member.guard()
        assert [reason for _, reason in node.fenced] == ["deadline passed"]

    lab.run(main())


def test_what_the_watch_brings_past_the_deadline_is_not_taken(lab: Lab, node: Process) -> None:
    async def main() -> None:
        task = node.start()
        await asyncio.sleep(0.5)
        known, batches = len(node.facts), len(node.changes)
        node.clock.skipped_s = SETTINGS.ttl_s
        await lab.backend.commit([], [Put(b"wish/1", b"")])
        await done(task)
        assert [reason for _, reason in node.fenced] == ["deadline passed"]
        assert (len(node.facts), len(node.changes)) == (known, batches)

    lab.run(main())


def test_after_a_freeze_the_fence_comes_before_what_piled_up(lab: Lab, node: Process) -> None:
    async def main() -> None:
        task = node.start()
        await asyncio.sleep(3)
        known = len(node.facts)
        node.loop.freeze()
        record = msgspec.structs.replace(node.member.record, incarnation=Incarnation("other"))
        await lab.backend.commit([], [Put(node_key(Incarnation("other")), encode_record(record))])
        await asyncio.sleep(20)
        assert await lab.item(node) is None
        node.loop.thaw()
        await done(task)
        assert len(node.facts) == known
        assert len(node.fenced) == 1

    lab.run(main())


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.parametrize("watching", [True, False])
def test_eviction_and_removal_fence_through_watch_and_through_renewal(
    lab: Lab, node: Process, watching: bool, gone: bool
) -> None:
    async def main() -> None:
        if not watching:
            node.store.on_watch = nothing_to_see
        task = node.start()
        await asyncio.sleep(3)
        item = await lab.item(node)
        assert item is not None
        await lab.backend.commit([], [Delete(item.key) if gone else evict(item)])
        before = lab.world.now
        await done(task)
        assert lab.world.now - before < (0.01 if watching else 1.2 * SETTINGS.renew_s)
        assert [reason for _, reason in node.fenced] == [
            "the own record is gone" if gone else "evicted by the leader"
        ]

    lab.run(main())


def test_a_refused_renewal_fences(lab: Lab, node: Process) -> None:
    async def main() -> None:
        node.store.on_watch = nothing_to_see
        task = node.start()
        await asyncio.sleep(3)
        await lab.backend.revoke(node.member.lease_id)
        await done(task)
        assert [reason for _, reason in node.fenced] == [
            "the store refused the renewal: the lease is gone"
        ]

    lab.run(main())


def test_a_broken_watch_resumes_without_gap_or_repetition(lab: Lab, node: Process) -> None:
    async def main() -> None:
        node.start()
        await asyncio.sleep(1)
        for count in range(40):
            await lab.backend.commit([], [Put(b"other/%d" % count, b"")])
            if count % 7 == 0:
                node.faults.break_watch()
            await asyncio.sleep(0.03)
        await asyncio.sleep(2)
        seen = [batch.revision for batch in node.changes]
        assert seen == list(range(1, lab.servers.store.revision + 1))
        assert len(node.listings) == 1
        assert node.store.calls.count("watch") > 2

    lab.run(main())


def test_after_compaction_it_lists_again_and_says_what_vanished(lab: Lab, node: Process) -> None:
    other = Process(lab, "n2")

    async def main() -> None:
        node.start()
        task = other.start()
        await asyncio.sleep(1)
        node.faults.watch_delay_s = (1.0, 1.0)
        node.faults.break_watch()
        await done(other.loop.create_task(other.member.leave()))
        await done(task)
        lab.servers.store.compact(lab.servers.store.revision)
        node.faults.watch_delay_s = (0.0, 0.0)
        await asyncio.sleep(3)
        assert len(node.listings) == 2
        assert isinstance(other.member.record, NodeRecord)
        assert node.facts[-1] == NodeGone(other.incarnation, other.member.record)
        assert node.member.guard()
        await lab.backend.commit([], [Put(b"other", b"")])
        await asyncio.sleep(0.5)
        assert node.changes[-1].revision == lab.servers.store.revision

    lab.run(main())


def go_back(lab: Lab, node: Process) -> None:
    """Give a process a store that knows nothing."""
    young = MemoryStore(SimClock(lab.world, lab.servers.store_loop)).client("young")
    node.store.target = RemoteStore(
        lab.world, node.loop, lab.servers.store_loop, young, node.faults
    )


def test_a_store_that_went_back_fences(lab: Lab, node: Process) -> None:
    async def main() -> None:
        task = node.start()
        await asyncio.sleep(1)
        go_back(lab, node)
        node.faults.break_watch()
        await done(task)
        ((_, reason),) = node.fenced
        assert reason.startswith("store rewound: a watch")

    lab.run(main())


def test_a_listing_that_went_back_fences(lab: Lab, node: Process) -> None:
    async def compacted(prefix: bytes, from_revision: int) -> AsyncIterator[Changes]:
        raise WatchCompacted("test")
        yield Changes(0, ())

    async def main() -> None:
        task = node.start()
        await asyncio.sleep(1)
        node.store.on_watch = compacted
        go_back(lab, node)
        node.faults.break_watch()
        await done(task)
        ((_, reason),) = node.fenced
        assert reason.startswith("store rewound: listed")
        assert len(node.listings) == 1

    lab.run(main())


def test_a_watch_that_goes_back_fences(lab: Lab, node: Process) -> None:
    async def back(prefix: bytes, from_revision: int) -> AsyncIterator[Changes]:
        yield Changes(from_revision + 5, ())
        yield Changes(from_revision + 5, ())
        yield Changes(from_revision + 4, ())

    async def main() -> None:
        node.store.on_watch = back
        await done(node.start())
        ((_, reason),) = node.fenced
        assert reason.startswith("store rewound")
        assert len(node.changes) == 1

    lab.run(main())


def test_a_watch_with_much_at_hand_lets_the_loop_turn(lab: Lab, node: Process) -> None:
    turns = 0
    taken: Counter[int] = Counter()

    async def burst(prefix: bytes, from_revision: int) -> AsyncIterator[Changes]:
        node.loop.call_soon(turn)
        for revision in range(from_revision + 1, from_revision + 101):
            taken[turns] += 1
            yield Changes(revision, (Change(b"unread", None), Change(b"too", None)))
        await asyncio.get_running_loop().create_future()

    def turn() -> None:
        nonlocal turns
        turns += 1
        if len(node.changes) < 100:
            node.loop.call_soon(turn)

    async def main() -> None:
        node.store.on_watch = burst
        node.start()
        await asyncio.sleep(1)
        assert len(node.changes) == 100
        assert max(taken.values()) <= 10

    lab.run(main())


def test_garbage_in_the_store_is_reported_and_counted(lab: Lab, node: Process) -> None:
    async def main() -> None:
        node.start()
        await asyncio.sleep(0.5)
        await lab.backend.commit([], [Put(b"wish/nonsense", b"")])
        await asyncio.sleep(0.5)
        assert isinstance(node.facts[-1], Unreadable)
        assert lab.history.counts["store.unreadable"] == 1
        assert node.member.guard()

    lab.run(main())


def test_a_fact_that_fences_is_the_last_one(lab: Lab, node: Process) -> None:
    def fence(fact: ViewChange) -> None:
        node.facts.append(fact)
        node.member.fence("enough")

    async def main() -> None:
        task = node.start()
        await asyncio.sleep(1)
        known, batches = len(node.facts), len(node.changes)
        node.on_fact = fence  # type: ignore[method-assign]
        await lab.backend.commit([], [Put(b"wish/1", b""), Put(b"wish/2", b"")])
        await done(task)
        assert len(node.facts) == known + 1
        assert len(node.changes) == batches

    lab.run(main())


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_network_does_a_valid_member_is_registered(seed: int) -> None:
    lab = Lab(seed)
    random = lab.world.stream("trouble")
    processes: list[Process] = []
    guarded = 0

    async def watch_over(process: Process) -> None:
        nonlocal guarded
        while not process.fenced:
            await asyncio.sleep(0.01)
            if process.member.guard():
                guarded += 1
                assert await lab.item(process) is not None

    async def main() -> None:
        for number in range(3):
            process = Process(lab, f"n{number}")
            process.faults.lost_reply = process.faults.lost_request = 0.15
            processes.append(process)
            process.start()
            process.loop.create_task(watch_over(process))
        for _ in range(20):
            await asyncio.sleep(random.uniform(0.5, 3))
            process = random.choice(processes)
            trouble = random.choice(["cut", "freeze", "break", "slow"])
            length_s = random.uniform(0.1, 7)
            if trouble == "cut":
                process.faults.cut = True
            elif trouble == "freeze":
                process.loop.freeze()
            elif trouble == "slow":
                process.faults.slow = 500.0
            else:
                process.faults.break_watch()
            await asyncio.sleep(length_s)
            process.faults.cut = False
            process.faults.slow = 1.0
            process.loop.thaw()
        for process in processes:
            assert len(process.fenced) <= 1
            revisions = [batch.revision for batch in process.changes]
            assert revisions == sorted(set(revisions))

    lab.run(main())
    assert guarded > 300
