"""What a sender holds, and what its machine asks of the shell: plain data beside `sender`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from domicile.core.admission import Flow
from domicile.core.ids import EntityKey, Incarnation, ShardKey


class Home(NamedTuple):
    """Where a shard lives, or lived."""

    owner: Incarnation
    epoch: int


class Letter(msgspec.Struct, eq=False):
    """One message at its sender. `load` is the shell's business."""

    n: int
    entity: EntityKey
    ask: bool
    chain: tuple[ShardKey, ...]
    size_bytes: int
    load: Any
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


# effects


@dataclass(frozen=True, slots=True)
class Write:
    """Send this request, stamped (H2)."""

    letter: Letter
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
class GiveUp:
    """Unknown what became of it: MaybeExecuted for an ask, `lost` for a tell (H6)."""

    letter: Letter


@dataclass(frozen=True, slots=True)
class Arm:
    """Call `tick` at this time."""

    at: float


Effect = Write | SendFlush | GiveUp | Arm


class Limits(NamedTuple):
    """I6: what one shard may hold at one sender."""

    buffer: int
    hold_bytes: int
    window: int
    hold_timeout_s: float
