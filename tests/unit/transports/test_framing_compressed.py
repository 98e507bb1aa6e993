"""Compressed packets: the same bytes at the other end, and no more memory than is allowed."""

from __future__ import annotations

import tracemalloc
import zlib
from random import Random
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domicile.transports.compress import BadDeflate, Deflated, deflate, inflate, inflated_bytes
from domicile.transports.framing import (
    DEFLATED,
    FIRST_BYTES,
    FrameDecoder,
    FramingError,
    header,
    header_of,
)

LIMIT = 1_000_000


def raw(data: bytes, level: int = 9) -> bytes:
    return zlib.compress(data, level, -zlib.MAX_WBITS)


def bomb(size_bytes: int, announced: int) -> Deflated:
    return Deflated(pack(">I", announced) + raw(b"\0" * size_bytes))


@given(st.binary(min_size=1, max_size=200), st.integers(1, 400))
def test_what_comes_out_is_what_went_in(piece: bytes, times: int) -> None:
    packet = piece * times
    small = deflate(packet)
    if small is not None:
        assert len(small) < 0.9 * len(packet)
        assert inflated_bytes(small) == len(packet)
        assert inflate(small, len(packet)) == packet


def test_bytes_that_do_not_shrink_are_left_alone() -> None:
    assert deflate(Random(1).randbytes(200_000)) is None
    assert deflate(Random(1).randbytes(1_000)) is None
    assert deflate(b"") is None


def test_a_sample_that_shrinks_does_not_decide_alone() -> None:
    noise = Random(1).randbytes(100_000)
    assert deflate(noise + b"\0" * 8_000 + noise) is None


@pytest.mark.parametrize(
    "packet",
    [
        bomb(50_000_000, 50_000_000),
        bomb(50_000_000, 1_000),
        bomb(1_000, 2_000),
        bomb(1_000, 999),
        Deflated(pack(">I", 4) + raw(b"abcd") + b"more"),
        Deflated(pack(">I", 4) + raw(b"abcd")[:-2]),
        Deflated(pack(">I", 10) + b"no deflate"),
        Deflated(b"\0\0\0\4"),
        Deflated(b""),
    ],
    ids=["bomb", "lying bomb", "short", "long", "trailing", "cut", "none", "header", "empty"],
)
def test_a_compressed_packet_that_is_none_costs_no_memory(packet: Deflated) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BadDeflate):
            inflate(packet, LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 2 * LIMIT
    finally:
        tracemalloc.stop()


def test_the_longest_packet_allowed_is_inflated() -> None:
    assert inflate(bomb(LIMIT, LIMIT), LIMIT) == b"\0" * LIMIT
    with pytest.raises(BadDeflate, match="1000001 bytes is announced"):
        inflate(bomb(LIMIT + 1, LIMIT + 1), LIMIT)


# in a stream


@given(st.lists(st.tuples(st.binary(max_size=40), st.booleans()), max_size=8), st.integers(1, 30))
def test_marked_packets_keep_their_mark_however_the_stream_is_cut(
    parts: list[tuple[bytes, bool]], step: int
) -> None:
    packets = [b"first", *(bomb(len(part), len(part)) if mark else part for part, mark in parts)]
    stream = b"".join(header_of(packet) + packet for packet in packets)
    decoder = FrameDecoder(LIMIT, FIRST_BYTES)
    found: list[bytes] = []
    for at in range(0, len(stream), step):
        found += decoder.feed(stream[at : at + step])
    assert found == packets
    assert [type(packet) for packet in found] == [type(packet) for packet in packets]
    assert not decoder.inside


@pytest.mark.parametrize("whole", [True, False])
def test_a_bomb_is_refused_in_the_stream_already(whole: bool) -> None:
    packet = bomb(2 * LIMIT, 2 * LIMIT)
    stream = header_of(b"first") + b"first" + header_of(packet) + packet
    decoder = FrameDecoder(LIMIT)
    if not whole:
        assert list(decoder.feed(stream[:20])) == [b"first"]
        stream = stream[20:]
    with pytest.raises(FramingError, match=f"announces {2 * LIMIT} bytes, {LIMIT} are allowed"):
        list(decoder.feed(stream))


def test_a_compressed_packet_too_short_for_its_size_is_refused() -> None:
    with pytest.raises(FramingError, match="is none"):
        list(FrameDecoder(LIMIT).feed(header(0) + header(3 | DEFLATED) + b"abc"))


def test_a_mark_makes_no_packet_longer_than_allowed() -> None:
    with pytest.raises(FramingError, match="are allowed"):
        list(FrameDecoder(100).feed(header(0) + header(101 | DEFLATED)))


# before anybody knows who speaks


def test_the_first_packet_is_a_short_one() -> None:
    long = b"x" * (FIRST_BYTES + 1)
    decoder = FrameDecoder(LIMIT, FIRST_BYTES)
    with pytest.raises(FramingError, match=f"the first packet announces {FIRST_BYTES + 1} bytes"):
        list(decoder.feed(header(len(long))))
    decoder = FrameDecoder(LIMIT, FIRST_BYTES)
    first = b"x" * FIRST_BYTES
    assert list(decoder.feed(header(len(first)) + first)) == [first]
    assert list(decoder.feed(header(len(long)) + long)) == [long]


def test_the_first_packet_is_not_a_compressed_one() -> None:
    packet = bomb(100, 100)
    with pytest.raises(FramingError, match="the first packet"):
        list(FrameDecoder(LIMIT, FIRST_BYTES).feed(header_of(packet) + packet))
