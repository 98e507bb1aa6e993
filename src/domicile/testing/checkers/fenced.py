"""I2, fenced: nothing durable commits under an epoch older than the newest the journal has seen."""

from __future__ import annotations

from domicile.core.ids import ShardKey
from domicile.core.state.keys import NODES
from domicile.testing.checkers.reading import Reading, is_fenced, read
from domicile.testing.checkers.verdict import Findings, Violation
from domicile.testing.history import Event, History

_Home = tuple[str, ShardKey, int]
"""An owner, a shard and its epoch."""

_Line = tuple[str, int, int, str]
"""The batches of one claim: a shard, its epoch and its owner."""


def check_fenced(history: History) -> list[Violation]:
    """I2: appends belong to the newest claim (J1, J2) and continue each other without a gap.

    The batches of one claim commit in the order of their numbers, and none is sent before the one
    before it is answered or settled (J3, J4). A shard whose claim holds is not refused because
    another one of its batch is (J3). A shard that drained because its journal knew a newer epoch
    gets an epoch that is newer still (J1).
    """
    reading = read(history)
    name = reading.name
    found = Findings("I2")
    fences: dict[tuple[str, int], Event] = {}
    ends: dict[tuple[str, str], tuple[int, Event]] = {}
    batches: dict[_Line, Event] = {}
    answered: dict[tuple[_Line, int], None] = {}
    for event in history.of("claim", "append", "settle"):
        fields = event.fields
        shard = (fields["role"], fields["shard"])
        if event.kind == "settle":
            answered[(*shard, fields["epoch"], fields["owner"]), fields["batch"]] = None
            continue
        if not fields["ok"]:
            if event.kind == "append" and fields["why"] == "fenced":
                _judge_refused(found, reading, event, fences.get(shard), batches, answered)
            continue
        append = event.kind == "append"
        fence = fences.get(shard)
        what = (
            f"{event.kind} of {name(fields['owner'])} in epoch {fields['epoch']} of "
            f"{shard[0]}/{shard[1]}"
        )
        newest = fence.fields["epoch"] if fence else -1
        if fence and fields["epoch"] < newest:
            message = f"{what} committed after {name(fence.fields['owner'])} claimed epoch {newest}"
            found.add(event.at, message, fence, event)
        elif fence and fields["epoch"] == newest and fields["owner"] != fence.fields["owner"]:
            message = f"{what} committed in an epoch that {name(fence.fields['owner'])} claimed"
            found.add(event.at, message, fence, event)
        else:
            if append and fields["epoch"] > newest:
                found.add(event.at, f"{what} committed without a claim (H13)", fence, event)
            fences[shard] = event
        if append:
            last = batches.setdefault((*shard, fields["epoch"], fields["owner"]), event)
            if fields["batch"] < last.fields["batch"]:
                message = f"batch {fields['batch']} of that {what} committed after a later one"
                found.add(event.at, message, last, event)
            batches[(*shard, fields["epoch"], fields["owner"])] = event
            answered[(*shard, fields["epoch"], fields["owner"]), fields["batch"]] = None
            entity = (fields["type"], fields["id"])
            known = ends.get(entity)
            if known and fields["seq"] != known[0]:
                message = (
                    f"{what} starts {entity[0]}/{entity[1]} at event {fields['seq']}, but its "
                    f"journal ended at {known[0]}"
                )
                found.add(event.at, message, known[1], event)
            ends[entity] = (fields["seq"] + fields["count"], event)
    _judge_floors(found, history, reading)
    return found.violations


def _judge_refused(
    found: Findings,
    reading: Reading,
    event: Event,
    fence: Event | None,
    batches: dict[_Line, Event],
    answered: dict[tuple[_Line, int], None],
) -> None:
    """J3, J4: a batch is refused as fenced if another claim stands, or if its number is used up."""
    fields = event.fields
    line = (fields["role"], fields["shard"], fields["epoch"], fields["owner"])
    holds = fence is not None and (
        (fence.fields["epoch"], fence.fields["owner"]) == (fields["epoch"], fields["owner"])
    )
    if not holds or (line, fields["batch"]) in answered:
        return
    what = (
        f"batch {fields['batch']} of {reading.name(fields['owner'])} for "
        f"{fields['role']}/{fields['shard']}"
    )
    last = batches.get(line)
    if last is not None and last.fields["batch"] >= fields["batch"]:
        message = f"{what} was neither answered nor settled when a later one was sent (J3, J4)"
        found.add(event.at, message, last, event)
    else:
        found.add(event.at, f"{what} was refused as fenced, though its claim holds (J3)", event)


def _judge_floors(found: Findings, history: History, reading: Reading) -> None:
    """J1: an owner that drained by itself, because the journal had refused it, knows the fence and
    releases with that. Then the shard's next epoch is above the fence."""
    fences: dict[ShardKey, int] = {}
    refused: dict[_Home, int] = {}
    floors: dict[_Home, tuple[int, Event]] = {}
    moved: dict[tuple[ShardKey, int], None] = {}
    nodes: dict[str, None] = {}
    for position, event in enumerate(history.events):
        kind, fields = event.kind, event.fields
        if kind in ("claim", "append", "settle"):
            shard = ShardKey(fields["role"], fields["shard"])
            if kind == "claim" and fields["ok"]:
                fences[shard] = max(fields["epoch"], fences.get(shard, 0))
            elif is_fenced(event):
                refused.setdefault((fields["owner"], shard, fields["epoch"]), fences.get(shard, 0))
        elif kind == "draining":
            shard = ShardKey(fields["role"], fields["shard"])
            home = (fields["inc"], shard, fields["epoch"])
            if home in refused and (shard, fields["epoch"]) not in moved:
                floors.setdefault(home, (refused[home], event))
        elif kind == "rewound":
            floors.clear()
            moved.clear()
            held = [key for key, _ in fields["items"] if key.startswith(NODES)]
            nodes = {key[len(NODES) :].decode(): None for key in held}
        elif kind in ("commit", "expire"):
            for stored in reading.stored.get(position, ()):
                before, after = stored.before, stored.after
                if after.state == "moving":
                    moved[stored.shard, after.epoch] = None
                floor = floors.get((before.owner, stored.shard, before.epoch))
                # Of an owner that is gone, nobody need have heard what it knew.
                if floor and before.owner in nodes and before.epoch < after.epoch <= floor[0]:
                    message = (
                        f"shard {stored.shard.role}/{stored.shard.shard} got epoch {after.epoch} "
                        f"after {reading.name(before.owner)} had found epoch {floor[0]} in its "
                        "journal (J1)"
                    )
                    found.add(event.at, message, floor[1], event)
            for put in fields.get("puts", ()):
                if put[0].startswith(NODES):
                    nodes[put[0][len(NODES) :].decode()] = None
            for key in fields.get("deletes", ()):
                if key.startswith(NODES):
                    nodes.pop(key[len(NODES) :].decode(), None)
