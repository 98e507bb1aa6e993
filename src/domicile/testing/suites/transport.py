"""What every transport must do: the contract of `domicile.ports.transport.Transport`.

For authors of transports: derive `class TestMine(TransportContract)` and define `open`. It yields a
function that makes one more transport; all of them reach each other, and all are closed when it
ends. Links number, acknowledge and resume what connections carry, so a connection may end at any
time. What it must not do is lose, double or reorder packets before its end.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from random import Random
from typing import Any

from domicile.ports.transport import Connection, Transport

MIB = 1 << 20

TransportMaker = Callable[[], Transport]


class HeardPackets:
    """One end of a connection, and what it has heard. `guard` answers what `may_send` is."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.packets: list[bytes] = []
        self.ends: list[str] = []
        self.may_send = True

    def opened(self, connection: Connection) -> None:
        """As `ConnectionHandler.opened`."""
        assert self.connection is None, "opened twice"
        assert not self.ends, "opened after its end"
        self.connection = connection

    def received(self, data: bytes) -> None:
        """As `ConnectionHandler.received`."""
        assert self.connection is not None, "a packet before the connection is open"
        assert not self.ends, "a packet after the end"
        self.packets.append(data)

    def receiving(self) -> None:
        """As `ConnectionHandler.receiving`."""

    def closed(self, reason: str) -> None:
        """As `ConnectionHandler.closed`."""
        assert not self.ends, "closed twice"
        self.ends.append(reason)

    def guard(self) -> bool:
        """As `ConnectionHandler.guard`."""
        return self.may_send

    def send(self, *packets: bytes) -> None:
        """Send packets in one turn of the loop."""
        assert self.connection is not None
        for packet in packets:
            self.connection.send(packet)

    def close(self) -> None:
        """Close this end."""
        assert self.connection is not None
        self.connection.close()


class Answering(HeardPackets):
    """Sends back what it hears."""

    def received(self, data: bytes) -> None:
        """As `ConnectionHandler.received`."""
        super().received(data)
        self.send(data)


class HangsUp(HeardPackets):
    """Closes with its third packet."""

    def received(self, data: bytes) -> None:
        """As `ConnectionHandler.received`."""
        super().received(data)
        if len(self.packets) == 3:
            self.close()


