"""L, liveness: once the faults are over, asks are answered and moves end; nothing deadlocks."""

from __future__ import annotations

from math import inf

from domicile.core.ids import ShardKey
from domicile.testing.checkers.reading import (
    Message,
    Reading,
    Spans,
    Stored,
    is_fenced,
    read,
)
from domicile.testing.checkers.verdict import Findings, Violation
from domicile.testing.history import Event, History

STUCK_S = 9.0
"""Seconds that an ask or a drain may take when no handler is slow by itself. Waves (N5) come 0.25,
0.5, 1, 2, 4 and 8 s after `moving`, and a chain may need the last of them before the deadline."""

SLOW_S = 2.0
"""Seconds of its own work from which on a handler, or an unbroken series of them, explains
waiting."""

PLACE_S = 9.0
"""Seconds that a stored entry may wait for its owner to act on it, or a shard for a home."""

PATIENT_S = STUCK_S
"""Asks with a shorter timeout, in seconds, may fail because of that timeout."""

NOTICED_S = 0.1
"""Seconds in which a home that a journal refused before, and that drops anew, may answer."""

REFUSED_S = 1.0
"""Seconds within which `not_executed` is a refusal (overload, cycle, depth), not a vain wait."""

_ROW_GAP_S = 0.01

_Key = tuple[str, str, int, int]
_Entity = tuple[str, str, str]
_Shard = tuple[str, str, int]


def check_liveness(history: History) -> list[Violation]:
    """L: after `quiet` and a grace period no ask is stuck, no shard drains long, every home is
    open."""
    reading = read(history)
    found = Findings("L")
    settled_at = reading.settled_at()
    if settled_at is None:
        return found.violations
    slow = _slow_spans(history, reading)
    _judge_asks(found, history, reading, settled_at, slow)
    _judge_shards(found, history, reading, settled_at, slow)
    return found.violations


class _Work:
    """One entity's handlers at one incarnation: how long they wait, how long they work."""

    __slots__ = ("asks", "begun_at", "idle_at", "on", "own_s", "waited_s", "waiting_at")

    def __init__(self) -> None:
        self.on: dict[_Key, tuple[float, float]] = {}
        self.asks = 0
        self.waiting_at = 0.0
        self.waited_s = 0.0
        self.begun_at = 0.0
        self.idle_at = float("-inf")
        self.own_s = 0.0

    def waited(self, at: float) -> float:
        """Seconds spent waiting for nested asks until now."""
        return self.waited_s + (at - self.waiting_at if self.asks else 0.0)

    def start(self, key: _Key, at: float) -> None:
        if not self.on and at - self.idle_at > _ROW_GAP_S:
            self.begun_at = at
            self.own_s = 0.0
        self.on[key] = (at, self.waited(at))

    def finish(self, key: _Key, at: float) -> None:
        begun = self.on.pop(key, None)
        if begun is not None:
            self.own_s += at - begun[0] - (self.waited(at) - begun[1])
        self.idle_at = at

    def ask(self, at: float) -> None:
        if not self.asks:
            self.waiting_at = at
        self.asks += 1

    def answered(self, at: float) -> None:
        self.asks -= 1
        if not self.asks:
            self.waited_s += at - self.waiting_at


