"""The link layer with a peer that keeps the rules and others that do not (DX-08)."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from random import Random
from typing import Any

import msgspec
import pytest
from hostile_lab import NOT_PACKETS, ROGUE, hostile_bytes, packets, to_owner
from hypothesis import given, settings
from hypothesis import strategies as st

from domicile.core.ids import Incarnation, LinkKey
from domicile.core.wire import (
    Frame,
    Hello,
    Message,
    Ping,
    Pong,
    Refused,
    Reply,
    ReplyStatus,
    Request,
    ToOwner,
    ToSender,
    decode_packet,
    encode_packet,
)
from domicile.links import machine as link_module
from domicile.links.layer import LinkLayer
from domicile.membership.clock import SystemClock
from domicile.ports.transport import Connection, Peer
from domicile.settings import Settings
from domicile.transports.compress import Deflated, deflate
from domicile.transports.limits import MOST_STRANGERS, MOST_UNREGISTERED, WARNINGS
from domicile.transports.memory import MemoryNetwork, MemoryTransport

SOON_S = 5.0


class Notes:
    """A meter that counts."""

    traces = False

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def count(self, name: str, value: int = 1) -> None:
        self.counts[name] += value

    def event(self, kind: str, /, **fields: Any) -> None:
        pass


class Process:
    """A link layer that answers every request and every ping."""

    def __init__(self, network: MemoryNetwork, name: str, limits: Settings) -> None:
        self.inc = Incarnation(name * 32)
        self.meter = Notes()
        self.heard: list[Message] = []
        self.asked: list[tuple[Incarnation, int]] = []
        self.gone: list[LinkKey] = []
        self.lost: list[str] = []
        self.known: dict[Incarnation, None] = {}
        self.transport = MemoryTransport(network)
        self.layer = LinkLayer(
            self.transport, SystemClock(), limits, Random(name), self.meter, self.inc, "test", "",
            lambda: True, self, registered=self.known.__contains__,
        )  # fmt: skip

    async def start(self) -> None:
        self.layer.address = await self.transport.listen(self.layer.accept)

    def ask(self, other: Process, n: int, body: bytes = b"") -> None:
        made = Request("default", 0, n, 1, 1, "counter", "i", "add", body, True, False, 1.0)
        self.layer.send(Peer(other.inc, other.layer.address), made)

    def on_requests(self, link: LinkKey, messages: Iterable[ToOwner]) -> None:
        for message in messages:
            self.on_request(link, message)

    def on_request(self, link: LinkKey, message: ToOwner) -> None:
        if isinstance(message, Request):
            self.asked.append((link.sender, message.n))
            reply = Reply(message.role, message.shard, message.n, ReplyStatus.OK, message.body)
            self.layer.answer(link, reply)
        elif isinstance(message, Ping):
            self.layer.answer(link, Pong(message.id))

    def on_answers(self, peer: Incarnation, messages: Iterable[ToSender]) -> None:
        self.heard.extend(messages)

    def on_answer(self, peer: Incarnation, message: ToSender) -> None:
        self.heard.append(message)

    def on_link_lost(self, peer: Incarnation, reason: str, unsent: tuple[ToOwner, ...]) -> None:
        self.lost.append(reason)

    def on_disconnected(self, peer: Incarnation) -> None:
        pass

    def on_link_gone(self, link: LinkKey) -> None:
        self.gone.append(link)


class Rogue:
    """A connection that sends what it is told to."""

    def __init__(self, *sends: bytes) -> None:
        self._sends = sends
        self.connection: Connection | None = None
        self.heard: list[bytes] = []
        self.reasons: list[str] = []

    def opened(self, connection: Connection) -> None:
        self.connection = connection
        self.send(*self._sends)

    def send(self, *sends: bytes) -> None:
        assert self.connection is not None
        for data in sends:
            self.connection.send(data)

    def received(self, data: bytes) -> None:
        self.heard.append(data)

    def receiving(self) -> None:
        pass

    def closed(self, reason: str) -> None:
        self.reasons.append(reason)

    def guard(self) -> bool:
        return True


class Lab:
    """A victim, a peer that keeps the rules, and a way in for others."""

    def __init__(self, limits: Settings) -> None:
        self.network = MemoryNetwork()
        self.victim = Process(self.network, "a", limits)
        self.peer = Process(self.network, "b", limits)
        self.way_in = MemoryTransport(self.network)
        self.next = 0

    def attack(self, *sends: bytes) -> Rogue:
        rogue = Rogue(*sends)
        self.way_in.dial(self.victim.layer.address, rogue)
        return rogue

    async def attacks(self, floods: list[list[bytes]]) -> None:
        """Many connections, some at a time; each hears a word or is closed."""
        for at in range(0, len(floods), 100):
            rogues = [self.attack(*sends) for sends in floods[at : at + 100]]
            for rogue in rogues:
                await until(lambda rogue=rogue: rogue.heard or rogue.reasons)  # type: ignore[misc]

    def hello(self, **changes: Any) -> bytes:
        made = Hello("test", ROGUE, self.victim.inc, "x:1", "l", 1, False, 0, 1, 3)
        return encode_packet(msgspec.structs.replace(made, **changes))

    async def served(self, count: int = 5) -> None:
        """The peer's next requests are served, in order."""
        numbers = list(range(self.next + 1, self.next + count + 1))
        self.next += count
        for n in numbers:
            self.peer.ask(self.victim, n)
        await until(lambda: len(replies(self.peer)) >= self.next)
        assert replies(self.peer) == list(range(1, self.next + 1))
        assert [n for sender, n in self.victim.asked if sender == self.peer.inc] == replies(
            self.peer
        )
        assert not self.peer.lost


