"""What failovers in a row keep, lose and tell, on real servers (FO-02, FO-14, FO-15, FO-19).

By hand: `make test-replica`. The servers reach each other through proxies, so that replicas can be
made to lag while clients and the store are reached.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from replica_databases import DATABASES, command, each_database
from replica_lab import PATIENCE_S, FollowingClient, Machine, ReplicaGroup, StoreName, play

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


@pytest.mark.scenario("FO-19")
@pytest.mark.scenario("FO-14", partial=True)
@pytest.mark.parametrize(
    ("kind", "store"), [("valkey", "sqlite"), ("valkey", "etcd"), ("postgresql", "etcd")]
)
def test_asynchronous_failovers_in_a_row_lose_what_their_receipts_say(
    kind: str, store: StoreName
) -> None:
    """Each time the replicas lag, and the primary's agent stands still."""

    async def scenario(group: ReplicaGroup) -> None:
        lost: set[str] = set()
        losses = 0
        known: set[str] = set()
        for _ in range(TIMES):
            state = await group.whole()
            old = group.machine(state.primary_server)
            await group.writer.goes_on(old.name, 10)
            losses += bool(await lag(group, old, 10))
            await group.freeze(old, "agent")
            state = await group.serves(state.epoch + 1)
            assert state.primary_server != old.name
            assert old.to_server is not None
            await old.to_server.release()
            old.thaw()
            state = await group.whole(state.epoch)
            # What an independent writer misses now is what the receipt of this epoch says.
            acked = {one.key for one in group.writer.acked}
            keys = await group.machine(state.primary_server).keys()
            receipts = [one for one in await group.receipts() if one.saved not in known]
            known |= {one.saved for one in receipts}
            assert [one.server for one in receipts] == [old.name]
            missing = acked - keys - lost
            saved = group.database.saved(receipts[0])
            assert missing
            assert missing <= saved
            # It may also hold writes that the server had, and whose answers were lost.
            unknown = {key for key, at in group.writer.open.items() if at == old.name} & saved
            assert len(missing) <= receipts[0].writes <= len(missing | unknown - keys)
            lost |= missing
        assert losses == TIMES
        state = await group.whole()
        group.writer.goes.clear()
        state = await group.whole()
        # No divergence: all have the same.
        wanted = await group.machine(state.primary_server).keys()
        for one in group.others(state.primary_server):

            async def same(one: Machine = one) -> bool:
                return await one.keys() == wanted

            await group.until(same, f"{one.name} has what the primary has")
        assert {one.key for one in group.writer.acked} - wanted == lost

    # On a busy machine a guard needs more time to close its server before the kernel ends both.
    play(scenario, kind=kind, store=store, between=True, more="ttl_s = 6")


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


@pytest.mark.scenario("FO-14", partial=True)
@pytest.mark.parametrize(("kind", "store"), [("postgresql", "sqlite"), ("postgresql", "etcd")])
def test_synchronous_failovers_in_a_row_lose_nothing(kind: str, store: StoreName) -> None:
    """Each time the replicas lag; the primary's agent stands still, or its server is killed."""

    async def scenario(group: ReplicaGroup) -> None:
        for number in range(TIMES):
            state = await group.whole()
            old = group.machine(state.primary_server)
            await group.writer.goes_on(old.name, 10)
            assert old.to_server is not None
            await old.to_server.hold()
            if number % 2:
                await group.freeze(old, "agent")
            else:
                await group.kill(old)
            state = await group.serves(state.epoch + 1)
            await old.to_server.release()
            old.thaw()
            if old.run is None:
                group.start(old)
            state = await group.whole(state.epoch)
            assert not await group.writer.missing(group.machine(state.primary_server))
        group.writer.goes.clear()
        state = await group.whole()
        for one in group.machines:

            async def whole(one: Machine = one) -> bool:
                return not await group.writer.missing(one)

            await group.until(whole, f"{one.name} has all that was acknowledged")

    play(scenario, kind=kind, store=store, between=True, more='mode = "sync"')


@pytest.mark.scenario("FO-15", partial=True)
@each_database((*DATABASES, "redis"))
@each_store
def test_planned_switchovers_fail_no_write_of_a_client_that_follows(
    kind: str, store: StoreName
) -> None:
    """Two programs write through the product's helpers, and repeat nothing themselves."""

    async def scenario(group: ReplicaGroup) -> None:
        clients = [FollowingClient(group, number) for number in range(2)]
        writing = [asyncio.create_task(client.run()) for client in clients]
        try:
            for _ in range(5):
                state = await group.whole()
                for client in clients:
                    await client.goes_on(20)
                said = await group.domicile("switchover", "orders")
                assert said.returncode == 0, said.stderr
                state = await group.serves(state.epoch + 1)
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
        assert [one for client in clients for one in client.failed] == []
        state = await group.whole()
        keys = await group.machine(state.primary_server).keys()
        for client in clients:
            assert not set(client.acked) - keys
        assert not await group.writer.missing(group.machine(state.primary_server))
        # PostgreSQL writes something into its log also by itself.
        assert not any(one.writes for one in await group.receipts())

    # A failover by a lease that ends on a busy machine is no planned switchover.
    play(scenario, kind=kind, store=store, more="ttl_s = 20")


@pytest.mark.scenario("FO-02", "FO-13", "FO-18", partial=True)
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
