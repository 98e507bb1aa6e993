"""The link machines: their rules, one test per way to break them, and their algebra."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.core.ids import Incarnation
from domicile.core.wire import (
    Flush,
    Frame,
    Hello,
    Ping,
    Pong,
    Refused,
    Reply,
    ReplyStatus,
    Request,
    Welcome,
)
from domicile.links.machine import (
    CONTROL_RESERVE,
    FRAME_MESSAGES,
    Acceptor,
    IncomingLink,
    LinkBroken,
    LinkVoid,
    OutgoingLink,
)

P = Incarnation("p" * 32)
Q = Incarnation("q" * 32)


def dialled(link: str = "l1", limit: int = 8) -> OutgoingLink:
    return OutgoingLink(link, limit, cluster="c", sender=P, receiver=Q, address="p:1")


def request(n: int, body: bytes = b"") -> Request:
    return Request("r", 0, n, 1, 1, "T", "id", "m", body, False, False, 1.0)


def joined(limit: int = 8) -> tuple[OutgoingLink, Acceptor, IncomingLink]:
    """A link that has just been welcomed in session 1."""
    near, door = dialled(limit=limit), Acceptor(limit)
    near.dial(1)
    admission = door.hello(near.hello())
    assert isinstance(admission.answer, Welcome)
    assert admission.link is not None
    assert near.welcome(1, admission.answer) == []
    return near, door, admission.link


def rejoin(
    near: OutgoingLink, door: Acceptor, session: int
) -> tuple[list[Frame], tuple[Frame, ...]]:
    """Redial: the frames that each end resends."""
    near.dial(session)
    admission = door.hello(near.hello())
    assert isinstance(admission.answer, Welcome)
    return near.welcome(session, admission.answer), admission.frames


def put(near: OutgoingLink, *ns: int) -> Frame:
    for n in ns:
        near.send(request(n))
    (frame,) = near.pump()
    return frame


def test_frames_are_numbered_and_acknowledged_both_ways() -> None:
    near, _, far = joined()
    assert put(near, 1, 2).no == 1
    second = put(near, 3)
    assert (second.no, [m.n for m in second.messages if isinstance(m, Request)]) == (2, [3])
    assert far.take(1, Frame(1, 0, (request(1), request(2)))) == (request(1), request(2))
    assert far.take(1, second) == (request(3),)
    far.answer(Pong(1))
    (back,) = far.pump()
    assert (back.no, back.ack) == (1, 2)
    assert far.owed == 0
    assert near.unacknowledged
    assert near.take(1, back) == (Pong(1),)
    assert not near.unacknowledged
    assert near.owed == 1
    assert far.take(1, near.bare_ack()) == ()
    assert not far.pending
    assert not near.pending


def test_a_resumption_resends_exactly_what_the_peer_misses() -> None:
    near, door, far = joined()
    first, second = put(near, 1), put(near, 2)
    far.take(1, first)
    far.answer(Pong(7))
    far.pump()  # lost with the connection
    resent, answers = rejoin(near, door, 2)
    assert [(frame.no, frame.messages) for frame in resent] == [(2, second.messages)]
    assert [frame.messages for frame in answers] == [(Pong(7),)]
    assert far.take(2, resent[0]) == (request(2),)


# ---- the variants of the model that break


def test_late_nothing_of_an_older_connection_is_taken_after_a_newer_hello() -> None:
    near, door, far = joined()
    first = put(near, 1)
    old_answer = Frame(1, 0, (Pong(1),))
    near.dial(2)
    admission = door.hello(near.hello())
    assert far.take(1, first) == ()
    assert far.received == 0
    assert near.take(1, old_answer) == ()
    assert near.received == 0
    assert near.welcome(1, Welcome(0)) == []
    assert not near.up
    assert isinstance(admission.answer, Welcome)
    (resent,) = near.welcome(2, admission.answer)
    assert far.take(2, resent) == (request(1),)


def test_late_an_older_hello_is_dropped_without_a_refusal() -> None:
    near, door, far = joined()
    near.dial(2)
    old = near.hello()
    near.dial(3)
    assert door.hello(near.hello()).link is far
    late = door.hello(old)
    assert (late.answer, late.link, late.gone) == (None, None, None)
    assert far.session == 3


def test_nonum_duplicates_are_dropped_by_number() -> None:
    near, _, far = joined()
    frame = put(near, 1)
    assert far.take(1, frame) == (request(1),)
    assert far.take(1, frame) == ()
    assert far.received == 1


def test_nonum_a_gap_breaks_the_connection_and_takes_nothing() -> None:
    near, _, far = joined()
    put(near, 1)
    second = put(near, 2)
    with pytest.raises(LinkBroken, match="gap"):
        far.take(1, second)
    assert far.received == 0


def test_flushlane_a_flush_never_passes_requests_but_control_may() -> None:
    near, door, _ = joined(limit=1)
    put(near, 1)
    near.send(request(2))
    near.send(Flush("r", 0, 1))
    near.send(request(3))
    near.send(Ping(9), control=True)
    assert [frame.messages for frame in near.pump()] == [(Ping(9),)]
    near.take(1, Frame(0, 2, ()))
    assert [frame.messages for frame in near.pump()] == [(request(2), Flush("r", 0, 1), request(3))]
    assert door.newest == 1


def test_blind_a_resumption_of_a_dropped_link_is_refused() -> None:
    near, door, far = joined()
    far.take(1, put(near, 1))
    assert door.drop() is far
    near.dial(2)
    admission = door.hello(near.hello())
    assert isinstance(admission.answer, Refused)
    assert admission.link is None
    assert door.link is None


def test_blind_a_peer_that_lost_what_it_acknowledged_voids_the_link() -> None:
    near, _, _ = joined()
    put(near, 1)
    near.take(1, Frame(0, 1, ()))
    near.dial(2)
    with pytest.raises(LinkVoid):
        near.welcome(2, Welcome(0))
    assert not near.up


def test_giveup_a_dropped_link_takes_nothing_from_its_open_connection() -> None:
    near, door, far = joined()
    first, second = put(near, 1), put(near, 2)
    assert far.take(1, first) == (request(1),)
    door.drop()
    assert far.take(1, second) == ()
    assert far.pump() == []
    late = Hello("c", P, Q, "p:1", "l0", 1, False, 0)
    assert door.hello(late).answer is None, "the newest session outlives the link"


# ---- hellos


def test_a_new_link_supersedes_the_old_one() -> None:
    near, door, far = joined()
    frame = put(near, 1)
    newer = dialled("l2")
    newer.dial(2)
    admission = door.hello(newer.hello())
    assert admission.gone is far
    assert isinstance(admission.answer, Welcome)
    assert door.link is admission.link
    assert far.take(1, frame) == ()


def test_a_hello_says_new_until_the_first_welcome() -> None:
    near, door = dialled(), Acceptor(8)
    near.send(request(1))
    near.dial(1)
    lost = near.hello()
    assert not lost.resume
    door.hello(lost)
    near.dial(2)
    assert not near.hello().resume
    admission = door.hello(near.hello())
    assert isinstance(admission.answer, Welcome)
    assert [frame.no for frame in near.welcome(2, admission.answer)] == [1]
    near.dial(3)
    assert near.hello().resume


def test_a_link_with_another_past_is_refused() -> None:
    near, door, far = joined()
    near.dial(2)
    admission = door.hello(Hello("c", P, Q, "p:1", "l1", 2, True, 5))
    assert isinstance(admission.answer, Refused)
    assert admission.gone is far


def test_sessions_only_rise() -> None:
    near = dialled()
    near.dial(3)
    with pytest.raises(ValueError, match="session 3"):
        near.dial(3)


@pytest.mark.parametrize(
    "frame",
    [
        Frame(0, 0, (request(1),)),
        Frame(1, 0, ()),
        Frame(1, 1, (request(1),)),
        Frame(1, 0, (Pong(1),)),
    ],
    ids=["messages without a number", "number without messages", "ack of the unsent", "wrong way"],
)
def test_nonsense_breaks_the_connection_and_takes_nothing(frame: Frame) -> None:
    _, _, far = joined()
    with pytest.raises(LinkBroken):
        far.take(1, frame)
    assert far.received == 0


def test_answers_are_not_taken_before_the_welcome() -> None:
    near = dialled()
    near.dial(1)
    with pytest.raises(LinkBroken, match="welcome"):
        near.take(1, Frame(1, 0, (Pong(1),)))


# ---- lanes and bounds


def test_requests_wait_without_a_connection_and_control_is_numbered() -> None:
    near, door, _ = joined()
    near.down()
    near.send(request(1))
    near.send(Ping(1), control=True)
    assert near.pump() == []
    assert near.unacknowledged
    near.send(Ping(2), control=True)
    near.pump()
    resent, _ = rejoin(near, door, 2)
    assert [(frame.no, frame.messages) for frame in resent] == [
        (1, (Ping(1),)),
        (2, (Ping(2),)),
        (3, (request(1),)),
    ]


def test_retained_frames_are_bounded_and_control_has_a_reserve() -> None:
    near, _, _ = joined(limit=2)
    for n in range(5):
        near.send(request(n))
        near.pump()
    for n in range(CONTROL_RESERVE + 5):
        near.send(Ping(n), control=True)
        near.pump()
    assert len(near._retained) == 2 + CONTROL_RESERVE
    assert not near.ready
    near.take(1, Frame(0, 2 + CONTROL_RESERVE, ()))
    assert near.ready
    (frame,) = near.pump()
    assert [m.n for m in frame.messages if isinstance(m, Request)] == [2, 3, 4]
    assert [m.id for m in frame.messages if isinstance(m, Ping)] == list(
        range(CONTROL_RESERVE, CONTROL_RESERVE + 5)
    )


def test_answers_wait_without_a_connection_and_for_room() -> None:
    near, door, far = joined(limit=1)
    reply = Reply("r", 0, 1, ReplyStatus.OK, b"")
    far.answer(reply)
    assert [frame.no for frame in far.pump()] == [1]
    far.answer(Pong(2))
    assert far.pump() == []
    far.down()
    far.answer(Pong(3))
    assert far.pump() == []
    _, answers = rejoin(near, door, 2)
    assert [frame.messages for frame in answers] == [(reply,)]
    near.take(2, answers[0])
    far.take(2, near.bare_ack())
    assert [frame.messages for frame in far.pump()] == [(Pong(2), Pong(3))]


def test_a_frame_is_bounded_in_messages_and_bytes() -> None:
    near, _, _ = joined()
    for n in range(FRAME_MESSAGES + 1):
        near.send(request(n))
    assert [len(frame.messages) for frame in near.pump()] == [FRAME_MESSAGES, 1]
    for n in range(3):
        near.send(request(n, b"x" * 700_000))
    assert [len(frame.messages) for frame in near.pump()] == [2, 1]


# ---- every interleaving that hypothesis finds


@given(
    st.lists(
        st.sampled_from(
            ["send", "control", "answer", "near", "far", "deliver", "redial", "drop", "ack"]
        ),
        max_size=120,
    ),
    st.integers(1, 4),
)
def test_exactly_once_in_order_whatever_the_connections_do(steps: list[str], limit: int) -> None:
    near, door, far = joined(limit=limit)
    session = 1
    out: deque[Frame] = deque()
    back: deque[Frame] = deque()
    sent: list[Request] = []
    controls: list[Ping] = []
    answers: list[Pong] = []
    taken: list[object] = []
    heard: list[object] = []
    for number, step in enumerate([*steps, "redial", *["near", "far", "deliver", "ack"] * 60]):
        if step == "send":
            sent.append(request(number))
            near.send(sent[-1])
        elif step == "control":
            controls.append(Ping(number))
            near.send(controls[-1], control=True)
        elif step == "answer":
            answers.append(Pong(number))
            far.answer(answers[-1])
        elif step == "near":
            out.extend(near.pump())
        elif step == "far":
            back.extend(far.pump())
        elif step == "ack":
            if near.up and far.up:
                out.append(near.bare_ack())
                back.append(far.bare_ack())
        elif step == "deliver":
            if out:
                taken.extend(far.take(session, out.popleft()))
            if back:
                heard.extend(near.take(session, back.popleft()))
        elif step == "drop":
            out.clear()
            back.clear()
            near.down()
            far.down()
        else:
            session += 1
            late_out, late_back = out, back
            resent, resent_back = rejoin(near, door, session)
            out, back = deque(resent), deque(resent_back)
            for frame in late_out:
                assert far.take(session - 1, frame) == ()
            for frame in late_back:
                assert near.take(session - 1, frame) == ()
    assert [m for m in taken if isinstance(m, Request)] == sent
    assert [m for m in taken if isinstance(m, Ping)] == controls
    assert heard == answers
    assert not near.pending
    assert not far.pending


# requests that nobody waits for any more


def test_before_the_first_welcome_a_request_can_be_recalled() -> None:
    near, door = dialled(), Acceptor(8)
    for n in range(1, 6):
        near.post(request(n))
    near.post(Flush("r", 0, 1))
    assert near.recall("r", 0, 2)
    assert near.recall("r", 0, 4)
    assert near.recall("r", 0, 4), "also twice"
    near.dial(1)
    admission = door.hello(near.hello())
    assert isinstance(admission.answer, Welcome)
    (frame,) = near.welcome(1, admission.answer)
    assert frame.messages == (request(1), request(3), request(5), Flush("r", 0, 1))
    assert near.unsent == ()


def test_once_welcomed_nothing_can_be_recalled() -> None:
    """A connection may have carried it, also if the link is down now."""
    near, _, _ = joined()
    near.post(request(1))
    assert not near.recall("r", 0, 1)
    near.down()
    near.post(request(2))
    assert not near.recall("r", 0, 2)
    assert near.unsent == (request(1), request(2))


def test_recalled_requests_do_not_pile_up() -> None:
    """I6."""
    near = dialled()
    for n in range(1, 1_000):
        near.post(request(n))
        assert near.recall("r", 0, n)
    assert near.unsent == ()
    near.post(request(1_000))
    for n in range(1_001, 1_100):
        near.post(request(n))
        near.recall("r", 0, n)
        assert len(near.unsent) <= 3
    assert near.unsent[0] == request(1_000)
