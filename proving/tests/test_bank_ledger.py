"""The judge of the bank finds what is wrong with an account, and nothing where nothing is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from proving.bank import __main__ as command
from proving.bank.account import EMPTY, Booked, Overdrawn, Slip, booked, parts_of
from proving.bank.ledger import Ledger, judge


class Bank:
    """One account `a` that opens with 100, and what callers saw of it."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.events: list[Booked] = []
        self.slip = EMPTY
        self._now = 0.0
        self.deposit("open", 100)

    def now(self) -> float:
        self._now += 1.0
        return self._now

    def deposit(self, name: str, amount: int) -> Slip:
        """A leg that is carried out and answered."""
        leg = self.ledger.begin(name, "a", amount)
        for event in parts_of(amount, name):
            self.events.append(event)
            self.slip = booked(self.slip, event)
        self.ledger.answered(leg, self.slip, self.now(), self.now())
        return self.slip

    def look(self, slip: Slip | None = None) -> None:
        self.ledger.saw("a", "peek", slip or self.slip, self.now(), self.now())

    def verdict(self, served: Slip | None = None) -> list[str]:
        found = judge(self.ledger, {"a": self.events}, {"a": served or self.slip})
        assert all(one.account in ("a", "") for one in found)
        return sorted({one.rule for one in found})


@pytest.fixture
def bank() -> Bank:
    return Bank()


def test_a_bank_in_which_all_went_well_is_fine(bank: Bank) -> None:
    bank.deposit("t1-in", 7)
    bank.look()
    bank.deposit("t2-out", -30)
    leg = bank.ledger.begin("t3-out", "a", -1_000)
    bank.ledger.refused(leg, bank.slip, bank.now(), bank.now())
    assert bank.verdict() == []


def test_an_answered_leg_that_is_not_in_the_journal_is_lost(bank: Bank) -> None:
    bank.deposit("t1-in", 7)
    bank.events.pop()
    assert bank.verdict(booked(EMPTY, bank.events[0])) == ["escaped", "lost", "state", "total"]


def test_a_leg_that_is_there_twice_is_found(bank: Bank) -> None:
    bank.deposit("t1-in", 7)
    bank.events.append(bank.events[-1])
    assert {"twice", "total"} <= {*bank.verdict()}


def test_half_of_a_leg_is_found(bank: Bank) -> None:
    bank.deposit("t1-in", 8)
    bank.events.pop()
    assert "torn" in bank.verdict()


def test_an_event_that_nobody_asked_for_is_found(bank: Bank) -> None:
    bank.events += parts_of(5, "t9-in")
    assert "stray" in bank.verdict()


def test_an_answer_that_rests_on_a_lost_event_is_found(bank: Bank) -> None:
    """Also if another event has taken the place of the lost one, with the same amount."""
    bank.look(booked(bank.slip, Booked(7, "t1-in", 1, 1)))
    bank.deposit("t2-in", 7)
    assert bank.verdict() == ["escaped"]


def test_an_answer_beyond_the_journal_is_found(bank: Bank) -> None:
    bank.look(booked(bank.slip, Booked(7, "t1-in", 1, 1)))
    assert bank.verdict() == ["escaped"]


def test_a_refusal_is_an_answer_too(bank: Bank) -> None:
    leg = bank.ledger.begin("t1-out", "a", -500)
    lost = booked(bank.slip, Booked(7, "t2-in", 1, 1))
    bank.ledger.refused(leg, lost, bank.now(), bank.now())
    assert bank.verdict() == ["escaped"]


def test_a_refusal_with_enough_money_is_found(bank: Bank) -> None:
    leg = bank.ledger.begin("t1-out", "a", -50)
    bank.ledger.refused(leg, bank.slip, bank.now(), bank.now())
    assert bank.verdict() == ["refusal"]


def test_a_refused_leg_that_is_in_the_journal_is_found(bank: Bank) -> None:
    leg = bank.ledger.begin("t1-out", "a", -501)
    bank.ledger.refused(leg, bank.slip, bank.now(), bank.now())
    bank.events += parts_of(-501, "t1-out")
    assert {"overdraft", "refusal", "total"} <= {*bank.verdict()}


def test_a_key_that_was_refused_may_be_carried_out_later(bank: Bank) -> None:
    leg = bank.ledger.begin("t1-out", "a", -101)
    bank.ledger.refused(leg, bank.slip, bank.now(), bank.now())
    bank.deposit("t2-in", 7)
    [event] = parts_of(-101, "t1-out")
    bank.events.append(event)
    bank.slip = booked(bank.slip, event)
    bank.ledger.answered(leg, bank.slip, bank.now(), bank.now())
    assert bank.verdict() == []


