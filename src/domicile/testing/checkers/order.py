"""I5, order: messages of one sender to one entity run in sending order, each at most once.

Calls are sent in the order in which they were made. Each durable entity has an order of its own,
because its calls wait for commits; so have its hooks, which wait for a turn.

A gap is allowed only if the sender is told and there is a reason; a planned move is none.
"""

from __future__ import annotations

from typing import Any

from domicile.testing.checkers.reading import Message, Reading, read
from domicile.testing.checkers.verdict import Findings, Violation
from domicile.testing.history import Event, History

DRAIN_S = 10.0
"""Seconds of the drain deadline (H10), unless a process names its own as `drain` among its
limits."""

LEAVE_S = 6.0
"""Seconds after its drain deadline by which a sender that gives up is gone: it lingers for 5 s
(H14)."""

BUSY_S = 0.1
"""Seconds since its last handler ended within which an entity was at work, not stuck."""

UNDER_WAY_S = 0.05
"""Seconds within which a message that was sent or arrived, at its owner or back, may not have come
further. If its time runs out then, its sender cannot know whether it will run."""

EARLY_S = 0.05
"""Seconds by which a timer of a real process may seem early: it is set before its cause is
noted."""

_EPSILON_S = 1e-6

_Key = tuple[str, str, int, int]


class _Fate:
    """The state of one message so far."""

    __slots__ = (
        "accepted", "finish", "homes", "moved_at", "resolved", "start", "submit", "withheld",
    )  # fmt: skip

    def __init__(self) -> None:
        self.submit: Event | None = None
        self.accepted: Event | None = None
        self.moved_at = float("-inf")
        self.start: Event | None = None
        self.finish: Event | None = None
        self.withheld = False
        """Whether its answer was kept back because the journal did not answer, or because a
        stranger to the cluster had claimed the shard."""
        self.resolved: Event | None = None
        self.homes: dict[str, None] = {}
        """The incarnations to which it was written, and that accepted it."""


