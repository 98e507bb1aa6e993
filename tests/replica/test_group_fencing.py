"""An old primary takes no write once another one may be promoted: 200 clients stay with it.

By hand: `make test-replica`. A hundred sessions have a transaction open when the fault begins, and
a hundred write all the time. None of the first may commit, and none of the others may have an
answer, after the record of the old primary's agent is gone: no election begins before that.
"""

from __future__ import annotations

import asyncio
import signal

import pytest
from replica_databases import each_database
from replica_lab import Crowd, Machine, ReplicaGroup, StoreName, lives, play

STORES: tuple[StoreName, ...] = ("sqlite", "etcd")

each_store = pytest.mark.parametrize("store", STORES)


async def nobody_writes_on(
    group: ReplicaGroup, crowd: Crowd, old: Machine, primary: str, gone_at: float
) -> None:
    """Of all that stayed with the old primary, once there is a new one."""
    assert crowd.wrote_after(gone_at) == []
    assert await crowd.committed() == []
    await group.writer.goes_on(primary, 20)
    assert not (crowd.keys & await group.machine(primary).keys())


async def back(group: ReplicaGroup, old: Machine, crowd: Crowd, epoch: int) -> None:
    """All of the old primary runs again, and it has nothing of the open transactions either."""
    old.thaw()
    if old.run is not None and old.run.poll() is not None:
        old.run = None
    if old.run is None:
        group.start(old)
    state = await group.whole(epoch)
    await group.fed_by(state.primary_server)
    assert not (crowd.keys & await old.keys())


@pytest.mark.scenario("FO-10")
@each_database()
@each_store
@pytest.mark.parametrize("what", ["server", "machine"])
def test_a_paused_primary_is_replaced_and_accepts_nothing_when_it_goes_on(
    kind: str, store: StoreName, what: str
) -> None:
    """Its clients send while it stands still, and it has their writes when it wakes."""

    async def scenario(group: ReplicaGroup) -> None:
        state = await group.whole()
        old = group.machine(state.primary_server)
        async with Crowd(group, old) as crowd:
            pids = old.pids("server")
            whole = ("server",) if what == "server" else ("guard", "agent", "server")
            gone = asyncio.create_task(group.gone(state.primary))
            # A server that stands still alone is soon ended: not all need get that far.
            sent = 20 if what == "server" else 100
            sending = asyncio.create_task(
                group.until(lambda: len(group.writer.open) >= sent, f"{sent} have sent a write")
            )
            await group.freeze(old, *whole)
            await sending
            state = await group.serves(state.epoch + 1)
            # With its data a server that was only restarted is a candidate like any other (F8).
            assert state.primary_server != old.name or (
                what == "server" and group.database.keeps_data
            )
            # It can't go on: it was ended while it stood still.
            assert not any(lives(pid) for pid in pids)
            announced_at = next(one.at for one in group.serving if one.epoch == state.epoch)
            gone_at = await gone if what == "machine" else announced_at
            gone.cancel()
            old.thaw()
            await nobody_writes_on(group, crowd, old, state.primary_server, gone_at)
            await back(group, old, crowd, state.epoch)

    play(scenario, kind=kind, store=store)


@pytest.mark.scenario("FO-11", "FO-20")
@each_database()
@pytest.mark.parametrize("how", ["no answer", "reset"])
def test_a_primary_without_its_store_is_closed_before_another_is_promoted(
    kind: str, how: str
) -> None:
    """Its clients still reach it. What they had open before commits nothing afterwards."""

    async def scenario(group: ReplicaGroup) -> None:
        state = await group.whole()
        old = group.machine(state.primary_server)
        async with Crowd(group, old) as crowd:
            assert old.to_store is not None
            gone = asyncio.create_task(group.gone(state.primary))
            if how == "reset":
                await old.to_store.refuse()
            else:
                await old.to_store.hold()
            # While it may, it goes on.
            await group.writer.goes_on(old.name, 20)
            state = await group.serves(state.epoch + 1)
            assert state.primary_server != old.name
            await nobody_writes_on(group, crowd, old, state.primary_server, await gone)
            await old.to_store.release()
            await back(group, old, crowd, state.epoch)

    play(scenario, kind=kind, store="etcd", more="ttl_s = 6")


@pytest.mark.scenario("FO-21")
@each_database()
@each_store
@pytest.mark.parametrize("what", ["agent", "guard", "agent guard"])
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_server_without_its_agent_or_guard_is_fenced_by_the_deadline(
    kind: str, store: StoreName, what: str, how: str
) -> None:
    async def scenario(group: ReplicaGroup) -> None:
        state = await group.whole()
        old = group.machine(state.primary_server)
        async with Crowd(group, old) as crowd:
            gone = asyncio.create_task(group.gone(state.primary))
            if how == "frozen":
                await group.freeze(old, *what.split())
            elif what == "agent guard":
                await group.kill(old)
            else:
                old.send(what, signal.SIGKILL)
            gone_at = await gone
            # Its server may serve on under a new agent, with new sessions.
            alone = (how, what) == ("killed", "agent") and not group.database.keeps_data
            state = await group.serves(state.epoch + (not alone))
            if (how, what) != ("killed", "agent"):
                assert state.primary_server != old.name
            await nobody_writes_on(group, crowd, old, state.primary_server, gone_at)
            await back(group, old, crowd, state.epoch)

    play(scenario, kind=kind, store=store, more="ttl_s = 4")
