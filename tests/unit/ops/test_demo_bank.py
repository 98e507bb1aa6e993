"""The senders' ledger of the demo, and what senders make of answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, cast

import pytest

from domicile import HandlerFailed, MaybeExecuted, NotExecuted, Settings
from domicile.entity.model.client import Client
from domicile.ops.demo.bank import Booked, Slip
from domicile.ops.demo.ledger import Ledger, Order, bank_audit
from domicile.ops.demo.load import ACCOUNTS, OPENING, Load

Books = tuple[Ledger, dict[str, int], dict[str, list[Booked]]]


def carried_out(order: Order) -> None:
    order.is_answered = True


@pytest.fixture
def books() -> Books:
    """Two accounts with 100 coins each, and 30 that went from one to the other."""
    ledger = Ledger()
    for account in "ab":
        carried_out(ledger.opening(account, 100))
    transfer = ledger.transfer("t1", "a", "b", 30)
    carried_out(transfer.taken)
    carried_out(transfer.given)
    refused = ledger.transfer("t2", "a", "b", 90)
    refused.taken.is_refused = True
    journal = {
        "a": [Booked("open/a", 100), Booked("t1/out", -30)],
        "b": [Booked("open/b", 100), Booked("t1/in", 30)],
    }
    return ledger, {"a": 70, "b": 130}, journal


def test_right_books_have_no_faults(books: Books) -> None:
    audit = bank_audit(*books)
    assert audit.faults == []
    assert (audit.coins, audit.told, audit.answered) == (200, 200, 1)
    assert (books[0].refused, books[0].open) == (1, 0)


def test_coins_that_are_gone_are_told(books: Books) -> None:
    ledger, balances, journal = books
    audit = bank_audit(ledger, {**balances, "a": 69}, journal)
    assert audit.told == 199
    assert audit.faults == [
        "the accounts have 199 coins instead of 200",
        "a told 69 coins; its bookings add up to 70",
    ]


def test_two_wrong_balances_with_the_right_total_are_told(books: Books) -> None:
    ledger, _, journal = books
    audit = bank_audit(ledger, {"a": 100, "b": 100}, journal)
    assert audit.told == audit.coins
    assert len(audit.differing) == 2


def test_accounts_without_any_booking_are_told(books: Books) -> None:
    audit = bank_audit(books[0], {"a": 70, "b": 130}, {})
    assert len(audit.differing) == 2
    assert len(audit.lost) == 1


def test_an_answered_transfer_that_is_lost_is_told(books: Books) -> None:
    ledger, balances, journal = books
    del journal["a"][1], journal["b"][1]
    audit = bank_audit(ledger, balances, journal)
    assert audit.lost == [
        "t1 was answered; the journal has it 0 times at a and 0 times at b",
    ]


def test_a_transfer_that_is_booked_twice_is_told(books: Books) -> None:
    ledger, _, journal = books
    journal["a"].append(Booked("t1/out", -30))
    journal["b"].append(Booked("t1/in", 30))
    audit = bank_audit(ledger, {"a": 40, "b": 160}, journal)
    assert (audit.told, audit.differing) == (audit.coins, [])
    assert len(audit.lost) == 1
    assert audit.wrong == ["a has -30 of t1/out 2 times", "b has +30 of t1/in 2 times"]


def test_half_a_transfer_is_told_though_nobody_was_answered(books: Books) -> None:
    ledger, _, journal = books
    ledger.transfer("t3", "b", "a", 1)
    journal["b"].append(Booked("t3/out", -1))
    audit = bank_audit(ledger, {"a": 70, "b": 129}, journal)
    assert ledger.open == 1
    assert audit.wrong == ["only one half of t3 is booked"]


@pytest.mark.parametrize(
    ("booked", "words"),
    [
        (Booked("t9/in", 5), "a has +5 of t9/in, which nobody ordered"),
        (Booked("t1/in", 30), "a has +30 of t1/in, which nobody ordered"),
        (Booked("t1/out", -3), "a has -3 of t1/out, which nobody ordered"),
        (Booked("t2/out", -90), "a has -90 of t2/out, which was refused"),
    ],
)
def test_a_booking_that_may_not_be_there_is_told(books: Books, booked: Booked, words: str) -> None:
    ledger, balances, journal = books
    journal["a"].append(booked)
    assert words in bank_audit(ledger, balances, journal).wrong


def test_a_balance_below_zero_is_told_though_it_rose_again(books: Books) -> None:
    ledger, balances, journal = books
    journal["a"].reverse()
    audit = bank_audit(ledger, balances, journal)
    assert audit.faults == audit.overdrawn == ["a had -30 coins after t1/out"]


class Scripted:
    """A client whose asks end as written down, one after the other."""

    def __init__(self, *ends: Slip | Exception) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self._ends: Iterator[Slip | Exception] = iter(ends)

    def ref(self, kind: object, id: str) -> Self:
        return self

    def options(self, **options: object) -> Self:
        self.asked.append((options,))
        return self

    async def ask(self, method: object, *args: object) -> Slip:
        self.asked.append(args)
        await asyncio.sleep(0)
        end = next(self._ends)
        if isinstance(end, Exception):
            raise end
        return end

    def client(self) -> Client:
        return cast(Client, self)


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return Load(f"sqlite:///{tmp_path / 'bank.db'}", Settings(), tmp_path, 1)


def test_an_order_is_sent_by_its_key_until_it_is_answered(load: Load) -> None:
    bank = Scripted(
        NotExecuted("held"), MaybeExecuted("killed"), MaybeExecuted("frozen"), Slip(70, 2, 2),
        Slip(130, 2, 1),
    )  # fmt: skip
    asyncio.run(load.transfer(bank.client(), "t", "a", "b", 30, False))
    assert bank.asked == [
        ({"key": "t/out"},), ("t/out", 30, 1), ("t/out", 30, 2), ("t/out", 30, 3), ("t/out", 30, 4),
        ({"key": "t/in"},), ("t/in", 30, 1),
    ]  # fmt: skip
    assert load.repeats == {"not executed": 1, "maybe executed": 2}
    assert load.had_run == 1, "the second attempt had run"
    assert (load.asks, load.answered, load.transfers, load.ledger.answered) == (2, 2, 1, 1)


def test_a_refused_transfer_gives_no_coins(load: Load) -> None:
    bank = Scripted(Slip(5, 1, 1, is_refused=True))
    asyncio.run(load.transfer(bank.client(), "t", "a", "b", 30, False))
    assert (load.asks, load.answered, load.transfers) == (1, 1, 0)
    assert (load.ledger.refused, load.ledger.open) == (1, 0)


def test_a_second_reply_must_be_the_first_one(load: Load) -> None:
    bank = Scripted(Slip(70, 2), Slip(70, 2), Slip(130, 2), Slip(160, 3))
    asyncio.run(load.transfer(bank.client(), "t", "a", "b", 30, True))
    assert (load.twice, load.same) == (2, 1)
    assert load.had_run == 0


def test_transfers_beside_each_other_are_all_counted(load: Load) -> None:
    client = Scripted(*[Slip(70, 2)] * 40).client()

    async def transfer() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(10):
                group.create_task(load.transfer(client, f"t{number}", "a", "b", 1, True))

    asyncio.run(transfer())
    assert (load.twice, load.same, load.transfers, load.asks) == (20, 20, 10, 40)


def test_a_failed_handler_leaves_the_transfer_open(load: Load) -> None:
    asyncio.run(load.transfer(Scripted(HandlerFailed("bug")).client(), "t", "a", "b", 30, False))
    assert (load.failed, load.ledger.open) == (1, 1)


def test_a_read_that_is_older_than_an_answer_is_counted(load: Load) -> None:
    bank = Scripted(
        Slip(1, 4), Slip(1, 3), Slip(1, 4), MaybeExecuted("killed"), Slip(1, 5), Slip(1, 1)
    )
    client = bank.client()

    async def read() -> None:
        for account in "aaaab":
            await load.read(client, account)

    asyncio.run(read())
    assert load.stale == 1
    assert (load.reads, load.asks, load.answered) == (5, 5, 5)
    assert load.repeats == {"maybe executed": 1}


def test_every_account_gets_its_first_coins(load: Load) -> None:
    bank = Scripted(*[Slip(OPENING, 1)] * len(ACCOUNTS))
    asyncio.run(load.open_accounts(bank.client()))
    assert load.ledger.coins == OPENING * len(ACCOUNTS)
    assert load.ledger.open == 0
