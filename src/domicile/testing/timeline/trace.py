"""A run as people read it: what each node and each hot shard went through, from its history.

`trace` reads a history, simulated or real; `words.text` writes it as a timeline and `picture.draw`
as a picture. They show what the history says and judge nothing: violations are given, and are
marked where they happened. Messages are shown if they are few enough to be read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from domicile.core.ids import ShardKey
from domicile.core.state.keys import DEAD, LEADER_KEY, NODES
from domicile.core.state.records import NodeRecord, decode_record
from domicile.core.state.shardmap import Entry
from domicile.testing.checkers.reading import Stored, read
from domicile.testing.checkers.verdict import Violation
from domicile.testing.history import Event, History

HOT = 8
"""How many shards get a lane: those with messages if few, else those that changed most."""

MESSAGES = 300
"""The most messages that are shown; of a run with more of them, none."""

LISTED = 4
"""Changes of one commit that are told one by one; more are counted."""

PHASES = ("open", "draining", "released", "closed")
SIGNS = {"up": "|", "frozen": "z", "fenced": "x", "down": "."}


@dataclass(frozen=True, slots=True)
class Span:
    """A node's state for a while: up, frozen, fenced or down."""

    start: float
    end: float
    state: str


@dataclass(frozen=True, slots=True)
class Stay:
    """A shard's stored entry for a while.

    `opened` is when its owner opened it, if it did; `lost` when that owner died or was fenced.
    """

    start: float
    end: float
    entry: Entry
    owner: str
    to: str
    opened: float | None
    lost: float | None
    how: str
    """How its owner got it: first, released, taken over (the one before was gone) or kept."""


@dataclass(slots=True)
class Sent:
    """A message: when it was sent, where and when it ran, and what its sender was told."""

    at: float
    what: str
    """Such as "ask stock/tea take"."""
    sender: str
    node: str = ""
    started: float | None = None
    finished: float | None = None
    starts: int = 0
    told_at: float | None = None
    told: str = ""
    """The outcome of an ask, or "lost": a tell that may have run or not."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One thing that happened. Kinds: fault, leader, fence, join, gone, evicted, map, phase,
    quiet, note, message, violation."""

    at: float
    kind: str
    text: str
    node: str = ""
    shard: ShardKey | None = None
    does: str = ""
    """Of a phase: which; the text is then the shard with its epoch."""


@dataclass(slots=True)
class NodeLane:
    """One node, through all its incarnations."""

    name: str
    spans: list[Span] = field(default_factory=list[Span])
    leads: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    def sign(self, at: float) -> str:
        """Its state at a time, as one letter."""
        if any(start <= at < end for start, end in self.leads):
            return "L"
        state = next((one.state for one in reversed(self.spans) if one.start <= at), "down")
        return SIGNS[state]


