"""Accounts whose events lie in PostgreSQL, and the node of a host."""

from __future__ import annotations

import os
from dataclasses import dataclass

from domicile import EventSourced, Node, Rejection, handler

STORE = os.environ["DATABASE_URL"]
"""Store and journal: one database, which every host reaches."""


@dataclass(frozen=True)
class Paid:
    """So much came in, or went out if it is negative."""

    amount: int


class Overdrawn(Rejection):
    """What the account has is the argument."""


class Account(EventSourced[int, Paid], name="account"):
    """Has at least nothing."""

    @staticmethod
    def initial(id: str, /) -> int:
        """Before the first payment."""
        return 0

    @staticmethod
    def apply(balance: int, event: Paid, /) -> int:
        """Pure: it runs again at every new home."""
        return balance + event.amount

    @handler
    async def pay(self, amount: int) -> int:
        """Say what there is afterwards; the answer leaves once the event is stored."""
        balance = await self.state()
        if balance + amount < 0:
            raise Overdrawn(balance)
        return await self.persist(Paid(amount))


node = Node(STORE, entities=[Account], listen=os.environ.get("LISTEN", "127.0.0.1:0"))
