"""I4, durable: what was acknowledged is stored, and every message takes effect at most once.

J5, gated: nothing leaves a durable entity before what it depends on is stored.
"""

from __future__ import annotations

from domicile.testing.checkers.reading import Message, read
from domicile.testing.checkers.verdict import Findings, Violation
from domicile.testing.history import Event, History


def check_durable(history: History) -> list[Violation]:
    """I4: `acked` follows the append, stays in the journal, and a key or value is stored once.

    A batch keeps the state as which it was settled: stored, or never written, also not later (J4).
    The key of a handler that sends nothing before it ends is stored together with its reply.
    """
    name = read(history).name
    found = Findings("I4")
    ends: dict[tuple[str, str], int] = {}
    keyed: dict[tuple[str, str, str], Event] = {}
    batches: dict[tuple[str, int, int, str, int], Event] = {}
    voids: dict[tuple[str, int, int, str, int], Event] = {}
    acks: dict[tuple[str, str], list[Event]] = {}
    for event in history.of("append", "settle", "acked", "unanswered", "kept"):
        fields = event.fields
        if event.kind == "settle":
            batch = _batch(event)
            if fields["how"] == "void":
                voids[batch] = event
            if fields["how"] != "fenced" and (batch in batches) != (fields["how"] == "there"):
                what = "as stored, but it never was" if fields["how"] == "there" else "as lost"
                message = f"batch {batch[-1]} of {name(fields['owner'])} was settled {what}"
                found.add(event.at, message, batches.get(batch), event)
            continue
        entity = (fields["type"], fields["id"])
        where = f"{entity[0]}/{entity[1]}"
        if event.kind == "append":
            if not fields["ok"]:
                continue
            batch = _batch(event)
            batches.setdefault(batch, event)
            if batch in voids:
                message = (
                    f"batch {batch[-1]} of {name(fields['owner'])} was stored on {where} after it "
                    "had been settled as lost"
                )
                found.add(event.at, message, voids[batch], event)
            ends[entity] = max(ends.get(entity, 0), fields["seq"] + fields["count"])
            for key in fields["keys"]:
                first = keyed.setdefault((*entity, key), event)
                if first is not event:
                    message = f"key {key!r} had a second effect on {where}"
                    found.add(event.at, f"{message}, by {name(fields['owner'])}", first, event)
        elif event.kind == "acked":
            acks.setdefault(entity, []).append(event)
            if fields["seq"] is not None and fields["seq"] > ends.get(entity, 0):
                message = f"event {fields['seq']} of {where} was acknowledged before it was stored"
                found.add(event.at, message, event)
        elif event.kind == "unanswered":
            message = f"key {fields['key']!r} of {where} has an effect, but its reply is lost"
            found.add(event.at, message, event)
        else:
            _judge_kept(found, event, where, acks.get(entity, []))
    return found.violations


def check_gated(history: History) -> list[Violation]:
    """J5: nothing leaves a durable entity that depends on an event that is not committed.

    A handler has seen every event that its entity shows when it ends. So the answer to its caller,
    and every message that it sends, must come after those events are stored. A hook runs beside
    later handlers, which may store more while its message waits: that one depends on what was sent
    when the hook made the call.
    """
    found = Findings("J5")
    shown: dict[tuple[str, str, str], int] = {}
    stored: dict[tuple[str, str], int] = {}
    needs: dict[tuple[str, str, int, int], tuple[tuple[str, str], int]] = {}
    if not any(history.of("claim")):
        # The journal of these processes keeps no history.
        return []
    kinds = ("staged", "unstaged", "append", "finish", "submit", "outcome")
    for event in history.of(*kinds):
        fields = event.fields
        if event.kind == "append":
            if fields["ok"]:
                stored[fields["type"], fields["id"]] = fields["seq"] + fields["count"]
        elif event.kind == "submit":
            by = fields.get("by")
            if by is not None:
                seen = fields.get("seen")
                upto = shown.get((fields["inc"], *by), 0) if seen is None else seen
                if upto > stored.get(tuple(by), 0):
                    message = f"{by[0]}/{by[1]} sent a message before its event {upto} was stored"
                    found.add(event.at, message, event)
        elif event.kind == "outcome":
            key = (fields["inc"], fields["role"], fields["shard"], fields["n"])
            entity, upto = needs.pop(key, (("", ""), 0))
            known = fields["outcome"] in ("ok", "rejected", "failed")
            if known and upto > stored.get(entity, 0):
                message = (
                    f"{Message(*key)} was answered before event {upto} of {entity[0]}/{entity[1]} "
                    "was stored, which its handler had seen"
                )
                found.add(event.at, message, event)
        else:
            home = (fields["inc"], fields["type"], fields["id"])
            if event.kind != "finish":
                shown[home] = fields["upto"] or 0
            elif home in shown and fields["sender"]:
                key = (fields["sender"], fields["role"], fields["shard"], fields["n"])
                needs[key] = (home[1:], shown[home])
    return found.violations


def _batch(event: Event) -> tuple[str, int, int, str, int]:
    """The part of a batch that concerns one shard: outcomes are kept per shard (J3)."""
    fields = event.fields
    return fields["role"], fields["shard"], fields["epoch"], fields["owner"], fields["batch"]


def _judge_kept(found: Findings, kept: Event, where: str, acks: list[Event]) -> None:
    values = kept.fields["values"]
    seen: dict[int, int] = {}
    for seq, value in enumerate(values, 1):
        if seen.setdefault(value, seq) != seq:
            message = f"{where} holds value {value} twice, as events {seen[value]} and {seq}"
            found.add(kept.at, message)
    for ack in acks:
        seq, value = ack.fields["seq"], ack.fields["value"]
        if seq is None:
            if value not in seen:
                message = f"{where} acknowledged value {value}, but does not hold it"
                found.add(kept.at, message, ack)
        elif seq > len(values) or (value is not None and values[seq - 1] != value):
            message = f"{where} acknowledged value {value} as event {seq}, but does not hold it"
            found.add(kept.at, message, ack)
