"""What a sender holds, and what its machine asks of the shell: plain data beside `sender`.

In which order, and when, what waits at a sender goes out: small rules of `sender`.

How long a call may take that a handler makes for its own caller: deadlines are passed down.

Pure arithmetic, used where asks begin. Nothing here waits.
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
    """Where a shard lives, or lived."""

    owner: Incarnation
    epoch: int


class Pending(msgspec.Struct, eq=False):
    """One message at its sender. A shell extends it by what only the shell needs to know."""

    n: int
    entity: EntityKey
    ask: bool
    chain: tuple[ShardKey, ...]
    size_bytes: int
    behind: Callable[[], Iterable[ShardKey]] | None = None
    """Shards whose handlers wait in line behind the one that sent this, as of now (N3)."""
    urgent: bool = False
    """Made finishing by a wave (N5), until the shard serves."""
    beyond: bool = False
    """Written although the window was full, for a handler that waits."""
    to: Incarnation | None = None
    started: bool = False
    resolved: bool = False
    flow: Flow | None = None
    """What counts it, since it was written."""


P = TypeVar("P", bound=Pending)


# effects


@dataclass(frozen=True, slots=True)
class WriteRequest(Generic[P]):
    """Send this request, stamped (H2)."""

    pending: P
    to: Incarnation
    epoch: int
    change: int
    finishing: bool
    open: int
    """Unstarted at that owner, this one included."""


@dataclass(frozen=True, slots=True)
class SendFlush:
    """Send `Flush` behind all requests written so far (H4)."""

    to: Incarnation
    id: int


@dataclass(frozen=True, slots=True)
class GiveUp(Generic[P]):
    """Unknown what became of it: MaybeExecuted for an ask, `lost` for a tell (H6)."""

    pending: P


SenderEffect = WriteRequest[P] | SendFlush | GiveUp[P] | Arm


class HoldLimits(NamedTuple):
    """I6: what one shard may hold at one sender."""

    buffer: int
    hold_bytes: int
    window: int
    hold_timeout_s: float


Selects = Callable[[P], bool]

FIRST_WAVE_S = 0.25
WAVE_STEP_MAX_S = 0.5
"""Waves never lie further apart: a long chain may need one for each of its steps (N5)."""


def number_of(pending: Pending) -> int:
    """What a queue is ordered by (H1)."""
    return pending.n


def is_nested(pending: Pending) -> bool:
    """Whether a running handler awaits it."""
    return pending.ask and bool(pending.chain)


def split_prefix(queue: Sequence[P], wanted: Selects[P]) -> tuple[list[P], list[P]]:
    """What goes out, and what stays: wanted ones, behind all others to the same entity (N4)."""
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
    """When queued asks of running handlers go to a draining shard next (N5)."""
    delay_s = FIRST_WAVE_S
    while moving_since + delay_s <= now:
        delay_s += min(delay_s, WAVE_STEP_MAX_S)
    return moving_since + delay_s


SLACK = 1 / 32
"""What remains to the handler of the time that is left, at least; and not much more than twice."""

BITS = 6
"""Of the rest, so many significant bits count."""


def nested_timeout_s(timeout_s: float, left_s: float) -> float:
    """The time that a nested ask gets: its own, but not more than its handler's caller waits.

    A part of what is left stays with the handler, so that it can still say so before its caller
    gives up if its own ask runs out of time. The rest is rounded down: asks of about the same time
    share a timer.
    """
    if left_s >= timeout_s:
        return timeout_s
    if left_s <= 0.0:
        return 0.0
    fraction, exponent = frexp(left_s * (1 - SLACK))
    return ldexp(int(fraction * (1 << BITS)), exponent - BITS)