@dataclass(frozen=True, slots=True)
class ShardLane:
    """One hot shard."""

    shard: ShardKey
    stays: list[Stay]
    messages: list[Sent]


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole run."""

    title: str
    start: float
    end: float
    nodes: list[NodeLane]
    shards: list[ShardLane]
    marks: list[Mark]
    violations: Sequence[Violation] = ()


def trace(
    history: History,
    violations: Sequence[Violation] = (),
    *,
    title: str = "",
    notes: Sequence[tuple[float, str]] = (),
    start: float | None = None,
) -> Trace:
    """What a history shows, from its beginning or from `start` on.

    `violations` are those that a judge found in it; `notes` are times with words of the caller.
    """
    return _Tracer(history, violations).result(title, notes, start)


class _Tracer:
    """Walks a history once."""

    def __init__(self, history: History, violations: Sequence[Violation]) -> None:
        self._history, self._violations = history, violations
        self._reading = read(history)
        self._lanes: dict[str, NodeLane] = {}
        self._names: dict[str, str] = {}
        """By incarnation."""
        self._current: dict[str, str] = {}
        """By node: its newest incarnation."""
        self._leading: dict[str, float] = {}
        self._frozen: dict[str, str] = {}
        self._marks: list[Mark] = []
        self._stored: list[Stored] = []
        self._seen: dict[bytes, str] = {}
        """Node records: their status."""
        self._opened: dict[tuple[str, ShardKey, int], float] = {}
        self._released: dict[tuple[str, ShardKey, int], None] = {}
        self._messages: dict[tuple[str, ShardKey, int], Sent] = {}
        """By sender, shard and number; empty if they are too many."""
        self._clients: list[str] = []

    def result(self, title: str, notes: Sequence[tuple[float, str]], start: float | None) -> Trace:
        events = self._history.events
        for event in events:
            if event.kind == "life" and event.fields["hosts"]:
                self._names[event.fields["inc"]] = event.fields["node"]
            elif event.kind == "life":
                self._clients.append(event.fields["inc"])
        if sum(event.kind == "submit" for event in events) <= MESSAGES:
            for event in events:
                self._message(event)
        for name in sorted({*self._names.values()}, key=_natural):
            self._lanes[name] = NodeLane(name)
        for position, event in enumerate(events):
            self._take(position, event)
        end = self._reading.end
        for lane in self._lanes.values():
            _close(lane, end)
        for inc, since in self._leading.items():
            self._lanes[self._names[inc]].leads.append((since, end))
        for found in self._violations:
            told = found.message.splitlines()[0]
            self._marks.append(Mark(found.at, "violation", f"{found.rule} broken: {told}"))
        self._marks += [Mark(at, "note", words) for at, words in notes]
        for sent in self._messages.values():
            self._mark(sent.at, "message", _fate(sent))
        if start is None:
            start = events[0].at if events else 0.0
        hot = self._hot()
        kept = [
            mark
            for mark in self._marks
            if mark.at >= start and (mark.kind != "phase" or mark.shard in hot)
        ]
        kept.sort(key=lambda mark: mark.at)
        shards = [self._lane(shard, end) for shard in hot]
        return Trace(title, start, end, list(self._lanes.values()), shards, kept, self._violations)

    # events

    def _take(self, position: int, event: Event) -> None:
        at, kind, fields = event
        if kind in ("commit", "expire"):
            self._store(position, event)
        elif kind == "fault":
            self._fault(event)
        elif kind in PHASES:
            self._phase(event)
        elif kind == "quiet":
            self._mark(at, "quiet", "quiet: no more faults from here on")
        elif fields.get("inc") in self._names:
            self._process(event, self._names[fields["inc"]])

    def _process(self, event: Event, node: str) -> None:
        at, kind, fields = event
        inc = fields["inc"]
        if kind == "life":
            self._current[node] = inc
            self._frozen.pop(node, None)
            self._become(node, at, "up")
            self._mark(at, "join", f"{node} begins as {inc[:8]}", node)
        elif kind == "leading":
            self._leading[inc] = at
            self._mark(at, "leader", f"{node} leads (leader revision {fields['revision']})", node)
        elif kind == "deposed":
            self._stop_leading(inc, at)
            self._mark(at, "leader", f"{node} leads no more: {fields.get('reason', '')}", node)
        elif kind == "fenced":
            self._stop_leading(inc, at)
            if self._current.get(node) == inc:
                self._become(node, at, "fenced")
            self._mark(at, "fence", f"{node} fenced: {fields['reason']}", node)
        elif kind == "ended":
            self._stop_leading(inc, at)
            if self._current.get(node) == inc:
                self._become(node, at, "down")
            self._mark(at, "gone", f"{node} has left", node)

    def _fault(self, event: Event) -> None:
        at, _, fields = event
        fault, inc = str(fields["fault"]), fields.get("inc")
        node = self._names.get(inc or "") or self._numbered(fields.get("node"))
        if node:
            if fault == "crash":
                self._become(node, at, "down")
                self._stop_leading(inc or "", at)
            elif fault == "freeze":
                self._frozen[node] = self._state(node)
                self._become(node, at, "frozen")
            elif fault == "thaw":
                self._become(node, at, self._frozen.pop(node, "up"))
        self._mark(at, "fault", f"fault: {fault}{' ' + node if node else ''}", node)

    def _phase(self, event: Event) -> None:
        at, kind, fields = event
        inc, epoch = fields["inc"], fields["epoch"]
        shard = ShardKey(fields["role"], fields["shard"])
        if kind == "open":
            self._opened.setdefault((inc, shard, epoch), at)
        elif kind == "released":
            self._released[inc, shard, epoch] = None
        name = f"{shard.role}/{shard.shard}@{epoch}"
        self._marks.append(Mark(at, "phase", name, self._name(inc), shard, kind))

    def _message(self, event: Event) -> None:
        at, kind, fields = event
        if kind not in ("submit", "start", "finish", "outcome", "lost"):
            return
        sender = fields["sender"] if kind in ("start", "finish") else fields["inc"]
        key = (sender, ShardKey(fields["role"], fields["shard"]), fields["n"])
        if kind == "submit":
            how = "ask" if fields["ask"] else "tell"
            what = f"{how} {fields['type']}/{fields['id']} {fields['method']}"
            self._messages[key] = Sent(at, what, self._sender(sender))
            return
        sent = self._messages.get(key)
        if sent is None:  # a timer of an entity: nobody sent it
            return
        if kind == "start":
            sent.node, sent.started, sent.starts = self._name(fields["inc"]), at, sent.starts + 1
        elif kind == "finish":
            sent.finished = at
        else:
            sent.told_at = at
            sent.told = "lost" if kind == "lost" else fields["outcome"]

    # what the store was told

    def _store(self, position: int, event: Event) -> None:
        at, _, fields = event
        for key, value, *_ in fields.get("puts", ()):
            if key.startswith(NODES):
                self._record(at, key, value)
            elif key.startswith(DEAD):
                inc = key[len(DEAD) :].decode()
                self._mark(at, "gone", f"{self._name(inc)} proved dead: {value.decode()[:80]}")
        for key in fields["deletes"]:
            inc = key[len(NODES) :].decode()
            if key.startswith(NODES) and inc in self._names:
                how = "expired" if event.kind == "expire" else f"removed by {fields['by']}"
                node = self._names[inc]
                self._mark(at, "gone", f"record of {node} ({inc[:8]}) {how}", node)
                self._seen.pop(key, None)
            elif key == LEADER_KEY and event.kind == "expire":
                self._mark(at, "leader", "the leader's lease ended")
        changed = self._reading.stored.get(position, [])
        self._stored += changed
        if changed:
            by = f"map r{fields['revision']} by {fields['by']}: "
            self._mark(at, "map", by + self._told(changed))

    def _record(self, at: float, key: bytes, value: bytes) -> None:
        try:
            record = decode_record(value, NodeRecord)
        except msgspec.MsgspecError:
            return
        before, self._seen[key] = self._seen.get(key), record.status
        if before is None:
            version = f", version {record.version}" if record.version else ""
            self._mark(at, "join", f"{record.node} registered{version}", record.node)
        elif before != record.status:
            kind = "evicted" if record.status == "evicted" else "gone"
            self._mark(at, kind, f"{record.node} is marked {record.status}", record.node)

    def _told(self, changed: Sequence[Stored]) -> str:
        if len(changed) <= LISTED:
            return ", ".join(self._change(one) for one in changed)
        counts = Counter(
            f"moving to {self._name(one.after.to)}"
            if one.after.state == "moving"
            else f"{one.after.state} at {self._name(one.after.owner)}"
            for one in changed
        )
        told = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
        return f"{len(changed)} shards: {told}"

    def _change(self, change: Stored) -> str:
        shard, after = change.shard, change.after
        name, owner = f"{shard.role}/{shard.shard}@{after.epoch}", self._name(after.owner)
        if after.state == "moving":
            return f"{name} moving {owner} to {self._name(after.to)}"
        if change.before.state == "moving" and change.before.epoch == after.epoch:
            return f"{name} stays at {owner}"
        return f"{name} {after.state} at {owner}"

    # shards

    def _hot(self) -> list[ShardKey]:
        """Those with messages if these are few, else those with most changes of owner or state; and
        all that a violation is about."""
        counts = Counter(shard for _, shard, _ in self._messages)
        if not 0 < len(counts) <= HOT:
            counts = Counter(one.shard for one in self._stored)
        for found in self._violations:
            for event in found.events:
                if "role" in event.fields and "shard" in event.fields:
                    shard = ShardKey(event.fields["role"], event.fields["shard"])
                    counts[shard] += len(self._history.events)
        hottest = sorted(counts, key=lambda shard: (-counts[shard], shard))[:HOT]
        return sorted(hottest)

    def _lane(self, shard: ShardKey, end: float) -> ShardLane:
        messages = [sent for (_, one, _), sent in self._messages.items() if one == shard]
        return ShardLane(shard, self._stays(shard, end), messages)

    def _stays(self, shard: ShardKey, end: float) -> list[Stay]:
        changes = [one for one in self._stored if one.shard == shard]
        stays: list[Stay] = []
        for number, one in enumerate(changes):
            entry = one.after
            until = changes[number + 1].event.at if number + 1 < len(changes) else end
            stays.append(
                Stay(
                    one.event.at, until, entry, self._name(entry.owner), self._name(entry.to),
                    self._opened.get((entry.owner, shard, entry.epoch)),
                    self._lost(entry.owner, until), self._how(shard, one.before, entry),
                )
            )  # fmt: skip
        return stays

    def _lost(self, owner: str, until: float) -> float | None:
        death = self._reading.deaths.get(owner)
        return death.at if death is not None and death.at < until else None

    def _how(self, shard: ShardKey, before: Entry, after: Entry) -> str:
        if before.epoch == after.epoch:
            return "kept"
        if (before.owner, shard, before.epoch) in self._released:
            return "released"
        return "taken over" if before.owner else "first"

    # small things

    def _name(self, inc: str) -> str:
        return self._names.get(inc, inc[:8])

    def _sender(self, inc: str) -> str:
        if self._clients == [inc]:
            return "the client"
        return f"client {inc[:8]}" if inc in self._clients else self._name(inc)

    def _numbered(self, index: object) -> str:
        return next((name for name in self._lanes if name.endswith(f"-{index}")), "")

    def _state(self, node: str) -> str:
        spans = self._lanes[node].spans
        return spans[-1].state if spans else "down"

    def _become(self, node: str, at: float, state: str) -> None:
        lane = self._lanes[node]
        _close(lane, at)
        lane.spans.append(Span(at, at, state))

    def _stop_leading(self, inc: str, at: float) -> None:
        start = self._leading.pop(inc, None)
        if start is not None:
            self._lanes[self._names[inc]].leads.append((start, at))

    def _mark(self, at: float, kind: str, text: str, node: str = "") -> None:
        self._marks.append(Mark(at, kind, text, node))


def _fate(sent: Sent) -> str:
    """What became of a message, in one line."""
    parts = [f"{sent.what} from {sent.sender}"]
    if sent.started is None:
        parts.append("did not start")
    else:
        again = f", started {sent.starts} times" if sent.starts > 1 else ""
        parts.append(f"started at {sent.node} {sent.started - sent.at:+.3f} s{again}")
    if sent.told_at is not None:
        told = "may have run or not" if sent.told == "lost" else sent.told.replace("_", " ")
        parts.append(f"{told} {sent.told_at - sent.at:+.3f} s")
    return ", ".join(parts)


def _close(lane: NodeLane, at: float) -> None:
    if lane.spans:
        last = lane.spans[-1]
        lane.spans[-1] = Span(last.start, at, last.state)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Node 10 after node 9, managers after nodes."""
    return list(_parts("~" + name if name.startswith("manager") else name))


def _parts(name: str) -> Iterator[tuple[bool, int, str]]:
    for part in re.findall(r"\d+|\D+", name):
        yield (part.isdecimal(), int(part) if part.isdecimal() else 0, part)