class TransportContract(ABC):
    """Derive from it and define `open`."""

    patience_s = 60.0
    """Seconds that a scenario waits for anything."""

    @abstractmethod
    def open(self) -> AbstractAsyncContextManager[TransportMaker]:
        """Yield what makes transports that reach each other."""

    def _run(self, scenario: Callable[[TransportMaker], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(self.patience_s), self.open() as make:
                await scenario(make)

        asyncio.run(main())

    def test_packets_of_all_sizes_come_back_in_order(self) -> None:
        async def scenario(make: TransportMaker) -> None:
            random = Random(1)
            sizes = [0, 1, 4, 16_383, 16_384, 65_535, 65_536, MIB, 0, *range(300)]
            random.shuffle(sizes)
            packets = [random.randbytes(size) for size in sizes]
            near, _ = await connected(make(), make(), Answering)
            near.send(*packets)
            await until(lambda: len(near.packets) == len(packets))
            assert near.packets == packets

        self._run(scenario)

    def test_nothing_is_told_within_a_call(self) -> None:
        """Callers hold what handlers would change."""

        async def scenario(make: TransportMaker) -> None:
            one, other = make(), make()
            address = await other.listen(HeardPackets)
            near = HeardPackets()
            one.dial(address, near)
            assert near.connection is None
            assert not near.ends
            await until(lambda: near.connection)
            near, far = await connected(one, make())
            near.send(b"1")
            assert not far.packets
            near.close()
            assert not far.ends
            await until(lambda: far.ends)

        self._run(scenario)

    def test_what_is_sent_before_a_close_arrives_before_the_end(self) -> None:
        async def scenario(make: TransportMaker) -> None:
            near, far = await connected(make(), make())
            packets = [b"%d" % number * 1_000 for number in range(200)]
            near.send(*packets)
            near.close()
            near.send(b"after the close")
            near.close()
            await until(lambda: far.ends)
            assert far.packets == packets
            assert len(far.ends) == 1
            assert far.ends[0], "a reason"
            assert not near.ends, "it closed the connection itself"
            far.send(b"to nobody")
            far.close()

        self._run(scenario)

    def test_a_handler_that_closes_hears_no_more(self) -> None:
        async def scenario(make: TransportMaker) -> None:
            near, far = await connected(make(), make(), HangsUp)
            near.send(*[b"%d" % number for number in range(100)])
            await until(lambda: near.ends)
            assert far.packets == [b"0", b"1", b"2"]

        self._run(scenario)

    def test_what_arrives_is_a_beginning_whatever_the_guard_says(self) -> None:
        """L3: once the guard fails, what waits is dropped. No later packet may take its place."""

        async def scenario(make: TransportMaker) -> None:
            near, far = await connected(make(), make())
            packets = [bytes([number]) * MIB for number in range(16)]
            near.send(*packets)
            near.may_send = False
            await until(lambda: far.ends or len(far.packets) == len(packets))
            near.may_send = True
            near.send(b"late")
            near.close()
            await until(lambda: far.ends)
            assert far.packets == [*packets, b"late"][: len(far.packets)]

        self._run(scenario)

    def test_dialling_nobody_is_told(self) -> None:
        async def scenario(make: TransportMaker) -> None:
            gone = make()
            address = await gone.listen(HeardPackets)
            await gone.close()
            near = HeardPackets()
            make().dial(address, near)
            assert not near.ends
            await until(lambda: near.ends)
            assert near.ends[0], "a reason"
            assert near.connection is None

        self._run(scenario)

    def test_closing_a_transport_tells_only_the_peers(self) -> None:
        async def scenario(make: TransportMaker) -> None:
            one, other = make(), make()
            near, far = await connected(one, other)
            far.send(b"last")
            await other.close()
            await other.close()
            await until(lambda: near.ends)
            assert near.packets == [b"last"]
            assert not far.ends
            far.send(b"nothing")
            far.close()
            await one.close()
            silent = HeardPackets()
            one.dial("anything", silent)
            await asyncio.sleep(0)
            assert not silent.ends

        self._run(scenario)

    def test_connections_are_kept_apart(self) -> None:
        """Also those of two addresses, and both ways at once."""

        async def scenario(make: TransportMaker) -> None:
            listening, dialling = [make(), make()], [make() for _ in range(3)]
            addresses = [await one.listen(Answering) for one in listening]
            assert len({*addresses}) == 2
            ends: dict[HeardPackets, bytes] = {}
            for number, one in enumerate(dialling):
                for address in addresses:
                    for _ in range(4):
                        near = HeardPackets()
                        ends[near] = b"%d-%d" % (number, len(ends))
                        one.dial(address, near)
            await until(lambda: all(near.connection for near in ends))
            for _ in range(50):
                for near, word in ends.items():
                    near.send(word)
            await until(lambda: all(len(near.packets) == 50 for near in ends))
            assert all(near.packets == [word] * 50 for near, word in ends.items())

        self._run(scenario)


async def connected(
    one: Transport, other: Transport, kind: Callable[[], HeardPackets] = HeardPackets
) -> tuple[HeardPackets, HeardPackets]:
    """Both ends of a connection from one transport to the other: the dialling one first."""
    accepted: list[HeardPackets] = []

    def accept() -> HeardPackets:
        accepted.append(kind())
        return accepted[-1]

    near = HeardPackets()
    one.dial(await other.listen(accept), near)
    await until(lambda: near.ends or (near.connection and accepted and accepted[0].connection))
    assert not near.ends, near.ends[0]
    return near, accepted[0]


async def until(condition: Callable[[], object]) -> None:
    """Turn the loop until something holds."""
    while not condition():  # noqa: ASYNC110  connections have no event of their own
        await asyncio.sleep(0.001)