def replies(process: Process) -> list[int]:
    return [message.n for message in process.heard if isinstance(message, Reply)]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


def run(test: Callable[[Lab], Coroutine[Any, Any, None]], **limits: Any) -> None:
    """Run a test; no callback may fail, and nothing may be left."""
    failures: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, why: failures.append(why))
        lab = Lab(Settings(**limits))
        await lab.victim.start()
        await lab.peer.start()
        lab.victim.known[lab.peer.inc] = None
        try:
            await test(lab)
        finally:
            for process in (lab.victim, lab.peer):
                process.layer.abort()
                await process.transport.close()
            await lab.way_in.close()
        assert not lab.victim.layer._callers
        assert len(lab.victim.layer._lobby) == 0

    asyncio.run(main())
    assert failures == []


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(hostile_bytes | packets.map(encode_packet), max_size=5)),
        min_size=1,
        max_size=4,
    )
)
def test_whatever_comes_others_are_served(attacks: list[tuple[bool, list[bytes]]]) -> None:
    async def test(lab: Lab) -> None:
        await lab.served()
        rogues = [
            lab.attack(*([lab.hello(session=n)] if greets else []), *sends)
            for n, (greets, sends) in enumerate(attacks, 1)
        ]
        await until(lambda: all(rogue.connection for rogue in rogues))
        await lab.served()

    run(test)


@settings(max_examples=60)
@given(st.lists(st.lists(to_owner, min_size=1, max_size=4), max_size=6), st.integers(-2, 3))
def test_frames_of_an_admitted_peer_run_once_and_in_order(
    batches: list[list[ToOwner]], jump: int
) -> None:
    async def test(lab: Lab) -> None:
        frames = [Frame(no, 0, tuple(batch)) for no, batch in enumerate(batches, 1)]
        rogue = lab.attack(
            lab.hello(),
            *map(encode_packet, [frame for frame in frames for _ in range(2)]),
            encode_packet(Frame(max(1, len(frames) + 1 + jump), 0, (Ping(1),))),
        )
        await until(lambda: rogue.heard)
        await lab.served()
        wanted = [m.n for batch in batches for m in batch if isinstance(m, Request)]
        assert [n for sender, n in lab.victim.asked if sender == ROGUE] == wanted
        assert bool(rogue.reasons) == (jump > 0), "a gap closes it, a repetition is ignored"

    run(test)


