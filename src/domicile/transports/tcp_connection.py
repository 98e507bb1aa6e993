"""One connection on a non-blocking socket, driven by the event loop's readiness callbacks.

Made by `domicile.transports.tcp` alone; `domicile.transports.tls_connection` builds on it. No
byte that was put off may reach the kernel without a comparison of the guard directly before it
(L3): that is why there is no asyncio transport here, which would keep a buffer and flush it after
a pause past the deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from domicile.ports.meter import Meter, takes_events
from domicile.ports.transport import ConnectionHandler
from domicile.transports.framing import HEADER_BYTES, FrameDecoder, FramingError, header_of
from domicile.transports.limits import MOST_OF_ONE_HOST, MOST_STRANGERS, BoundedGuests, Complaints
from domicile.transports.tls import Certificates

log = logging.getLogger("domicile")

MAX_WAITING_BYTES = 64 * 1024 * 1024
"""I6: a connection with more waiting bytes accepts no more, sends what waits, and is closed.

A single packet may be longer, up to the limit of packets.
"""

PARTING_S = 2.0
"""Seconds in which a closed connection may send what waits and wait for the peer's end."""

MOST_PARTING = 256
"""I6: closed connections that wait for their peers' ends; beyond that the oldest stops waiting."""

FULL_S = 10.0
"""Seconds in which a full connection may send what waits before it is closed."""

RECEIVING_S = 0.5
"""Seconds between two calls that tell a handler of a packet that is still arriving."""

READ_BYTES = 64 * 1024
"""Bytes read at most in one turn, so that no busy peer starves the others."""

_JOIN_BYTES = 16 * 1024
"""Up to this size a packet is copied behind its header; beyond, the two are gathered."""

_GATHER = 256 if hasattr(socket.socket, "sendmsg") else 1
"""Pieces handed to the kernel in one call: below the limit of every platform."""

_RESET = struct.pack("hh" if sys.platform == "win32" else "ii", 1, 0)


@dataclass(slots=True)
class Shared:
    """What all connections of a transport share."""

    max_frame_bytes: int
    meter: Meter
    certificates: Certificates | None = None
    first_bytes: int | None = None
    stall_s: float | None = None
    connections: dict[TcpConnection, None] = field(default_factory=dict["TcpConnection", None])
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(READ_BYTES)))
    plain: memoryview = field(default_factory=lambda: memoryview(bytearray(READ_BYTES)))
    """The buffer for bytes decrypted under TLS."""
    complaints: Complaints = field(default_factory=lambda: Complaints(time.monotonic))
    parting: dict[TcpConnection, None] = field(default_factory=dict["TcpConnection", None])
    shaking: BoundedGuests[TcpConnection] = field(
        default_factory=lambda: BoundedGuests["TcpConnection"](MOST_STRANGERS, MOST_OF_ONE_HOST)
    )
    """Connections accepted under TLS whose handshake is not over."""


class ConnectionState(Enum):
    """The state of a connection."""

    OPEN = "open"
    PARTING = "parting"
    OVER = "over"


