"""A store or a network that answers late or never (FO-12, FO-18).

By hand: `make test-replica`. Agents reach the store, and servers each other, through proxies. The
test itself reaches all of them all the time, and so do its clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import etcd_lab
import pytest
from late_proxy import LateProxy
from replica_databases import DATABASES, each_database
from replica_lab import Machine, ReplicaGroup, StoreName, play
from replica_scenarios import Losses, all_have_the_same

from domicile.failover.records import GroupPhase

LATE_S = 5.0

OPENED = "the server accepts writes in epoch"
"""What a guard logs whenever it has opened its server."""

ENDED = ("the agent's lease ended", "this incarnation is over")
"""What guard or agent log when they can't reach the store any longer."""

STORES: tuple[StoreName, ...] = ("sqlite", "etcd")


def opened(group: ReplicaGroup) -> dict[str, int]:
    """How often each guard has opened its server."""
    return {one.name: one.log.count(OPENED) for one in group.machines}


async def closed(group: ReplicaGroup, *machines: Machine) -> None:
    """Wait until the agents of these machines have ended, and clients are refused."""
    begun = {one.name: len(one.log) for one in machines}
    for one in machines:
        await group.until(
            lambda one=one: any(said in one.log[begun[one.name] :] for said in ENDED),  # type: ignore[misc]
            f"the deadline of {one.name} passes",
        )

        async def refuses(one: Machine = one) -> bool:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    return not await (await one.session()).write("w9000000")
            return True

        await group.until(refuses, f"{one.name} refuses writes")


async def primaries(group: ReplicaGroup) -> set[str]:
    """The servers that are no replicas, by their own word."""
    return {
        one.name for one in group.machines if not await group.database.fed_by(one.port, one.host)
    }


@pytest.mark.scenario("FO-12")
@each_database()
@pytest.mark.parametrize("how", ["stands still", "is killed"])
def test_without_the_store_data_flows_while_it_may_and_nobody_is_promoted(
    kind: str, how: str
) -> None:
    async def scenario(group: ReplicaGroup) -> None:
        server = etcd_lab.scenario_server()

        def down() -> None:
            if how == "is killed":
                server.save()
                server.kill()
            else:
                server.freeze()

        def up() -> None:
            if how == "is killed":
                server.start()
            else:
                server.thaw()

        # For less than a lease: data flows all the time, and nothing has changed afterwards.
        state = await group.whole()
        old = group.machine(state.primary_server)
        down()
        try:
            await group.writer.goes_on(old.name, 20)
        finally:
            up()
        await group.writer.goes_on(old.name, 20)
        again = await group.whole()
        assert (again.epoch, again.primary) == (state.epoch, state.primary)
        assert not await group.writer.missing(old)

        # For longer than all leases: data flows while it may, and then nobody takes writes.
        before = opened(group)
        assert before[old.name]
        down()
        try:
            await group.writer.goes_on(old.name, 20)
            await closed(group, *group.machines)
            assert opened(group) == before
            assert await primaries(group) <= {old.name}
        finally:
            up()

        # It is back: all is as it was, without anybody's help.
        state = await group.whole()
        print([(one.epoch, one.server) for one in group.serving], state.why)
        await group.writer.goes_on(state.primary_server, 20)
        assert not await group.writer.missing(group.machine(state.primary_server))
        assert not await group.receipts()
        await group.fed_by(state.primary_server)
        # Also what follows a loss.
        old = group.machine(state.primary_server)
        await group.kill(old)
        state = await group.serves(state.epoch + 1)
        assert state.primary_server != old.name
        await group.writer.goes_on(state.primary_server, 20)
        group.start(old)
        await group.whole(state.epoch)

    play(scenario, kind=kind, store="etcd", more="ttl_s = 8")


# The same faults, by a cut and by answers that come late


class Way:
    """How a proxy is in the way, until it is no longer."""

    def __init__(self, name: str, begin: Callable[[LateProxy], Awaitable[None]]) -> None:
        self.name, self._begin = name, begin
        self._used: list[LateProxy] = []

    async def begin(self, *proxies: LateProxy | None) -> None:
        for proxy in proxies:
            assert proxy is not None
            self._used.append(proxy)
            await self._begin(proxy)

    async def end(self) -> None:
        for proxy in self._used:
            await proxy.late()
            await proxy.release()
        self._used.clear()