def test_a_key_that_was_carried_out_is_never_refused(bank: Bank) -> None:
    bank.deposit("t1-out", -99)
    leg = bank.ledger.legs["t1-out"]
    bank.ledger.refused(leg, bank.slip, bank.now(), bank.now())
    assert bank.verdict() == ["key"]


def test_a_repeated_key_has_one_answer(bank: Bank) -> None:
    first = bank.deposit("t1-in", 7)
    later = bank.deposit("t2-in", 9)
    leg = bank.ledger.legs["t1-in"]
    bank.ledger.answered(leg, first, bank.now(), bank.now())
    assert bank.verdict() == []
    bank.ledger.answered(leg, later, bank.now(), bank.now())
    assert bank.verdict() == ["key"]


def test_an_answer_of_another_leg_is_found(bank: Bank) -> None:
    before = bank.slip
    bank.deposit("t1-in", 7)
    bank.ledger.legs["t1-in"].answers[:] = [before]
    assert bank.verdict() == ["answer"]


def test_who_asks_later_sees_no_less(bank: Bank) -> None:
    before = bank.slip
    bank.deposit("t1-in", 7)
    bank.look(before)
    assert bank.verdict() == ["stale"]


def test_who_asked_before_may_see_less(bank: Bank) -> None:
    begun, before = bank.now(), bank.slip
    bank.deposit("t1-in", 7)
    bank.ledger.saw("a", "peek", before, begun, bank.now())
    assert bank.verdict() == []


def test_an_account_that_ends_as_something_else_than_its_events_is_found(bank: Bank) -> None:
    assert bank.verdict(EMPTY) == ["state"]


def test_a_leg_without_an_answer_may_be_there_or_not(bank: Bank) -> None:
    bank.ledger.begin("t1-in", "a", 7)
    assert bank.verdict() == []
    bank.events += parts_of(7, "t1-in")
    assert bank.verdict(booked(bank.slip, bank.events[-1])) == []


def test_an_error_of_a_handler_is_a_complaint(bank: Bank) -> None:
    leg = bank.ledger.begin("t1-in", "a", 7)
    bank.ledger.failed(leg, RuntimeError("broken"))
    assert bank.verdict() == ["error"]


def test_a_complaint_names_the_account_and_the_events_around() -> None:
    bank = Bank()
    bank.deposit("t1-in", 7)
    bank.events.append(bank.events[-1])
    [told] = [str(one) for one in judge(bank.ledger, {"a": bank.events}, {}) if one.rule == "twice"]
    assert told.startswith("twice: a: t1-in is there again at event 4: journal there: ")
    assert "1: +49 open 1/2" in told


def test_a_refusal_travels_with_what_it_rests_on() -> None:
    slip = Slip(3, 5, "mark")
    refusal = Overdrawn(9, slip.count, slip.balance, slip.mark)
    assert (refusal.asked, refusal.slip) == (9, slip)


# the command


def test_a_run_is_made_of_rounds_that_can_be_repeated_one_by_one(tmp_path: Path) -> None:
    options = command.parse(["--minutes", "5", "--seed", "7", "--journal", "postgresql"])
    planned = command.plans(options, tmp_path)
    assert [plan.number for plan in planned] == [1, 2, 3, 4, 5]
    assert sum(plan.length_s for plan in planned) == 300.0
    words = command.repeat(options, planned[2]).split()
    again = command.parse(words[3:])
    assert command.plans(again, tmp_path) == [planned[2]]
    assert again.journal == "postgresql"


def test_a_long_run_must_have_seen_what_it_is_for() -> None:
    assert command.missing(Counter(transfers=1), "sqlite", 0.3) == []
    assert command.missing(Counter(), "sqlite", 0.3) == ["transfers"]
    every = Counter(dict.fromkeys([*command.WANTED, *command.WANTED_OF["sqlite"]], 1))
    assert command.missing(every, "sqlite", 10.0) == []
    every["fenced writes"] = 0
    assert command.missing(every, "sqlite", 10.0) == ["fenced writes"]
    assert "journal kills" in command.missing(every, "postgresql", 10.0)


def test_a_report_names_every_count() -> None:
    told = command.report(Counter({"transfers": 12_345, "another": 1}))
    assert "transfers                     12,345\n" in told
    assert "kills in a commit                  0\n" in told
    assert told.endswith("another                            1")


@pytest.mark.parametrize(
    "arguments", [["--nodes", "2"], ["--minutes", "0"], ["--minutes", "2", "--round", "3"]]
)
def test_options_that_make_no_sense_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(arguments)
