"""The pure receiving side against anything: bytes, packets and frames that no peer should send."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
from hostile_lab import (
    HERE,
    NOT_PACKETS,
    NOT_STREAMS,
    ROGUE,
    frames,
    hellos,
    hostile_bytes,
    numbers,
    packed,
    welcomes,
)
from hypothesis import example, given
from hypothesis import strategies as st

from domicile.core.handoff.mailbox import Queued
from domicile.core.handoff.owner import PARKED, Owner
from domicile.core.ids import EntityKey, LinkKey, ShardKey
from domicile.core.wire import (
    Frame,
    Hello,
    Message,
    Ping,
    Pong,
    Refused,
    Request,
    ToSender,
    Welcome,
    decode_packet,
    encode_packet,
)
from domicile.links.machine import PROTOCOLS, Acceptor, LinkBroken, LinkVoid, OutgoingLink
from domicile.transports.framing import FIRST_BYTES, FrameDecoder, FramingError

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What the link layer takes for garbage; anything else would get past it."""

LIMIT = 8

BARE = ["q", "default", 0, 1, 1, 1, "T", "i", "m", b"", True, False, 1.0]
"""A request as it travels, without its chain."""


def request(n: int, **changes: object) -> Request:
    made = Request("default", 0, n, 1, 1, "counter", "i", "add", b"", True, False, 1.0)
    return msgspec.structs.replace(made, **changes)


@pytest.mark.parametrize("name", NOT_PACKETS)
def test_no_packet_of_the_corpus_is_taken_for_one(name: str) -> None:
    with pytest.raises(UNREADABLE):
        decode_packet(NOT_PACKETS[name])


@pytest.mark.parametrize("name", NOT_STREAMS)
def test_no_stream_of_the_corpus_gets_as_far_as_a_hello(name: str) -> None:
    decoder = FrameDecoder(first_bytes=FIRST_BYTES)
    try:
        found = list(decoder.feed(NOT_STREAMS[name]))
    except FramingError:
        return
    for data in found:
        with pytest.raises(UNREADABLE):
            decode_packet(data)


@given(hostile_bytes)
def test_bytes_are_a_packet_or_garbage_and_packets_survive_the_way_back(data: bytes) -> None:
    try:
        packet = decode_packet(data)
    except UNREADABLE:
        return
    assert decode_packet(encode_packet(packet)) == packet


@pytest.mark.parametrize(
    "value",
    [
        ["m", 1, 0, [["pi", 1]] * 70_000],
        ["m", 1, 0, [["b", "default", [0], [1] * (1 << 20) + [1]]]],
        ["m", 1, 0, [[*BARE, [["default", 0, "T", "i", False]] * 5_000]]],
    ],
    ids=["messages", "numbers", "callers"],
)
def test_what_is_long_is_refused_before_it_is_built(value: list[object]) -> None:
    data = packed(value)
    tracemalloc.start()
    try:
        with pytest.raises(msgspec.ValidationError, match="length <="):
            decode_packet(data)
        assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
    finally:
        tracemalloc.stop()


# the machines of a link


def check_numbers(taken: list[tuple[int, tuple[Message, ...]]]) -> None:
    """Frames were taken one after the other, none twice, none left out."""
    assert [no for no, _ in taken] == list(range(1, len(taken) + 1))


pings = st.builds(Frame, st.integers(1, 4), st.just(0), st.tuples(st.builds(Ping, numbers)))


