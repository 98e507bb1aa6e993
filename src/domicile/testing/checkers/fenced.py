"""I2, fenced: nothing durable commits under an epoch older than the newest the journal has seen."""

from __future__ import annotations

from domicile.testing.checkers.reading import read
from domicile.testing.checkers.verdict import Findings, Violation
from domicile.testing.history import Event, History


def check_fenced(history: History) -> list[Violation]:
    """I2: appends belong to the newest claim (J1, J2) and continue each other without a gap.

    The batches of one claim commit in the order of their numbers (J3, J4).
    """
    name = read(history).name
    found = Findings("I2")
    fences: dict[tuple[str, int], Event] = {}
    ends: dict[tuple[str, str], tuple[int, Event]] = {}
    batches: dict[tuple[str, int, int, str], Event] = {}
    for event in history.of("claim", "append"):
        fields = event.fields
        if not fields["ok"]:
            continue
        shard = (fields["role"], fields["shard"])
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
            entity = (fields["type"], fields["id"])
            known = ends.get(entity)
            if known and fields["seq"] != known[0]:
                message = (
                    f"{what} starts {entity[0]}/{entity[1]} at event {fields['seq']}, but its "
                    f"journal ended at {known[0]}"
                )
                found.add(event.at, message, known[1], event)
            ends[entity] = (fields["seq"] + fields["count"], event)
    return found.violations
