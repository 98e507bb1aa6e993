"""A node that leaves is gone once everything is handed over; it waits for no lazy peer (H14)."""

from __future__ import annotations

from domicile import Entity, Settings, handler
from domicile.testing import Sim, simulated


class Post(Entity, name="post"):
    """Takes a line."""

    @handler
    async def take(self, line: str) -> int:
        """How long it is."""
        return len(line)


@simulated(entities=[Post], nodes=3, seeds=5, settings=Settings(shards=12))
async def test_leaving_does_not_wait_for_acknowledgements_that_are_put_off(sim: Sim) -> None:
    await sim.wait_until(sim.settled)
    await sim.advance(3)
    for number in range(20):
        await sim.ref(Post, f"p{number}").ask(Post.take, "hello")
    for node in (2, 1):
        before = sim.loop.time()
        await sim.stop(node)
        ended = [event.at for event in sim.history.of("ended")]
        assert ended[-1] - before < 0.5
