"""What may wait at a node and on the way to one: bounded for whatever comes, and fair (I6)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from domicile.core.handoff.admission import (
    FEW,
    MOST_HOMES,
    NESTED,
    UNIT_BYTES,
    Admission,
    Bounds,
    Outflow,
)
from domicile.core.ids import Incarnation

BOUNDS = Bounds(messages=200, size_bytes=100_000, sender_bytes=60_000, wait_s=2.0)
A, B, C = map(Incarnation, "abc")


def arrive(
    admission: Admission,
    sender: Incarnation,
    *,
    size_bytes: int = 10,
    depth: int = 0,
    nested: bool = False,
    ttl_s: float = 10.0,
) -> bool:
    """A message comes and waits, if it may."""
    if admission.refuses(sender, size_bytes, depth, nested, ttl_s):
        return False
    admission.enter(sender, size_bytes)
    return True


def test_a_lone_sender_gets_as_much_as_may_wait_and_room_comes_back() -> None:
    admission = Admission(BOUNDS)
    assert [arrive(admission, A) for _ in range(300)] == [True] * 200 + [False] * 100
    admission.leave(A, 10)
    assert arrive(admission, A)
    assert not arrive(admission, A)


def test_a_flood_of_one_sender_does_not_shut_out_another() -> None:
    admission = Admission(BOUNDS)
    while arrive(admission, A):
        pass
    got = sum(arrive(admission, B) for _ in range(50))
    assert got == 50
    assert not arrive(admission, A)


def test_senders_beyond_their_share_are_refused_and_all_beyond_twice_the_limit() -> None:
    admission = Admission(BOUNDS)
    for number in range(1_000):
        arrive(admission, Incarnation(str(number)))
    assert admission.count == NESTED * BOUNDS.messages


def test_a_running_handlers_ask_gets_in_where_others_do_not_but_not_without_end() -> None:
    admission = Admission(BOUNDS)
    while arrive(admission, A):
        pass
    asks = sum(arrive(admission, A, nested=True) for _ in range(1_000))
    assert asks == NESTED * BOUNDS.messages - BOUNDS.messages


def test_bytes_are_bounded_for_one_sender_and_for_all() -> None:
    admission = Admission(BOUNDS)
    got = {
        sender: sum(arrive(admission, sender, size_bytes=10_000) for _ in range(100))
        for sender in (A, B, C)
    }
    assert got[A] == 6
    assert admission.size_bytes <= NESTED * BOUNDS.size_bytes
    assert got[B]
    assert got[C]


def test_what_could_not_start_in_time_is_refused_once_a_few_wait() -> None:
    admission = Admission(BOUNDS)
    admission.ready, admission.job_s = 100, 1.0
    assert all(arrive(admission, A) for _ in range(FEW))
    assert not arrive(admission, A)
    admission.job_s = 0.04
    assert not arrive(admission, A, depth=1), "two rounds take too long, and so does all that waits"
    admission.job_s = 0.01
    assert arrive(admission, A)
    assert not arrive(admission, A, ttl_s=1.0), "a part of its own time is less"


def test_nobody_waits_longer_than_all_that_waits() -> None:
    admission = Admission(BOUNDS)
    admission.ready, admission.job_s = 60, 0.01
    for _ in range(FEW):
        arrive(admission, A)
    assert arrive(admission, A, depth=50)


def test_while_all_handlers_run_only_what_they_wait_for_gets_in() -> None:
    admission = Admission(BOUNDS)
    admission.is_full = True
    assert not arrive(admission, A)
    assert arrive(admission, A, nested=True)


Step = tuple[bool, int, int, bool, int]
STEPS = st.lists(
    st.tuples(
        st.booleans(), st.integers(0, 4), st.integers(0, 30_000), st.booleans(), st.integers(0, 9)
    ),
    max_size=400,
)


@given(STEPS, st.integers(0, 300), st.floats(0, 1))
def test_the_bounds_hold_whatever_comes_and_goes(
    steps: list[Step], ready: int, job_s: float
) -> None:
    bounds = Bounds(20, 100_000, 60_000, 2.0)
    admission = Admission(bounds)
    admission.ready, admission.job_s = ready, job_s
    waiting: list[tuple[Incarnation, int]] = []
    for comes, number, size_bytes, nested, depth in steps:
        sender = Incarnation(str(number))
        if comes and arrive(admission, sender, size_bytes=size_bytes, depth=depth, nested=nested):
            waiting.append((sender, size_bytes))
        elif not comes and waiting:
            admission.leave(*waiting.pop(0))
        assert admission.count == len(waiting) <= NESTED * bounds.messages
        assert admission.size_bytes == sum(size for _, size in waiting)
        assert admission.size_bytes <= NESTED * bounds.size_bytes
        assert sum(share.count for share in admission.shares.values()) == len(waiting)
        assert all(share.count for share in admission.shares.values())
    for one in waiting:
        admission.leave(*one)
    assert (admission.count, admission.size_bytes, admission.shares) == (0, 0, {})


# on the way


def test_so_much_may_be_on_its_way_to_one_home_and_the_others_do_not_notice() -> None:
    outflow = Outflow(most=100)
    outflow.to(A).open = 100
    assert not outflow.takes(A, 10, nested=False)
    assert outflow.takes(A, 10, nested=True)
    assert outflow.takes(B, 10, nested=False)
    outflow.to(A).open = NESTED * 100
    assert not outflow.takes(A, 10, nested=True)


def test_large_messages_count_for_more_but_one_alone_may_always_go() -> None:
    outflow = Outflow(most=100)
    assert outflow.takes(A, 99 * UNIT_BYTES, nested=False)
    flow = outflow.to(A)
    flow.open = 2
    assert not outflow.takes(A, 99 * UNIT_BYTES, nested=False)
    outflow.held_bytes = 100 * UNIT_BYTES
    assert not outflow.takes(B, UNIT_BYTES, nested=False), "what has no home is held together"


def test_a_crowded_home_gets_nothing_new_for_a_while() -> None:
    outflow = Outflow(most=100)
    flow = outflow.to(A)
    assert flow.pause()
    assert not flow.pause(), "once is enough"
    assert (flow.limit, flow.paused) == (0, True)
    assert not outflow.takes(A, 10, nested=False)
    assert outflow.takes(A, 10, nested=True), "what a handler waits for goes on"
    flow.go_on()
    assert (flow.limit, outflow.takes(A, 10, nested=False)) == (100, True)


def test_homes_that_nothing_goes_to_are_forgotten() -> None:
    outflow = Outflow(most=100)
    outflow.to(A).open = 1
    for number in range(3 * MOST_HOMES):
        outflow.to(Incarnation(str(number)))
    assert len(outflow.homes) <= MOST_HOMES
    assert outflow.homes[A].open == 1


def test_a_home_that_is_gone_is_forgotten_with_its_flow() -> None:
    outflow = Outflow(most=100)
    flow = outflow.to(A)
    flow.open = 100
    flow.pause()
    outflow.forget(A)
    outflow.forget(A)
    assert A not in outflow.homes
    assert outflow.takes(A, 10, nested=False), "nothing is known of it"
