"""H9, drained: messages that a moving shard need not finish go back to their senders and do not
run.

A node that leaves without a fault has also released everything first (H14).
"""

from __future__ import annotations

from typing import Any

from domicile.testing.checkers.reading import Message, read
from domicile.testing.checkers.verdict import Findings, Violation
from domicile.testing.history import Event, History

_Key = tuple[str, str, int, int]
_Home = tuple[str, str, int]


def check_drained(history: History) -> list[Violation]:
    """H9: of the messages that wait when draining begins, only finishing ones and those before them
    start; H10: entities stop before the release, and the journal has answered all their writes
    (J5); H14: `ended` finds no shard open."""
    reading = read(history)
    found = Findings("H9")
    finishing: dict[_Key, bool] = {}
    boxes: dict[_Home, dict[tuple[str, str], dict[_Key, None]]] = {}
    due_back: dict[_Home, dict[_Key, Event]] = {}
    phases: dict[_Home, Event] = {}
    doubts: dict[tuple[_Home, int], None] = {}
    for event in history.events:
        kind, fields = event.kind, event.fields
        if kind == "write":
            finishing[fields["inc"], fields["role"], fields["shard"], fields["n"]] = fields[
                "finishing"
            ]
        elif kind in ("accept", "return", "dropped", "waking", "start"):
            home, key = _names(fields)
            cut = due_back[home].pop(key, None) if home in due_back else None
            entity = (fields["type"], fields["id"])
            if kind == "accept":
                boxes.setdefault(home, {}).setdefault(entity, {})[key] = None
                continue
            box = boxes[home].get(entity) if home in boxes else None
            if box is not None:
                box.pop(key, None)
            if kind in ("waking", "start") and cut is not None:
                message = (
                    f"{reading.name(home[0])} started {Message(*key)} "
                    "though its shard moves and nothing that must finish was behind it"
                )
                found.add(event.at, message, cut, event)
        elif kind in ("open", "draining", "released", "closed"):
            home = (fields["inc"], fields["role"], fields["shard"])
            phases[home] = event
            due_back.pop(home, None)
            if kind == "draining":
                due_back[home] = {
                    key: event
                    for box in boxes.get(home, {}).values()
                    for key in _behind(list(box), finishing)
                }
        elif kind == "stopped":
            phase = phases.get((fields["inc"], fields["role"], fields["shard"]))
            if phase and phase.kind == "released" and fields["epoch"] <= phase.fields["epoch"]:
                message = (
                    f"{reading.name(fields['inc'])} released {fields['role']}/{fields['shard']} "
                    f"before {fields['type']}/{fields['id']} had stopped (H10)"
                )
                found.add(event.at, message, phase, event)
        elif kind == "unstaged":
            # Perhaps a write was given up, because the journal did not answer: it may come late.
            doubts[(fields["inc"], fields["role"], fields["shard"]), fields["epoch"]] = None
        elif kind == "append" and fields["ok"]:
            home, epoch = (fields["owner"], fields["role"], fields["shard"]), fields["epoch"]
            phase = phases.get(home)
            is_over = phase is not None and phase.kind == "released"
            if phase and is_over and epoch <= phase.fields["epoch"] and (home, epoch) not in doubts:
                message = (
                    f"{reading.name(home[0])} released {home[1]}/{home[2]} before the journal had "
                    f"answered its batch {fields['batch']} (H10, J5)"
                )
                found.add(event.at, message, phase, event)
        elif kind == "ended" and not reading.disturbed.overlap(event.at, event.at):
            for home, phase in phases.items():
                if home[0] == fields["inc"] and phase.kind in ("open", "draining"):
                    message = f"{reading.name(home[0])} left without releasing {home[1]}/{home[2]}"
                    found.add(event.at, f"{message} (H14)", phase, event)
    return found.violations


def _names(fields: dict[str, Any]) -> tuple[_Home, _Key]:
    where = (fields["role"], fields["shard"])
    return (fields["inc"], *where), (fields["sender"], *where, fields["n"])


def _behind(box: list[_Key], finishing: dict[_Key, bool]) -> list[_Key]:
    """What waits behind the last message that must finish here."""
    last = max((index for index, key in enumerate(box) if finishing.get(key)), default=-1)
    return [key for key in box[last + 1 :] if key[0]]
