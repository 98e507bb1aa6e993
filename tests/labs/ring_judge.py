"""Judges a run of a ring by the audit log of its API server, and by what instances noted.

Writes are put in order by the resourceVersion that each of them made, so the log tells what the
object and the Leases were at each moment. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

SHARD = "shard.alpha.sharding.timebertt.dev/websites"
DRAIN = "drain.alpha.sharding.timebertt.dev/websites"
TAKEN = "shardlease-controller"

Entry = Mapping[str, Any]


@dataclass(slots=True)
class Verdict:
    """What was seen, so that a test can tell that there was something to judge."""

    writes: int = 0
    acts: int = 0
    drains: int = 0
    let_go: int = 0
    moved: int = 0
    assigned: int = 0
    takes: int = 0
    children: int = 0
    """Objects that others control, made by instances."""
    apart: list[str] = field(default_factory=list[str])
    """Those that were made at another instance than that of their owner."""
    owners: dict[str, str] = field(default_factory=dict[str, str])
    """Which instance each object has in the end."""
    beside: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """The same for each object that another one controls, and where that one is."""
    wrong: list[str] = field(default_factory=list[str])


def judge_audit(
    entries: Iterable[Entry], instances: Iterable[str], *, controlled: str = ""
) -> Verdict:
    """Every write to the objects and Leases of a ring, in their order; with `controlled`, to the
    objects of that kind that websites control, too."""
    verdict, names = Verdict(), frozenset(instances)
    entries = list(entries)
    lost = _lost(entries)
    owners: dict[str, str] = {}
    versions: dict[str, str] = {}
    labels: dict[str, dict[str, str]] = {}
    holders: dict[str, str] = {}

    def instance_of(owner: str) -> str | None:
        """Where an owner is now; None if a write of unknown outcome may have moved it."""
        if (owner, versions.get(owner, "")) in lost:
            return None
        return labels.get(owner, {}).get(SHARD, "")

    def judged(user: str, before: Entry, after: Entry, where: str, owner: str) -> None:
        shown = f"{where}, by {user}"
        at = instance_of(owner)
        former, now = before.get(SHARD, ""), after.get(SHARD, "")
        if user in names:
            verdict.acts += 1
            if former != user:
                verdict.wrong.append(f"{shown}: it belonged to {former or 'nobody'}")
            # One that was frozen after its check sends that write when it goes on, though its Lease
            # was taken. Its object has not changed by then, so the API server takes it.
            if owner and at not in (user, None) and holders.get(user) == user:
                verdict.wrong.append(f"{shown}: {owner} belonged to {at or 'nobody'}")
            if now != former:
                verdict.let_go += 1
                if DRAIN not in before:
                    verdict.wrong.append(f"{shown}: let go without being asked")
        elif now != former:
            if not former:
                verdict.assigned += 1
            elif owner and at != former:
                verdict.moved += 1  # after its owner
            elif holders.get(former) == former:
                verdict.wrong.append(f"{shown}: taken from {former}, which held its Lease")
            else:
                verdict.moved += 1
        elif DRAIN in after and DRAIN not in before:
            verdict.drains += 1

    for version, entry in sorted(_writes(entries, controlled), key=lambda one: one[0]):
        made: Entry = entry["responseObject"]
        name, user = made["metadata"]["name"], entry["user"]["username"]
        if entry["objectRef"]["resource"] == "leases":
            holder = (made.get("spec") or {}).get("holderIdentity") or ""
            if holder == TAKEN and holders.get(name) != TAKEN:
                verdict.takes += 1
            holders[name] = "" if entry["verb"] == "delete" else holder
            continue
        references = made["metadata"].get("ownerReferences") or ()
        owner = next((one["name"] for one in references if one.get("controller")), "")
        if entry["objectRef"]["resource"] != "websites" and not owner:
            continue
        verdict.writes += 1
        if owner:
            owners[name] = owner
        if entry["verb"] == "delete":
            labels.pop(name, None)
            continue
        before, after = labels.get(name), made["metadata"].get("labels") or {}
        labels[name], last = after, versions.get(name, "")
        versions[name] = str(version)
        if before is None:
            verdict.assigned += SHARD in after
            at = instance_of(owner)
            if owner and user in names:
                verdict.children += 1
                if at not in (user, None):
                    verdict.wrong.append(f"{name}, made by {user}: {owner} belonged to {at}")
                if SHARD in after and at is not None and after[SHARD] != at:
                    verdict.apart.append(f"{name} at {after[SHARD]}, {owner} at {at or 'nobody'}")
            continue
        between = lost.get((name, last))
        if between is not None and _version_named(entry) not in ("", last):
            # Its answer was lost, but it was carried out: this write names a later version.
            given = _changed(before, between)
            given.setdefault(SHARD, after.get(SHARD, ""))  # by the webhook, at once
            # Where the owner was at that moment is not known.
            judged(between["user"]["username"], before, given, f"{name} after {last}", "")
            before = given
        # A write that changed nothing makes no version: when it came is not known.
        judged(user, before, after, f"{name} at {version}", "" if str(version) == last else owner)
    at_last = {name: found.get(SHARD, "") for name, found in labels.items()}
    verdict.owners = {name: at for name, at in at_last.items() if name not in owners}
    verdict.beside = {
        name: (at, at_last.get(owners[name], "")) for name, at in at_last.items() if name in owners
    }
    return verdict


def _lost(entries: Iterable[Entry]) -> dict[tuple[str, str], Entry]:
    """Writes of which nobody knows the outcome, by the object and the version that they named."""
    return {
        (entry["objectRef"]["name"], _version_named(entry)): entry
        for entry in entries
        if entry["verb"] == "patch" and entry["responseStatus"]["code"] >= 500
        and entry["objectRef"].get("resource") in ("websites", "configmaps")
    }  # fmt: skip


def _version_named(entry: Entry) -> str:
    request = entry.get("requestObject")
    named: str = request.get("metadata", {}).get("resourceVersion", "") if request else ""
    return named


def _changed(labels: Mapping[str, str], entry: Entry) -> dict[str, str]:
    merged = {**labels, **(entry["requestObject"]["metadata"].get("labels") or {})}
    return {name: value for name, value in merged.items() if value is not None}


def _writes(entries: Iterable[Entry], controlled: str) -> Iterable[tuple[int, Entry]]:
    for entry in entries:
        where = entry.get("objectRef", {})
        ours = where.get("apiGroup") == "example.com" and where.get("resource") == "websites"
        here = where.get("namespace") == "default"
        lease = where.get("resource") == "leases" and here
        ours = ours or bool(controlled and where.get("resource") == controlled and here)
        wrote = entry["verb"] in ("create", "update", "patch", "delete")
        if not (wrote and (ours or lease)) or entry["responseStatus"]["code"] >= 300:
            continue
        version = entry["responseObject"].get("metadata", {}).get("resourceVersion", "")
        if version:
            yield int(version), entry


def judge_sharders(entries: Iterable[Entry], lease: str) -> tuple[int, list[str]]:
    """Writes of sharders to objects, each against who held the sharders' Lease at that moment: one
    acts at a time (KR-13). Returns how many sharders acted, and what was wrong."""
    acted: dict[str, None] = {}
    wrong: list[str] = []
    holder = ""
    for version, entry in sorted(_written(entries), key=lambda one: one[0]):
        made, user = entry["responseObject"], entry["user"]["username"]
        where = entry["objectRef"]
        if where["resource"] == "leases":
            if made["metadata"]["name"] == lease:
                gone = entry["verb"] == "delete"
                holder = "" if gone else (made.get("spec") or {}).get("holderIdentity") or ""
        elif where["resource"] == "websites" and user.startswith("sharder-"):
            acted[user] = None
            if user != holder:
                shown = f"{made['metadata']['name']} at {version}, by {user}"
                wrong.append(f"{shown}: {holder or 'nobody'} held {lease}")
    return len(acted), wrong


def _written(entries: Iterable[Entry]) -> Iterable[tuple[int, Entry]]:
    for entry in entries:
        wrote = entry["verb"] in ("create", "update", "patch", "delete")
        if not wrote or entry["responseStatus"]["code"] >= 300:
            continue
        version = (entry.get("responseObject") or {}).get("metadata", {}).get("resourceVersion", "")
        if version:
            yield int(version), entry


def judge_acts(lines: Iterable[Entry]) -> tuple[int, list[str]]:
    """Runs of two instances on one object that overlap in time, and how many runs there were."""
    runs: dict[tuple[str, str, str], tuple[float, float]] = {}
    for line in lines:
        key = (line["object"], line["instance"], line["run"])
        first, last = runs.get(key, (line["at"], line["at"]))
        runs[key] = min(first, line["at"]), max(last, line["at"])
    by_object: dict[str, list[tuple[float, float, str]]] = {}
    for (name, instance, _), (first, last) in runs.items():
        by_object.setdefault(name, []).append((first, last, instance))
    wrong: list[str] = []
    for name, found in by_object.items():
        latest: dict[str, float] = {}
        for first, last, instance in sorted(found):
            for other, ended in latest.items():
                if other != instance and ended > first:
                    wrong.append(f"{other} and {instance} at {name}, for {ended - first:.3f} s")
            latest[instance] = max(latest.get(instance, 0.0), last)
    return len(runs), wrong
