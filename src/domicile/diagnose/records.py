"""Which handlers have run for too long, and what is stored about them for `domicile status`
(DX-09).

The shell of an incarnation gathers what runs and asks a `Bulletin` what to write under its `stuck/`
key. Everything in a record is bounded (I6). It only reports: it ends no handler.

Also here: an operator's request to end the running handlers of one entity, `domicile kick`. The
command writes it under a lease of its own, so a request without an answer expires. The owner of the
entity's shard ends the handlers and stores the outcome under the same key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

MOST_TURNS = 16
MOST_LINES = 12
MOST_CHARS = 400
"""Characters kept of an id, a handler's name or a line of a stack."""

REFRESH_S = 10.0
"""Seconds after which an unchanged record is written again."""

LEAST_LOOK_S = 0.5
"""Seconds, at least, between two checks of what runs."""

KINDS = ("waits", "runs", "blocking")
"""Suspended, holding the event loop, or in a thread of its own."""


class StuckTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """One handler that has run for too long. `since_s` is on its node's clock."""

    role: str
    shard: int
    type: str
    id: str
    handler: str
    since_s: float
    kind: str = "waits"
    queue: int = 0
    """Messages that wait for the entity behind it."""
    stack: tuple[str, ...] = ()
    """`file:line function`, the innermost last."""


class StuckRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The report of an incarnation under `stuck/`, at `at_s` on its own clock."""

    at_s: float
    turns: tuple[StuckTurn, ...]
    more: int = 0
    """How many more handlers are stuck than are named."""
    residents: int = 0

    def age_s(self, turn: StuckTurn, now_s: float | None = None) -> float:
        """How long a turn has run: at `now_s` on the same clock, else when this was written."""
        seen_s = self.at_s if now_s is None else max(now_s, self.at_s)
        return max(0.0, seen_s - turn.since_s)


def encode_stuck(record: StuckRecord) -> bytes:
    """The stored form: JSON, as all records."""
    return msgspec.json.encode(record)


def decode_stuck(value: bytes) -> StuckRecord:
    """A record from its stored form; raises `msgspec.MsgspecError`."""
    return msgspec.json.decode(value, type=StuckRecord)


def bounded_text(text: str) -> str:
    """The text, cut in its middle if it is too long; one that can be stored as UTF-8."""
    if len(text) > MOST_CHARS:
        half = MOST_CHARS // 2
        text = f"{text[:half]}…{text[-half + 1 :]}"
    return text.encode("utf-8", "replace").decode()


def bounded_stack(lines: Sequence[str]) -> tuple[str, ...]:
    """Both ends of a stack: how the handler began, and where it is now."""
    if len(lines) > MOST_LINES:
        first = MOST_LINES // 3
        last = MOST_LINES - first - 1
        cut = len(lines) - first - last
        lines = [*lines[:first], f"… {cut} more …", *lines[-last:]]
    return tuple(map(bounded_text, lines))


@dataclass(frozen=True, slots=True)
class Publish:
    """Write this record, in the place of an earlier one."""

    record: StuckRecord


@dataclass(frozen=True, slots=True)
class Withdraw:
    """No handler is stuck any more: remove the record."""


class Bulletin:
    """Decides when the record of one incarnation is written: only if it says something new."""

    __slots__ = ("_said", "_said_at", "_stuck_s")

    def __init__(self, stuck_s: float) -> None:
        self._stuck_s = stuck_s
        self._said: tuple[object, ...] = ()
        self._said_at = 0.0

    @property
    def stands(self) -> bool:
        """Whether a record may be in the store."""
        return bool(self._said)

    def late(self, since_s: float, now_s: float) -> bool:
        """Whether a handler that began at `since_s` has run for too long."""
        return now_s - since_s >= self._stuck_s

    def decide(
        self, turns: Sequence[StuckTurn], more: int, residents: int, now_s: float
    ) -> Publish | Withdraw | None:
        """What to write, given all stuck handlers, the oldest first."""
        assert len(turns) <= MOST_TURNS, "the gatherer names no more (I6)"
        if not turns:
            return Withdraw() if self._said else None
        # A growing queue or a changed stack alone is not written; the next record shows it.
        said = tuple((one.type, one.id, one.handler, one.since_s, one.kind) for one in turns)
        if said == self._said and now_s < self._said_at + REFRESH_S:
            return None
        return Publish(StuckRecord(now_s, tuple(turns), more, residents))

    def written(self, done: Publish | Withdraw) -> None:
        """The store has taken it."""
        if isinstance(done, Withdraw):
            self._said = ()
            return
        self._said_at = done.record.at_s
        self._said = tuple(
            (one.type, one.id, one.handler, one.since_s, one.kind) for one in done.record.turns
        )

    def unsure(self, tried: Publish | Withdraw) -> None:
        """The store may have taken it: write it again, and withdraw it in any case."""
        if isinstance(tried, Publish):
            self._said = self._said or ("?",)
            self._said_at = float("-inf")

    def next_look(self, oldest_s: float | None, now_s: float) -> float | None:
        """When to check again, given when the oldest suspended handler began; None: never."""
        if oldest_s is None and not self._said:
            return None
        soonest = now_s + LEAST_LOOK_S
        if oldest_s is None or self.late(oldest_s, now_s):
            return soonest
        return max(soonest, oldest_s + self._stuck_s)


KICKED = "kicked by an operator"
"""The reason that the caller gets, besides that the handler may have run."""

KICK_TTL_S = 30.0


class KickOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outcome for the turns of a kicked entity."""

    ended: int = 0
    """Handlers that were cancelled and have ended."""
    dropped: int = 0
    """Handlers that ignored an earlier kick: never resumed; the entity starts again."""
    ignoring: int = 0
    """Handlers that were cancelled and have not ended yet."""
    blocking: int = 0
    """Handlers in threads, which nothing can interrupt."""
    waiting: int = 0
    """Messages that wait for the entity."""

    @property
    def ran(self) -> bool:
        """Whether anything ran."""
        return bool(self.ended or self.dropped or self.ignoring or self.blocking)


class KickRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request to kick, and later its outcome, as stored."""

    by: str
    lease: str
    outcome: KickOutcome | None = None


def encode_kick(record: KickRecord) -> bytes:
    """The stored form."""
    return msgspec.json.encode(record)


def decode_kick(value: bytes) -> KickRecord:
    """A request from its stored form; raises `msgspec.MsgspecError`."""
    return msgspec.json.decode(value, type=KickRecord)
