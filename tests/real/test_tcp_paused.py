"""L3 on a real process: stopped with full sockets, resumed past its deadline.

While it is stopped its peer reads all that its kernel holds, so that the sockets are writable the
moment it is resumed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tcp_lab import LIMIT_S, on_both_loops

from domicile.membership.clock import SystemClock

PROGRAM = Path(__file__).resolve().parents[2] / "tests" / "labs" / ("tcp_paused.py")

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no SIGSTOP")


@contextmanager
def program(kind: str, loop: str, port: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(PROGRAM), kind, loop, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def heard(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the process ended early"
    found: dict[str, Any] = json.loads(line)
    return found


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


def read_up_to(sock: socket.socket, count: int) -> int:
    """Read this many bytes, or up to the end; how many came."""
    found = 0
    while found < count:
        try:
            piece = sock.recv(min(1 << 20, count - found))
        except ConnectionResetError:
            break
        if not piece:
            break
        found += len(piece)
    return found


def pause(kind: str, loop: str) -> tuple[int, int, dict[str, Any]]:
    """Bytes handed over before the pause, bytes that came after it, and the last words."""
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    clock = SystemClock()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(LIMIT_S)
        with program(kind, loop, listener.getsockname()[1]) as process:
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(LIMIT_S)
                before = heard(process)
                stop(process)
                assert read_up_to(sock, before["handed"]) == before["handed"]
                while clock.now() <= before["deadline"]:
                    time.sleep(0.01)
                process.send_signal(signal.SIGCONT)
                after = read_up_to(sock, 1 << 40)
                return before["handed"], after, heard(process)


@on_both_loops
def test_a_process_resumed_past_its_deadline_hands_over_nothing(loop: str) -> None:
    handed, after, end = pause("domicile", loop)
    assert after == 0
    assert end["handed"] == handed > 0
    assert end["withheld"] > 0


@on_both_loops
def test_a_loops_own_transport_would_not_do(loop: str) -> None:
    """The same on the event loop's own transport: bytes leave, so the test above can fail."""
    _, after, _ = pause("plain", loop)
    assert after > 0
