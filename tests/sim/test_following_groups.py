"""Clients follow the primary of a simulated group: what they are told, and when no more (FO-17)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from domicile.errors import Unavailable
from domicile.failover.following import Group, GroupFollower, GroupReach, Primary
from domicile.failover.records import GroupConfig
from domicile.testing.groups.group import SimGroup
from domicile.testing.sim.clock import SimClock

Scenario = Callable[["Watcher"], Awaitable[None]]


class Watcher:
    """A client of a simulated group, in a process of its own."""

    def __init__(self, group: SimGroup, *, wait_s: float = 10.0) -> None:
        self.group = group
        loop = group.world.process("client")
        self.loop = loop
        self.faults = group.servers.store_faults("client")
        self.clock = SimClock(group.world, loop)
        store = group.servers.remote_store(loop, "client", self.faults)
        self.reach = GroupReach(store, self.clock, 2.0, wait_s)
        self.orders = Group("g", lambda: self.reach)
        self.told: list[tuple[float, Primary]] = []

    async def watch(self) -> None:
        async for primary in self.orders.primaries():
            self.told.append((self.group.world.now, primary))

    def follower(self) -> GroupFollower:
        return GroupFollower("g", self.reach.store, self.clock, op_timeout_s=2.0)


def play(scenario: Scenario, *, seed: int = 1, config: GroupConfig | None = None) -> Watcher:
    """A group that serves, and a scenario that runs in the client's process."""
    group = SimGroup(seed, config or GroupConfig("sim", mode="sync"))
    watcher = Watcher(group)

    async def main() -> None:
        async with asyncio.timeout(120.0):
            while await group.settled():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await scenario(watcher)

    try:
        group.start()
        group.world.run(main(), watcher.loop)
    finally:
        group.world.close()
    assert group.world.errors == []
    return watcher


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def left(group: SimGroup, epoch: int) -> None:
    """Until the state is beyond an epoch."""
    while (state := (await group.state())[0]) is None or state.epoch == epoch:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.scenario("FO-17")
@pytest.mark.parametrize("seed", range(3))
def test_each_change_of_primary_is_told_once_with_its_epoch(seed: int) -> None:
    async def scenario(watcher: Watcher) -> None:
        watching = asyncio.ensure_future(watcher.watch())
        group = watcher.group
        await until(lambda: len(watcher.told) == 1)
        for count in (2, 3, 4):
            state, _ = await group.state()
            assert state is not None
            name = state.primary_server
            group.lose_machine(next(one for one in group.machines if one.name == name), 5.0)
            await until(lambda count=count: len(watcher.told) == count)  # type: ignore[misc]
            await asyncio.sleep(12.0)
        watching.cancel()

    watcher = play(scenario, seed=seed)
    told = [primary for _, primary in watcher.told]
    assert [primary.epoch for primary in told] == sorted({primary.epoch for primary in told})
    assert len(told) == 4
    for before, after in pairwise(told):
        assert before.server != after.server
    # Nobody was told of a primary before the state served it, nor much later.
    served = [
        (event.at, key) for event in watcher.group.history.of("commit")
        for key, value, _ in event.fields["puts"]
        if key == b"group/g/state" and b'"serving"' in value
    ]  # fmt: skip
    for at, _ in watcher.told:
        assert any(at - 0.2 < commit <= at for commit, _ in served)


def test_a_primary_is_waited_for_while_a_group_elects() -> None:
    async def scenario(watcher: Watcher) -> None:
        group = watcher.group
        first = await watcher.orders.primary()
        assert first.epoch == 1
        assert (first.address, first.group) == (first.server, "g")
        group.lose_machine(next(one for one in group.machines if one.name == first.server), 30.0)
        await until(lambda: group.databases[first.server].up is False)
        await left(group, 1)
        with pytest.raises(Unavailable, match="has no primary now: it is electing"):
            await watcher.orders.primary(wait_s=0.0)
        second = await watcher.orders.primary()
        assert second.epoch > 1
        assert second.server != first.server

    play(scenario)


def test_an_answer_says_until_when_it_was_known() -> None:
    async def scenario(watcher: Watcher) -> None:
        first = await watcher.orders.primary()
        await asyncio.sleep(5.0)
        before = watcher.clock.wall()
        again = await watcher.orders.primary()
        assert before <= again.known_until <= watcher.clock.wall()
        assert first.known_until < before

    play(scenario)


def test_an_answer_from_memory_ends_with_the_store() -> None:
    async def scenario(watcher: Watcher) -> None:
        follower = watcher.follower()
        running = asyncio.ensure_future(follower.run())
        await until(lambda: follower.primary() is not None)
        group = watcher.group
        watcher.faults.cut = True
        began = group.world.now
        await until(lambda: follower.primary() is None)
        # The primary's ttl is 3 s, and what is known was confirmed at most a second ago.
        assert 1.5 < group.world.now - began <= 3.1
        assert follower.announced() is None
        assert follower.replicas() == []
        assert follower.records.state is not None
        watcher.faults.cut = False
        await until(lambda: follower.primary() is not None)
        running.cancel()

    play(scenario)


def test_a_change_that_is_missed_while_cut_off_is_told_afterwards() -> None:
    async def scenario(watcher: Watcher) -> None:
        watching = asyncio.ensure_future(watcher.watch())
        await until(lambda: len(watcher.told) == 1)
        group = watcher.group
        watcher.faults.cut = True
        await asyncio.sleep(0.5)
        old = watcher.told[0][1].server
        group.lose_machine(next(one for one in group.machines if one.name == old), 20.0)
        await left(group, 1)
        await asyncio.sleep(5.0)
        assert len(watcher.told) == 1
        watcher.faults.cut = False
        await until(lambda: len(watcher.told) == 2)
        assert watcher.told[1][1].server != old
        watching.cancel()

    play(scenario)


def test_a_client_that_was_frozen_tells_nothing_old() -> None:
    """What a watch delivers after a long stop is news to this process, and may be over."""

    async def scenario(watcher: Watcher) -> None:
        follower = watcher.follower()
        running = asyncio.ensure_future(follower.run())
        await until(lambda: follower.primary() is not None)
        follower.confirmed_at = watcher.clock.now() - 60.0
        assert follower.primary() is None
        await until(lambda: follower.primary() is not None)
        running.cancel()

    play(scenario)


def test_a_group_that_is_not_there_is_said_so() -> None:
    async def scenario(watcher: Watcher) -> None:
        other = Group("bills", lambda: watcher.reach)
        with pytest.raises(Unavailable, match="there is no group 'bills'"):
            await other.primary(wait_s=1.0)
        watcher.faults.cut = True
        with pytest.raises(Unavailable, match="the store did not answer"):
            await watcher.orders.primary(wait_s=1.0)

    play(scenario)