def _slow_spans(history: History, reading: Reading) -> Spans:
    """Times in which slow handlers kept others waiting."""
    works: dict[_Entity, _Work] = {}
    nested: dict[_Key, _Work] = {}
    spans: list[tuple[float, float]] = []
    for at, kind, fields in history.events:
        if kind == "start" or kind == "finish":
            entity = (fields["inc"], fields["type"], fields["id"])
            work = works.get(entity)
            if work is None:
                work = works[entity] = _Work()
            key = (fields["sender"], fields["role"], fields["shard"], fields["n"])
            if kind == "start":
                work.start(key, at)
            else:
                work.finish(key, at)
                if work.own_s > SLOW_S:
                    spans.append((work.begun_at, at + STUCK_S))
        elif kind == "submit":
            if fields["chain"] and fields["ask"]:
                asker = works.get((fields["inc"], *fields["chain"][-1]))
                if asker is not None:
                    asker.ask(at)
                    nested[fields["inc"], fields["role"], fields["shard"], fields["n"]] = asker
        elif kind == "outcome" and nested:
            key = (fields["inc"], fields["role"], fields["shard"], fields["n"])
            asker = nested.pop(key, None)
            if asker is not None:
                asker.answered(at)
    for entity, work in works.items():
        if entity[0] in reading.deaths:
            continue
        for key in list(work.on):
            work.finish(key, reading.end)
        if work.own_s > SLOW_S:
            spans.append((work.begun_at, work.idle_at + STUCK_S))
    return Spans(spans)


def _judge_asks(
    found: Findings, history: History, reading: Reading, settled_at: float, slow: Spans
) -> None:
    asks: dict[_Key, Event] = {}
    written: dict[_Key, float] = {}
    refused: dict[tuple[str, int], float] = {}
    outrun: dict[tuple[str, int, int, str], None] = {}
    overdue: dict[tuple[str, int, int, str], None] = {}
    late: dict[_Key, tuple[str, int, int, str]] = {}
    again: dict[tuple[str, int, int, str], float] = {}
    for event in history.of("submit", "write", "outcome", "claim", "append", "settle"):
        fields = event.fields
        if event.kind in ("claim", "append", "settle"):
            # S5: after a rewind, or after its fence was raised, a journal may know a newer epoch. A
            # home notices that once, at first use; then it must be dropped.
            home = (fields["role"], fields["shard"], fields["epoch"], fields["owner"])
            if is_fenced(event) and home not in outrun:
                outrun[home] = None
                is_behind = reading.rewound_at is not None or reading.is_raised
                if is_behind and event.at >= settled_at:
                    refused[home[:2]] = event.at
                elif is_behind:
                    # Its handlers may outlast the drain deadline, and the drop be reverted: then it
                    # is at its next first use, in the calm, that the home drops the shard again.
                    overdue[home] = None
            continue
        key = (fields["inc"], fields["role"], fields["shard"], fields["n"])
        if event.kind == "submit":
            timeout_s = fields["timeout"]
            if fields["ask"] and (timeout_s is None or timeout_s >= PATIENT_S):
                asks[key] = event
            continue
        if event.kind == "write":
            written[key] = event.at
            home = (*key[1:3], fields["epoch"], fields["to"])
            if home in overdue:
                late[key] = home
            continue
        submit = asks.pop(key, None)
        if submit is None or event.at < settled_at:
            continue
        if key in late and fields["outcome"] == "maybe_executed":
            first_at = again.setdefault(late[key], event.at)
            if event.at <= first_at + NOTICED_S:
                continue
        if refused.get(key[1:3], submit.at - 1.0) < submit.at:
            written_at = written.pop(key, submit.at)
            _judge_ask(found, reading, key, submit, event, slow, written_at, settled_at)
    for key, submit in asks.items():
        _judge_ask(found, reading, key, submit, None, slow, submit.at, settled_at)


def _judge_ask(
    found: Findings,
    reading: Reading,
    key: _Key,
    submit: Event,
    outcome: Event | None,
    slow: Spans,
    written_at: float,
    settled_at: float,
) -> None:
    until = outcome.at if outcome else reading.end
    took_s = until - submit.at
    told = outcome.fields["outcome"] if outcome else "unanswered"
    # A full mailbox refuses messages that a move had held back, as soon as they are written.
    # Effects of a fault may show later.
    over = (
        outcome is None
        or told in ("ok", "rejected", "failed")
        or (told == "not_executed" and until - written_at <= REFUSED_S)
        or submit.at < settled_at
    )
    waited_s = slow.outside(max(submit.at, settled_at), until)
    if waited_s <= STUCK_S and (over or slow.overlap(submit.at, until)):
        return
    death = reading.deaths.get(submit.fields["inc"])
    if death is not None and death.at <= until:
        return
    message = (
        f"stuck: {Message(*key)} to {submit.fields['type']}/{submit.fields['id']} was {told} "
        f"after {took_s:.3f} s though no fault and no slow handler was in the way"
    )
    found.add(submit.at, message, submit, outcome)


