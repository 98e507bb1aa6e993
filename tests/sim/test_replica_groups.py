"""A replica group in virtual time: one fault each, and what must follow (F1-F13)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

import pytest
from msgspec import structs

from domicile.core.ids import Incarnation
from domicile.core.state.txn import At, Committed, Delete, Put
from domicile.failover.records import (
    MAX_RECEIPTS,
    MAX_SERVERS,
    GroupConfig,
    GroupPhase,
    GroupState,
    LossReceipt,
    LossSum,
    ServerRecord,
    config_key,
    decode_group_record,
    encode_group_record,
    loss_sum_key,
    receipt_key,
    receipts_prefix,
    server_key,
    servers_prefix,
)
from domicile.testing.checkers.verdict import Violation
from domicile.testing.groups.checkers import (
    check_contents,
    check_kept,
    check_one_primary,
    check_promotions,
    check_receipts,
    states,
    stored_receipts,
)
from domicile.testing.groups.group import GroupMachineHost, SimGroup
from domicile.testing.groups.servers import (
    Accepted,
    GroupLog,
    LogEntry,
    Promotion,
    SimNoteBook,
    saved_at,
)

SYNC, ASYNC = GroupConfig("sim", mode="sync"), GroupConfig("sim")

Scenario = Callable[[SimGroup], Awaitable[None]]


def play(
    scenario: Scenario,
    config: GroupConfig = SYNC,
    seed: int = 1,
    *,
    cascades: bool | None = None,
    attached: bool = False,
) -> SimGroup:
    """A group that serves and is written to; the scenario; and a verdict at the end."""
    group = SimGroup(seed, config, cascades=cascades, attached=attached)
    found: list[Violation] = []

    async def main() -> None:
        group.start()
        await whole(group)
        end = group.world.now + 60.0
        writer = asyncio.get_running_loop().create_task(group.keep_writing("a", end))
        await asyncio.sleep(1.0)
        await scenario(group)
        writer.cancel()
        await asyncio.wait([writer])
        await whole(group)
        state = await served(group)
        log = group.databases[state.primary_server].log
        found.extend(check_one_primary(group.history, group.record))
        found.extend(
            check_kept(
                group.record,
                log,
                stored_receipts(group.history),
                sync=config.sync,
                at=group.world.now,
            )
        )
        logs = {name: database.log for name, database in group.databases.items()}
        found.extend(check_contents(logs, group.world.now))
        found.extend(check_receipts(group.record))
        found.extend(check_promotions(group.history, group.record))

    try:
        group.world.run(main(), group.world.process("test"))
    finally:
        group.world.close()
    assert [str(one) for one in found] == []
    assert group.world.errors == []
    assert len(group.record.acknowledged) > 20
    return group


def run_whole(group: SimGroup, scenario: Coroutine[None, None, None]) -> None:
    try:
        group.world.run(scenario, group.world.process("test"))
    finally:
        group.world.close()
    assert group.world.errors == []


async def whole(group: SimGroup) -> None:
    async with asyncio.timeout(30.0):
        while await group.settled():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def served(group: SimGroup) -> GroupState:
    state, _ = await group.state()
    assert state is not None
    return state


async def primary(group: SimGroup) -> GroupMachineHost:
    name = (await served(group)).primary_server
    return next(machine for machine in group.machines if machine.name == name)


async def next_epoch(group: SimGroup, epoch: int = 2) -> GroupState:
    async with asyncio.timeout(20.0):
        while True:
            state = await served(group)
            if state.phase is GroupPhase.SERVING and state.epoch >= epoch:
                return state
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("config", [SYNC, ASYNC], ids=["sync", "async"])
def test_a_machine_that_dies_is_replaced_and_comes_back_as_a_replica(config: GroupConfig) -> None:
    async def scenario(group: SimGroup) -> None:
        old = await primary(group)
        began = group.world.now
        group.lose_machine(old, 10.0)
        state = await next_epoch(group)
        assert state.primary_server != old.name
        assert group.world.now - began < group.settings.ttl_s + 2.0
        await asyncio.sleep(12.0)
        assert old.database.follows == state.primary_server

    play(scenario, config)


def test_a_server_that_crashes_under_a_living_agent_is_replaced_at_once() -> None:
    async def scenario(group: SimGroup) -> None:
        old = await primary(group)
        began = group.world.now
        group.crash_server(old, 5.0, 0)
        state = await next_epoch(group)
        assert state.why == "the primary's server does not run"
        assert group.world.now - began < 2.0
        await asyncio.sleep(6.0)

    play(scenario)


@pytest.mark.parametrize("frozen", ["machine", "agent", "agent and guard"])
def test_whatever_is_frozen_beside_it_a_server_is_closed_by_its_deadline(frozen: str) -> None:
    async def scenario(group: SimGroup) -> None:
        old = await primary(group)
        if frozen == "machine":
            group.freeze_machine(old, 8.0)
        else:
            group.freeze_agent(old, 8.0)
            if frozen == "agent and guard":
                group.freeze_guard(old, 8.0)
        state = await next_epoch(group)
        assert state.primary_server != old.name
        await asyncio.sleep(8.0)

    group = play(scenario)
    assert any(one.server == "s1" for one in group.record.accepted)


def test_a_primary_without_the_store_stops_before_its_successor_begins() -> None:
    async def scenario(group: SimGroup) -> None:
        old = await primary(group)
        group.cut_store(old, 10.0)
        await next_epoch(group)
        assert not old.database.open_epoch
        await asyncio.sleep(10.0)

    play(scenario)


def test_a_store_that_is_away_for_a_moment_changes_nothing() -> None:
    async def scenario(group: SimGroup) -> None:
        group.outage(1.0)
        await asyncio.sleep(5.0)
        assert (await served(group)).epoch == 1

    play(scenario)


def test_the_orchestrator_dies_at_each_step() -> None:
    """Each agent that is named in the state is killed once, as soon as it is."""

    async def scenario(group: SimGroup) -> None:
        group.lose_machine(await primary(group), 6.0)
        struck: dict[tuple[GroupPhase, str], None] = {}
        async with asyncio.timeout(40.0):
            while len(struck) < 2:
                state = await served(group)
                named = state.candidate if state.phase is GroupPhase.CHOSEN else state.orchestrator
                for machine in group.machines:
                    agent = machine.agent
                    step = (state.phase, "")
                    if agent and agent.incarnation == named and step not in struck:
                        struck[step] = None
                        group.kill_agent(machine, 0.5)
                await asyncio.sleep(0.005)
        await next_epoch(group)
        await asyncio.sleep(8.0)

    play(scenario)


def test_a_switchover_loses_nothing() -> None:
    async def scenario(group: SimGroup) -> None:
        assert await group.switch_over("s2")
        state = await next_epoch(group)
        assert state.primary_server == "s2"
        await asyncio.sleep(2.0)

    group = play(scenario, ASYNC)
    assert group.record.given_up == []


def others(group: SimGroup, old: GroupMachineHost) -> tuple[GroupMachineHost, GroupMachineHost]:
    one, other = (machine for machine in group.machines if machine is not old)
    return one, other


each_kind = pytest.mark.parametrize("cascades", [False, True], ids=["copies", "cascades"])


@each_kind
@pytest.mark.parametrize("left", ["nothing", "less"])
def test_what_a_replica_alone_has_is_saved_though_its_agent_was_away(
    cascades: bool, left: str
) -> None:
    """F10: another server, or the same one with less, answers at its primary's address."""

    async def scenario(group: SimGroup) -> None:
        old = await primary(group)
        lagging, ahead = others(group, old)
        group.partition(old, lagging, 0.5)
        await asyncio.sleep(0.3)
        group.kill_agent(ahead, 8.0)
        had = len(ahead.database.log)
        group.crash_server(old, 0.02, 1_000_000 if left == "nothing" else 3)
        state = await next_epoch(group)
        assert state.primary_server == (lagging.name if left == "nothing" else old.name)
        await asyncio.sleep(9.0)
        assert {server for _, server, writes in group.record.given_up if writes} == {ahead.name}
        assert state.chain[-1].begin < had

    play(scenario, ASYNC, cascades=cascades)


