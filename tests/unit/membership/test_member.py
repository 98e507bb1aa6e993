"""Joining, the status, leaving: a member against the reference store, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from member_lab import SETTINGS, Lab, Process, done, evict, nothing_to_see

from domicile.core.ids import Incarnation
from domicile.core.lease.lease import LeaseState
from domicile.core.state.cluster_view import NodeUp
from domicile.core.state.keys import CONFIG_KEY, client_key
from domicile.core.state.records import (
    ClientRecord,
    ConfigRecord,
    NodeRecord,
    decode_record,
    encode_record,
)
from domicile.core.state.txn import Outcome, Put, Unknown, Write
from domicile.errors import ConfigError
from domicile.membership.record_kinds import marked_leaving


@pytest.fixture
def lab() -> Lab:
    return Lab()


@pytest.fixture
def node(lab: Lab) -> Process:
    return Process(lab, "n1")


def test_joining_reads_then_agrees_then_registers(lab: Lab, node: Process) -> None:
    async def main() -> None:
        node.start()
        await asyncio.sleep(0.5)
        assert node.store.calls[:4] == ["list", "commit", "grant", "commit"]
        assert [listing.items for listing in node.listings] == [()]
        item = await lab.item(node)
        assert item is not None
        record = decode_record(item.value, NodeRecord)
        assert record == node.member.record
        assert node.facts[-1] == NodeUp(record)
        assert node.member.guard()
        assert node.member.revision == lab.servers.store.revision
        config = await lab.backend.get(CONFIG_KEY)
        assert config is not None
        assert decode_record(config.value, ConfigRecord) == ConfigRecord({"default": 64})

    lab.run(main())


def test_a_client_has_a_leased_record_and_writes_no_config(lab: Lab) -> None:
    incarnation = Incarnation("c1" * 4)
    client = Process(lab, "c1", ClientRecord(incarnation), {})

    async def main() -> None:
        client.start()
        await asyncio.sleep(0.5)
        assert client.member.guard()
        assert client.member.lease_id == f"client-{incarnation}"
        assert await lab.backend.get(client_key(incarnation)) is not None
        assert await lab.backend.get(CONFIG_KEY) is None
        await asyncio.sleep(20)
        assert client.member.guard()
        await lab.backend.revoke(client.member.lease_id)
        await asyncio.sleep(0.1)
        assert [reason for _, reason in client.fenced] == ["the own record is gone"]

    lab.run(main())


def test_another_shard_count_is_refused_before_anything_is_registered(lab: Lab) -> None:
    first, second = Process(lab, "n1"), Process(lab, "n2", shards={"default": 128})

    async def main() -> None:
        first.start()
        await asyncio.sleep(0.5)
        with pytest.raises(ConfigError, match=r"64 shards.*128; set shards=64"):
            await done(second.start())
        assert await lab.item(second) is None

    lab.run(main())


def test_another_hash_or_an_unreadable_config_is_refused(lab: Lab) -> None:
    first, second = Process(lab, "n1"), Process(lab, "n2")

    async def main() -> None:
        other = encode_record(ConfigRecord({"default": 64}, hash="md5"))
        await lab.backend.commit([], [Put(CONFIG_KEY, other)])
        with pytest.raises(ConfigError, match=r"'md5'.*'xxh3'"):
            await done(first.start())
        await lab.backend.commit([], [Put(CONFIG_KEY, b"[]")])
        with pytest.raises(ConfigError, match="cannot be read"):
            await done(second.start())

    lab.run(main())


def test_roles_of_members_that_join_at_once_are_merged(lab: Lab) -> None:
    processes = [Process(lab, f"n{n}", shards={f"role{n}": 8 * n}) for n in (1, 2, 3)]

    async def main() -> None:
        for process in processes:
            process.start()
        await asyncio.sleep(3)
        assert all(process.member.guard() for process in processes)
        config = await lab.backend.get(CONFIG_KEY)
        assert config is not None
        assert decode_record(config.value, ConfigRecord).shards == {
            "role1": 8,
            "role2": 16,
            "role3": 24,
        }

    lab.run(main())


def test_joining_waits_out_an_outage(lab: Lab, node: Process) -> None:
    async def main() -> None:
        node.faults.cut = True
        node.start()
        await asyncio.sleep(30)
        assert node.member.lease.state is LeaseState.UNREGISTERED
        assert not node.member.guard()
        node.faults.cut = False
        await asyncio.sleep(3)
        assert node.member.guard()
        assert not node.fenced

    lab.run(main())


@pytest.mark.parametrize("happened", [True, False])
def test_a_registration_of_unknown_outcome_is_looked_up(
    lab: Lab, node: Process, happened: bool
) -> None:
    async def unknown(writes: Sequence[Write]) -> Outcome:
        if writes[0].key == CONFIG_KEY:
            return await node.store.target.commit([], writes)
        node.store.on_commit = None
        if happened:
            await node.store.target.commit([], writes)
        return Unknown()

    async def main() -> None:
        node.store.on_commit = unknown
        node.start()
        await asyncio.sleep(2)
        assert node.member.guard()
        assert node.store.calls.count("commit") == (2 if happened else 3)
        assert await lab.item(node) is not None

    lab.run(main())


def test_a_registration_that_may_have_come_and_gone_ends_the_incarnation(
    lab: Lab, node: Process
) -> None:
    async def cut_off(writes: Sequence[Write]) -> Outcome:
        if writes[0].key == CONFIG_KEY:
            return await node.store.target.commit([], writes)
        await node.store.target.commit([], writes)
        node.faults.cut = True
        return Unknown()

    async def main() -> None:
        node.store.on_commit = cut_off
        task = node.start()
        await asyncio.sleep(SETTINGS.ttl_s + 2)
        node.faults.cut = False
        assert await done(task) is False
        assert len(node.fenced) == 1
        assert node.member.lease.state is LeaseState.FENCED
        assert not lab.renewals(node)

    lab.run(main())


def test_once_fenced_only_revoke_touches_the_lease(lab: Lab, node: Process) -> None:
    async def main() -> None:
        task = node.start()
        await asyncio.sleep(3)
        node.member.fence("test")
        node.member.fence("again")
        node.store.calls.clear()
        assert await done(task) is True
        await asyncio.sleep(1)
        assert node.store.calls == []
        assert await lab.item(node) is not None
        assert await done(node.loop.create_task(node.member.revoke()))
        assert await lab.item(node) is None
        assert node.member.lease.state is LeaseState.ENDED
        assert [reason for _, reason in node.fenced] == ["test"]

    lab.run(main())


def test_revoking_before_the_stop_is_refused(lab: Lab, node: Process) -> None:
    async def main() -> None:
        node.start()
        await asyncio.sleep(1)
        with pytest.raises(AssertionError):
            await done(node.loop.create_task(node.member.revoke()))

    lab.run(main())


def test_revoking_gives_up_during_an_outage(lab: Lab, node: Process) -> None:
    async def main() -> None:
        node.start()
        await asyncio.sleep(1)
        node.member.fence("test")
        node.faults.cut = True
        assert not await done(node.loop.create_task(node.member.revoke()))

    lab.run(main())


@pytest.mark.parametrize("outcome", ["committed", "unknown, happened", "unknown, did not"])
def test_the_status_is_rewritten_under_the_same_lease(
    lab: Lab, node: Process, outcome: str
) -> None:
    async def unknown(writes: Sequence[Write]) -> Outcome:
        node.store.on_commit = None
        if outcome == "unknown, happened":
            await node.store.target.commit([], writes)
        return Unknown()

    async def main() -> None:
        node.start()
        await asyncio.sleep(1)
        if outcome != "committed":
            node.store.on_commit = unknown
        assert await done(node.loop.create_task(node.member.rewrite(marked_leaving)))
        item = await lab.item(node)
        assert item is not None
        assert decode_record(item.value, NodeRecord).status == "leaving"
        await asyncio.sleep(10)
        assert node.member.guard()
        await done(node.loop.create_task(node.member.leave()))
        assert await lab.item(node) is None

    lab.run(main())


def test_an_eviction_is_never_overwritten_by_the_own_status(lab: Lab, node: Process) -> None:
    async def main() -> None:
        node.store.on_watch = nothing_to_see
        node.start()
        await asyncio.sleep(1)
        item = await lab.item(node)
        assert item is not None
        await lab.backend.commit([], [evict(item)])
        assert not await done(node.loop.create_task(node.member.rewrite(marked_leaving)))
        assert [reason for _, reason in node.fenced] == ["evicted by the leader"]

    lab.run(main())


def test_leaving_closes_the_guard_then_revokes(lab: Lab, node: Process) -> None:
    async def main() -> None:
        task = node.start()
        await asyncio.sleep(1)
        leaving = node.loop.create_task(node.member.leave())
        await asyncio.sleep(0)
        assert not node.member.guard()
        assert await lab.item(node) is not None
        assert await done(leaving)
        assert await done(task) is True
        assert await lab.item(node) is None
        assert node.member.lease.state is LeaseState.ENDED
        assert not node.fenced
        assert len(list(lab.history.of("ended"))) == 1

    lab.run(main())


def test_the_granted_ttl_is_stored_and_never_outlived(lab: Lab, node: Process) -> None:
    async def longer(lease: str) -> float | None:
        ttl_s = await node.store.target.renew(lease)
        return None if ttl_s is None else ttl_s * 3

    async def main() -> None:
        node.store.ttl_s = 8.0
        node.store.on_renew = longer
        node.start()
        await asyncio.sleep(10)
        item = await lab.item(node)
        assert item is not None
        assert decode_record(item.value, NodeRecord).ttl_s == 8.0
        valid_until = lab.renewals(node)[-1] + 8.0 - SETTINGS.margin_s
        assert node.member.lease.valid_until == pytest.approx(valid_until)

    lab.run(main())
