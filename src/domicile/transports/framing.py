"""Packets in a stream of bytes: each one is preceded by its length, four bytes, big-endian.

Used by connections that carry bytes. Nothing here may do I/O, and a length is believed only
within the limit, so that no peer decides how much memory is set aside for it (I6).
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

MAX_FRAME_BYTES = 32 * 1024 * 1024
"""The longest packet by default: well above what a link puts into one."""

_LENGTH = Struct(">I")
HEADER_BYTES = _LENGTH.size

header = _LENGTH.pack
"""What precedes a packet of a length."""


class FramingError(Exception):
    """The bytes are no packets. Nothing after them can be believed."""


class FrameDecoder:
    """Takes bytes as they come and gives whole packets. After an error it is of no more use."""

    __slots__ = ("_limit", "_partial", "_wanted")

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._limit = max_frame_bytes
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
                self._wanted += self._checked(_LENGTH.unpack(self._partial)[0])
            if len(self._partial) == self._wanted:
                packet = bytes(self._partial[HEADER_BYTES:])
                self._partial = bytearray()
                self._wanted = HEADER_BYTES
                yield packet
        while end - at >= HEADER_BYTES:
            start = at + HEADER_BYTES
            stop = start + self._checked(_LENGTH.unpack_from(view, at)[0])
            if stop > end:
                self._wanted = stop - at
                break
            yield bytes(view[start:stop])
            at = stop
        self._partial += view[at:]

    def _complete(self, view: memoryview) -> int:
        """Add what the unfinished packet still misses; how many bytes that took."""
        take = min(self._wanted - len(self._partial), len(view))
        self._partial += view[:take]
        return take

    def _checked(self, length_bytes: int) -> int:
        if length_bytes > self._limit:
            raise FramingError(
                f"a packet of {length_bytes} bytes is announced, {self._limit} are allowed: "
                "either the peer speaks another protocol or its max_frame_bytes is higher"
            )
        return length_bytes