@each_kind
def test_a_replica_that_missed_a_switchover_loses_nothing(cascades: bool) -> None:
    """F10: by itself it may have gone on into a history that its agent does not know."""

    async def scenario(group: SimGroup) -> None:
        one, other = others(group, await primary(group))
        group.kill_agent(other, 8.0)
        assert await group.switch_over(one.name)
        await next_epoch(group)
        await asyncio.sleep(9.0)

    group = play(scenario, ASYNC, cascades=cascades)
    assert group.record.given_up == []


@each_kind
def test_a_replica_knows_what_it_has_of_an_epoch_that_is_over(cascades: bool) -> None:
    """F10: it went along into one more epoch without its agent, and then a third one began."""

    async def scenario(group: SimGroup) -> None:
        old = await primary(group)
        one, other = others(group, old)
        group.kill_agent(other, 12.0)
        assert await group.switch_over(one.name)
        await next_epoch(group)
        await asyncio.sleep(2.0)
        group.partition(old, other, 10.0)
        assert await group.switch_over(old.name)
        await next_epoch(group, 3)
        await asyncio.sleep(12.0)

    group = play(scenario, ASYNC, cascades=cascades)
    assert group.record.given_up == []


def test_a_replica_knows_what_it_has_of_an_epoch_that_was_never_served() -> None:
    """F10: it followed without its agent when its primary was promoted again and fell."""

    async def scenario(group: SimGroup) -> None:
        old = await primary(group)
        one, other = others(group, old)
        group.kill_agent(other, 2.2)
        group.partition(old, one, 3.0)
        await asyncio.sleep(0.2)
        group.crash_server(old, 0.02, 0)
        async with asyncio.timeout(20.0):
            while len(group.record.promoted) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.0005)
        promoted = group.record.promoted[-1]
        assert (promoted.server, promoted.epoch) == (old.name, 2)
        group.kill_agent(old, 0.5)
        state = await next_epoch(group, 3)
        assert [one.epoch for one in state.chain] == [0, 1, 2, 3]
        assert not [one for _, one in states(group.history) if one.get("served") == 2]
        await asyncio.sleep(10.0)

    group = play(scenario, ASYNC, cascades=True)
    assert group.record.given_up == []


