"""The rules of an account, each in a line; and the whole ledger where there is a database."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg
import pytest
from ledger import (
    TABLES,
    Account,
    Balances,
    Deposited,
    TooLittle,
    Withdrawn,
    resources,
    transfer,
)

from domicile import MaybeExecuted, Node, Projector, Settings
from domicile.testing import Sim, given, simulated

database = pytest.mark.skipif(
    "DATABASE_URL" not in os.environ, reason="no PostgreSQL: set DATABASE_URL to an empty database"
)


def test_the_rules_of_an_account() -> None:
    given(Account, "a").when(Account.deposit, 5).then(events=[Deposited(5)], reply=5)
    rich = given(Account, "a", Deposited(9), Withdrawn(2))
    rich.when(Account.withdraw, 7).then(events=[Withdrawn(7)], reply=0)
    rich.when(Account.withdraw, 8).rejects(TooLittle, 7)


@simulated(entities=[Account], nodes=3, seeds=5)
async def test_a_transfer_that_a_crash_cuts_short_happens_once(sim: Sim) -> None:
    await sim.ref(Account, "alice").ask(Account.deposit, 100)
    for number, id in enumerate(("alice", "bob", "alice", "bob")):
        moving = asyncio.create_task(transfer(sim, f"t{number}", "alice", "bob", 10))
        await sim.advance(0.002 * number)
        home = sim.owner(Account, id)
        sim.crash(home)
        await moving
        await transfer(sim, f"t{number}", "alice", "bob", 10)
        sim.start(home)
        await sim.wait_until(sim.settled)
    assert await sim.ref(Account, "alice").ask(Account.balance) == 60
    assert await sim.ref(Account, "bob").ask(Account.balance) == 40


@dataclass
class Place:
    """A node, a cluster name that is new in the database, and a schema with tables like ours."""

    node: Node
    pool: Any
    cluster: str


@asynccontextmanager
async def running() -> AsyncIterator[Place]:
    url, cluster = os.environ["DATABASE_URL"], f"test_{secrets.token_hex(4)}"
    node = Node(
        "memory://ledger",
        entities=[Account],
        journal=url,
        cluster=cluster,
        resources=resources,
        settings=Settings(shards=8),
    )
    async with asyncpg.create_pool(url, server_settings={"search_path": cluster}) as pool:
        await pool.execute(f"CREATE SCHEMA {cluster}; {TABLES}")
        try:
            async with node:
                yield Place(node, pool, cluster)
        finally:
            await pool.execute(f"DROP SCHEMA {cluster} CASCADE")
            await pool.execute(f"DROP SCHEMA {cluster}_journal CASCADE")


@database
def test_the_table_of_balances_follows() -> None:
    async def scenario() -> None:
        async with running() as here:
            await here.node.ref(Account, "carol").ask(Account.deposit, 100)
            await transfer(here.node, "once", "carol", "dave", 40)
            async with Projector(
                Balances(here.pool),
                entities=[Account],
                store="memory://ledger",
                journal=os.environ["DATABASE_URL"],
                cluster=here.cluster,
            ) as projector:
                await projector.caught_up()
            rows = await here.pool.fetch("SELECT account, amount FROM balance")
            assert {row["account"]: row["amount"] for row in rows} == {"carol": 60, "dave": 40}

    asyncio.run(scenario())


@database
def test_a_stale_home_prints_no_statement() -> None:
    async def scenario() -> None:
        async with running() as here:
            erin = here.node.ref(Account, "erin")
            await erin.ask(Account.deposit, 5)
            # As if another node had taken over while this one stood still.
            await here.pool.execute(
                f"UPDATE {here.cluster}_journal.fence SET epoch = epoch + 1, owner = 'successor'"
            )
            with pytest.raises(MaybeExecuted):
                await erin.ask(Account.print_statement, "may")
            found = await here.pool.fetchval(
                "SELECT count(*) FROM public.statement WHERE account = 'erin'"
            )
            assert found == 0

    asyncio.run(scenario())
