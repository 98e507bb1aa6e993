"""When a lease is renewed next, for each end of the last renewal."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.core.lease.keeper import JITTER, RETRY, LeaseKeeper, Renewal
from domicile.core.lease.lease import Lease
from domicile.settings import Settings

RENEW_S = 2.0
times = st.floats(0, 1_000)
spans = st.floats(0, 5)
seeds = st.integers(0, 99)
ACKNOWLEDGED, REFUSED, UNANSWERED = Renewal.ACKNOWLEDGED, Renewal.REFUSED, Renewal.UNANSWERED


def member(since: float = 0.0, seed: int = 1) -> LeaseKeeper:
    return LeaseKeeper(RENEW_S, Random(seed), since)


def leader(since: float = 0.0, seed: int = 1) -> LeaseKeeper:
    return LeaseKeeper(RENEW_S, Random(seed), since, from_answer=True)


def around(pause_s: float) -> tuple[float, float]:
    slack = 1e-9
    return pause_s * (1 - JITTER) - slack, pause_s * (1 + JITTER) + slack


@given(times, seeds)
def test_the_first_renewal_counts_from_the_grant(since: float, seed: int) -> None:
    earliest, latest = around(RENEW_S)
    for keeper in (member(since, seed), leader(since, seed)):
        assert earliest <= keeper.due - since <= latest
        assert keeper.away_since is None


@given(times, spans, seeds)
def test_after_an_acknowledgement_the_next_one_is_due_in_a_while(
    sent_at: float, took_s: float, seed: int
) -> None:
    now = sent_at + took_s
    earliest, latest = around(RENEW_S)
    for keeper, since in ((member(0.0, seed), sent_at), (leader(0.0, seed), now)):
        keeper.ended(ACKNOWLEDGED, sent_at, now)
        assert earliest <= keeper.due - since <= latest


def test_an_unanswered_renewal_is_repeated_soon() -> None:
    keeper = member()
    keeper.ended(UNANSWERED, 10.0, 13.0)
    assert keeper.due == pytest.approx(10.0 + RENEW_S * RETRY)


@given(times, spans, seeds)
def test_a_leader_repeats_soon_after_the_failure(sent_at: float, took_s: float, seed: int) -> None:
    keeper, now = leader(0.0, seed), sent_at + took_s
    keeper.ended(UNANSWERED, sent_at, now)
    earliest, latest = around(RENEW_S * RETRY)
    assert earliest <= keeper.due - now <= latest


@given(st.lists(st.tuples(spans, st.sampled_from(Renewal))))
def test_it_knows_since_when_the_store_has_not_answered(
    renewals: list[tuple[float, Renewal]],
) -> None:
    keeper, now, silent_since = member(), 0.0, None
    for after_s, renewal in renewals:
        now += after_s
        keeper.ended(renewal, now, now)
        if renewal is ACKNOWLEDGED:
            silent_since = None
        elif silent_since is None:
            silent_since = now
        assert keeper.away_since == silent_since


@given(st.floats(2, 60), seeds, st.sampled_from([False, True]))
def test_a_store_that_answers_in_time_never_costs_the_lease(
    ttl_s: float, seed: int, from_answer: bool
) -> None:
    """Pace and validity belong together: each renewal is sent and answered before the deadline."""
    settings = Settings(ttl_s=ttl_s)
    lease = Lease(settings.margin_s, settings.stop_budget_s)
    lease.granted(0.0, ttl_s, 0.0)
    keeper = LeaseKeeper(settings.renew_s, Random(seed), 0.0, from_answer=from_answer)
    for _ in range(20):
        sent_at = keeper.due
        now = sent_at + settings.renew_s / 4
        assert lease.valid(now)
        lease.acknowledged(sent_at, ttl_s, now)
        keeper.ended(ACKNOWLEDGED, sent_at, now)


@given(st.floats(2, 60), seeds, st.sampled_from([False, True]))
def test_a_store_that_is_silent_is_asked_again_before_the_deadline(
    ttl_s: float, seed: int, from_answer: bool
) -> None:
    settings = Settings(ttl_s=ttl_s)
    lease = Lease(settings.margin_s, settings.stop_budget_s)
    lease.granted(0.0, ttl_s, 0.0)
    keeper = LeaseKeeper(settings.renew_s, Random(seed), 0.0, from_answer=from_answer)
    tries = 0
    while lease.valid(keeper.due):
        tries += 1
        keeper.ended(UNANSWERED, keeper.due, keeper.due)
    assert tries >= 2
