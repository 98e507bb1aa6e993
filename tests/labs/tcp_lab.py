"""Handlers, loops and raw sockets for the tests of TCP connections."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from domicile.ports.transport import Connection, ConnectionHandler
from domicile.transports.addresses import parse
from domicile.transports.framing import header
from domicile.transports.tcp import TcpTransport

LIMIT_S = 90.0
"""No test waits longer than this for anything."""

Body = Coroutine[Any, Any, None]


def run(loop: str, body: Body) -> None:
    """Run a test on one of the event loops; no task may be left over and no callback may fail."""
    failures: list[dict[str, Any]] = []
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if loop == "uvloop":
        try:
            import uvloop
        except ImportError:
            body.close()
            pytest.skip("uvloop is not installed")
        factory = uvloop.new_event_loop

    async def main() -> None:
        running = asyncio.get_running_loop()
        running.set_exception_handler(lambda _, context: failures.append(context))
        async with asyncio.timeout(LIMIT_S):
            await body
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
    assert failures == []


on_both_loops = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])


async def until(condition: Callable[[], object]) -> None:
    """Turn the loop until something holds."""
    # Conditions of sockets have no event of their own.
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def descriptors() -> int:
    """How many files this process has open."""
    return len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"))


class Notes:
    """A meter that remembers."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.handed: list[int] = []

    def count(self, name: str, value: int = 1) -> None:
        self.counts[name] += value

    def event(self, kind: str, /, **fields: Any) -> None:
        assert kind == "handed"
        self.handed.append(fields["bytes"])


class Recorder:
    """Notes what it hears; its guard is a switch."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.data: list[bytes] = []
        self.reasons: list[str] = []
        self.valid = True

    def opened(self, connection: Connection) -> None:
        assert self.connection is None
        self.connection = connection

    def received(self, data: bytes) -> None:
        assert self.connection is not None
        assert not self.reasons, "a packet after the end"
        self.data.append(data)

    def receiving(self) -> None:
        pass

    def closed(self, reason: str) -> None:
        assert not self.reasons, "closed twice"
        self.reasons.append(reason)

    def guard(self) -> bool:
        return self.valid

    def send(self, *packets: bytes) -> None:
        assert self.connection is not None
        for packet in packets:
            self.connection.send(packet)

    def close(self) -> None:
        assert self.connection is not None
        self.connection.close()


class Echo(Recorder):
    """Sends back what it hears."""

    def received(self, data: bytes) -> None:
        self.send(data)


class Lab:
    """A listening transport, a dialling one, and the handlers that were accepted."""

    def __init__(self, accept: Callable[[], Recorder] = Recorder) -> None:
        self.notes = Notes()
        self.far = TcpTransport(meter=self.notes)
        self.near = TcpTransport(meter=self.notes)
        self.accepted: list[Recorder] = []
        self.address = ""
        self._accept = accept

    def accept(self) -> ConnectionHandler:
        self.accepted.append(self._accept())
        return self.accepted[-1]

    async def dial(self, handler: Recorder | None = None) -> Recorder:
        """A dialled connection that stands."""
        handler = handler or Recorder()
        count = len(self.accepted)
        self.near.dial(self.address, handler)
        await until(lambda: handler.connection and len(self.accepted) > count)
        await until(lambda: self.accepted[-1].connection)
        return handler

    async def call(self, receive_bytes: int = 0) -> tuple[socket.socket, Recorder]:
        """A raw socket that dialled, and the handler at the other end."""
        count = len(self.accepted)
        sock = socket.socket()
        sock.setblocking(False)
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        where = parse(self.address, "")[:2]
        await asyncio.get_running_loop().sock_connect(sock, where)
        await until(lambda: len(self.accepted) > count and self.accepted[-1].connection)
        return sock, self.accepted[-1]


@asynccontextmanager
async def lab(accept: Callable[[], Recorder] = Recorder) -> AsyncIterator[Lab]:
    """Two transports on one machine; afterwards every descriptor must be back."""
    # A loop opens some descriptors of its own the first time it looks up a name.
    await asyncio.get_running_loop().getaddrinfo("127.0.0.1", 1)
    before = descriptors()
    made = Lab(accept)
    try:
        made.address = await made.far.listen(made.accept)
        yield made
    finally:
        await made.near.close()
        await made.far.close()
    assert descriptors() == before


async def read_on(sock: socket.socket, count: int = 1 << 20) -> bytes:
    """The next bytes; none at the end, be it orderly or a reset."""
    try:
        return await asyncio.get_running_loop().sock_recv(sock, count)
    except ConnectionResetError:
        return b""


async def read_all(sock: socket.socket) -> bytes:
    """Everything up to the end; closes the socket."""
    found = bytearray()
    with sock:
        while piece := await read_on(sock):
            found += piece
    return bytes(found)


def framed(*packets: bytes) -> bytes:
    """Packets as they travel."""
    return b"".join(header(len(packet)) + packet for packet in packets)
