"""Connections under TLS: certificates at both ends, and everything that plain ones do."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from pathlib import Path

import pytest
from certificates_lab import Authority, Files
from tcp_lab import Echo, Recorder, framed, on_both_loops, run, until
from tls_lab import tls_lab

from domicile.transports import tls_connection
from domicile.transports.addresses import parse
from domicile.transports.tcp import TcpTransport

MIB = 1024 * 1024


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def files(authority: Authority) -> tuple[Files, Files]:
    return authority.issue("one"), authority.issue("two")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Authority(tmp_path_factory.mktemp("tls") / "theirs").issue("stranger")


@on_both_loops
def test_packets_of_all_sizes_go_both_ways_in_order(loop: str, files: tuple[Files, Files]) -> None:
    sizes = [0, 1, 100, 16_384, 16_385, 65_536, 300_000, 5 * MIB, 0, 7]
    packets = [bytes([number]) * size for number, size in enumerate(sizes)]

    async def body() -> None:
        async with tls_lab(*files, Echo) as made:
            near = await made.dial()
            near.send(*packets)
            await until(lambda: len(near.data) == len(packets))
            assert near.data == packets
            near.send(*packets[:3])
            await until(lambda: len(near.data) == len(packets) + 3)
            near.close()
            await until(lambda: made.accepted[0].reasons)
            assert made.accepted[0].reasons == ["closed by the peer"]

    run(loop, body())


@on_both_loops
def test_what_was_sent_before_a_close_arrives(loop: str, files: tuple[Files, Files]) -> None:
    async def body() -> None:
        async with tls_lab(*files) as made:
            near = await made.dial()
            near.send(b"a" * 20 * MIB, b"b")
            near.close()
            far = made.accepted[0]
            await until(lambda: far.reasons)
            assert [len(packet) for packet in far.data] == [20 * MIB, 1]

    run(loop, body())


def test_nothing_travels_in_the_clear(files: tuple[Files, Files]) -> None:
    async def body() -> None:
        async with tls_lab(*files) as made:
            raw, far = await made.shake(files[1])
            assert raw.tls.version() == "TLSv1.3"
            far.send(b"the secret of the cluster")
            before = raw.came
            piece = await asyncio.get_running_loop().sock_recv(raw.sock, 4096)
            assert len(piece) > len(b"the secret of the cluster")
            assert b"secret" not in piece
            assert raw.came == before
            raw.sock.close()

    run("asyncio", body())


def test_packets_of_one_turn_are_encrypted_together(files: tuple[Files, Files]) -> None:
    async def body() -> None:
        async with tls_lab(*files) as made:
            near = await made.dial()
            before = len(made.notes.handed)
            near.send(*[b"x" * 100] * 50)
            await until(lambda: len(made.accepted[0].data) == 50)
            first, rest = made.notes.handed[before:]
            assert first < 200
            assert 49 * 104 < rest < 49 * 104 + 100, "one record, not one for each packet"

    run("asyncio", body())


# strangers


@on_both_loops
def test_a_certificate_of_another_authority_is_refused(
    loop: str, files: tuple[Files, Files], foreign: Files, caplog: pytest.LogCaptureFixture
) -> None:
    """Both ways: neither end believes the other, and no handler sees a connection."""

    async def body() -> None:
        async with tls_lab(files[0], foreign) as made:
            near = Recorder()
            made.near.dial(made.address, near)
            await until(lambda: near.reasons and made.accepted and made.accepted[0].reasons)
            assert near.connection is None
            assert made.accepted[0].connection is None
            assert "certificate of the peer is not accepted" in near.reasons[0]
            assert made.notes.counts["tls.failed"] == made.notes.counts["tls.refused"] == 1

    run(loop, body())
    assert "tls_ca of one authority" in caplog.text


@on_both_loops
def test_a_stranger_that_trusts_this_end_is_refused_all_the_same(
    loop: str, authority: Authority, files: tuple[Files, Files], foreign: Files
) -> None:
    """Its own certificate counts, and it learns the reason although it sent a packet already."""

    async def body() -> None:
        async with tls_lab(files[0], foreign._replace(ca=authority.cert)) as made:
            near = Recorder()
            made.near.dial(made.address, near)
            await until(lambda: near.connection)
            near.send(b"let me in")
            await until(lambda: near.reasons)
            assert "authority is unknown there" in near.reasons[0]
            await until(lambda: made.accepted[0].reasons)
            assert made.accepted[0].connection is None
            assert made.accepted[0].data == []

    run(loop, body())


@on_both_loops
@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2])
def test_a_stranger_without_a_certificate_is_refused(
    loop: str, newest: ssl.TLSVersion, files: tuple[Files, Files]
) -> None:
    async def body() -> None:
        async with tls_lab(*files) as made:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            context.maximum_version = newest
            raw = await made.knock(context)
            with suppress(ssl.SSLError):
                # The newer version lets a dialler speak before it is refused.
                await raw.shake()
                await raw.send(framed(b"let me in"))
            assert await raw.read_all() == b""
            await until(lambda: made.accepted and made.accepted[0].reasons)
            assert made.accepted[0].connection is None
            assert made.notes.counts["tls.refused"] == 1

    run(loop, body())


def test_an_old_version_of_tls_is_refused(files: tuple[Files, Files]) -> None:
    for context in files[0].certificates.contexts[:2]:
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
        assert context.verify_mode == ssl.CERT_REQUIRED


@on_both_loops
def test_plain_and_secured_ends_do_not_understand_each_other(
    loop: str, files: tuple[Files, Files]
) -> None:
    async def body() -> None:
        async with tls_lab(*files) as made:
            plain = TcpTransport(meter=made.notes)
            near = Recorder()
            plain.dial(made.address, near)
            await until(lambda: near.connection)
            near.send(b"hello")
            await until(lambda: near.reasons and made.accepted[0].reasons)
            assert made.accepted[0].connection is None
            assert "the peer speaks TLS" in near.reasons[0]
            assert "the peer does not speak TLS" in made.accepted[0].reasons[0]
            address = await plain.listen(made.accept)
            near = Recorder()
            made.near.dial(address, near)
            await until(lambda: near.reasons)
            assert near.connection is None
            assert "no TLS" in near.reasons[0]
            await until(lambda: made.accepted[1].reasons)
            assert "the peer speaks TLS" in made.accepted[1].reasons[0]
            await plain.close()

    run(loop, body())


@on_both_loops
@pytest.mark.parametrize("first", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["silent", "dribbling"])
def test_a_handshake_takes_only_so_long(
    loop: str, first: bytes, files: tuple[Files, Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_connection, "HANDSHAKE_S", 0.05)

    async def body() -> None:
        async with tls_lab(*files) as made:
            with socket.create_connection(parse(made.address, "")[:2]) as sock:
                sock.sendall(first)
                await until(lambda: made.accepted and made.accepted[0].reasons)
                assert "nothing more came within" in made.accepted[0].reasons[0]
                assert made.accepted[0].connection is None

    run(loop, body())


def test_whoever_only_looks_whether_somebody_listens_is_not_written_of(
    files: tuple[Files, Files], caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with tls_lab(*files) as made:
            socket.create_connection(parse(made.address, "")[:2]).close()
            await until(lambda: made.accepted and made.accepted[0].reasons)
            assert made.notes.counts["tls.refused"] == 0

    run("asyncio", body())
    assert caplog.text == ""


@on_both_loops
def test_garbage_after_the_handshake_ends_the_connection_after_what_was_good(
    loop: str, files: tuple[Files, Files]
) -> None:
    async def body() -> None:
        async with tls_lab(*files) as made:
            raw, far = await made.shake(files[1])
            await raw.send(framed(b"good"))
            await asyncio.get_running_loop().sock_sendall(raw.sock, b"\x17\x03\x03\x00\x20" * 40)
            await until(lambda: far.reasons)
            assert far.data == [b"good"]
            assert "no TLS" in far.reasons[0]
            raw.sock.close()

    run(loop, body())


@on_both_loops
def test_a_peer_may_end_the_session_before_the_socket(
    loop: str, files: tuple[Files, Files]
) -> None:
    async def body() -> None:
        async with tls_lab(*files) as made:
            raw, far = await made.shake(files[1])
            await raw.send(framed(b"last words"))
            await raw.say_goodbye()
            await until(lambda: far.reasons)
            assert far.data == [b"last words"]
            assert far.reasons == ["closed by the peer"]
            raw.sock.close()

    run(loop, body())


# Unix sockets


@on_both_loops
def test_unix_sockets_are_secured_alike(
    loop: str, files: tuple[Files, Files], foreign: Files, tmp_path: Path
) -> None:
    async def body() -> None:
        far = TcpTransport(f"unix:{tmp_path}/s", certificates=files[0].certificates)
        near = TcpTransport(certificates=files[1].certificates)
        stranger = TcpTransport(certificates=foreign.certificates)
        try:
            address = await far.listen(Echo)
            ours, its = Recorder(), Recorder()
            near.dial(address, ours)
            stranger.dial(address, its)
            await until(lambda: ours.connection and its.reasons)
            ours.send(b"hello")
            await until(lambda: ours.data)
        finally:
            for transport in (near, far, stranger):
                await transport.close()

    run(loop, body())
