"""DX-01 on each store that is a server, with real processes. A coordinator, nodes and an
orchestrator are stopped while a write of theirs is on its way. A successor acts, the write arrives,
they go on.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import asyncpg
import msgspec
import pytest
from backends_lab import SERVERS, StoreServer
from postgres_lab import shared_server
from real_lab import balanced, fault_at, fenced, judge, map_commits, mine, of, run
from replica_lab import ReplicaGroup, StoreName, play

from domicile import Entity, EventSourced, Settings, handler
from domicile.core.ids import Incarnation, ShardKey
from domicile.core.state.keys import NODES, block_key, node_key
from domicile.core.state.shardmap import BLOCK_SIZE
from domicile.errors import MaybeExecuted
from domicile.testing import History, Processes
from domicile.testing.suites.byte_proxy import ByteProxy

ROLE = "default"
LIMIT_S = 120.0
SCENE_S = 400.0
"""Seconds that one of the scenes may take; a request that never comes would be waited for."""


ALL = os.environ.get("DOMICILE_TEST_STORES") == "all"
"""Whether all stores are tried, as `make test-stores` does."""

STORES: list[StoreName] = ["postgresql", "etcd", "redis"] if ALL else ["postgresql"]

PATIENT = Settings(
    ttl_s=6.0, renew_s=1.0, op_timeout_s=3.0, ask_timeout_s=60.0, poison_deaths=1_000
)
"""A call that is kept back must not be given up and made again before its caller is stopped."""

QUIET = replace(PATIENT, shards=BLOCK_SIZE + 2, balance_interval_s=600.0)
"""Two blocks of the map, and nobody moves a shard who was not asked to."""

FEW = replace(PATIENT, shards=4)

LATE = 7_654_321
"""An amount that no other event has."""


class Page(Entity, name="late.page"):
    """Somebody must be at home."""

    @handler
    async def turn(self) -> str:
        return self.id


class Purse(EventSourced[int, int], name="late.purse"):
    """Adds up."""

    @staticmethod
    def initial(id: str) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: int) -> int:
        return state + event

    @handler
    async def pay(self, amount: int) -> int:
        return await self.persist(amount)

    @handler
    async def take(self, amount: int) -> None:
        """Like `pay`, without reading: only the fence refuses it (J9)."""
        await self.append(amount)

    @handler
    async def pay_twice(self, amount: int, when: str) -> int:
        """Once now and once when a file is there."""
        await self.persist(amount)
        while not os.path.exists(when):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.01)
        return await self.persist(amount)

    @handler
    async def total(self) -> int:
        return await self.state()


@pytest.mark.scenario("DX-01")
@pytest.mark.parametrize("name", STORES)
def test_who_goes_on_after_a_successor_has_acted_changes_nothing_durable(
    name: StoreName, tmp_path: Path
) -> None:
    server = SERVERS[name]()
    run(asyncio.wait_for(_a_coordinator(server), SCENE_S))
    run(asyncio.wait_for(_nodes(server, tmp_path / "now"), SCENE_S))
    play(
        lambda group: asyncio.wait_for(_an_orchestrator(group), SCENE_S),
        store=name, more="ttl_s = 6",
    )  # fmt: skip


async def _a_coordinator(server: StoreServer) -> None:
    """The successor acts elsewhere in the map: nothing but its term refuses what comes late."""
    store = server.new_database()
    async with AsyncExitStack() as stack:
        proxies = await _proxies(stack, server.port, 4)
        cluster = await stack.enter_async_context(
            Processes(
                [Page], nodes=2, managers=2, settings=QUIET, store=store,
                store_at=lambda node: server.behind(store, proxies[node].port),
            )
        )  # fmt: skip
        await cluster.wait_until(lambda: cluster.leader() is not None, timeout_s=LIMIT_S)
        leader = cluster.leader()
        assert leader in (2, 3)
        successor, old = 5 - leader, mine(cluster, leader)
        late, other = ShardKey(ROLE, 0), ShardKey(ROLE, BLOCK_SIZE)
        before = cluster.entry(late)
        kept = await proxies[leader].keep_back(block_key(ROLE, 0))
        await cluster.wish(late, _elsewhere(cluster, late))
        await kept.here()
        cluster.freeze(leader)
        await cluster.wish(late, None)
        await cluster.wait_until(lambda: cluster.leader() == successor, timeout_s=LIMIT_S)
        target = _elsewhere(cluster, other)
        await cluster.wish(other, target)
        await cluster.wait_until(
            lambda: cluster.settled() and cluster.entry(other).owner == mine(cluster, target),
            timeout_s=LIMIT_S,
        )
        assert cluster.entry(late) == before
        await kept.let_go()
        cluster.thaw(leader)
        await cluster.wait_until(lambda: fenced(cluster, old), timeout_s=LIMIT_S)
        await cluster.wait_until(
            lambda: cluster.incarnation(leader) not in (None, old), timeout_s=LIMIT_S
        )
        # Whatever it had to say has been said by now; and who leads, leads on.
        await cluster.wish(other, None)
        back = _elsewhere(cluster, other)
        await cluster.wish(other, back)
        await cluster.wait_until(
            lambda: cluster.settled() and cluster.entry(other).owner == mine(cluster, back),
            timeout_s=LIMIT_S,
        )
        assert cluster.leader() == successor
        assert cluster.entry(late) == before
        name = cluster.nodes[leader].name
        history = cluster.history()
    judge(history)
    frozen_at = fault_at(history, "freeze", old)
    assert map_commits(history, name, 0.0)
    assert map_commits(history, name, frozen_at) == []
    _stored_nothing_more(history, name, old)


async def _nodes(server: StoreServer, now: Path) -> None:
    """One writes to a journal, the other to the store: that it leaves."""
    store, databases = server.new_database(), shared_server()
    journal = databases.new_database()
    async with AsyncExitStack() as stack:
        proxies = await _proxies(stack, server.port, 3)
        [to_journal] = await _proxies(stack, databases.port, 1)
        cluster = await stack.enter_async_context(
            Processes(
                [Purse], nodes=3, settings=FEW, store=store,
                store_at=lambda node: server.behind(store, proxies[node].port),
                journal=databases.behind(journal, to_journal.port),
            )
        )  # fmt: skip
        await cluster.wait_until(lambda: balanced(cluster), timeout_s=LIMIT_S)
        home = cluster.owner(Purse, "p0")
        old = mine(cluster, home)
        other = next(id for n in range(1, 1000) if cluster.owner(Purse, id := f"p{n}") == home)
        first, second = cluster.ref(Purse, "p0"), cluster.ref(Purse, other)
        # One has staged what it will send when it goes on, the other's write is on its way.
        to_come = asyncio.ensure_future(second.ask(Purse.pay_twice, 100, str(now)))
        await cluster.wait_until(lambda: len(of(cluster.history(), old, "start")) == 1)
        kept = await to_journal.keep_back(msgspec.msgpack.encode(LATE))
        under_way = asyncio.ensure_future(first.ask(Purse.take, LATE))
        await kept.here()
        cluster.freeze(home)
        await cluster.wait_until(
            lambda: (
                cluster.settled()
                and home not in (cluster.owner(Purse, "p0"), cluster.owner(Purse, other))
            ),
            timeout_s=LIMIT_S,
        )
        for purse in (first, second):
            assert await purse.ask(Purse.pay, 1) == 1
        now.touch()  # noqa: ASYNC240
        await kept.let_go()
        cluster.thaw(home)
        for asked in (under_way, to_come):
            with pytest.raises(MaybeExecuted):
                await asked
        await cluster.wait_until(
            lambda: cluster.incarnation(home) not in (None, old), timeout_s=LIMIT_S
        )

        # Another one was about to store that it leaves.
        leaver = next(node for node in range(3) if node not in (home, cluster.leader()))
        gone, process = mine(cluster, leaver), cluster.nodes[leaver].process
        assert process is not None
        kept = await proxies[leaver].keep_back(b'"leaving"')
        process.send_signal(signal.SIGTERM)
        await kept.here()
        cluster.freeze(leaver)
        await cluster.wait_until(
            lambda: cluster.settled() and cluster.status(gone) is None, timeout_s=LIMIT_S
        )
        await kept.let_go()
        cluster.thaw(leaver)
        await cluster.wait_until(lambda: not cluster.nodes[leaver].up, timeout_s=LIMIT_S)

        # What is read now comes from the journal.
        for id in ("p0", other):
            shard = cluster.shard(Purse, id)
            target = next(n for n in range(3) if n not in (leaver, cluster.owner(Purse, id)))
            await cluster.wish(shard, target)
            await cluster.wait_until(
                lambda shard=shard, target=target: (  # type: ignore[misc]
                    cluster.settled() and cluster.entry(shard).owner == mine(cluster, target)
                ),
                timeout_s=LIMIT_S,
            )
            assert await cluster.ref(Purse, id).ask(Purse.total) == 1
        assert cluster.status(gone) is None
        assert await _events(journal) == {"p0": 1, other: 1}
        names = [cluster.nodes[node].name for node in (home, leaver)]
        history = cluster.history()
    judge(history)
    for name, one in zip(names, (old, gone), strict=True):
        _stored_nothing_more(history, name, one)


async def _an_orchestrator(group: ReplicaGroup) -> None:
    """It has decided an election, and another one that did not hear of it decides it, too."""
    state = await group.whole()
    await group.writer.goes_on(state.primary_server, 50)
    old, others = group.machine(state.primary_server), group.others(state.primary_server)
    kept = {}
    for one in others:
        assert one.to_store is not None
        kept[one.name] = await one.to_store.keep_back(b'"phase":"chosen"')
    decides = {name: asyncio.ensure_future(request.here()) for name, request in kept.items()}
    await group.kill(old)
    await asyncio.wait(decides.values(), return_when=asyncio.FIRST_COMPLETED)
    late = next(one for one in others if decides[one.name].done())
    [successor] = [one for one in others if one is not late]
    await group.freeze(late, "agent")
    electing = await group.state()
    assert electing is not None
    members = {one.server: one.incarnation for one in await group.members()}
    assert electing.orchestrator == members[late.name]
    # Its own decision is kept back, too, but only for as long as it takes to come to it.
    await decides[successor.name]
    await kept[successor.name].let_go()
    state = await group.serves(electing.epoch)
    assert state.primary_server == successor.name
    await group.writer.goes_on(successor.name, 20)
    before = await group.state()
    assert before == state
    await kept[late.name].let_go()
    begun = len(late.log)
    late.thaw()
    await group.until(
        lambda: "this incarnation is over" in late.log[begun:], "it knows that it is over"
    )
    await group.whole(state.epoch, of=2)
    await group.writer.goes_on(successor.name, 20)
    assert await group.state() == before
    assert not await group.writer.missing(successor)
    served = [one for one in group.serving if one.epoch >= electing.epoch]
    assert [one.server for one in served] == [successor.name]


# What they share


async def _proxies(stack: AsyncExitStack, port: int, count: int) -> list[ByteProxy]:
    return [await stack.enter_async_context(ByteProxy("127.0.0.1", port)) for _ in range(count)]


def _elsewhere(cluster: Processes, shard: ShardKey) -> int:
    """The one of two nodes that a shard is not at."""
    return next(node for node in range(2) if mine(cluster, node) != cluster.entry(shard).owner)


def _stored_nothing_more(history: History, name: str, old: Incarnation) -> None:
    """What a process stored since it was stopped is of its next incarnation, if of any."""
    frozen_at = fault_at(history, "freeze", old)
    stored = [
        event.fields["puts"]
        for event in history.of("commit")
        if event.fields["by"] == name and event.at > frozen_at
    ]
    for puts in stored[:1]:
        assert [key.startswith(NODES) for key, *_ in puts] == [True]
    assert all(node_key(old) != key for puts in stored for key, *_ in puts)
    assert of(history, old, "fenced")


async def _events(journal: str) -> dict[str, int]:
    """How many events of each entity are stored."""
    session = await asyncpg.connect(journal)
    try:
        rows = await session.fetch(
            "SELECT e.id, count(*) AS n FROM domicile_journal.event "
            "JOIN domicile_journal.entity e USING (entity) GROUP BY e.id"
        )
    finally:
        await session.close()
    return {row["id"]: row["n"] for row in rows}