@given(st.lists(st.tuples(st.integers(0, 2), frames | pings), max_size=12))
@example([(1, Frame(1, 0, (Ping(1),))), (1, Frame(1, 0, (Ping(1),))), (1, Frame(3, 0, (Ping(1),)))])
def test_an_accepted_link_takes_the_next_frame_of_its_session_or_nothing(
    arriving: list[tuple[int, Frame]],
) -> None:
    door = Acceptor(LIMIT)
    admission = door.hello(Hello("c", ROGUE, HERE, "", "l", 1, False, 0), PROTOCOLS[1])
    link = admission.link
    assert link is not None
    for n in range(3):
        link.answer(Pong(n))
    link.pump()
    taken: list[tuple[int, tuple[Message, ...]]] = []
    for session, frame in arriving:
        before = link.received
        try:
            found = link.take(session, frame)
        except LinkBroken:
            assert link.received == before
            continue
        if found:
            assert session == 1
            assert not any(isinstance(message, ToSender) for message in found)
            taken.append((frame.no, found))
    check_numbers(taken)
    assert link.received == len(taken)
    assert len(link._retained) <= 1


@given(st.lists(hellos, max_size=10))
def test_an_acceptor_never_fails_and_never_goes_back(arriving: list[Hello]) -> None:
    door = Acceptor(LIMIT)
    newest = 0
    for hello in arriving:
        admission = door.hello(hello)
        if hello.session <= newest:
            assert admission.answer is None, "a late hello gets no word"
            assert admission.link is None
        else:
            assert isinstance(admission.answer, Welcome | Refused)
            assert isinstance(admission.answer, Welcome) == (admission.link is not None)
        newest = max(newest, hello.session)
        assert door.newest == newest
        encode_packet(admission.answer or Refused(""))


@given(st.lists(st.tuples(st.integers(0, 2), frames | welcomes), max_size=12))
@example([(1, Welcome(0, 3)), (1, Frame(1, 1, (Pong(1),))), (1, Frame(2, 0, (Ping(1),)))])
def test_a_dialled_link_believes_only_what_can_be(
    arriving: list[tuple[int, Frame | Welcome]],
) -> None:
    link = OutgoingLink("l", LIMIT, cluster="c", sender=HERE, receiver=ROGUE, address="")
    for n in range(20):
        link.send(request(n))
    link.dial(1)
    taken: list[tuple[int, tuple[Message, ...]]] = []
    for session, packet in arriving:
        try:
            if isinstance(packet, Welcome):
                link.welcome(session, packet)
            else:
                found = link.take(session, packet)
                if found:
                    taken.append((packet.no, found))
        except LinkBroken:
            pass
        except LinkVoid:
            assert isinstance(packet, Welcome)
            assert packet.received > link._last
        assert link._acked <= link._last
        assert len(link._retained) <= LIMIT
    check_numbers(taken)


def test_a_replayed_flow_is_late_from_its_first_word_on() -> None:
    door = Acceptor(LIMIT)
    hello = Hello("c", ROGUE, HERE, "", "l", 1, False, 0)
    link = door.hello(hello).link
    assert link is not None
    frame = Frame(1, 0, (request(1),))
    assert link.take(1, frame) == frame.messages
    assert door.hello(hello).answer is None
    assert link.take(1, frame) == (), "it has arrived"
    door.drop()
    assert door.hello(hello).answer is None, "also once the link is gone"


def test_reordered_frames_break_the_connection_and_change_nothing() -> None:
    door = Acceptor(LIMIT)
    link = door.hello(Hello("c", ROGUE, HERE, "", "l", 1, False, 0)).link
    assert link is not None
    first, second = Frame(1, 0, (request(1),)), Frame(2, 0, (request(2),))
    with pytest.raises(LinkBroken, match="gap"):
        link.take(1, second)
    assert link.take(1, first) == first.messages
    assert link.take(1, second) == second.messages


# an owner


def test_what_waits_for_a_record_is_bounded() -> None:
    owner = Owner(ShardKey("default", 0), HERE, 10)
    rogue = LinkKey(ROGUE, "l")
    for n in range(3 * PARKED):
        ahead = Queued(rogue, n, EntityKey("T", "i"), 9, 9, False, False)
        owner.request(ahead)
    assert len(owner.parked[rogue]) == PARKED
    owner.link_gone(rogue)
    assert not owner.parked
