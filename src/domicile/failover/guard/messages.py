"""What an agent and its guard say to each other: one JSON object per line.

Only the agent asks. Every order but `ExtendDeadline` has a number and gets one answer. Agent and
guard may be of different versions: fields that one does not know are ignored.
"""

from __future__ import annotations

import msgspec

from domicile.failover.records import WriteQuorum

MOST_BYTES = 64 << 10
"""I6: the longest line. A quorum of 32 servers fits."""


class OpenServer(msgspec.Struct, frozen=True, tag="open"):
    """Accept writes in this epoch, until the deadline."""

    number: int
    epoch: int
    run: str
    until: float
    quorum: WriteQuorum | None = None


class ExtendDeadline(msgspec.Struct, frozen=True, tag="extend"):
    """The lease is valid until this time."""

    until: float


class ShutServer(msgspec.Struct, frozen=True, tag="shut"):
    """Forget the deadline and close the server now."""

    number: int


class GuardAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """An order was carried out, or was not."""

    number: int
    error: str = ""


GuardOrder = OpenServer | ExtendDeadline | ShutServer


def encode_line(message: GuardOrder | GuardAnswer) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


def decode_order(line: bytes) -> GuardOrder:
    """What an agent said; `msgspec.MsgspecError` if it makes no sense."""
    order: GuardOrder = msgspec.json.decode(line, type=GuardOrder)
    return order


def decode_answer(line: bytes) -> GuardAnswer:
    """What a guard said."""
    return msgspec.json.decode(line, type=GuardAnswer)
