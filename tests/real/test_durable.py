"""Event-sourced entities on the embedded store: what was acknowledged survives its processes."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from postgres_lab import shared_server
from real_lab import mine, of

from domicile import EventSourced, Settings, handler
from domicile.errors import MaybeExecuted
from domicile.testing import Processes, check


@dataclass(frozen=True)
class Paid:
    """An amount that came in."""

    amount: int


class Purse(EventSourced[int, Paid], name="durable.purse"):
    """Adds up."""

    @staticmethod
    def initial(id: str) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: Paid) -> int:
        return state + event.amount

    @handler
    async def pay(self, amount: int) -> int:
        return await self.persist(Paid(amount))

    @handler
    async def pay_twice(self, amount: int, when: str) -> int:
        """Once now and once when a file is there."""
        await self.persist(Paid(amount))
        while not os.path.exists(when):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.01)
        return await self.persist(Paid(amount))

    @handler
    async def total(self) -> int:
        return await self.state()


SETTINGS = Settings(shards=16, ask_timeout_s=60.0, poison_deaths=1_000)


SHORT = Settings(shards=4, ttl_s=2.0, ask_timeout_s=60.0, poison_deaths=1_000)


async def acknowledged_survives(cluster: Processes) -> None:
    """Callers pay one by one, by keys that they repeat, while homes are killed."""
    ids = [f"p{n}" for n in range(8)]
    paid = dict.fromkeys(ids, 0)
    rounds = 0
    done = asyncio.Event()

    async def pay(id: str) -> None:
        nonlocal rounds
        while not done.is_set():
            paid[id] += 1
            ref = cluster.ref(Purse, id).options(key=f"{paid[id]}")
            while True:
                try:
                    assert await ref.ask(Purse.pay, 1) == paid[id]
                    break
                except MaybeExecuted:
                    continue
            rounds += 1

    async with asyncio.TaskGroup() as tasks:
        for id in ids:
            tasks.create_task(pay(id))
        for node in (0, 1, 0):
            before = rounds
            await cluster.wait_until(lambda least=before + 40: rounds >= least, timeout_s=60.0)
            cluster.crash(node)
            await cluster.wait_until(cluster.settled, timeout_s=60.0)
            cluster.start(node)
        done.set()
    assert {id: await cluster.ref(Purse, id).ask(Purse.total) for id in ids} == paid


def journal_at(kind: str) -> str | None:
    """The URL of a journal of this kind; None: the one that comes with the store."""
    return shared_server().new_database() if kind == "postgresql" else None


@pytest.mark.parametrize("journal", ["sqlite", "postgresql"])
@pytest.mark.scenario("LS-18", partial=True)
def test_what_was_acknowledged_survives_kills_of_its_homes(journal: str) -> None:
    async def scenario() -> None:
        url = journal_at(journal)
        async with Processes([Purse], nodes=2, settings=SETTINGS, journal=url) as cluster:
            await acknowledged_survives(cluster)
        assert check(cluster.history()) == []

    asyncio.run(scenario())


@pytest.mark.parametrize("journal", ["sqlite", "postgresql"])
def test_it_survives_the_kill_of_every_process(journal: str) -> None:
    async def scenario() -> None:
        url = journal_at(journal)
        async with Processes([Purse], nodes=2, settings=SETTINGS, journal=url) as cluster:
            for n in range(8):
                assert await cluster.ref(Purse, f"p{n}").ask(Purse.pay, n) == n
            for node in (0, 1):
                cluster.crash(node)
            for node in (0, 1):
                cluster.start(node)
            await cluster.wait_until(cluster.settled, timeout_s=60.0)
            for n in range(8):
                assert await cluster.ref(Purse, f"p{n}").ask(Purse.total) == n

    asyncio.run(scenario())


@pytest.mark.parametrize("journal", ["sqlite", "postgresql"])
@pytest.mark.scenario("DX-01", partial=True)
def test_a_home_that_was_stopped_stores_nothing_once_its_successor_has(
    journal: str, tmp_path: Path
) -> None:
    """Stopped in the middle of a handler that has staged events, and goes on after its lease."""
    file = tmp_path / "now"

    async def scenario() -> None:
        url = journal_at(journal)
        async with Processes([Purse], nodes=2, settings=SHORT, journal=url) as cluster:
            await cluster.wait_until(cluster.settled)
            purse, home = cluster.ref(Purse, "p"), cluster.owner(Purse, "p")
            assert await purse.ask(Purse.pay, 1) == 1
            old = mine(cluster, home)
            late = asyncio.ensure_future(purse.ask(Purse.pay_twice, 100, str(file)))
            await cluster.wait_until(lambda: len(of(cluster.history(), old, "start")) == 2)
            cluster.freeze(home)
            shard = cluster.shard(Purse, "p")
            await cluster.wait_until(lambda: cluster.entry(shard).owner not in ("", old))
            assert await purse.ask(Purse.pay, 2) == 3
            file.touch()
            cluster.thaw(home)
            with pytest.raises(MaybeExecuted):
                await late
            await cluster.wait_until(lambda: cluster.incarnation(home) not in (None, old))
            await cluster.wait_until(cluster.settled)
            assert await purse.ask(Purse.total) == 3
        assert check(cluster.history()) == []

    asyncio.run(scenario())