class TcpConnection:
    """A `Connection`: packets in order over one socket, until either end stops."""

    __slots__ = (
        "_corked",
        "_decoder",
        "_full",
        "_handler",
        "_heard_at",
        "_loop",
        "_moved_at",
        "_note",
        "_shared",
        "_sock",
        "_stall",
        "_state",
        "_taking",
        "_timer",
        "_waiting",
        "_waiting_bytes",
        "_writing",
        "peer",
    )

    def __init__(
        self, shared: Shared, sock: socket.socket, handler: ConnectionHandler, peer: str
    ) -> None:
        self.peer = peer
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._handler = handler
        self._note = shared.meter.event if takes_events(shared.meter) else None
        self._decoder = FrameDecoder(shared.max_frame_bytes, shared.first_bytes)
        self._state = ConnectionState.OPEN
        self._taking = True
        self._full = ""
        self._corked = False
        self._writing = False
        self._heard_at = self._moved_at = self._loop.time()
        self._stall: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: deque[bytes | memoryview] = deque()
        self._waiting_bytes = 0

    def start(self) -> None:
        """The socket is connected: call the handler, then read."""
        self._watch()
        self._tell(self._handler.opened, self)

    def _watch(self) -> None:
        self._shared.connections[self] = None
        self._loop.add_reader(self._sock.fileno(), self._on_readable)

    def send(self, data: bytes) -> None:
        """Hand a packet to the kernel now, if nothing waits and none was sent in this turn.

        Further packets of a turn are sent together at its end. After `close` or loss this does
        nothing.
        """
        if not self._taking:
            return
        size_bytes = len(data)
        if size_bytes > self._shared.max_frame_bytes:
            self._give_up_soon(
                f"a packet of {size_bytes} bytes is longer than {self._shared.max_frame_bytes}: "
                "raise max_frame_bytes on all nodes"
            )
            return
        piece = header_of(data)
        if size_bytes <= _JOIN_BYTES:
            piece += data
        if self._corked or self._waiting:
            self._put_off(piece, data)
            return
        self._corked = True
        self._loop.call_soon(self._on_turn_end)
        # The caller of `send` has just compared the guard, so this packet may be sent (L3).
        taken = self._hand_over((piece,) if size_bytes <= _JOIN_BYTES else (piece, data)[:_GATHER])
        if taken < size_bytes + HEADER_BYTES and self._taking:
            self._put_off(piece, data)
            self._drop_front(taken)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return self._waiting_bytes

    def close(self) -> None:
        """Accept no more packets; send what waits while the guard holds, then end. Never blocks."""
        if self._state is not ConnectionState.OPEN:
            return
        self._part()

    def abandon(self) -> None:
        """End at once, without calling the handler: the transport is closed."""
        self._state = (
            ConnectionState.PARTING if self._state is ConnectionState.OPEN else self._state
        )
        self._taking = False
        if self._waiting:
            self._push()
        self._finish()

    # sending

    def _put_off(self, piece: bytes, data: bytes) -> None:
        size_bytes = len(data) + HEADER_BYTES
        if self._waiting and self._waiting_bytes + size_bytes > MAX_WAITING_BYTES:
            # What waits is still sent: a link then resumes after it, not before it.
            self._taking = False
            self._full = f"more than {MAX_WAITING_BYTES} bytes wait for {self.peer} to read"
            self._shared.meter.count("tcp.full")
            self._await_end(FULL_S)
            return
        self._waiting.append(piece)
        if len(piece) < size_bytes:
            self._waiting.append(data)
        self._waiting_bytes += size_bytes

    def _on_turn_end(self) -> None:
        self._corked = False
        if self._waiting and not self._writing:
            self._push()

    def _push(self) -> None:
        """Hand waiting bytes to the kernel as far as it takes them, unless the guard fails (L3)."""
        if not self._may_send():
            self._withhold()
            return
        if self._state is ConnectionState.OVER or not self._waiting:
            return
        self._drop_front(self._hand_over(tuple(islice(self._waiting, _GATHER))))
        if self._waiting:
            self._watch_writable()
            return
        self._unwatch_writable()
        if self._state is ConnectionState.PARTING:
            self._end_sending()
        elif self._full:
            self._part()
            self._tell(self._handler.closed, self._full)

    def _hand_over(self, pieces: tuple[bytes | memoryview, ...]) -> int:
        """How many bytes the kernel took; an error ends all sending."""
        try:
            taken = self._sock.send(pieces[0]) if len(pieces) == 1 else self._sock.sendmsg(pieces)
        except (BlockingIOError, InterruptedError):
            return 0
        except (BrokenPipeError, ConnectionResetError):
            # The reader finds the end, after the packets that arrived before it.
            self._mute()
            return 0
        except OSError as error:
            self._give_up_soon(f"sending failed: {error}")
            return 0
        if self._note is not None:
            self._note("handed", bytes=taken)
        return taken

    def _drop_front(self, taken: int) -> None:
        """Forget the first bytes that wait: the kernel has them."""
        self._waiting_bytes -= taken
        waiting = self._waiting
        while taken:
            size_bytes = len(waiting[0])
            if size_bytes > taken:
                waiting[0] = memoryview(waiting[0])[taken:]
                return
            waiting.popleft()
            taken -= size_bytes

    def _may_send(self) -> bool:
        try:
            return self._handler.guard()
        except Exception:
            log.exception("the guard of the connection with %s failed", self.peer)
            return False

    def _withhold(self) -> None:
        """L3: the deadline has passed. No byte may be sent any more, not even those in the kernel's
        buffer."""
        if self._state is ConnectionState.OVER:
            return
        if self._waiting_bytes:
            self._shared.meter.count("tcp.withheld_bytes", self._waiting_bytes)
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._lose("bytes were withheld: this process may no longer send (L3)")

    def _mute(self) -> None:
        """Send nothing more; what waits is lost with the connection."""
        self._taking = False
        self._waiting.clear()
        self._waiting_bytes = 0
        self._unwatch_writable()

    def _watch_writable(self) -> None:
        if not self._writing:
            self._writing = True
            self._loop.add_writer(self._sock.fileno(), self._push)

    def _unwatch_writable(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock.fileno())

    # receiving

    def _on_readable(self) -> None:
        try:
            count = self._sock.recv_into(self._shared.buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lose(f"connection lost: {error.strerror or error}")
            return
        if not count:
            cut_off = " in the middle of a packet" if self._decoder.inside else ""
            self._lose(f"closed by the peer{cut_off}")
        elif self._state is ConnectionState.OPEN:
            self._arrived(self._shared.buffer[:count])

    def _arrived(self, data: memoryview) -> None:
        self._deliver(data)

    def _deliver(self, data: memoryview) -> None:
        packets = self._decoder.feed(data)
        try:
            for packet in packets:
                self._handler.received(packet)
                if self._state is not ConnectionState.OPEN:
                    return
            if self._decoder.inside:
                self._receiving()
        except FramingError as error:
            self._offend("tcp.garbage", str(error))
        except Exception as error:
            self._fail(error)

    def _receiving(self) -> None:
        """A packet is incomplete: limit the time it may take, and tell the handler of a long
        one."""
        now = self._moved_at = self._loop.time()
        stall_s = self._shared.stall_s
        if self._stall is None and stall_s is not None:
            self._stall = self._loop.call_later(stall_s, self._on_stall, stall_s)
        if now >= self._heard_at + RECEIVING_S:
            self._heard_at = now
            self._handler.receiving()

    def _on_stall(self, stall_s: float) -> None:
        self._stall = None
        if self._state is not ConnectionState.OPEN or not self._decoder.inside:
            return
        left_s = self._moved_at + stall_s - self._loop.time()
        if left_s > 0:
            self._stall = self._loop.call_later(left_s, self._on_stall, stall_s)
        else:
            self._offend("tcp.stalled", f"a packet has got no further for {stall_s:g} s")

    def _offend(self, count: str, reason: str) -> None:
        """The peer broke the rules (DX-08)."""
        self._shared.meter.count(count)
        self._shared.complaints.about(self.peer, reason)
        self._lose(reason)

    # ending

    def _part(self) -> None:
        """Send only what waits, and wait for the peer's end: then the peer has read everything.

        A socket that is closed with unread bytes resets, and the peer may lose what it was sent.
        """
        self._state = ConnectionState.PARTING
        self._taking = False
        parting = self._shared.parting
        parting[self] = None
        if len(parting) > MOST_PARTING:
            next(iter(parting))._finish()
        self._await_end(PARTING_S)
        if self._waiting:
            self._push()
        else:
            self._end_sending()

    def _end_sending(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._finish()

    def _await_end(self, patience_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(patience_s, self._on_impatience)

    def _on_impatience(self) -> None:
        if self._waiting and not self._may_send():
            self._withhold()
        else:
            self._lose(self._full or "the peer does not read")

    def _give_up_soon(self, reason: str) -> None:
        """End in a later turn, because `send` never calls the handler back."""
        log.error("the connection with %s is given up: %s", self.peer, reason)
        self._mute()
        self._loop.call_soon(self._lose, reason)

    def _fail(self, error: Exception) -> None:
        log.error("a handler of the connection with %s failed", self.peer, exc_info=error)
        self._lose(f"its handler failed: {error!r}")

    def _lose(self, reason: str) -> None:
        """The connection has ended; tell the handler, unless it closed the connection itself."""
        told = self._state is ConnectionState.OPEN
        if self._finish() and told:
            self._tell(self._handler.closed, reason)

    def _finish(self) -> bool:
        if self._state is ConnectionState.OVER:
            return False
        self._state = ConnectionState.OVER
        self._taking = False
        for timer in (self._timer, self._stall):
            if timer is not None:
                timer.cancel()
        if not self._loop.is_closed():
            self._unwatch_writable()
            self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        self._waiting.clear()
        self._waiting_bytes = 0
        self._shared.connections.pop(self, None)
        self._shared.parting.pop(self, None)
        self._shared.shaking.leave(self)
        return True

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            callback(*arguments)
        except Exception as error:
            self._fail(error)
