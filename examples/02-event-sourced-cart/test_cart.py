"""The cart in whole clusters, in virtual time: nothing confirmed is lost, nothing happens twice."""

from __future__ import annotations

import asyncio

import pytest
from cart import AlreadyOrdered, Cart, NotThatMany, Ordered, Put, TakenOut

from domicile import MaybeExecuted, NotExecuted
from domicile.testing import Sim, simulated


async def put(sim: Sim, article: str, key: str) -> int:
    """Put one in, whatever happens: with the same key a repetition has no second effect."""
    cart = sim.ref(Cart, "ann").options(key=key)
    while True:
        try:
            return await cart.ask(Cart.put, article)
        except (MaybeExecuted, NotExecuted):
            await sim.advance(0.1)


@simulated(entities=[Cart], nodes=3, seeds=5)
async def test_what_was_confirmed_survives_crashes(sim: Sim) -> None:
    for number in range(6):
        assert await put(sim, "bulb", f"bulb-{number}") == number + 1
        if number % 2:
            home = sim.owner(Cart, "ann")
            lamp = asyncio.create_task(put(sim, "lamp", f"lamp-{number}"))
            await sim.advance(0.002 * number)  # on its way there, on its way back, or arrived
            sim.crash(home)
            assert await lamp == number // 2 + 1
            sim.start(home)
            await sim.wait_until(sim.settled)
    assert await sim.ref(Cart, "ann").ask(Cart.articles) == {"bulb": 6, "lamp": 3}
    assert len(sim.events(Cart, "ann")) == 9


@simulated(entities=[Cart], nodes=3, seeds=5)
async def test_an_order_closes_the_cart_wherever_it_is(sim: Sim) -> None:
    cart = sim.ref(Cart, "ann")
    await cart.ask(Cart.put, "lamp", 2)
    with pytest.raises(NotThatMany) as refused:
        await cart.ask(Cart.take_out, "lamp", 3)
    assert refused.value.args == (2,)
    assert await cart.ask(Cart.take_out, "lamp") == 1
    assert await cart.ask(Cart.order, "n-17") == {"lamp": 1}
    sim.crash(sim.owner(Cart, "ann"))
    await sim.wait_until(sim.settled)
    with pytest.raises(AlreadyOrdered):
        await cart.ask(Cart.put, "rug")
    assert sim.events(Cart, "ann") == [Put("lamp", 2), TakenOut("lamp", 1), Ordered("n-17")]
