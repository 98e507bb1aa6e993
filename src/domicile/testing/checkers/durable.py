"""I4, durable: what was acknowledged is stored, and every message takes effect at most once."""

from __future__ import annotations

from domicile.testing.checkers.reading import read
from domicile.testing.checkers.verdict import Findings, Violation
from domicile.testing.history import Event, History


def check_durable(history: History) -> list[Violation]:
    """I4: `acked` follows the append, stays in the journal, and a key or value is stored once.

    A batch keeps the state as which it was settled: stored, or never written, also not later (J4).
    """
    name = read(history).name
    found = Findings("I4")
    ends: dict[tuple[str, str], int] = {}
    keyed: dict[tuple[str, str, str], Event] = {}
    batches: dict[tuple[str, int, int, str, int], Event] = {}
    voids: dict[tuple[str, int, int, str, int], Event] = {}
    acks: dict[tuple[str, str], list[Event]] = {}
    for event in history.of("append", "settle", "acked", "kept"):
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
            if fields["seq"] > ends.get(entity, 0):
                message = f"event {fields['seq']} of {where} was acknowledged before it was stored"
                found.add(event.at, message, event)
        else:
            _judge_kept(found, event, where, acks.get(entity, []))
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
        if seq > len(values) or (value is not None and values[seq - 1] != value):
            message = f"{where} acknowledged value {value} as event {seq}, but does not hold it"
            found.add(kept.at, message, ack)
