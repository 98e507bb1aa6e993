"""The messages between incarnations, as typed arrays (msgpack). Never pickled.

Links, incarnations and the entity runtime use these types. The sender of requests dials the link:
`ToOwner` messages go out on it, `ToSender` messages come back on it. Messages of one link never
overtake each other. Data only. The encoding is a contract between versions of the wire protocol.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec

from domicile.core.ids import Incarnation
from domicile.core.state.shardmap import Count, Entry

MOST_MESSAGES = 65_536
"""I6: most messages in one frame; several times what a link puts into one frame."""

MOST_NUMBERS = 1 << 20
"""Most messages that one answer may name: the largest possible window."""

MOST_CALLERS = 4_096
"""Most handlers in one chain; `Settings.chain` is far below (N1)."""

Name = Annotated[Incarnation, msgspec.Meta(max_length=64)]
Short = Annotated[str, msgspec.Meta(max_length=1_024)]
Numbers = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_NUMBERS)]
Proof = Annotated[bytes, msgspec.Meta(max_length=128)]
"""Room for the proofs of all secrets that a token may have while it is changed."""
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e300)]
"""Finite and not negative: a NaN from a peer would corrupt the order of the loop's timers."""


class Wire(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", gc=False):
    """Base of everything on the wire."""


class CallingTurn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A handler that waits for the call whose chain names it (N1)."""

    role: str
    shard: Count
    type: str
    id: str
    shared: bool


class Request(Wire, frozen=True, tag="q"):
    """A tell or ask, stamped with the epoch and change that the sender knows (H2)."""

    role: str
    shard: Count
    n: Count
    epoch: Count
    change: Count
    type: str
    id: str
    method: str
    body: bytes
    ask: bool
    finishing: bool
    ttl_s: Seconds
    chain: Annotated[tuple[CallingTurn, ...], msgspec.Meta(max_length=MOST_CALLERS)] = ()
    key: str = ""
    trace: str = ""
    """The W3C trace context of the sender, if the call is traced."""


class Cancel(Wire, frozen=True, tag="x"):
    """The caller no longer waits for its request: do not start it."""

    role: str
    shard: Count
    n: Count


def weight_bytes(body: bytes, *texts: str) -> int:
    """Approximate size of a message on the wire. It includes ids, whose length the application
    chooses."""
    return len(body) + sum(
        [len(text) if text.isascii() else len(text.encode(errors="replace")) for text in texts]
    )


class Flush(Wire, frozen=True, tag="f"):
    """Return all unstarted messages that this sender has at this shard, then answer `Flushed` (H4).
    It travels in order with requests."""

    role: str
    shard: Count
    id: int


class Goodbye(Wire, frozen=True, tag="g"):
    """The owner that sends this leaves: write no more messages to it, flush, acknowledge (H14)."""


class GoodbyeAck(Wire, frozen=True, tag="ga"):
    """The process that sends this will write no more messages to the leaving node (H14)."""


class Released(Wire, frozen=True, tag="rel"):
    """To the leader: the owner has finished this epoch of the shard, finally (H10).

    `floor`: an epoch that a journal has seen; the shard's next epoch must be newer (J1).
    """

    role: str
    shard: Count
    epoch: Count
    floor: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] = 0


class AskRevert(Wire, frozen=True, tag="rev"):
    """To the leader: a balancing move missed its drain deadline; revert it (H10)."""

    role: str
    shard: Count
    epoch: Count


class Told(Wire, frozen=True, tag="t"):
    """From the leader: a stored entry (C3). It is merged only if it is newer, so repeating it is
    harmless."""

    role: str
    shard: Count
    entry: Entry


class Ping(Wire, frozen=True, tag="pi"):
    """Ask the receiver for a `Pong` (C7)."""

    id: int


class Suspect(Wire, frozen=True, tag="su"):
    """To the leader: the named node does not answer the process that sends this (SM-08)."""

    node: Name


class Probe(Wire, frozen=True, tag="pr"):
    """From the leader: try to reach this node, and answer with `Probed` (C6)."""

    node: Name


class Probed(Wire, frozen=True, tag="pd"):
    """To the leader: whether that node answered within the time of a ping (C6)."""

    node: Name
    reached: bool


class Carried(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The fields of one entity that a planned move carries."""

    type: str
    id: str
    body: bytes


class CarriedTimer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A pending timer of one entity, which a planned move takes along (DX-25)."""

    type: str
    id: str
    method: str
    """The attribute of the entity's class that it calls."""
    left_s: Seconds
    """Seconds until it is due; 0 if it is due already."""
    body: bytes
    """The encoded arguments."""


class Carry(Wire, frozen=True, tag="ca"):
    """From the old owner to the next: what a shard's entities of this epoch take along (DX-13).

    The next owner answers with `CarryTaken`.
    """

    role: str
    shard: Count
    epoch: Count
    id: int
    entities: tuple[Carried, ...]
    timers: tuple[CarriedTimer, ...] = ()


ToOwner = (
    Request
    | Flush
    | GoodbyeAck
    | Released
    | AskRevert
    | Told
    | Ping
    | Suspect
    | Probe
    | Probed
    | Cancel
    | Carry
)


class ReplyStatus(IntEnum):
    """The outcome of an ask (I9)."""

    OK = 0
    FAILED = 1
    REJECTED = 2
    NOT_EXECUTED = 3
    OVERLOADED = 4
    MAYBE_EXECUTED = 5
    CYCLE = 6


class Reply(Wire, frozen=True, tag="a"):
    """The outcome of one message. A tell gets a reply only if it was refused."""

    role: str
    shard: Count
    n: Count
    status: ReplyStatus
    body: bytes


class Begun(Wire, frozen=True, tag="b"):
    """These messages of one role began to run, so they no longer count against the window.
    `shards[i]` is the shard of message `ns[i]`."""

    role: str
    shards: Numbers
    ns: Numbers


class Return(Wire, frozen=True, tag="r"):
    """These messages did not run and will never run at this owner; the entry says why (H3)."""

    role: str
    shard: Count
    ns: Numbers
    entry: Entry
    released: bool


class Flushed(Wire, frozen=True, tag="fd"):
    """Every message written before the `Flush` with this id has started or was returned (H5)."""

    role: str
    shard: Count
    id: int
    entry: Entry
    released: bool


class Pong(Wire, frozen=True, tag="po"):
    """The answer to `Ping`."""

    id: int


class CarryTaken(Wire, frozen=True, tag="ct"):
    """The next owner keeps the fields of the `Carry` with this id until the shard opens."""

    id: int


ToSender = Reply | Begun | Return | Flushed | Goodbye | Pong | CarryTaken

Message = ToOwner | ToSender


class Hello(Wire, frozen=True, tag="h"):
    """The dialler's first packet on a connection: the link, whether it is new or resumed, and the
    last frame received."""

    cluster: Short
    sender: Name
    receiver: Name
    address: Short
    link: Short
    session: Count
    resume: bool
    received: Count
    protocol: Count = 1
    """The oldest protocol that the dialler speaks."""
    newest: Count = 0
    """The newest protocol that the dialler speaks; 0 if it speaks only `protocol`."""
    proof: Proof = b""
    """Proof that the dialler knows the cluster's token; valid for this hello alone (DX-07)."""


class Welcome(Wire, frozen=True, tag="w"):
    """The accepter's answer: it has all frames up to `received`; the dialler resends the rest."""

    received: Count
    protocol: Count = 1
    """The protocol of this link: the newest that both ends know."""
    proof: Proof = b""
    """Proof that the accepter knows the token too; valid for that hello alone."""


class Refused(Wire, frozen=True, tag="n"):
    """The accepter's answer: the link cannot be opened or resumed; `reason` says why."""

    reason: str


class Frame(Wire, frozen=True, tag="m"):
    """Messages of one loop turn, under the number `no`. `ack` is cumulative. A frame without
    messages only acknowledges (`no` is 0)."""

    no: Count
    ack: Count
    messages: Annotated[tuple[Message, ...], msgspec.Meta(max_length=MOST_MESSAGES)]


class Look(Wire, frozen=True, tag="l"):
    """The first and only packet of a tool: it asks for an incarnation's `Figures`, and opens no
    link."""

    cluster: Short
    receiver: Name
    nonce: Count
    """Chosen at random by the tool: an answer holds for one question."""
    proof: Proof = b""


class Figures(Wire, frozen=True, tag="lf"):
    """The accepter's answer to `Look`: how busy this incarnation is now."""

    at_s: Seconds
    """The time on the accepter's own clock."""
    turns: Count
    """Handlers begun since the incarnation began."""
    residents: Count
    queued: Count
    """Messages that wait for a turn."""
    open_asks: Count
    loop_lag_s: Seconds | None = None
    lease_left_s: Seconds | None = None
    """None: its lease has no end."""
    proof: Proof = b""


Packet = Hello | Welcome | Refused | Frame | Look | Figures

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Packet] = msgspec.msgpack.Decoder(Packet)


def encode_packet(packet: Packet) -> bytes:
    """The bytes of one packet."""
    return _encoder.encode(packet)


def decode_packet(data: bytes) -> Packet:
    """A packet from its bytes; raises `msgspec.DecodeError` or `ValidationError` on garbage."""
    return _decoder.decode(data)
