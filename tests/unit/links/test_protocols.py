"""Which protocol a link speaks: ranges in hellos, older peers, and peers with none in common."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest
from links_lab import Lab, simulate

from domicile.core.ids import Incarnation, LinkKey
from domicile.core.state.agreement import common_protocol
from domicile.core.wire import (
    Frame,
    Hello,
    Ping,
    Probe,
    Probed,
    Suspect,
    ToOwner,
    Welcome,
    decode_packet,
    encode_packet,
)
from domicile.links import machine
from domicile.links.machine import (
    HELD_MESSAGES,
    SINCE,
    Acceptor,
    LinkBroken,
    OutgoingLink,
    protocols_of,
)

P = Incarnation("p" * 32)
Q = Incarnation("q" * 32)
NEW = (Suspect(P), Probe(P), Probed(P, True))


class Wire(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """The first words of protocol 1 as its own version had them."""


class OldHello(Wire, frozen=True, tag="h"):
    cluster: str
    sender: Incarnation
    receiver: Incarnation
    address: str
    link: str
    session: int
    resume: bool
    received: int
    protocol: int = 1


class OldWelcome(Wire, frozen=True, tag="w"):
    received: int


NEXT = (1, 2)
"""What a next version speaks: today's protocol and its own."""


@pytest.fixture(autouse=True)
def _a_next_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if some messages of today had come with protocol 2."""
    for message in NEW:
        monkeypatch.setitem(SINCE, type(message), 2)
        monkeypatch.setitem(machine._TO_OWNER, type(message), 2)


def dialled(protocols: tuple[int, int] = NEXT) -> OutgoingLink:
    link = OutgoingLink(
        "l1", 8, cluster="c", sender=P, receiver=Q, address="p:1", protocols=protocols
    )
    link.dial(1)
    return link


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        ((1, 2), (1, 2), 2),
        ((1, 1), (1, 2), 1),
        ((1, 2), (2, 3), 2),
        ((2, 2), (1, 4), 2),
        ((1, 2), (3, 3), 0),
        ((1, 1), (2, 3), 0),
    ],
)
def test_the_newest_common_one_is_spoken(
    one: tuple[int, int], other: tuple[int, int], common: int
) -> None:
    assert common_protocol(one, other) == common_protocol(other, one) == common


def test_a_version_that_knows_only_protocol_1_understands_our_first_words() -> None:
    ours = encode_packet(dialled().hello())
    old = msgspec.msgpack.decode(ours, type=OldHello | OldWelcome)
    assert isinstance(old, OldHello)
    assert (old.protocol, old.link) == (1, "l1"), "it compares this number with its own"
    answer = encode_packet(Welcome(5, 1))
    assert msgspec.msgpack.decode(answer, type=OldHello | OldWelcome) == OldWelcome(5)


def test_the_first_words_of_that_version_are_understood_here() -> None:
    theirs = msgspec.msgpack.encode(OldHello("c", P, Q, "p:1", "l1", 1, False, 0))
    hello = decode_packet(theirs)
    assert isinstance(hello, Hello)
    assert protocols_of(hello) == (1, 1)
    welcome = decode_packet(msgspec.msgpack.encode(OldWelcome(0)))
    assert welcome == Welcome(0, 1)
    assert isinstance(welcome, Welcome)
    link = dialled()
    link.welcome(1, welcome)
    assert link.protocol == 1


@pytest.mark.parametrize("message", NEW)
def test_what_is_new_waits_for_the_welcome_and_is_dropped_if_the_link_is_older(
    message: ToOwner,
) -> None:
    older, newer = dialled(), dialled()
    for link in (older, newer):
        assert link.send(message, control=True), "nobody knows yet what this link speaks"
        assert link.send(Ping(1), control=True)
    assert [frame.messages for frame in older.welcome(1, Welcome(0))] == [(Ping(1),)]
    assert [frame.messages for frame in newer.welcome(1, Welcome(0, 2))] == [(Ping(1),)]
    assert (older.release_held(), newer.release_held()) == (1, 0)
    assert older.pump() == []
    assert [frame.messages for frame in newer.pump()] == [(message,)]
    assert not older.send(message, control=True)
    assert newer.send(message, control=True)
    assert older.pump() == []


def test_what_waits_for_the_welcome_is_bounded() -> None:
    link = dialled()
    taken = [link.send(Suspect(P), control=True) for _ in range(HELD_MESSAGES + 1)]
    assert taken == [True] * HELD_MESSAGES + [False]


def test_an_end_that_speaks_only_the_older_one_holds_nothing() -> None:
    assert not dialled((1, 1)).send(Suspect(P), control=True)


def test_what_was_not_agreed_breaks_the_connection() -> None:
    door = Acceptor(8)
    admission = door.hello(dialled().hello(), 1)
    assert admission.answer == Welcome(0, 1)
    assert admission.link is not None
    with pytest.raises(LinkBroken, match="Suspect is not in protocol 1"):
        admission.link.take(1, Frame(1, 0, (Suspect(P),)))
    with pytest.raises(LinkBroken, match="protocol 7 was chosen, only 1 to 2"):
        dialled().welcome(1, Welcome(0, 7))


def test_a_resumed_link_speaks_what_it_spoke() -> None:
    near, door = dialled(), Acceptor(8)
    first = door.hello(near.hello(), 2)
    assert isinstance(first.answer, Welcome)
    near.welcome(1, first.answer)
    near.dial(2)
    again = door.hello(near.hello(), 2)
    assert isinstance(again.answer, Welcome)
    near.welcome(2, again.answer)
    assert (again.answer.protocol, near.protocol) == (2, 2)


@pytest.mark.parametrize(
    ("one", "other", "spoken", "carried"),
    [
        ((1, 2), (1, 2), 2, 3),
        ((1, 1), (1, 2), 1, 0),
        ((1, 2), (1, 1), 1, 0),
    ],
)
def test_links_carry_what_both_ends_speak_and_count_the_rest(
    one: tuple[int, int], other: tuple[int, int], spoken: int, carried: int
) -> None:
    heard: list[ToOwner] = []

    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        p.layer.protocols, q.layer.protocols = one, other
        plain = q.on_request

        def on_request(link: LinkKey, message: ToOwner) -> None:
            heard.append(message)
            plain(link, message)

        q.on_request = on_request  # type: ignore[method-assign]

        def say() -> None:
            for message in NEW:
                p.layer.send(q.peer, message, control=True)

        p.do(say)
        p.send(q, 1)
        await asyncio.sleep(0.1)
        p.do(say)
        await asyncio.sleep(0.1)
        assert [m for m in heard if type(m) in SINCE] == list(NEW) * (carried // 3 * 2)
        assert lab.history.counts["link.unspoken"] == 2 * (3 - carried)
        assert q.all_requests() == p.all_heard() == [1]
        assert p.layer._out[q.inc].link.protocol == spoken
        assert [side.link.protocol for side in q.layer._in.values()] == [spoken]

    simulate(test)


def test_none_in_common_is_refused_with_both_ranges_and_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "domicile")

    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        p.layer.protocols = (4, 4)
        p.send(q, 1)
        await asyncio.sleep(8)
        (lost,) = p.lost
        for part in ("1 to 1", "4 to 4", "none is common", "version by version"):
            assert part in lost[1]
        assert lab.history.counts["link.refused"] > 1
        assert q.all_requests() == []

    simulate(test)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1, "once, however often it is tried"
    assert "refused this process" in told[0]
    assert "4 to 4" in told[0]
