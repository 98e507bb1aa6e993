"""The ledger that the demo's senders keep outside the cluster, and what it says of the bank.

`ops.demo.load` fills it and `ops.demo.run` has it judged. Pure: what was ordered and answered
comes in, and so do the balances and the bookings. It knows nothing of nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from domicile.ops.demo.bank import Booked


@dataclass(slots=True)
class Order:
    """One ask of a sender, however often it was sent: coins into an account or out of it."""

    key: str
    account: str
    amount: int
    """Below zero: coins go out."""
    attempts: int = 0
    """How often it was sent."""
    is_answered: bool = False
    """The account has booked it."""
    is_refused: bool = False
    """There was too little, so nothing may be booked."""


@dataclass(slots=True)
class CoinTransfer:
    """Coins from one account to another: two orders. The second follows the first one's answer."""

    name: str
    taken: Order
    given: Order

    @property
    def is_answered(self) -> bool:
        """Whether both of its orders were answered."""
        return self.taken.is_answered and self.given.is_answered

    @property
    def is_open(self) -> bool:
        """Whether the sender does not know yet what became of it."""
        return not self.is_answered and not self.taken.is_refused


@dataclass
class Ledger:
    """What the senders ordered, and what they were answered."""

    openings: list[Order] = field(default_factory=list[Order])
    transfers: list[CoinTransfer] = field(default_factory=list[CoinTransfer])

    def opening(self, account: str, amount: int) -> Order:
        """The first coins of an account are about to be ordered."""
        order = Order(f"open/{account}", account, amount)
        self.openings.append(order)
        return order

    def transfer(self, name: str, source: str, target: str, amount: int) -> CoinTransfer:
        """A transfer is about to be ordered."""
        taken = Order(f"{name}/out", source, -amount)
        transfer = CoinTransfer(name, taken, Order(f"{name}/in", target, amount))
        self.transfers.append(transfer)
        return transfer

    @property
    def coins(self) -> int:
        """The coins that the bank must have: transfers change nothing about it."""
        return sum(order.amount for order in self.openings if order.is_answered)

    @property
    def answered(self) -> int:
        """The transfers that were answered."""
        return sum(transfer.is_answered for transfer in self.transfers)

    @property
    def refused(self) -> int:
        """The transfers for which there was too little in the account."""
        return sum(transfer.taken.is_refused for transfer in self.transfers)

    @property
    def open(self) -> int:
        """The openings and transfers that never came to an end."""
        openings = sum(not order.is_answered for order in self.openings)
        return openings + sum(transfer.is_open for transfer in self.transfers)

    def orders(self) -> Iterator[Order]:
        """Every order."""
        yield from self.openings
        for transfer in self.transfers:
            yield transfer.taken
            yield transfer.given


@dataclass(frozen=True)
class BankAudit:
    """What the bank has, beside what the ledger says that it must have. Faults are in words."""

    coins: int
    """By the ledger."""
    told: int
    """By the accounts, when the load had ended."""
    answered: int
    """Transfers, by the ledger."""
    lost: list[str] = field(default_factory=list[str])
    """Answered transfers that the journal does not have once and whole."""
    wrong: list[str] = field(default_factory=list[str])
    """Bookings that are there twice, without the other half, or without an order."""
    differing: list[str] = field(default_factory=list[str])
    """Accounts whose bookings do not add up to the balance that they told."""
    overdrawn: list[str] = field(default_factory=list[str])
    """Bookings that left a balance below zero."""

    @property
    def faults(self) -> list[str]:
        """All that is wrong, in words; empty if every coin and every transfer is there."""
        found = [*self.lost, *self.wrong, *self.differing, *self.overdrawn]
        if self.told != self.coins:
            found.insert(0, f"the accounts have {self.told:,} coins instead of {self.coins:,}")
        return found


Bookings = Mapping[str, Sequence[Booked]]
"""The bookings of every account, oldest first."""


def bank_audit(ledger: Ledger, balances: Mapping[str, int], journal: Bookings) -> BankAudit:
    """Judge the balances that accounts told and the bookings that the journal has."""
    times = Counter(
        (account, booked.order, booked.amount)
        for account, bookings in journal.items()
        for booked in bookings
    )
    return BankAudit(
        coins=ledger.coins, told=sum(balances.values()), answered=ledger.answered,
        lost=list(_lost(ledger, times)), wrong=list(_wrong(ledger, times)),
        differing=list(_differing(balances, journal)), overdrawn=list(_overdrawn(journal)),
    )  # fmt: skip


_Place = tuple[str, str, int]


def _place(order: Order) -> _Place:
    return order.account, order.key, order.amount


def _lost(ledger: Ledger, times: Counter[_Place]) -> Iterator[str]:
    for transfer in ledger.transfers:
        taken, given = times[_place(transfer.taken)], times[_place(transfer.given)]
        if transfer.is_answered and not taken == given == 1:
            yield (
                f"{transfer.name} was answered; the journal has it {taken} times at "
                f"{transfer.taken.account} and {given} times at {transfer.given.account}"
            )


def _wrong(ledger: Ledger, times: Counter[_Place]) -> Iterator[str]:
    known = {_place(order): order for order in ledger.orders()}
    for place, many in times.items():
        account, key, amount = place
        order = known.get(place)
        if order is None:
            yield f"{account} has {amount:+,} of {key}, which nobody ordered"
        elif order.is_refused:
            yield f"{account} has {amount:+,} of {key}, which was refused"
        elif many > 1:
            yield f"{account} has {amount:+,} of {key} {many} times"
    for transfer in ledger.transfers:
        if bool(times[_place(transfer.taken)]) != bool(times[_place(transfer.given)]):
            yield f"only one half of {transfer.name} is booked"


def _differing(balances: Mapping[str, int], journal: Bookings) -> Iterator[str]:
    for account in dict.fromkeys((*balances, *journal)):
        told = balances.get(account, 0)
        stored = sum(booked.amount for booked in journal.get(account, ()))
        if told != stored:
            yield f"{account} told {told:,} coins; its bookings add up to {stored:,}"


def _overdrawn(journal: Bookings) -> Iterator[str]:
    for account, bookings in journal.items():
        sums = accumulate(booked.amount for booked in bookings)
        for booked, balance in zip(bookings, sums, strict=True):
            if balance < 0:
                yield f"{account} had {balance:,} coins after {booked.order}"