@each_kind
def test_what_is_saved_is_counted_right_if_saving_is_cut_short(cascades: bool) -> None:
    """F10: a server may show another history from then on, and has the same data."""

    async def scenario(group: SimGroup) -> None:
        old = await primary(group)
        for other in others(group, old):
            group.partition(old, other, 4.0)
        await asyncio.sleep(0.3)
        group.freeze_agent(old, 4.0)
        async with asyncio.timeout(20.0):
            while not group.record.given_up:  # noqa: ASYNC110
                await asyncio.sleep(0.0005)
        group.kill_agent(old, 0.2)
        await asyncio.sleep(5.0)

    group = play(scenario, ASYNC, cascades=cascades)
    saved = [writes for _, _, writes in group.record.given_up]
    assert len(saved) == 2
    assert saved[0] == saved[1]


def test_nobody_is_elected_while_sessions_outlive_the_primarys_server() -> None:
    """F4: its guard stands still and can't end them."""

    async def scenario(group: SimGroup) -> None:
        old = await primary(group)
        group.freeze_guard(old, 1.0)
        group.crash_server(old, 5.0, 0, orphans=True)
        await asyncio.sleep(0.5)
        assert old.database.orphans
        await next_epoch(group)
        assert not old.database.orphans
        await asyncio.sleep(6.0)

    play(scenario)


