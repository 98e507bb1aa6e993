"""What failovers in a row keep, lose and tell, on real servers (FO-02, FO-14, FO-15, FO-19).

By hand: `make test-replica`. The servers reach each other through proxies, so that replicas can be
made to lag while clients and the store are reached.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from replica_databases import MEBIBYTE, command, each_database
from replica_lab import (
    CROWD,
    PATIENCE_S,
    Crowd,
    FollowingClient,
    FollowingThread,
    Machine,
    ReplicaGroup,
    StoreName,
    play,
)
from replica_scenarios import Losses, all_have_the_same

from domicile.failover.records import GroupPhase

TIMES = int(os.environ.get("DOMICILE_TEST_FAILOVERS", "20"))

STORES: tuple[StoreName, ...] = ("sqlite", "etcd")

each_store = pytest.mark.parametrize("store", STORES)


async def lag(group: ReplicaGroup, primary: Machine, writes: int) -> int:
    """Have no replica get anything, while the primary takes writes; what `status` says of it."""
    assert primary.to_server is not None
    await primary.to_server.hold()
    await group.writer.goes_on(primary.name, writes)
    found = 0

    async def seen() -> bool:
        nonlocal found
        found = (await group.status())["loss_bytes"] or 0
        return found > 0

    await group.until(seen, "status says what failing over now would lose")
    return found


@pytest.mark.scenario("FO-14", "FO-19")
@pytest.mark.parametrize(
    ("kind", "mode"), [("valkey", "async"), ("postgresql", "async"), ("postgresql", "sync")]
)
@each_store
def test_failovers_in_a_row_lose_nothing_or_what_their_receipts_say(
    kind: str, mode: str, store: StoreName
) -> None:
    """Each time the replicas lag. Asynchronous: the primary's agent stands still, so that what it
    has is told. Synchronous: every other time all of its machine is killed."""

    async def scenario(group: ReplicaGroup) -> None:
        losses = Losses(group)
        for number in range(TIMES):
            state = await group.whole()
            old = group.machine(state.primary_server)
            await group.writer.goes_on(old.name, 10)
            assert old.to_server is not None
            if mode == "async":
                await lag(group, old, 10)
            else:
                await old.to_server.hold()
            if mode == "async" or number % 2:
                await group.freeze(old, "agent")
            else:
                await group.kill(old)
            state = await group.serves(state.epoch + 1)
            assert state.primary_server != old.name or mode == "sync"
            await old.to_server.release()
            old.thaw()
            if old.run is None:
                group.start(old)
            state = await group.whole(state.epoch)
            if mode == "async":
                # What an independent writer misses now is what the receipt of this epoch says.
                assert await losses.count(state.primary_server, old)
            else:
                assert not await group.writer.missing(group.machine(state.primary_server))
        assert len({one.epoch for one in group.serving}) > TIMES
        kept = await all_have_the_same(group)
        assert {one.key for one in group.writer.acked} - kept == losses.lost
        if mode == "sync":
            assert not losses.lost

    # On a busy machine a guard needs more time to close its server before the kernel ends both.
    play(scenario, kind=kind, store=store, between=True, more=f'ttl_s = 6\nmode = "{mode}"')


@pytest.mark.scenario("FO-19", partial=True)
@each_store
def test_what_a_replica_alone_has_is_saved_though_its_agent_stood_still(store: StoreName) -> None:
    """Its primary's server came back without data meanwhile, and followed the lagging replica."""

    async def scenario(group: ReplicaGroup) -> None:
        state = await group.whole()
        old = group.machine(state.primary_server)
        lags, ahead = group.others(old.name)
        await group.database.hold_back(old.port, lags.port, lags.name)
        await group.writer.goes_on(old.name, 20)
        group.writer.goes.clear()
        acked = {one.key for one in group.writer.acked}

        async def has_all() -> bool:
            return acked <= await ahead.keys()

        await group.until(has_all, "one replica has everything")
        await group.freeze(ahead, "agent")
        old.send("server", signal.SIGKILL)
        state = await group.serves(state.epoch + 1, by=lags.name)
        keys = await lags.keys()

        async def follows() -> bool:
            return await old.keys() >= keys

        await group.until(follows, "the old primary's server has what the new primary has")

        # It asks at the address of its old primary, in vain.
        async def refused() -> bool:
            assert acked <= await ahead.keys()
            found = await command(old.port, "INFO", "stats")
            return "acl_access_denied_auth:0" not in found

        await group.until(refused, "it was refused")
        assert acked <= await ahead.keys()
        ahead.thaw()
        await group.whole(state.epoch)
        missing = acked - await group.machine(state.primary_server).keys()
        [receipt] = await group.receipts()
        assert (receipt.server, receipt.writes) == (ahead.name, len(missing))
        assert missing == group.database.saved(receipt)

    play(scenario, store=store, more="ttl_s = 6")


