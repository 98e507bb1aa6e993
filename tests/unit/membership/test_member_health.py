"""A member under `fencing = "health"`: no lease, no deadline, and an end that it sees to (C9)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import inf

import pytest
from member_lab import Lab, Process, done, evict, nothing_to_see

from domicile.core.ids import Incarnation
from domicile.core.lease.lease import RECORD_FOREVER_S, LeaseState
from domicile.core.state.keys import CONFIG_KEY, client_key, node_key
from domicile.core.state.records import ClientRecord, NodeRecord, decode_record
from domicile.core.state.txn import Absent, Delete, Outcome, Unknown, Write
from domicile.errors import StoreError, StoreRewound, StoreUnavailable
from domicile.membership.member import Member
from domicile.membership.record_kinds import marked_leaving
from domicile.settings import Settings
from domicile.stores.memory.store import MemoryStore
from domicile.testing.sim.clock import SimClock
from domicile.testing.sim.remote import RemoteStore

HEALTH = Settings(fencing="health")
HOUR_S = 3_600.0


class Endless(Process):
    """A process whose member needs no lease."""

    def __init__(self, lab: Lab, name: str, record: ClientRecord | None = None) -> None:
        super().__init__(lab, name, record)
        self.member = Member(
            store=self.store,
            clock=self.clock,
            meter=lab.history,
            settings=HEALTH,
            random=lab.world.stream(name),
            record=self.member.record,
            kind=self.member.kind,
            shards={} if record else {"default": 64},
            events=self,
        )


@pytest.fixture
def lab() -> Lab:
    return Lab()


@pytest.fixture
def node(lab: Lab) -> Endless:
    return Endless(lab, "n1")


def test_its_record_has_no_lease_and_nobody_waits_for_its_ttl(lab: Lab, node: Endless) -> None:
    async def main() -> None:
        node.start()
        await asyncio.sleep(30)
        item = await lab.item(node)
        assert item is not None
        assert decode_record(item.value, NodeRecord).ttl_s == RECORD_FOREVER_S
        assert item.created == item.revision, "written once"
        assert not {"grant", "renew"} & set(node.store.calls)
        assert node.member.lease.valid_until == inf
        for event in lab.history.of("renewed"):
            assert event.fields["ttl"] == inf

    lab.run(main())


def test_it_stands_through_any_outage_of_the_store(lab: Lab, node: Endless) -> None:
    async def main() -> None:
        node.start()
        await asyncio.sleep(1)
        node.faults.cut = True
        cut_at = lab.world.now
        await asyncio.sleep(HOUR_S)
        assert node.member.guard()
        assert lab.renewals(node)[-1] < cut_at, "nothing was acknowledged"
        node.faults.cut = False
        await asyncio.sleep(5)
        assert node.member.guard()
        assert lab.renewals(node)[-1] > cut_at + HOUR_S
        assert not node.fenced

    lab.run(main())


def test_it_stands_through_any_pause(lab: Lab, node: Endless) -> None:
    async def main() -> None:
        node.start()
        await asyncio.sleep(1)
        node.loop.freeze()
        await asyncio.sleep(HOUR_S)
        node.loop.thaw()
        await asyncio.sleep(5)
        assert node.member.guard()
        assert not node.fenced

    lab.run(main())


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.parametrize("watching", [True, False])
def test_a_record_that_is_gone_or_evicted_fences_at_once(
    lab: Lab, node: Endless, watching: bool, gone: bool
) -> None:
    """L1, also without a lease: by the watch, or by the read that is all there is to a renewal."""

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
        assert lab.world.now - before < (0.01 if watching else 1.2 * HEALTH.renew_s)
        assert [reason for _, reason in node.fenced] == [
            "the own record is gone" if gone else "evicted by the leader"
        ]
        assert not node.member.guard()
        assert await done(node.loop.create_task(node.member.revoke()))
        assert await lab.item(node) is None

    lab.run(main())


def test_an_outage_ends_with_the_fence_that_was_missed(lab: Lab, node: Endless) -> None:
    async def main() -> None:
        task = node.start()
        await asyncio.sleep(1)
        node.faults.cut = True
        item = await lab.item(node)
        assert item is not None
        await lab.backend.commit([], [evict(item)])
        await asyncio.sleep(HOUR_S)
        assert node.member.guard(), "it can't know"
        node.faults.cut = False
        await done(task)
        assert [reason for _, reason in node.fenced] == ["evicted by the leader"]

    lab.run(main())


def test_leaving_stops_first_and_then_removes_the_record(lab: Lab, node: Endless) -> None:
    async def main() -> None:
        task = node.start()
        await asyncio.sleep(1)
        assert await done(node.loop.create_task(node.member.rewrite(marked_leaving)))
        leaving = node.loop.create_task(node.member.leave())
        await asyncio.sleep(0)
        assert not node.member.guard()
        assert await lab.item(node) is not None
        assert await done(leaving)
        assert await done(task) is True
        assert await lab.item(node) is None
        assert node.member.lease.state is LeaseState.ENDED

    lab.run(main())


@pytest.mark.parametrize("outcome", ["happened", "did not"])
def test_a_removal_of_unknown_outcome_is_looked_up(lab: Lab, node: Endless, outcome: str) -> None:
    async def unknown(writes: Sequence[Write]) -> Outcome:
        node.store.on_commit = None
        if outcome == "happened":
            await node.store.target.commit([], writes)
        return Unknown()

    async def main() -> None:
        node.start()
        await asyncio.sleep(1)
        node.store.on_commit = unknown
        assert await done(node.loop.create_task(node.member.leave()))
        assert await lab.item(node) is None

    lab.run(main())


def test_it_does_not_claim_to_be_gone_while_its_record_stands(lab: Lab, node: Endless) -> None:
    async def main() -> None:
        node.start()
        await asyncio.sleep(1)
        node.faults.cut = True
        assert not await done(node.loop.create_task(node.member.leave()))
        assert await lab.item(node) is not None

    lab.run(main())


def test_it_does_not_claim_to_be_gone_while_a_registration_may_still_arrive(
    lab: Lab, node: Endless
) -> None:
    """Nothing would end a record without a lease that comes after its holder has stopped."""
    late: list[Sequence[Write]] = []

    async def unknown(writes: Sequence[Write]) -> Outcome:
        if writes[0].key == CONFIG_KEY:
            return await node.store.target.commit([], writes)
        late.append(writes)
        return Unknown()

    async def main() -> None:
        node.store.on_commit = unknown
        node.start()
        await asyncio.sleep(1)
        assert late
        assert await lab.item(node) is None
        assert not await done(node.loop.create_task(node.member.leave()))
        await lab.backend.commit([Absent(node_key(node.incarnation))], late[0])
        assert await lab.item(node) is not None

    lab.run(main())


def test_a_registration_in_doubt_is_removed_and_stays_in_doubt(lab: Lab, node: Endless) -> None:
    """One write came; nobody knows that of the other, which may come when this one is gone."""

    async def unknown(writes: Sequence[Write]) -> Outcome:
        if writes[0].key != CONFIG_KEY:
            node.store.on_commit = None
            return Unknown()
        return await node.store.target.commit([], writes)

    async def main() -> None:
        node.store.on_commit = unknown
        node.start()
        await asyncio.sleep(1)
        assert await lab.item(node) is not None
        assert not await done(node.loop.create_task(node.member.leave()))
        assert await lab.item(node) is None

    lab.run(main())


def test_one_that_never_registered_has_nothing_to_remove(lab: Lab, node: Endless) -> None:
    async def main() -> None:
        node.faults.cut = True
        node.start()
        await asyncio.sleep(10)
        node.store.calls.clear()
        assert await done(node.loop.create_task(node.member.leave()))
        assert node.store.calls == []

    lab.run(main())


def test_a_store_that_went_back_fences_and_is_cleaned_as_it_is_now(lab: Lab, node: Endless) -> None:
    """L5, S5."""

    async def main() -> None:
        task = node.start()
        await asyncio.sleep(1)
        young = MemoryStore(SimClock(lab.world, lab.servers.store_loop)).client("young")
        node.store.target = RemoteStore(
            lab.world, node.loop, lab.servers.store_loop, young, node.faults
        )
        node.faults.break_watch()
        await done(task)
        ((_, reason),) = node.fenced
        assert reason.startswith("store rewound: ")
        assert await done(node.loop.create_task(node.member.revoke()))

    lab.run(main())


@pytest.mark.parametrize("error", [StoreUnavailable("test"), StoreRewound("test")])
def test_an_error_while_removing_is_tried_again(lab: Lab, node: Endless, error: StoreError) -> None:
    async def away(writes: Sequence[Write]) -> Outcome:
        node.store.on_commit = None
        raise error

    async def main() -> None:
        node.start()
        await asyncio.sleep(1)
        node.store.on_commit = away
        assert await done(node.loop.create_task(node.member.leave()))
        assert await lab.item(node) is None

    lab.run(main())


def test_a_client_keeps_its_lease_but_sends_on_without_it(lab: Lab) -> None:
    """I7: it is home to nothing, so it may go on until it reads that its record is gone."""
    me = Incarnation("c" * 32)
    client = Endless(lab, "c1", ClientRecord(me))

    async def main() -> None:
        task = client.start()
        await asyncio.sleep(1)
        assert "grant" in client.store.calls
        assert await lab.backend.get(client_key(me)) is not None
        client.faults.cut = True
        await asyncio.sleep(HOUR_S)
        assert client.member.guard()
        assert await lab.backend.get(client_key(me)) is None, "the store forgot it"
        client.faults.cut = False
        await done(task)
        assert len(client.fenced) == 1

    lab.run(main())
