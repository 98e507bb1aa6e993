"""A TCP or Unix connection whose packets travel under TLS, with certificates at both ends.

Made by `domicile.transports.tcp` alone. The promise of `domicile.transports.tcp_connection` holds
here, too (L3): packets wait unencrypted and are encrypted in the call that hands them to the
kernel. So no library's buffer sends anything after the guard has failed. Encrypted bytes that the
kernel does not take are kept together with their packets. Those packets count as handed over only
when all of their bytes are. Each further attempt compares the guard.
"""

from __future__ import annotations

import ssl
from socket import socket
from typing import cast

from domicile.ports.transport import ConnectionHandler
from domicile.transports.limits import host_of
from domicile.transports.tcp_connection import ConnectionState, Shared, TcpConnection
from domicile.transports.tls import why_no_tls

HANDSHAKE_S = 3.0
"""Seconds after which a handshake has failed, so that an unknown peer holds no connection for
long."""

SEAL_BYTES = 256 * 1024
"""Bytes encrypted at most at a time: what the kernel then does not take is kept twice."""

TLS_ALERT = b"\x15\x03\x01\x00\x02\x02\x46"
"""A fatal alert, unencrypted: the protocol version is not supported."""

_NOTHING = memoryview(b"")


def dial_tls(
    shared: Shared, sock: socket, handler: ConnectionHandler, peer: str, *, accepts: bool
) -> None:
    """Start a connection on a connected socket: under TLS if the transport has certificates."""
    if shared.certificates is None:
        TcpConnection(shared, sock, handler, peer).start()
        return
    contexts = shared.certificates.contexts
    context = contexts.accepting if accepts else contexts.dialling
    TlsConnection(shared, sock, handler, peer, context, accepts=accepts).start()


