"""I6, bounded: every queue keeps its limit, and every lost message is reported."""

from __future__ import annotations

from typing import Any

from domicile.testing.checkers.reading import GRACE_S, Message, Reading, read
from domicile.testing.checkers.verdict import Findings, Violation
from domicile.testing.history import Event, History

SLACK_S = 1.0
"""Seconds after its timeout by which a sender must be told: timers and answers need a moment."""

_Key = tuple[str, str, int, int]


def check_bounded(history: History) -> list[Violation]:
    """I6: queues, windows, mailboxes and chains within bounds; no silent drop."""
    reading = read(history)
    found = Findings("I6")
    pending: dict[_Key, Event] = {}
    deep: dict[_Key, Event] = {}
    accepted: dict[_Key, Event] = {}
    on: dict[tuple[str, str, str], int] = {}
    for event in history.events:
        kind, fields = event.kind, event.fields
        if kind == "submit":
            key = (fields["inc"], fields["role"], fields["shard"], fields["n"])
            pending[key] = event
            limits = reading.limits(fields["inc"])
            if limits:
                _bound(found, reading, event, "held", limits["buffer"] + limits["window"])
                if len(fields["chain"]) > limits["chain"]:
                    deep[key] = event
        elif kind == "write":
            limits = reading.limits(fields["inc"])
            if limits:
                room = limits["buffer"] if fields.get("beyond") else 0
                _bound(found, reading, event, "open", limits["window"] + room)
        elif kind == "accept":
            limits = reading.limits(fields["inc"])
            if limits:
                _bound(found, reading, event, "depth", limits["mailbox"])
            accepted[fields["sender"], fields["role"], fields["shard"], fields["n"]] = event
        elif kind in ("return", "dropped"):
            accepted.pop((fields["sender"], fields["role"], fields["shard"], fields["n"]), None)
        elif kind == "start":
            key = (fields["sender"], fields["role"], fields["shard"], fields["n"])
            entity = (fields["inc"], fields["type"], fields["id"])
            on[entity] = on.get(entity, 0) + 1
            submit = pending.get(key)
            if submit and not submit.fields["ask"]:
                del pending[key]
        elif kind == "finish":
            entity = (fields["inc"], fields["type"], fields["id"])
            on[entity] = on.get(entity, 0) - 1
        elif kind in ("outcome", "lost"):
            key = (fields["inc"], fields["role"], fields["shard"], fields["n"])
            pending.pop(key, None)
            if fields.get("outcome") == "not_executed":
                deep.pop(key, None)  # refused for its depth, as N1 asks
    for event in deep.values():
        limit = reading.limits(event.fields["inc"])["chain"]
        message = (
            f"{reading.name(event.fields['inc'])} sent an ask on which "
            f"{len(event.fields['chain'])} handlers wait, its limit is {limit} (N1)"
        )
        found.add(event.at, message, event)
    for key, event in pending.items():
        _judge_silence(found, reading, key, event, accepted.get(key), on)
    return found.violations


_QUEUES = {
    "held": "messages queued for {shard}",
    "open": "unstarted messages written for {shard}",
    "depth": "messages in a mailbox of {shard}",
}


def _bound(found: Findings, reading: Reading, event: Event, name: str, limit: int) -> None:
    fields: dict[str, Any] = event.fields
    if fields[name] <= limit:
        return
    queue = _QUEUES[name].format(shard=f"{fields['role']}/{fields['shard']}")
    message = f"{reading.name(fields['inc'])} has {fields[name]} {queue}, its limit is {limit}"
    found.add(event.at, message, event)


def _judge_silence(
    found: Findings,
    reading: Reading,
    key: _Key,
    submit: Event,
    accepted: Event | None,
    on: dict[tuple[str, str, str], int],
) -> None:
    inc = submit.fields["inc"]
    timeout_s = submit.fields["timeout"]
    due_at = submit.at + (GRACE_S if timeout_s is None else timeout_s)
    for start, end in reading.freezes.get(inc, ()):
        if start <= due_at:
            due_at = max(due_at, end)
    death = reading.deaths.get(inc)
    if death is not None and not submit.fields["ask"]:
        # A tell has no promised time of an answer: its owner may have been paused all the time.
        return
    if due_at + SLACK_S > (reading.end if death is None else death.at):
        return
    if accepted and not submit.fields["ask"]:
        fields = accepted.fields
        owner = fields["inc"]
        if owner not in reading.deaths and on.get((owner, fields["type"], fields["id"]), 0) > 0:
            return
    what = "ask" if submit.fields["ask"] else "tell"
    message = (
        f"silent drop: {Message(*key)}, a {what} to {submit.fields['type']}/"
        f"{submit.fields['id']} by {reading.name(inc)}, was never resolved"
    )
    found.add(submit.at, message, submit, accepted)