def test_elections_promotions_and_losses_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Each once, by the agent that did it."""

    async def scenario(group: SimGroup) -> None:
        old = await primary(group)
        for other in others(group, old):
            group.partition(old, other, 4.0)
        await asyncio.sleep(0.3)
        group.freeze_agent(old, 4.0)
        await next_epoch(group)
        await asyncio.sleep(8.0)

    with caplog.at_level("WARNING", logger="domicile"):
        group = play(scenario, ASYNC)
    elections = [one.fields["epoch"] for one in group.history.of("electing")]
    promotions = [
        (one.fields["server"], one.fields["epoch"]) for one in group.history.of("promoted")
    ]
    assert elections == [1, 2]
    assert [epoch for _, epoch in promotions] == [1, 2]
    [loss] = group.history.of("loss")
    [(_, server, writes)] = group.record.given_up
    assert (loss.fields["server"], loss.fields["writes"]) == (server, len(writes))
    assert [line for line in caplog.messages if f"{len(writes)} writes" in line and server in line]


def test_an_attached_server_outlives_its_guard_and_serves_on() -> None:
    async def scenario(group: SimGroup) -> None:
        old = await primary(group)
        run = old.database.run
        group.kill_guard(old)
        assert old.database.open_epoch
        await asyncio.sleep(5.0)
        state = await served(group)
        assert (state.epoch, state.primary_server, old.database.run) == (1, old.name, run)
        # Its agent is gone, too, before another guard is there.
        group.kill_guard(old)
        old.kill_agent()
        await asyncio.sleep(8.0)

    play(scenario, ASYNC, attached=True)


def test_an_order_to_open_that_is_still_under_way_does_not_undo_a_drain() -> None:
    """F11: what is written behind the final position would be lost by the switchover."""

    async def scenario(group: SimGroup) -> None:
        old = await primary(group)
        other = next(machine for machine in group.machines if machine is not old)
        before = (await served(group)).primary
        # It lags, so the switchover takes a while.
        group.partition(old, other, 6.0)
        await asyncio.sleep(1.0)
        old.guard.slow_s = 1.0
        group.kill_agent(old, 0.1)
        async with asyncio.timeout(20.0):
            while (await served(group)).primary == before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        # The new agent has its server opened, which takes a while, too.
        assert await group.switch_over(other.name)
        await asyncio.sleep(0.5)
        for _ in range(200):
            await asyncio.sleep(0.01)
            assert (await served(group)).phase is GroupPhase.SWITCHING
            assert not old.database.open_epoch
        old.guard.slow_s = 0.0
        await next_epoch(group)
        await asyncio.sleep(5.0)

    play(scenario, ASYNC)


def test_a_switchover_to_one_that_lags_is_reverted() -> None:
    config = GroupConfig("sim", switch_s=1.0)

    async def scenario(group: SimGroup) -> None:
        old = await primary(group)
        other = next(machine for machine in group.machines if machine is not old)
        group.partition(old, other, 6.0)
        await asyncio.sleep(0.3)
        assert await group.switch_over(other.name)
        await asyncio.sleep(0.1)
        assert (await served(group)).phase is GroupPhase.SWITCHING
        await asyncio.sleep(3.0)
        state = await served(group)
        assert (state.phase, state.epoch) == (GroupPhase.SERVING, 1)
        assert state.primary_server == old.name
        await asyncio.sleep(5.0)

    play(scenario, config)


def test_without_enough_of_a_quorum_the_group_waits() -> None:
    """F7: the one replica that is left lags; what it lacks was acknowledged."""

    async def scenario(group: SimGroup) -> None:
        old = await primary(group)
        lagging, other = [machine for machine in group.machines if machine is not old]
        group.partition(old, lagging, 20.0)
        await asyncio.sleep(1.0)
        group.lose_machine(old, 12.0)
        group.lose_machine(other, 12.0)
        await asyncio.sleep(10.0)
        assert (await served(group)).phase is GroupPhase.ELECTING
        waits = lagging.agent.machine.waits if lagging.agent else None
        assert waits is not None
        assert "an acknowledged write might be lost" in str(waits)
        await next_epoch(group)
        await asyncio.sleep(14.0)

    play(scenario)


def test_an_asynchronous_loss_is_receipted() -> None:
    async def scenario(group: SimGroup) -> None:
        old = await primary(group)
        for machine in group.machines:
            if machine is not old:
                group.partition(old, machine, 6.0)
        await asyncio.sleep(0.5)
        group.freeze_machine(old, 6.0)
        await next_epoch(group)
        await asyncio.sleep(8.0)

    group = play(scenario, ASYNC)
    assert group.record.given_up
    assert sum(len(writes) for _, _, writes in group.record.given_up) > 0


def test_the_oldest_receipts_become_a_sum_and_no_count_is_lost() -> None:
    before = [
        LossReceipt(server=f"old-{n % 3}", epoch=-n, chain=(), kept=100, had=100 + n,
                    writes=-1 if n % 10 == 0 else n)
        for n in range(1, MAX_RECEIPTS + 6)
    ]  # fmt: skip
    found: list[tuple[LossSum, list[LossReceipt]]] = []

    async def scenario(group: SimGroup) -> None:
        for one in before:
            put = Put(receipt_key("g", one.epoch, one.server), encode_group_record(one))
            assert isinstance(await group.backend.commit([], [put]), Committed)
        old = await primary(group)
        for machine in group.machines:
            if machine is not old:
                group.partition(old, machine, 6.0)
        await asyncio.sleep(0.5)
        group.freeze_machine(old, 6.0)
        await next_epoch(group)
        async with asyncio.timeout(60.0):
            while (item := await group.backend.get(loss_sum_key("g"))) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        listing = await group.backend.list(receipts_prefix("g"))
        left = [decode_group_record(one.value, LossReceipt) for one in listing.items]
        found.append((decode_group_record(item.value, LossSum), left))

    group = play(scenario, ASYNC)
    ((whole, left),) = found
    assert len(left) == MAX_RECEIPTS
    assert whole.receipts + len(left) == len(before) + len(group.record.given_up)
    for one in left:
        whole = whole.plus(one)
    new = [one for one in left if one not in before]
    assert new
    assert whole.size == sum(one.had - one.kept for one in (*before, *new))
    assert whole.writes == sum(max(0, one.writes) for one in (*before, *new))
    assert whole.uncounted == sum(one.writes < 0 for one in (*before, *new))


def test_a_server_too_many_stays_out_until_another_one_is_gone() -> None:
    group = SimGroup(1, ASYNC, servers=1)
    others = [server_key("g", f"other-{n}", Incarnation(f"i{n}")) for n in range(MAX_SERVERS)]

    async def main() -> None:
        for key in others:
            record = ServerRecord(
                server="other", incarnation=Incarnation("i"), address="", ttl_s=3.0, fit=False
            )
            put = Put(key, encode_group_record(record))
            assert isinstance(await group.backend.commit([], [put]), Committed)
        group.start()
        await asyncio.sleep(10.0)
        assert "s1" not in await group.members()
        assert isinstance(await group.backend.commit([], [Delete(others[0])]), Committed)
        async with asyncio.timeout(20.0):
            while "s1" not in await group.members():  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    run_whole(group, main())


@pytest.mark.parametrize("seed", range(1, 9))
def test_the_number_of_synchronous_replicas_changes_and_no_write_is_lost(seed: int) -> None:
    async def configure(group: SimGroup, count: int) -> None:
        while True:
            item = await group.backend.get(config_key("g"))
            assert item is not None
            config = structs.replace(decode_group_record(item.value, GroupConfig), sync_count=count)
            put = Put(config_key("g"), encode_group_record(config))
            if isinstance(
                await group.backend.commit([At(item.key, item.revision)], [put]), Committed
            ):
                return

    async def used(group: SimGroup, count: int) -> None:
        async with asyncio.timeout(30.0):
            while [one.count for one in (await served(group)).quorums] != [count]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def scenario(group: SimGroup) -> None:
        random = group.world.stream("configured")
        for count in (2, 1, 2, 1):
            await configure(group, count)
            if random.random() < 0.5:
                await used(group, count)
            await asyncio.sleep(random.random() * 0.3)
            hurt = random.choice((group.lose_machine, group.cut_store, group.freeze_machine))
            hurt(await primary(group), 4.0)
            await asyncio.sleep(8.0)
        await used(group, 1)

    play(scenario, SYNC, seed)


def test_settings_that_are_not_those_of_the_group_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(group: SimGroup) -> None:
        await asyncio.sleep(0.1)
        assert "is ignored" not in caplog.text
        group.config = structs.replace(SYNC, freeze_s=2.5, sync_count=2)
        machine = group.machines[0]
        machine.kill_agent()
        await asyncio.sleep(5.0)
        machine.start_agent()
        await asyncio.sleep(2.0)

    play(scenario)
    assert "freeze_s is 1 in the group's stored configuration, which holds, and 2.5" in caplog.text
    assert "domicile replica configure g sync_count=2" in caplog.text
    assert "switch_s" not in caplog.text


def test_a_second_server_of_one_id_stays_out_until_the_first_is_gone() -> None:
    """Taken for the first one it would count for its writes, and end its agent's record (F1)."""
    group = SimGroup(1, SYNC, servers=4)
    first, *others, second = group.machines
    second.notes = SimNoteBook(first.name, "another folder")

    async def named() -> list[str]:
        listing = await group.backend.list(servers_prefix("g"))
        records = [decode_group_record(item.value, ServerRecord) for item in listing.items]
        return sorted(one.address for one in records if one.server == first.name)

    async def main() -> None:
        for machine in (first, *others):
            machine.start_agent()
        async with asyncio.timeout(20.0):
            while (await group.state())[0] is None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await next_epoch(group, 1)
        second.start_agent()
        for _ in range(50):
            await asyncio.sleep(0.1)
            assert await named() == [first.name]
        first.kill_agent()
        async with asyncio.timeout(20.0):
            while await named() != [second.name]:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    run_whole(group, main())


