"""TCP against peers that dribble, flood, or send what is no stream of packets (DX-08)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from certificates_lab import Authority
from hostile_lab import NOT_STREAMS
from hypothesis import given, settings
from hypothesis import strategies as st
from tcp_lab import Notes, Recorder, descriptors, framed, on_both_loops, read_all, run, until
from tls_lab import tls_lab

from domicile.transports import tcp_connection
from domicile.transports.addresses import parse
from domicile.transports.compress import Deflated, deflate
from domicile.transports.framing import FIRST_BYTES, header
from domicile.transports.tcp import TcpTransport

STALL_S = 0.1


class Lab:
    """A transport as a node has it, and raw sockets."""

    def __init__(self, stall_s: float) -> None:
        self.notes = Notes()
        self.transport = TcpTransport(first_bytes=FIRST_BYTES, stall_s=stall_s, meter=self.notes)
        self.accepted: list[Recorder] = []
        self.address = ""

    def accept(self) -> Recorder:
        self.accepted.append(Recorder())
        return self.accepted[-1]

    async def call(self, data: bytes) -> tuple[socket.socket, Recorder]:
        """A socket that has sent something, and the handler at the other end."""
        count = len(self.accepted)
        sock = socket.socket()
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, parse(self.address, "")[:2])
        await until(lambda: len(self.accepted) > count)
        await loop.sock_sendall(sock, data)
        return sock, self.accepted[-1]


@asynccontextmanager
async def lab(stall_s: float = STALL_S) -> AsyncIterator[Lab]:
    await asyncio.get_running_loop().getaddrinfo("127.0.0.1", 1)
    before = descriptors()
    made = Lab(stall_s)
    try:
        made.address = await made.transport.listen(made.accept)
        yield made
    finally:
        await made.transport.close()
    assert descriptors() == before


@on_both_loops
@pytest.mark.parametrize("greets", [True, False])
def test_a_packet_that_gets_no_further_ends_its_connection(
    loop: str, greets: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with lab() as made:
            first = framed(b"hello") if greets else b""
            sock, handler = await made.call(first + header(1_000) + b"x" * 10)
            assert await read_all(sock) == b""
            await until(lambda: handler.reasons)
            assert handler.reasons == ["a packet has got no further for 0.1 s"]
            assert made.notes.counts["tcp.stalled"] == 1

    run(loop, body())
    assert "got no further" in caplog.text


@on_both_loops
def test_a_packet_that_gets_on_and_a_silent_peer_are_left_alone(loop: str) -> None:
    async def body() -> None:
        # Long beside the pauses: a busy machine makes those longer, and they are no stall.
        stall_s = 1.5
        async with lab(stall_s) as made:
            sock, handler = await made.call(header(12))
            running = asyncio.get_running_loop()
            with sock:
                for _ in range(12):
                    await running.sock_sendall(sock, b"x")
                    await asyncio.sleep(stall_s / 10)
                await until(lambda: handler.data)
                assert handler.data == [b"x" * 12]
                # Silence between packets is no stall; the link layer has its own view of it.
                await asyncio.sleep(1.2 * stall_s)
                assert handler.reasons == []

    run(loop, body())


@on_both_loops
def test_little_memory_is_set_aside_before_the_first_packet(loop: str) -> None:
    async def body() -> None:
        async with lab() as made:
            sock, handler = await made.call(header(FIRST_BYTES + 1))
            assert await read_all(sock) == b""
            await until(lambda: handler.reasons)
            assert "the first packet announces 65537 bytes" in handler.reasons[0]
            large = b"x" * 1_000_000
            sock, handler = await made.call(framed(b"hello", large))
            await until(lambda: len(handler.data) == 2)
            assert handler.data == [b"hello", large]
            sock.close()

    run(loop, body())


@pytest.mark.parametrize("name", NOT_STREAMS)
def test_no_stream_of_the_corpus_stays_connected(name: str) -> None:
    async def body() -> None:
        async with lab() as made:
            sock, handler = await made.call(NOT_STREAMS[name])
            await until(lambda: handler.reasons or handler.data)
            if handler.data:
                handler.close()
            assert await read_all(sock) == b""

    run("asyncio", body())


@settings(max_examples=40)
@given(st.lists(st.binary(max_size=40), max_size=6))
def test_any_bytes_end_in_packets_or_an_end(pieces: list[bytes]) -> None:
    async def body() -> None:
        async with lab(stall_s=0.01) as made:
            sock, handler = await made.call(b"".join(pieces))
            sock.shutdown(socket.SHUT_WR)
            assert await read_all(sock) == b""
            await until(lambda: handler.reasons)

    run("asyncio", body())


@on_both_loops
def test_closed_connections_that_wait_for_their_peers_are_few(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_connection, "MOST_PARTING", 3)

    async def body() -> None:
        async with lab() as made:
            calls = [await made.call(framed(b"hello")) for _ in range(10)]
            for _, handler in calls:
                await until(lambda handler=handler: handler.data)  # type: ignore[misc]
                handler.close()
            shared = made.transport._shared
            assert len(shared.connections) == len(shared.parting) == 3
            for sock, _ in calls[:7]:
                assert await read_all(sock) == b"", "the oldest waited no longer"
            for sock, _ in calls[7:]:
                sock.close()
            await until(lambda: not shared.connections)
            assert not shared.parting

    run(loop, body())


@on_both_loops
def test_compressed_packets_keep_their_mark_on_the_way(loop: str) -> None:
    async def body() -> None:
        packet = deflate(b"again and again " * 10_000)
        assert packet is not None
        async with lab() as made:
            near = Recorder()
            made.transport.dial(made.address, near)
            await until(lambda: near.connection and made.accepted)
            near.send(b"hello", packet, b"plain", packet)
            await until(lambda: len(made.accepted[0].data) == 4)
            assert made.accepted[0].data == [b"hello", packet, b"plain", packet]
            kinds = [type(data) for data in made.accepted[0].data]
            assert kinds == [bytes, Deflated, bytes, Deflated]

    run(loop, body())


@on_both_loops
def test_handshakes_that_do_not_end_are_few(
    loop: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tcp_connection, "MOST_OF_ONE_HOST", 3)
    files = Authority(tmp_path / "ours").issue("one")

    async def body() -> None:
        async with tls_lab(files, files) as made:
            context = files.certificates.contexts.dialling
            silent = [await made.knock(context) for _ in range(5)]
            for raw in silent[:2]:
                assert await raw.read_all() == b"", "the oldest went first"
            shared = made.far._shared
            assert len(shared.connections) == len(shared.shaking) == 3
            assert made.notes.counts["tls.crowded"] == 2
            shaken, _ = await made.shake(files)
            assert len(shared.shaking) == 2, "one more went, and that one shook hands"
            for raw in (*silent, shaken):
                raw.sock.close()
            await until(lambda: not shared.connections)
            assert len(shared.shaking) == 0

    run(loop, body())
