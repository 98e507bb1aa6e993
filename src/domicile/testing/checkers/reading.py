"""What several checkers need from a history, read once: map changes, deaths, faults.

Used by the checkers only. Nothing here judges; it decodes what the store was given and says
which processes lived when and when the cluster was disturbed.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from domicile.core.ids import MAP, ShardKey
from domicile.core.shardmap import BLOCK_SIZE, FREE, Entry, decode_block, parse_block_key
from domicile.testing.history import Event, History
from domicile.testing.real_history import RealHistory

GRACE_S = 15.0
"""How long after a fault its effects may still show, and after `quiet` things may settle."""

_ENDS = {
    **dict.fromkeys(("block", "delay", "lag", "loss", "outage", "partition", "slow"), ("heal",)),
    "freeze": ("thaw", "crash"),
    "full": ("free",),
    "stall": ("flow",),
}
"""Faults that go on, and what ends them; `quiet` ends all. A freeze ends for its own process."""

STARVED = "starved"
"""A stretch of time in which the machine let nobody run: a pause of everyone."""

FRAME_S = 0.002
"""The replies of one frame are noted within this time."""


class Stored(NamedTuple):
    """One entry of the map that a commit changed."""

    event: Event
    shard: ShardKey
    before: Entry
    after: Entry


class Message(NamedTuple):
    """The name of a message: its sender and its number in that shard (H1)."""

    sender: str
    role: str
    shard: int
    n: int

    def __str__(self) -> str:
        return f"message {self.n} of {self.sender[:8] or 'a timer'} for {self.role}/{self.shard}"


class Spans:
    """Stretches of time, merged, to be asked for an overlap in logarithmic time."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, spans: list[tuple[float, float]]) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        for start, end in sorted(spans):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def overlap(self, start: float, end: float) -> bool:
        """True if some stretch shares a moment with [start, end]."""
        index = bisect_left(self._ends, start)
        return index < len(self._ends) and self._starts[index] <= end


