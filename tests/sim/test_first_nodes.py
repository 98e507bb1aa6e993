"""Senders that are there before the nodes of their targets (DX-27)."""

from __future__ import annotations

import asyncio

import pytest

from domicile import Entity, MaybeExecuted, Node, Overloaded, Settings, Unavailable, handler
from domicile.testing import Sim, simulated

FEW = Settings(shards=4, buffer=50)
LATE_S = 7.0
"""Less than an ask waits by default."""


class Porter(Entity, name="porter"):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @handler
    async def take(self, number: int) -> list[int]:
        self.seen.append(number)
        return self.seen

    @handler
    async def ring(self, cook: str) -> str:
        return await self.ref(Cook, cook).ask(Cook.cook)


class Waiter(Entity, name="waiter"):
    """Is not used before it is waited for."""

    @handler
    async def wait(self) -> None:
        pass


class Cook(Entity, name="cook", role="kitchen"):
    """Lives in another role."""

    @handler
    async def cook(self) -> str:
        return self.id


async def outcome(ask: object) -> object:
    try:
        return await ask  # type: ignore[misc]
    except (Unavailable, Overloaded) as error:
        return error


@pytest.mark.scenario("DX-27")
@simulated(entities=[Porter], nodes=0, seeds=10, settings=FEW)
async def test_a_client_waits_for_the_first_node_and_its_messages_keep_their_order(
    sim: Sim,
) -> None:
    porters = [sim.ref(Porter, id) for id in ("a", "b", "c")]

    async def send(number: int) -> None:
        for porter in porters:
            await porter.tell(Porter.take, number)

    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(send(number))
        first = group.create_task(porters[0].ask(Porter.take, 99))
        await sim.advance(LATE_S)
        assert not first.done()
        sim.add()
    assert first.result() == [0, 1, 2, 3, 4, 99]
    # The tells to these two begin when those to the first are queued: their order is the same.
    for porter in porters[1:]:
        assert await porter.ask(Porter.take, 100) == [0, 1, 2, 3, 4, 100]


@pytest.mark.scenario("DX-27")
@simulated(entities=[Porter], nodes=0, seeds=2, settings=FEW)
async def test_a_call_lines_up_behind_those_that_wait_although_its_ref_knows_the_way(
    sim: Sim,
) -> None:
    """I5: the first task goes on first, and its second call comes before the other task runs."""
    porter = sim.ref(Porter, "a")
    made: list[int] = []

    async def send(*numbers: int) -> None:
        for number in numbers:
            made.append(number)
            await porter.tell(Porter.take, number)

    async with asyncio.TaskGroup() as group:
        group.create_task(send(1, 3, 5))
        group.create_task(send(2, 4))
        await sim.advance(LATE_S)
        sim.add()
    assert made == [1, 2, 3, 4, 5]
    assert await porter.ask(Porter.take, 6) == [1, 2, 3, 4, 5, 6]


@simulated(entities=[Porter, Waiter], nodes=2, seeds=2, settings=FEW)
async def test_refs_old_and_new_keep_one_order_while_another_type_waits(sim: Sim) -> None:
    """I5: the old ref knows its shard, and the type of the call that waits was never seen."""
    old = sim.ref(Porter, "a").options(timeout_s=30)
    assert await old.ask(Porter.take, 0) == [0]
    for node in (0, 1):
        await sim.stop(node)
    waiter = sim.ref(Waiter, "w").options(timeout_s=30)
    async with asyncio.TaskGroup() as group:
        group.create_task(waiter.tell(Waiter.wait))
        for number, porter in enumerate((sim.ref(Porter, "a"), old, sim.ref(Porter, "a"), old)):
            group.create_task(porter.options(timeout_s=30).tell(Porter.take, number))
            group.create_task(old.tell(Porter.take, 10 + number))
        await sim.advance(1)
        sim.start(0)
    assert await old.ask(Porter.take, 99) == [0, 10, 1, 11, 2, 12, 3, 13, 99]


@pytest.mark.scenario("DX-27")
@simulated(entities=[Porter], nodes=0, seeds=5, settings=FEW)
async def test_what_waited_in_vain_did_not_run_and_says_why(sim: Sim) -> None:
    porter, began_at = sim.ref(Porter, "a").options(timeout_s=3), sim.world.now
    for sent in (porter.ask(Porter.take, 1), porter.tell(Porter.take, 2)):
        with pytest.raises(Unavailable, match=r"no node of role 'default' is up.* did not run"):
            await sent
    assert sim.world.now == pytest.approx(began_at + 6, abs=0.01), "each waited for its time"
    sim.add()
    assert await porter.options(timeout_s=20).ask(Porter.take, 3) == [3]


