"""I5, order: messages of one sender to one entity run in sending order, each at most once.

And gaps only where the sender is told, only for a reason: a planned move is none.
"""

from __future__ import annotations

from typing import Any

from domicile.testing.checkers.reading import Message, Reading, read
from domicile.testing.checkers.verdict import Findings, Violation
from domicile.testing.history import Event, History

DRAIN_S = 10.0
"""The drain deadline (H10), unless a process names its own as `drain` among its limits."""

BUSY_S = 1.0
"""An entity that finished a handler this recently was at work, not stuck."""

UNDER_WAY_S = 0.05
"""What left or arrived this recently, to its owner or back, need not have come further: if its time
runs out then, its sender can't know whether it will run."""

_EPSILON_S = 1e-6

_Key = tuple[str, str, int, int]


class _Fate:
    """What became of one message so far."""

    __slots__ = ("accepted", "finish", "moved_at", "resolved", "start", "submit")

    def __init__(self) -> None:
        self.submit: Event | None = None
        self.accepted: Event | None = None
        self.moved_at = float("-inf")
        self.start: Event | None = None
        self.finish: Event | None = None
        self.resolved: Event | None = None


def check_order(history: History) -> list[Violation]:
    """I5: order, at most once, honest outcomes, and no gap without a fault."""
    judge = _Judge(read(history))
    verbs = {
        "submit": judge.submit,
        "write": judge.write,
        "accept": judge.accept,
        "return": judge.withdraw,
        "dropped": judge.withdraw,
        "start": judge.start,
        "finish": judge.finish,
        "draining": judge.draining,
        "outcome": judge.outcome,
        "lost": judge.lost,
    }
    for position, event in enumerate(history.events):
        verb = verbs.get(event.kind)
        if verb is not None:
            judge.position = position
            verb(event, event.fields)
    return judge.found.violations


