"""A loop that is never idle makes room for the thread that renews beside it, and not for long."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.core.lease.blocked_loop import LATE_S, MOST_RESTS, RESTS, rests
from domicile.membership.thread_renewer import AGAIN_S, ThreadRenewer
from domicile.ports.store import Kept
from domicile.settings import Settings

SETTINGS = Settings(ttl_s=2.0)


class Hands:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


class Silent:
    """A store that is never asked: the thread does not run in these tests."""

    def keep(self, lease: str, key: bytes) -> Future[Kept]:
        raise AssertionError("the thread runs")

    rewrite = keep


def made(clock: Hands) -> ThreadRenewer:
    return ThreadRenewer(
        None, Silent(), clock=clock, settings=SETTINGS, random=Random(1), lease="l", key=b"k",  # type: ignore[arg-type]
        sent_at=clock.time, turned_at=clock.now,
    )  # fmt: skip


def resting(patch: pytest.MonkeyPatch, then: Callable[[], None] = lambda: None) -> list[float]:
    rests: list[float] = []

    def rest(seconds: float) -> None:
        rests.append(seconds)
        then()

    patch.setattr("domicile.membership.thread_renewer.time.sleep", rest)
    return rests


def test_a_renewal_in_time_costs_the_loop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rests = Hands(), resting(monkeypatch)
    renewals = made(clock)
    due = renewals._keeper.due
    assert renewals.give_way() == due + LATE_S
    clock.time = due + LATE_S / 2
    assert renewals.give_way() == pytest.approx(due + LATE_S)
    assert rests == []


def test_the_loop_rests_until_a_late_renewal_is_through(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Hands()
    renewals = made(clock)
    clock.time = renewals._keeper.due + LATE_S

    def after_three() -> None:
        if len(rests) == 3:
            renewals._keeper.due += 1.0

    rests = resting(monkeypatch, after_three)
    again = renewals.give_way()
    assert len(rests) == 3
    assert again == renewals._keeper.due + LATE_S


def test_a_store_that_does_not_answer_holds_up_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rests = Hands(), resting(monkeypatch)
    renewals = made(clock)
    clock.time = renewals._keeper.due + 1.0
    for _ in range(100):
        before = len(rests)
        assert renewals.give_way() == clock.time + AGAIN_S
        assert len(rests) - before <= RESTS
        clock.time += AGAIN_S
    assert len(rests) == MOST_RESTS
    renewals._keeper.due = clock.time - 1.0
    renewals.give_way()
    assert len(rests) == MOST_RESTS + RESTS, "the next one has its own"


@given(st.floats(0, 1e6), st.floats(-10, 10), st.integers(0, MOST_RESTS))
def test_nobody_rests_in_time_nor_too_often(due: float, after_s: float, rested: int) -> None:
    now = due + after_s
    many = rests(now, due, rested)
    assert 0 <= many <= RESTS
    assert many + rested <= MOST_RESTS
    assert bool(many) == (now >= due + LATE_S and rested < MOST_RESTS)