def _judge_shards(
    found: Findings, history: History, reading: Reading, settled_at: float, slow: Spans
) -> None:
    phases: dict[_Shard, Event] = {}
    until = reading.calm_until
    for event in history.of("open", "draining", "released", "closed"):
        if event.at > until:
            break
        fields = event.fields
        home = (fields["inc"], fields["role"], fields["shard"])
        phase = phases.get(home)
        phases[home] = event
        if phase and phase.kind == "draining":
            _judge_drain(found, reading, phase, event, settled_at, slow)
    for (inc, _, _), phase in phases.items():
        if phase.kind == "draining" and not reading.dead(inc, until):
            _judge_drain(found, reading, phase, None, settled_at, slow)
    last = {
        stored.shard: stored
        for changes in reading.stored.values()
        for stored in changes
        if stored.event.at <= until
    }
    for stored in last.values():
        event, shard, entry = stored.event, stored.shard, stored.after
        if slow.outside(event.at, until) <= PLACE_S:
            continue
        where = f"shard {shard.role}/{shard.shard}"
        if entry.state == "moving":
            since_s = until - event.at
            message = f"stuck: {where} has been moving for {since_s:.3f} s at the end"
            found.add(until, message, event)
        elif entry.state == "serving" and reading.dead(entry.owner, until):
            _judge_hostage(found, history, reading, stored, settled_at)
        elif entry.state == "serving":
            phase = phases.get((entry.owner, shard.role, shard.shard))
            if phase and phase.kind == "open" and phase.fields["epoch"] == entry.epoch:
                continue
            message = (
                f"stuck: {where} is stored as served by {reading.name(entry.owner)} in epoch "
                f"{entry.epoch}, but at the end it is not open there"
            )
            found.add(until, message, event, phase)


def _judge_hostage(
    found: Findings, history: History, reading: Reading, stored: Stored, settled_at: float
) -> None:
    """A shard whose owner is gone gets another home: after its lease ran out, or on proof (C9)."""
    owner, shard = stored.after.owner, stored.shard
    death = reading.deaths[owner]
    renewals = [event for event in history.of("renewed") if event.fields["inc"] == owner]
    ttl_s = renewals[-1].fields["ttl"] if renewals else 0.0
    free_at = max(settled_at, death.at + (ttl_s if ttl_s < inf else 0.0))
    others = [
        event.fields["inc"]
        for event in history.of("open")
        if event.fields["role"] == shard.role and event.at <= free_at
    ]
    until = reading.calm_until
    if until - free_at <= PLACE_S or all(reading.dead(inc, until) for inc in others):
        return
    message = (
        f"stuck: shard {shard.role}/{shard.shard} is still stored as served by "
        f"{reading.name(owner)}, which was over {until - death.at:.3f} s before the end"
    )
    found.add(until, message, death, stored.event)


def _judge_drain(
    found: Findings,
    reading: Reading,
    draining: Event,
    after: Event | None,
    settled_at: float,
    slow: Spans,
) -> None:
    since = max(draining.at, settled_at)
    until = after.at if after else reading.calm_until
    if slow.outside(since, until) <= STUCK_S:
        return
    shard = ShardKey(draining.fields["role"], draining.fields["shard"])
    message = (
        f"stuck: {reading.name(draining.fields['inc'])} drained {shard.role}/{shard.shard} for "
        f"{until - draining.at:.3f} s though no handler was slow by itself"
    )
    found.add(draining.at, message, draining, after)
