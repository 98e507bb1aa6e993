"""More than a node can do, for longer than it can hold: it serves what it can, refuses the rest."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import ClassVar

import pytest
from real_entities import enter
from real_lab import open_ledger, run, seen

from domicile import (
    Client,
    DomicileError,
    Entity,
    EventSourced,
    Node,
    Overloaded,
    Settings,
    connect,
    handler,
)
from domicile.entity.sending.backpressure import PAUSE_S
from domicile.testing import Processes, Sim, simulated

# in virtual time


NODE_MAIL = 40
FULL = Settings(shards=8, node_mail=NODE_MAIL)
DESKS = [f"d{number}" for number in range(30)]


class Desk(Entity, name="overload-desk"):
    """Takes its time, and remembers what it did."""

    def __init__(self) -> None:
        self.done: list[int] = []

    @handler
    async def note(self, number: int) -> int:
        self.done.append(number)
        await asyncio.sleep(0.05)
        return number

    @handler
    async def list(self) -> list[int]:
        return self.done

    @handler
    async def pass_on(self, other: str, number: int) -> int:
        await asyncio.sleep(0.05)
        return await self.ref(Desk, other).ask(Desk.note, number)


def unstarted(sim: Sim) -> int:
    """Mail that waits for its turn, at the node where most does."""
    lives = [one.node.life for one in sim.nodes if one.up and one.node is not None]
    return max(life.runtime.admission.count for life in lives if life is not None)


@simulated(entities=[Desk], nodes=1, seeds=5, settings=FULL)
async def test_what_is_refused_never_runs_and_the_rest_runs_in_order(sim: Sim) -> None:
    outcomes: dict[str, dict[int, str]] = {id: {} for id in DESKS}
    most = 0

    async def ask(id: str, number: int) -> None:
        try:
            await sim.ref(Desk, id).ask(Desk.note, number)
            outcomes[id][number] = "ok"
        except Overloaded:
            outcomes[id][number] = "refused"

    async with asyncio.TaskGroup() as group:
        for number in range(40):
            for id in DESKS:
                group.create_task(ask(id, number))
            await sim.advance(0.01)
            most = max(most, unstarted(sim))
    counts = Counter(outcome for of_one in outcomes.values() for outcome in of_one.values())
    assert counts["refused"] > 100
    assert counts["ok"] > 100
    assert 0 < most <= 2 * NODE_MAIL
    for id, of_one in outcomes.items():
        ran = [number for number, outcome in sorted(of_one.items()) if outcome == "ok"]
        assert await sim.ref(Desk, id).ask(Desk.list) == ran
    assert unstarted(sim) == 0


@simulated(entities=[Desk], nodes=1, seeds=3, settings=FULL)
async def test_refused_tells_are_counted_and_do_not_run(sim: Sim) -> None:
    told = 0
    for number in range(20):
        for id in DESKS:
            with suppress(Overloaded):
                await sim.ref(Desk, id).tell(Desk.note, number)
                told += 1
        await sim.advance(0.01)
    await sim.advance(20.0)
    ran = sum([len(await sim.ref(Desk, id).ask(Desk.list)) for id in DESKS])
    refused = sim.history.counts["tell.refused"]
    assert refused > 0
    assert ran == told - refused


@simulated(entities=[Desk], nodes=1, seeds=3, settings=FULL)
async def test_what_running_handlers_wait_for_gets_through(sim: Sim) -> None:
    async def flood(id: str) -> None:
        with suppress(Overloaded):
            await sim.ref(Desk, id).ask(Desk.note, 0)

    async with asyncio.TaskGroup() as group:
        chains = [
            group.create_task(sim.ref(Desk, f"c{number}").ask(Desk.pass_on, "d0", number))
            for number in range(10)
        ]
        await sim.advance(0.01)
        for _ in range(4):
            for id in DESKS:
                group.create_task(flood(id))
        await sim.advance(0.02)
        assert unstarted(sim) >= NODE_MAIL
    assert sorted(chain.result() for chain in chains) == list(range(10))


@simulated(
    entities=[Desk], nodes=1, seeds=3, settings=Settings(shards=8, node_turns=20, slow_s=10.0)
)
async def test_so_many_handlers_run_at_once_and_no_more(sim: Sim) -> None:
    most = 0

    async def ask(id: str) -> str:
        try:
            await sim.ref(Desk, id).ask(Desk.note, 0)
        except Overloaded:
            return "refused"
        return "ok"

    async with asyncio.TaskGroup() as group:
        asks = []
        for number in range(60):
            asks.append(group.create_task(ask(f"n{number}")))
            await sim.advance(0.001)
            life = sim.node(0).life
            assert life is not None
            most = max(most, len(life.runtime.suspended))
    assert most == 20
    counts = Counter(one.result() for one in asks)
    assert counts["refused"] > 0
    await sim.advance(PAUSE_S)
    assert await ask("later") == "ok"


@simulated(entities=[Desk], nodes=1, seeds=3, settings=FULL)
async def test_a_crowded_node_is_left_alone_for_a_while(sim: Sim) -> None:
    async def ask(number: int) -> None:
        with suppress(Overloaded):
            await sim.ref(Desk, DESKS[number % len(DESKS)]).ask(Desk.note, number)

    counts = sim.history.counts
    async with asyncio.TaskGroup() as group:
        for number in range(4 * NODE_MAIL):
            group.create_task(ask(number))
        await sim.wait_until(lambda: counts["mail.refused"] > 0)
        await sim.advance(PAUSE_S / 5)
        by_node, by_sender = counts["mail.refused"], counts["message.overloaded"]
        for number in range(20):
            group.create_task(ask(number))
        await sim.advance(PAUSE_S / 5)
        assert counts["message.overloaded"] == by_sender + 20
        assert counts["mail.refused"] == by_node
    await sim.advance(PAUSE_S)
    assert await sim.ref(Desk, "later").ask(Desk.note, 1) == 1


class Slow(Entity, name="overload-slow"):
    """Waits for something else, such as a disk, and uses no processor meanwhile."""

    @handler
    async def wait(self) -> None:
        await asyncio.sleep(0.05)


@simulated(entities=[Slow], nodes=1, seeds=3, settings=Settings(shards=8))
async def test_handlers_that_wait_are_no_load(sim: Sim) -> None:
    for number in range(1_000):
        await sim.ref(Slow, f"s{number % 100}").tell(Slow.wait)
    await sim.wait_until(lambda: unstarted(sim) > 500)
    await sim.advance(5.0)
    assert unstarted(sim) == 0
    counts = sim.history.counts
    assert counts["tell.refused"] == counts["mail.refused"] == counts["message.overloaded"] == 0


class Saver(EventSourced[int, int], name="overload-saver"):
    """Waits for its own commits."""

    @staticmethod
    def initial(id: str, /) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: int, /) -> int:
        return state + event

    @handler
    async def save(self) -> int:
        total = await self.persist(1)
        await self.committed()
        return total

    @handler
    async def total(self) -> int:
        return await self.state()


@simulated(entities=[Saver], nodes=1, seeds=3, settings=Settings(shards=8))
async def test_handlers_that_wait_for_a_commit_are_no_load(sim: Sim) -> None:
    for process in sim.nodes:
        assert process.journal is not None
        process.journal.delay_s = (0.05, 0.15)
    for number in range(1_000):
        await sim.ref(Saver, f"s{number % 100}").tell(Saver.save)
    await sim.wait_until(lambda: unstarted(sim) > 500)
    await sim.advance(15.0)
    assert unstarted(sim) == 0
    assert await sim.ref(Saver, "s7").ask(Saver.total) == 10
    counts = sim.history.counts
    assert counts["tell.refused"] == counts["mail.refused"] == counts["message.overloaded"] == 0


class Queue(Entity, name="overload-queue"):
    """Waits for a lock that all of its node share."""

    locks: ClassVar[dict[int, asyncio.Lock]] = {}

    @handler
    async def wait(self) -> None:
        async with self.locks.setdefault(id(asyncio.get_running_loop()), asyncio.Lock()):
            await asyncio.sleep(0.005)


@simulated(entities=[Queue], nodes=1, seeds=3, settings=Settings(shards=8))
async def test_handlers_that_wait_for_a_lock_are_no_load(sim: Sim) -> None:
    Queue.locks.clear()
    for number in range(1_000):
        await sim.ref(Queue, f"q{number % 100}").tell(Queue.wait)
    await sim.wait_until(lambda: unstarted(sim) > 500)
    await sim.advance(15.0)
    assert unstarted(sim) == 0
    counts = sim.history.counts
    assert counts["tell.refused"] == counts["mail.refused"] == counts["message.overloaded"] == 0


# with real processes


WORK_S = 0.002


class Mill(Entity, name="overload-mill"):
    """Grinds: holds the processor for each message."""

    @handler
    async def grind(self, sender: str, number: int) -> int:
        enter(self.id, sender, number)
        ends = time.perf_counter() + WORK_S
        while time.perf_counter() < ends:
            pass
        return number


def test_sustained_overload_is_refused_at_once_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = open_ledger(monkeypatch, tmp_path)
    senders, mills, rounds, wait_s = 3, 100, 140, 0.5
    settings = Settings(shards=16, settle_s=0.05, node_wait_s=wait_s)
    outcomes: dict[tuple[str, str, int], str] = {}
    sent: Counter[tuple[str, str]] = Counter()

    async def ask(client: Client, sender: str, mill: str) -> None:
        number = sent[sender, mill]
        sent[sender, mill] += 1
        ref = client.ref(Mill, mill).options(timeout_s=120.0)
        try:
            await ref.ask(Mill.grind, sender, number)
            outcomes[sender, mill, number] = "ok"
        except DomicileError as error:
            outcomes[sender, mill, number] = type(error).__name__

    async def flood(client: Client, sender: str) -> None:
        """Several times what one processor can do."""
        async with asyncio.TaskGroup() as group:
            for turn in range(rounds):
                for step in range(10):
                    group.create_task(ask(client, sender, f"m{(10 * turn + step) % mills}"))
                await asyncio.sleep(0.01)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            cluster = Processes([Mill], nodes=1, settings=settings, record=False)
            await stack.enter_async_context(cluster)
            clients = [
                await stack.enter_async_context(connect(cluster.store)) for _ in range(senders)
            ]
            async with asyncio.TaskGroup() as group:
                for number, client in enumerate(clients):
                    group.create_task(flood(client, f"s{number}"))
            await asyncio.sleep(PAUSE_S)
            await ask(clients[0], "s0", "m0")
            assert outcomes["s0", "m0", sent["s0", "m0"] - 1] == "ok", "it is itself again"

    run(main())
    counts = Counter(outcomes.values())
    assert set(counts) == {"ok", "Overloaded"}, counts
    assert len(outcomes) == senders * 10 * rounds + 1
    assert counts["ok"] > 64
    ran = seen(ledger)
    for (sender, mill), total in sent.items():
        good = [n for n in range(total) if outcomes[sender, mill, n] == "ok"]
        assert ran.get((mill, sender), []) == good, "in order, once, and nothing that was refused"


HOT_S = 0.001


class Stall(Entity, name="overload-stall"):
    """A market stall; one of them is besieged."""

    served: ClassVar[Counter[str]] = Counter()

    @handler
    async def sell(self) -> int:
        ends = time.perf_counter() + HOT_S
        while time.perf_counter() < ends:
            pass
        Stall.served[self.id] += 1
        return Stall.served[self.id]

    @handler
    async def greet(self) -> int:
        """How often the besieged one has sold."""
        return Stall.served["hot"]


def test_a_hot_entity_does_not_starve_its_neighbours(tmp_path: Path) -> None:
    url, besiegers, asks = f"sqlite:///{tmp_path}/market.db", 10, 30
    Stall.served.clear()

    async def buy(client: Client) -> None:
        while True:
            try:
                await client.ref(Stall, "hot").ask(Stall.sell)
            except Overloaded:
                await asyncio.sleep(0.01)

    async def main() -> list[int]:
        # As patient as a busy machine needs: what counts here is who is served before whom.
        settings = Settings(
            shards=4, ttl_s=20.0, settle_s=0.05, ask_timeout_s=240.0, node_wait_s=240.0
        )
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(asyncio.timeout(240))
            await stack.enter_async_context(Node(url, entities=[Stall], settings=settings))
            clients = [
                await stack.enter_async_context(connect(url, settings=settings))
                for _ in range(besiegers + 1)
            ]
            visitor = clients.pop()
            sieges = [asyncio.create_task(buy(client)) for client in clients for _ in range(60)]
            try:
                # Everybody has bought once, and stands behind everybody else again.
                while Stall.served["hot"] < len(sieges):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                return [await wait_of(visitor, f"n{number}") for number in range(asks)]
            finally:
                for siege in sieges:
                    siege.cancel()
                await asyncio.wait(sieges)

    async def wait_of(visitor: Client, id: str) -> int:
        """How often the besieged one sells before a neighbour answers."""
        before = Stall.served["hot"]
        return await visitor.ref(Stall, id).ask(Stall.greet) - before

    waits = asyncio.run(main())
    assert len(waits) == asks
    assert sum(waits) > asks, "the besieged one was busy all along"
    # Some turns of the loop, each short; behind the besieged one hundreds wait all the time.
    assert max(waits) <= 400, waits
