"""Five servers in network namespaces, parted into two and three. Needs root; by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from namespaces_lab import SwitchedNetwork
from replica_lab import CROWD, Crowd, ReplicaGroup, play
from replica_scenarios import Losses, all_have_the_same

COUNT = 5


@pytest.fixture
def network() -> Iterator[SwitchedNetwork]:
    made = SwitchedNetwork(COUNT)
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.mark.scenario("FO-11", "FO-20")
@pytest.mark.scenario("FO-14", partial=True)
@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("valkey", "async"),
        ("postgresql", "async"),
        # Each acknowledged write is on three of five, so on one of any three.
        ("postgresql", "sync"),
    ],
)
def test_two_of_five_are_parted_from_three(network: SwitchedNetwork, kind: str, mode: str) -> None:
    """The clients of the test reach all servers all the time; the store is with the three."""

    async def scenario(group: ReplicaGroup) -> None:
        # The primary is one of the three: nothing changes.
        losses = Losses(group)
        state = await group.whole()
        old = group.machine(state.primary_server)
        network.part(group.others(old.name)[:2])

        async def gone() -> bool:
            return len(await group.members()) == COUNT - 2

        await group.until(gone, "the leases of two servers end")
        await group.writer.goes_on(old.name, 50)
        network.heal()
        again = await group.whole()
        assert (again.epoch, again.primary) == (state.epoch, state.primary)

        for number in range(2):
            # It is one of the two: the three go on without it.
            state = await group.whole()
            old = group.machine(state.primary_server)
            other = group.others(old.name)[0]
            async with Crowd(group, old, first=number * CROWD) as crowd:
                gone_at = asyncio.create_task(group.gone(state.primary))
                network.part([old, other])
                state = await group.serves(state.epoch + 1)
                assert state.primary_server not in (old.name, other.name)
                # A hundred write on in the minority, and a hundred were about to commit there.
                assert crowd.wrote_after(await gone_at) == []
                assert await crowd.committed() == []
                await group.writer.goes_on(state.primary_server, 20)
                network.heal()
                state = await group.whole(state.epoch)
                assert not (crowd.keys & await old.keys())
            if mode == "async":
                lost = await losses.count(state.primary_server, old, other)
                print(f"{len(lost)} acknowledged writes lost, as the receipt says")
            await group.writer.goes_on(state.primary_server, 20)
        kept = await all_have_the_same(group)
        assert {one.key for one in group.writer.acked} - kept == losses.lost
        assert mode == "async" or not losses.lost

    more = f'mode = "{mode}"' + ("\nsync_count = 2" if mode == "sync" else "")
    play(scenario, COUNT, kind=kind, network=network, more=more)
