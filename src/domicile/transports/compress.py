"""Large packets made smaller, where that pays.

Called by the link layer on both ends and by the framing, which marks such packets in the stream.
Nothing here may do I/O or believe a size: how long a packet will be is compared with the limit
before a byte of it is inflated, and inflating stops there (I6).
"""

from __future__ import annotations

import zlib
from struct import Struct

PAYS = 0.9
"""A packet travels compressed only if that leaves less than this part of it."""

SAMPLE_BYTES = 4 * 1024
"""What is tried first, from the packet's middle: bytes that do not shrink cost little more."""

_LEVEL = 1
_RAW = -zlib.MAX_WBITS
_SIZE = Struct(">I")


class Deflated(bytes):
    """A compressed packet: its inflated size, four bytes, big-endian, then a raw deflate stream."""

    __slots__ = ()


class BadDeflate(ValueError):
    """A compressed packet that is none, or too long. Close that connection."""


def deflate(packet: bytes) -> Deflated | None:
    """The packet compressed, or None if that does not pay."""
    if len(packet) >= 4 * SAMPLE_BYTES:
        middle = len(packet) // 2
        sample = memoryview(packet)[middle : middle + SAMPLE_BYTES]
        if len(zlib.compress(sample, _LEVEL, _RAW)) >= PAYS * SAMPLE_BYTES:
            return None
    body = zlib.compress(packet, _LEVEL, _RAW)
    if len(body) + _SIZE.size >= PAYS * len(packet):
        return None
    return Deflated(_SIZE.pack(len(packet)) + body)


def inflated_bytes(packet: Deflated) -> int:
    """How long a compressed packet says it is; raises `BadDeflate`."""
    if len(packet) <= _SIZE.size:
        raise BadDeflate(f"a compressed packet of {len(packet)} bytes is none")
    return int(_SIZE.unpack_from(packet)[0])


def inflate(packet: Deflated, max_bytes: int) -> bytes:
    """The packet as it was; raises `BadDeflate` unless it is as long as it says, and no longer
    than allowed."""
    size_bytes = inflated_bytes(packet)
    if size_bytes > max_bytes:
        raise BadDeflate(
            f"a packet of {size_bytes} bytes is announced as compressed, {max_bytes} are allowed"
        )
    stream = zlib.decompressobj(_RAW)
    try:
        whole = stream.decompress(memoryview(packet)[_SIZE.size :], size_bytes + 1)
    except zlib.error as error:
        raise BadDeflate(f"a compressed packet can't be read: {error}") from error
    if len(whole) != size_bytes or not stream.eof or stream.unused_data:
        raise BadDeflate(f"a compressed packet is not the {size_bytes} bytes that it announces")
    return whole
