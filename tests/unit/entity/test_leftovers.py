"""What an ended incarnation leaves in memory: nothing, however much of its mail was open."""

from __future__ import annotations

import asyncio

from domicile import Entity, Settings, handler
from domicile.testing import Sim, simulated


class Sleeper(Entity, name="sleeper"):
    """Takes its time."""

    @handler
    async def sleep(self) -> None:
        """Longer than its node lives."""
        await asyncio.sleep(60)

    @handler
    async def wake(self, other: str) -> None:
        """Wait for somebody who sleeps."""
        await self.ref(Sleeper, other).ask(Sleeper.sleep)


@simulated(entities=[Sleeper], nodes=2, seeds=1, settings=Settings(shards=4, ttl_s=4.0))
async def test_senders_of_a_fenced_node_let_go_of_their_mail(sim: Sim) -> None:
    await sim.wait_until(sim.settled)
    life = sim.node(0).life
    assert life is not None
    asks = [
        asyncio.ensure_future(sim.ref(Sleeper, f"early {n}").ask(Sleeper.wake, f"late {n}"))
        for n in range(16)
    ]
    await sim.advance(1.0)
    senders = [*life.runtime.sending.senders.values()]
    assert any(sender.written for sender in senders)
    sim.freeze(0)
    await sim.advance(8.0)
    sim.thaw(0)
    await sim.advance(2.0)
    for ask in asks:
        ask.cancel()
    await asyncio.gather(*asks, return_exceptions=True)
    assert not life.runtime.sending.senders
    # Letters know their sender, and no collector would find that out.
    assert not any(sender.written or sender.queue for sender in senders)