class _Judge:
    def __init__(self, reading: Reading) -> None:
        self.found = Findings("I5")
        self.position = 0
        self._reading = reading
        self._epsilon_s = _EPSILON_S + reading.slack_s
        self._fates: dict[_Key, _Fate] = {}
        self._withdrawn: dict[tuple[str, _Key], Event] = {}
        self._last: dict[tuple[str, str, str], Event] = {}
        self._on: dict[tuple[str, str], int] = {}
        self._worked: dict[tuple[str, str], float] = {}
        self._drains: dict[tuple[str, str, int], float] = {}

    def _fate(self, key: _Key) -> _Fate:
        fate = self._fates.get(key)
        if fate is None:
            fate = self._fates[key] = _Fate()
        return fate

    def submit(self, event: Event, fields: dict[str, Any]) -> None:
        self._fate((fields["inc"], fields["role"], fields["shard"], fields["n"])).submit = event

    def write(self, event: Event, fields: dict[str, Any]) -> None:
        key = (fields["inc"], fields["role"], fields["shard"], fields["n"])
        self._fate(key).moved_at = event.at

    def accept(self, event: Event, fields: dict[str, Any]) -> None:
        key = (fields["sender"], fields["role"], fields["shard"], fields["n"])
        self._withdrawn.pop((fields["inc"], key), None)
        fate = self._fate(key)
        fate.accepted, fate.moved_at = event, event.at

    def withdraw(self, event: Event, fields: dict[str, Any]) -> None:
        key = (fields["sender"], fields["role"], fields["shard"], fields["n"])
        self._withdrawn[fields["inc"], key] = event
        fate = self._fate(key)
        fate.accepted, fate.moved_at = None, event.at

    def start(self, event: Event, fields: dict[str, Any]) -> None:
        entity = (fields["type"], fields["id"])
        self._on[entity] = self._on.get(entity, 0) + 1
        sender, n = fields["sender"], fields["n"]
        if not sender:
            return
        key = (sender, fields["role"], fields["shard"], n)
        fate = self._fate(key)
        withdrawn = self._withdrawn.get((fields["inc"], key))
        if fate.start is not None:
            self._wrong_start(event, key, "started twice", fate.start)
            return
        fate.start = event
        if withdrawn is not None:
            done = "returned" if withdrawn.kind == "return" else "dropped"
            where = self._reading.name(fields["inc"])
            self._wrong_start(event, key, f"started on {where}, which had {done} it", withdrawn)
        told = fate.resolved
        if told and told.fields.get("outcome") == "not_executed":
            why = "started after its sender was told that it never will"
            self._wrong_start(event, key, why, told)
        if self.position in self._reading.rest_of_turn:
            # I1c: a pause fell between its guard and its start, and others may have gone on; it can
            # store nothing, and its sender hears nothing of it.
            return
        last = self._last.get((sender, *entity))
        if last is not None and n <= last.fields["n"]:
            why = f"started after message {last.fields['n']} of the same sender"
            self._wrong_start(event, key, why, last)
        else:
            self._last[(sender, *entity)] = event

    def _wrong_start(self, event: Event, key: _Key, why: str, earlier: Event) -> None:
        entity = f"{event.fields['type']}/{event.fields['id']}"
        self.found.add(event.at, f"{Message(*key)} to {entity} {why}", earlier, event)

    def finish(self, event: Event, fields: dict[str, Any]) -> None:
        entity = (fields["type"], fields["id"])
        self._on[entity] = self._on.get(entity, 0) - 1
        self._worked[entity] = event.at
        if fields["sender"]:
            key = (fields["sender"], fields["role"], fields["shard"], fields["n"])
            self._fate(key).finish = event

    def draining(self, event: Event, fields: dict[str, Any]) -> None:
        self._drains[fields["inc"], fields["role"], fields["shard"]] = event.at

    def outcome(self, event: Event, fields: dict[str, Any]) -> None:
        key = (fields["inc"], fields["role"], fields["shard"], fields["n"])
        fate = self._fate(key)
        if self._told_before(event, key, fate):
            return
        outcome = fields["outcome"]
        if outcome == "maybe_executed":
            self._judge_gap(event, key, fate)
        elif outcome == "not_executed":
            if fate.start is not None:
                message = f"{Message(*key)} was called not executed, but it had started"
                self.found.add(event.at, message, fate.start, event)
        elif fate.start is None:
            message = f"{Message(*key)} was called {outcome}, but it never started"
            self.found.add(event.at, message, fate.submit, event)
        elif fate.finish is None:
            message = f"{Message(*key)} was called {outcome} before its handler finished"
            self.found.add(event.at, message, fate.start, event)
        elif outcome != "failed" and fate.finish.fields["how"] in ("cancelled", "abandoned"):
            message = f"{Message(*key)} was called {outcome}, but its handler was cut short"
            self.found.add(event.at, message, fate.finish, event)

    def lost(self, event: Event, fields: dict[str, Any]) -> None:
        key = (fields["inc"], fields["role"], fields["shard"], fields["n"])
        fate = self._fate(key)
        if not self._told_before(event, key, fate):
            self._judge_gap(event, key, fate)

    def _told_before(self, event: Event, key: _Key, fate: _Fate) -> bool:
        told, fate.resolved = fate.resolved, event
        if told is None:
            return False
        self.found.add(event.at, f"{Message(*key)} had two outcomes", told, event)
        return True

    def _judge_gap(self, event: Event, key: _Key, fate: _Fate) -> None:
        if fate.submit is None or self._excused(event, key, fate, fate.submit):
            return
        told = "lost" if event.kind == "lost" else "maybe executed"
        message = f"{Message(*key)} was called {told} without a fault: a gap without a fault"
        self.found.add(event.at, message, fate.submit, fate.start, event)

    def _excused(self, event: Event, key: _Key, fate: _Fate, submit: Event) -> bool:
        if self._reading.disturbed.overlap(submit.at, event.at) or event.fields.get("cancelled"):
            return True
        if fate.finish and fate.finish.fields["how"] == "failed":
            # It ran, so there is no gap: what it stored is unknown (J4), or fenced (I2).
            return True
        timeout_s = submit.fields["timeout"]
        if (
            timeout_s is not None
            and event.at >= submit.at + timeout_s - self._epsilon_s
            and (fate.start or self._under_way(event, fate) or self._behind_others(event, fate))
        ):
            return True
        sender, role, shard, _ = key
        death = self._reading.deaths.get(sender)
        drain_s = self._drain_s(sender)
        if death and death.kind == "ended" and event.at >= submit.at + drain_s - self._epsilon_s:
            return True
        start, finish = fate.start, fate.finish
        if start is None or (finish and finish.fields["how"] not in ("cancelled", "abandoned")):
            return False
        owner = start.fields["inc"]
        drain_at = self._drains.get((owner, role, shard))
        ran_until = finish.at if finish else event.at
        return (
            drain_at is not None and ran_until >= drain_at + self._drain_s(owner) - self._epsilon_s
        )

    def _under_way(self, event: Event, fate: _Fate) -> bool:
        """It had just left or arrived, at its owner or on its way back."""
        return event.at - fate.moved_at <= UNDER_WAY_S + self._epsilon_s

    def _behind_others(self, event: Event, fate: _Fate) -> bool:
        """It waited in the mailbox of an entity that was at work all along."""
        if fate.accepted is None:
            return False
        fields = fate.accepted.fields
        entity = (fields["type"], fields["id"])
        if self._on.get(entity, 0) > 0:
            return True
        return event.at - self._worked.get(entity, float("-inf")) <= BUSY_S

    def _drain_s(self, inc: str) -> float:
        return float(self._reading.limits(inc).get("drain", DRAIN_S))
