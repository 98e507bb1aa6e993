"""Compresses large packets, if that saves enough.

Called by the link layer on both ends and by the framing, which marks such packets in the stream.
Nothing here may do I/O or trust a size: the announced length is compared with the limit before a
byte is inflated, and inflating stops there (I6).
"""

from __future__ import annotations

import zlib
from struct import Struct

PAYS = 0.9
"""A packet is sent compressed only if its size falls below this fraction."""

SAMPLE_BYTES = 4 * 1024
"""Bytes from the packet's middle that are compressed first, so that incompressible packets cost
little."""

_LEVEL = 1
_RAW = -zlib.MAX_WBITS
_SIZE = Struct(">I")


class Deflated(bytes):
    """A compressed packet: its inflated size, four bytes, big-endian, then a raw deflate stream."""

    __slots__ = ()


class BadDeflate(ValueError):
    """Not a compressed packet, or too long. The caller closes that connection."""


def deflate(packet: bytes) -> Deflated | None:
    """The packet compressed, or None if that saves too little."""
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
    """The inflated length that a compressed packet announces; raises `BadDeflate`."""
    if len(packet) <= _SIZE.size:
        raise BadDeflate(f"a compressed packet of {len(packet)} bytes is none")
    return int(_SIZE.unpack_from(packet)[0])


def inflate(packet: Deflated, max_bytes: int) -> bytes:
    """The packet as it was; raises `BadDeflate` unless its length is as announced and within the
    limit."""
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
