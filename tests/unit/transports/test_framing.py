"""Packets in a stream of bytes: any cutting of the stream gives the same packets."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from domicile.transports.framing import FrameDecoder, FramingError, header

LIMIT = 300


def stream_of(packets: list[bytes]) -> bytes:
    return b"".join(header(len(packet)) + packet for packet in packets)


def cut(stream: bytes, cuts: list[int]) -> list[bytes]:
    """The stream in pieces, cut at these places (modulo its length)."""
    places = sorted({place % (len(stream) + 1) for place in cuts})
    return [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]


def decode(pieces: list[bytes], limit: int = LIMIT) -> tuple[list[bytes], bool]:
    """The packets, and whether the stream turned out to be none. The buffer is reused."""
    decoder, packets = FrameDecoder(limit), list[bytes]()
    buffer = bytearray(max(map(len, pieces), default=0))
    try:
        for piece in pieces:
            buffer[: len(piece)] = piece
            packets.extend(decoder.feed(memoryview(buffer)[: len(piece)]))
            buffer[:] = b"\xee" * len(buffer)
    except FramingError:
        return packets, True
    return packets, False


@given(st.lists(st.binary(max_size=LIMIT), max_size=12), st.lists(st.integers(0, 5000)))
@example([b"", b"", b""], [1, 2, 3, 4, 5])
@example([b"a" * LIMIT], [4])
def test_any_cutting_gives_the_same_packets(packets: list[bytes], cuts: list[int]) -> None:
    assert decode(cut(stream_of(packets), cuts)) == (packets, False)


@given(st.lists(st.binary(max_size=20), max_size=4), st.binary(), st.lists(st.integers(0, 5000)))
def test_garbage_raises_nothing_but_the_framing_error(
    packets: list[bytes], garbage: bytes, cuts: list[int]
) -> None:
    stream = stream_of(packets) + garbage
    found, broken = decode(cut(stream, cuts))
    assert (found, broken) == decode([stream])
    assert found[: len(packets)] == packets


@pytest.mark.parametrize("pieces", [[4], [1, 2, 3], []])
def test_a_length_beyond_the_limit_is_refused_before_its_bytes_come(pieces: list[int]) -> None:
    fine = stream_of([b"x" * LIMIT])
    assert decode(cut(fine, pieces)) == ([b"x" * LIMIT], False)
    assert decode(cut(header(LIMIT + 1), pieces)) == ([], True)


def test_packets_before_the_garbage_are_given() -> None:
    decoder = FrameDecoder(LIMIT)
    found: list[bytes] = []
    with pytest.raises(FramingError, match="4294967295 bytes"):
        found.extend(decoder.feed(b"\x00\x00\x00\x01a\xff\xff\xff\xff"))
    assert found == [b"a"]


def test_it_knows_whether_a_packet_has_begun() -> None:
    decoder = FrameDecoder(LIMIT)
    seen: list[tuple[list[bytes], bool]] = []
    for piece in (b"\x00", b"\x00\x00\x01", b"a", b"\x00\x00\x00\x00"):
        seen.append((list(decoder.feed(piece)), decoder.inside))
    assert seen == [([], True), ([], True), ([b"a"], False), ([b""], False)]