@each_database()
@each_store
def test_a_replica_whose_agent_missed_a_switchover_has_lost_nothing(
    kind: str, store: StoreName
) -> None:
    async def scenario(group: ReplicaGroup) -> None:
        state = await group.whole()
        await group.writer.goes_on(state.primary_server, 10)
        one, other = group.others(state.primary_server)
        await group.freeze(other, "agent")
        said = await group.domicile("switchover", "orders", "--to", one.name)
        assert said.returncode == 0, said.stderr
        state = await group.serves(state.epoch + 1, by=one.name)
        await group.writer.goes_on(one.name, 10)

        async def gone() -> bool:
            return other.name not in {member.server for member in await group.members()}

        await group.until(gone, "its agent's lease has ended")
        other.thaw()
        await group.whole(state.epoch)
        assert not [one for one in await group.receipts() if one.server == other.name]

    play(scenario, kind=kind, store=store, more="ttl_s = 6")


@pytest.mark.scenario("FO-15")
@pytest.mark.parametrize(
    ("kind", "mode"),
    [("valkey", "async"), ("redis", "async"), ("postgresql", "async"), ("postgresql", "sync")],
)
@each_store
def test_planned_switchovers_under_load_lose_nothing(
    kind: str, mode: str, store: StoreName
) -> None:
    """A hundred clients write to the primary, and a hundred have a transaction open. Programs
    write through the product's helpers, repeat nothing themselves, and have no write fail."""

    async def scenario(group: ReplicaGroup) -> None:
        clients = [*(FollowingClient(group, n) for n in range(2)), FollowingThread(group, 2)]
        writing = [asyncio.create_task(client.run()) for client in clients]
        committed: set[str] = set()
        try:
            for number in range(5):
                state = await group.whole()
                old = group.machine(state.primary_server)
                for client in clients:
                    await client.goes_on(20)
                async with Crowd(group, old, first=number * CROWD) as crowd:
                    said = await group.domicile("switchover", "orders")
                    assert said.returncode == 0, said.stderr
                    state = await group.serves(state.epoch + 1)
                    committed |= set(await crowd.committed())
                assert state.primary_server != old.name
                for client in clients:
                    await client.goes_on(20)
        finally:
            for task in writing:
                task.cancel()
            _, left = await asyncio.wait(writing, timeout=PATIENCE_S)
            for task in left:
                task.print_stack()
            assert not left, "a client does not end"
        for task, client in zip(writing, clients, strict=True):
            if not task.cancelled():
                task.result()
            print(f"{len(client.acked)} writes, the longest took {client.longest_s:.2f} s")
        print(f"{len(group.writer.acked)} other writes")
        assert [one for client in clients for one in client.failed] == []
        kept = await all_have_the_same(group)
        for client in clients:
            assert not set(client.acked) - kept
        assert not {one.key for one in group.writer.acked} - kept
        assert not committed - kept
        # PostgreSQL writes something into its log also by itself.
        assert not any(one.writes for one in await group.receipts())

    # A failover by a lease that ends on a busy machine is no planned switchover.
    play(scenario, kind=kind, store=store, more=f'ttl_s = 20\nmode = "{mode}"')


