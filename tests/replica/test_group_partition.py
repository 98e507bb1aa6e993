"""Five servers in network namespaces, parted into two and three. Needs root; by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from namespaces_lab import SwitchedNetwork
from replica_lab import ReplicaGroup, play

COUNT = 5


@pytest.fixture
def network() -> Iterator[SwitchedNetwork]:
    made = SwitchedNetwork(COUNT)
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.mark.scenario("FO-11", partial=True)
@pytest.mark.parametrize(("kind", "mode"), [("valkey", "async"), ("postgresql", "sync")])
def test_two_of_five_are_parted_from_three(network: SwitchedNetwork, kind: str, mode: str) -> None:
    """The clients of the test reach all servers all the time; the store is with the three."""

    async def scenario(group: ReplicaGroup) -> None:
        # The primary is one of the three: nothing changes.
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

        for _ in range(2):
            # It is one of the two: the three go on without it.
            state = await group.whole()
            old = group.machine(state.primary_server)
            minority = [old, group.others(old.name)[0]]
            network.part(minority)
            state = await group.serves(state.epoch + 1)
            assert state.primary_server not in [one.name for one in minority]
            await group.writer.goes_on(state.primary_server, 20)
            network.heal()
            state = await group.whole(state.epoch)
            await group.writer.goes_on(state.primary_server, 20)
        group.writer.goes.clear()
        state = await group.whole(state.epoch)
        keys = await group.machine(state.primary_server).keys()
        missing = {one.key for one in group.writer.acked} - keys
        if mode == "sync":
            assert not missing
        saved: set[str] = set()
        for receipt in await group.receipts():
            saved |= group.database.saved(receipt)
        assert missing <= saved

    play(scenario, COUNT, kind=kind, network=network, more=f'mode = "{mode}"')
