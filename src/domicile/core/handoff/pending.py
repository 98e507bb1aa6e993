"""Messages at their sender: their data, the effects of `sender`, and the rules of order and time.

`sender` uses the data and the order of sending. `nested_timeout_s` is for the code that begins an
ask: it limits the time of a call that a handler makes for its own caller. Nothing here waits or
reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import frexp, ldexp
from typing import Generic, NamedTuple, TypeVar

import msgspec

from domicile.core.handoff.admission import Flow
from domicile.core.ids import EntityKey, Incarnation, ShardKey
from domicile.core.machines import Arm


class Home(NamedTuple):
    """The owner and epoch of a shard, present or past."""

    owner: Incarnation
    epoch: int


class Pending(msgspec.Struct, eq=False):
    """One message at its sender. The shell's subclass adds what only the shell needs."""

    n: int
    entity: EntityKey
    ask: bool
    chain: tuple[ShardKey, ...]
    size_bytes: int
    behind: Callable[[], Iterable[ShardKey]] | None = None
    """Shards whose handlers wait, now, for the handler that sent this message (N3)."""
    urgent: bool = False
    """Whether a wave made this message finishing (N5); until the shard serves."""
    beyond: bool = False
    """Written although the window was full, because a handler waits for it."""
    to: Incarnation | None = None
    started: bool = False
    resolved: bool = False
    flow: Flow | None = None
    """The flow that counts the message, since it was written."""


P = TypeVar("P", bound=Pending)


# effects


@dataclass(frozen=True, slots=True)
class WriteRequest(Generic[P]):
    """Send this request, stamped with epoch and change (H2)."""

    pending: P
    to: Incarnation
    epoch: int
    change: int
    finishing: bool
    open: int
    """Messages not started at that owner, this message included."""


@dataclass(frozen=True, slots=True)
class SendFlush:
    """Send `Flush` behind all requests written so far (H4)."""

    to: Incarnation
    id: int


@dataclass(frozen=True, slots=True)
class GiveUp(Generic[P]):
    """The outcome is unknown: MaybeExecuted for an ask, `lost` for a tell (H6)."""

    pending: P


SenderEffect = WriteRequest[P] | SendFlush | GiveUp[P] | Arm


class HoldLimits(NamedTuple):
    """I6: how much one sender may hold for one shard."""

    buffer: int
    hold_bytes: int
    window: int
    hold_timeout_s: float


Selects = Callable[[P], bool]

FIRST_WAVE_S = 0.25
WAVE_STEP_MAX_S = 0.5
"""Most seconds between two waves: a long chain may need one wave for each of its steps (N5)."""


def number_of(pending: Pending) -> int:
    """The number by which a queue is ordered (H1)."""
    return pending.n


def is_nested(pending: Pending) -> bool:
    """Whether a running handler awaits this message."""
    return pending.ask and bool(pending.chain)


def split_prefix(queue: Sequence[P], wanted: Selects[P]) -> tuple[list[P], list[P]]:
    """What goes out, and what stays. A wanted message goes out behind all earlier messages to the
    same entity (N4)."""
    last: dict[EntityKey, int] = {}
    for pending in queue:
        if wanted(pending):
            last[pending.entity] = pending.n
    goes: list[P] = []
    stays: list[P] = []
    for pending in queue:
        (goes if pending.n <= last.get(pending.entity, 0) else stays).append(pending)
    return goes, stays


def next_wave(moving_since: float, now: float) -> float:
    """When queued asks of running handlers next go to a draining shard (N5)."""
    delay_s = FIRST_WAVE_S
    while moving_since + delay_s <= now:
        delay_s += min(delay_s, WAVE_STEP_MAX_S)
    return moving_since + delay_s


SLACK = 1 / 32
"""Part of the remaining time that stays with the handler: at least this, not much more than twice
as much."""

BITS = 6
"""Significant bits of a nested timeout; the others are rounded down."""


def nested_timeout_s(timeout_s: float, left_s: float) -> float:
    """Seconds that a nested ask gets: its own timeout, but less than its handler's caller waits.

    `SLACK` of the remaining time stays with the handler. So after a timeout of its own ask it can
    still answer before its caller gives up. The rest is rounded down, so that asks with similar
    timeouts share a timer.
    """
    if left_s >= timeout_s:
        return timeout_s
    if left_s <= 0.0:
        return 0.0
    fraction, exponent = frexp(left_s * (1 - SLACK))
    return ldexp(int(fraction * (1 << BITS)), exponent - BITS)
