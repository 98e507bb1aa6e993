"""What a hostile peer may send: a corpus of bytes, and strategies for packets that nearly fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from hypothesis import strategies as st

from domicile.core.ids import Incarnation
from domicile.core.state.shardmap import Entry
from domicile.core.wire import (
    AskRevert,
    Begun,
    Cancel,
    Carried,
    Carry,
    Flush,
    Flushed,
    Frame,
    Goodbye,
    GoodbyeAck,
    Hello,
    Ping,
    Pong,
    Probe,
    Probed,
    Refused,
    Released,
    Reply,
    ReplyStatus,
    Request,
    Return,
    Suspect,
    Told,
    Welcome,
    encode_packet,
)

CORPUS = Path(__file__).parent / "corpus"


def corpus(name: str) -> dict[str, bytes]:
    """The bytes of a file of the corpus, by their names."""
    lines = (CORPUS / name).read_text(encoding="ascii").splitlines()
    named = (line.partition(" ") for line in lines if not line.startswith("#"))
    return {title: bytes.fromhex(digits) for title, _, digits in named}


NOT_PACKETS = corpus("packets.txt")
NOT_STREAMS = corpus("streams.txt")

TAGS = [
    *("q", "x", "f", "ga", "rel", "rev", "t", "pi", "su", "pr", "pd", "ca"),
    *("a", "s", "r", "fd", "g", "po", "ct"),
    *("h", "w", "n", "m"),
]
"""Of messages to owners, messages to senders, and packets."""

HERE = Incarnation("a" * 32)
ROGUE = Incarnation("f" * 32)

EXTREMES = (0, 1, 2, 63, 255, 256, 2**31, 2**32, 2**53, 2**62 - 1, 2**62, 2**63, 2**64 - 1)
wild_numbers = st.sampled_from([*EXTREMES, *(-number for number in EXTREMES if number < 2**63)])
wild_values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | wild_numbers
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.sampled_from([*TAGS, "serving", "moving", "default", HERE, ROGUE]),
    lambda inner: st.lists(inner, max_size=14),
    max_leaves=24,
)


def packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


near_messages = st.tuples(st.sampled_from(TAGS), st.lists(wild_values, max_size=14)).map(
    lambda made: [made[0], *made[1]]
)
near_frames = st.tuples(wild_numbers, wild_numbers, st.lists(near_messages, max_size=4)).map(
    lambda made: packed(["m", *made])
)
near_packets = near_messages.map(packed) | near_frames | wild_values.map(packed)

# Whatever the decoder lets through.

numbers = st.sampled_from([0, 1, 2, 3, 7, 63, 64, 10**6, 2**53, 2**62 - 1])
roles = st.sampled_from(["default", "other", "", "r" * 300])
incarnations = st.sampled_from([HERE, ROGUE, Incarnation(""), Incarnation("x" * 64)])
entries = st.builds(
    Entry,
    incarnations,
    numbers,
    st.sampled_from(["free", "serving", "moving", "quarantined"]),
    incarnations,
    numbers,
    st.text(max_size=3),
    numbers,
)
some = st.lists(numbers, max_size=6).map(tuple)
ids = st.sampled_from(["i", "", "i" * 2_000])
requests = st.builds(
    Request, roles, numbers, numbers, numbers, numbers,
    st.sampled_from(["counter", "unheard"]), ids, st.sampled_from(["add", "gone"]),
    st.binary(max_size=4), st.booleans(), st.booleans(), st.sampled_from([0.0, 1.0, 1e300]),
)  # fmt: skip
to_owner = (
    requests
    | st.builds(Flush, roles, numbers, wild_numbers)
    | st.builds(GoodbyeAck)
    | st.builds(Released, roles, numbers, numbers, st.sampled_from([0, 5, 2**53]))
    | st.builds(AskRevert, roles, numbers, numbers)
    | st.builds(Told, roles, numbers, entries)
    | st.builds(Ping, wild_numbers)
    | st.builds(Suspect, incarnations)
    | st.builds(Probe, incarnations)
    | st.builds(Probed, incarnations, st.booleans())
    | st.builds(Cancel, roles, numbers, numbers)
    | st.builds(
        Carry, roles, numbers, numbers, wild_numbers,
        st.lists(st.builds(Carried, ids, ids, st.binary(max_size=4)), max_size=3).map(tuple),
    )
)  # fmt: skip
to_sender = (
    st.builds(Reply, roles, numbers, numbers, st.sampled_from(ReplyStatus), st.binary(max_size=4))
    | st.builds(Begun, roles, some, some)
    | st.builds(Return, roles, numbers, some, entries, st.booleans())
    | st.builds(Flushed, roles, numbers, wild_numbers, entries, st.booleans())
    | st.builds(Goodbye)
    | st.builds(Pong, wild_numbers)
)
messages = to_owner | to_sender
frames = st.builds(Frame, numbers, numbers, st.lists(messages, max_size=4).map(tuple))
hellos = st.builds(
    Hello, st.sampled_from(["test", "other", ""]), incarnations, incarnations,
    st.sampled_from(["", "x:1"]), st.sampled_from(["l", "m", "local"]), numbers, st.booleans(),
    numbers, numbers, numbers, st.binary(max_size=8),
)  # fmt: skip
welcomes = st.builds(Welcome, numbers, numbers, st.binary(max_size=8))
packets = frames | hellos | welcomes | st.builds(Refused, st.text(max_size=20))


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """A packet that fits, with some bytes changed, dropped or doubled."""
    data = bytearray(encode_packet(draw(packets)))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["change", "drop", "double", "cut"]))
        if kind == "change":
            data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
        elif kind == "drop":
            del data[at : at + draw(st.integers(1, 4))]
        elif kind == "double":
            data[at:at] = data[at : at + 8]
        else:
            del data[at:]
    return bytes(data)


hostile_bytes = st.binary(max_size=64) | near_packets | mutations()
