"""The contract of transports, on each that is shipped."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from domicile.ports.transport import Connection, ConnectionHandler, Transport
from domicile.testing.suites.transport import TransportContract, TransportMaker
from domicile.transports.memory import MemoryNetwork, MemoryTransport
from domicile.transports.tcp import TcpTransport


@asynccontextmanager
async def all_closed(made: list[Transport]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for one in made:
            await one.close()


class TestMemory(TransportContract):
    @asynccontextmanager
    async def open(self) -> AsyncIterator[TransportMaker]:
        network, made = MemoryNetwork(), list[Transport]()

        def make() -> Transport:
            made.append(MemoryTransport(network))
            return made[-1]

        async with all_closed(made):
            yield make


class TestTcp(TransportContract):
    @asynccontextmanager
    async def open(self) -> AsyncIterator[TransportMaker]:
        made = list[Transport]()

        def make() -> Transport:
            made.append(TcpTransport())
            return made[-1]

        async with all_closed(made):
            yield make


class BrokenConnection:
    """Breaks its promise in one way."""

    def __init__(self, sound: Connection, handler: ConnectionHandler, how: str) -> None:
        self._sound, self._handler, self._how = sound, handler, how
        self._sent = 0
        self._kept: list[bytes] = []

    def send(self, data: bytes) -> None:
        self._sent += 1
        if self._how == "doubles" and self._sent == 7:
            self._sound.send(data)
        if self._how == "overtakes":
            # Two by two, the second one first.
            self._kept.append(data)
            if len(self._kept) == 2:
                self._sound.send(self._kept.pop())
                self._sound.send(self._kept.pop())
        elif not (self._how == "loses" and self._sent == 9):
            self._sound.send(data)

    def close(self) -> None:
        self._sound.close()
        if self._how == "tells the closer":
            self._handler.closed("closed here")


class BrokenHandler:
    """Hands a broken connection on."""

    def __init__(self, handler: ConnectionHandler, how: str) -> None:
        self._handler, self._how = handler, how
        self.received, self.receiving = handler.received, handler.receiving
        self.guard = handler.guard

    def opened(self, connection: Connection) -> None:
        self._handler.opened(BrokenConnection(connection, self._handler, self._how))

    def closed(self, reason: str) -> None:
        if self._how != "tells no end":
            self._handler.closed("" if self._how == "gives no reason" else reason)


class BrokenTransport:
    def __init__(self, network: MemoryNetwork, how: str) -> None:
        self._sound, self._how = MemoryTransport(network), how

    async def listen(self, accept: Callable[[], ConnectionHandler]) -> str:
        return await self._sound.listen(lambda: BrokenHandler(accept(), self._how))

    def dial(self, address: str, handler: ConnectionHandler) -> None:
        self._sound.dial(address, BrokenHandler(handler, self._how))

    async def close(self) -> None:
        await self._sound.close()


@pytest.mark.parametrize(
    ("how", "scenario"),
    [
        ("doubles", "test_packets_of_all_sizes_come_back_in_order"),
        ("overtakes", "test_packets_of_all_sizes_come_back_in_order"),
        ("loses", "test_what_is_sent_before_a_close_arrives_before_the_end"),
        ("loses", "test_what_arrives_is_a_beginning_whatever_the_guard_says"),
        ("tells the closer", "test_what_is_sent_before_a_close_arrives_before_the_end"),
        ("gives no reason", "test_dialling_nobody_is_told"),
        ("tells no end", "test_closing_a_transport_tells_only_the_peers"),
    ],
)
def test_a_broken_transport_is_found(how: str, scenario: str) -> None:
    class Broken(TransportContract):
        patience_s = 1.0

        @asynccontextmanager
        async def open(self) -> AsyncIterator[TransportMaker]:
            network, made = MemoryNetwork(), list[Transport]()

            def make() -> Transport:
                made.append(BrokenTransport(network, how))
                return made[-1]

            async with all_closed(made):
                yield make

    with pytest.raises((AssertionError, TimeoutError)):
        getattr(Broken(), scenario)()