class Reading:
    """A history with its commits decoded and its lives and faults listed."""

    def __init__(self, history: History) -> None:
        self.end = history.events[-1].at if history.events else 0.0
        self.stored: dict[int, list[Stored]] = {}
        """Changed map entries, by the position of their commit in the history."""
        self.lives: dict[str, Event] = {}
        self.deaths: dict[str, Event] = {}
        """Per incarnation the crash, fence or end after which it owes nobody anything."""
        self.freezes: dict[str, list[tuple[float, float]]] = {}
        """Per incarnation its pauses; one that never thawed lasts to the end, and a machine that
        let nobody run paused all that had begun by then."""
        self.quiet_at: float | None = None
        self.rewound_at: float | None = None
        """When the store last went back to an earlier state (S5)."""
        self.slack_s = history.slack_s if isinstance(history, RealHistory) else 0.0
        """How late timers may be: not at all in virtual time."""
        self.rest_of_turn: dict[int, None] = {}
        """Positions of what a real process did between a pause and its next guard."""
        spans: list[tuple[float, float]] = []
        lasting: dict[tuple[str, str], float] = {}
        blocks: dict[bytes, tuple[Entry, ...]] = {}
        for position, event in enumerate(history.events):
            at, kind, fields = event
            if kind == "commit":
                changed = [
                    change
                    for key, value, *_ in fields["puts"]
                    if key.startswith(MAP)
                    for change in _changes(event, key, value, blocks)
                ]
                if changed:
                    self.stored[position] = changed
            elif kind == "rewound":
                self.rewound_at = at
                items = fields["items"]
                blocks = {
                    key: decode_block(value).entries for key, value in items if key.startswith(MAP)
                }
            elif kind == "life":
                self.lives[fields["inc"]] = event
            elif kind in ("fenced", "ended"):
                self.deaths.setdefault(fields["inc"], event)
            elif kind == "fault":
                spans.append((at, at))
                self._fault(event, spans, lasting)
            elif kind == "quiet":
                self.quiet_at = at
                spans.extend((start, at) for start in lasting.values())
                lasting.clear()
        spans.extend((start, self.end) for start in lasting.values())
        for (fault, inc), start in lasting.items():
            if fault == "freeze":
                self.freezes.setdefault(inc, []).append((start, self.end))
        self.disturbed = Spans([(start, end + GRACE_S) for start, end in spans])
        if isinstance(history, RealHistory):
            self._find_rests(history)

    def _find_rests(self, history: History) -> None:
        """I1c: a pause may fall between a guard and its deed, and then that deed comes late.

        One guard is good for one start, one resumption, or the replies of one frame, and nothing
        is noted in between: so it can only be the first that is heard of a process after a pause.
        """
        pauses = {inc: [end for _, end in sorted(all)] for inc, all in self.freezes.items()}
        frames: dict[str, tuple[str, float]] = {}
        for position, (at, kind, fields) in enumerate(history.events):
            inc = fields.get("inc")
            if inc not in pauses or kind == "fault":
                continue
            woken = False
            while pauses[inc] and pauses[inc][0] <= at:
                woken = True
                del pauses[inc][0]
            if kind == "reply" and woken:
                frames[inc] = (fields["sender"], at + FRAME_S)
            elif kind != "reply" or frames.get(inc, ("", at))[0] != fields["sender"]:
                frames.pop(inc, None)
            if (woken and kind in ("start", "resume")) or at <= frames.get(inc, ("", -1.0))[1]:
                self.rest_of_turn[position] = None

    def _fault(
        self,
        event: Event,
        spans: list[tuple[float, float]],
        lasting: dict[tuple[str, str], float],
    ) -> None:
        fault, inc = str(event.fields["fault"]), str(event.fields.get("inc") or "")
        if fault == STARVED:
            span = (event.at, float(event.fields["until"]))
            spans.append(span)
            for one in self.lives:
                self.freezes.setdefault(one, []).append(span)
            return
        if fault == "crash":
            self.deaths.setdefault(inc, event)
        if fault in _ENDS:
            lasting.setdefault((fault, inc), event.at)
            return
        for (name, whose), start in list(lasting.items()):
            if fault in _ENDS[name] and (name != "freeze" or whose == inc):
                del lasting[name, whose]
                spans.append((start, event.at))
                if name == "freeze":
                    self.freezes.setdefault(whose, []).append((start, event.at))

    def settled_at(self) -> float | None:
        """From when on everything must go smoothly; None if that never comes in this history."""
        if self.quiet_at is None or self.quiet_at + GRACE_S > self.end:
            return None
        return self.quiet_at + GRACE_S

    def name(self, inc: str) -> str:
        """A process as people know it."""
        life = self.lives.get(inc)
        return f"{life.fields['node']} ({inc[:8]})" if life else (inc[:8] or "nobody")

    def limits(self, inc: str) -> dict[str, Any]:
        """The bounds a process said it keeps; none if it never said."""
        life = self.lives.get(inc)
        return life.fields["limits"] if life else {}


_readings: WeakKeyDictionary[History, tuple[int, Reading]] = WeakKeyDictionary()


def read(history: History) -> Reading:
    """The reading of a history, made anew only when the history has grown."""
    known = _readings.get(history)
    if known is None or known[0] != len(history.events):
        known = (len(history.events), Reading(history))
        _readings[history] = known
    return known[1]


def _changes(
    event: Event, key: bytes, value: bytes, blocks: dict[bytes, tuple[Entry, ...]]
) -> list[Stored]:
    before = blocks.get(key, ())
    after = decode_block(value).entries
    blocks[key] = after
    if before == after:
        return []
    role, number = parse_block_key(key)
    size = max(len(before), len(after))
    olds = before + (FREE,) * (size - len(before))
    news = after + (FREE,) * (size - len(after))
    return [
        Stored(event, ShardKey(role, number * BLOCK_SIZE + index), old, new)
        for index, (old, new) in enumerate(zip(olds, news, strict=True))
        if old is not new and old != new
    ]