def test_of_two_servers_of_one_id_that_begin_together_one_stays() -> None:
    group = SimGroup(1, SYNC, servers=2)
    first, second = group.machines
    second.notes = SimNoteBook(first.name, "another folder")

    async def main() -> None:
        group.start()
        async with asyncio.timeout(20.0):
            while len(await group.members()) != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await asyncio.sleep(5.0)
        listing = await group.backend.list(servers_prefix("g"))
        assert len(listing.items) == 1

    run_whole(group, main())


def test_a_run_repeats() -> None:
    async def scenario(group: SimGroup) -> None:
        group.lose_machine(await primary(group), 2.0)
        await next_epoch(group)
        await asyncio.sleep(4.0)

    runs = [play(scenario, seed=7) for _ in range(2)]
    logs = [[database.log for database in run.databases.values()] for run in runs]
    assert logs[0] == logs[1]
    assert [*states(runs[0].history)] == [*states(runs[1].history)]


# What the checkers must see


def accepted(server: str, epoch: int, at: float, write: int, *, late: bool = False) -> Accepted:
    return Accepted(at, server, epoch, write, late)


def judged(*writes: Accepted) -> list[str]:
    group = SimGroup(1, SYNC)

    async def main() -> None:
        for at, epoch, server in ((1.0, 1, "s1"), (2.0, 2, "s2")):
            await asyncio.sleep(at - (group.world.now - 1000.0))
            state = b'{"phase":"serving","epoch":%d,"primary_server":"%s"}' % (
                epoch, server.encode(),
            )  # fmt: skip
            group.history.event(
                "commit", by="x", revision=epoch, puts=[(b"group/g/state", state, None)],
                deletes=[],
            )  # fmt: skip

    group.world.run(main(), group.world.process("test"))
    group.world.close()
    record = GroupLog(accepted=[*writes])
    return [one.message for one in check_one_primary(group.history, record)]


