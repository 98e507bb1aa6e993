"""I3, told after stored: no process acts on, or is told of, an entry that the store does not
hold."""

from __future__ import annotations

from domicile.testing.checkers.reading import is_fenced, read
from domicile.testing.checkers.verdict import Findings, Violation
from domicile.testing.history import History


def check_stored_first(history: History) -> list[Violation]:
    """I3: `told`, `open` and `draining` follow the commit of exactly that entry.

    A home whose claim or write was refused by its journal may drain on its own decision: it needs
    another epoch (J1, J2).
    """
    reading = read(history)
    found = Findings("I3")
    states: dict[tuple[str, int, str, int, str], None] = {}
    entries: dict[tuple[str, int, str, int, str, int], None] = {}
    outrun: dict[tuple[str, int, str, int], None] = {}
    for position, event in enumerate(history.events):
        kind, fields = event.kind, event.fields
        if kind == "commit":
            for _, shard, _, entry in reading.stored.get(position, ()):
                state = (shard.role, shard.shard, entry.owner, entry.epoch, entry.state)
                states[state] = None
                entries[(*state, entry.change)] = None
        elif kind in ("claim", "append", "settle"):
            if is_fenced(event):
                outrun[fields["role"], fields["shard"], fields["owner"], fields["epoch"]] = None
        elif kind == "told":
            where = (fields["role"], fields["shard"])
            entry_key = (
                *where,
                fields["owner"],
                fields["epoch"],
                fields["state"],
                fields["change"],
            )
            if entry_key not in entries and (fields["state"], fields["change"]) != ("free", 0):
                message = (
                    f"{reading.name(fields['inc'])} told {reading.name(fields['to'])} that "
                    f"{where[0]}/{where[1]} is {fields['state']} at "
                    f"{reading.name(fields['owner'])} in epoch {fields['epoch']} (change "
                    f"{fields['change']}), which was not stored"
                )
                found.add(event.at, message, event)
        elif kind in ("open", "draining"):
            needed = "serving" if kind == "open" else "moving"
            where = (fields["role"], fields["shard"])
            home = (*where, fields["inc"], fields["epoch"])
            if (*home, needed) not in states and (kind == "open" or home not in outrun):
                message = (
                    f"{reading.name(fields['inc'])} went {kind} for {where[0]}/{where[1]} in epoch "
                    f"{fields['epoch']} before the store said {needed}"
                )
                found.add(event.at, message, event)
    return found.violations
