"""Bytes on links are bounded as messages are, and so is the memory of those that are gone (I6)."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from links_lab import Lab, simulate

from domicile.core.ids import Incarnation
from domicile.core.wire import Frame, Hello, Reply, ReplyStatus, Request, Welcome
from domicile.links import layer as links_module
from domicile.links import machine as link_module
from domicile.links.departed import DepartedPeers
from domicile.links.machine import Acceptor, IncomingLink, OutgoingLink

KIB = 1024
ME, PEER = Incarnation("a" * 32), Incarnation("b" * 32)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a test reaches soon."""
    monkeypatch.setattr(link_module, "RETAINED_BYTES", 64 * KIB)
    monkeypatch.setattr(link_module, "MOST_ANSWER_BYTES", 256 * KIB)
    monkeypatch.setattr(link_module, "FRAME_BYTES", 8 * KIB)


def accepted() -> IncomingLink:
    """An incoming link with a connection."""
    hello = Hello("c", PEER, ME, "", "l", 1, False, 0, 1, 1)
    link = Acceptor(256).hello(hello, 1).link
    assert link is not None
    return link


def dialled() -> OutgoingLink:
    """An outgoing link with a connection."""
    link = OutgoingLink("l", 256, cluster="c", sender=ME, receiver=PEER, address="")
    link.dial(1)
    link.welcome(1, Welcome(0, 1))
    return link


def reply(n: int, size_bytes: int) -> Reply:
    """An answer of that size."""
    return Reply("r", 0, n, ReplyStatus.OK, b"x" * size_bytes)


def test_no_more_bytes_are_written_than_a_peer_acknowledges() -> None:
    link = accepted()
    for n in range(30):
        assert link.answer(reply(n, 4 * KIB)) > 0
    frames = link.pump()
    sent = sum(len(frame.messages) for frame in frames)
    assert 64 <= 4 * sent < 64 + 8
    assert not link.ready
    link.take(1, Frame(0, frames[0].no, ()))
    assert link.ready
    (more,) = link.pump()
    assert [message.n for message in more.messages] == [sent, sent + 1]  # type: ignore[union-attr]


def test_requests_wait_for_acknowledgements_too_and_control_passes() -> None:
    link = dialled()
    for n in range(30):
        link.post(Request("r", 0, n, 1, 1, "t", "e", "m", b"x" * 4 * KIB, True, False, 1.0))
    link.pump()
    assert len(link.unsent) > 10
    assert not link.ready


def test_one_message_larger_than_all_that_may_wait_still_goes() -> None:
    link = accepted()
    link.answer(reply(1, 200 * KIB))
    link.answer(reply(2, 10))
    assert [len(frame.messages) for frame in link.pump()] == [1]
    link.take(1, Frame(0, 1, ()))
    assert [len(frame.messages) for frame in link.pump()] == [1]


def test_answers_that_nobody_takes_are_too_many_by_their_bytes() -> None:
    link = accepted()
    taken = 0
    while link.answer(reply(taken, 4 * KIB)) > 0:
        taken += 1
        link.pump()
    assert 256 <= 4 * taken <= 256 + 64 + 8


def test_answers_that_are_taken_are_never_too_many() -> None:
    link = accepted()
    for n in range(1_000):
        assert link.answer(reply(n, 4 * KIB)) > 0
        for frame in link.pump():
            link.take(1, Frame(0, frame.no, ()))


def test_large_packets_are_acknowledged_sooner() -> None:
    link = dialled()
    link.take(1, Frame(1, 0, (reply(1, 10),)))
    assert link.owed == 1
    link.weigh(10 * 8 * KIB)
    assert link.owed == 11
    link.bare_ack()
    assert link.owed == 0


# those that are gone


def test_only_the_last_of_those_that_are_gone_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links_module, "DepartedPeers", partial(DepartedPeers, 10))

    async def test(lab: Lab) -> None:
        here, there = await lab.pair()
        layer = here.layer
        gone = [Incarnation(f"{number:032x}") for number in range(100)]

        def forget() -> None:
            for peer in gone:
                layer.forget(peer)
                layer.forget(peer)

        here.do(forget)
        await asyncio.sleep(0.1)
        assert all(peer in layer._forgotten for peer in gone[-5:])
        assert not any(peer in layer._forgotten for peer in gone[:-10])
        here.do(lambda: layer.forget(there.inc))
        there.send(here, 1)
        await asyncio.sleep(1.0)
        assert here.all_requests() == [], "the newest of all is not heard (I1b)"

    simulate(test)