CUT = Way("no answer", lambda proxy: proxy.hold())
LATE_ANSWERS = Way("late answers", lambda proxy: proxy.late(answers_s=LATE_S))
TO_STORE = (CUT, Way("late requests", lambda proxy: proxy.late(requests_s=LATE_S)), LATE_ANSWERS)
BETWEEN = (
    # What a server sends to its replicas are answers. Nobody asks for each of them.
    CUT,
    LATE_ANSWERS,
    Way("late both ways", lambda proxy: proxy.late(requests_s=LATE_S, answers_s=LATE_S)),
)

Outcome = dict[str, object]
"""What is to be seen from outside. Each line must be true, in whatever way the fault is made."""


async def store_of_all(group: ReplicaGroup, way: Way, losses: Losses) -> Outcome:
    state = await group.whole()
    old, before = group.machine(state.primary_server), opened(group)
    await way.begin(*(one.to_store for one in group.machines))
    await group.writer.goes_on(old.name, 20)
    await closed(group, *group.machines)
    seen = await primaries(group)
    outcome: Outcome = {
        "nobody is promoted": seen <= {old.name},
        "nobody is opened": opened(group) == before,
    }
    await way.end()
    state = await group.whole(state.epoch)
    missing = await group.writer.missing(group.machine(state.primary_server))
    outcome["nothing is lost"] = not missing
    return outcome


async def store_of_the_primary(group: ReplicaGroup, way: Way, losses: Losses) -> Outcome:
    state = await group.whole()
    old = group.machine(state.primary_server)
    session = await old.session()
    await session.begin("w9000001")
    gone = asyncio.create_task(group.gone(state.primary))
    await way.begin(old.to_store)
    await group.writer.goes_on(old.name, 20)
    after = await group.serves(state.epoch + 1)
    gone_at = await gone
    committed = False
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(5.0):
            committed = await session.commit()
    session.close()
    await group.writer.goes_on(after.primary_server, 20)
    late = [one for one in group.writer.acked if one.server == old.name and gone_at < one.after]
    outcome: Outcome = {
        "it is replaced": after.primary_server != old.name,
        "an open session commits nothing": not committed,
        "it is closed before": not late,
    }
    await way.end()
    await group.whole(after.epoch)
    return outcome


async def store_of_a_replica(group: ReplicaGroup, way: Way, losses: Losses) -> Outcome:
    state = await group.whole()
    one, other = group.others(state.primary_server)
    [record] = [each for each in await group.members() if each.server == one.name]
    await way.begin(one.to_store)
    await group.gone(record.incarnation)
    await group.writer.goes_on(state.primary_server, 20)
    now = await group.state()
    assert now is not None
    outcome: Outcome = {
        "the primary serves on": (now.epoch, now.primary) == (state.epoch, state.primary),
        "it is no member": {each.server for each in await group.members()}
        == {state.primary_server, other.name},
    }
    # An election goes on without it, too.
    old = group.machine(state.primary_server)
    await group.kill(old)
    after = await group.serves(state.epoch + 1)
    outcome["the other one is elected"] = after.primary_server == other.name
    await group.writer.goes_on(after.primary_server, 20)
    group.start(old)
    await way.end()
    await group.whole(after.epoch)
    return outcome


async def store_of_the_orchestrator(group: ReplicaGroup, way: Way, losses: Losses) -> Outcome:
    """It has read the positions, and what it decides comes late or never."""
    state = await group.whole()
    old = group.machine(state.primary_server)
    low, high = sorted(group.others(old.name), key=lambda one: one.name)
    low.stops_at("before electing")
    high.stops_at("before chosen")
    await group.kill(old)
    await group.until(lambda: high.stands_at("before chosen"), f"{high.name} has read positions")
    [record] = [each for each in await group.members() if each.server == high.name]
    low.goes_on()
    await way.begin(high.to_store)
    high.goes_on()
    after = await group.serves(state.epoch + 1)
    await group.gone(record.incarnation)
    await group.writer.goes_on(after.primary_server, 20)
    now = await group.state()
    assert now is not None
    outcome: Outcome = {
        "the other one serves": (now.phase, now.primary_server) == (GroupPhase.SERVING, low.name)
    }
    await way.end()
    group.start(old)
    again = await group.whole(after.epoch)
    outcome["what comes late changes nothing"] = again.primary_server == low.name
    outcome["nobody else served"] = {
        one.server for one in group.serving if one.epoch > state.epoch
    } == {low.name}
    return outcome