@pytest.mark.scenario("FO-02")
@pytest.mark.parametrize(
    ("kind", "mode"), [("valkey", "async"), ("postgresql", "async"), ("postgresql", "sync")]
)
@each_store
def test_a_new_server_is_no_member_before_all_of_the_copy_has_arrived(
    kind: str, mode: str, store: StoreName
) -> None:
    """A half of the copy arrives, from the first primary and then from the next one."""

    async def scenario(group: ReplicaGroup) -> None:
        first, second, new = group.machines
        state = await group.serves(1)
        if state.primary_server != first.name:
            said = await group.domicile("switchover", "orders", "--to", first.name)
            assert said.returncode == 0, said.stderr
            state = await group.whole(state.epoch + 1, of=2)
        await group.database.fill(first.port, 8 * MEBIBYTE)
        await group.writer.goes_on(first.name, 50)
        for one in (first, second):
            assert one.to_server is not None
            await one.to_server.only(MEBIBYTE)
        group.start(new)

        async def begun() -> bool:
            assert first.to_server is not None
            known = new.name in {one.server for one in await group.members()}
            return known and first.to_server.keeps_back

        await group.until(begun, "a part of the copy has arrived, and no more comes")

        async def outside() -> None:
            """It is not a member: neither to be chosen nor in any write quorum, ever."""
            [record] = [one for one in await group.members() if one.server == new.name]
            now = await group.state()
            assert now is not None
            assert not record.fit or record.position.epoch < now.epoch, record
            assert not any(
                new.name in quorum.members
                for one in await group.history()
                for quorum in one.state.quorums
            )

        await outside()
        await group.writer.goes_on(first.name, 50)
        await outside()
        said = await group.domicile("switchover", "orders", "--to", new.name)
        assert said.returncode != 0
        state = await group.serves(state.epoch, by=first.name)

        # The primary is lost meanwhile. The new server is not chosen, and gets no further.
        await group.freeze(first, "agent")
        state = await group.serves(state.epoch + 1, by=second.name)
        await outside()

        # All of it arrives: from the moment at which it counts it has all that was acknowledged.
        kept = {one.key for one in group.writer.acked} & await second.keys()
        first.thaw()
        for one in (first, second):
            assert one.to_server is not None
            await one.to_server.all()

        async def counts() -> bool:
            found = await group.state()
            assert found is not None
            if mode == "sync":
                return any(new.name in one.members for one in found.quorums)
            return any(
                one.server == new.name and one.fit and one.position.epoch == found.epoch
                for one in await group.members()
            )

        await group.until(counts, "it is a member")
        assert not kept - await new.keys()
        await group.whole(state.epoch)
        said = await group.domicile("switchover", "orders", "--to", new.name)
        assert said.returncode == 0, said.stderr
        state = await group.serves(state.epoch + 1, by=new.name)
        await group.writer.goes_on(new.name, 20)

    play(
        scenario, 3, kind=kind, store=store, between=True, started=2,
        more=f'ttl_s = 6\nmode = "{mode}"',
    )  # fmt: skip


@pytest.mark.scenario("FO-02", "FO-13", partial=True)
@pytest.mark.parametrize(
    ("kind", "mode"), [("valkey", "async"), ("postgresql", "async"), ("postgresql", "sync")]
)
@each_store
def test_a_new_server_counts_once_it_has_everything(kind: str, mode: str, store: StoreName) -> None:
    """Its primary answers it too late at first; then a primary is lost before it has anything."""

    async def scenario(group: ReplicaGroup) -> None:
        first, second = group.machines
        assert first.to_server is not None
        if mode == "async":
            await group.writer.goes_on(first.name, 50)
        await first.to_server.hold()
        group.start(second)

        async def there() -> bool:
            return second.name in {one.server for one in await group.members()}

        await group.until(there, "the new server is registered")
        await group.until(lambda: "serving 1" in second.log, "it knows whom to follow")
        if mode == "async":
            await group.writer.goes_on(first.name, 50)
        found = await group.status()
        new = next(one for one in found["servers"] if one["server"] == second.name)
        assert new["epoch"] == 0
        assert not any(second.name in one for one in found["quorums"])

        # Lost now, the primary is replaced by nobody: the new one has nothing.
        state = await group.serves(1)
        await group.freeze(first, "agent")

        async def waits() -> bool:
            found = await group.state()
            return found is not None and found.phase is GroupPhase.ELECTING

        await group.until(waits, "an election begins")
        said = await group.status()
        await group.until(
            lambda: "no live member" in second.log, "it says that nobody can be chosen"
        )
        assert said["primary"] is None
        first.thaw()
        state = await group.serves(state.epoch + 1, by=first.name)
        assert all(seen.server == first.name for seen in group.serving)

        # It gets everything, and counts.
        await first.to_server.release()
        state = await group.whole(state.epoch)
        await group.writer.goes_on(first.name, 20)
        if mode == "sync":

            async def listed() -> bool:
                found = await group.state()
                assert found is not None
                return any(second.name in one.members for one in found.quorums)

            await group.until(listed, "it is in the write quorum")
        assert not await group.writer.missing(first)

    play(
        scenario, 2, kind=kind, store=store, between=True, started=1, more=f'mode = "{mode}"'
    )  # fmt: skip