@pytest.mark.parametrize("greets", [True, False])
@pytest.mark.parametrize("name", NOT_PACKETS)
def test_the_corpus_closes_its_connection_with_a_logged_reason(
    name: str, greets: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(lab: Lab) -> None:
        rogue = lab.attack(*([lab.hello()] if greets else []), NOT_PACKETS[name])
        await until(lambda: rogue.reasons)
        assert lab.victim.meter.counts["link.garbage"] == 1
        assert "it sent no packet" in caplog.text
        await lab.served()

    run(test)


def test_a_flood_of_nonsense_is_counted_in_full_and_logged_in_part(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(lab: Lab) -> None:
        await lab.attacks([[b"nonsense"]] * 1_000)
        assert lab.victim.meter.counts["link.garbage"] == 1_000
        await lab.served()

    with caplog.at_level(logging.WARNING, logger="domicile"):
        run(test)
    assert len(caplog.records) == WARNINGS


def test_strangers_have_a_bounded_number_of_places_and_the_oldest_goes_first() -> None:
    async def test(lab: Lab) -> None:
        await lab.served()
        rogues = [lab.attack() for _ in range(MOST_STRANGERS + 10)]
        await until(lambda: all(rogue.connection for rogue in rogues))
        await until(lambda: rogues[9].reasons)
        assert [bool(rogue.reasons) for rogue in rogues[:12]] == [True] * 10 + [False] * 2
        assert lab.victim.meter.counts["link.crowded"] == 10
        assert len(lab.victim.layer._lobby) == MOST_STRANGERS
        await lab.served()
        greeting = rogues[10]
        greeting.send(lab.hello())
        await until(lambda: greeting.heard)
        assert len(lab.victim.layer._lobby) == MOST_STRANGERS - 1

    run(test)


def test_a_stranger_that_says_nothing_is_sent_away(caplog: pytest.LogCaptureFixture) -> None:
    async def test(lab: Lab) -> None:
        rogue = lab.attack()
        await until(lambda: rogue.reasons)
        assert lab.victim.meter.counts["link.stranger"] == 1

    run(test, link_timeout_s=0.05)
    assert "did not say who it is within 0.05 s" in caplog.text


def test_incarnations_without_a_record_have_a_bounded_number_of_places() -> None:
    async def test(lab: Lab) -> None:
        await lab.served()
        count = MOST_UNREGISTERED + 20
        await lab.attacks([[lab.hello(sender=f"{n:032x}")] for n in range(count)])
        await until(lambda: len(lab.victim.gone) == 20)
        layer = lab.victim.layer
        assert len(layer._doors) == len(layer._in) == MOST_UNREGISTERED + 1
        assert [link.sender for link in lab.victim.gone] == [f"{n:032x}" for n in range(20)]
        assert lab.victim.meter.counts["link.unregistered"] == 20
        await lab.served()

    run(test)


def test_an_incarnation_whose_record_came_meanwhile_keeps_its_place() -> None:
    async def test(lab: Lab) -> None:
        first = lab.attack(lab.hello())
        await until(lambda: first.heard)
        lab.victim.known[ROGUE] = None
        await lab.attacks([[lab.hello(sender=f"{n:032x}")] for n in range(MOST_UNREGISTERED)])
        assert first.reasons == []
        assert lab.victim.gone == []

    run(test)


def test_nobody_else_is_this_incarnation() -> None:
    async def test(lab: Lab) -> None:
        request = Request("default", 0, 1, 1, 1, "counter", "i", "add", b"", True, False, 1.0)
        rogue = lab.attack(
            lab.hello(sender=lab.victim.inc, link="local"), encode_packet(Frame(1, 0, (request,)))
        )
        await until(lambda: rogue.reasons)
        (answer,) = map(decode_packet, rogue.heard)
        assert isinstance(answer, Refused)
        assert "does not dial itself" in answer.reason
        assert lab.victim.asked == []

    run(test)


def test_a_peer_that_takes_no_answers_loses_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MOST_ANSWERS", 2_000)

    async def test(lab: Lab) -> None:
        rogue = lab.attack(lab.hello())
        pings = tuple(Ping(n) for n in range(500))
        for no in range(1, 40):
            await until(lambda: rogue.heard)
            rogue.send(encode_packet(Frame(no, 0, pings)))
            await lab.served(1)
        await until(lambda: rogue.reasons)
        assert lab.victim.meter.counts["link.clogged"] == 1
        assert lab.victim.gone == [LinkKey(ROGUE, "l")]
        late = lab.attack(lab.hello())
        await until(lambda: late.reasons)
        assert late.heard == [], "its session is known as an old one"
        await lab.served()

    run(test, link_frames=4)


def test_a_refusal_repeats_little_of_what_it_refuses() -> None:
    async def test(lab: Lab) -> None:
        rogue = lab.attack(lab.hello(cluster="x\n" * 500))
        await until(lambda: rogue.reasons)
        (data,) = rogue.heard
        assert len(data) < 1_000
        assert b"\n" not in data

    run(test)


def test_what_strangers_brought_is_not_kept() -> None:
    async def test(lab: Lab) -> None:
        nonsense = [b"\x91" * 60_000, b"more"]
        await lab.attacks([[lab.hello(sender=f"{n:032x}"), *nonsense] for n in range(100)])
        await lab.served()
        gc.collect()
        held = [thing for thing in gc.get_objects() if isinstance(thing, Rogue)]
        assert held == []

    run(test)


# compression between two that keep the rules


@pytest.mark.parametrize(("compress_bytes", "saves"), [(1_000, True), (0, False), (10**6, False)])
def test_large_frames_travel_compressed_if_both_want_it(compress_bytes: int, saves: bool) -> None:
    async def test(lab: Lab) -> None:
        body = b"the same again and again; " * 1_000
        for n in range(1, 6):
            lab.peer.ask(lab.victim, n, body)
            await until(lambda n=n: len(replies(lab.peer)) == n)  # type: ignore[misc]
        assert {m.body for m in lab.peer.heard if isinstance(m, Reply)} == {body}
        for process in (lab.peer, lab.victim):
            assert bool(process.meter.counts["link.saved_bytes"]) == saves

    run(test, compress_bytes=compress_bytes)


def test_a_compressed_frame_that_is_none_closes_its_connection() -> None:
    async def test(lab: Lab) -> None:
        small = deflate(encode_packet(Frame(1, 0, (Ping(1),) * 500)))
        assert small is not None
        fine = lab.attack(lab.hello(), small)
        await until(lambda: len(fine.heard) >= 2)
        broken = lab.attack(lab.hello(session=2), Deflated(small[:-1]))
        await until(lambda: broken.reasons)
        assert lab.victim.meter.counts["link.garbage"] == 1
        await lab.served()

    run(test, compress_bytes=100)
