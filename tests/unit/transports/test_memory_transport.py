"""Connections within one process, on a real event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from random import Random

from domicile.core.ids import Incarnation, LinkKey, new_incarnation
from domicile.core.wire import Ping, Pong, ToOwner, ToSender
from domicile.links.layer import LinkLayer
from domicile.membership.clock import SystemClock
from domicile.ports.meter import NoMeter
from domicile.ports.transport import Connection, Peer
from domicile.settings import Settings
from domicile.transports.memory import MemoryNetwork, MemoryTransport


class Recorder:
    def __init__(self) -> None:
        self.opening: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        self.closing: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.data: list[bytes] = []

    def opened(self, connection: Connection) -> None:
        self.opening.set_result(connection)

    def received(self, data: bytes) -> None:
        assert self.opening.done(), "a packet before the connection stands"
        self.data.append(data)

    def receiving(self) -> None:
        pass

    def closed(self, reason: str) -> None:
        self.closing.set_result(reason)

    def guard(self) -> bool:
        return True


class Greeter(Recorder):
    """Speaks as soon as the connection stands."""

    def opened(self, connection: Connection) -> None:
        super().opened(connection)
        connection.send(b"welcome")


async def pair(
    network: MemoryNetwork,
) -> tuple[MemoryTransport, Recorder, MemoryTransport, Recorder]:
    near, far = MemoryTransport(network), MemoryTransport(network)
    accepted: list[Recorder] = []

    def accept() -> Recorder:
        accepted.append(Greeter())
        return accepted[-1]

    dialler = Recorder()
    near.dial(await far.listen(accept), dialler)
    await dialler.opening
    return near, dialler, far, accepted[0]


async def body_in_order_then_closed() -> None:
    _, dialler, _, accepted = await pair(MemoryNetwork())
    connection = dialler.opening.result()
    for number in range(5):
        connection.send(b"%d" % number)
    assert accepted.data == [], "never inside send"
    connection.close()
    connection.send(b"never")
    assert await accepted.closing == "closed by the peer"
    assert accepted.data == [b"%d" % number for number in range(5)]
    assert not dialler.closing.done()


async def body_nobody_listens() -> None:
    network = MemoryNetwork()
    transport = MemoryTransport(network)
    handler = Recorder()
    transport.dial("memory:7", handler)
    assert not handler.closing.done()
    assert await handler.closing == "nobody listens at memory:7"


async def body_closing_a_transport() -> None:
    network = MemoryNetwork()
    near, dialler, far, accepted = await pair(network)
    await far.close()
    assert await dialler.closing == "closed by the peer"
    assert not accepted.closing.done()
    again = Recorder()
    near.dial("memory:1", again)
    await again.closing
    await near.close()
    near.dial("memory:1", Recorder())


async def body_dial_meets_a_closing_listener() -> None:
    network = MemoryNetwork()
    near, far = MemoryTransport(network), MemoryTransport(network)
    handler = Recorder()
    near.dial(await far.listen(Recorder), handler)
    await far.close()
    assert "any more" in await handler.closing


class Heard:
    """Answers pings; says when all pongs came."""

    def __init__(self) -> None:
        self.layer: LinkLayer | None = None
        self.done = asyncio.get_running_loop().create_future()
        self.pongs: list[int] = []

    def on_requests(self, link: LinkKey, messages: Iterator[ToOwner]) -> None:
        for message in messages:
            self.on_request(link, message)

    def on_answers(self, peer: Incarnation, messages: Iterator[ToSender]) -> None:
        for message in messages:
            self.on_answer(peer, message)

    def on_request(self, link: LinkKey, message: ToOwner) -> None:
        assert self.layer is not None
        assert isinstance(message, Ping)
        self.layer.answer(link, Pong(message.id))

    def on_answer(self, peer: Incarnation, message: ToSender) -> None:
        assert isinstance(message, Pong)
        self.pongs.append(message.id)
        if len(self.pongs) == 100:
            self.done.set_result(None)

    def on_link_lost(self, peer: Incarnation, reason: str, unsent: tuple[ToOwner, ...]) -> None:
        raise AssertionError(reason)

    def on_disconnected(self, peer: Incarnation) -> None:
        pass

    def on_link_gone(self, link: LinkKey) -> None:
        raise AssertionError(link)


async def body_links() -> None:
    network, random = MemoryNetwork(), Random(1)
    layers: list[LinkLayer] = []
    sides: list[Heard] = []
    for _ in range(2):
        transport, events = MemoryTransport(network), Heard()
        layer = LinkLayer(
            transport,
            SystemClock(),
            Settings(),
            random,
            NoMeter(),
            new_incarnation(random),
            "c",
            "",
            lambda: True,
            events,
        )
        layer.address = await transport.listen(layer.accept)
        events.layer = layer
        layers.append(layer)
        sides.append(events)
    for number in range(100):
        layers[0].send(Peer(layers[1].me, layers[1].address), Ping(number))
    async with asyncio.timeout(5):
        await sides[0].done
    assert sides[0].pongs == list(range(100))
    for layer in layers:
        layer.abort()


async def body_two_loops() -> None:
    """The accepting side may live in another thread."""
    network = MemoryNetwork()
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    here = asyncio.get_running_loop()
    stop = threading.Event()
    got: list[bytes] = []

    class Echo:
        def opened(self, connection: Connection) -> None:
            self.connection = connection

        def received(self, data: bytes) -> None:
            got.append(data)
            self.connection.send(data)

        def receiving(self) -> None:
            pass

        def closed(self, reason: str) -> None:
            stop.set()

        def guard(self) -> bool:
            return True

    async def elsewhere() -> None:
        address = await MemoryTransport(network).listen(Echo)
        here.call_soon_threadsafe(ready.set_result, address)
        await asyncio.to_thread(stop.wait, 5)

    thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
    thread.start()

    class Near(Recorder):
        def received(self, data: bytes) -> None:
            super().received(data)
            if len(self.data) == 2:
                self.opening.result().close()
                self.closing.set_result("done")

    near = Near()
    MemoryTransport(network).dial(await ready, near)
    connection = await near.opening
    connection.send(b"1")
    connection.send(b"2")
    async with asyncio.timeout(5):
        await near.closing
    await asyncio.to_thread(thread.join)
    assert near.data == got == [b"1", b"2"]


def test_packets_arrive_in_order_and_then_the_end() -> None:
    asyncio.run(body_in_order_then_closed())


def test_dialling_nobody_fails_in_a_later_turn() -> None:
    asyncio.run(body_nobody_listens())


def test_closing_a_transport_tells_only_the_peers() -> None:
    asyncio.run(body_closing_a_transport())


def test_a_dial_that_meets_a_closing_listener_fails() -> None:
    asyncio.run(body_dial_meets_a_closing_listener())


def test_links_work_on_a_real_event_loop() -> None:
    asyncio.run(body_links())


def test_ends_may_live_on_different_loops() -> None:
    asyncio.run(body_two_loops())