@simulated(entities=[Porter], nodes=0, seeds=2, settings=FEW)
async def test_so_many_may_wait_for_a_first_node(sim: Sim) -> None:
    """I6."""
    asks = [
        asyncio.ensure_future(outcome(sim.ref(Porter, f"p{number}").ask(Porter.take, number)))
        for number in range(FEW.buffer + 5)
    ]
    await sim.advance(1)
    refused = [ask.result() for ask in asks if ask.done()]
    assert len(refused) == 5
    assert all(isinstance(one, Overloaded) for one in refused)
    sim.add()
    answers = await asyncio.gather(*asks)
    assert answers[: FEW.buffer] == [[number] for number in range(FEW.buffer)]


@simulated(entities=[Porter], nodes=2, seeds=5, settings=FEW)
async def test_when_the_last_node_is_gone_an_ask_waits_for_the_next(sim: Sim) -> None:
    porter = sim.ref(Porter, "a")
    assert await porter.ask(Porter.take, 1) == [1]
    await sim.stop(0)
    await sim.stop(1)
    with pytest.raises(Unavailable, match="no node of role 'default' is up"):
        await porter.options(timeout_s=2).ask(Porter.take, 2)
    waiting = asyncio.ensure_future(porter.options(timeout_s=20).ask(Porter.take, 3))
    await sim.advance(LATE_S)
    sim.start(0)
    assert await waiting == [3]


@simulated(entities=[Porter, Cook], nodes=0, seeds=5, settings=FEW)
async def test_a_node_waits_for_the_first_node_of_another_role(sim: Sim) -> None:
    sim.add(entities=[Porter])
    porter = sim.ref(Porter, "a").options(timeout_s=8)
    assert await porter.ask(Porter.take, 1) == [1]
    with pytest.raises(Unavailable, match="no node of role 'kitchen' is up"):
        await sim.ref(Cook, "c").options(timeout_s=1).ask(Cook.cook)
    ringing = asyncio.ensure_future(porter.ask(Porter.ring, "c"))
    own: list[str] = []

    async def ask_itself(node: Node) -> None:
        own.append(await node.ref(Cook, "d").ask(Cook.cook))

    sim.spawn(0, ask_itself)
    await sim.advance(3)
    assert not ringing.done()
    sim.add(entities=[Cook])
    assert await ringing == "c"
    await sim.wait_until(lambda: own == ["d"])


@simulated(entities=[Porter], nodes=0, seeds=2, settings=FEW)
async def test_a_cancelled_call_waits_no_longer(sim: Sim) -> None:
    asks = [asyncio.ensure_future(sim.ref(Porter, "a").ask(Porter.take, n)) for n in range(3)]
    await sim.advance(1)
    asks[1].cancel()
    sim.add()
    assert await asks[0] == [0]
    assert await asks[2] == [0, 2]
    assert asks[1].cancelled()


# nodes that are registered and cannot be reached


@simulated(entities=[Porter], nodes=2, seeds=10, settings=FEW)
async def test_what_no_connection_has_carried_did_not_run_and_never_will(sim: Sim) -> None:
    """I9: the caller learns that, and which address does not answer."""
    for node in range(2):
        sim.block(-1, node)
    began_at = sim.world.now
    for number in range(4):
        porter = sim.ref(Porter, f"p{number}").options(timeout_s=1 + 3 * number)
        with pytest.raises(Unavailable, match=r"no home of porter .* in time \(.+\)\. It did not"):
            await porter.ask(Porter.take, 1)
    assert sim.world.now > began_at + FEW.link_timeout_s, "links were lost meanwhile"
    cancelled = asyncio.ensure_future(sim.ref(Porter, "p0").ask(Porter.take, 2))
    await sim.advance(0.5)
    cancelled.cancel()
    await sim.advance(0.5)
    sim.heal()
    for number in range(4):
        porter = sim.ref(Porter, f"p{number}")
        assert await porter.ask(Porter.take, 3) == [3], "nothing of the rest arrives later"


@simulated(entities=[Porter], nodes=1, seeds=5, settings=FEW)
async def test_what_a_connection_may_have_carried_stays_unknown(sim: Sim) -> None:
    porter = sim.ref(Porter, "a")
    assert await porter.ask(Porter.take, 1) == [1]
    sim.block(-1, 0)
    with pytest.raises(MaybeExecuted):
        await porter.options(timeout_s=3).ask(Porter.take, 2)
    sim.heal()
    assert (await porter.ask(Porter.take, 3))[-1] == 3
