"""What travels between incarnations, as typed arrays (msgpack). Never pickled.

A link is dialled by the sender of requests: `ToOwner` messages go out on it, `ToSender`
messages come back on it. Within a link nothing overtakes.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

import msgspec

from domicile.core.ids import Incarnation
from domicile.core.state.shardmap import Count, Entry

MOST_MESSAGES = 65_536
"""I6: messages of one frame, several times what any link puts into one."""

MOST_NUMBERS = 1 << 20
"""Messages that one answer may be about: as many as a window can be made wide."""

MOST_CALLERS = 4_096
"""Handlers of one chain; `Settings.chain` is far below (N1)."""

Name = Annotated[Incarnation, msgspec.Meta(max_length=64)]
Short = Annotated[str, msgspec.Meta(max_length=1_024)]
Numbers = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_NUMBERS)]
Proof = Annotated[bytes, msgspec.Meta(max_length=128)]
"""Of as many secrets as a token may have while it is being changed."""
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e300)]
"""No time that is none: comparing with it would put a loop's timers out of order."""


class Wire(msgspec.Struct, frozen=True, array_like=True, tag_field="kind", gc=False):
    """Base of everything on the wire."""


class CallingTurn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A handler that waits for the call carrying it (N1)."""

    role: str
    shard: Count
    type: str
    id: str
    shared: bool


class Request(Wire, frozen=True, tag="q"):
    """A tell or ask, stamped with the home that the sender believes in (H2)."""

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
    """The W3C trace context of whoever sent it, if it is traced."""


class Cancel(Wire, frozen=True, tag="x"):
    """The caller waits no more for its request: do not start it."""

    role: str
    shard: Count
    n: Count


def weight_bytes(body: bytes, *texts: str) -> int:
    """About what a message weighs on the wire: ids are as long as an application makes them."""
    return len(body) + sum(
        [len(text) if text.isascii() else len(text.encode(errors="replace")) for text in texts]
    )


class Flush(Wire, frozen=True, tag="f"):
    """Return all my unstarted mail of this shard, then answer `Flushed` (H4). Request lane."""

    role: str
    shard: Count
    id: int


class Goodbye(Wire, frozen=True, tag="g"):
    """The owner at the other end leaves: stop writing to it, flush, acknowledge (H14)."""


class GoodbyeAck(Wire, frozen=True, tag="ga"):
    """Nothing more will be written to the leaving node by the sender of this."""


class Released(Wire, frozen=True, tag="rel"):
    """To the leader: this epoch of the shard is over here, finally (H10).

    `floor`: an epoch that a journal has seen, so the next must be newer (J1).
    """

    role: str
    shard: Count
    epoch: Count
    floor: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] = 0


class AskRevert(Wire, frozen=True, tag="rev"):
    """To the leader: a balancing move missed its drain deadline, take it back (H10)."""

    role: str
    shard: Count
    epoch: Count


class Told(Wire, frozen=True, tag="t"):
    """From the leader: a stored entry (C3). Merged if newer, so it can only repeat history."""

    role: str
    shard: Count
    entry: Entry


class Ping(Wire, frozen=True, tag="pi"):
    """Are you there? (C7)"""

    id: int


class Suspect(Wire, frozen=True, tag="su"):
    """To the leader: this node does not answer its sender (SM-08)."""

    node: Name


class Probe(Wire, frozen=True, tag="pr"):
    """From the leader: can you reach that node? Answered by `Probed` (C6)."""

    node: Name


class Probed(Wire, frozen=True, tag="pd"):
    """To the leader: whether that node answered within the time of a ping (C6)."""

    node: Name
    reached: bool


class Carried(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The fields of one entity, taken along on a planned move."""

    type: str
    id: str
    body: bytes


class Carry(Wire, frozen=True, tag="ca"):
    """From the old owner to the next: fields of a shard's entities, of that epoch (DX-13).

    Answered by `CarryTaken`.
    """

    role: str
    shard: Count
    epoch: Count
    id: int
    entities: tuple[Carried, ...]


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
    """What became of an ask (I9)."""

    OK = 0
    FAILED = 1
    REJECTED = 2
    NOT_EXECUTED = 3
    OVERLOADED = 4
    MAYBE_EXECUTED = 5
    CYCLE = 6


class Reply(Wire, frozen=True, tag="a"):
    """The outcome of one message. Tells get one only if they were refused."""

    role: str
    shard: Count
    n: Count
    status: ReplyStatus
    body: bytes


class Begun(Wire, frozen=True, tag="b"):
    """These messages began to run, so they no longer count against the window: shards and numbers
    of one role, each number with its own shard."""

    role: str
    shards: Numbers
    ns: Numbers


class Return(Wire, frozen=True, tag="r"):
    """These messages did not run and never will here; the entry says why (H3)."""

    role: str
    shard: Count
    ns: Numbers
    entry: Entry
    released: bool


class Flushed(Wire, frozen=True, tag="fd"):
    """Everything written before that `Flush` has started or was returned (H5)."""

    role: str
    shard: Count
    id: int
    entry: Entry
    released: bool


class Pong(Wire, frozen=True, tag="po"):
    """I am here."""

    id: int


class CarryTaken(Wire, frozen=True, tag="ct"):
    """That `Carry` is kept here until the shard opens."""

    id: int


ToSender = Reply | Begun | Return | Flushed | Goodbye | Pong | CarryTaken

Message = ToOwner | ToSender


class Hello(Wire, frozen=True, tag="h"):
    """The dialler's first word on a connection: which link this is, new or resumed, and how far."""

    cluster: Short
    sender: Name
    receiver: Name
    address: Short
    link: Short
    session: Count
    resume: bool
    received: Count
    protocol: Count = 1
    """The oldest protocol that the dialler speaks; one that knows only one asks for that."""
    newest: Count = 0
    """The newest one; 0 from a dialler that speaks no other than `protocol`."""
    proof: Proof = b""
    """That the dialler knows the cluster's token, for this hello alone (DX-07)."""


class Welcome(Wire, frozen=True, tag="w"):
    """The accepter's answer: it has everything up to `received`; resend the rest."""

    received: Count
    protocol: Count = 1
    """What this link speaks: the newest protocol that both ends know."""
    proof: Proof = b""
    """That the accepter knows the token, too, for that hello alone."""


class Refused(Wire, frozen=True, tag="n"):
    """The accepter's answer: this link cannot be resumed, or this is not the right door."""

    reason: str


class Frame(Wire, frozen=True, tag="m"):
    """Numbered messages of one loop turn; `ack` is cumulative. No messages: a bare ack (`no` 0)."""

    no: Count
    ack: Count
    messages: Annotated[tuple[Message, ...], msgspec.Meta(max_length=MOST_MESSAGES)]


Packet = Hello | Welcome | Refused | Frame

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Packet] = msgspec.msgpack.Decoder(Packet)


def encode_packet(packet: Packet) -> bytes:
    """The bytes of one packet."""
    return _encoder.encode(packet)


def decode_packet(data: bytes) -> Packet:
    """A packet from its bytes; raises `msgspec.DecodeError` or `ValidationError` on garbage."""
    return _decoder.decode(data)
