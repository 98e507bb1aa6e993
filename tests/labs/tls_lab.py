"""Transports with certificates, and raw sockets that can shake hands, for the tests of TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from certificates_lab import Files
from tcp_lab import Lab, Recorder, descriptors, until

from domicile.transports.addresses import parse
from domicile.transports.tcp import TcpTransport


class TlsLab(Lab):
    """A listening transport and a dialling one, each with its certificate."""

    def __init__(self, far: Files, near: Files, accept: Callable[[], Recorder]) -> None:
        super().__init__(accept)
        self.far = TcpTransport(meter=self.notes, certificates=far.certificates)
        self.near = TcpTransport(meter=self.notes, certificates=near.unchecked)

    async def shake(self, files: Files, receive_bytes: int = 0) -> tuple[Raw, Recorder]:
        """A raw socket that dialled and shook hands, and the handler at the other end."""
        count = len(self.accepted)
        raw = await self.knock(files.certificates.contexts.dialling, receive_bytes)
        await raw.shake()
        await until(lambda: len(self.accepted) > count and self.accepted[-1].connection)
        return raw, self.accepted[-1]

    async def knock(self, context: ssl.SSLContext, receive_bytes: int = 0) -> Raw:
        """A raw socket that dialled and has not said a word."""
        sock = socket.socket()
        sock.setblocking(False)
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(sock, parse(self.address, "")[:2])
        return Raw(sock, context)


class Raw:
    """A socket under TLS whose encrypted bytes can be counted."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self.sock = sock
        self.came = 0
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing)
        self._loop = asyncio.get_running_loop()

    async def shake(self) -> None:
        while True:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._say()
                await self.read_on()
            else:
                await self._say()
                return

    async def send(self, data: bytes) -> None:
        self.tls.write(data)
        await self._say()

    async def say_goodbye(self) -> None:
        """Close the TLS session, but not the socket."""
        with suppress(ssl.SSLWantReadError):
            self.tls.unwrap()
        await self._say()

    async def read_on(self, count: int = 1 << 20) -> int:
        """How many encrypted bytes came next; none at the end, be it orderly or a reset."""
        try:
            piece = await self._loop.sock_recv(self.sock, count)
        except ConnectionResetError:
            return 0
        self.came += len(piece)
        self._incoming.write(piece)
        return len(piece)

    async def read_all(self) -> bytes:
        """What can be decrypted of everything up to the end; closes the socket."""
        with self.sock:
            while await self.read_on():
                pass
        found = bytearray()
        try:
            while piece := self.tls.read(1 << 20):
                found += piece
        except ssl.SSLError:
            pass
        return bytes(found)

    async def _say(self) -> None:
        if self._outgoing.pending:
            await self._loop.sock_sendall(self.sock, self._outgoing.read())


@asynccontextmanager
async def tls_lab(
    far: Files, near: Files, accept: Callable[[], Recorder] = Recorder
) -> AsyncIterator[TlsLab]:
    """Two transports on one machine; afterwards every descriptor must be back."""
    await asyncio.get_running_loop().getaddrinfo("127.0.0.1", 1)
    before = descriptors()
    made = TlsLab(far, near, accept)
    try:
        made.address = await made.far.listen(made.accept)
        yield made
    finally:
        await made.near.close()
        await made.far.close()
    assert descriptors() == before
