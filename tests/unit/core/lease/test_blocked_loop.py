"""When the thread beside a loop renews, when it gives up, and what a node says of itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from domicile.core.lease.blocked_loop import (
    Step,
    beat_s,
    next_look,
    stands_still,
    step,
)
from domicile.core.lease.keeper import JITTER
from domicile.settings import Settings

times = st.floats(0, 1_000, allow_nan=False)
spans = st.floats(0.01, 100, allow_nan=False)
ttls = st.floats(2, 60)
limits = st.floats(0.5, 120)


@given(times, times, times, times, spans)
def test_it_renews_only_for_a_loop_that_turned_lately_and_before_the_deadline(
    now: float, turned_at: float, due: float, valid_until: float, stall_limit_s: float
) -> None:
    found = step(
        now=now, turned_at=turned_at, due=due, valid_until=valid_until, stall_limit_s=stall_limit_s
    )
    alive = now < valid_until
    turns = now - turned_at < stall_limit_s
    assert (found is Step.LAPSED) == (not alive)
    assert (found is Step.STALLED) == (alive and not turns)
    assert (found is Step.RENEW) == (alive and turns and now >= due)


@given(times, times, times, spans)
def test_the_next_look_is_later_but_misses_no_due_time(
    now: float, due: float, valid_until: float, evict_after_s: float
) -> None:
    at = next_look(now, due, valid_until, evict_after_s)
    assert at > now
    assert all(at <= one for one in (due, valid_until) if one > now)
    assert at - now <= evict_after_s


class Run:
    """A thread beside a loop that blocks, in imagined time; the store answers at once."""

    def __init__(self, ttl_s: float, stall_limit_s: float) -> None:
        self.settings = Settings(ttl_s=ttl_s, stall_limit_s=stall_limit_s)
        self.valid_until = ttl_s - self.settings.margin_s
        self.due = self.settings.renew_s
        self.sent_at = 0.0
        self.marked_at: float | None = None
        self.cleared_at: float | None = None
        self.lapsed_at: float | None = None

    def go(self, blocked_at: float, blocked_s: float, end: float) -> None:
        settings, now = self.settings, 0.0
        beat = beat_s(settings.evict_after_s, settings.stall_limit_s)
        while now < end:
            turned_at = now - now % beat
            if blocked_at < now < blocked_at + blocked_s:
                turned_at = blocked_at - blocked_at % beat
            match step(
                now=now,
                turned_at=turned_at,
                due=self.due,
                valid_until=self.valid_until,
                stall_limit_s=settings.stall_limit_s,
            ):
                case Step.LAPSED:
                    self.lapsed_at = now
                    return
                case Step.RENEW:
                    self.sent_at = now
                    self.valid_until = now + settings.ttl_s - settings.margin_s
                    self.due = now + settings.renew_s * (1 + JITTER)
                case Step.STALLED | Step.WAIT:
                    pass
            still = stands_still(now, turned_at, settings.evict_after_s)
            if still and self.marked_at is None:
                self.marked_at = now
            if not still and self.marked_at is not None:
                self.cleared_at = now
            now = next_look(now, self.due, self.valid_until, settings.evict_after_s)


@given(ttls, limits, st.floats(0, 20), st.floats(0, 0.99))
def test_a_block_below_the_limit_costs_nothing(
    ttl_s: float, stall_limit_s: float, blocked_at: float, part: float
) -> None:
    run = Run(ttl_s, stall_limit_s)
    blocked_s = part * (stall_limit_s - beat_s(run.settings.evict_after_s, stall_limit_s))
    run.go(blocked_at, blocked_s, blocked_at + blocked_s + 3 * ttl_s)
    assert run.lapsed_at is None
    assert run.marked_at is None or run.cleared_at is not None, "it says so for good"


@given(ttls, limits, st.floats(0, 20))
def test_a_dead_loop_loses_its_lease_in_time(
    ttl_s: float, stall_limit_s: float, blocked_at: float
) -> None:
    run = Run(ttl_s, stall_limit_s)
    run.go(blocked_at, 10_000, blocked_at + stall_limit_s + 2 * ttl_s)
    assert run.sent_at < blocked_at + stall_limit_s
    assert run.lapsed_at is not None
    assert run.lapsed_at <= blocked_at + stall_limit_s + ttl_s


@given(ttls, st.floats(0, 20))
def test_its_peers_know_before_they_may_evict_it(ttl_s: float, blocked_at: float) -> None:
    """C6: a leader that heard the last ping's answer acts on a silence of `evict_after_s`."""
    run = Run(ttl_s, 1_000)
    run.go(blocked_at, 10_000, blocked_at + 2 * ttl_s)
    assert run.marked_at is not None
    assert run.marked_at - blocked_at < run.settings.evict_after_s / 2


@given(ttls, limits)
def test_a_healthy_loop_never_looks_blocked(ttl_s: float, stall_limit_s: float) -> None:
    evict_after_s = Settings(ttl_s=ttl_s).evict_after_s
    age_s = 1.5 * beat_s(evict_after_s, stall_limit_s)
    assert not stands_still(age_s, 0, evict_after_s)
    found = step(now=age_s, turned_at=0, due=9_999, valid_until=9_999, stall_limit_s=stall_limit_s)
    assert found is Step.WAIT
