"""DX-20 at the owner and at senders: starts that are noted first, and shards that nobody serves."""

from __future__ import annotations

import asyncio

import pytest

from domicile import Entity, MaybeExecuted, NotExecuted, Settings, Unavailable, handler
from domicile.core.ids import ShardKey
from domicile.core.state.keys import STARTED, KeyFamily
from domicile.testing import Event, Sim, simulated

CAREFUL = Settings(shards=4, poison_deaths=1, fencing="health")
"""One death is enough, so every shard is under suspicion from its first start."""

LAX = Settings(shards=4, fencing="health")


class Vial(Entity, name="vial"):
    @handler
    async def shake(self) -> str:
        return self.id

    @handler
    async def simmer(self, for_s: float) -> str:
        await asyncio.sleep(for_s)
        return self.id


def marks(sim: Sim) -> list[tuple[Event, ShardKey, int]]:
    """Each note that entities of a shard start, in order."""
    found: list[tuple[Event, ShardKey, int]] = []
    for event in sim.history.of("commit"):
        for key, *_ in event.fields["puts"]:
            if key.startswith(STARTED):
                _, shard, epoch = KeyFamily.STARTED.parse(key)
                found.append((event, shard, epoch))
    return found


def same_shard(sim: Sim, count: int) -> list[str]:
    """Entities of one shard."""
    shard = sim.shard(Vial, "v0")
    return [id for n in range(100) if sim.shard(Vial, id := f"v{n}") == shard][:count]


@simulated(entities=[Vial], nodes=2, seeds=5, settings=CAREFUL, locks=True)
async def test_the_note_is_stored_once_and_before_anything_starts(sim: Sim) -> None:
    ids = same_shard(sim, 6)
    asks = [sim.ref(Vial, id).ask(Vial.shake) for id in ids for _ in range(3)]
    assert await asyncio.gather(*asks) == [id for id in ids for _ in range(3)]
    shard = sim.shard(Vial, ids[0])
    [(mark, marked, epoch)] = marks(sim)
    assert (marked, epoch) == (shard, sim.entry(shard).epoch)
    starts = [event.at for event in sim.history.of("start")]
    assert mark.at < min(starts)


@simulated(entities=[Vial], nodes=2, seeds=5, settings=CAREFUL, locks=True)
async def test_every_epoch_has_a_note_of_its_own(sim: Sim) -> None:
    shard = sim.shard(Vial, "v0")
    assert await sim.ref(Vial, "v0").ask(Vial.shake) == "v0"
    await sim.wish(shard, 1 - sim.owner(Vial, "v0"))
    before = sim.entry(shard).epoch
    await sim.wait_until(lambda: sim.entry(shard).epoch > before and sim.settled())
    assert await sim.ref(Vial, "v0").ask(Vial.shake) == "v0"
    assert [(key, epoch) for _, key, epoch in marks(sim)] == [
        (shard, before),
        (shard, sim.entry(shard).epoch),
    ]


@simulated(entities=[Vial], nodes=2, seeds=5, settings=LAX, locks=True)
async def test_a_shard_without_deaths_is_not_noted(sim: Sim) -> None:
    for id in same_shard(sim, 3):
        assert await sim.ref(Vial, id).ask(Vial.shake) == id
    assert not marks(sim)


@simulated(entities=[Vial], nodes=2, seeds=5, settings=CAREFUL, locks=True)
async def test_what_can_not_be_noted_does_not_start_and_the_next_tries_again(sim: Sim) -> None:
    ids = same_shard(sim, 4)
    owner = sim.owner(Vial, ids[0])
    sim.cut_store(owner)
    asks = [sim.ref(Vial, id).ask(Vial.shake) for id in ids]
    for error in await asyncio.gather(*asks, return_exceptions=True):
        assert isinstance(error, Unavailable)
        assert "try again" in str(error)
    assert not list(sim.history.of("start"))
    sim.heal()
    for id in ids:
        assert await sim.ref(Vial, id).ask(Vial.shake) == id
    assert len({epoch for _, _, epoch in marks(sim)}) == 1


# what senders learn of a quarantine


def quarantined(sim: Sim, shard: ShardKey) -> bool:
    return sim.entry(shard).state == "quarantined"


@pytest.mark.scenario("DX-20", partial=True)
@simulated(entities=[Vial], nodes=3, seeds=5, settings=CAREFUL, locks=True)
async def test_a_quarantine_is_told_at_once_to_all_that_wait_and_all_that_come(sim: Sim) -> None:
    shard, owner = sim.shard(Vial, "v0"), sim.owner(Vial, "v0")
    where = f"{shard.role}/{shard.shard}"
    cooking = asyncio.ensure_future(sim.ref(Vial, "v0").ask(Vial.simmer, 60.0))
    await sim.wait_until(lambda: bool(list(sim.history.of("start"))))
    # Its connection is down, so what comes now waits here.
    sim.partition([owner], [node for node in range(3) if node != owner])
    sim.network.block("client", sim.node_id(owner))
    sim.cut_client(owner)
    await sim.advance(1.0)
    waiting = asyncio.ensure_future(sim.ref(Vial, "v0").ask(Vial.shake))
    await sim.ref(Vial, "v0").tell(Vial.shake)
    await sim.advance(0.1)
    sim.crash(owner)
    began = sim.world.now
    await sim.wait_until(lambda: quarantined(sim, shard))
    with pytest.raises(NotExecuted, match=f"shard {where} is quarantined"):
        await waiting
    with pytest.raises(MaybeExecuted):
        await cooking
    for _ in range(2):
        with pytest.raises(Unavailable, match=f"domicile unquarantine {where}"):
            await sim.ref(Vial, "v0").ask(Vial.shake)
        with pytest.raises(Unavailable, match="its last owner died; see what"):
            await sim.ref(Vial, "v0").tell(Vial.shake)
    assert sim.world.now - began < 5.0, "nobody waited for a timeout"
    other = next(id for n in range(100) if sim.shard(Vial, id := f"v{n}") != shard)
    assert await sim.ref(Vial, other).ask(Vial.shake) == other
