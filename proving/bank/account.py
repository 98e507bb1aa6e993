"""The accounts of the bank: event-sourced entities that tell with every answer what they rest on.

Imported by the nodes of a run, which also makes the probed journals known there. An answer names
the number of events, the balance and a mark over all events behind it. The judge compares these
with the journal, so that an answer that rests on a lost event is always found.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from domicile import EventSourced, Rejection, handler
from proving.bank import probe

probe.install()


class Booked(msgspec.Struct, frozen=True):
    """One part of a leg of a transfer. An amount below zero was taken out."""

    amount: int
    leg: str
    part: int
    parts: int


class Slip(msgspec.Struct, frozen=True):
    """What an account is after its first `count` events."""

    count: int
    balance: int
    mark: str


EMPTY = Slip(0, 0, "")


def booked(slip: Slip, event: Booked) -> Slip:
    """An account after one more event."""
    told = f"{slip.mark} {event.amount} {event.leg} {event.part}"
    mark = blake2b(told.encode(), digest_size=8).hexdigest()
    return Slip(slip.count + 1, slip.balance + event.amount, mark)


def parts_of(amount: int, leg: str) -> tuple[Booked, ...]:
    """The events of a leg: one, or two that belong together if the amount is even."""
    if amount % 2:
        return (Booked(amount, leg, 1, 1),)
    half = amount // 2
    return Booked(half - 1, leg, 1, 2), Booked(half + 1, leg, 2, 2)


class Overdrawn(Rejection, name="bank.overdrawn"):
    """There is less than what was asked for. Its arguments are the amount and the fields of the
    account's slip."""

    @property
    def asked(self) -> int:
        """The amount that was asked for."""
        return int(self.args[0])

    @property
    def slip(self) -> Slip:
        """The account as it was then."""
        return Slip(*self.args[1:])


class Account(EventSourced[Slip, Booked], name="bank.account"):
    """One account. Its state is its own slip."""

    @staticmethod
    def initial(id: str, /) -> Slip:
        """Nothing."""
        return EMPTY

    @staticmethod
    def apply(state: Slip, event: Booked, /) -> Slip:
        """One more event."""
        return booked(state, event)

    @handler
    async def deposit(self, amount: int, leg: str) -> Slip:
        """Put money in."""
        return await self.persist(*parts_of(amount, leg))

    @handler
    async def withdraw(self, amount: int, leg: str) -> Slip:
        """Take money out, if there is enough."""
        now = await self.state()
        if amount > now.balance:
            raise Overdrawn(amount, now.count, now.balance, now.mark)
        return await self.persist(*parts_of(-amount, leg))

    @handler
    async def balance(self) -> Slip:
        """What there is, in a turn of its own."""
        return await self.state()

    @handler(shared=True)
    async def peek(self) -> Slip:
        """What there is, beside whatever else runs."""
        return await self.state()
