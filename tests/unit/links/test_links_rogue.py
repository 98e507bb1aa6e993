"""The link layer against callers that do not keep to the protocol."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from links_lab import CLUSTER, Host, Lab, request, simulate

from domicile.core.ids import Incarnation, LinkKey
from domicile.core.wire import (
    Frame,
    Hello,
    Pong,
    Refused,
    ToOwner,
    Welcome,
    decode_packet,
    encode_packet,
)
from domicile.ports.transport import Connection


class Rogue:
    """A connection that speaks for itself."""

    def __init__(self, *packets: bytes) -> None:
        self._packets = packets
        self.heard: list[object] = []
        self.reasons: list[str] = []

    def opened(self, connection: Connection) -> None:
        for packet in self._packets:
            connection.send(packet)

    def received(self, data: bytes) -> None:
        self.heard.append(decode_packet(data))

    def receiving(self) -> None:
        pass

    def closed(self, reason: str) -> None:
        self.reasons.append(reason)

    def guard(self) -> bool:
        return True


ROGUE = Incarnation("f" * 32)


def hello(host: Host, **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "cluster": CLUSTER,
        "sender": ROGUE,
        "receiver": host.inc,
        "address": "x:1",
        "link": "l",
        "session": 1,
        "resume": False,
        "received": 0,
    }
    return encode_packet(Hello(**{**fields, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"cluster": "other"},
        {"receiver": Incarnation("0" * 32)},
        {"protocol": 9},
        {"resume": True},
    ],
    ids=["cluster", "receiver", "protocol", "unknown link"],
)
def test_wrong_hellos_are_refused_and_closed(changes: dict[str, Any]) -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        rogue = Rogue(hello(q, **changes), encode_packet(Frame(1, 0, (request(1),))))
        p.transport.dial(q.layer.address, rogue)
        await asyncio.sleep(0.1)
        assert [type(packet) for packet in rogue.heard] == [Refused]
        assert rogue.reasons == ["closed by the peer"]
        assert q.all_requests() == []

    simulate(test)


@pytest.mark.parametrize(
    ("packet", "metric"),
    [
        (b"", "link.garbage"),
        (b"\xc1\xff\x00garbage", "link.garbage"),
        (b"\x92\xa1m\xa3\xff\xfe\xfd", "link.garbage"),
        (b"\x91" * 100_000, "link.garbage"),
        (encode_packet(Welcome(0)), "link.broken"),
        (encode_packet(Frame(2, 0, (request(2),))), "link.broken"),
        (encode_packet(Frame(1, 0, (Pong(1),))), "link.broken"),
    ],
    ids=["empty", "garbage", "not text", "deep", "welcome", "gap", "wrong way"],
)
def test_nonsense_closes_that_connection_only(packet: bytes, metric: str) -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        p.send(q, 1)
        rogue = Rogue(hello(q), packet, encode_packet(Frame(1, 0, (request(99),))))
        p.transport.dial(q.layer.address, rogue)
        await asyncio.sleep(0.1)
        assert rogue.reasons == ["closed by the peer"]
        assert lab.history.counts[metric] == 1
        assert q.all_requests() == [1]
        p.send(q, 2)
        await asyncio.sleep(0.1)
        assert q.all_requests() == [1, 2]

    simulate(test)


def test_a_newer_session_closes_the_older_connection() -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        older, newer = Rogue(hello(q)), Rogue(hello(q, session=2))
        p.transport.dial(q.layer.address, older)
        await asyncio.sleep(0.1)
        p.transport.dial(q.layer.address, newer)
        await asyncio.sleep(0.1)
        assert older.heard == newer.heard == [Welcome(0)]
        assert older.reasons == ["closed by the peer"]
        assert newer.reasons == []
        assert q.gone == []

    simulate(test)


@pytest.mark.parametrize("what", ["forget", "abort"])
def test_a_peer_forgotten_in_the_middle_of_a_frame_is_heard_no_further(what: str) -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        heard = q.on_request

        def on_request(link: LinkKey, message: ToOwner) -> None:
            heard(link, message)
            if what == "forget":
                q.layer.forget(p.inc)
                assert q.gone == [], "told in a later turn"
            else:
                q.layer.abort()

        q.on_request = on_request  # type: ignore[method-assign]
        p.send(q, 1, 2, 3)
        await asyncio.sleep(0.1)
        assert q.all_requests() == [1]
        assert p.all_heard() == []
        assert len(q.gone) == (what == "forget")

    simulate(test)


def test_a_peer_may_be_forgotten_while_its_new_link_is_admitted() -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        gone = q.on_link_gone

        def on_link_gone(link: LinkKey) -> None:
            gone(link)
            q.layer.forget(ROGUE)

        q.on_link_gone = on_link_gone  # type: ignore[method-assign]
        older, newer = Rogue(hello(q)), Rogue(hello(q, link="m", session=2))
        p.transport.dial(q.layer.address, older)
        await asyncio.sleep(0.1)
        p.transport.dial(q.layer.address, newer)
        await asyncio.sleep(0.1)
        assert q.gone == [LinkKey(ROGUE, "l"), LinkKey(ROGUE, "m")]
        assert newer.heard == []
        assert older.reasons == newer.reasons == ["closed by the peer"]

    simulate(test)


def test_a_caller_without_a_hello_is_sent_away() -> None:
    async def test(lab: Lab) -> None:
        p, q = await lab.pair()
        rogue = Rogue()
        p.transport.dial(q.layer.address, rogue)
        await asyncio.sleep(4.9)
        assert rogue.reasons == []
        await asyncio.sleep(0.2)
        assert rogue.reasons == ["closed by the peer"]

    simulate(test)
