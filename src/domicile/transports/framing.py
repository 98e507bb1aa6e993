"""Packets in a stream of bytes: each one is preceded by its length, four bytes, big-endian.

The length's top bit marks a compressed packet. Used by connections that carry bytes. Nothing here
may do I/O. A length is accepted only within the limit, so that no peer decides how much memory is
allocated for it (I6).
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

from domicile.transports.compress import BadDeflate, Deflated, inflated_bytes

MAX_FRAME_BYTES = 32 * 1024 * 1024
"""The longest packet by default: well above what a link puts into one."""

FIRST_BYTES = 64 * 1024
"""The longest first packet between processes: a hello or the answer to one. Before it the peer is
unknown, so little memory is allocated for it."""

SLACK_BYTES = 24 * 1024 * 1024
"""Bytes that a packet may have beyond two of the largest messages: for many small ones and their
names."""

DEFLATED = 1 << 31
"""The bit of a length that marks a compressed packet."""

TLS_RECORDS = (0x1503, 0x1603)
"""The first two bytes of an alert and of a handshake under TLS."""

_LENGTH = Struct(">I")
HEADER_BYTES = _LENGTH.size

header = _LENGTH.pack
"""The header of a packet with a given length."""


def packet_limit_bytes(message_bytes: int) -> int:
    """The longest packet that a link may make of messages up to a size."""
    return 2 * message_bytes + SLACK_BYTES


def header_of(packet: bytes) -> bytes:
    """The header of a packet, compressed or not."""
    size_bytes = len(packet)
    return header(size_bytes | DEFLATED if type(packet) is Deflated else size_bytes)


class FramingError(Exception):
    """The bytes are not packets. Nothing after them can be trusted."""


class FrameDecoder:
    """Takes bytes as they come and returns whole packets. It is unusable after an error.

    The first packet may have at most `first_bytes`, if given, and is never compressed. Compressed
    packets are returned as they came, as `Deflated`; they announce no more than the limit.
    """

    __slots__ = ("_limit", "_max", "_partial", "_past_first", "_wanted")

    def __init__(
        self, max_frame_bytes: int = MAX_FRAME_BYTES, first_bytes: int | None = None
    ) -> None:
        self._max = max_frame_bytes
        self._limit = max_frame_bytes if first_bytes is None else min(first_bytes, max_frame_bytes)
        self._past_first = False
        self._partial = bytearray()
        self._wanted = HEADER_BYTES

    @property
    def inside(self) -> bool:
        """Whether a packet has begun that is not complete."""
        return bool(self._partial)

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[bytes]:
        """The packets that `data` completes, in order; raises `FramingError` where they end.

        `data` may be reused once the iterator is exhausted or dropped. An iterator that is not
        exhausted leaves the decoder unusable.
        """
        view = memoryview(data)
        at, end = 0, len(view)
        while self._partial and at < end:
            at += self._complete(view[at:])
            if len(self._partial) < self._wanted:
                return
            if self._wanted == HEADER_BYTES:
                length = _LENGTH.unpack(self._partial)[0]
                self._wanted += length if length <= self._limit else self._checked(length)
            if len(self._partial) == self._wanted:
                partial, self._partial = self._partial, bytearray()
                self._wanted = HEADER_BYTES
                yield self._whole(memoryview(partial), 0, len(partial))
        while end - at >= HEADER_BYTES:
            length = _LENGTH.unpack_from(view, at)[0]
            start = stop = at + HEADER_BYTES
            stop += length if length <= self._limit else self._checked(length)
            if stop > end:
                self._wanted = stop - at
                break
            if length < DEFLATED and self._past_first:
                yield bytes(view[start:stop])
            else:
                yield self._whole(view, at, stop)
            at = stop
        self._partial += view[at:]

    def _complete(self, view: memoryview) -> int:
        """Add the bytes that the unfinished packet misses; returns how many that took."""
        take = min(self._wanted - len(self._partial), len(view))
        self._partial += view[:take]
        return take

    def _whole(self, view: memoryview, at: int, stop: int) -> bytes:
        """The packet between two positions, whose header was checked."""
        self._limit = self._max
        self._past_first = True
        if view[at] < 0x80:
            return bytes(view[at + HEADER_BYTES : stop])
        packet = Deflated(view[at + HEADER_BYTES : stop])
        try:
            if inflated_bytes(packet) <= self._max:
                return packet
        except BadDeflate as error:
            raise FramingError(str(error)) from error
        raise FramingError(
            f"a compressed packet announces {inflated_bytes(packet)} bytes, {self._max} are allowed"
        )

    def _checked(self, length: int) -> int:
        """The size of a packet marked as compressed; raises if a packet is too long."""
        size_bytes = length & ~DEFLATED
        if length & DEFLATED and size_bytes <= self._limit and self._past_first:
            return size_bytes
        if not self._past_first and length >> 16 in TLS_RECORDS:
            raise FramingError(
                "the peer speaks TLS and this process has no certificates: set tls_cert, tls_key "
                "and tls_ca here, too"
            )
        if not self._past_first:
            raise FramingError(
                f"the first packet announces {length} bytes, {self._limit} are allowed: this is "
                "no peer of a cluster"
            )
        raise FramingError(
            f"a packet of {length} bytes is announced, {self._limit} are allowed: "
            "either the peer speaks another protocol or its max_frame_bytes is higher"
        )
