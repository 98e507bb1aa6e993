"""Did a simulated group keep its promises? Written from the rules alone.

The checkers read what servers and clients recorded, the commits of the store and the logs at the
end. They know nothing of the machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from domicile.testing.checkers.verdict import Findings, Violation
from domicile.testing.groups.servers import GroupLog, LogEntry, saved_at
from domicile.testing.history import History

STATE = b"group/g/state"
RECEIPTS = b"group/g/receipt/"


def states(history: History) -> Iterator[tuple[float, dict[str, Any]]]:
    """The group's states in the order of their commits."""
    for event in history.of("commit"):
        for key, value, _ in event.fields["puts"]:
            if key == STATE:
                yield event.at, msgspec.json.decode(value)


def check_one_primary(history: History, record: GroupLog) -> list[Violation]:
    """I1 for groups: one server accepts writes in an epoch, and none after its successor came.

    A machine that was frozen may take writes for a moment after it wakes (F2).
    """
    findings = Findings("F1")
    served: dict[int, tuple[float, str]] = {}
    ends: dict[int, float] = {}
    newest = 0
    for at, state in states(history):
        if state["phase"] == "serving" and state["epoch"] not in served:
            served[state["epoch"]] = (at, state["primary_server"])
            ends[newest] = at
            newest = state["epoch"]
    for one in record.accepted:
        began = served.get(one.epoch)
        if began is None or began[0] > one.at:
            findings.add(one.at, f"{one.server} took write {one.write} in epoch {one.epoch}, "
                                 "which nobody served")  # fmt: skip
        elif began[1] != one.server:
            findings.add(one.at, f"{one.server} took write {one.write} in epoch {one.epoch} of "
                                 f"{began[1]}")  # fmt: skip
        elif not one.late and one.at > ends.get(one.epoch, one.at):
            findings.add(one.at, f"{one.server} took write {one.write} in epoch {one.epoch} after "
                                 "its successor was announced")  # fmt: skip
    return findings.violations


def stored_receipts(history: History) -> dict[str, int]:
    """What the receipts in the store say at the end: where something is saved, how many writes."""
    found: dict[str, dict[str, Any]] = {}
    for event in history.of("commit"):
        for key, value, _ in event.fields["puts"]:
            if key.startswith(RECEIPTS):
                found[key] = msgspec.json.decode(value)
    return {one.get("saved", ""): one.get("writes", 0) for one in found.values()}


def check_kept(
    record: GroupLog,
    primary: Sequence[LogEntry],
    receipts: Mapping[str, int],
    *,
    sync: bool,
    at: float,
) -> list[Violation]:
    """F6-F10: no acknowledged write is lost; asynchronously, each that is lost is receipted.

    `receipts`: those in the store. One counts if it says how many writes its server saved.
    """
    findings = Findings("F8")
    kept = {entry.write: None for entry in primary}
    receipted = {
        write: None
        for when, server, writes in record.given_up
        if receipts.get(saved_at(when, server)) == len(writes)
        for write in writes
    }
    crashed = {write: None for _, _, writes in record.crashed for write in writes}
    for when, server, writes in record.copied_over:
        gone = [w for w in writes if w in record.acknowledged and w not in kept | receipted]
        if gone:
            findings.add(when, f"{server} dropped acknowledged writes {gone[0]}..{gone[-1]} by "
                               "itself, and no receipt has them")  # fmt: skip
    for write, acknowledged_at in record.acknowledged.items():
        if write in kept:
            continue
        if sync:
            findings.add(acknowledged_at, f"acknowledged write {write} is lost")
        elif write not in receipted and write not in crashed:
            findings.add(at, f"acknowledged write {write} is gone, and no receipt has it")
    return findings.violations


def check_promotions(history: History, record: GroupLog) -> list[Violation]:
    """F9: who is promoted was chosen for that epoch, has what it was chosen for, and is so once."""
    findings = Findings("F9")
    seen: dict[int, str] = {}
    for one in record.promoted:
        chosen = [
            state["chosen"]
            for at, state in states(history)
            if at <= one.at and state["phase"] == "chosen" and state["epoch"] == one.epoch
        ]
        what = f"{one.server} was promoted for epoch {one.epoch}"
        if not chosen or chosen[-1][0] != one.server:
            findings.add(one.at, f"{what}, for which {chosen[-1][0] if chosen else 'nobody'} was "
                                 "chosen")  # fmt: skip
        elif one.offset < chosen[-1][2]:
            findings.add(one.at, f"{what} with {one.offset} entries, and was chosen for "
                                 f"{chosen[-1][2]}")  # fmt: skip
        if one.epoch in seen:
            findings.add(one.at, f"{what}, and {seen[one.epoch]} was before")
        seen[one.epoch] = one.server
    return findings.violations


def check_receipts(record: GroupLog) -> list[Violation]:
    """F10: a receipt tells of what is lost, and of nothing that the next primary has."""
    findings = Findings("F10")
    for when, server, writes in record.needless:
        findings.add(when, f"{server} saved writes {writes[0]}..{writes[-1]} as lost, and its "
                           "primary has them")  # fmt: skip
    return findings.violations


def check_contents(logs: Mapping[str, Sequence[LogEntry]], at: float) -> list[Violation]:
    """F8, F9: one history has one content; a write stands in a log once."""
    findings = Findings("F9")
    names = sorted(logs)
    for name in names:
        writes = [entry.write for entry in logs[name] if entry.write > 0]
        if len(writes) != len(dict.fromkeys(writes)):
            findings.add(at, f"{name} has a write twice")
    for index, one in enumerate(names):
        for other in names[index + 1 :]:
            for offset, (mine, theirs) in enumerate(zip(logs[one], logs[other], strict=False)):
                if mine.history == theirs.history and mine.write != theirs.write:
                    findings.add(at, f"{one} and {other} have the same history and other content "
                                     f"at offset {offset}")  # fmt: skip
                    break
    return findings.violations
