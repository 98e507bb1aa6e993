"""L3, deadlines: nothing starts, goes on or answers at or past the incarnation's deadline (L1)."""

from __future__ import annotations

from domicile.testing.checkers.reading import read
from domicile.testing.checkers.verdict import Findings, Violation
from domicile.testing.history import Event, History

_DEEDS = {"start": "started a handler", "resume": "resumed a handler", "reply": "answered"}


def check_deadlines(history: History) -> list[Violation]:
    """L3: each start, resumption and reply lies strictly before `sent_at + ttl - margin`."""
    reading = read(history)
    found = Findings("L3")
    valid_until: dict[str, float] = {}
    renewals: dict[str, Event] = {}
    fenced: dict[str, Event] = {}
    for event in history.events:
        kind = event.kind
        if kind in _DEEDS:
            inc = event.fields["inc"]
            life = reading.lives.get(inc)
            hosts = life is None or life.fields["hosts"]
            if hosts and inc not in fenced and event.at < valid_until.get(inc, event.at):
                continue
            who = f"{reading.name(inc)} {_DEEDS[kind]} ({_subject(event)})"
            if inc in fenced:
                found.add(event.at, f"{who} after it had fenced", fenced[inc], event)
            elif inc not in valid_until:
                found.add(event.at, f"{who} without ever holding a lease", event)
            elif event.at >= valid_until[inc]:
                late_s = event.at - valid_until[inc]
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
        elif kind == "fenced":
            fenced.setdefault(event.fields["inc"], event)
    return found.violations


def _subject(event: Event) -> str:
    fields = event.fields
    if event.kind == "reply":
        return f"message {fields['n']} of {fields['sender'][:8]}"
    return f"{fields['type']}/{fields['id']}"
