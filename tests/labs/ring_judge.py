"""Judges a run of a ring by the audit log of its API server, and by what instances noted.

Writes are put in order by the resourceVersion that each of them made, so the log tells what the
object and the Leases were at each moment. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SHARD = "shard.alpha.sharding.timebertt.dev/websites"
DRAIN = "drain.alpha.sharding.timebertt.dev/websites"
TAKEN = "shardlease-controller"
LABELS = "/metadata/labels/"

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
    handed: int = 0
    """Objects that an instance let go of, for which the webhook named another one at once."""
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
    writes = sorted(_writes(entries, controlled), key=_order)
    writes = sorted([*_placed(writes, lost), *writes], key=_order)
    owners: dict[str, str] = {}
    versions: dict[str, str] = {}
    labels: dict[str, dict[str, str]] = {}
    holders: dict[str, str] = {}

    def instance_of(owner: str) -> str | None:
        """Where an owner is now; None if a write of unknown outcome may have moved it."""
        if int(versions.get(owner, "0")) in lost.get(owner, {}):
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
                verdict.handed += now != ""
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

    for version, entry in writes:
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
        # A write that changed nothing makes no version: when it came is not known.
        judged(user, before, after, f"{name} at {version}", "" if str(version) == last else owner)
    at_last = {name: found.get(SHARD, "") for name, found in labels.items()}
    verdict.owners = {name: at for name, at in at_last.items() if name not in owners}
    verdict.beside = {
        name: (at, at_last.get(owners[name], "")) for name, at in at_last.items() if name in owners
    }
    return verdict


_Lost = dict[str, dict[int, list[Entry]]]
"""Writes of which nobody knows the outcome, by the object and the version that they named."""


def _lost(entries: Iterable[Entry]) -> _Lost:
    found: _Lost = {}
    for entry in entries:
        about = entry.get("objectRef", {})
        if entry["verb"] != "patch" or about.get("resource") not in ("websites", "configmaps"):
            continue
        if entry["responseStatus"]["code"] >= 500 and (named := _version_named(entry)):
            found.setdefault(about["name"], {}).setdefault(int(named), []).append(entry)
    return found


def _placed(writes: Iterable[tuple[int, Entry]], lost: _Lost) -> Iterable[tuple[int, Entry]]:
    """Those of the lost writes that were carried out, as if they had been answered: the next write
    of the object names the version that they made. They are lost no longer."""
    latest: dict[str, tuple[int, Mapping[str, Any]]] = {}
    writes = [one for one in writes if one[1]["objectRef"]["resource"] != "leases"]
    # A write that changed nothing is answered with the version that there was.
    known = {
        (entry["responseObject"]["metadata"]["name"], version)
        for version, entry in writes
        if _version_named(entry) != str(version)
    }
    for version, entry in writes:
        made: Mapping[str, Any] = entry["responseObject"]["metadata"]
        since, was = latest.get(made["name"], (0, {}))
        latest[made["name"]] = version, made
        named = int(_version_named(entry) or 0)
        candidates = lost.get(made["name"], {})
        if not was or named <= since or since not in candidates or (made["name"], named) in known:
            continue
        # One that names a version which nobody is known to have made follows another lost one.
        chain = [one for one in sorted(candidates) if since <= one < named]
        for at, until in zip(chain, [*chain[1:], named], strict=True):
            found = candidates.pop(at)
            one = found[-1] if until < named else _explaining(found, was, made)
            given = _changed(was.get("labels") or {}, one)
            if SHARD in (made.get("labels") or {}):
                given.setdefault(SHARD, made["labels"][SHARD])  # by the webhook, at once
            was = {**was, "labels": given, "resourceVersion": str(until)}
            yield until, {**one, "responseObject": {"metadata": was}}


def _explaining(found: Sequence[Entry], was: Mapping[str, Any], made: Mapping[str, Any]) -> Entry:
    """Of several that name one version only one was carried out: one after which the object was at
    the instance that the next write saw."""

    def at(entry: Entry) -> str:
        return _changed(was.get("labels") or {}, entry).get(SHARD, "")

    seen = (made.get("labels") or {}).get(SHARD, "")
    return next((one for one in found if at(one) in ("", seen)), found[-1])


def _order(write: tuple[int, Entry]) -> tuple[int, bool]:
    """By the versions that they made; one that changed nothing follows that which made it."""
    version, entry = write
    return version, _version_named(entry) == str(version)


def _version_named(entry: Entry) -> str:
    """The version that a write was for, if it named one. Kopf does so by a JSON patch."""
    request = entry.get("requestObject")
    if isinstance(request, list):
        path = "/metadata/resourceVersion"
        return next((str(step["value"]) for step in request if step["path"] == path), "")
    named: str = request.get("metadata", {}).get("resourceVersion", "") if request else ""
    return named


def _changed(labels: Mapping[str, str], entry: Entry) -> dict[str, str]:
    request = entry["requestObject"]
    if isinstance(request, list):
        given = {
            step["path"].removeprefix(LABELS).replace("~1", "/").replace("~0", "~"): (
                None if step["op"] == "remove" else step["value"]
            )
            for step in request
            if step["path"].startswith(LABELS)
        }
    else:
        given = request["metadata"].get("labels") or {}
    merged = {**labels, **given}
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
