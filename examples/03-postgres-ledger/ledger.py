"""A ledger: accounts as events in PostgreSQL, transfers, balances as a table, statements."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg

from domicile import (
    Client,
    EventSourced,
    JournalEvent,
    MaybeExecuted,
    Node,
    NotExecuted,
    Projector,
    Rejection,
    handler,
)

DATABASE = os.environ.get("DATABASE_URL", "postgresql://localhost/ledger")
STORE = "sqlite:///.domicile/ledger.db"

TABLES = """
CREATE TABLE IF NOT EXISTS balance (account text PRIMARY KEY, amount bigint NOT NULL);
CREATE TABLE IF NOT EXISTS read_upto (shard int PRIMARY KEY, off bigint NOT NULL);
CREATE TABLE IF NOT EXISTS statement (
    account text, month text, amount bigint NOT NULL, PRIMARY KEY (account, month)
);
"""


@dataclass(frozen=True)
class Deposited:
    """So much came in."""

    amount: int


@dataclass(frozen=True)
class Withdrawn:
    """So much went out."""

    amount: int


Event = Deposited | Withdrawn


class TooLittle(Rejection, name="ledger.TooLittle"):
    """The balance is the argument."""


class Account(EventSourced[int, Event], name="ledger.account", snapshot_every=1_000):
    """One account; its state is the balance."""

    @staticmethod
    def initial(id: str, /) -> int:
        """Before the first event."""
        return 0

    @staticmethod
    def apply(balance: int, event: Event, /) -> int:
        """Pure: it runs again at every new home."""
        match event:
            case Deposited(amount):
                return balance + amount
            case Withdrawn(amount):
                return balance - amount

    @handler
    async def deposit(self, amount: int) -> int:
        """Says the new balance."""
        return await self.persist(Deposited(amount))

    @handler
    async def withdraw(self, amount: int) -> int:
        """Says the new balance, or refuses."""
        balance = await self.state()
        if balance < amount:
            raise TooLittle(balance)
        return await self.persist(Withdrawn(amount))

    @handler(shared=True)
    async def balance(self) -> int:
        """Says the balance."""
        return await self.state()

    @handler
    async def print_statement(self, month: str) -> int:
        """Write a row of the application's own table, under the fence of this account."""
        balance = await self.state()
        async with self.resource(asyncpg.Pool).acquire() as conn, self.fenced(conn):
            await conn.execute(
                "INSERT INTO statement VALUES ($1, $2, $3) ON CONFLICT (account, month) "
                "DO UPDATE SET amount = excluded.amount",
                self.id, month, balance,
            )  # fmt: skip
        return balance


async def transfer(client: Client, key: str, source: str, to: str, amount: int) -> None:
    """Move money once, however often it is called with this key.

    Each half is repeated until its outcome is known. If this process dies in between, call it again
    with the same key: it goes on where it was.
    """
    await _surely(client, f"{key}/out", source, Account.withdraw, amount)
    await _surely(client, f"{key}/in", to, Account.deposit, amount)


async def _surely(client: Client, key: str, account: str, half: Any, amount: int) -> None:
    ref = client.ref(Account, account).options(key=key)
    while True:
        try:
            await ref.ask(half, amount)
            return
        except (MaybeExecuted, NotExecuted):
            await asyncio.sleep(0.5)


class Balances:
    """The table of balances: a projection whose offsets lie in the same database."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    async def offset(self, shard: int, /) -> int:
        """How far it is."""
        return await self.pool.fetchval("SELECT off FROM read_upto WHERE shard = $1", shard) or 0

    async def apply(self, shard: int, events: Sequence[JournalEvent[Event]], upto: int, /) -> None:
        """Balances and offset in one transaction: no event is left out, none counts twice."""
        async with self.pool.acquire() as conn, conn.transaction():
            for one in events:
                match one.event:
                    case Deposited(amount):
                        change = amount
                    case Withdrawn(amount):
                        change = -amount
                    case _:
                        change = 0
                await conn.execute(
                    "INSERT INTO balance VALUES ($1, $2) "
                    "ON CONFLICT (account) DO UPDATE SET amount = balance.amount + $2",
                    one.id, change,
                )  # fmt: skip
            await conn.execute(
                "INSERT INTO read_upto VALUES ($1, $2) ON CONFLICT (shard) DO UPDATE SET off = $2",
                shard, upto,
            )  # fmt: skip


@asynccontextmanager
async def resources() -> AsyncGenerator[dict[type[Any], Any], None]:
    """What a node's accounts find with `self.resource`."""
    async with asyncpg.create_pool(DATABASE, min_size=1, max_size=4) as pool:
        await pool.execute(TABLES)
        yield {asyncpg.Pool: pool}


node = Node(STORE, entities=[Account], journal=DATABASE, resources=resources)


async def main() -> None:
    """A day of the ledger."""
    async with node, asyncpg.create_pool(DATABASE, min_size=1, max_size=2) as pool:
        print("alice has", await node.ref(Account, "alice").ask(Account.deposit, 100))
        for _ in range(2):
            await transfer(node, "rent-november", "alice", "bob", 30)
            print("alice has", await node.ref(Account, "alice").ask(Account.balance))
        try:
            await transfer(node, "car", "alice", "bob", 5_000)
        except TooLittle as refusal:
            print("no car: alice has", *refusal.args)
        print("printed:", await node.ref(Account, "alice").ask(Account.print_statement, "november"))
        async with Projector(
            Balances(pool), entities=[Account], store=STORE, journal=DATABASE
        ) as projector:
            await projector.caught_up()
        for table in ("balance", "statement"):
            rows = await pool.fetch(f"SELECT account, amount FROM {table} ORDER BY account")
            print(f"{table}:", *(f"{row['account']} {row['amount']}" for row in rows))


if __name__ == "__main__":
    asyncio.run(main())