async def network_of_the_primary(group: ReplicaGroup, way: Way, losses: Losses) -> Outcome:
    """Its replicas lag, and then its agent stands still."""
    state = await group.whole()
    old = group.machine(state.primary_server)
    await way.begin(old.to_server)
    sync = bool(state.quorums)
    if not sync:
        await group.writer.goes_on(old.name, 50)
    await group.freeze(old, "agent")
    after = await group.serves(state.epoch + 1)
    await way.end()
    old.thaw()
    after = await group.whole(after.epoch)
    outcome: Outcome = {"it is replaced": after.primary_server != old.name}
    if sync:
        # What came late was acknowledged late, or not at all.
        missing = await group.writer.missing(group.machine(after.primary_server))
        outcome["nothing is lost"] = not missing
    else:
        # Fewer are lost if more have arrived; each is in the receipt.
        await losses.count(after.primary_server, old)
        outcome["what is lost is told"] = True
    return outcome


async def network_of_a_switchover(group: ReplicaGroup, way: Way, losses: Losses) -> Outcome:
    """The candidate gets too late what it must have."""
    state = await group.whole()
    old = group.machine(state.primary_server)
    target = group.others(old.name)[0]
    await way.begin(old.to_server)
    if not state.quorums:
        await group.writer.goes_on(old.name, 20)
    said = await group.domicile("switchover", "orders", "--to", target.name)
    now = await group.state()
    assert now is not None
    await way.end()
    again = await group.whole(state.epoch)
    await group.writer.goes_on(again.primary_server, 20)
    missing = await group.writer.missing(group.machine(again.primary_server))
    return {
        "it is given up": said.returncode != 0 and now.phase is GroupPhase.SERVING,
        "the primary serves on": (again.epoch, again.primary) == (state.epoch, state.primary),
        "nothing is lost": not missing,
    }


Fault = Callable[[ReplicaGroup, Way, Losses], Awaitable[Outcome]]

AT_THE_STORE: tuple[tuple[Fault, str], ...] = (
    (store_of_all, "ttl_s = 4"),
    (store_of_the_primary, "ttl_s = 4"),
    (store_of_a_replica, "ttl_s = 4"),
    (store_of_the_orchestrator, "ttl_s = 4"),
)
IN_BETWEEN: tuple[tuple[Fault, str], ...] = (
    (network_of_the_primary, "ttl_s = 6"),
    (network_of_a_switchover, "ttl_s = 20\nswitch_s = 3"),
)
MODES = (("valkey", "async"), ("postgresql", "async"), ("postgresql", "sync"))


@pytest.mark.scenario("FO-18")
@pytest.mark.parametrize(
    ("fault", "more", "kind", "mode", "store"),
    [
        pytest.param(fault, more, kind, "async", "etcd", id=f"{fault.__name__}-{kind}")
        for fault, more in AT_THE_STORE
        for kind in DATABASES
    ]
    + [
        pytest.param(fault, more, kind, mode, store, id=f"{fault.__name__}-{kind}-{mode}-{store}")
        for fault, more in IN_BETWEEN
        for kind, mode in MODES
        for store in STORES
    ],
)
def test_answers_after_5_s_have_the_outcomes_of_a_cut(
    fault: Fault, more: str, kind: str, mode: str, store: StoreName
) -> None:
    between = fault in [one for one, _ in IN_BETWEEN]

    async def scenario(group: ReplicaGroup) -> None:
        losses = Losses(group)
        for way in BETWEEN if between else TO_STORE:
            outcome = await fault(group, way, losses)
            print(f"{way.name}: {outcome}")
            assert all(outcome.values()), (way.name, outcome)
        if mode == "async" and between:
            kept = await all_have_the_same(group)
            assert {one.key for one in group.writer.acked} - kept == losses.lost

    play(
        scenario, kind=kind, store=store, between=between, gated=not between,
        more=f'{more}\nmode = "{mode}"',
    )  # fmt: skip