def check_order(history: History) -> list[Violation]:
    """I5: order, at most once, honest outcomes, and no gap without a fault."""
    judge = _Judge(read(history))
    verbs = {
        "made": judge.made,
        "submit": judge.submit,
        "write": judge.write,
        "accept": judge.accept,
        "return": judge.withdraw,
        "dropped": judge.withdraw,
        "start": judge.start,
        "finish": judge.finish,
        "claim": judge.claim,
        "withheld": judge.withheld,
        "draining": judge.draining,
        "open": judge.open,
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
        self._late_s = _EPSILON_S + reading.slack_s
        self._early_s = EARLY_S if reading.slack_s else _EPSILON_S
        self._fates: dict[_Key, _Fate] = {}
        self._made: dict[tuple[str, int], tuple[int, Event]] = {}
        self._newest: dict[tuple[str, int | None, bool, str, str], tuple[int, Event]] = {}
        """Of those submitted so far, the call that was made last, and where in the history."""
        self._withdrawn: dict[tuple[str, _Key], Event] = {}
        self._last: dict[tuple[str, str, str], Event] = {}
        self._on: dict[tuple[str, str, str], int] = {}
        self._worked: dict[tuple[str, str, str], float] = {}
        self._drains: dict[tuple[str, str, int, int], float] = {}
        self._claims: dict[tuple[str, int], str] = {}

    def _fate(self, key: _Key) -> _Fate:
        fate = self._fates.get(key)
        if fate is None:
            fate = self._fates[key] = _Fate()
        return fate

    def made(self, event: Event, fields: dict[str, Any]) -> None:
        self._made[fields["inc"], fields["call"]] = (self.position, event)

    def submit(self, event: Event, fields: dict[str, Any]) -> None:
        key = (fields["inc"], fields["role"], fields["shard"], fields["n"])
        self._fate(key).submit = event
        call = (key[0], fields.get("call") or 0)
        made_at, made = self._made.pop(call, (self.position, event))
        gate, hook = made.fields.get("gate"), made.fields.get("hook", False)
        lane = (key[0], gate, hook, fields["type"], fields["id"])
        last = self._newest.get(lane)
        if last is not None and made_at < last[0]:
            message = f"{Message(*key)} was made before a call that was submitted before it"
            self.found.add(event.at, message, made, last[1], event)
        else:
            self._newest[lane] = (made_at, event)

    def write(self, event: Event, fields: dict[str, Any]) -> None:
        key = (fields["inc"], fields["role"], fields["shard"], fields["n"])
        fate = self._fate(key)
        fate.moved_at = event.at
        fate.homes[fields["to"]] = None

    def accept(self, event: Event, fields: dict[str, Any]) -> None:
        key = (fields["sender"], fields["role"], fields["shard"], fields["n"])
        self._withdrawn.pop((fields["inc"], key), None)
        fate = self._fate(key)
        fate.accepted, fate.moved_at = event, event.at
        fate.homes[fields["inc"]] = None

    def withdraw(self, event: Event, fields: dict[str, Any]) -> None:
        key = (fields["sender"], fields["role"], fields["shard"], fields["n"])
        self._withdrawn[fields["inc"], key] = event
        fate = self._fate(key)
        fate.accepted, fate.moved_at = None, event.at

    def start(self, event: Event, fields: dict[str, Any]) -> None:
        entity = (fields["type"], fields["id"])
        home = (fields["inc"], *entity)
        self._on[home] = self._on.get(home, 0) + 1
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
        last = self._last.get((sender, *entity))
        if last is not None and n <= last.fields["n"]:
            if self._overtaken(event, fate, last):
                return
            why = f"started after message {last.fields['n']} of the same sender"
            self._wrong_start(event, key, why, last)
        else:
            self._last[(sender, *entity)] = event

    def _overtaken(self, event: Event, fate: _Fate, last: Event) -> bool:
        """I1c: a pause fell between its guard and its start, and a new home has gone on meanwhile.

        It can store nothing, and its sender, which was told before, gets no answer from it.
        """
        heard_at = self._reading.rest_of_turn.get(self.position)
        return (
            heard_at is not None
            and last.fields["inc"] != event.fields["inc"]
            and last.fields["epoch"] > event.fields["epoch"]
            and last.at > heard_at
            and fate.resolved is not None
        )

    def _wrong_start(self, event: Event, key: _Key, why: str, earlier: Event) -> None:
        entity = f"{event.fields['type']}/{event.fields['id']}"
        self.found.add(event.at, f"{Message(*key)} to {entity} {why}", earlier, event)

    def finish(self, event: Event, fields: dict[str, Any]) -> None:
        home = (fields["inc"], fields["type"], fields["id"])
        self._on[home] = self._on.get(home, 0) - 1
        self._worked[home] = event.at
        if fields["sender"]:
            key = (fields["sender"], fields["role"], fields["shard"], fields["n"])
            self._fate(key).finish = event

    def claim(self, event: Event, fields: dict[str, Any]) -> None:
        if fields["ok"]:
            self._claims[fields["role"], fields["shard"]] = fields["owner"]

    def withheld(self, event: Event, fields: dict[str, Any]) -> None:
        """J5: its answer depends on what did not commit. A planned move is no reason for that."""
        key = (fields["sender"], fields["role"], fields["shard"], fields["n"])
        claimed = self._claims.get((fields["role"], fields["shard"]))
        if fields["why"] == "unknown" or claimed not in self._reading.lives:
            self._fate(key).withheld = True

    def draining(self, event: Event, fields: dict[str, Any]) -> None:
        home = (fields["inc"], fields["role"], fields["shard"], fields["epoch"])
        self._drains[home] = event.at

    def open(self, event: Event, fields: dict[str, Any]) -> None:
        """H11: a reverted move no longer has a deadline."""
        home = (fields["inc"], fields["role"], fields["shard"], fields["epoch"])
        self._drains.pop(home, None)

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
        if event.fields.get("cancelled"):
            return True
        if fate.withheld or (fate.finish and fate.finish.fields["how"] == "failed"):
            # It ran, so there is no gap; what it stored is unknown (J4), or fenced (I2).
            return True
        if self._reading.may_lose(submit.at, event.at, (key[0], *fate.homes)):
            return True
        timeout_s = submit.fields["timeout"]
        if timeout_s is not None and event.at >= submit.at + timeout_s - self._early_s:
            # Any fault may keep a shard from having a home in time.
            if self._reading.disturbed.overlap(submit.at, event.at):
                return True
            if fate.start or self._under_way(event, fate) or self._behind_others(event, fate):
                return True
        sender, role, shard, _ = key
        death = self._reading.deaths.get(sender)
        if death and death.kind == "ended" and death.at - event.at <= LEAVE_S + self._late_s:
            drain_s = self._drain_s(sender)
            if event.at >= submit.at + drain_s - self._early_s:
                return True
        start, finish = fate.start, fate.finish
        if start is None or (finish and finish.fields["how"] not in ("cancelled", "abandoned")):
            return False
        owner = start.fields["inc"]
        drain_at = self._drains.get((owner, role, shard, start.fields["epoch"]))
        ran_until = finish.at if finish else event.at
        return drain_at is not None and ran_until >= drain_at + self._drain_s(owner) - self._early_s

    def _under_way(self, event: Event, fate: _Fate) -> bool:
        """It had just been sent or had just arrived, at its owner or on its way back."""
        return event.at - fate.moved_at <= UNDER_WAY_S + self._late_s

    def _behind_others(self, event: Event, fate: _Fate) -> bool:
        """It waited in the mailbox of an entity that was at work all the time."""
        if fate.accepted is None:
            return False
        fields = fate.accepted.fields
        home = (fields["inc"], fields["type"], fields["id"])
        if self._on.get(home, 0) > 0:
            return True
        return event.at - self._worked.get(home, float("-inf")) <= BUSY_S + self._late_s

    def _drain_s(self, inc: str) -> float:
        return float(self._reading.limits(inc).get("drain", DRAIN_S))
