"""Room for strangers, and words about them: both bounded."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.transports.limits import (
    WARNING_EVERY_S,
    WARNINGS,
    BoundedGuests,
    Complaints,
    host_of,
    peer_of,
    plain,
)


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 30), st.sampled_from(["", "a", "b", "c"])),
        max_size=60,
    )
)
def test_there_are_never_more_guests_than_places(steps: list[tuple[bool, int, str]]) -> None:
    room: BoundedGuests[int] = BoundedGuests(6, 3)
    inside: dict[int, str] = {}
    for enters, guest, host in steps:
        if enters and guest not in inside:
            goes = room.enter(guest, host)
            if goes is not None:
                gone_host = inside.pop(goes)
                assert gone_host == host or len(inside) == 5, "somebody else's place was needed"
            inside[guest] = host
        elif not enters:
            room.leave(guest)
            inside.pop(guest, None)
        assert len(room) == len(inside) <= 6
        for one in "abc":
            assert list(inside.values()).count(one) <= 3
    for guest in list(inside):
        room.leave(guest)
    assert len(room) == 0
    assert not room._by_host


def test_the_oldest_goes_first() -> None:
    room: BoundedGuests[str] = BoundedGuests(3, 2)
    assert [room.enter(guest, guest[0]) for guest in ("a1", "b1", "a2")] == [None] * 3
    assert room.enter("a3", "a") == "a1", "its host has its places taken"
    assert room.enter("c1", "c") == "b1", "the oldest of all"


def test_few_warnings_are_written_and_the_others_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    complaints = Complaints(lambda: now)
    with caplog.at_level(logging.WARNING, logger="domicile"):
        for _ in range(10_000):
            complaints.about("10.0.0.1:5", "nonsense")
        assert len(caplog.records) == WARNINGS
        now = WARNING_EVERY_S
        complaints.about("10.0.0.1:5", "more nonsense")
        complaints.about("10.0.0.1:5", "more nonsense")
    assert len(caplog.records) == WARNINGS + 1
    left_out = f"({10_000 - WARNINGS} such warnings were left out)"
    assert caplog.messages[-1].endswith(left_out)


def test_a_peer_has_no_say_in_how_a_log_looks(caplog: pytest.LogCaptureFixture) -> None:
    assert plain("a\nb\x1b[31m\u202e") == "a�b�[31m�"
    assert len(plain("x" * 10_000)) < 400
    with caplog.at_level(logging.WARNING, logger="domicile"):
        Complaints(lambda: 0.0).about("", "line\nfeed " + "y" * 100_000)
    (message,) = caplog.messages
    assert message.startswith("closed the connection with a peer: line�feed yyy")
    assert len(message) < 500


def test_addresses_are_told_where_the_transport_knows_them() -> None:
    class Known:
        peer = "[::1]:7000"

    class Odd:
        peer = object()

    assert (peer_of(Known()), host_of(Known())) == ("[::1]:7000", "[::1]")
    assert (peer_of(Odd()), host_of(None)) == ("", "")
