"""Connections over TCP: packets both ways, whatever the kernel takes at a time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from random import Random

import pytest
from tcp_lab import (
    Echo,
    Recorder,
    framed,
    lab,
    on_both_loops,
    read_all,
    read_on,
    run,
    until,
)

from domicile.ports.transport import Connection
from domicile.transports import tcp_connection
from domicile.transports.framing import FrameDecoder
from domicile.transports.tcp import TcpTransport

MIB = 1024 * 1024


def packets_of(random: Random, sizes: list[int]) -> list[bytes]:
    return [random.randbytes(size) for size in sizes]


@on_both_loops
def test_packets_of_all_sizes_come_back_in_order(loop: str) -> None:
    async def body() -> None:
        random = Random(1)
        edges = [0, 1, 3, 4, 5, 100, 16383, 16384, 16385, 65535, 65536, 65537, MIB, 5 * MIB, 0]
        packets = packets_of(random, edges + [random.randrange(300) for _ in range(3000)])
        random.shuffle(packets)
        async with lab(Echo) as made:
            near = await made.dial()
            left = list(packets)
            while left:
                batch = [left.pop(0) for _ in range(min(len(left), random.choice([1, 2, 50])))]
                near.send(*batch)
                await asyncio.sleep(0)
            await until(lambda: len(near.data) == len(packets))
            assert near.data == packets
            assert all(type(packet) is bytes for packet in near.data)

    run(loop, body())


@on_both_loops
def test_a_slow_reader_gets_everything(loop: str) -> None:
    async def body() -> None:
        random = Random(2)
        packets = packets_of(random, [3 * MIB, 0, 70_000] + [random.randrange(500)] * 2000)
        async with lab() as made:
            sock, far = await made.call(receive_bytes=8192)
            far.send(*packets)
            far.close()
            decoder, found = FrameDecoder(), list[bytes]()
            with sock:
                while piece := await read_on(sock, random.randrange(1, 200_000)):
                    found.extend(decoder.feed(piece))
            assert found == packets
            assert len(made.notes.handed) > 3, "the kernel took it in parts"
            assert sum(made.notes.handed) == len(framed(*packets))

    run(loop, body())


@on_both_loops
def test_packets_of_one_turn_leave_in_two_calls(loop: str) -> None:
    async def body() -> None:
        async with lab() as made:
            near = await made.dial()
            near.send(*[b"x" * 10] * 100)
            assert made.notes.handed == [14], "the first one leaves at once"
            await until(lambda: len(made.accepted[0].data) == 100)
            assert made.notes.handed == [14, 99 * 14]
            near.send(b"y")
            assert made.notes.handed[2:] == [5], "a new turn"

    run(loop, body())


@on_both_loops
def test_a_word_directly_before_the_close_arrives(loop: str) -> None:
    """Also when this end has not read all that it was sent, which would make a reset."""

    class Refuser(Recorder):
        def received(self, data: bytes) -> None:
            self.send(b"refused", b"for good")
            self.close()
            self.send(b"never")

    async def body() -> None:
        async with lab(Refuser) as made:
            near = await made.dial()
            near.send(*[b"hello"] * 20_000)
            await until(lambda: near.reasons)
            assert near.data == [b"refused", b"for good"]
            assert near.reasons == ["closed by the peer"]
            await until(lambda: not made.far._shared.connections)
            assert made.accepted[0].reasons == [], "it closed the connection itself"

    run(loop, body())


@on_both_loops
def test_a_closed_connection_does_not_wait_forever(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_connection, "PARTING_S", 0.05)

    async def body() -> None:
        async with lab() as made:
            idle, far_idle = await made.call()
            stuck, far_stuck = await made.call(receive_bytes=8192)
            far_stuck.send(b"x" * 16 * MIB)
            far_stuck.close()
            far_idle.close()
            assert len(made.far._shared.connections) == 2
            await until(lambda: not made.far._shared.connections)
            assert far_stuck.reasons == far_idle.reasons == []
            idle.close()
            stuck.close()

    run(loop, body())


@on_both_loops
def test_a_full_connection_sends_what_waits_and_ends(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_connection, "MAX_WAITING_BYTES", 20 * MIB)

    async def body() -> None:
        async with lab() as made:
            sock, far = await made.call(receive_bytes=8192)
            packets = [bytes([number]) * MIB for number in range(64)]
            far.send(*packets)
            assert far.reasons == [], "never inside send"
            found = await read_all(sock)
            assert 20 * MIB - MIB < len(found) < 64 * MIB
            assert found == framed(*packets)[: len(found)]
            assert not len(found) % (MIB + 4), "whole packets only"
            await until(lambda: far.reasons)
            assert "wait for" in far.reasons[0]
            assert made.notes.counts["tcp.full"] == 1

    run(loop, body())


@on_both_loops
def test_a_single_packet_is_never_too_much_to_wait(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_connection, "MAX_WAITING_BYTES", MIB)

    async def body() -> None:
        async with lab() as made:
            sock, far = await made.call(receive_bytes=8192)
            packet = Random(4).randbytes(16 * MIB)
            far.send(packet)
            far.close()
            assert await read_all(sock) == framed(packet)
            assert far.reasons == []

    run(loop, body())


@on_both_loops
def test_a_full_connection_that_nobody_reads_is_closed(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_connection, "MAX_WAITING_BYTES", 20 * MIB)
    monkeypatch.setattr(tcp_connection, "FULL_S", 0.05)

    async def body() -> None:
        async with lab() as made:
            sock, far = await made.call(receive_bytes=8192)
            far.send(b"x" * 16 * MIB, b"x" * 16 * MIB)
            await until(lambda: far.reasons)
            assert "wait for" in far.reasons[0]
            sock.close()

    run(loop, body())


@on_both_loops
def test_garbage_closes_its_connection_with_a_reason(loop: str) -> None:
    async def body() -> None:
        async with lab() as made:
            sock, far = await made.call()
            sock.send(framed(b"fine") + b"GET / HTTP/1.1\r\n\r\n")
            assert await read_all(sock) == b""
            assert far.data == [b"fine"]
            assert "another protocol" in far.reasons[0]
            assert made.notes.counts["tcp.garbage"] == 1

    run(loop, body())


@on_both_loops
def test_a_stream_that_ends_within_a_packet_says_so(loop: str) -> None:
    async def body() -> None:
        async with lab() as made:
            sock, far = await made.call()
            sock.send(framed(b"fine", b"cut off")[:-2])
            sock.close()
            await until(lambda: far.reasons)
            assert far.data == [b"fine"]
            assert far.reasons == ["closed by the peer in the middle of a packet"]

    run(loop, body())


@on_both_loops
def test_a_packet_beyond_the_limit_is_not_sent(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with lab() as made:
            made.near = TcpTransport(max_frame_bytes=1000)
            near = await made.dial()
            near.send(b"x" * 1000, b"x" * 1001, b"x")
            assert near.reasons == [], "never inside send"
            await until(lambda: made.accepted[0].reasons)
            assert "raise max_frame_bytes" in near.reasons[0]
            assert made.accepted[0].data == [b"x" * 1000]

    run(loop, body())
    assert "raise max_frame_bytes" in caplog.text


class Fragile(Recorder):
    """Fails where it is told to."""

    def __init__(self, where: str = "received") -> None:
        super().__init__()
        self._where = where

    def opened(self, connection: Connection) -> None:
        super().opened(connection)
        if self._where == "opened":
            raise LookupError("opened")

    def received(self, data: bytes) -> None:
        super().received(data)
        if data == b"poison":
            raise LookupError("received")

    def receiving(self) -> None:
        pass

    def closed(self, reason: str) -> None:
        super().closed(reason)
        raise LookupError("closed")


@on_both_loops
def test_a_handler_that_fails_loses_its_own_connection_only(
    loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with lab(Fragile) as made:
            first, second = await made.dial(), await made.dial()
            first.send(b"fine", b"poison", b"late")
            await until(lambda: first.reasons)
            second.send(b"fine")
            await until(lambda: made.accepted[1].data)
            assert made.accepted[0].data == [b"fine", b"poison"]
            assert made.accepted[0].reasons == ["its handler failed: LookupError('received')"]
            assert "a handler of the connection with 127.0.0.1:" in caplog.text
            made.near.dial(made.address, failing := Fragile("opened"))
            await until(lambda: failing.reasons)
            assert "opened" in failing.reasons[0]

    run(loop, body())


@on_both_loops
def test_an_acceptor_that_fails_turns_the_caller_away(
    loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    fails = [True, False]

    def accept() -> Recorder:
        if fails.pop(0):
            raise LookupError("no handler")
        return Recorder()

    async def body() -> None:
        async with lab(accept) as made:
            turned_away = Recorder()
            made.near.dial(made.address, turned_away)
            await until(lambda: turned_away.reasons)
            await made.dial()

    run(loop, body())
    assert "no handler could be made for the connection from 127.0.0.1:" in caplog.text


@on_both_loops
@pytest.mark.parametrize("what", ["connection", "transport"])
def test_a_handler_may_close_in_the_middle_of_a_batch(loop: str, what: str) -> None:
    async def body() -> None:
        async with lab() as made:

            class Closer(Recorder):
                def received(self, data: bytes) -> None:
                    super().received(data)
                    if len(self.data) == 3:
                        if what == "connection":
                            self.close()
                        else:
                            with contextlib.suppress(StopIteration):
                                made.far.close().send(None)

            made._accept = Closer
            near = await made.dial()
            near.send(*[b"x"] * 10)
            await until(lambda: near.reasons)
            assert len(made.accepted[0].data) == 3
            assert made.accepted[0].reasons == []

    run(loop, body())


@on_both_loops
def test_a_busy_peer_does_not_starve_the_others(loop: str) -> None:
    async def body() -> None:
        async with lab() as made:
            busy, far_busy = await made.call()
            calm, far_calm = await made.call()
            flood, sent = framed(b"x" * 100) * 1000, 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    sent += busy.send(flood)
            calm.send(framed(b"me too"))
            assert sent > 4 * tcp_connection.READ_BYTES, "the kernel holds several turns' worth"
            await until(lambda: far_calm.data)
            assert len(far_busy.data) < sent // 104 // 2
            busy.close()
            calm.close()

    run(loop, body())


@on_both_loops
def test_closing_a_transport_tells_only_the_peers(loop: str) -> None:
    async def body() -> None:
        async with lab() as made:
            near = await made.dial()
            made.accepted[0].send(b"last", b"words")
            await made.far.close()
            await made.far.close()
            await until(lambda: near.reasons)
            assert near.data == [b"last", b"words"]
            assert made.accepted[0].reasons == []
            made.accepted[0].send(b"nothing")
            made.accepted[0].close()
            again = Recorder()
            made.near.dial(made.address, again)
            await until(lambda: again.reasons)
            await made.near.close()
            made.near.dial(made.address, silent := Recorder())
            await asyncio.sleep(0.01)
            assert silent.reasons == []

    run(loop, body())


@on_both_loops
def test_a_reset_is_told_after_the_packets_before_it(loop: str) -> None:
    """Sending into a broken connection does not hide what the peer said before."""

    async def body() -> None:
        async with lab() as made:
            sock, far = await made.call()
            sock.send(framed(b"one", b"two"))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, tcp_connection._RESET)
            sock.close()
            far.send(b"into the void")
            far.send(b"and again")
            await until(lambda: far.reasons)
            assert far.data == [b"one", b"two"]

    run(loop, body())


@on_both_loops
def test_reconnect_storms_leave_nothing_behind(loop: str) -> None:
    async def body() -> None:
        random = Random(3)
        async with lab(Echo) as made:
            diallers: list[Recorder] = []
            for _ in range(300):
                near = Recorder()
                made.near.dial(made.address, near)
                diallers.append(near)
                for handler in random.sample(diallers, min(3, len(diallers))):
                    if handler.connection is not None:
                        handler.send(b"x" * random.choice([1, 100_000]))
                        random.choice([handler, *made.accepted[-3:]]).close()
                if random.random() < 0.5:
                    await asyncio.sleep(0)
            await until(lambda: all(near.connection or near.reasons for near in diallers))
            for near in diallers:
                near.close()
            await until(lambda: not made.near._shared.connections)
            await until(lambda: not made.far._shared.connections)

    run(loop, body())
