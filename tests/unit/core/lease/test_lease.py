"""The lease machine: total, honest about time, and final once fenced (L1, L4, L5)."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.core.ids import Incarnation
from domicile.core.lease.lease import (
    FOREVER_S,
    RECORD_FOREVER_S,
    TRANSITIONS,
    Lease,
    LeaseEvent,
    LeaseState,
)
from domicile.core.state.records import NodeRecord, decode_record, encode_record

TTL_S, MARGIN_S, STOP_S = 6.0, 1.0, 0.5


def held(sent_at: float = 100.0, now: float = 100.0) -> Lease:
    lease = Lease(MARGIN_S, STOP_S)
    lease.granted(sent_at, TTL_S, now)
    return lease


def in_state(state: LeaseState) -> Lease:
    if state is LeaseState.UNREGISTERED:
        return Lease(MARGIN_S, STOP_S)
    lease = held()
    if state is LeaseState.FENCED:
        lease.refused(101.0, "test")
    elif state is LeaseState.ENDED:
        lease.left(101.0)
    return lease


def test_the_table_is_total() -> None:
    assert set(TRANSITIONS) == set(product(LeaseState, LeaseEvent))
    for transition in TRANSITIONS.values():
        assert transition.to
        assert transition.rule
        assert transition.does


def test_fenced_and_ended_never_lead_back() -> None:
    for (state, _), transition in TRANSITIONS.items():
        if state is LeaseState.FENCED:
            assert set(transition.to) <= {LeaseState.FENCED, LeaseState.ENDED}
        if state is LeaseState.ENDED:
            assert transition.to == (LeaseState.ENDED,)


@pytest.mark.parametrize("state", LeaseState)
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("event", LeaseEvent)
def test_the_machine_follows_the_table(state: LeaseState, event: LeaseEvent, ahead: bool) -> None:
    lease = in_state(state)
    assert lease.state is state
    now = 102.0
    if event is LeaseEvent.GRANTED:
        lease.granted(now if ahead else now - TTL_S, TTL_S, now)
    elif event is LeaseEvent.ACKNOWLEDGED:
        lease.acknowledged(now if ahead else now - TTL_S, TTL_S, now)
    elif event is LeaseEvent.LATE_ACKNOWLEDGED:
        now = 107.0
        lease.acknowledged(104.0 if ahead else 101.0, TTL_S, now)
    elif event is LeaseEvent.REFUSED:
        lease.refused(now, "test")
    elif event is LeaseEvent.DEADLINE:
        lease.check(107.0)
    else:
        lease.left(now)
    to = TRANSITIONS[state, event].to
    assert lease.state is (to[0] if ahead else to[-1])


def test_validity_counts_from_the_sending_and_ends_strictly() -> None:
    lease = held(sent_at=100.0, now=103.0)
    assert lease.valid_until == 105.0
    assert lease.hard_until == 105.5
    assert lease.valid(104.999)
    assert not lease.valid(105.0)
    assert lease.check(104.999) is LeaseState.HELD
    assert lease.check(105.0) is LeaseState.FENCED
    assert lease.reason == "deadline passed"


def test_cleanup_may_go_on_until_the_hard_deadline() -> None:
    lease = held()
    lease.check(105.0)
    assert lease.may_resume(105.4)
    assert not lease.may_resume(105.5)


def test_a_refusal_brings_both_deadlines_forward() -> None:
    lease = held()
    lease.refused(101.0, "evicted")
    assert lease.state is LeaseState.FENCED
    assert lease.reason == "evicted"
    assert not lease.valid(101.0)
    assert lease.may_resume(101.4)
    assert not lease.may_resume(101.5)
    lease.refused(102.0, "again")
    assert lease.reason == "evicted"


def test_a_late_acknowledgement_counts_until_someone_noticed() -> None:
    unnoticed = held()
    assert unnoticed.acknowledged(104.0, TTL_S, 106.0)
    assert unnoticed.valid(106.0)
    noticed = held()
    noticed.check(106.0)
    assert not noticed.acknowledged(104.0, TTL_S, 106.0)
    assert noticed.state is LeaseState.FENCED
    assert noticed.valid_until == 105.0


def test_a_grant_that_took_longer_than_it_is_worth_holds_nothing() -> None:
    lease = Lease(MARGIN_S, STOP_S)
    lease.granted(100.0, TTL_S, 105.0)
    assert lease.state is LeaseState.UNREGISTERED
    assert not lease.valid(105.0)
    lease.granted(105.0, TTL_S, 105.1)
    assert lease.valid(109.9)


def test_without_a_ttl_there_is_no_deadline_but_a_refusal_still_ends_it() -> None:
    """C9: it works on for as long as it does not know better."""
    lease = Lease(MARGIN_S, STOP_S)
    assert lease.granted(100.0, FOREVER_S, 100.0)
    assert lease.valid(1e12)
    assert lease.check(1e12) is LeaseState.HELD
    assert lease.hard_until == inf
    assert lease.acknowledged(200.0, FOREVER_S, 1e9)
    lease.refused(1e9, "the own record is gone")
    assert not lease.valid(0.0)
    assert (lease.valid_until, lease.hard_until) == (1e9, 1e9 + STOP_S)
    assert not lease.acknowledged(1e9, FOREVER_S, 1e9)
    assert lease.state is LeaseState.FENCED


def test_the_ttl_of_a_record_without_a_lease_can_be_stored_and_is_never_waited_for() -> None:
    record = NodeRecord("n", Incarnation("i"), "host:1", (), (), RECORD_FOREVER_S)
    assert decode_record(encode_record(record), NodeRecord) == record
    assert RECORD_FOREVER_S > 50 * 365 * 86_400


def test_nothing_is_valid_before_a_grant_or_after_the_end() -> None:
    lease = Lease(MARGIN_S, STOP_S)
    assert lease.valid_until == -inf
    assert not lease.valid(0.0)
    assert not lease.may_resume(0.0)
    lease = held()
    lease.left(101.0)
    assert not lease.valid(101.0)
    assert not lease.may_resume(101.0)


renewals = st.lists(
    st.tuples(st.floats(0.0, 60.0), st.floats(0.0, 20.0), st.floats(1.5, 12.0)), max_size=20
)


@given(renewals, st.floats(0.0, 90.0))
def test_whatever_the_order_of_answers_validity_never_outlives_a_lease_of_the_store(
    renewals: list[tuple[float, float, float]], looked_at: float
) -> None:
    """The store may count a ttl from the sending on: its deadline is never before ours."""
    lease = Lease(MARGIN_S, STOP_S)
    lease.granted(0.0, TTL_S, 0.0)
    deadline = TTL_S
    fenced = False
    answers = sorted((sent_at + delay_s, sent_at, ttl_s) for sent_at, delay_s, ttl_s in renewals)
    for now, sent_at, ttl_s in answers:
        if now > looked_at and not fenced:
            fenced = lease.check(looked_at) is LeaseState.FENCED
        before = lease.valid_until
        counted = lease.acknowledged(sent_at, ttl_s, now)
        fenced = fenced or not counted or lease.state is LeaseState.FENCED
        if counted:
            deadline = max(deadline, sent_at + ttl_s)
            assert lease.valid_until == max(before, sent_at + ttl_s - MARGIN_S)
        else:
            assert lease.valid_until == before
        assert lease.valid_until <= deadline - MARGIN_S
        if fenced:
            assert not lease.valid(now)
            assert not lease.valid(0.0)


@given(st.permutations([(1.0, 6.0), (2.0, 6.0), (3.0, 5.5), (4.0, 6.0)]))
def test_acknowledgements_commute(order: list[tuple[float, float]]) -> None:
    lease = Lease(MARGIN_S, STOP_S)
    lease.granted(0.0, TTL_S, 0.0)
    for sent_at, ttl_s in order:
        lease.acknowledged(sent_at, ttl_s, 4.5)
    assert lease.valid_until == 9.0
