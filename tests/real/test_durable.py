"""Event-sourced entities on the embedded store: what was acknowledged survives its processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw
import asyncpg
import pytest
from postgres_lab import shared_server
from real_entities import LEDGER, enter
from real_lab import mine, of, open_ledger, seen

from domicile import Entity, EventSourced, Rejection, Settings, handler
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
        if LEDGER in os.environ:
            enter(id, "recovered", os.getpid())
        return 0

    @staticmethod
    def apply(state: int, event: Paid) -> int:
        return state + event.amount

    @handler
    async def pay(self, amount: int) -> int:
        return await self.persist(Paid(amount))

    @handler
    async def take(self, amount: int) -> None:
        """Like `pay`, without reading."""
        await self.append(Paid(amount))

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


class TooLittle(Rejection, name="durable.too-little"):
    """The total is the argument."""


class Vault(EventSourced[int, Paid], name="durable.vault"):
    """Like a purse. All that depends on its total can leave it, in each possible way."""

    @staticmethod
    def initial(id: str) -> int:
        return 0

    @staticmethod
    def apply(state: int, event: Paid) -> int:
        return state + event.amount

    async def paid(self, amount: int) -> int:
        """Stage a payment, and leave a note that it was."""
        total = await self.persist(Paid(amount))
        enter(self.id, "ran", total)
        return total

    @handler
    async def pay(self, amount: int) -> int:
        return await self.paid(amount)

    @handler
    async def pay_and_ask(self, amount: int, ear: str) -> int:
        total = await self.paid(amount)
        return await self.ref(Ear, ear).ask(Ear.hear, total)

    @handler
    async def pay_and_tell(self, amount: int, ear: str) -> int:
        total = await self.paid(amount)
        await self.ref(Ear, ear).tell(Ear.hear, total)
        return total

    @handler
    async def refuse(self) -> None:
        enter(self.id, "refuses", await self.state())
        raise TooLittle(await self.state())

    @handler(shared=True)
    async def total(self) -> int:
        enter(self.id, "read", await self.state())
        return await self.state()


class Ear(Entity, name="durable.ear"):
    """Stores nothing."""

    @handler
    async def hear(self, what: int) -> int:
        enter(self.id, "heard", what)
        return what

    @handler
    async def listen(self) -> int:
        return os.getpid()


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


@asynccontextmanager
async def journal_locked(file: Path, url: str | None) -> AsyncIterator[None]:
    """Nothing can be written: this process has the lock of the file, or of all rows."""
    if url is None:
        raw = apsw.Connection(str(file))
        try:
            raw.set_busy_timeout(60_000)
            raw.execute("BEGIN IMMEDIATE")
            yield
        finally:
            raw.close()
        return
    session = await asyncpg.connect(url)
    try:
        async with session.transaction():
            await session.execute("SELECT 1 FROM domicile_journal.fence FOR UPDATE")
            yield
    finally:
        await session.close()


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
@pytest.mark.scenario("LS-15")
def test_it_survives_the_kill_of_every_process_and_what_only_appends_recovers_nothing(
    journal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = open_ledger(monkeypatch, tmp_path)

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
            os.truncate(ledger, 0)
            for n in range(8):
                purse = cluster.ref(Purse, f"p{n}")
                await purse.ask(Purse.take, 1)
                for _ in range(2):
                    await purse.options(key="k").ask(Purse.take, 1)
            assert seen(ledger) == {}
            for n in range(8):
                assert await cluster.ref(Purse, f"p{n}").ask(Purse.total) == n + 2
            assert {key: len(lines) for key, lines in seen(ledger).items()} == {
                (f"p{n}", "recovered"): 1 for n in range(8)
            }

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


@pytest.mark.parametrize("journal", ["sqlite", "postgresql"])
@pytest.mark.scenario("DX-28")
def test_nothing_leaves_before_its_events_are_stored(
    journal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal stands still, once until it goes on, and once until the home is killed."""
    ledger = open_ledger(monkeypatch, tmp_path)

    def noted(id: str, what: str) -> list[int]:
        return seen(ledger).get((id, what), [])

    async def scenario() -> None:
        url = journal_at(journal)
        async with Processes([Vault, Ear], nodes=2, settings=SETTINGS, journal=url) as cluster:
            await cluster.wait_until(cluster.settled)
            file = cluster.directory / "store.db.journal"
            vault, asking, telling = (cluster.ref(Vault, id) for id in ("v", "asks", "tells"))
            home = cluster.owner(Vault, "v")
            beside = next(
                id for id in map(str, range(1_000)) if cluster.owner(Ear, id) == home
            )  # fmt: skip
            for each in (vault, asking, telling):
                assert await each.ask(Vault.pay, 1) == 1

            async with journal_locked(file, url):
                waiting: list[asyncio.Future[Any]] = [
                    asyncio.ensure_future(ask)
                    for ask in (
                        vault.options(key="k").ask(Vault.pay, 1),
                        vault.options(key="k").ask(Vault.pay, 1),
                        vault.ask(Vault.pay, 1),
                        vault.ask(Vault.total),
                        vault.ask(Vault.refuse),
                        asking.ask(Vault.pay_and_ask, 1, "asked"),
                        telling.ask(Vault.pay_and_tell, 1, "told"),
                    )
                ]
                await cluster.wait_until(
                    lambda: (
                        noted("v", "ran") == [1, 2, 3]
                        and noted("v", "refuses") == [3]
                        and bool(noted("v", "read"))
                        and noted("asks", "ran") == noted("tells", "ran") == [1, 2]
                    )
                )
                # Nothing else is in the way of an answer from there.
                for _ in range(20):
                    await cluster.ref(Ear, beside).ask(Ear.listen)
                assert not any(one.done() for one in waiting)
                assert not noted("asked", "heard")
                assert not noted("told", "heard")
            found = await asyncio.gather(*waiting, return_exceptions=True)
            refusal = found.pop(4)
            assert isinstance(refusal, TooLittle)
            assert refusal.args == (3,)
            assert found[:3] + found[4:] == [2, 2, 3, 2, 2]
            assert found[3] == noted("v", "read")[0]
            await cluster.wait_until(lambda: noted("told", "heard") == [2])
            assert noted("asked", "heard") == [2]

            async with journal_locked(file, url):
                waiting = [
                    asyncio.ensure_future(ask)
                    for ask in (
                        vault.options(key="l").ask(Vault.pay, 1),
                        vault.ask(Vault.total),
                        vault.ask(Vault.refuse),
                    )
                ]
                await cluster.wait_until(lambda: noted("v", "refuses") == [3, 4])
                cluster.crash(home)
                for one in waiting:
                    with pytest.raises(MaybeExecuted):
                        await one
            await cluster.wait_until(cluster.settled)
            assert await vault.options(key="l").ask(Vault.pay, 1) == 4
            assert await vault.ask(Vault.total) == 4
        assert check(cluster.history()) == []

    asyncio.run(scenario())
