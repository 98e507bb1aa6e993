"""L3, deadlines: nothing starts, resumes or answers at or after the incarnation's deadline (L1).

An incarnation that is not paused must also be fenced at its deadline, whether or not it is busy.
"""

from __future__ import annotations

from math import inf

from domicile.testing.checkers.reading import BETWEEN_S, FRAME_S, Reading, read
from domicile.testing.checkers.verdict import Findings, Violation
from domicile.testing.history import Event, History

PROMPT_S = 1e-4
"""Seconds by which the timer at the deadline may be late in virtual time; an answered renewal takes
longer than this."""

_SIGNS = ("accept", "submit", "write")
"""Other events that show that a process still acts."""

_DEEDS = {"start": "started a handler", "resume": "resumed a handler", "reply": "answered"}


def check_deadlines(history: History) -> list[Violation]:
    """L3: each start, resumption and reply lies strictly before `sent_at + ttl - margin`; L4: so
    does the fence, unless the process was paused, and no handler goes on with an error later than
    the stop budget after the deadline or the fence. An infinite ttl (C9) sets no deadline, but a
    fence still ends the incarnation. One event of a real process may be noted just after the
    deadline: the machine may pause the process between a guard and that note."""
    reading = read(history)
    found = Findings("L3")
    valid_until: dict[str, float] = {}
    renewals: dict[str, Event] = {}
    fenced: dict[str, Event] = {}
    passed: dict[str, Event] = {}
    late: dict[str, None] = {}
    for position, event in enumerate(history.events):
        kind = event.kind
        if kind in _DEEDS:
            inc = event.fields["inc"]
            life = reading.lives.get(inc)
            hosts = life is None or life.fields["hosts"]
            # For an event that a pause delayed: its guard came later than the last event before the
            # pause.
            guarded_at = reading.rest_of_turn.get(position, inf)
            if hosts and inc not in fenced and guarded_at < valid_until.get(inc, guarded_at):
                continue
            if hosts and inc not in fenced and event.at < valid_until.get(inc, event.at):
                continue
            who = f"{reading.name(inc)} {_DEEDS[kind]} ({_subject(event)})"
            if inc in fenced:
                found.add(event.at, f"{who} after it had fenced", fenced[inc], event)
            elif inc not in valid_until:
                found.add(event.at, f"{who} without ever holding a lease", event)
            elif event.at >= valid_until[inc]:
                late_s = event.at - valid_until[inc]
                if reading.slack_s and late_s < BETWEEN_S:
                    first = passed.setdefault(inc, event)
                    if first is event or _one_frame(first, event):
                        continue
                message = f"{who} {late_s:.6f} s past its deadline {valid_until[inc]:.6f}"
                found.add(event.at, message, renewals[inc], event)
            elif kind == "start":
                found.add(event.at, f"{who}, but it is a client", life, event)
        elif kind == "renewed":
            fields = event.fields
            inc = fields["inc"]
            until = fields["sent_at"] + fields["ttl"] - fields["margin"]
            if inc not in valid_until or until > valid_until[inc]:
                valid_until[inc] = until
                renewals[inc] = event
        elif kind == "unwind":
            _judge_cleaning(found, reading, event, valid_until, fenced)
        elif kind == "fenced":
            inc = event.fields["inc"]
            _judge_overdue(found, reading, inc, valid_until, event.at, renewals)
            fenced.setdefault(inc, event)
        elif kind in _SIGNS:
            inc = event.fields["inc"]
            if inc in fenced and inc not in late:
                late[inc] = None
                message = f"{reading.name(inc)} still took messages after it had fenced (L4)"
                found.add(event.at, message, fenced[inc], event)
            elif event.at > valid_until.get(inc, inf) and inc not in fenced and inc not in late:
                death = reading.deaths.get(inc)
                if (death is None or death.at > event.at) and _judge_overdue(
                    found, reading, inc, valid_until, event.at, renewals
                ):
                    late[inc] = None
    return found.violations


def _judge_cleaning(
    found: Findings,
    reading: Reading,
    event: Event,
    valid_until: dict[str, float],
    fenced: dict[str, Event],
) -> None:
    """L4: what was cancelled cleans up within the stop budget: of the fence, or of the deadline if
    that was earlier."""
    inc = event.fields["inc"]
    budget_s, fence = reading.limits(inc).get("stop"), fenced.get(inc)
    over_at = min(valid_until.get(inc, inf), fence.at if fence else inf)
    if budget_s is None or event.at < over_at + budget_s + PROMPT_S + reading.slack_s:
        return
    message = (
        f"{reading.name(inc)} went on with a handler ({_subject(event)}) "
        f"{event.at - over_at:.6f} s after it was over, and its stop budget is {budget_s:g} s (L4)"
    )
    found.add(event.at, message, fence, event)


def _judge_overdue(
    found: Findings,
    reading: Reading,
    inc: str,
    valid_until: dict[str, float],
    at: float,
    renewals: dict[str, Event],
) -> bool:
    """L4: the fence comes at the deadline; only a pause delays it, until the pause ends."""
    if inc not in valid_until:
        return False
    due_at, allowed_s = valid_until[inc], PROMPT_S + reading.slack_s
    for start, end in sorted(reading.freezes.get(inc, ())):
        # A process that is paused again within the allowed time is not to blame.
        if start <= due_at + allowed_s:
            due_at = max(due_at, end)
    if at <= due_at + allowed_s:
        return False
    message = (
        f"{reading.name(inc)} still stood {at - due_at:.6f} s past its deadline "
        f"{valid_until[inc]:.6f}, though it did not stand still"
    )
    found.add(at, message, renewals[inc])
    return True


def _one_frame(one: Event, other: Event) -> bool:
    """Whether these are replies that one guard allowed."""
    senders = {one.fields["sender"], other.fields["sender"]}
    return one.kind == other.kind == "reply" and len(senders) == 1 and other.at - one.at <= FRAME_S


def _subject(event: Event) -> str:
    fields = event.fields
    if event.kind == "reply":
        return f"message {fields['n']} of {fields['sender'][:8]}"
    return f"{fields['type']}/{fields['id']}"
