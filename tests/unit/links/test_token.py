"""The cluster's token: proofs for one hello alone, and links that believe nobody without one."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from links_lab import CLUSTER, Host, Lab, request, simulate

from domicile.core.ids import Incarnation
from domicile.core.wire import Frame, Hello, Refused, Welcome, decode_packet, encode_packet
from domicile.errors import ConfigError
from domicile.links.token import (
    MOST_SECRETS,
    check_hello,
    check_welcome,
    fingerprints,
    prove_hello,
    prove_welcome,
    secrets_of,
)
from domicile.ports.transport import Connection, Peer

TOKEN = "correct horse battery staple"
OTHER = "incorrect horse battery staple"
HELLO = Hello(
    cluster=CLUSTER,
    sender=Incarnation("a" * 32),
    receiver=Incarnation("b" * 32),
    address="x:1",
    link="l",
    session=3,
    resume=False,
    received=0,
    protocol=1,
    newest=3,
)


def proved(token: str, hello: Hello = HELLO) -> Hello:
    return msgspec.structs.replace(hello, proof=prove_hello(token, hello))


def welcomed(token: str, hello: Hello, welcome: Welcome) -> Welcome:
    return msgspec.structs.replace(welcome, proof=prove_welcome(token, hello, welcome))


# the functions


def test_a_proof_is_of_a_fixed_form() -> None:
    """Versions that meet in one cluster must find the same bytes."""
    assert prove_hello(TOKEN, HELLO).hex() == (
        "f89535a47b4b43a4e8ebf8415fdd78b712b9c695c6a20e0f7a92cf0118737776"
    )
    welcome = prove_welcome(TOKEN, proved(TOKEN), Welcome(0, 3))
    assert welcome.hex() == "8454f7be2b504b6ef52277c12d547191deb2764a6d5f33f312cfb10e0595a5d2"
    assert fingerprints(TOKEN, CLUSTER) == ("b500c26d2e3f44b4",)


@pytest.mark.parametrize(
    ("mine", "its", "known"),
    [
        (TOKEN, TOKEN, TOKEN),
        (TOKEN, OTHER, ""),
        (TOKEN, "", ""),
        (f"{OTHER},{TOKEN}", TOKEN, TOKEN),
        (TOKEN, f"{OTHER},{TOKEN}", TOKEN),
        (f"new,{TOKEN}", f"{TOKEN},new", "new"),
    ],
    ids=["same", "other", "none", "one of mine", "one of its", "the first of mine"],
)
def test_any_common_secret_will_do(mine: str, its: str, known: str) -> None:
    hello = proved(its)
    assert check_hello(mine, hello) == known
    answer = welcomed(mine, hello, Welcome(7, 3))
    assert check_welcome(its, hello, answer) == (bool(known) or not its)


@pytest.mark.parametrize("name", [name for name in Hello.__struct_fields__ if name != "proof"])
def test_a_proof_is_of_all_that_a_hello_says(name: str) -> None:
    hello = proved(TOKEN)
    said = getattr(hello, name)
    other = (
        not said if isinstance(said, bool) else said + 1 if isinstance(said, int) else said + "x"
    )
    assert not check_hello(TOKEN, msgspec.structs.replace(hello, **{name: other}))


def test_a_welcome_proves_itself_for_one_hello_alone() -> None:
    hello = proved(TOKEN)
    good = welcomed(TOKEN, hello, Welcome(7, 3))
    assert check_welcome(TOKEN, hello, good)
    for bad in (
        Welcome(7, 3),
        msgspec.structs.replace(good, received=8),
        msgspec.structs.replace(good, protocol=2),
        msgspec.structs.replace(good, proof=hello.proof),
    ):
        assert not check_welcome(TOKEN, hello, bad)
    assert not check_welcome(TOKEN, msgspec.structs.replace(hello, session=4), good)
    assert check_welcome("", HELLO, Welcome(7, 3)), "without a token nothing is to be proved"


def test_only_so_many_claims_are_looked_at() -> None:
    proof = prove_hello(TOKEN, HELLO)
    late = msgspec.structs.replace(HELLO, proof=b"x" * 32 * MOST_SECRETS + proof)
    assert not check_hello(TOKEN, late)
    assert not check_hello(TOKEN, msgspec.structs.replace(HELLO, proof=proof[:-1]))


def test_a_hello_with_as_many_secrets_as_may_be_travels() -> None:
    token = ",".join(f"secret number {number}" for number in range(MOST_SECRETS))
    hello = proved(token)
    assert decode_packet(encode_packet(hello)) == hello
    assert check_hello("secret number 3", hello) == "secret number 3"


def test_secrets_are_separated_by_commas() -> None:
    assert secrets_of("") == ()
    assert secrets_of(" new , old ") == ("new", "old")
    for bad in (",", "new,", "a,,b", " ", "1,2,3,4,5"):
        with pytest.raises(ConfigError, match="none of them may be empty") as caught:
            secrets_of(bad)
        assert repr(bad) not in str(caught.value), "a token is in no message"


def test_fingerprints_tell_tokens_and_clusters_apart() -> None:
    prints = {*fingerprints(f"{TOKEN},{OTHER}", "one"), *fingerprints(TOKEN, "two")}
    assert len(prints) == 3
    assert fingerprints("", "one") == ()


# links


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


class Overheard(Rogue):
    """One end of a wire tap: notes what it hears, and answers what it is told to."""

    def __init__(self, *answers: Any) -> None:
        super().__init__()
        self._answers = answers

    def opened(self, connection: Connection) -> None:
        self._connection = connection

    def received(self, data: bytes) -> None:
        super().received(data)
        for answer in self._answers:
            self._connection.send(encode_packet(answer(self.heard[-1])))


async def pair(lab: Lab, one: str = TOKEN, other: str = TOKEN) -> tuple[Host, Host]:
    p, q = await lab.pair()
    p.layer._token, q.layer._token = one, other
    return p, q


def hello_to(host: Host, **changes: Any) -> Hello:
    return msgspec.structs.replace(HELLO, **{"receiver": host.inc, **changes})


def test_links_with_the_same_token_work() -> None:
    async def test(lab: Lab) -> None:
        p, q = await pair(lab, f"{OTHER},{TOKEN}")
        p.send(q, 1, 2)
        q.send(p, 3)
        await asyncio.sleep(0.1)
        assert p.all_heard() == [1, 2]
        assert q.all_heard() == [3]

    lab = simulate(test)
    assert lab.history.counts["token.refused"] == lab.history.counts["token.distrusted"] == 0


@pytest.mark.parametrize("token", ["", OTHER])
def test_a_stranger_is_told_nothing_but_what_it_lacks(
    token: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(lab: Lab) -> None:
        p, q = await pair(lab)
        for changes in ({}, {"cluster": "other"}, {"receiver": p.inc}, {"resume": True}):
            hello = proved(token, hello_to(q, **changes))
            frame = encode_packet(Frame(1, 0, (request(1),)))
            rogue = Rogue(encode_packet(hello), frame)
            p.transport.dial(q.layer.address, rogue)
            await asyncio.sleep(0.1)
            [refused] = rogue.heard
            assert isinstance(refused, Refused)
            assert "DOMICILE_TOKEN" in refused.reason
            assert q.inc not in refused.reason
            assert CLUSTER not in refused.reason.split()
            assert rogue.reasons == ["closed by the peer"]
        assert q.all_requests() == []

    lab = simulate(test)
    assert lab.history.counts["token.refused"] == 4
    assert "DOMICILE_TOKEN" in caplog.text


def test_both_ends_say_why_and_a_link_is_lost_with_that_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(lab: Lab) -> None:
        p, q = await pair(lab, OTHER)
        p.send(q, 1)
        await asyncio.sleep(30)
        assert q.all_requests() == []
        assert "DOMICILE_TOKEN" in p.lost[0][1]

    caplog.set_level("INFO")
    simulate(test)
    assert "refused this process" in caplog.text
    assert "closed the connection" in caplog.text
    assert len(caplog.records) < 40, "of many attempts only some are written of"
    assert TOKEN not in caplog.text


def test_a_hello_that_was_overheard_is_of_no_use() -> None:
    """Each session of a sender is taken once, by the incarnation that it was meant for."""

    async def test(lab: Lab) -> None:
        p, q = await pair(lab)
        third = await lab.host("third")
        third.layer._token = TOKEN
        p.send(q, 1)
        await asyncio.sleep(0.1)
        side = p.layer._out[q.inc]
        overheard = encode_packet(proved(TOKEN, side.link.hello()))
        assert isinstance(again := decode_packet(overheard), Hello)
        assert check_hello(TOKEN, again), "what is repeated is the very hello"
        steal = encode_packet(Frame(2, 0, (request(99),)))

        rogue = Rogue(overheard, steal)
        p.transport.dial(q.layer.address, rogue)
        await asyncio.sleep(0.1)
        assert rogue.heard == []
        assert rogue.reasons == ["closed by the peer"]
        p.send(q, 2)
        await asyncio.sleep(0.1)
        assert q.all_requests() == [1, 2], "the link itself goes on"

        elsewhere = Rogue(overheard, steal)
        p.transport.dial(third.layer.address, elsewhere)
        await asyncio.sleep(0.1)
        assert [type(packet) for packet in elsewhere.heard] == [Refused]

        q.layer._drop(q.layer._in[next(iter(q.layer._in))])
        for _ in range(2):
            late = Rogue(overheard, steal)
            p.transport.dial(q.layer.address, late)
            await asyncio.sleep(0.1)
            assert late.heard == [], "late, also once the link is gone"
        q.layer.forget(p.inc)
        gone = Rogue(overheard, steal)
        p.transport.dial(q.layer.address, gone)
        await asyncio.sleep(0.1)
        assert [type(packet) for packet in gone.heard] == [Refused]
        assert 99 not in q.all_requests()
        assert third.all_requests() == []

    simulate(test)


@pytest.mark.parametrize(
    "answer",
    [
        lambda hello: Welcome(0, 3),
        lambda hello: Welcome(0, 3, hello.proof),
        lambda hello: welcomed(OTHER, proved(OTHER, hello), Welcome(0, 3)),
    ],
    ids=["no proof", "reflected", "another token"],
)
def test_whoever_answers_without_the_token_hears_no_request(answer: Any) -> None:
    async def test(lab: Lab) -> None:
        p, q = await pair(lab)
        taps: list[Overheard] = []

        def accept() -> Overheard:
            taps.append(Overheard(answer))
            return taps[-1]

        address = await q.transport.listen(accept)
        p.do(lambda: p.layer.send(Peer(q.inc, address), request(1)))
        await asyncio.sleep(1.0)
        assert len(taps) > 1, "it tries again"
        assert [type(packet) for tap in taps for packet in tap.heard] == [Hello] * len(taps)

    lab = simulate(test)
    assert lab.history.counts["token.distrusted"] > 1


def test_without_a_token_a_proof_is_not_looked_at() -> None:
    """A cluster without a token takes whoever comes, but one that has a token trusts it not."""

    async def test(lab: Lab) -> None:
        p, q = await pair(lab, "", "")
        rogue = Rogue(encode_packet(proved(TOKEN, hello_to(q))))
        p.transport.dial(q.layer.address, rogue)
        await asyncio.sleep(0.1)
        assert [type(packet) for packet in rogue.heard] == [Welcome]

    simulate(test)
