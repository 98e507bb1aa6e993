"""The bank of the demo: accounts made of events, and their bookings as the journal has them.

Node processes import the account, too, so nothing here may draw. `bookings_in` reads a journal
without any account, so that an account's mistake can't hide in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from domicile.backends.registry import OpenOptions, journal_backend, store_backend
from domicile.backends.sqlite import sqlite_url
from domicile.core.ids import ShardKey
from domicile.entity.model.entity import entity_type
from domicile.entity.model.handlers import handler
from domicile.persist.eventsourced import EventSourced

PAGE = 1_000
"""Events to read from the journal at once."""


@dataclass(frozen=True)
class Booked:
    """Coins came in, or went out if the amount is below zero. `order` is also the ask's key."""

    order: str
    amount: int


@dataclass(frozen=True)
class Holdings:
    """What the bookings of an account add up to."""

    balance: int = 0
    bookings: int = 0


class Slip(msgspec.Struct, frozen=True):
    """An account's answer: its holdings, and which attempt of the ask has run."""

    balance: int
    bookings: int
    attempt: int = 1
    is_refused: bool = False
    """There was too little. An answer and no `Rejection`, so that it is stored with its key: no
    attempt can book anything afterwards."""


class Account(EventSourced[Holdings, Booked], name="demo.account", snapshot_every=16):
    """One account. Its coins survive `kill -9`, moves and restarts."""

    @staticmethod
    def initial(id: str, /) -> Holdings:
        """An account begins empty."""
        return Holdings()

    @staticmethod
    def apply(state: Holdings, event: Booked, /) -> Holdings:
        """Add up."""
        return Holdings(state.balance + event.amount, state.bookings + 1)

    @handler
    async def deposit(self, order: str, amount: int, attempt: int) -> Slip:
        """Put coins in."""
        held = await self.persist(Booked(order, amount))
        return Slip(held.balance, held.bookings, attempt)

    @handler
    async def withdraw(self, order: str, amount: int, attempt: int) -> Slip:
        """Take coins out, if there are enough."""
        held = await self.state()
        if held.balance < amount:
            return Slip(held.balance, held.bookings, attempt, is_refused=True)
        held = await self.persist(Booked(order, -amount))
        return Slip(held.balance, held.bookings, attempt)

    @handler(shared=True)
    async def look(self) -> Slip:
        """Answer without any change."""
        held = await self.state()
        return Slip(held.balance, held.bookings)


async def bookings_in(url: str, cluster: str, shards: int) -> dict[str, list[Booked]]:
    """The bookings of every account, oldest first, from a journal."""
    journal = journal_backend(url).open_journal(url, OpenOptions("auditor", cluster))
    kind = entity_type(Account)
    found: dict[str, list[Booked]] = {}
    try:
        for number in range(shards):
            after = 0
            while (page := await journal.scan(ShardKey(kind.role, number), after, PAGE)).events:
                for event in page.events:
                    if event.entity.type == kind.name and event.data is not None:
                        booked = Account.__domicile_events__.decode(event.data)
                        found.setdefault(event.entity.id, []).append(booked)
                after = page.upto
    finally:
        await journal.close()
    return found


def journal_file(url: str) -> Path | None:
    """The file of a journal, if it is one."""
    return journal_backend(url).sqlite_file(url)


def journal_of(store: str, directory: Path) -> str:
    """The journal beside a store; a file in a directory, if a store comes without one."""
    beside = store_backend(store).default_journal(store)
    return sqlite_url(directory / "events.journal") if beside is None else beside