def test_two_primaries_are_seen() -> None:
    assert judged(accepted("s1", 1, 1001.5, 1), accepted("s2", 2, 1002.5, 2)) == []
    assert judged(accepted("s1", 1, 1002.5, 1, late=True)) == []
    (late,) = judged(accepted("s1", 1, 1002.5, 1))
    assert "after its successor was announced" in late
    (other,) = judged(accepted("s3", 1, 1001.5, 1))
    assert "in epoch 1 of s1" in other
    (early,) = judged(accepted("s2", 2, 1001.5, 1))
    assert "which nobody served" in early


def test_lost_and_unreceipted_writes_are_seen() -> None:
    record = GroupLog(acknowledged={1: 5.0, 2: 5.0, 3: 5.0}, given_up=[(6.0, "s1", (3,))])
    log = [LogEntry("a", 1)]
    receipts = {saved_at(6.0, "s1"): 1}
    lost = check_kept(record, log, receipts, sync=True, at=9.0)
    assert [one.message for one in lost] == [
        "acknowledged write 2 is lost", "acknowledged write 3 is lost",
    ]  # fmt: skip
    (bare,) = check_kept(record, log, receipts, sync=False, at=9.0)
    assert bare.message == "acknowledged write 2 is gone, and no receipt has it"
    # What was saved counts only if a receipt in the store says so, and how much it was.
    for wrong in ({}, {saved_at(6.0, "s1"): 2}, {saved_at(6.0, "s2"): 1}):
        told = check_kept(record, log, wrong, sync=False, at=9.0)
        assert [one.message[19:20] for one in told] == ["2", "3"]


