"""What several checkers need from a history, read once: map changes, deaths, faults.

Used by the checkers only. Nothing here judges. It decodes the stored values and finds which
processes ran when, and when the cluster was disturbed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from domicile.core.ids import ShardKey
from domicile.core.state.keys import CLIENTS, MAP, NODES, parse_block_key
from domicile.core.state.shardmap import BLOCK_SIZE, FREE, Entry, decode_block
from domicile.testing.history import Event, History
from domicile.testing.processes.history import RealHistory

GRACE_S = 15.0
"""Seconds after a fault in which its effects may still show, and after `quiet` to settle."""

HEAL = "heal"
RAISED = "raised fence"
_ENDS = {
    **dict.fromkeys(("block", "delay", "lag", "loss", "partition"), (HEAL,)),
    "freeze": ("thaw", "crash"),
    "full": ("free",),
    "outage": ("back", HEAL),
    "slow": ("fast", HEAL),
    "stall": ("flow",),
}
"""Faults that last, and what ends them; `quiet` ends all. `heal` ends those of all processes, every
other end only those of its own process."""

_OF_ONE = ("crash", "freeze", "stop", "thaw")
"""Faults of one process: they can cost only messages that it sends or is sent."""

_HARMLESS = (
    "back", "cut", "deposed", "duplicate", "fast", "flow", "free", "full", HEAL, "lag", "linger",
    "lost replies", "outage", RAISED, "rewind", "stall",
)  # fmt: skip
"""Faults that cost no message by themselves, or that end others. A broken link resumes, and a
process that loses its lease because of the store is fenced."""

STARVED = "starved"
"""A time in which the machine let no process run: a pause of all."""

SHUTDOWN = "shutdown"
"""The whole cluster is ended: no node has to take over any more."""

FRAME_S = 0.002
"""Seconds within which the replies of one frame are noted."""

BETWEEN_S = 0.05
"""Seconds for which a busy machine may keep a real process from noting what its guard allowed."""

_ON_THE_WAY = ("submit", "write", "accept", "waking")
"""Events of one message that one guard allows up to its start: also its sending, if it runs where
it is sent."""

STILL_S = 0.1
"""Seconds: a process that notes events at shorter intervals runs, however starved the machine
is."""


class Stored(NamedTuple):
    """One entry of the map that a commit changed."""

    event: Event
    shard: ShardKey
    before: Entry
    after: Entry


class _Fault(NamedTuple):
    """A fault, its process if it concerns one, and its duration."""

    fault: str
    inc: str
    start: float
    end: float


class Message(NamedTuple):
    """The name of a message: its sender and its number in that shard (H1)."""

    sender: str
    role: str
    shard: int
    n: int

    def __str__(self) -> str:
        return f"message {self.n} of {self.sender[:8] or 'a timer'} for {self.role}/{self.shard}"


class _OnItsWay(NamedTuple):
    """The last event of a message that may have passed its guard before a pause."""

    message: Message | None
    at: float
    woken_at: float
    before: float


class Spans:
    """Merged intervals of time; finds an overlap in logarithmic time."""

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
        """True if some interval overlaps [start, end]."""
        index = bisect_left(self._ends, start)
        return index < len(self._ends) and self._starts[index] <= end

    def outside(self, start: float, end: float) -> float:
        """Seconds of [start, end] that lie in no interval."""
        if end <= start:
            return 0.0
        free_s = end - start
        for index in range(bisect_left(self._ends, start), len(self._ends)):
            if self._starts[index] >= end:
                break
            free_s -= min(self._ends[index], end) - max(self._starts[index], start)
        return free_s


class Reading:
    """A history with its commits decoded and its incarnations and faults listed."""

    def __init__(self, history: History) -> None:
        self.end = history.events[-1].at if history.events else 0.0
        self.calm_until = self.end
        """Until when shards must have homes: the end of a cluster ends them all."""
        self.stored: dict[int, list[Stored]] = {}
        """Changed map entries, by the position of their commit in the history."""
        self.lives: dict[str, Event] = {}
        self.deaths: dict[str, Event] = {}
        """Per incarnation the crash, fence or end after which it has no more duties."""
        self._unlisted: dict[str, float] = {}
        """Per incarnation when its record was removed, and with it its links at its peers. If its
        lease sets no deadline (C9), the incarnation itself may learn of that later."""
        self.freezes: dict[str, list[tuple[float, float]]] = {}
        """Per incarnation its pauses; a pause without a thaw lasts to the end. A time in which the
        machine let no process run is a pause of each process that had begun and noted nothing
        meanwhile."""
        self.quiet_at: float | None = None
        self.rewound_at: float | None = None
        """When the store last went back to an earlier state (S5)."""
        self.is_raised = False
        """Whether a fence of the journal was raised above the store's epoch (J2)."""
        self.slack_s = history.slack_s if isinstance(history, RealHistory) else 0.0
        """How late timers may be: not at all in virtual time."""
        self.rest_of_turn: dict[int, float] = {}
        """Positions of events of a real process between a pause and its next guard, with the time
        of its last event before; that guard came later."""
        self._starved: list[tuple[float, float]] = []
        spans: list[_Fault] = []
        lasting: dict[tuple[str, str], float] = {}
        blocks: dict[bytes, tuple[Entry, ...]] = {}
        for position, event in enumerate(history.events):
            at, kind, fields = event
            if kind in ("commit", "expire"):
                self._note_unlisted(at, fields.get("deletes", ()))
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
                spans.append(_Fault(fields["fault"], fields.get("inc") or "", at, at))
                self._fault(event, spans, lasting)
            elif kind == "quiet":
                self.quiet_at = at
                spans.extend(_Fault(*fault, start, at) for fault, start in lasting.items())
                lasting.clear()
        spans.extend(_Fault(*fault, start, self.end) for fault, start in lasting.items())
        for (fault, inc), start in lasting.items():
            if fault == "freeze":
                self.freezes.setdefault(inc, []).append((start, self.end))
        self.disturbed = Spans([(start, end + GRACE_S) for _, _, start, end in spans])
        self._find_losses(spans)
        wakings = {inc: [end for _, end in pauses] for inc, pauses in self.freezes.items()}
        if self._starved:
            self._find_starved(history, wakings)
        if isinstance(history, RealHistory):
            self._find_rests(history, wakings)

    def _note_unlisted(self, at: float, deletes: Iterable[bytes]) -> None:
        for key in deletes:
            for prefix in (NODES, CLIENTS):
                if key.startswith(prefix):
                    self._unlisted.setdefault(key[len(prefix) :].decode(), at)

    def _find_losses(self, faults: list[_Fault]) -> None:
        """Find the faults that may cost messages: of all, or of one process, which may also have
        ended."""
        lossy: list[tuple[float, float]] = []
        losers = {inc: [(death.at, death.at + GRACE_S)] for inc, death in self.deaths.items()}
        for inc, at in self._unlisted.items():
            losers.setdefault(inc, []).append((at, at + GRACE_S))
        for fault, inc, start, end in faults:
            if inc and fault in _OF_ONE:
                losers.setdefault(inc, []).append((start, end + GRACE_S))
            elif fault not in _HARMLESS:
                lossy.append((start, end + GRACE_S))
        self._lossy = Spans(lossy)
        self._losers = {inc: Spans(spans) for inc, spans in losers.items()}

    def may_lose(self, start: float, end: float, ends: Iterable[str]) -> bool:
        """Whether a fault may have cost a message of that time between these processes."""
        if not self.disturbed.overlap(start, end):
            return False
        spans = (self._losers.get(inc) for inc in ends)
        return self._lossy.overlap(start, end) or any(
            one is not None and one.overlap(start, end) for one in spans
        )

    def _find_starved(self, history: History, wakings: dict[str, list[float]]) -> None:
        """A starved time is a pause only of processes that noted nothing, and only while they did
        not.

        The process that noticed it may have been the only one kept from running, by its own work.
        Renewals prove nothing: another thread may note them.
        """
        for since, until in self._starved:
            heard = {inc: [since] for inc, life in self.lives.items() if life.at <= since}
            for at, kind, fields in history.events:
                inc = fields.get("inc")
                if since < at < until and inc in heard and kind not in ("fault", "renewed"):
                    heard[inc].append(at)
            for inc, times in heard.items():
                still = [
                    (start, end)
                    for start, end in pairwise([*times, until])
                    if end - start >= STILL_S
                ]
                self.freezes.setdefault(inc, []).extend(still)
                if still and still[-1][1] == until:
                    wakings.setdefault(inc, []).append(until)

    def _find_rests(self, history: History, wakings: dict[str, list[float]]) -> None:
        """I1c: a pause may fall between a guard and the guarded event, and then that event comes
        late.

        One guard allows one start, one resumption, or the replies of one frame. In between only
        that same message is noted, on its way to its start. So only the first event of a process
        after a pause can be such an event. It comes as soon as the machine lets the process run.
        Renewals prove nothing: another thread may note them.
        """
        for ends in wakings.values():
            ends.sort(reverse=True)
        heard: dict[str, float] = {}
        on_its_way: dict[str, _OnItsWay] = {}
        frames: dict[str, tuple[str, float, float]] = {}
        for position, (at, kind, fields) in enumerate(history.events):
            inc = fields.get("inc")
            if inc not in wakings or kind in ("fault", "renewed"):
                continue
            woken_at = float("-inf")
            while wakings[inc] and wakings[inc][-1] <= at:
                woken_at = wakings[inc].pop()
            before, heard[inc] = heard.get(inc, float("-inf")), at
            message, earlier = _message(fields), on_its_way.pop(inc, None)
            if (
                earlier is not None
                and message == earlier.message
                and kind in (*_ON_THE_WAY, "start")
                and (at - earlier.at <= BETWEEN_S or woken_at > earlier.at)
            ):
                # The same guard as for the last event, even if a second pause lies between.
                woken_at, before = max(woken_at, earlier.woken_at), earlier.before
            woken = at - woken_at <= self.slack_s
            if woken and kind in _ON_THE_WAY:
                on_its_way[inc] = _OnItsWay(message, at, woken_at, before)
            elif woken and kind in ("start", "resume"):
                self.rest_of_turn[position] = before
            elif woken and kind == "reply":
                self.rest_of_turn[position] = before
                frames[inc] = (fields["sender"], at + FRAME_S, before)
            elif kind == "reply" and inc in frames:
                sender, until, before = frames[inc]
                if fields["sender"] == sender and at <= until:
                    self.rest_of_turn[position] = before
                    continue
            if kind != "reply" or not woken:
                frames.pop(inc, None)

    def _fault(
        self,
        event: Event,
        spans: list[_Fault],
        lasting: dict[tuple[str, str], float],
    ) -> None:
        fault, inc = str(event.fields["fault"]), str(event.fields.get("inc") or "")
        if fault == STARVED:
            until = float(event.fields["until"])
            spans.append(_Fault(fault, "", event.at, until))
            self._starved.append((event.at, until))
            return
        if fault == RAISED:
            self.is_raised = True
        if fault == SHUTDOWN:
            self.calm_until = min(self.calm_until, event.at)
        if fault == "crash":
            self.deaths.setdefault(inc, event)
        if fault in _ENDS:
            lasting.setdefault((fault, inc), event.at)
            return
        for (name, whose), start in list(lasting.items()):
            if fault in _ENDS[name] and (fault == HEAL or whose == inc):
                del lasting[name, whose]
                spans.append(_Fault(name, whose, start, event.at))
                if name == "freeze":
                    self.freezes.setdefault(whose, []).append((start, event.at))

    def dead(self, inc: str, at: float) -> bool:
        """Whether a process had ended at that time."""
        death = self.deaths.get(inc)
        return death is not None and death.at <= at

    def settled_at(self) -> float | None:
        """The time from which on all rules of liveness hold; None if this history has none."""
        if self.quiet_at is None or self.quiet_at + GRACE_S > self.end:
            return None
        return self.quiet_at + GRACE_S

    def name(self, inc: str) -> str:
        """A process's name for people."""
        life = self.lives.get(inc)
        return f"{life.fields['node']} ({inc[:8]})" if life else (inc[:8] or "nobody")

    def limits(self, inc: str) -> dict[str, Any]:
        """The bounds that a process announced; empty if it announced none."""
        life = self.lives.get(inc)
        return life.fields["limits"] if life else {}


_readings: WeakKeyDictionary[History, tuple[int, Reading]] = WeakKeyDictionary()


def read(history: History) -> Reading:
    """The reading of a history, made again only when the history has grown."""
    known = _readings.get(history)
    if known is None or known[0] != len(history.events):
        known = (len(history.events), Reading(history))
        _readings[history] = known
    return known[1]


def is_fenced(event: Event) -> bool:
    """Whether a journal told an owner, by this answer, that it knows a newer one (J1, J2, J4)."""
    match event.kind:
        case "claim":
            return not event.fields["ok"]
        case "append":
            return bool(event.fields["why"] == "fenced")
        case "settle":
            return bool(event.fields["how"] == "fenced")
        case _:
            return False


def _message(fields: dict[str, Any]) -> Message | None:
    """The message that an event is about, if any; the process that submits or writes it is its
    sender."""
    if "n" not in fields:
        return None
    sender = fields.get("sender", fields["inc"])
    return Message(sender, fields["role"], fields["shard"], fields["n"])


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
