"""The picture on the README: one seed in which a home moves, then dies, and no message is lost.

`docs/generate.py` draws it. The same seed gives the same picture, byte for byte.
"""

from __future__ import annotations

import asyncio

from domicile import Entity, Settings, handler
from domicile.testing import Sim, check
from domicile.testing.timeline.picture import draw
from domicile.testing.timeline.trace import trace

SEED = 2
WIDTH = 900
MESSAGES = 60
EVERY_S = 0.1


class Cart(Entity, name="cart"):
    """Something that a shop sends messages to."""

    def __init__(self) -> None:
        self.items = 0

    @handler
    async def add(self) -> int:
        """Takes no time."""
        self.items += 1
        return self.items

    @handler
    async def check_out(self) -> int:
        """Takes its time, so that a move has to wait for it."""
        await asyncio.sleep(0.55)
        return self.items


def picture(seed: int = SEED) -> str:
    """The timeline of the seed, as the text of an SVG file; `AssertionError` if its story ends
    otherwise."""
    settings = Settings(shards=8, ttl_s=2.0, renew_s=0.3, poison_deaths=100)
    sim = Sim(seed, entities=[Cart], nodes=3, settings=settings)
    notes: list[tuple[float, str]] = []
    began = 0.0

    async def send() -> None:
        cart = sim.ref(Cart, "alice")
        for number in range(MESSAGES):
            await cart.tell(Cart.check_out if number == 8 else Cart.add)
            await sim.advance(EVERY_S)

    async def main() -> None:
        nonlocal began
        async with sim:
            await sim.ref(Cart, "alice").ask(Cart.add)
            await sim.advance(0.5)
            began = sim.world.now
            sending = asyncio.create_task(send())
            await sim.advance(0.96)
            home = sim.owner(Cart, "alice")
            away = (home + 1) % 3
            notes.append((sim.world.now, f"1. moves to node-{away}"))
            await sim.wish(sim.shard(Cart, "alice"), away)
            await sim.wait_until(lambda: sim.owner(Cart, "alice") == away)
            await sim.advance(1.05)
            await sim.wish(sim.shard(Cart, "alice"), None)
            notes.append((sim.world.now, f"2. node-{away} is killed"))
            sim.crash(away)
            await sim.wait_until(sim.settled, timeout_s=20)
            heir = sim.owner(Cart, "alice")
            notes.append((sim.world.now, f"3. node-{heir} takes over"))
            await sending
            await sim.advance(EVERY_S)

    try:
        sim.world.run(main(), sim.loop)
        found = check(sim.history)
    finally:
        sim.close()
    title = f"{MESSAGES} messages to one entity, whose home moves and is then killed"
    traced = trace(sim.history, found, title=title, notes=notes, start=began - EVERY_S)
    [lane] = traced.shards
    sent = [one for one in lane.messages if one.at >= began]
    started = [one.started for one in sent if one.started is not None]
    told = found or len(started) != MESSAGES or started != sorted(started)
    if told or any(one.starts != 1 for one in sent):
        raise AssertionError(f"seed {seed} tells another story: choose another one\n{found}")
    return draw(traced, width=WIDTH, zero=began)