def test_promotions_of_others_of_less_and_once_more_are_seen() -> None:
    group = SimGroup(1, SYNC)

    async def main() -> None:
        state = b'{"phase":"chosen","epoch":2,"candidate_server":"s1","chosen":["s1",1,50]}'
        group.history.event(
            "commit", by="x", revision=1, puts=[(b"group/g/state", state, None)], deletes=[]
        )

    group.world.run(main(), group.world.process("test"))
    group.world.close()
    at = group.world.now

    def told(*promoted: Promotion) -> list[str]:
        record = GroupLog(promoted=[*promoted])
        return [one.message for one in check_promotions(group.history, record)]

    assert told(Promotion(at, "s1", 2, 50)) == []
    (other,) = told(Promotion(at, "s2", 2, 50))
    assert "for which s1 was chosen" in other
    (nobody,) = told(Promotion(at, "s1", 3, 50))
    assert "for which nobody was chosen" in nobody
    (less,) = told(Promotion(at, "s1", 2, 49))
    assert "with 49 entries, and was chosen for 50" in less
    (again,) = told(Promotion(at, "s1", 2, 50), Promotion(at, "s1", 2, 51))
    assert "and s1 was before" in again


def test_one_history_with_two_contents_is_seen() -> None:
    one = [LogEntry("a", 1), LogEntry("b", 2)]
    assert check_contents({"s1": one, "s2": [LogEntry("a", 1), LogEntry("c", 3)]}, 9.0) == []
    (other,) = check_contents({"s1": one, "s2": [LogEntry("a", 1), LogEntry("b", 3)]}, 9.0)
    assert "same history and other content at offset 1" in other.message
    (twice,) = check_contents({"s1": [LogEntry("a", 1), LogEntry("b", 1)]}, 9.0)
    assert twice.message == "s1 has a write twice"
