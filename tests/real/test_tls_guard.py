"""L3 under TLS: nothing, encrypted or not, reaches the kernel once the guard says no."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from certificates_lab import Authority, Files
from tcp_lab import LIMIT_S, Recorder, framed, on_both_loops, run, until
from test_tcp_paused import heard, read_up_to, stop
from tls_lab import tls_lab

from domicile.membership.clock import SystemClock
from domicile.transports import tcp_connection
from domicile.transports.tls_connection import SEAL_BYTES

MIB = 1024 * 1024
PROGRAM = Path(__file__).resolve().parents[2] / "tests" / "labs" / ("tls_paused.py")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Files, Files]:
    authority = Authority(tmp_path_factory.mktemp("tls") / "ours")
    return authority.issue("one"), authority.issue("two")


@on_both_loops
@pytest.mark.parametrize("encrypted", [False, True], ids=["as it is", "encrypted"])
def test_past_the_guard_nothing_that_waits_leaves(
    loop: str, encrypted: bool, files: tuple[Files, Files]
) -> None:
    """Whatever the kernel did not take: packets, or what they were encrypted to."""

    async def body() -> None:
        async with tls_lab(*files) as made:
            raw, far = await made.shake(files[1], receive_bytes=8192)
            packets = [bytes([number]) * MIB for number in range(24)]
            connection: Any = far.connection
            if encrypted:
                connection._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
            far.send(*packets)
            await raw.read_on(1000)
            await until(lambda: connection._sealed or not encrypted)
            far.valid = False
            before = sum(made.notes.handed)
            found = await raw.read_all()
            assert sum(made.notes.handed) == before, "not one byte since, encrypted or not"
            assert raw.came <= before
            assert framed(*packets).startswith(found)
            assert made.notes.counts["tcp.withheld_bytes"] > 0
            assert "withheld" in far.reasons[0]
            far.valid = True
            far.send(b"nothing")
            assert sum(made.notes.handed) == before

    run(loop, body())


@on_both_loops
def test_what_is_encrypted_and_not_taken_waits_with_its_packets(
    loop: str, files: tuple[Files, Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more is encrypted than is handed over next, and nothing of it is lost or doubled."""
    # A busy machine may need longer for this much than a closed connection waits.
    monkeypatch.setattr(tcp_connection, "PARTING_S", LIMIT_S)

    async def body() -> None:
        async with tls_lab(*files) as made:
            raw, far = await made.shake(files[1], receive_bytes=8192)
            packets = [bytes([number]) * MIB for number in range(12)]
            connection: Any = far.connection
            connection._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
            far.send(*packets)
            await until(lambda: connection._sealed)
            assert 0 < connection._sealed_of <= SEAL_BYTES
            assert len(connection._sealed) <= SEAL_BYTES + 2048
            assert connection._waiting_bytes <= 12 * (MIB + 4)
            far.close()
            assert await raw.read_all() == framed(*packets)

    run(loop, body())


@on_both_loops
def test_the_guard_is_compared_at_the_end_of_a_turn(loop: str, files: tuple[Files, Files]) -> None:
    async def body() -> None:
        async with tls_lab(*files) as made:
            raw, far = await made.shake(files[1])
            before = len(made.notes.handed)
            far.send(b"one", b"two", b"three")
            far.valid = False
            assert framed(b"one").startswith(await raw.read_all())
            assert len(made.notes.handed) == before + 1
            assert made.notes.counts["tcp.withheld_bytes"] == len(framed(b"two", b"three"))

    run(loop, body())


@on_both_loops
def test_past_the_guard_no_hand_is_shaken(loop: str, files: tuple[Files, Files]) -> None:
    class Fenced(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.valid = False

    async def body() -> None:
        async with tls_lab(*files, Fenced) as made:
            near = Recorder()
            made.near.dial(made.address, near)
            await until(lambda: near.reasons)
            assert made.accepted[0].connection is None
            assert len(made.notes.handed) == 1, "the dialler's first word and no answer"

    run(loop, body())


# a process that is stopped


def shake(sock: socket.socket, context: ssl.SSLContext) -> int:
    """Shake hands as the accepting end; how many bytes came."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_side=True)
    came = 0
    while True:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            sock.sendall(outgoing.read())
            piece = sock.recv(65536)
            assert piece, "it ended in the handshake"
            came += len(piece)
            incoming.write(piece)
        else:
            sock.sendall(outgoing.read())
            return came


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGSTOP")
@on_both_loops
def test_a_process_resumed_past_its_deadline_hands_over_nothing(
    loop: str, files: tuple[Files, Files]
) -> None:
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    clock = SystemClock()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(LIMIT_S)
        port = str(listener.getsockname()[1])
        command = [sys.executable, str(PROGRAM), loop, port, json.dumps(files[1].settings)]
        path = os.pathsep.join(filter(None, sys.path))
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
        ) as process:
            try:
                sock, _ = listener.accept()
                with sock:
                    sock.settimeout(LIMIT_S)
                    came = shake(sock, files[0].certificates.contexts.accepting)
                    before = heard(process)
                    stop(process)
                    rest = before["handed"] - came
                    assert read_up_to(sock, rest) == rest > 0
                    while clock.now() <= before["deadline"]:
                        time.sleep(0.01)
                    process.send_signal(signal.SIGCONT)
                    assert read_up_to(sock, 1 << 40) == 0
                    end = heard(process)
                    assert end["handed"] == before["handed"]
                    assert end["withheld"] > 0
            finally:
                process.kill()