class TlsConnection(TcpConnection):
    """A `Connection` that is open once the handshake is over."""

    __slots__ = (
        "_accepts",
        "_incoming",
        "_outgoing",
        "_sealed",
        "_sealed_of",
        "_shaken",
        "_spoken",
        "_tls",
    )

    def __init__(
        self,
        shared: Shared,
        sock: socket,
        handler: ConnectionHandler,
        peer: str,
        context: ssl.SSLContext,
        *,
        accepts: bool,
    ) -> None:
        super().__init__(shared, sock, handler, peer)
        self._accepts = accepts
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=accepts)
        self._spoken = not accepts
        """Whether the dialling end has sent anything; if not, it only checked that a listener is
        there."""
        self._shaken = False
        self._sealed = _NOTHING
        """Encrypted bytes that the kernel has not taken."""
        self._sealed_of = 0
        """How many bytes of the waiting packets the encrypted bytes contain."""

    def start(self) -> None:
        """The socket is connected: do the handshake, then call the handler."""
        self._watch()
        self._timer = self._loop.call_later(HANDSHAKE_S, self._on_slow)
        if self._accepts:
            goes = self._shared.shaking.enter(self, host_of(self))
            if goes is not None:
                goes._offend("tls.crowded", "others came before its handshake was over")
        self._shake()

    # the handshake

    def _shake(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._say()
            return
        except ssl.SSLError as error:
            self._refuse(error)
            return
        self._shaken = True
        self._shared.shaking.leave(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._say()
        if self._state is ConnectionState.OPEN:
            self._tell(self._handler.opened, self)

    def _on_slow(self) -> None:
        self._timer = None
        self._spoken = True
        self._lose(f"nothing more came within {HANDSHAKE_S:g} s")

    def _say(self) -> None:
        """Send what TLS itself wants to send, as in a handshake."""
        if self._outgoing.pending:
            self._sealed = memoryview(bytes(self._sealed) + self._outgoing.read())
        if self._sealed and not self._writing:
            self._push()

    # sending

    def _push(self) -> None:
        if self._waiting or not self._sealed:
            super()._push()
            return
        if not self._may_send():
            self._withhold()
            return
        if self._state is not ConnectionState.OVER:
            self._sealed = self._sealed[super()._hand_over((self._sealed,)) :]
            if self._sealed and self._taking:
                self._watch_writable()
            else:
                self._unwatch_writable()

    def _hand_over(self, pieces: tuple[bytes | memoryview, ...]) -> int:
        """How many bytes of packets were handed to the kernel, counted once all their encrypted
        bytes were."""
        if not self._sealed and not self._seal(pieces):
            return 0
        size_bytes = len(self._sealed)
        taken = super()._hand_over((self._sealed,))
        if taken < size_bytes:
            self._sealed = self._sealed[taken:]
            return 0
        gone, self._sealed_of = self._sealed_of, 0
        self._sealed = _NOTHING
        return gone

    def _seal(self, pieces: tuple[bytes | memoryview, ...]) -> bool:
        """Encrypt the first waiting bytes, joined, so that TLS records are as large as possible."""
        first = pieces[0]
        if len(first) < SEAL_BYTES and len(pieces) > 1:
            chosen: list[bytes | memoryview] = []
            room = SEAL_BYTES
            for piece in pieces:
                if room <= 0:
                    break
                chosen.append(piece if len(piece) <= room else memoryview(piece)[:room])
                room -= len(piece)
            data: bytes | memoryview = b"".join(chosen)
        else:
            data = first if len(first) <= SEAL_BYTES else memoryview(first)[:SEAL_BYTES]
        try:
            self._sealed_of = self._tls.write(data)
        except ssl.SSLError as error:
            self._give_up_soon(f"it cannot be encrypted: {why_no_tls(error)}")
            return False
        self._sealed = memoryview(self._outgoing.read())
        return True

    # receiving

    def _arrived(self, data: memoryview) -> None:
        self._spoken = True
        self._incoming.write(data)
        if not self._shaken:
            self._shake()
        if not self._shaken:
            return
        more = True
        while more and self._state is ConnectionState.OPEN:
            more = self._unseal()

    def _unseal(self) -> bool:
        """Decrypt and deliver as much as fits the buffer; returns whether there may be more."""
        plain, count, more = self._shared.plain, 0, True
        failure: ssl.SSLError | None = None
        try:
            while more and count < len(plain):
                found = cast("int", self._tls.read(len(plain) - count, plain[count:]))  # pyright: ignore[reportArgumentType]
                if not found:
                    break
                count += found
                more = bool(self._incoming.pending or self._tls.pending())
        except ssl.SSLWantReadError:
            more = False
        except ssl.SSLError as error:
            failure = error
        if count:
            self._deliver(plain[:count])
        elif more and failure is None:
            self._lose("closed by the peer")
        if failure is not None and self._state is ConnectionState.OPEN:
            self._refuse(failure)
        return more and failure is None

    # ending

    def _refuse(self, error: ssl.SSLError) -> None:
        """One end does not accept the other's certificate: send the TLS alert, and end."""
        reason = f"no TLS: {why_no_tls(error)}"
        self._report(reason)
        told = self._state is ConnectionState.OPEN
        alert, fresh = self._outgoing.read(), not self._sealed
        if error.reason == "WRONG_VERSION_NUMBER":
            # The library says nothing to a peer without TLS, which would not learn what is wrong.
            alert = alert or TLS_ALERT
        self._mute()
        if alert and fresh and self._may_send() and self._state is ConnectionState.OPEN:
            super()._hand_over((alert,))
        if self._state is ConnectionState.OPEN:
            self._part()
        if told:
            self._tell(self._handler.closed, reason)

    def _lose(self, reason: str) -> None:
        if self._spoken and not self._shaken and self._state is ConnectionState.OPEN:
            reason = f"no TLS: {reason}, before the handshake was over"
            self._report(reason)
        super()._lose(reason)

    def _report(self, reason: str) -> None:
        self._shared.meter.count("tls.refused" if self._accepts else "tls.failed")
        self._shared.complaints.about(
            self.peer,
            f"{reason} (both ends need tls_cert, tls_key and tls_ca of one authority)",
        )

    def _mute(self) -> None:
        super()._mute()
        self._sealed = _NOTHING
